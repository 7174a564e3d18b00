"""How often to save, so that saving and lost work together cost least.

    interval = Interval(mean_hours_between_failures=24)
    interval.note(0.8)                    # a save held up training for 0.8 s
    interval.seconds(hours=3.0, failures=1)

References:
    J. W. Young: A first order approximation to the optimum checkpoint
    interval, Communications of the ACM 17(9), 1974.
    J. T. Daly: A higher order estimate of the optimum checkpoint interval for
    restart dumps, Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import collections
import math
import statistics

# Until a save was measured.
FIRST_SECONDS = 60.0
# An interval is not shorter, however cheap a save is.
LEAST_SECONDS = 1.0
_MEASURED = 5


def best_interval(cost_seconds: float, mean_seconds: float) -> float:
    """Returns the seconds of training from a save to the next.

    Young's first order, `sqrt(2 * cost * mean)`. As in Daly's estimate, it is
    not longer than the mean time between failures.

    Example:
        >>> best_interval(cost_seconds=2.0, mean_seconds=24 * 3600)
        587.8775382679627

    Args:
        cost_seconds: The time for which a save holds up training.
        mean_seconds: The mean time between failures.
    """
    return min(math.sqrt(2 * cost_seconds * mean_seconds), mean_seconds)


class Interval:
    """The interval of a run, from what its saves and failures have cost.

    Args:
        mean_hours_between_failures: What is expected before any failure.
    """

    def __init__(self, mean_hours_between_failures: float) -> None:
        self._hours = mean_hours_between_failures
        self._costs: collections.deque[float]
        self._costs = collections.deque(maxlen=_MEASURED)
        self._first: float | None = None

    def note(self, seconds: float) -> None:
        """Notes for how long a save has held up training."""
        if self._first is None:
            self._first = seconds
        else:
            self._costs.append(seconds)

    def seconds(self, hours: float, failures: int) -> float:
        """Returns the seconds from a save to the next.

        What is expected counts like one failure that was seen: with F
        failures in T hours the mean is (expected + T) / (F + 1).

        Args:
            hours: How long the run has taken so far, restarts included.
            failures: How often it was begun again.
        """
        if self._first is None:
            return FIRST_SECONDS
        # The first save traces how values are gathered.
        costs = self._costs or [self._first]
        mean = (self._hours + hours) / (failures + 1)
        interval = best_interval(statistics.median(costs), 3600 * mean)
        return max(interval, LEAST_SECONDS)
