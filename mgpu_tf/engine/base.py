"""What every engine does: the one seam between the trainer and a strategy.

    feed = engine.feed(source, first=0, chain=True, training=True)
    iterator = feed.iterator(epoch, limit)
    execution = engine.train(iterator, steps, source)

The trainer, with its callbacks, `History` and progress, is the same code for
all of them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.snapshot import Snapshot, Variables
from mgpu_tf.errors import ConfigurationError

Logs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Votes:
    """What workers ask for between two executions.

    Attributes:
        save: To save the state of the run.
        end: To save it and end.
    """

    save: bool = False
    end: bool = False


NO_VOTES = Votes()


@dataclasses.dataclass(frozen=True)
class Execution:
    """What one call of the engine did.

    Attributes:
        steps: Steps done; fewer than asked for where the data ended.
        examples: Examples in those steps, over all replicas.
        logs: The metrics since they were last reset, over all replicas.
        seconds: The mean over workers of the time given to the call.
        votes: What any worker asked for in the call.
        input_seconds: What this worker waited for data, where the engine
            can tell.
        traced: Whether the call traced or compiled, where it can tell.
    """

    steps: int
    examples: int
    logs: Logs
    seconds: float
    votes: Votes = NO_VOTES
    input_seconds: float = 0.0
    traced: bool = False


class DataFeed(Protocol):
    """Where the epochs of a run read from."""

    source: Source

    def iterator(self, epoch: int, limit: int | None = None) -> Any:
        """Returns where an epoch reads from.

        Args:
            epoch: Index of the epoch.
            limit: Steps that will be asked for; None until the data ends.
        """

    def resume(self, finished: Sequence[int], step: int) -> None:
        """Goes to where a run that was broken off had read to.

        Args:
            finished: The steps of each epoch since the first.
            step: Steps of the epoch after them.
        """

    def restart(self) -> None:
        """Forgets where an epoch that was cut short has stopped."""


class Engine(abc.ABC):
    """Trains, evaluates and predicts with a compiled model on a strategy.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: A strategy.

    Raises:
        ConfigurationError: The model is not compiled, or was made elsewhere.
    """

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        _check_compiled(model, strategy)
        self._model = model
        self._strategy = strategy
        self._compiled = keras_internals.compiled_state(model)
        self._jit_compile = bool(model.jit_compile)

    def is_current(self) -> bool:
        """Returns whether the model is compiled as when this was made."""
        return self._compiled == keras_internals.compiled_state(self._model)

    @abc.abstractmethod
    def prepare(self, source: Source) -> None:
        """Creates what training and evaluation need, once.

        Args:
            source: Tells the shapes and types of a batch.
        """

    @abc.abstractmethod
    def reset_metrics(self) -> None:
        """Sets every metric of the model to its beginning."""

    @abc.abstractmethod
    def feed(
        self, source: Source, first: int = 0, *, chain: bool, training: bool
    ) -> DataFeed:
        """Returns where the epochs of a run read from.

        Args:
            source: The global batches.
            first: The first pass.
            chain: Whether every pass is read to its end, or goes on into
                the next epoch.
            training: Whether steps of training read from it.
        """

    @property
    def boundaries_matter(self) -> bool:
        """Whether it changes bits of the result where executions end."""
        return False

    @property
    def can_be_compiled(self) -> bool:
        """Whether XLA can compile steps of training; prepared engines tell."""
        return False

    def compile_steps(self, jit_compile: bool) -> None:
        """Says whether XLA compiles the steps of training that follow.

        Args:
            jit_compile: Whether; by default as the model was compiled.
        """
        self._jit_compile = jit_compile

    def staleness(self) -> list[float]:
        """Returns how late gradients were in the last epoch, where measured."""
        return []

    def snapshot(self) -> Snapshot:
        """Returns what takes and puts back all that training changes."""
        optimizers = keras_internals.optimizers_of(self._model)
        every = [
            *self._model.variables,
            *(v for optimizer in optimizers for v in optimizer.variables),
            *(v for metric in self._model.metrics for v in metric.variables),
        ]
        variables = Variables.of(every)
        return Snapshot(variables, self._strategy, stored_once=True)

    @abc.abstractmethod
    def train(
        self,
        iterator: Any,
        steps: int,
        source: Source,
        seconds: float = 0.0,
        votes: Votes = NO_VOTES,
        ahead: int | None = None,
    ) -> Execution:
        """Runs training steps.

        Args:
            iterator: From a feed.
            steps: How many steps at most.
            source: Where the iterator comes from.
            seconds: Any time of this worker; its mean over workers comes
                back, equal on all of them.
            votes: What this worker asks for; what any asks for comes back.
            ahead: How many steps may have begun when this returns, where
                that may be more than are done.

        Returns:
            What was done.
        """

    @abc.abstractmethod
    def evaluate(
        self, iterator: Any, steps: int, source: Source, seconds: float = 0.0
    ) -> Execution:
        """Runs evaluation steps; arguments and result as for `train`."""

    @abc.abstractmethod
    def predict(self, iterator: Any, source: Source) -> Any | None:
        """Runs one prediction step.

        Args:
            iterator: From a feed.
            source: Where the iterator comes from.

        Returns:
            The outputs for one global batch as arrays, in the order of its
            rows and the same on every worker; None where the data has ended.
        """

    def is_lost(self) -> bool:
        """Returns whether the variables are gone with who kept them."""
        return False

    def finish(self, iterator: Any) -> Execution:
        """Ends an epoch, however far it went.

        Args:
            iterator: What the epoch read from.

        Returns:
            What was still under way, with the logs that belong to the whole
            epoch.
        """
        del iterator
        return Execution(0, 0, {}, 0.0)

    def build_layers(self, source: Source) -> None:
        """Creates the variables of the model's layers, and nothing else."""
        if not self._model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(source.example())
            with self._strategy.scope():
                keras_internals.build_layers(self._model, x)


def _check_compiled(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            "build_model must return a compiled keras.Model. Received: "
            f"{type(model).__name__}."
        )
    if not model.compiled:
        raise ConfigurationError(
            "build_model must return a compiled model. Received: the model "
            f"{model.name!r}, not compiled. Call `model.compile(...)` before "
            "returning it."
        )
    if model.distribute_strategy is not strategy:
        raise ConfigurationError(
            "The model must be made in the strategy's scope. Received: the "
            f"model {model.name!r}, made outside. Create it inside "
            "build_model."
        )
