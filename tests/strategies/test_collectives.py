"""Groups of replicas: results and gradients, against what is done by hand."""

import concurrent.futures
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.replicas.collectives import Groups, Line, has_nccl
from mgpu_tf.strategies.replicas.mirrored import MirroredStrategy
from tests import clusters
from tests.jobs import groups as jobs
from tests.tiers import tiered


def close(found):
    return {name: value for name, value in found.items() if value > 1e-14}


@pytest.mark.parametrize(
    ("members", "communication"),
    tiered(
        [
            ([[2, 0], [1, 3]], "auto"),
            ([[2, 0], [1, 3]], "ring"),
            ([[0, 1], [2, 3]], "auto"),
            ([[0, 1, 2, 3]], "auto"),
            ([[0, 1, 2, 3]], "ring"),
        ],
        [([[2, 0], [1, 3]], "ring")],
    ),
    ids=str,
)
def test_in_one_process(strategies, members, communication):
    found = jobs.largest_differences(
        strategies["mirrored_x4"], members, communication
    )
    assert not close(found)


def test_three_replicas_divide_nothing_exactly(strategies):
    found = jobs.largest_differences(strategies["mirrored_x3"], [[0, 1, 2]])
    assert not close(found)


def test_a_group_of_one_has_its_own_value(strategies):
    found = jobs.largest_differences(strategies["mirrored_x2"], [[0], [1]])
    assert not close(found)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"]
)
def test_what_nccl_sends_has_the_same_bits(dtype, strategies, monkeypatch):
    """Its sum on CPUs, where TensorFlow's is a ring."""
    strategy = strategies["mirrored_x2"]
    devices = strategy.extended.worker_devices
    line = Line(strategy, devices)
    monkeypatch.setattr(line, "_communication", "nccl")
    floats = [0.0, -0.0, 1e-4, -np.inf, np.nan, 1 / 3]
    kept = tf.cast(
        [5, -7, 0] if dtype.startswith("int") else floats, tf.as_dtype(dtype)
    )
    sender = tf.Variable(kept)

    @tf.function(autograph=False)
    def sending():
        return line.send(sender, devices[0], 0, 0)

    @tf.function(autograph=False)
    def receiving():
        return line.receive(tf.shape(kept), kept.dtype, devices[1], 0, 0)

    graph = receiving.get_concrete_function().graph
    kinds = {operation.type for operation in graph.get_operations()}
    assert "CollectiveReduceV2" in kinds
    # NcclManager does not let a receive wait for the use of its memory.
    assert "CollectiveBcastRecvV2" not in kinds
    with concurrent.futures.ThreadPoolExecutor() as threads:
        threads.submit(sending)
        found = threads.submit(receiving).result(60).numpy()
    assert found.tobytes() == kept.numpy().tobytes()


@pytest.mark.full
def test_members_number_their_calls_alike_after_a_failed_trace(strategies):
    strategy = strategies["mirrored_x2"]
    groups = Groups(
        strategy, [[0, 1]], communication="ring", timeout_seconds=60.0
    )

    def step(fails):
        def on_replica():
            total = groups.all_reduce(tf.constant(1.5))
            if fails and groups.rank() == 0:
                raise ValueError("replica 0")
            return total

        return strategy.run(on_replica)

    run = tf.function(step, autograph=False)
    forget_calls = Groups.counted()
    with pytest.raises(ValueError, match="replica 0"):
        run(True)
    assert groups.calls[0] == 1  # The other may have ended before its own.
    forget_calls()
    assert groups.calls == {0: 0, 1: 0}
    local = strategy.experimental_local_results(run(False))
    assert [float(value) for value in local] == [3.0, 3.0]


def test_members_get_the_same_bits(strategies):
    strategy = strategies["mirrored_x3"]
    groups = Groups(strategy, [[2, 0, 1]])

    @tf.function
    def step():
        return strategy.run(
            lambda: groups.all_reduce(
                tf.random.stateless_normal(
                    [1000], [groups.rank(), 0], dtype=tf.float32
                )
            )
        )

    first, *others = strategy.experimental_local_results(step())
    for other in others:
        tf.debugging.assert_equal(first, other)


def test_checks_do_not_wait_for_those_of_another_replica(strategies):
    """TensorFlow runs them in the order in which they were traced."""
    strategy = strategies["mirrored_x2"]
    groups = Groups(
        strategy, [[0, 1]], communication="ring", timeout_seconds=60.0
    )

    def on_replica():
        value = tf.constant(1.0)
        for _ in range(2):
            check = tf.debugging.assert_positive(value)
            with tf.control_dependencies([check]):
                value = groups.all_reduce(value)
        return value

    found = tf.function(lambda: strategy.run(on_replica))()
    for value in strategy.experimental_local_results(found):
        assert value.numpy() == 4.0


def test_operations_leave_no_threads(strategies):
    """With a limit of time, each leaves one that sleeps until the limit."""
    strategy = strategies["mirrored_x2"]
    groups = Groups(strategy, [[0, 1]], communication="ring")

    @tf.function
    def steps(number):
        for _ in tf.range(number):
            strategy.run(lambda: groups.all_reduce(tf.constant(1.0)))

    steps(1)
    before = len(os.listdir("/proc/self/task"))
    steps(100)
    assert len(os.listdir("/proc/self/task")) < before + 50


