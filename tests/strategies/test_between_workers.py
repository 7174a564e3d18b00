"""How workers with GPUs exchange, with GPUs that are made up.

tests/gpu has the same on a real one.
"""

import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.strategies import synchronous
from mgpu_tf.strategies.replicas import mirrored

GPU = ["GPU:0"]


def cluster(*hosts):
    addresses = tuple(f"{host}:{2000 + i}" for i, host in enumerate(hosts))
    return ClusterConfig(worker=addresses, task_type="worker", task_index=0)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["one"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("asked", "hosts", "devices", "names", "chosen"),
    [
        ("auto", ("a", "b"), None, GPU, "nccl"),
        ("auto", ("a", "b"), None, ["CPU:0"], "auto"),
        ("ring", ("a", "b"), None, GPU, "ring"),
        ("auto", ("a", "a"), None, GPU, "ring"),
        ("nccl", ("a", "a"), None, GPU, "nccl"),
        ("auto", ("a", "a"), [0], GPU, "nccl"),
        ("auto", ("a", "b"), [0], ["GPU:0", "GPU:1"], "ring"),
    ],
)
def test_auto_is_nccl_where_it_works(asked, hosts, devices, names, chosen):
    found = synchronous.between_workers(asked, cluster(*hosts), devices, names)
    assert found == chosen


def test_workers_that_each_see_their_own(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    arguments = cluster("a", "a"), None, GPU
    assert synchronous.between_workers("auto", *arguments) == "nccl"
    assert not caplog.text


def test_workers_that_share_a_gpu_are_named(caplog):
    with caplog.at_level("WARNING", logger="mgpu_tf"):
        synchronous.between_workers("auto", cluster("a", "a"), None, GPU)
    assert "2 workers of this machine take the same GPUs" in caplog.text


@pytest.mark.parametrize("communication", ["nccl", "ring"])
def test_tensorflow_hears_of_nccl(communication):
    """Without it a reduce-scatter of a second worker is not found."""
    strategy = mirrored.MultiWorkerMirroredStrategy(
        None, synchronous.collective_options(communication), 1
    )
    config = tf.compat.v1.ConfigProto()
    found = strategy.extended._update_config_proto(config)
    assert found.experimental.collective_nccl == (communication == "nccl")


def test_tensorflow_keeps_no_numbers_of_collectives(strategies):
    """It keeps a tensor of each Python integer, and of no other."""
    assert "mirrored_x2" in strategies  # The CPU has parts.
    strategy = mirrored.MultiWorkerMirroredStrategy(
        None, synchronous.collective_options("ring"), 2
    )
    held = []
    keys = strategy.extended._collective_keys
    give = keys.get_instance_key

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.constant(2.0))

        return strategy.run(on_replica)

    keys.get_instance_key = lambda *of: held.append(give(*of)) or held[-1]
    for _ in range(3):
        step()
    assert held and not any(isinstance(number, int) for number in held)


def test_initial_values_go_between_hosts(strategies, monkeypatch):
    """Of a replica on any device: NCCL's receives do not wait for its use."""
    device = strategies["mirrored_x2"].extended.worker_devices[1]
    given = []

    def broadcast(self, replica, device, primary, **options):
        given.append(device)
        return lambda: options["initial_value"] + 1.0

    monkeypatch.setattr(
        collective_all_reduce_strategy.CollectiveAllReduceExtended,
        "_get_variable_creator_initial_value",
        broadcast,
    )
    extended = object.__new__(mirrored.MultiWorkerExtended)
    value = extended._get_variable_creator_initial_value(
        0, device, None, initial_value=2.0
    )
    assert value().numpy() == 3.0
    assert device.endswith("device:CPU:1")
    assert [name[-12:] for name in given] == ["device:CPU:0"]
