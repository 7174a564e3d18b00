"""An address at which there is no Ray cluster ends in one line, and soon."""

import socket
import time

import pytest

from mgpu_tf.errors import ClusterError, ConfigurationError
from mgpu_tf.launch import ray


@pytest.mark.parametrize("where", ["", "a", "1.2.3.999:1", "ray://", "a:1:2"])
def test_no_address(where):
    with pytest.raises(ConfigurationError, match="HOST:PORT of a Ray cluster"):
        ray.check_alive(where)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_nobody_answers(scheme):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        where = f"{scheme}127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ClusterError, match="needs a Ray cluster") as error:
            ray.check_alive(where, 1.0)
    assert "\n" not in str(error.value)


def test_somebody_answers_who_is_not_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterError, match="no Ray answers within 2 s"):
            ray.check_alive(where, 2.0)
    assert time.monotonic() - began < 60