@pytest.mark.parametrize(
    ("devices", "communication", "expected"),
    [
        (["GPU:0", "GPU:1"], "auto", True),
        (["GPU:0", "GPU:1"], "nccl", True),
        (["GPU:0", "GPU:1"], "ring", False),
        # Parts of one card: NCCL takes each once.
        (["GPU:0", "GPU:1", "GPU:2"], "auto", False),
        (["CPU:0", "CPU:1"], "auto", False),
    ],
)
def test_nccl_is_taken_between_gpus(
    devices, communication, expected, monkeypatch
):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: "01")
    assert has_nccl(devices, communication) is expected


def test_nccl_is_refused_between_others(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="CPU:0, CPU:1 on"):
        Groups(strategies["mirrored_x2"], [[0, 1]], communication="nccl")


def test_operations_are_told_to_take_nccl(strategies, monkeypatch):
    """One for each member; a hint of `auto` takes none, wherever it runs."""
    strategy = strategies["mirrored_x2"]
    monkeypatch.setattr(
        "mgpu_tf.strategies.replicas.collectives.has_nccl", lambda *_: True
    )
    groups = Groups(strategy, [[0, 1]])

    def on_replica():
        part = groups.reduce_scatter(tf.ones([4, 3]))
        return groups.all_reduce(groups.all_gather(part))

    graph = tf.function(lambda: strategy.run(on_replica))
    operations = [
        op
        for op in graph.get_concrete_function().graph.get_operations()
        if op.type.startswith("Collective")
    ]
    assert sorted(op.type for op in operations) == sorted(
        2
        * [
            "CollectiveReduceScatterV2",
            "CollectiveGatherV2",
            "CollectiveReduceV2",
        ]
    )
    hints = {op.get_attr("communication_hint") for op in operations}
    assert hints == {b"nccl"}


def test_exchanges_by_nccl_have_one_order_on_a_device(strategies, monkeypatch):
    """Those of all groups, and those that TensorFlow makes itself."""
    # As between GPUs, TensorFlow takes its collective operations.
    devices = strategies["mirrored_x2"].extended.worker_devices
    strategy = MirroredStrategy(devices, None)
    monkeypatch.setattr(
        "mgpu_tf.strategies.replicas.collectives.has_nccl", lambda *_: True
    )
    groups = [Groups(strategy, [[0, 1]]) for _ in range(2)]
    line = Line(strategy, devices)

    def on_replica():
        # None takes what another has made.
        found = [each.all_reduce(tf.ones([4])) for each in groups]
        context = tf.distribute.get_replica_context()
        found.append(context.all_reduce("sum", tf.ones([4])))
        device = devices[groups[0].rank()]
        found.append(line.receive(tf.constant([3]), tf.float32, device, 0, 0))
        return [*found, groups[0].all_gather(tf.ones([4]))]

    graph = tf.function(lambda: strategy.run(on_replica))
    operations = [
        op
        for op in graph.get_concrete_function().graph.get_operations()
        if op.type.startswith("Collective")
    ]
    orders = {}
    for op in operations:
        [token] = [each for each in op.inputs if each.dtype == tf.resource]
        orders.setdefault(token.name, []).append(op)
    assert len(orders) == 2
    for order in orders.values():
        assert len(order) == 5
        for before, after in itertools.pairwise(order):
            assert before in after.control_inputs


@pytest.mark.parametrize(
    "members", [[[0, 1]], [[0, 1], [1, 2]], [[0], [1, 2]], [[0, 1, 2, 3]]]
)
def test_each_replica_is_in_one_group(strategies, members):
    with pytest.raises(mgpu_tf.ConfigurationError, match="each replica once"):
        Groups(strategies["mirrored_x3"], members)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("groups"))
    return clusters.run_jobs(jobs, 2, folder, num_virtual_devices=2)


@pytest.mark.full
def test_across_processes(cluster):
    for found in cluster["one_after_another"]:
        assert len(found) == 3
        for differences in found.values():
            assert not close(differences)


@pytest.mark.full
def test_tensors_without_elements_are_exchanged_too(cluster):
    rows = jobs.ROWS
    expected = {
        "all_reduce": ([0, 7], [0, 7], [rows, 0], [rows, 0]),
        "all_gather": ([0, 7], [0, 7], [16, 0], [4, 0]),
        "reduce_scatter": ([0, 7], [0, 7], None, [rows, 0]),
        "all_to_all": ([0, 28], [0, 7], [1, 0], [4, 0]),
        "gather_rows": ([0, 7], [0, 7], [16, 0], [4, 0]),
    }
    for worker, found in enumerate(cluster["without_elements"]):
        assert len(found) == 20
        for case, shapes in found.items():
            kind, empty, _ = case.split()
            result, gradient = expected[kind][0 if empty == "rows" else 2 :][:2]
            ranks = range(2 * worker, 2 * worker + 2)
            results = [
                result or [rows * (r + 1) // 4 - rows * r // 4, 0]
                for r in ranks
            ]
            assert shapes == [*results, gradient, gradient], case


@pytest.mark.full
def test_who_waits_for_a_missing_member_gets_an_error(cluster):
    first, second = cluster["a_member_is_missing"]
    assert first not in ("no error", "not called")
    assert second == "not called"
