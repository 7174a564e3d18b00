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


class LambSteps(TwoSteps):
    """The update of `keras.optimizers.Lamb` in two steps.

    Args:
        optimizer: A Lamb of Keras.

    References:
        Y. You et al.: Large Batch Optimization for Deep Learning: Training
        BERT in 76 minutes, 2020, arXiv 1904.00962, algorithm 2.
    """

    def __init__(self, optimizer: keras.optimizers.Lamb) -> None:
        self._optimizer = optimizer

    def direction(self, gradient: Any, variable: Any) -> Any:
        """Returns the step of Adam; as in `TwoSteps`."""
        lamb, dtype = self._optimizer, variable.dtype
        gradient = ops.cast(gradient, dtype)
        step = ops.cast(lamb.iterations + 1, dtype)
        place = lamb._get_variable_index(variable)
        mean, square = lamb._momentums[place], lamb._velocities[place]
        lamb.assign_add(
            mean, ops.multiply(ops.subtract(gradient, mean), 1 - lamb.beta_1)
        )
        lamb.assign_add(
            square,
            ops.multiply(
                ops.subtract(ops.square(gradient), square), 1 - lamb.beta_2
            ),
        )
        unbiased = [
            ops.divide(held, 1.0 - ops.power(ops.cast(beta, dtype), step))
            for held, beta in ((mean, lamb.beta_1), (square, lamb.beta_2))
        ]
        return ops.divide(
            unbiased[0], ops.add(ops.sqrt(unbiased[1]), lamb.epsilon)
        )

    def move(
        self, direction: Any, variable: Any, learning_rate: Any, norms: Norms
    ) -> None:
        """Moves by the ratio of the norms; as in `TwoSteps`."""
        there = ops.logical_and(norms.weight > 0, norms.direction > 0)
        one = ops.ones_like(norms.direction)
        ratio = norms.weight / ops.where(there, norms.direction, one)
        rate = ops.cast(learning_rate, variable.dtype)
        self._optimizer.assign_sub(
            variable, ops.where(there, ratio, one) * rate * direction
        )


def two_steps(optimizer: keras.optimizers.Optimizer) -> TwoSteps | None:
    """Returns the two steps of an optimizer, None where it has one step.

    Args:
        optimizer: Any optimizer of Keras.
    """
    own = type(optimizer).update_step
    if own is ByNorms.update_step:
        return optimizer
    if own is keras.optimizers.Lamb.update_step:
        return LambSteps(optimizer)
    return None
