"""Synchronized BatchNormalization, for models of any origin."""

from __future__ import annotations

import keras

from mgpu_tf.engine.step.moments import normalizations
from mgpu_tf.fields import checked


@checked
def synchronize_batch_normalization(model: keras.Model) -> keras.Model:
    """Makes BatchNormalization compute its statistics over all replicas.

    Call it in `build_model`. `Trainer(batch_normalization="synchronized")` does
    the same. It also changes the layers of nested models, such
    as those of `keras.applications`.

    Args:
        model: A model with any number of BatchNormalization layers.

    Returns:
        The same model.
    """
    for layer in normalizations(model):
        layer.synchronized = True
    return model
