"""What flows back where an author gives the gradient of a function.

The operations of `tf.custom_gradient` show its forward pass alone. What its
author sends back may look at all rows, as a gradient does that is divided by
its norm. So it is traced apart, and proven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.row_proof.kinds import FIXED, SUM, Kind

# Returns what the outputs of a graph are that a function makes, given what its
# inputs are.
Walk = Callable[[Callable[[], Any], list[Kind]], list[Kind]]


def keeps_rows_apart(op: tf.Operation, kinds: list[Kind], walk: Walk) -> bool:
    """Whether what flows back to rows is of one row each.

    What flows back to a weight is a sum over the rows then.

    Args:
        op: An operation whose outputs are its inputs.
        kinds: What these are.
        walk: Looks at a graph, while it is traced too.
    """
    coming = [SUM if kind == FIXED else kind for kind in kinds]
    return _sends_back(op, coming, walk)


def is_linear(op: tf.Operation, walk: Walk) -> bool:
    """Whether what flows back is linear in what comes, as true gradients are.

    Args:
        op: An operation whose outputs are its inputs.
        walk: Looks at a graph. What the graph captures is fixed.
    """
    return _sends_back(op, [SUM] * len(op.outputs), walk)


def _sends_back(op: tf.Operation, coming: list[Kind], walk: Walk) -> bool:
    """Whether an operation sends back what comes to it, by their kinds."""
    gradient = keras_internals.gradient_given(op)
    if gradient is None:
        return True  # TensorFlow's own.
    sent: list[Any] = []

    def back(*upstream: tf.Tensor) -> list[tf.Tensor]:
        given = iter(upstream)
        sent[:] = gradient(op, *[next(given) if n else None for n in numbers])
        return [tf.convert_to_tensor(each) for each in sent if each is not None]

    # Nothing flows back through the handle of a variable.
    numbers = [each.dtype != tf.resource for each in op.outputs]
    taken = [
        (tf.TensorSpec(output.shape, output.dtype), kind)
        for output, kind in zip(op.outputs, coming, strict=True)
        if output.dtype != tf.resource
    ]

    def traced() -> Any:
        with op.graph.as_default():
            function = tf.function(back, autograph=False)
            return function.get_concrete_function(*[s for s, _ in taken]).graph

    try:
        found = iter(walk(traced, [kind for _, kind in taken]))
    except Exception:
        return False  # Code of the author's; nothing is proven.
    pairs = zip(sent, coming, strict=True)
    return all(each is None or next(found) == kind for each, kind in pairs)
