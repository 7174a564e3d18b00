import re
import subprocess

import pytest

import mgpu_tf
from mgpu_tf import ClusterConfig, ConfigurationError
from mgpu_tf.cluster import ports
from mgpu_tf.strategies.parameter_server import StalenessOptions
from tests import clusters

WITHOUT_PS = ClusterConfig("chief", 0, chief=("a:1",), worker=("b:1",))
WITHOUT_CHIEF = ClusterConfig("worker", 0, worker=("b:1",), ps=("c:1",))
WITHOUT_WORKER = ClusterConfig("chief", 0, chief=("a:1",), ps=("c:1",))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (None, "Received: no TF_CONFIG. Start the script by `mgpu-tf launch"),
        (WITHOUT_PS, "Add 'ps'."),
        (WITHOUT_CHIEF, "Add 'chief'."),
        (WITHOUT_WORKER, "Add 'worker'."),
    ],
)
def test_a_cluster_is_needed(cluster, message, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        mgpu_tf.create_parameter_server_strategy(cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, "max_staleness must be 0 or more"),
        ({"max_staleness": 1.5}, "Received: max_staleness=1.5"),
        ({"late_gradients": "drop"}, "Valid: hold, scale."),
        ({"sample_every": 0}, "sample_every must be 1 or more"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigurationError, match=message):
        StalenessOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_virtual_devices": 2}, "takes no virtual devices"),
        ({"communication": "ring"}, "Received: communication='ring'"),
        ({"devices": [0]}, "Set CUDA_VISIBLE_DEVICES for the workers"),
    ],
)
def test_what_does_not_go_with_it(options, message):
    with pytest.raises(ConfigurationError, match=message):
        mgpu_tf.create_strategy("parameter_server", **options)


SCRIPT = """
import os, sys
import mgpu_tf
from mgpu_tf.runtime import quiet_import
quiet_import.import_tensorflow()
strategy = mgpu_tf.create_strategy("auto")
print("coordinates", mgpu_tf.is_chief(strategy), strategy.num_ps, flush=True)
if sys.argv[1:]:
    raise RuntimeError("failed")
"""


def start(tasks, *arguments):
    """Starts a process for each task, without a supervisor."""
    return [
        subprocess.Popen(
            [clusters.PYTHON, "-c", SCRIPT, *arguments],
            env=clusters.environment(
                TF_CONFIG=task.to_json(),
                TF_CPP_MIN_LOG_LEVEL="3",
                **ports.ENVIRONMENT,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in tasks
    ]


@pytest.mark.full
def test_servers_end_with_the_coordinator_unless_it_failed():
    """Nobody supervises: the coordinator dismisses, or comes back."""
    with ports.reserved(3) as numbers:
        chief, worker, ps = (f"127.0.0.1:{n}" for n in numbers)
        tasks = [
            ClusterConfig(kind, 0, chief=(chief,), worker=(worker,), ps=(ps,))
            for kind in ("worker", "ps", "chief")
        ]
        servers = start(tasks[:2])
        try:
            (failing,) = start(tasks[2:], "fail")
            output, _ = failing.communicate(timeout=clusters.LIMIT_SECONDS)
            assert failing.returncode == 1, output
            assert "coordinates True 1" in output
            assert all(server.poll() is None for server in servers)
            (again,) = start(tasks[2:])
            output, _ = again.communicate(timeout=clusters.LIMIT_SECONDS)
            assert again.returncode == 0, output
            for server in servers:
                said, _ = server.communicate(timeout=clusters.LIMIT_SECONDS)
                assert server.returncode == 0, said
                assert "coordinates" not in said
        finally:
            for server in servers:
                server.kill()
