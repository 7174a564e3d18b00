"""What a replica wrote to state, made ready to be brought together.

A step on one replica has written the value of its own rows. `by_rule` returns
what the replicas send, so that a sum or a mean of these, by the rule of the
variable (`rules.py`), is the value of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.contributions import BatchShare
from mgpu_tf.engine.reading import Reader, Unreadable
from mgpu_tf.engine.rules import Rule
from mgpu_tf.engine.state import ReplicaState
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError

# What these make of a sum or of a mean is no sum any more.
_NO_SUMS = {
    *("Exp", "Expm1", "Log", "Log1p", "Max", "Min", "Pow", "Prod", "Rsqrt"),
    *("Sigmoid", "Sqrt", "Tanh"),
}


def by_rule(
    state: ReplicaState,
    variable: keras.Variable,
    value: tf.Tensor,
    before: tf.Tensor | None,
    reader: Reader,
    share: BatchShare,
    *,
    in_own_step: bool = False,
    otherwise: Callable[[keras.Variable], bool] = lambda variable: False,
) -> tf.Tensor:
    """Returns what a replica sends of a variable. On a replica.

    Args:
        state: Knows or reads the rule.
        variable: The variable.
        value: What the step wrote to it.
        before: What it held; None where the rule is known.
        reader: Reads the step.
        share: This replica's part of the global batch.
        in_own_step: Whether a step of the author's own has written it. It
            may add products of losses, which the step itself warns of.
        otherwise: Lets what has written a variable be computed of the rows of
            all replicas; returns whether it will.

    Raises:
        ConfigurationError: The replicas' values cannot become one.
        TraceAgain: They will, in another trace.
    """
    try:
        return _by_rule(
            state, variable, value, before, reader, share, in_own_step
        )
    except ConfigurationError:
        if otherwise(variable):
            raise TraceAgain from None
        raise
    except _Apart as apart:
        if otherwise(variable):
            raise TraceAgain from None
        state.warn_of_mean(variable)
        return apart.value


class _Apart(Exception):
    """What moves a variable cannot be read."""

    def __init__(self, value: tf.Tensor) -> None:
        super().__init__()
        self.value = value


def _by_rule(
    state: ReplicaState,
    variable: keras.Variable,
    value: tf.Tensor,
    before: tf.Tensor | None,
    reader: Reader,
    share: BatchShare,
    in_own_step: bool,
) -> tf.Tensor:
    rule = state.read_rule(variable, value, before, reader)
    if rule is Rule.AGREED:
        return value
    held = variable if before is None else before
    if rule is Rule.SUM:
        try:
            value = _added(value, held, reader, share)
        except Unreadable as error:
            if not in_own_step:
                _refuse_what_is_reduced(variable, reader, error)
    if rule is Rule.MEAN and before is not None:
        moved = _moved(value, before, reader, share)
        if moved is None:
            raise _Apart(share.select(value, held))
        state.adds_up(variable)
        value = moved
    return share.select(value, held)


def check_plain_variables(
    known: Iterable[keras.Variable], reader: Reader
) -> None:
    """Refuses what a step makes of its rows for a variable of TensorFlow.

    Nobody brings such values together. Called when the step is traced.

    Args:
        known: Keras's variables that the step may write to.
        reader: Reads the step.

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
        if id(handle) not in own and reader.depends(op.inputs[1]):
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


def _added(
    value: tf.Tensor, held: Any, reader: Reader, share: BatchShare
) -> tf.Tensor:
    """What a replica holds after it has added something.

    A sum over examples stays. A mean, or a constant, is added once for all
    replicas: each has its share of it.

    Raises:
        Unreadable: It cannot be read what was added.
    """
    if share.replicas == 1:
        return value
    return reader.contribution(value, share, state=tf.convert_to_tensor(held))


def _refuse_what_is_reduced(
    variable: keras.Variable, reader: Reader, error: Unreadable
) -> None:
    """Refuses what was made of a sum or a mean, such as its root.

    What is made of each row by itself, and added up after that, is a sum over
    the rows, whatever it is.
    """
    if error.op is None or error.op.type not in _NO_SUMS:
        return
    (made,) = error.op.outputs
    if reader.depends(made) and not reader.has_rows(made):
        raise ConfigurationError(
            "What is added to a variable must be a sum or a mean over the "
            "rows, since replicas have their own rows. Received: "
            f"{variable.path}, which adds {error}. Make it of such sums in "
            "the end: in result() of a metric, or in the call that reads it."
        )


def _moved(
    value: tf.Tensor, before: tf.Tensor, reader: Reader, share: BatchShare
) -> tf.Tensor | None:
    """What a replica holds after it has moved something, to be added up.

    Such as a moving average of means, or of sums, over the rows. What was
    there before is the same on all replicas, and counts once.

    Returns:
        None where it cannot be read what was averaged.
    """
    if share.replicas == 1 or not value.dtype.is_floating:
        return None
    try:
        part = reader.contribution(value, share)
    except Unreadable:
        return None
    return before + part - before * share.fraction(before.dtype)
