"""The engine: what one execution of training, evaluation, prediction does.

engine = create_engine(model, strategy)
"""

from __future__ import annotations

import importlib

import keras
import tensorflow as tf

from mgpu_tf.engine.step.base import Engine
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.registry import kind_of


def create_engine(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    options: StepOptions | None = None,
) -> Engine:
    """Returns the engine that goes with a strategy.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: Any strategy.
        options: How steps are made; by default as Keras makes them.

    Returns:
        The engine.

    Raises:
        ConfigurationError: The model is not compiled, or was made elsewhere;
            or an option does not go with the strategy.
    """
    module, _, name = kind_of(strategy).engine.partition(":")
    engine = getattr(importlib.import_module(module), name)
    return engine(model, strategy, options or StepOptions())
