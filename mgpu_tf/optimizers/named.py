"""Keras's optimizers by name, with a learning rate that suits each.

    optimizer = create_optimizer("adam")

The update rules are Keras's, but for LARS, which Keras does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.optimizers.lars import EXCLUDED, LARS

_OPTIMIZERS: dict[
    str, tuple[float, Callable[..., keras.optimizers.Optimizer]]
] = {
    "sgd": (0.1, keras.optimizers.SGD),
    "momentum": (
        0.05,
        functools.partial(keras.optimizers.SGD, momentum=0.9, nesterov=True),
    ),
    "adam": (0.001, keras.optimizers.Adam),
    "adamw": (0.001, keras.optimizers.AdamW),
    "lamb": (0.01, keras.optimizers.Lamb),
    "lars": (1.0, functools.partial(LARS, trust_coefficient=0.02)),
    "lion": (0.0003, keras.optimizers.Lion),
}


@checked
def create_optimizer(
    name: str,
    learning_rate: Any = None,
    *,
    weight_decay: float | None = None,
) -> keras.optimizers.Optimizer:
    """Creates an optimizer by name.

    Args:
        name: `sgd`, `momentum` (SGD with Nesterov momentum 0.9), `adam`,
            `adamw`, `lamb`, `lars` (trust coefficient 0.02) or `lion`.
        learning_rate: A number or a schedule. By default 0.1, 0.05, 0.001,
            0.001, 0.01, 1.0 and 0.0003.
        weight_decay: Weight decay of all weights but biases and the scale and
            offset of normalizations. Default: that of the optimizer.

    Returns:
        The optimizer.

    Raises:
        ConfigurationError: The name is unknown.
    """
    default = default_learning_rate(name)
    _, create = _OPTIMIZERS[name]
    rate = default if learning_rate is None else learning_rate
    if weight_decay is None:
        return create(rate)
    optimizer = create(rate, weight_decay=weight_decay)
    optimizer.exclude_from_weight_decay(var_names=EXCLUDED)
    return optimizer


def default_learning_rate(name: str) -> float:
    """Returns the learning rate of `create_optimizer`.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if name not in _OPTIMIZERS:
        raise ConfigurationError(unknown_name("optimizer", name, _OPTIMIZERS))
    return _OPTIMIZERS[name][0]
