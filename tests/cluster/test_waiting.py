"""Who is missing when a cluster starts."""

import json
import logging
import re
import socket
import threading

from mgpu_tf.cluster import waiting
from mgpu_tf.cluster.config import ClusterConfig
from tests import clusters


def listening():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server, f"127.0.0.1:{server.getsockname()[1]}"


def test_the_missing_are_named(caplog):
    server, here = listening()
    gone, nowhere = listening()
    gone.close()
    cluster = ClusterConfig("worker", 0, worker=("a:1", here, nowhere))
    told = threading.Event()
    caplog.set_level(logging.WARNING, "mgpu_tf")
    caplog.handler.addFilter(lambda record: told.set() or True)
    with server, waiting.told_of_missing(cluster, first_seconds=0.01):
        assert told.wait(60)
    assert caplog.messages[0] == f"worker 0 waits for worker 2 at {nowhere}"


def test_nothing_is_told_when_all_are_there(caplog):
    server, here = listening()
    with server:
        cluster = ClusterConfig("worker", 0, worker=("a:1", here))
        assert waiting.missing_tasks(cluster) == []
        with waiting.told_of_missing(None):
            pass
    assert caplog.messages == []


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
