"""How many steps go into one execution of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from mgpu_tf.engine.base import Execution


class Pace:
    """How many steps go into the next execution.

    All workers must ask for the same number. They do, because the number
    follows from times that the engine averaged over them.
    """

    TARGET_SECONDS = 0.5
    MOST_STEPS = 5000

    # Where the number must not depend on time.
    EXACT_STEPS = 10

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self.steps = fixed or 1
        self.seconds = 0.0
        self._timed = 0
        self._calls = 0

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
        if self._fixed is None and self._calls > 2 and result.seconds > 0:
            per_step = result.seconds / before
            fitting = int(self.TARGET_SECONDS / per_step)
            most = min(8 * self.steps, self.MOST_STEPS)
            self.steps = max(1, min(fitting, most))
        return result
