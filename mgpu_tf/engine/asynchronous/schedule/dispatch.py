"""Handing work to the workers of a coordinator, and taking results back.

    dispatcher = Dispatcher(strategy)
    dispatcher.schedule("a", function, args)
    name, values = dispatcher.next()           # in the order of arrival

TensorFlow hands work again where a worker was lost; its result arrives once.
What is handed out arrives where it was handed out: an epoch that ends early
leaves nothing to the next one.
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.strategies.parameter_server import ParameterServerStrategy

_POLL_SECONDS = 0.5
# Of reading a result while no task is said to be lost: two minutes or more.
_MOST_TRIES = 240
# Errors of reading a result from a worker that was lost after it was made.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.NotFoundError,
    tf.errors.InvalidArgumentError,
)


class Dispatcher:
    """What one epoch or evaluation has under way on the workers.

    Args:
        strategy: The strategy; this process is its coordinator.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        # So that a worker finds the next piece when it has ended one.
        self._places = 2 * strategy.num_workers
        self._pool = concurrent.futures.ThreadPoolExecutor(self._places)
        self._arrived: queue.Queue[Any] = queue.Queue()
        self._under_way: dict[object, Any] = {}
        self._tries: dict[object, int] = {}

    @property
    def has_room(self) -> bool:
        """Whether more work would be taken up soon."""
        return len(self._under_way) < self._places

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def settle(self) -> None:
        """Waits until the workers have nothing to do, from any dispatcher.

        Raises:
            tf.errors.OpError: A function or a parameter server failed.
        """
        self.coordinator.join()

    def schedule(
        self, name: object, function: Callable[..., Any], args: Any
    ) -> None:
        """Hands out a piece of work.

        Args:
            name: Distinguishes it from the others that are under way.
            function: A `tf.function`.
            args: Its arguments; a per-worker value is that of the worker
                that takes it.
        """
        remote = self.coordinator.schedule(function, args=args)
        self._under_way[name] = remote
        self._pool.submit(self._wait, name, remote)

    def next(self) -> tuple[Any, Any]:
        """Waits for a piece of work to end.

        Returns:
            Its name, and what the function returned, as arrays.

        Raises:
            tf.errors.OpError: A function or a parameter server failed.
        """
        while True:
            try:
                name, values = self._arrived.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self.coordinator.done()  # Raises what has failed.
                continue
            if isinstance(values, BaseException):
                self._fail_unless_again(name, values)
                continue
            del self._under_way[name]
            self._tries.pop(name, None)
            return name, values

    def _fail_unless_again(self, name: object, error: BaseException) -> None:
        """Waits once more where another worker takes the work."""
        self.coordinator.done()
        self._tries[name] = tries = self._tries.get(name, 0) + 1
        if not isinstance(error, _LOST) or tries >= _MOST_TRIES:
            raise error
        time.sleep(_POLL_SECONDS)
        self._pool.submit(self._wait, name, self._under_way[name])

    def _wait(self, name: object, remote: Any) -> None:
        try:
            values = remote.fetch()
        except BaseException as error:
            values = error
        self._arrived.put((name, values))
