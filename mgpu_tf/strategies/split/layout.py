"""Which weights are split over which devices, and along which dimension.

    Layout("auto")                                  found by structure
    Layout({".*ffn/kernel": (None, "model")})       by the paths of weights

The terms are those of `keras.distribution.LayoutMap`: a regular expression
that the whole path of a variable matches, and a name or None for each of its
dimensions. "model" is the tensor axis, "batch" are data and fsdp together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from mgpu_tf.errors import ConfigurationError

# The axes of a mesh by their names in a layout.
AXES = {"model": "tensor", "batch": "rows"}


class Layout:
    """Patterns of paths, with what is split of the variables that match.

    Args:
        patterns: A mapping as `keras.distribution.LayoutMap`, or "auto".

    Attributes:
        is_auto: Whether what no pattern names is found by structure.

    Raises:
        ConfigurationError: It is neither, or an axis has another name.
    """

    def __init__(self, patterns: Any) -> None:
        self.is_auto = patterns == "auto"
        if self.is_auto:
            patterns = {}
        if not isinstance(patterns, Mapping):
            raise ConfigurationError(
                "layout must be 'auto', or a mapping from patterns of paths "
                "to tuples, as keras.distribution.LayoutMap. Received: "
                f"layout={patterns!r}."
            )
        self._axes = {
            _pattern(pattern): _axes(pattern, value)
            for pattern, value in patterns.items()
        }

    @property
    def names(self) -> set[str]:
        """The axes of the mesh that the patterns name."""
        return {
            AXES[name]
            for axes in self._axes.values()
            for name in axes
            if name is not None
        }

    def check_used(self, paths: Sequence[str]) -> None:
        """Refuses a pattern that matches none of a model's weights.

        Args:
            paths: The paths of the weights.

        Raises:
            ConfigurationError: There is such a pattern.
        """
        for pattern in self._axes:
            if pattern in paths or any(
                re.fullmatch(pattern, path) for path in paths
            ):
                continue
            raise ConfigurationError(
                "A pattern of the layout must match the whole path of a "
                f"weight. Received: {pattern!r}, where the paths are such as "
                f"{', '.join(paths[:3])}. Correct it, or leave it out."
            )

    def split_of(self, variable: keras.Variable) -> tuple[int, str] | None:
        """Returns the dimension that is split and the axis of the mesh.

        Args:
            variable: A weight.

        Raises:
            ConfigurationError: Several patterns match, or there is another
                number of dimensions.
        """
        path = variable.path
        found = [p for p in self._axes if p == path] or [
            pattern for pattern in self._axes if re.fullmatch(pattern, path)
        ]
        if not found:
            return None
        if len(found) > 1:
            raise ConfigurationError(
                "One pattern of the layout may match a path. Received: "
                f"{path} matches {found}. Make them narrower."
            )
        axes = self._axes[found[0]]
        if len(axes) != len(variable.shape):
            raise ConfigurationError(
                "A layout has a name or None for each dimension. Received: "
                f"{axes} for {path} of shape {tuple(variable.shape)}. Correct "
                f"the pattern {found[0]!r}."
            )
        for dim, name in enumerate(axes):
            if name is not None:
                return dim, AXES[name]
        return None


def _pattern(pattern: Any) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            "A pattern of the layout must be a regular expression. Received: "
            f"{pattern!r} ({error}). Write such as '.*ffn/kernel'."
        ) from None
    return str(pattern)


def _axes(pattern: Any, value: Any) -> tuple[str | None, ...]:
    axes = getattr(value, "axes", value)
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    axes = tuple(axes)
    named = [axis for axis in axes if axis is not None]
    if any(axis not in AXES for axis in named) or len(named) > 1:
        raise ConfigurationError(
            "A layout names at most one dimension, 'model' for the tensor "
            "axis or 'batch' for data and fsdp together. Received: "
            f"{pattern!r}: {axes}. Write such as (None, 'model')."
        )
    return axes
