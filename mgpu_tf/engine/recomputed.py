"""Which layers are computed again in the backward pass, by name or function."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import keras

from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError, hint
from mgpu_tf.names import RECOMPUTE, Recompute


def chosen_layers(
    model: keras.Model, recompute: Recompute
) -> list[keras.layers.Layer] | None:
    """Returns the layers that `recompute` chooses, none inside of another.

    Args:
        model: A model whose layers exist.
        recompute: As in `StepOptions`.

    Returns:
        The layers, in the order of the model. None where all are meant.

    Raises:
        ConfigurationError: A pattern, or the function, chooses no layer.
    """
    if recompute is None or recompute in RECOMPUTE:
        return None
    layers = [
        layer
        for layer in keras_internals.layers_of(model)
        if layer is not model and not isinstance(layer, keras.layers.InputLayer)
    ]
    if callable(recompute):
        found = [layer for layer in layers if recompute(layer)]
        if not found:
            raise ConfigurationError(
                "recompute is 'layers', names of layers, or a function that "
                "says of a layer whether it is computed again. Received: a "
                f"function that chooses none of {len(layers)} layers."
            )
    else:
        found = _named(layers, patterns_of(recompute))
    inside = {
        id(inner)
        for layer in found
        for inner in keras_internals.inner_layers(layer)
    }
    unique = {id(layer): layer for layer in found if id(layer) not in inside}
    return list(unique.values())


def patterns_of(recompute: str | Sequence[str]) -> list[str]:
    """Returns the names and patterns; a string has commas between them."""
    names = recompute.split(",") if isinstance(recompute, str) else recompute
    return [name.strip() for name in names]


def _named(
    layers: list[keras.layers.Layer], patterns: list[str]
) -> list[keras.layers.Layer]:
    names = [layer.name for layer in layers]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = hint(pattern, [*RECOMPUTE, *dict.fromkeys(names)])
            raise ConfigurationError(
                "recompute is 'layers', or names layers of the model. "
                f"Received: {pattern!r}, which no layer has. "
                + (near or f"The model has: {', '.join(names)}.")
            )
    return [
        layer
        for layer in layers
        if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in patterns)
    ]
