"""Which optimizers follow norms of whole weights, in two steps."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mgpu_tf.engine import keras_internals
from mgpu_tf.optimizers.by_norms import ByNorms, Norms, TwoSteps


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
        mean, square = keras_internals.moments_of_lamb(lamb, variable)
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
