"""Statistics of batches over all replicas, for models made by others."""

from __future__ import annotations

import keras

from mgpu_tf.engine import keras_internals


def synchronize_batch_normalization(model: keras.Model) -> keras.Model:
    """Makes BatchNormalization take its statistics over all replicas.

    Call it in `build_model`; models made of others, such as those of
    `keras.applications`, included.

    Args:
        model: A model with any number of such layers.

    Returns:
        The same model.
    """
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    return model
