"""Functions of the author's that are traced in the graph of a step.

A `tf.function` keeps what it has captured of the graph in which it was traced.
What a step lends to layers is in its own graph, so a function that reads it is
computed as the Python function that it was made of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.trace_again import ReadRefused
from mgpu_tf.errors import ConfigurationError


@contextlib.contextmanager
def inlined() -> Iterator[None]:
    """Lets each `tf.function` be the Python function that it was made of."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def refused(variable: keras.Variable) -> ReadRefused:
    """Returns what to raise where functions cannot be inlined.

    Args:
        variable: What one of them reads.
    """
    return ReadRefused(
        "A tf.function that reads what a step lends to layers is traced as "
        "plain Python, without AutoGraph. Received: one that reads "
        f"{variable.path!r}, and code that needs AutoGraph. Write tf.cond and "
        "tf.while_loop there, or leave tf.function out."
    )


def check_gradient(variable: keras.Variable) -> None:
    """Refuses a weight that is lent to a function with its own gradient.

    `tf.custom_gradient` sends gradients to its arguments and to variables. A
    lent weight is neither, and would have none.

    Raises:
        ConfigurationError: The step reads it in such a function.
    """
    if keras_internals.is_within_own_gradient():
        raise ConfigurationError(
            "Where weights are split, and in a train_step of your own, a "
            "function of tf.custom_gradient, keras.remat or "
            "tf.recompute_grad takes weights as arguments. Received: one that "
            f"reads {variable.path!r}. Pass it "
            "tf.convert_to_tensor(weight). Leave keras.remat and "
            "tf.recompute_grad out: with Keras's train_step, recompute of "
            "the Trainer does as much."
        )


def is_within_function(graph: Any) -> bool:
    """Returns whether a `tf.function` is traced inside of a graph.

    Args:
        graph: That of a step. Branches and loops in it are traced with it.
    """
    here = tf.compat.v1.get_default_graph()
    while here is not None and here is not graph:
        if type(here) is tf.__internal__.FuncGraph:
            return True
        here = getattr(here, "outer_graph", None)
    return False
