"""How many workers there is room for, while a job runs with fewer.

    room = Room(lambda: machines.room(4))
    room.more_than(2, time.monotonic())     # 4 once two machines are back

A machine that comes back is seen twice before it counts, so that one whose
link flaps does not start the job again each time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from mgpu_tf.errors import ClusterError, ConfigurationError

# How long between two looks at machines that are away.
LOOK_SECONDS = 15.0


class Room:
    """Looks from time to time, beside the job.

    Args:
        look: Returns for how many workers there is room; it may take a while.
    """

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self._seen: list[int] = []
        self._thread: threading.Thread | None = None
        self._next = 0.0

    def more_than(self, workers: int, now: float) -> int:
        """Returns for how many there is room now; 0 where not for more.

        Args:
            workers: How many there are.
            now: The time of `time.monotonic`.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._next = now + LOOK_SECONDS
        if self._thread is None and now >= self._next:
            self._thread = threading.Thread(target=self._note, daemon=True)
            self._thread.start()
        least = min(self._seen) if len(self._seen) == 2 else 0
        return least if least > workers else 0

    def forget(self) -> None:
        """Begins anew, as with another number of workers."""
        self._seen = []
        self._next = time.monotonic() + LOOK_SECONDS

    def _note(self) -> None:
        # Who cannot look now looks again later.
        with contextlib.suppress(OSError, ClusterError):
            self._seen = [*self._seen[-1:], self._look()]


def check_elastic(
    num_workers: int, min_workers: int | None, max_workers: int | None
) -> None:
    """Checks how many workers a job may have.

    Args:
        num_workers: At its start.
        min_workers: At least; None for the number at the start.
        max_workers: At most; None for the number at the start.

    Raises:
        ConfigurationError: The numbers are not in this order.
    """
    if min_workers is not None and min_workers > num_workers:
        raise ConfigurationError(
            "min_workers must be num_workers or less. Received: "
            f"min_workers={min_workers}, num_workers={num_workers}."
        )
    if max_workers is not None and max_workers < num_workers:
        raise ConfigurationError(
            "max_workers must be num_workers or more. Received: "
            f"max_workers={max_workers}, num_workers={num_workers}."
        )
