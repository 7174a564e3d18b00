"""Which checkpoints are kept beside the newest: the best, and some for good.

    best = Best(2, "val_loss", "min")
    why_kept(whole, newest=3, best=best)     # {40: "best 2 by val_loss (0.31)"}

The manifest of a checkpoint has all that this is decided by: its scores, what
the run keeps, whether it is kept for good, and since when none was. So a run
that resumes decides as one that was not broken off, and a later run with other
options knows what an earlier one keeps for good. This module does not import
TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.names import MODES, KeepIf
from mgpu_tf.user_function import load_function

_log = logging.getLogger("mgpu_tf")

# The fields of a state.
KEEPING = "keeping"
SCORES = "scores"


class Saved(Protocol):
    """A checkpoint that is whole."""

    @property
    def step(self) -> int:
        """Returns the global step that it holds."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Returns what JSON can hold."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoints that are best by a metric.

    Attributes:
        count: How many of them are kept.
        monitor: The name of the metric.
        mode: Which values are best, "min" or "max".
    """

    count: int
    monitor: str
    mode: str

    def ranked(self, whole: Sequence[Saved]) -> list[tuple[int, float]]:
        """Returns step and score of the best, of equal ones the earliest.

        Args:
            whole: The checkpoints to choose from. Those without a finite
                score are left out.
        """
        scores = [(each.step, _score(each, self.monitor)) for each in whole]
        known = [(step, score) for step, score in scores if score is not None]
        sign = 1 if self.mode == "min" else -1
        known.sort(key=lambda one: (sign * one[1], one[0]))
        return known[: self.count]


@dataclasses.dataclass(frozen=True)
class ForGood:
    """What a run has kept for good so far.

    Attributes:
        steps: The step of the last one that was kept by steps.
        seconds: The time of the run at the last one that was kept by time.
        kept: The step of the last one, by any rule.
        why: Why that one was kept.
    """

    steps: int = 0
    seconds: float = 0.0
    kept: int = -1
    why: str = ""

    def after(
        self,
        step: int,
        seconds: float,
        every_steps: int | None,
        every_hours: float | None,
        wanted: str = "",
    ) -> ForGood:
        """Returns the same after another save; `kept` is its step if it stays.

        Args:
            step: The global step.
            seconds: The time of the run, its restarts included.
            every_steps: Of each span of this many steps the first is kept.
            every_hours: The first that many hours after the last is kept.
            wanted: Why it is kept whatever the others say; "" where it is not.
        """
        if step == self.kept:
            return self  # It is saved again.
        found = self
        if every_steps and step // every_steps > self.steps // every_steps:
            why = f"every {every_steps} steps"
            found = dataclasses.replace(found, steps=step, kept=step, why=why)
        if every_hours and seconds - self.seconds >= 3600 * every_hours:
            why = f"every {every_hours:g} hours"
            found = dataclasses.replace(
                found, seconds=seconds, kept=step, why=why
            )
        if wanted:
            found = dataclasses.replace(found, kept=step, why=wanted)
        return found


class Wanted:
    """What a function of the user's keeps for good.

    Args:
        keep_if: Takes the global step, and the logs of the epoch that ends
            there, which are empty within an epoch; or its name,
            `package.module:function`. None keeps nothing.

    Raises:
        ConfigurationError: There is no such function, or it takes other
            arguments.
    """

    def __init__(self, keep_if: KeepIf) -> None:
        if isinstance(keep_if, str):
            keep_if = load_function(keep_if, "keep_if")
        if keep_if is not None:
            _check_arguments(keep_if)
        self._keep_if = keep_if

    def why(self, step: int, logs: Mapping[str, float]) -> str:
        """Returns why a checkpoint stays, "" where it need not.

        One about which the function raises stays: nothing is lost by it.
        """
        if self._keep_if is None:
            return ""
        name = getattr(self._keep_if, "__name__", type(self._keep_if).__name__)
        try:
            return f"keep_if={name}" if self._keep_if(step, dict(logs)) else ""
        except Exception as error:
            _log.warning(
                "keep_if=%s failed at step %d (%r); the checkpoint is kept",
                *(name, step, error),
            )
            return f"keep_if={name}, which failed"


def _check_arguments(keep_if: Callable[..., Any]) -> None:
    try:
        taken = inspect.signature(keep_if)
    except ValueError:
        return  # Some built-in ones have none.
    try:
        taken.bind(0, {})
    except TypeError:
        raise ConfigurationError(
            "keep_if must be a function of the step and of the logs. "
            f"Received: one of {taken}. Write it as keep_if(step, logs)."
        ) from None


def as_state(newest: int, best: Best | None, so_far: ForGood) -> dict[str, Any]:
    """Returns what a checkpoint says of what is kept.

    Args:
        newest: How many of the newest the run keeps.
        best: Which of the best.
        so_far: Which for good.
    """
    return {
        "newest": newest,
        "best": None if best is None else dataclasses.asdict(best),
        "for_good": dataclasses.asdict(so_far),
    }


def newest_of(state: Mapping[str, Any]) -> int:
    """Returns how many of the newest a run keeps, 0 where that is unknown."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return int(state[KEEPING]["newest"])
    return 0


def best_of(state: Mapping[str, Any]) -> Best | None:
    """Returns which of the best a run keeps, None for none."""
    with contextlib.suppress(KeyError, TypeError):
        best = Best(**state[KEEPING]["best"])
        if isinstance(best.count, int) and best.mode in MODES:
            return best
    return None


def for_good_of(state: Mapping[str, Any]) -> ForGood:
    """Returns which a run has kept for good so far."""
    with contextlib.suppress(KeyError, TypeError):
        return ForGood(**state[KEEPING]["for_good"])
    return ForGood()


def why_kept(
    whole: Sequence[Saved], newest: int, best: Best | None
) -> dict[int, str]:
    """Returns the steps of the checkpoints that stay, and why.

    Args:
        whole: The checkpoints of a folder that are whole, the newest last.
        newest: How many of the newest stay.
        best: Which of the best stay.
    """
    why: dict[int, list[str]] = {}
    for each in whole[-newest:] if newest else ():
        why.setdefault(each.step, []).append(f"newest {newest}")
    for step, score in best.ranked(whole) if best else ():
        assert best is not None
        reason = f"best {best.count} by {best.monitor} ({score:.6g})"
        why.setdefault(step, []).append(reason)
    for each in whole:
        so_far = for_good_of(each.state)
        if so_far.kept == each.step:
            reason = f"for good, {so_far.why}"
            why.setdefault(each.step, []).append(reason)
    return {step: "; ".join(words) for step, words in why.items()}


def _score(each: Saved, monitor: str) -> float | None:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        score = float(each.state[SCORES][monitor])
        return score if math.isfinite(score) else None
    return None
