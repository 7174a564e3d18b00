"""Logs as the author of a model returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Lifts nested logs to the top, as Keras does.

    A metric may return its variable. What it holds is read here, since it is
    another value outside of the scope that has the state of all replicas.
    """
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, keras.Variable):
            value = tf.convert_to_tensor(value.value)
        nested = isinstance(value, Mapping)
        flat |= flat_logs(value) if nested else {name: value}
    return flat
