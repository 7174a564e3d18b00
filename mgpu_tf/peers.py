"""What the workers of a cluster tell each other beside their steps.

    peers = Peers(strategy)
    with peers.together():                     # one fails, all end with it
        with peers.same_variables():           # the model, while it is built
            model = build_model()
        peers.compare("fit", {"epochs": "3"})  # the arguments
        peers.any(stop)                        # a decision of one for all

Facts and failures go through the cluster's coordination service, which
reaches a worker that waits in a collective; decisions are a collective.
With one process nothing is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from mgpu_tf.data.part import part_of
from mgpu_tf.errors import ConfigurationError, WorkerError

# How long one look for a message waits before failures are looked for.
_LOOK_MILLISECONDS = 2000
_FAILURE = "mgpu_tf/failure"


class Peers:
    """The other workers of a synchronous strategy.

    Args:
        strategy: The strategy; every process of it makes this object.
    """

    # Messages are numbered; all workers send them in the same order.
    _numbers = itertools.count()

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        part = part_of(strategy)
        self._strategy = strategy
        self._local = part.local
        self._worker = part.first // part.local
        self._workers = part.total // part.local
        self._sum = tf.function(self._sum_over_replicas, autograph=False)

    @property
    def alone(self) -> bool:
        """Returns whether there is no other process."""
        return self._workers == 1

    def compare(self, call: str, facts: Mapping[str, str]) -> None:
        """Checks that all workers make the same call with the same facts.

        Args:
            call: What is called.
            facts: By name, what must be the same everywhere.

        Raises:
            ConfigurationError: This worker differs from worker 0.
        """
        if self.alone:
            return
        first = self._of_first({"call": call, **facts})
        for name, value in {"call": call, **facts}.items():
            if first.get(name) != value:
                self._differ(name, first.get(name, "nothing"), value)

    @contextlib.contextmanager
    def same_variables(self) -> Iterator[None]:
        """Checks that all workers make the same variables in this block."""
        if self.alone:
            yield
            return
        counter = itertools.count()

        def check(described: str) -> None:
            number = next(counter)
            first = self._of_first({"variable": described})
            if first.get("variable") != described:
                self._differ(
                    f"model (its variable number {number})",
                    first.get("variable", "another call"),
                    described,
                )

        def creator(make: Callable[..., Any], **options: Any) -> Any:
            initial = options["initial_value"]

            def checked() -> Any:
                value = initial() if callable(initial) else initial
                shape = list(np.shape(value))
                check(f"{options.get('name')} of shape {shape}")
                return value

            return make(**options | {"initial_value": checked})

        with tf.variable_creator_scope(creator):
            yield
        check("none")

    def any(self, flag: bool) -> bool:
        """Returns whether a flag is set on any worker."""
        if self.alone:
            return flag
        return float(self._sum(tf.constant(float(flag)))) > 0

    def of_first(self, value: int) -> int:
        """Returns the value that worker 0 has given."""
        if self.alone:
            return value
        return int(self._of_first({"value": str(value)})["value"])

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ends all workers with the first exception that one of them has.

        Raises:
            ConfigurationError: Another worker had one.
            WorkerError: Another worker failed in another way.
        """
        if self.alone:
            yield
            return
        try:
            yield
        except WorkerError:
            raise
        except Exception as error:
            mistake = _mistake_behind(error)
            if mistake is not None:
                self._tell(mistake)
                raise mistake from None
            told = self._failure()
            if told is None:
                self._tell(error)
                raise
            kind, message = json.loads(told)
            if kind == "configuration":
                raise ConfigurationError(message) from None
            raise WorkerError(message) from None

    def _of_first(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Returns what worker 0 has sent in the place of these facts."""
        key = f"mgpu_tf/facts/{next(self._numbers)}"
        service = tf_context.context()
        if self._worker == 0:
            service.set_config_key_value(key, json.dumps(dict(facts)))
            return dict(facts)
        while True:
            try:
                text = service.get_config_key_value(key, _LOOK_MILLISECONDS)
            except tf.errors.DeadlineExceededError:
                if self._failure() is not None:
                    raise
            else:
                return dict(json.loads(text))

    def _differ(self, name: str, first: str, mine: str) -> None:
        raise ConfigurationError(
            f"All workers must have the same {name}. Received: {first} on "
            f"worker 0, {mine} on worker {self._worker}. Start all workers "
            "with the same script, flags and data."
        )

    def _failure(self) -> str | None:
        try:
            text = tf_context.context().get_config_key_value(_FAILURE, 100)
        except tf.errors.OpError:
            return None
        return str(text)

    def _tell(self, error: Exception) -> None:
        """Leaves the failure where the others look, and wakes them."""
        described = f"worker {self._worker}: {type(error).__name__}: {error}"
        message = ("failure", described)
        if isinstance(error, ConfigurationError):
            message = ("configuration", str(error))
        service = tf_context.context()
        with contextlib.suppress(tf.errors.OpError):
            service.set_config_key_value(_FAILURE, json.dumps(message))
            service.report_error_to_cluster(
                tf.errors.ABORTED, described.splitlines()[0]
            )

    def _sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        def on_replica(value: tf.Tensor) -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce("sum", tf.identity(value))

        sums = self._strategy.run(on_replica, args=(value,))
        return self._strategy.experimental_local_results(sums)[0]


def _mistake_behind(error: BaseException | None) -> ConfigurationError | None:
    """Returns the mistake that Keras may have wrapped into its own error."""
    while error is not None:
        if isinstance(error, ConfigurationError):
            return error
        error = error.__cause__ or error.__context__
    return None
