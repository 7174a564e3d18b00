"""What a replica wrote to state outside of proven calls of layers.

What layers write is proven when they are called (`layer_calls.py`). What is
left is the same on all replicas, is brought together by a declared rule, or is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.reading import Reader, Unreadable
from mgpu_tf.engine.author.rules import Rule
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError


def by_rule(
    state: ReplicaState,
    variable: keras.Variable,
    value: tf.Tensor,
    before: tf.Tensor | None,
    reader: Reader,
    share: BatchShare,
    *,
    otherwise: Callable[[keras.Variable], bool] = lambda variable: False,
) -> tf.Tensor:
    """Returns what a replica sends of a variable. On a replica.

    Args:
        state: Knows the rule.
        variable: The variable.
        value: What the step wrote to it.
        before: What it held; None where the rule is known.
        reader: Reads the step.
        share: This replica's part of the global batch.
        otherwise: Lets what has written a variable be computed from the rows of
            all replicas; returns whether it will.

    Raises:
        ConfigurationError: The replicas' values cannot become one.
        TraceAgain: They will, in another trace.
    """
    held = variable if before is None else before
    try:
        rule = state.read_rule(variable, value, before, reader)
        if rule is Rule.AGREED:
            return value
        if share.replicas > 1 and rule is Rule.SUM:
            start = tf.convert_to_tensor(held)
            value = reader.contribution(value, share, state=start)
        return share.select(value, held)
    except Unreadable as error:
        refusal = ConfigurationError(
            "What is added to a variable outside of a layer must be a sum or "
            "a mean over the rows, since replicas have their own rows. "
            f"Received: {variable.path}, which adds {error}. Add it in the "
            "call of a layer or of the model, or make it of such sums in the "
            "end, in result() of a metric."
        )
    except ConfigurationError as error:
        refusal = error
    if otherwise(variable):
        raise TraceAgain
    raise refusal


def check_plain_variables(
    known: Iterable[keras.Variable], reader: Reader, *, in_parts: bool
) -> None:
    """Refuses what a step makes of its rows for a variable of TensorFlow.

    Nobody brings such values together. Called when the step is traced.

    Args:
        known: Keras's variables that the step may write to.
        reader: Reads the step.
        in_parts: Whether it runs once for each part of a batch, so that it
            writes several times what one device writes once.

    Raises:
        ConfigurationError: The step writes to a `tf.Variable`.
    """
    if tf.executing_eagerly():
        return
    own = keras_internals.handles_of(known)
    graph = tf.compat.v1.get_default_graph()
    outside = _Outside()
    for op in graph.get_operations():
        if not (
            op.type.startswith("Assign") and op.type.endswith("VariableOp")
        ):
            continue
        handle = outside.of(op.inputs[0])
        if id(handle) in own:
            continue
        if in_parts:
            raise ConfigurationError(
                "What is computed for each part of a batch writes to a "
                "variable once for a batch, which is done for Keras's "
                "variables. Received: a tf.Variable, to which "
                f"{op.name!r} writes. Leave out step_parts; in place of a "
                "pipeline use 'mirrored' or 'fsdp'."
            )
        if reader.depends(op.inputs[1]):
            raise ConfigurationError(
                "What replicas write to a variable must be made one, which "
                "is done for Keras's variables. Received: a tf.Variable, to "
                f"which {op.name!r} writes what depends on the rows of a "
                "replica. Make it by self.add_weight(..., trainable=False)."
            )


class _Outside:
    """Finds what graphs inside of graphs have captured."""

    def __init__(self) -> None:
        self._captured: dict[Any, dict[int, Any]] = {}

    def of(self, handle: Any) -> Any:
        """Returns a tensor where no graph has captured it."""
        while tf.is_symbolic_tensor(handle):
            graph = handle.graph
            if graph not in self._captured:
                self._captured[graph] = {
                    id(inner): captured
                    for captured, inner in getattr(graph, "captures", ())
                }
            if id(handle) not in self._captured[graph]:
                break
            handle = self._captured[graph][id(handle)]
        return handle
