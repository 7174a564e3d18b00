"""How often steps took how long, in bins that grow with the time.

    times = Distribution()
    times.note(0.012, steps=10)
    times.as_json()["p99"]

A bin ends 4.4% above its beginning, so that a percentile is known that well,
whatever the steps take. There are at most some hundred bins.
"""

from __future__ import annotations

import math
from typing import Any

# Bins for each doubling of the time, and what they reach from and to.
_EACH = 16
_LEAST, _MOST = 1e-7, 1e5
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Distribution:
    """Counts of steps, by what they took."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._least, self._most = math.inf, 0.0
        self._executions = 0

    def note(self, seconds: float, steps: int) -> None:
        """Counts some steps.

        Args:
            seconds: What each of them took.
            steps: How many they are.
        """
        bounded = min(max(seconds, _LEAST), _MOST)
        place = math.floor(_EACH * math.log2(bounded))
        self._bins[place] = self._bins.get(place, 0) + steps
        self._least = min(self._least, bounded)
        self._most = max(self._most, bounded)
        self._executions += 1

    def as_json(self) -> dict[str, Any] | None:
        """Returns the counts for JSON; None where there are none.

        The result has `steps`, `executions`, the seconds `least`, `p50`,
        `p90`, `p99` and `most`, and `bins`: from, to, steps.
        """
        if not self._bins:
            return None
        places = sorted(self._bins)
        return {
            "steps": sum(self._bins.values()),
            "executions": self._executions,
            "least": self._least,
            **{name: self._at(part) for name, part in PERCENTILES.items()},
            "most": self._most,
            "bins": [
                [2 ** (n / _EACH), 2 ** ((n + 1) / _EACH), self._bins[n]]
                for n in places
            ],
        }

    def _at(self, part: float) -> float:
        """Returns the time that a part of the steps is not above."""
        left = part * sum(self._bins.values())
        for place in sorted(self._bins):
            steps = self._bins[place]
            if left <= steps:
                break
            left -= steps
        seconds = float(2 ** ((place + left / steps) / _EACH))
        return min(max(seconds, self._least), self._most)
