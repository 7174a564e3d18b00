"""Optimizers whose step follows the norms of whole weights.

    class Mine(ByNorms):
        def direction(self, gradient, variable): ...
        def move(self, direction, variable, learning_rate, norms): ...

Where a device stores a part of a weight, the two norms are those of the whole
weight. Each is the root of a sum of squares over all parts.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import keras
from keras import ops


@dataclasses.dataclass(frozen=True)
class Norms:
    """The Euclidean norms of one update, scalars.

    Attributes:
        weight: Of the weight before it moves.
        direction: Of its direction.
    """

    weight: Any
    direction: Any


class TwoSteps(abc.ABC):
    """An update of a weight before and after its norms are known."""

    @abc.abstractmethod
    def direction(self, gradient: Any, variable: Any) -> Any:
        """Returns where a weight goes; writes slots, not the weight.

        Each element is computed from the same element of the arguments.

        Args:
            gradient: Of the weight or of a part of it, clipped. The rows of an
                embedding are `tf.IndexedSlices`.
            variable: The weight, or a part of it.

        Returns:
            A dense tensor, of the shape and type of the variable.
        """

    @abc.abstractmethod
    def move(
        self, direction: Any, variable: Any, learning_rate: Any, norms: Norms
    ) -> None:
        """Moves a weight, each element from its own elements and the norms.

        Args:
            direction: What `direction` has returned.
            variable: The weight, or a part of it.
            learning_rate: A scalar.
            norms: Of the whole weight and the whole direction.
        """


class ByNorms(keras.optimizers.Optimizer, TwoSteps):
    """A Keras optimizer whose step follows norms of whole weights.

    A subclass has `direction` and `move` in place of `update_step`. It works in
    Keras's own `fit`, and where weights are split.

    Args:
        **options: Those of `keras.optimizers.Optimizer`.
    """

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates one weight that is whole."""
        direction = self.direction(gradient, variable)
        norms = Norms(
            ops.norm(ops.convert_to_tensor(variable)), ops.norm(direction)
        )
        self.move(direction, variable, learning_rate, norms)
