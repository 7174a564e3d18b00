"""A step of the author's own, run without writing anything.

    rehearsal = Rehearsal(model, "train_step")
    with rehearsal.caught():
        applied, values = rehearsal(data, share)

What the author hands to optimizers is caught, and what is written to
variables is dropped: it tells what the step makes of given rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import keras

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author_scope import AuthorScope
from mgpu_tf.engine.contributions import BatchShare, sharing
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.state import Writes
from mgpu_tf.strategies.mirrored import as_one_replica


@dataclasses.dataclass(frozen=True)
class Applied:
    """What an optimizer was given.

    Attributes:
        optimizer: The optimizer.
        gradients: The gradients; None where a variable has none.
        variables: Their variables.
    """

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[keras.Variable]


class Rehearsal:
    """Runs a method of a model in the graph, on one replica or outside.

    Args:
        model: A built model.
        method: "train_step" or "test_step".
    """

    def __init__(self, model: keras.Model, method: str) -> None:
        self._model = model
        self._method = method
        # Each replica is a thread of its own.
        self._here = threading.local()
        self._read: dict[int, Any] = {}

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Keeps the optimizers from applying. Outside of replicas."""
        read: dict[int, Any] = {}

        def note(
            optimizer: keras.optimizers.Optimizer,
            gradients: list[Any],
            variables: list[keras.Variable],
            by_pairs: bool,
        ) -> None:
            del by_pairs
            self._here.applied.append(Applied(optimizer, gradients, variables))

        def note_result(metric: keras.metrics.Metric, result: Any) -> None:
            del metric
            parts = result.values() if isinstance(result, dict) else [result]
            read.update({id(part): part for part in parts})

        optimizers = keras_internals.optimizers_of(self._model)
        metrics = keras_internals.metrics_of(self._model)
        self._read = read
        with (
            keras_internals.caught_by(optimizers, note),
            keras_internals.watched_metrics(
                metrics, lambda metric, values: {}, note_result
            ),
        ):
            yield

    def __call__(
        self, data: Any, share: BatchShare, given: Writes | None = None
    ) -> tuple[list[Applied], dict[str, Any]]:
        """Runs the method, within `caught`.

        Args:
            data: Rows, as the author's method gets them.
            share: What part of a batch they are.
            given: Values that variables have in place of their own.

        Returns:
            What optimizers were given, and what the method returned
            besides results of metrics.
        """
        self._here.applied = []
        with (
            AuthorScope(given or []),
            as_one_replica(),
            sharing(share, stands=True),
        ):
            values = getattr(self._model, self._method)(data)
        plain = {
            name: value
            for name, value in flat_logs(values).items()
            if id(value) not in self._read
        }
        return self._here.applied, plain
