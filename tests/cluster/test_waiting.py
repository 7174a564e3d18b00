"""Who is missing when a cluster starts."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import time

import pytest

from mgpu_tf.cluster import waiting
from mgpu_tf.cluster.config import ClusterConfig
from tests import clusters


def listening():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server, f"127.0.0.1:{server.getsockname()[1]}"


WAITS = """
import ctypes, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from mgpu_tf.cluster import waiting
from mgpu_tf.cluster.config import ClusterConfig
cluster = ClusterConfig.from_environment()
with waiting.naming_missing(cluster, first_seconds=0.2):
    # As TensorFlow does while it waits: no thread and no handler runs.
    ctypes.PyDLL(None).pause()
"""


@contextlib.contextmanager
def waits(code, *workers):
    """A process that runs code as worker 0; it is killed at the end."""
    text = json.dumps(
        {
            "cluster": {"worker": list(workers)},
            "task": {"type": "worker", "index": 0},
        }
    )
    process = subprocess.Popen(
        [clusters.PYTHON, "-c", code],
        env=clusters.environment(TF_CONFIG=text, TF_CPP_MIN_LOG_LEVEL="3"),
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_missing_are_named_and_signals_end_it(number):
    server, here = listening()
    gone, nowhere = listening()
    gone.close()
    line = f"mgpu_tf: worker 0 waits for worker 2 at {nowhere}"
    with server, waits(WAITS, "a:1", here, nowhere) as process:
        assert process.stderr.readline().startswith(line)
        assert process.stderr.readline().startswith(line)
        process.send_signal(number)
        assert process.wait(60) == -number
        # The child ends with it: nobody holds the other end.
        assert "Traceback" not in process.stderr.read()


@pytest.fixture
def interruptible():
    """A background process of a shell ignores Ctrl-C from the beginning."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_nothing_is_told_when_all_are_there(capfd, interruptible):
    before = signal.getsignal(signal.SIGINT)
    server, here = listening()
    with server:
        cluster = ClusterConfig("worker", 0, worker=("a:1", here))
        assert waiting.missing_tasks(cluster) == []
        with waiting.naming_missing(cluster, first_seconds=0.01):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            # The child looks several times.
            time.sleep(1)
        with waiting.naming_missing(None):
            pass
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == ""


@pytest.mark.full
def test_tensorflow_waits_for_a_worker_that_never_comes():
    """TensorFlow itself; it holds Python's lock."""
    server, here = listening()
    server.close()
    code = WAITS.partition("from")[0] + (
        "import mgpu_tf; mgpu_tf.create_strategy('multi_worker_mirrored')"
    )
    with waits(code, here, "127.0.0.1:1") as process:
        lines = iter(process.stderr.readline, "")
        assert any("worker 0 waits for worker 1" in line for line in lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


@pytest.mark.full
def test_port_in_use():
    server, address = listening()
    cluster = {"worker": [address, "127.0.0.1:1"]}
    text = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    )
    with server:
        done = clusters.mgpu_tf("train", env={"TF_CONFIG": text})
    assert done.returncode == 2, done.stderr
    [line] = re.findall("mgpu-tf: The port .*", done.stderr)
    assert f"worker 0 at {address}, which another process" in line
    assert "Traceback" not in done.stderr
