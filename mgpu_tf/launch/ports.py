"""Free ports that stay free until the process they are for takes them.

    with ReservedPorts(2) as ports:
        ports.numbers                        # such as (40123, 40987)

Each port is bound, without listening, by a socket with SO_REUSEPORT, for as
long as the block lasts. The kernel gives it to nobody who asks for any free
port, while a server that asks for it by number and with SO_REUSEPORT gets
it; TensorFlow's does with TF_GRPC_REUSE_PORT=true.
"""

from __future__ import annotations

import socket
from types import TracebackType

ENVIRONMENT = {"TF_GRPC_REUSE_PORT": "true"}


class ReservedPorts:
    """A number of reserved TCP ports.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        for _ in range(count):
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("", 0))
            self._sockets.append(holder)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ports."""
        return tuple(s.getsockname()[1] for s in self._sockets)

    def close(self) -> None:
        """Gives the ports back."""
        for holder in self._sockets:
            holder.close()
        self._sockets.clear()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def is_listening(port: int, timeout_seconds: float = 1.0) -> bool:
    """Returns whether somebody accepts connections on a port of loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_seconds):
            return True
    except OSError:
        return False
