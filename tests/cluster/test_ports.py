"""Reserved ports: nobody else's, until the server they are for takes them."""

import contextlib
import errno
import socket

import pytest

from mgpu_tf.cluster.ports import answers, reserved


@contextlib.contextmanager
def bound(port, *, reuse, address="127.0.0.1"):
    with socket.socket() as server:
        if reuse:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((address, port))
        yield server


def test_distinct():
    with contextlib.ExitStack() as stack:
        several = [stack.enter_context(reserved(100)) for _ in range(5)]
        numbers = [port for held in several for port in held]
        assert len(set(numbers)) == 500
        assert all(0 < port < 65536 for port in numbers)


def test_not_given_to_who_asks_for_any():
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(reserved(100))
        others = [
            stack.enter_context(bound(0, reuse=reuse))
            for reuse in (False, True)
            for _ in range(100)
        ]
        given = {server.getsockname()[1] for server in others}
        assert not given & set(held)


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_server_takes_it(address):
    with reserved(1) as (port,):
        assert not answers(f"127.0.0.1:{port}")
        with bound(port, reuse=True, address=address) as server:
            assert not answers(f"127.0.0.1:{port}")
            server.listen()
            assert answers(f"127.0.0.1:{port}")
        assert not answers(f"127.0.0.1:{port}")


def test_refused_without_reuse():
    with reserved(1) as numbers:
        with (
            pytest.raises(OSError) as caught,
            bound(*numbers, reuse=False),
        ):
            pass
        assert caught.value.errno == errno.EADDRINUSE


def test_free_after_close():
    with reserved(3) as numbers:
        pass
    free = 0
    for port in numbers:
        # Somebody else on this machine may have got one of them by now.
        with contextlib.suppress(OSError), bound(port, reuse=False):
            free += 1
    assert free
