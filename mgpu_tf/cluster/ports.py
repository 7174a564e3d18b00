"""Free ports that stay free until the process they are for takes them.

    with reserved(2) as numbers:
        numbers                        # such as (40123, 40987)

Each port is bound, without listening, by a socket with SO_REUSEPORT, for as
long as the block lasts. The kernel gives it to nobody who asks for any free
port, while a server that asks for it by number and with SO_REUSEPORT gets
it; TensorFlow's does with TF_GRPC_REUSE_PORT=true.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

ENVIRONMENT = {"TF_GRPC_REUSE_PORT": "true"}


@contextlib.contextmanager
def reserved(count: int) -> Iterator[tuple[int, ...]]:
    """Reserves TCP ports while the block lasts.

    Args:
        count: How many.
    """
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("", 0))
        yield tuple(holder.getsockname()[1] for holder in holders)


def answers(address: str, timeout_seconds: float = 1.0) -> bool:
    """Returns whether somebody accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    target = (host.strip("[]"), int(port))
    try:
        with socket.create_connection(target, timeout_seconds):
            return True
    except OSError:
        return False
