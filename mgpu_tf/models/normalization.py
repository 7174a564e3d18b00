"""Synchronized BatchNormalization, for models of any origin."""

from __future__ import annotations

import keras

from mgpu_tf.engine import keras_internals
from mgpu_tf.fields import checked


@checked
def synchronize_batch_normalization(model: keras.Model) -> keras.Model:
    """Makes BatchNormalization compute its statistics over all replicas.

    Call it in `build_model`. It also changes the layers of nested models, such
    as those of `keras.applications`.

    Args:
        model: A model with any number of BatchNormalization layers.

    Returns:
        The same model.
    """
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    return model
