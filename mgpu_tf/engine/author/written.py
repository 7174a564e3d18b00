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
from mgpu_tf.engine.author.rules import Rule
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
            raise _not_in_a_call(variable)
        return share.select(value, held)
    except ConfigurationError:
        if otherwise(variable):
            raise TraceAgain from None
        raise


def _not_in_a_call(variable: keras.Variable) -> ConfigurationError:
    return ConfigurationError(
        "On several replicas, what is added to a metric is added in the call "
        "of a layer or of the model, in compute_loss, or by update_state. "
        f"Received: {variable.path}, which is written elsewhere. Call "
        "update_state of its metric."
    )
