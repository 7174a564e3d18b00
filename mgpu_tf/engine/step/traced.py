"""What engines have in common when they trace a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.data import Source, structures
from mgpu_tf.engine.step.base import Engine
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.reports.pipeline_trace import BatchTrace, Excerpt, WeightTrace
from mgpu_tf.strategies.replicas.topology import LocalReplicas

NAMES = ("inputs", "targets", "sample_weight")


@dataclasses.dataclass
class Watch:
    """What passes through an update while a step is traced.

    Attributes:
        local: The contributions of replicas.
        received: What the optimizer gets.
    """

    local: Any = None
    received: Any = None


def excerpts(data: Any, names: tuple[str, ...] = NAMES) -> list[Excerpt]:
    """Returns excerpts of a batch of tensors.

    Args:
        data: `x`, or `(x, y, sample_weight)` as Keras takes it.
        names: The names of the three.
    """
    parts = structures.parts_of(data)
    if len(parts) == len(names):
        parts = [(n, part) for n, (_, part) in zip(names, parts, strict=True)]
    found = []
    for name, part in parts:
        leaves = [t for t in tf.nest.flatten(part) if t is not None]
        for number, leaf in enumerate(leaves):
            label = name if len(leaves) == 1 else f"{name} {number}"
            found.append(
                Excerpt.of(
                    label,
                    np.asarray(leaf),
                    leaf.device if tf.is_tensor(leaf) else "",
                )
            )
    return found


def batch_of(source: Source, index: int) -> BatchTrace:
    """Reads a global batch of the first pass, as one device would."""
    whole = LocalReplicas(0, 1, 1)
    data, _, total = next(iter(source.pass_from(0, whole, index)))
    numbers: list[int] = []
    rows = source.rows()
    if rows is not None:
        first = index * rows.batch_size
        numbers = rows.order(0)[first : first + int(total)].tolist()
    return BatchTrace(numbers, excerpts(data))


@contextlib.contextmanager
def undone(engine: Engine) -> Iterator[None]:
    """Puts back all that training changes."""
    snapshot = engine.snapshot()
    before = snapshot.held()
    engine.reset_metrics()
    try:
        yield
    finally:
        snapshot.put(before)


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Runs operations without a graph, without TensorFlow's advice on it."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


class Weights:
    """The weights of a model before and after a step.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._variables = model.trainable_variables
        self._strategy = model.distribute_strategy
        self._before = self._values()

    def changed(self) -> list[WeightTrace]:
        """Returns what they were at the beginning, and what they are."""
        return [
            WeightTrace(
                variable.path,
                [part.device for part in self._parts(variable)],
                *(
                    Excerpt.of(variable.path, value, "")
                    for value in (before, after)
                ),
            )
            for variable, before, after in zip(
                self._variables, self._before, self._values(), strict=True
            )
        ]

    def _parts(self, variable: keras.Variable) -> tuple[Any, ...]:
        return tuple(self._strategy.experimental_local_results(variable.value))

    def _values(self) -> list[np.ndarray]:
        return [
            np.array(keras.ops.convert_to_numpy(v)) for v in self._variables
        ]


def refuse_accumulation(every: int) -> None:
    """Refuses steps that end without an update."""
    if every > 1:
        raise ConfigurationError(
            "A trace shows a step that ends with an update. Received: "
            f"gradient_accumulation_steps={every}. Trace without it."
        )
