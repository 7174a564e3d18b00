"""The rows of a replica in parts, one after another: less memory, same numbers.

    gradients, values, logs = in_parts(step, state, 4, data, share, ...)

The loss of a global batch is a sum over its rows, so its gradient is the sum
of those of the parts. A part begins when the gradients of the part before are
there, and what that one kept for its backward pass is gone. Metrics and seeds
go from part to part, as from step to step.

Layers that take statistics of a batch, such as BatchNormalization, would take
those of a part: they are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.step.replica_step import Logs, ReplicaStep
from mgpu_tf.errors import ConfigurationError

Selected = Callable[[list[Any], BatchShare], list[Any]]


@dataclasses.dataclass(frozen=True)
class _Share(BatchShare):
    """The share of a part in the global batch."""

    def summed(self, value: tf.Tensor, needed_by: str) -> tf.Tensor:
        """Refuses a sum that is known after all parts only."""
        raise ConfigurationError(
            "A step in parts knows what all rows add up to after its last "
            f"part. Received: {needed_by}. Use a smaller batch without "
            "step_parts; for a loss also reduction='sum', or sample weights in "
            "place of masks."
        )


def in_parts(
    step: ReplicaStep,
    state: ReplicaState,
    parts: int,
    data: Any,
    share: BatchShare,
    scale: Callable[[tf.Tensor], tf.Tensor],
    gathered: Sequence[tuple[keras.Variable, tf.Tensor]],
    selected: Selected,
) -> tuple[list[Any], list[tf.Tensor], Logs]:
    """Computes the gradients of a replica part by part. On a replica.

    Args:
        step: The computation of a replica.
        state: What a step may write besides weights.
        parts: How many.
        data: The rows of this replica.
        share: The part of the global batch that they are.
        scale: Scales the loss.
        gathered: As for `ReplicaStep.gradients`.
        selected: As `SynchronousEngine._counted`.

    Returns:
        As `ReplicaStep.gradients`, with selected gradients.

    Raises:
        ConfigurationError: A layer writes state of its own, or the model has
            a `compute_metrics` that returns others.
    """
    given = {
        id(variable): (variable, value)
        for variable, value in [*state.replica_seeds(), *state.values()]
    }
    offsets = {
        id(variable): value[0] for variable, value in state.replica_seeds()
    }
    seeds = {id(variable) for variable in state.seeds}
    sums: list[Any] = []
    values: list[tf.Tensor] = []
    logs: Logs = {}
    local = tf.convert_to_tensor(share.local)
    for part in range(parts):
        first = local * part // parts
        after = local * (part + 1) // parts
        own = _rows(data, first, after, local)
        with tf.control_dependencies(_tensors(sums)):
            own = tf.nest.map_structure(
                tf.identity, own, expand_composites=True
            )
        part_share = _Share(
            after - first,
            share.total,
            share.replicas * parts,
            share.same_rows,
            None if share.low is None else share.low + first,
        )
        gradients, values, logs = step.gradients(
            own,
            part_share,
            scale,
            given=list(given.values()),
            gathered=gathered,
        )
        if logs:
            raise ConfigurationError(
                "step_parts goes with Keras's own compute_metrics. Received: "
                "a model with its own. Use a smaller batch."
            )
        gradients = selected(gradients, part_share)
        sums = _added(sums, gradients, step.alike, step.held())
        for variable, value in zip(step.written, values, strict=True):
            _check(state, variable)
            if share.low is not None and id(variable) in seeds:
                continue  # Each part draws its rows of the same numbers.
            if id(variable) in offsets:
                value = tf.stack([offsets[id(variable)], value[1]])
            given[id(variable)] = (variable, value)
    return sums, values, logs


def _rows(data: Any, first: Any, after: Any, local: tf.Tensor) -> Any:
    """Returns the rows of a part.

    What cannot be computed without a row gets another one of this replica's:
    nothing of its result is used.
    """
    return structures.rows(data, *structures.or_another(first, after, local))


def _check(state: ReplicaState, variable: keras.Variable) -> None:
    # What is not known to add up over parts, a weight too, is refused.
    add_up = {id(each) for each in (*state.metrics, *state.seeds)}
    if id(variable) not in add_up:
        raise ConfigurationError(
            "A step in parts needs layers that do not look at other rows of a "
            f"batch. Received: {variable.path}, which a layer writes in each "
            "step. Use a smaller batch, or a normalization without statistics "
            "of the batch."
        )


def _added(
    sums: list[Any],
    gradients: list[Any],
    alike: list[bool],
    variables: list[keras.Variable],
) -> list[Any]:
    if not sums:
        return gradients
    return [
        tf.maximum(one, other)
        if keras_internals.is_overwritten(variable)
        else _sum(one, other, same)
        for one, other, same, variable in zip(
            sums, gradients, alike, variables, strict=True
        )
    ]


def _sum(one: Any, other: Any, alike: bool) -> Any:
    if isinstance(one, tf.IndexedSlices) and alike:
        # All parts look up the same rows, which one device does once.
        return tf.IndexedSlices(
            one.values + other.values, one.indices, one.dense_shape
        )
    if isinstance(one, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0),
            tf.concat([one.indices, other.indices], 0),
            one.dense_shape,
        )
    return one + other


def _tensors(gradients: list[Any]) -> list[tf.Tensor]:
    return tf.nest.flatten(gradients, expand_composites=True)
