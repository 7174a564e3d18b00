"""How many steps go into one execution of the engine, and done in which way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mgpu_tf.engine.step.base import Execution

_log = logging.getLogger("mgpu_tf")


class Trial:
    """Finds out by training steps whether XLA makes them faster.

    Executions of the training are done either way in turn, and the way whose
    best is less stays. The first of those that are compiled is left out, for
    it is traced and compiled in that time.

    Args:
        choose: Called with whether the next execution is to be compiled.
    """

    ROUNDS = 3

    def __init__(self, choose: Callable[[bool], None]) -> None:
        self._choose = choose
        ways: list[bool | None] = [False, True] * self.ROUNDS
        # The time of an execution is known when the next one has ended.
        measured = [None, None, None, *ways]
        chosen = [True, *ways, False, None]
        self._plan = list(zip(measured, chosen, strict=True))
        self._best = {False: float("inf"), True: float("inf")}

    @property
    def over(self) -> bool:
        """Returns whether it is decided."""
        return not self._plan

    def note(self, seconds: float) -> None:
        """Chooses how the next execution is done.

        Args:
            seconds: What a step took in the execution before the one that
                has just ended; equal on all workers.
        """
        measured, way = self._plan.pop(0)
        if measured is not None:
            self._best[measured] = min(self._best[measured], seconds)
        if way is None:
            way = self._best[True] < self._best[False]
            _log.info(
                "jit_compile='auto': a step takes %.3g ms compiled by XLA and "
                "%.3g ms as it is; it is %s",
                1e3 * self._best[True],
                1e3 * self._best[False],
                "compiled" if way else "not compiled",
            )
        self._choose(way)


class Pace:
    """How many steps go into the next execution.

    All workers must ask for the same number. They do, because the number
    follows from times that the engine averaged over them.

    Args:
        fixed: The number of steps, where it does not depend on time.
        trial: Done as soon as the number is settled.
        steps_per_execution: By which callbacks count, where an author has
            set it.
    """

    TARGET_SECONDS = 0.5
    MOST_STEPS = 5000

    # Where the number must not depend on time.
    EXACT_STEPS = 10

    def __init__(
        self,
        fixed: int | None,
        trial: Trial | None = None,
        *,
        steps_per_execution: int | None = None,
    ) -> None:
        self._fixed = fixed
        self._counted = steps_per_execution or 1
        self._trial = trial
        self.steps = fixed or 1
        self.seconds = 0.0
        self._timed = 0
        self._calls = 0

    def wanted(self, done: int) -> int:
        """Returns how many steps come before callbacks do.

        A save between two steps, or the end of a run, moves no callback.

        Args:
            done: Steps of the epoch that are done.
        """
        return self.steps - done % (self._fixed or 1)

    def is_over(self, done: int) -> bool:
        """Returns whether callbacks come after so many steps of an epoch."""
        return done % (self._fixed or 1) == 0

    def last(self, done: int) -> int:
        """Returns the index of the last step, for callbacks.

        It is that of a whole execution, as Keras counts, though the data may
        end within it.

        Args:
            done: Steps of the epoch that are done.
        """
        return -(-done // self._counted) * self._counted - 1

    def time(
        self, execute: Callable[[int], Execution], steps: int
    ) -> Execution:
        """Runs an execution and settles the size of the next one.

        The mean time that comes back belongs to the call before; the time
        of the first call is dropped, since it traces the function.
        """
        started = time.perf_counter()
        result = execute(steps)
        before = self._timed
        self._timed = steps
        self.seconds = time.perf_counter() - started
        self._calls += 1
        if self._calls > 2 and result.seconds > 0:
            self._settle(result.seconds / before)
        return result

    def _settle(self, per_step: float) -> None:
        most = min(8 * self.steps, self.MOST_STEPS)
        fitting = max(1, int(self.TARGET_SECONDS / per_step))
        settled = self._fixed is not None or min(fitting, most) < 2 * self.steps
        if self._trial is not None and not self._trial.over and settled:
            self._trial.note(per_step)
        elif self._fixed is None:
            self.steps = min(fitting, most)
