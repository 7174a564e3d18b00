"""Keras's optimizers by name, with a learning rate that suits each.

    optimizer = create_optimizer("adam")

The update rules are Keras's; nothing here changes them.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from mgpu_tf.errors import ConfigurationError, unknown_name

_OPTIMIZERS: dict[
    str, tuple[float, Callable[[float], keras.optimizers.Optimizer]]
] = {
    "sgd": (0.1, keras.optimizers.SGD),
    "momentum": (
        0.05,
        lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
    ),
    "adam": (0.001, keras.optimizers.Adam),
    "adamw": (0.001, keras.optimizers.AdamW),
    "lamb": (0.01, keras.optimizers.Lamb),
    "lion": (0.0003, keras.optimizers.Lion),
}


def create_optimizer(
    name: str, learning_rate: float | None = None
) -> keras.optimizers.Optimizer:
    """Creates an optimizer by name.

    Args:
        name: `sgd`, `momentum` (SGD with Nesterov momentum 0.9), `adam`,
            `adamw`, `lamb` or `lion`.
        learning_rate: By default 0.1, 0.05, 0.001, 0.001, 0.01 and 0.0003.

    Returns:
        The optimizer.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if name not in _OPTIMIZERS:
        raise ConfigurationError(unknown_name("optimizer", name, _OPTIMIZERS))
    default, create = _OPTIMIZERS[name]
    return create(default if learning_rate is None else learning_rate)
