"""Keras's Embedding as a read of rows.

Keras reads the whole table and takes rows of it. Once an optimizer has written
to rows of a variable, TensorFlow copies the variable in every whole read. So a
step costs as much as the table. `ResourceGather` reads the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals


def is_same(layer: keras.layers.Layer, replicas: int) -> bool:
    """Returns whether the fused form computes what a built layer does.

    Args:
        layer: Any layer.
        replicas: How many step together; each looks its own rows up.
    """
    del replicas
    return (
        isinstance(layer, keras.layers.Embedding)
        and type(layer).call is keras.layers.Embedding.call
        and keras_internals.is_plain_table(layer)
    )


def call(
    layer: keras.layers.Embedding, own: Callable[..., Any], inputs: Any
) -> tuple[Any, bool]:
    """Calls a layer.

    Args:
        layer: A layer, of which `is_same` holds.
        own: Its own `call`.
        inputs: As for its own, ids of any shape `[...]`.

    Returns:
        The rows, `[..., output_dim]`, and whether they are of the fused form.
    """
    table = keras_internals.kernel_of(layer)
    if not isinstance(inputs, tf.Tensor) or not _is_stored(table):
        return own(inputs), False
    ids = inputs
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    # As in Keras, negative ids count from the end.
    ids = tf.where(ids < 0, ids + tf.cast(table.shape[0], ids.dtype), ids)
    rows = tf.gather(_here(keras_internals.stored(table)), ids)
    return tf.cast(rows, layer.compute_dtype), True


def _here(table: tf.Variable) -> tf.Variable:
    """Returns the copy of this replica, which has a read of rows."""
    if not isinstance(table, tf.distribute.DistributedValues):
        return table
    strategy = table.distribute_strategy
    handle = table.handle
    return next(
        copy
        for copy in strategy.experimental_local_results(table)
        if copy.handle is handle
    )


def _is_stored(table: keras.Variable) -> bool:
    """Whether a table is read from where it is stored, and stored whole."""
    if keras_internals.is_split(table):
        return False
    scope = keras_internals.stateless_scope()
    return scope is None or scope.get_current_value(table) is None
