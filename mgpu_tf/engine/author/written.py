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
from mgpu_tf.engine.author.rules import (
    Rule,
    kind_written,
    rule_of_part,
    sent_of_part,
)
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.row_proof import RowProof
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError


def by_rule(
    state: ReplicaState,
    variable: keras.Variable,
    value: tf.Tensor,
    before: tf.Tensor | None,
    proof: RowProof,
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
        proof: Knows what is proven of values of the step.
        share: This replica's part of the global batch.
        otherwise: Lets what has written a variable be computed from the rows of
            all replicas; returns whether it will.

    Raises:
        ConfigurationError: The replicas' values cannot become one.
        TraceAgain: They will, in another trace.
    """
    held = variable if before is None else before
    try:
        rule = state.read_rule(variable, value, before, proof)
        if rule is Rule.AGREED:
            return value
        if share.replicas > 1 and rule is Rule.SUM:
            metric = state.is_metric(variable)
            kind = kind_written(value, before, proof)
            if rule_of_part(kind, value.dtype, of_metric=metric) is not rule:
                raise _not_of_sums(variable)
            start = tf.convert_to_tensor(held)
            value = sent_of_part(kind, start, value, share)
        return share.select(value, held)
    except ConfigurationError:
        if otherwise(variable):
            raise TraceAgain from None
        raise


def _not_of_sums(variable: keras.Variable) -> ConfigurationError:
    return ConfigurationError(
        "What is added to a variable outside of a layer must be a sum or "
        "a mean over the rows, since replicas have their own rows. "
        f"Received: {variable.path}, of which that is not proven. Add it in "
        "the call of a layer or of the model, or make it of such sums in the "
        "end, in result() of a metric."
    )
