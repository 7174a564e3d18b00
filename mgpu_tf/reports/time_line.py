"""What each stretch of a run's time went to, in bins of one width.

    line = TimeLine()
    line.add(0.0, 2.5, {"start": 2.5})
    line.add(2.5, 3.5, {"input": 0.25, "step": 0.75})
    line.fill("other", until=4.0)

The number of bins is bounded: where the run is longer than they reach, two
become one, so that a run of a month takes the memory of a run of a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# At most; half as many after two have become one.
MOST_BINS = 128
_FIRST_WIDTH = 1 / 16


class TimeLine:
    """Seconds by kind, in bins from the beginning of a run on.

    Args:
        width: The seconds of a bin.
        bins: The seconds of each bin by kind.
    """

    def __init__(
        self,
        width: float = _FIRST_WIDTH,
        bins: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self.width = width
        self.bins = [dict(one) for one in bins]

    def as_json(self) -> dict[str, Any]:
        """Returns the time line for JSON, as this class takes it."""
        return {
            "width": self.width,
            "bins": [
                {kind: round(seconds, 6) for kind, seconds in one.items()}
                for one in self.bins
            ],
        }

    def add(self, begin: float, end: float, parts: Mapping[str, float]) -> None:
        """Adds a stretch, whose parts are spread evenly over it.

        Args:
            begin: In seconds since the run began.
            end: The same.
            parts: The seconds that it went to, by kind.
        """
        for one, seconds in self._reached(begin, end):
            for kind, size in parts.items():
                _count(one, kind, size * seconds / (end - begin))

    def fill(self, kind: str, until: float) -> None:
        """Adds what no stretch has taken, from the beginning on.

        Args:
            kind: What the time went to.
            until: In seconds since the run began.
        """
        for one, seconds in self._reached(0.0, until):
            _count(one, kind, seconds - sum(one.values()))

    def join(self, other: TimeLine, after: float) -> None:
        """Adds another time line, which began some seconds after this."""
        for place, parts in enumerate(other.bins):
            begin = after + place * other.width
            # The last bin of a run is not full.
            self.add(begin, begin + sum(parts.values()), parts)

    def _reached(
        self, begin: float, end: float
    ) -> Iterator[tuple[dict[str, float], float]]:
        """Makes room; yields each bin, and its seconds of a stretch."""
        while end > MOST_BINS * self.width:
            self.width *= 2
            self.bins = [
                _sum(self.bins[place : place + 2])
                for place in range(0, len(self.bins), 2)
            ]
        while end > len(self.bins) * self.width:
            self.bins.append({})
        for place in range(int(max(0.0, begin) / self.width), len(self.bins)):
            left = max(begin, place * self.width)
            right = min(end, (place + 1) * self.width)
            if right > left:
                yield self.bins[place], right - left


def _count(one: dict[str, float], kind: str, seconds: float) -> None:
    if seconds > 0.0:
        one[kind] = one.get(kind, 0.0) + seconds


def _sum(bins: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for one in bins for kind in one)
    return {k: sum(one.get(k, 0.0) for one in bins) for k in kinds}
