import logging
import subprocess
import sys

import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.registry import kind_of, topology_of
from tests import clusters

KINDS = {
    "one_device": tf.distribute.OneDeviceStrategy,
    "mirrored": tf.distribute.MirroredStrategy,
    "central_storage": tf.distribute.experimental.CentralStorageStrategy,
}


@pytest.mark.parametrize("name", KINDS)
def test_by_name(name, strategies):
    strategy = mgpu_tf.create_strategy(name)
    assert isinstance(strategy, KINDS[name])
    assert kind_of(strategy).name == name
    assert strategy.num_replicas_in_sync == 1
    assert mgpu_tf.is_chief(strategy)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("mirrored_x4", 4), ("mirrored_x2", 2), ("central_storage_x2", 2)],
)
def test_virtual_devices(name, replicas, strategies):
    strategy = strategies[name]
    assert strategy.num_replicas_in_sync == replicas
    assert topology_of(strategy).local.count == replicas
    assert topology_of(strategy).num_workers == 1


@pytest.mark.parametrize(
    ("environment", "options", "expected", "reason"),
    [
        ({}, {}, "one_device", "no GPU"),
        ({}, {"num_virtual_devices": 2}, "mirrored", "2 virtual devices"),
    ],
)
def test_auto_says_why(
    environment, options, expected, reason, strategies, caplog, monkeypatch
):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with caplog.at_level(logging.INFO, logger="mgpu_tf"):
        strategy = mgpu_tf.create_strategy("auto", **options)
    assert kind_of(strategy).name == expected
    [record] = caplog.records
    assert reason in record.message


BAD = [
    ({"name": "miror"}, "Did you mean 'mirrored'"),
    ({"name": "mirrored", "communication": "ring"}, "communicates by"),
    ({"name": "mirrored", "communication": "rong"}, "Did you mean 'ring'"),
    ({"name": "mirrored", "communication": "nccl"}, "between GPUs only"),
    (
        {"name": "mirrored", "communication": "hierarchical_copy"},
        "between GPUs only",
    ),
    (
        {
            "name": "multi_worker_mirrored",
            "communication": "hierarchical_copy",
        },
        "communicates by",
    ),
    (
        {"name": "multi_worker_mirrored", "communication": "nccl"},
        "between GPUs only",
    ),
    ({"name": "one_device", "num_virtual_devices": 2}, "no virtual devices"),
    ({"name": "one_device", "devices": 2}, "takes one device"),
    ({"name": "one_device", "devices": [0, 1]}, "takes one device"),
    ({"name": "one_device", "communication": "ring"}, "communicates by"),
    ({"name": "mirrored", "devices": 2}, "There are 0 GPUs"),
    ({"name": "mirrored", "devices": [3]}, "There are 0 GPUs"),
    ({"name": "mirrored", "devices": 0}, "1 or more"),
    ({"name": "mirrored", "devices": [0, 0]}, "each once"),
    ({"name": "mirrored", "devices": ["TPU:0"]}, "GPU by index or name"),
    (
        {"name": "mirrored", "devices": 1, "num_virtual_devices": 2},
        "There are 0 GPUs",
    ),
    ({"name": "mirrored", "num_virtual_devices": 0}, "1 or more"),
    ({"name": "mirrored", "num_virtual_devices": 64}, "first op"),
    ({"name": "tpu"}, "needs a TPU"),
]


@pytest.mark.parametrize(("arguments", "rule"), BAD)
def test_refused_in_one_line(arguments, rule, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule) as error:
        mgpu_tf.create_strategy(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", ["ps", "evaluator"])
def test_other_tasks_do_not_train(task):
    cluster = mgpu_tf.ClusterConfig(
        task_type=task,
        task_index=0,
        worker=("a:1",),
        ps=("b:1",) if task == "ps" else (),
        evaluator=("c:1",) if task == "evaluator" else (),
    )
    with pytest.raises(mgpu_tf.ClusterError, match="Only chief and worker"):
        mgpu_tf.create_multi_worker_mirrored_strategy(cluster)


@pytest.mark.full
def test_op_before_multi_worker_strategy():
    """Told in one line; in a process of its own, since it poisons it."""
    script = """
import tensorflow as tf
tf.constant(1) + 1
import mgpu_tf
cluster = mgpu_tf.ClusterConfig("worker", 0, worker=("127.0.0.1:1",))
try:
    mgpu_tf.create_multi_worker_mirrored_strategy(cluster)
except mgpu_tf.ConfigurationError as error:
    print("REFUSED", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clusters.environment(),
        capture_output=True,
        text=True,
        timeout=clusters.LIMIT_SECONDS,
        check=False,
    )
    assert "REFUSED A multi-worker strategy must be created before" in (
        done.stdout
    ), done.stderr
