"""What a replica wrote to state outside of proven calls of layers.

What layers write is proven when they are called (`layer_calls.py`). What is
left is the same on all replicas, is brought together by a declared rule, or is
refused.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

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
