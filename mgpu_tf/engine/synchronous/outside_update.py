"""Gradients that are applied outside of a step, such as in a callback.

    gradients = tape.gradient(loss, weights)      # of whole weights
    model.optimizer.apply(gradients, weights)     # outside of replicas

A step's own `Update` applies them: of a weight that is stored in parts each
replica keeps what belongs to its part, and what needs whole weights or norms
gathers them. Where each replica adds up gradients of its own rows, the first
one gets these, so that their sum over replicas has them once.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.step.update import (
    Gradients,
    Update,
    accumulation_steps,
    hand_over,
    unwrap,
)
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica

# Makes what applies gradients, of the arguments of `Update`.
Make = Callable[..., Update]


class OutsideUpdate:
    """Applies gradients outside of steps, with the optimizers of a model.

    Args:
        strategy: The model's strategy.
        make: Makes an `Update`, of an optimizer and its variables.
        own_sums: Returns whether each replica adds up gradients of its own.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        make: Make,
        own_sums: Callable[[], bool],
    ) -> None:
        self._strategy = strategy
        self._make = make
        self._own_sums = own_sums

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
        by_pairs: bool,
    ) -> None:
        """Applies gradients; on a replica, and to whole weights, as Keras.

        Raises:
            ConfigurationError: Several processes hold parts of the weights.
        """
        context = tf.distribute.get_replica_context()
        within = context is not None and context.strategy is self._strategy
        apart = not within and self._adds_up_apart(optimizer)
        split = any(map(keras_internals.is_split, variables))
        with keras_internals.applying_itself(optimizer):
            if within or not gradients or not (apart or split):
                hand_over(optimizer, gradients, variables, by_pairs=by_pairs)
                return
            if getattr(self._strategy, "is_apart", False):
                raise ConfigurationError(
                    "Outside of a step an optimizer applies no gradients to "
                    "weights that several processes hold parts of. Received: "
                    f"{optimizer.name!r}. Assign to the weights, or apply in "
                    "a train_step of your own."
                )
            with self._strategy.scope():
                if not optimizer.built:
                    optimizer.build(variables)
                self._apply(optimizer, gradients, variables, by_pairs, apart)

    def _adds_up_apart(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether each replica adds up gradients of its own rows."""
        return accumulation_steps(unwrap(optimizer)[1]) > 1 and self._own_sums()

    def _apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
        by_pairs: bool,
        apart: bool,
    ) -> None:
        update = self._make(
            optimizer,
            variables,
            self._strategy,
            by_pairs=by_pairs,
            reduced=not apart,
        )
        update.present = [gradient is not None for gradient in gradients]
        given = [gradient for gradient in gradients if gradient is not None]
        own = _of_first if apart else _copied
        update(self._strategy.run(own, args=(given,)))


def _copied(gradients: Gradients) -> Gradients:
    """Returns copies, since a step looks for tensors of each replica.

    TensorFlow takes one that all replicas return for one of none.
    """
    return tf.nest.map_structure(tf.identity, gradients, expand_composites=True)


def _of_first(gradients: Gradients) -> Gradients:
    """Returns gradients on the first replica, zeros on others."""
    if this_replica() == 0:
        return _copied(gradients)
    return [tf.zeros_like(tf.convert_to_tensor(each)) for each in gradients]
