"""The engine: what one execution of training, evaluation, prediction does.

engine = create_engine(model, strategy)
"""

from __future__ import annotations

import keras
import tensorflow as tf

from mgpu_tf.engine.asynchronous import AsynchronousEngine
from mgpu_tf.engine.base import Engine
from mgpu_tf.engine.options import StepOptions
from mgpu_tf.engine.synchronous import SynchronousEngine
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.parameter_server import ParameterServerStrategy


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
    options = options or StepOptions()
    if isinstance(strategy, ParameterServerStrategy):
        if options.gradient_dtype is not None:
            raise ConfigurationError(
                "gradient_dtype goes with synchronous strategies. Received: "
                f"gradient_dtype={options.gradient_dtype!r} with parameter "
                "servers. Leave it out."
            )
        return AsynchronousEngine(model, strategy, options)
    return SynchronousEngine(model, strategy, options)
