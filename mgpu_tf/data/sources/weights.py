"""Class weights, as weights of the examples."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.data.sources.batches import (
    DatasetSource,
    FunctionSource,
    MappedSource,
    Source,
)
from mgpu_tf.data.sources.tasks import PreprocessedSource
from mgpu_tf.errors import ConfigurationError, is_integer


def with_class_weight(source: Source, class_weight: dict[int, float]) -> Source:
    """Weights each example by its class, as Keras's `class_weight` does.

    A class that is not in `class_weight` weighs 1, whether it is below, above
    or between those that are.

    Args:
        source: Batches of `(x, y)`; y integers `[batch]` or `[batch, 1]`, or
            one-hot `[batch, classes]`.
        class_weight: Weight by class.

    Returns:
        A source of `(x, y, sample_weight)`.

    Raises:
        ConfigurationError: There are weights already, or no single target, or
            a class is no integer.
    """
    data = source.example()
    parts = len(data) if isinstance(data, tuple) else 1
    if parts != 2 or tf.nest.is_nested(data[1]) or data[1] is None:
        raise ConfigurationError(
            "class_weight needs data of (x, y) with one target and no "
            f"sample_weight. Received: {parts} parts, the targets "
            f"{data[1] if parts > 1 else None}. Pass sample_weight instead."
        )
    if not isinstance(class_weight, Mapping):
        raise ConfigurationError(
            "class_weight must map classes, which are integers, to numbers. "
            f"Received: {type(class_weight).__name__}. Pass a dict, such as "
            "{0: 1.0, 1: 2.5}."
        )
    for name, weight in class_weight.items():
        if not is_integer(name):
            raise ConfigurationError(
                "class_weight must map classes, which are integers, to "
                f"numbers. Received: the class {name!r}."
            )
        if not isinstance(weight, numbers.Real):
            raise ConfigurationError(
                "class_weight must map classes, which are integers, to "
                f"numbers. Received: the weight {weight!r} of class {name}."
            )
    # Keras has the weights of a tf.data.Dataset in float32 whatever floatx.
    kinds = (DatasetSource, FunctionSource, PreprocessedSource)
    dataset = isinstance(source, kinds)
    dtype = "float32" if dataset else keras.config.floatx()
    last = np.iinfo(np.int64).max  # Above every class: there is always one.
    known = sorted((int(name), w) for name, w in class_weight.items())
    names = np.array([*(name for name, _ in known), last], np.int64)
    weights = np.array([*(weight for _, weight in known), 1.0], dtype)

    def weigh(data: tuple[Any, Any]) -> tuple[Any, Any, tf.Tensor]:
        x, y = data
        classes = _classes(y)
        flat = tf.reshape(classes, [-1])
        place = tf.searchsorted(tf.constant(names), flat)
        found = tf.where(
            tf.gather(names, place) == flat,
            tf.gather(weights, place),
            tf.ones([], dtype),
        )
        return x, y, tf.reshape(found, tf.shape(classes))

    return MappedSource(source, weigh)


def _classes(y: tf.Tensor) -> tf.Tensor:
    """Returns the class of each target: the largest of several, or itself."""
    if y.shape.rank is not None and y.shape.rank > 1:
        if y.shape[-1] != 1:
            return tf.argmax(y, axis=-1)
        y = tf.squeeze(y, axis=-1)
    if y.dtype.is_floating:
        y = tf.round(y)
    return tf.cast(y, tf.int64)
