"""Traces that only look at an author's code, and that no step ever runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

# Its policy changes nothing in a trace, and functions traced with it are kept
# apart from those of steps.
_OPTIONS = tf.saved_model.SaveOptions(
    experimental_variable_policy="expand_distributed_variables"
)


def graph_of(function: Callable[..., Any], *specs: Any) -> tf.Graph:
    """Traces a function, and returns its graph.

    In such a trace optimizers may apply nothing, and layers may return
    placeholders. A `tf.function` of the author's keeps what was traced in it
    by the types of its arguments and would run that in the next step, so it is
    traced as TensorFlow traces what it saves: apart from all steps.

    Args:
        function: What is traced, without AutoGraph.
        *specs: Structures of specs of its arguments.

    Returns:
        Its graph.
    """
    traced = tf.function(function, autograph=False)
    with save_context.save_context(_OPTIONS):
        return traced.get_concrete_function(*specs).graph
