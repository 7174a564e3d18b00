"""What a scheduler says about this process, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mgpu_tf.cluster.roles import Roles, number
from mgpu_tf.errors import ClusterError

# The first port of a job's tasks, where the user chooses it.
PORT = "MGPU_TF_PORT"
# The default of TensorFlow's own examples; pods and rented nodes are alone.
DEFAULT_PORT = 2222


@dataclasses.dataclass(frozen=True)
class Place:
    """The processes of a job, and this one among them.

    Attributes:
        source: What was found, such as "Slurm job 17".
        roles: Which tasks the processes are.
        addresses: `host:port` of each process, in the order of the roles.
        index: Which of them this process is.
    """

    source: str
    roles: Roles
    addresses: tuple[str, ...]
    index: int

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """Addresses by task type."""
        rest, tasks = self.addresses, {}
        for name, count in self.roles.counts.items():
            tasks[name], rest = rest[:count], rest[count:]
        return tasks

    @property
    def task(self) -> tuple[str, int]:
        """The type of this process and its index among its type."""
        index = self.index
        for name, count in self.roles.counts.items():
            if index < count:
                return name, index
            index -= count
        raise AssertionError(f"{self.index} of {self.roles}")

    def __str__(self) -> str:
        name, index = self.task
        return (
            f"{self.source}: {self.roles}; this is {name} {index} at "
            f"{self.addresses[self.index]}"
        )


def chosen_port(environ: Mapping[str, str], default: int) -> int:
    """Returns the first port of a job's tasks.

    Args:
        environ: The environment.
        default: The port where the user has chosen none.

    Raises:
        ClusterError: The user's choice is no port.
    """
    port = number(environ, PORT, default)
    if not 1 <= port <= 65535:
        raise ClusterError(
            f"{PORT} must be 1 to 65535. Received: {PORT}={port}."
        )
    return port
