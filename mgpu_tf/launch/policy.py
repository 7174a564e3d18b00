"""What a supervisor does when a task dies, as one value.

    RestartPolicy()                                   give up at once
    RestartPolicy(max_restarts=3)                     the whole job again
    RestartPolicy(max_restarts=3, unit="task")        the dead task alone
    RestartPolicy(max_restarts=3, min_workers=2)      ... then with fewer
    RestartPolicy(min_workers=2, max_workers=4)       with those that are there

The workers of a synchronous job cannot go on without one of them, so all are
started again, from the last checkpoint. The tasks of an asynchronous job can.
"""

from __future__ import annotations

import dataclasses

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import check_types

UNITS = ("job", "task")

# An attempt that lives longer than this has not failed in a row.
SETTLED_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When to start again, what, and how soon.

    Attributes:
        max_restarts: Restarts before giving up.
        unit: What is started again: "job", every task, or "task", the dead
            one alone, on its own address.
        min_workers: Where the restarts are used up, go on with one worker
            less, and as many restarts again, while that many are left. None
            gives up.
        max_workers: Go on at once with the workers that there are machines
            for, from `min_workers` (1 by default) up to this many, and with
            more when machines come back. Such a restart counts as none of
            `max_restarts`. None leaves the number as it is.
        backoff_seconds: The pause before a restart. It doubles with every
            failure in a row that came within a minute of its start.
        longest_backoff_seconds: What the pause does not exceed.

    Raises:
        ConfigurationError: A value is out of range.
    """

    max_restarts: int = 0
    unit: str = "job"
    min_workers: int | None = None
    max_workers: int | None = None
    backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_restarts < 0:
            raise ConfigurationError(
                "max_restarts must be 0 or more. Received: "
                f"max_restarts={self.max_restarts}."
            )
        if self.unit not in UNITS:
            raise ConfigurationError(
                "A restart policy restarts the 'job' or the 'task'. "
                f"Received: unit={self.unit!r}."
            )
        if self.min_workers is not None and self.min_workers < 1:
            raise ConfigurationError(
                "min_workers must be 1 or more. Received: "
                f"min_workers={self.min_workers}."
            )
        if self.max_workers is not None and self.unit == "task":
            raise ConfigurationError(
                "max_workers goes with synchronous jobs. Received: "
                f"max_workers={self.max_workers} with parameter servers, whose "
                "workers come and go by themselves. Leave max_workers out."
            )
        if not self.backoff_seconds >= 0:
            raise ConfigurationError(
                "backoff_seconds must be 0 or more. Received: "
                f"backoff_seconds={self.backoff_seconds}."
            )

    @property
    def restarts(self) -> bool:
        """Whether anything is ever started again."""
        return (
            self.max_restarts > 0
            or self.min_workers is not None
            or self.elastic
        )

    @property
    def elastic(self) -> bool:
        """Whether the number of workers follows the machines."""
        return self.max_workers is not None

    def pause_seconds(self, failures: int) -> float:
        """Returns the pause after a number of early failures in a row.

        Example:
            >>> [RestartPolicy().pause_seconds(n) for n in range(5)]
            [1.0, 1.0, 2.0, 4.0, 8.0]

        Args:
            failures: How many attempts in a row failed soon.

        Returns:
            Seconds.
        """
        pause = self.backoff_seconds * 2.0 ** min(max(failures - 1, 0), 30)
        return min(pause, self.longest_backoff_seconds)

    def may_shrink(self, num_workers: int) -> bool:
        """Returns whether the job may go on with one worker less."""
        return self.min_workers is not None and num_workers > self.min_workers
