"""What a step writes that is not Keras's: nobody brings such values together.

A `tf.Variable` that all replicas write alike is one variable still. Where parts
of a batch are computed one after another, each would write it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.step_scope import StepScope
from mgpu_tf.engine.row_proof import FIXED, written
from mgpu_tf.errors import ConfigurationError


def check_rows(scope: StepScope) -> None:
    """Checks that a step writes the same on all replicas.

    A step that runs at once is not looked at, and of functions that it calls
    only those that layers call: by the proofs of these.

    Args:
        scope: The scope of the step, which was traced.

    Raises:
        ConfigurationError: It writes what it makes of its rows.
    """
    if tf.executing_eagerly():
        return
    for op, _ in _not_of_keras(scope, scope.graph, scope.begun):
        if (
            op.type.endswith("VariableOp")
            and scope.proof.of(op.inputs[1]) != FIXED
        ):
            raise ConfigurationError(
                "What replicas write to a variable must be made one, which "
                "is done for Keras's variables. Received: a tf.Variable, to "
                f"which {op.name!r} writes what depends on the rows of a "
                "replica. Make it by self.add_weight(..., trainable=False). "
                "That has a fixed shape: in place of all values keep their "
                "sums or a histogram, or collect them in a callback."
            )


def check_parts(scope: StepScope, graph: Any = None, first: int = 0) -> None:
    """Checks that what parts of a batch compute writes nothing.

    Args:
        scope: The scope of the step.
        graph: What was traced. Default: the step, if it was.
        first: The operation to begin with, by its number in the graph.

    Raises:
        ConfigurationError: It writes to what is not Keras's.
    """
    if graph is None:
        if tf.executing_eagerly():
            return  # Layers are traced, and looked at, before they are called.
        graph, first = scope.graph, scope.begun
    for op, _ in _not_of_keras(scope, graph, first):
        raise ConfigurationError(
            "What is computed for each part of a batch is written once for a "
            "batch, which is done for Keras's variables. Received: a "
            "tf.Variable, a table or a generator of TensorFlow's, to which "
            f"{op.name!r} writes, or Python that it calls. Leave out "
            "step_parts; in place of a pipeline use 'mirrored' or 'fsdp'."
        )


def _not_of_keras(
    scope: StepScope, graph: Any, first: int
) -> Iterator[tuple[tf.Operation, Any]]:
    own = keras_internals.handles_of(scope.state.variables)
    for op, resource in written(graph, first):
        if id(resource) not in own:
            yield op, resource
