"""How late gradients are: a bound that scheduling keeps, and what was seen.

The staleness of a gradient is the number of updates that others made between
the reading of the weights and its own update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

PREFIX = "staleness_"


@dataclasses.dataclass
class _Piece:
    steps: int
    others: int


class Admission:
    """Which work may be handed out without a gradient coming too late.

    A piece of work that is under way can be overtaken by all the steps that
    were under way when it was handed out, and by all that are handed out
    before it ends. As long as neither sum passes the limit, no gradient of
    it is later than that.

    Example:
        >>> admission = Admission(limit=1)
        >>> admission.admit("a", 1), admission.admit("b", 1)
        (True, True)
        >>> admission.admit("c", 1)        # would make "a" 2 late
        False
        >>> admission.release("a"), admission.admit("c", 1)
        (None, False)                      # and now "b" 2 late

    Args:
        limit: The largest staleness; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._pieces: dict[object, _Piece] = {}

    def admit(self, name: object, steps: int) -> bool:
        """Notes a piece of work as under way, where it may be.

        Args:
            name: Distinguishes it from the others.
            steps: Updates that it will make.

        Returns:
            Whether it may be handed out.
        """
        others = sum(piece.steps for piece in self._pieces.values())
        if self._limit is not None and self._pieces:
            latest = max(piece.others for piece in self._pieces.values())
            if max(others, latest + steps) > self._limit:
                return False
        for piece in self._pieces.values():
            piece.others += steps
        self._pieces[name] = _Piece(steps, others)
        return True

    def release(self, name: object) -> None:
        """Notes that a piece of work has ended."""
        del self._pieces[name]


class StalenessRecord:
    """The staleness that was measured in an epoch."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, values: Iterable[float]) -> None:
        """Adds measured values, one for each gradient."""
        self._values.extend(values)

    @property
    def values(self) -> list[float]:
        """What was measured, in the order of arrival."""
        return list(self._values)

    def logs(self) -> dict[str, float]:
        """Returns mean, median, 95th percentile and maximum by name."""
        if not self._values:
            return {}
        values = np.asarray(self._values)
        return {
            f"{PREFIX}mean": float(values.mean()),
            f"{PREFIX}p50": float(np.percentile(values, 50)),
            f"{PREFIX}p95": float(np.percentile(values, 95)),
            f"{PREFIX}max": float(values.max()),
        }
