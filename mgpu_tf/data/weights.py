"""Class weights, as weights of the examples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data.sources import MappedSource, Source
from mgpu_tf.errors import ConfigurationError


def with_class_weight(source: Source, class_weight: dict[int, float]) -> Source:
    """Weights each example by its class, as Keras's `class_weight` does.

    Args:
        source: Batches of `(x, y)`; y integers `[batch]` or `[batch, 1]`, or
            one-hot `[batch, classes]`.
        class_weight: Weight by class; 1 for a class that is not there.

    Returns:
        A source of `(x, y, sample_weight)`.

    Raises:
        ConfigurationError: There are weights already, or no single target.
    """
    data = source.example()
    if (
        not isinstance(data, tuple)
        or len(data) != 2
        or tf.nest.is_nested(data[1])
    ):
        raise ConfigurationError(
            "class_weight needs data of (x, y) with one target and no "
            "sample_weight. Received: "
            f"{len(data) if isinstance(data, tuple) else 1} parts. Pass "
            "sample_weight instead."
        )
    largest = max(class_weight, default=0)
    table = [class_weight.get(index, 1.0) for index in range(largest + 1)]

    def weigh(data: tuple[Any, Any]) -> tuple[Any, Any, tf.Tensor]:
        x, y = data
        rank = y.shape.rank
        if rank is not None and rank > 1 and y.shape[-1] != 1:
            indices = tf.argmax(y, axis=-1)
        else:
            indices = tf.cast(tf.reshape(y, [-1]), tf.int64)
        known = tf.minimum(indices, largest)
        weights = tf.gather(tf.constant(table, keras.config.floatx()), known)
        return x, y, tf.where(indices > largest, tf.ones_like(weights), weights)

    return MappedSource(source, weigh)
