"""The update of one worker, while others make theirs.

    local gradients
    -> summed over the GPUs of the worker, and accumulated there
    -> unscaled by the scale that the loss had, and checked to be finite
    -> clipped -> sent to the servers -> applied -> counted -> averaged (EMA)

Updates of several workers interleave, variable by variable; that is what
asynchronous means. Counts are added in one operation on the parameter server,
so none is lost, and schedules and bias corrections see all of them.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals, update
from mgpu_tf.engine.packs import Packs
from mgpu_tf.errors import ConfigurationError

Gradients = list[Any]


class AsynchronousUpdate:
    """Applies gradients with the optimizer of a model.

    Args:
        model: A compiled and built model.
        strategy: Its strategy.
        packs: Whose gradients go together.

    Attributes:
        every: Micro-batches in an update.

    Raises:
        ConfigurationError: The optimizer asks for what cannot be made right.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        packs: Packs,
    ) -> None:
        self._strategy, self._packs = strategy, packs
        self._model = model
        self._variables = model.trainable_variables
        self._scaler, self._optimizer = update.unwrap(model.optimizer)
        self.every = update.accumulation_steps(self._optimizer)
        if self._scaler is not None and self.every > 1:
            raise ConfigurationError(
                "On 'parameter_server' a LossScaleOptimizer does not go with "
                "gradient_accumulation_steps. Received: "
                f"gradient_accumulation_steps={self.every}. Use one of them."
            )

    def steps_made(self) -> tf.Tensor:
        """Returns the count of steps on the parameter server."""
        return keras_internals.micro_steps(self._optimizer)

    def scale(self) -> tf.Tensor | None:
        """Returns the scale of the loss, to be read once in a step."""
        if self._scaler is None:
            return None
        return tf.cast(self._scaler.dynamic_scale, tf.float32)

    def scaled(self, loss: tf.Tensor, scale: tf.Tensor | None) -> tf.Tensor:
        """Returns the loss, scaled as this step's gradients will be unscaled.

        Another worker may change the scale in between.
        """
        if scale is None:
            return self._model.optimizer.scale_loss(loss)
        return loss * tf.cast(scale, loss.dtype)

    def __call__(
        self,
        gradients: Gradients,
        present: list[bool],
        step: tf.Tensor,
        scale: tf.Tensor | None,
    ) -> None:
        """Makes one update. Outside of replicas.

        Args:
            gradients: For each variable with a gradient what the replicas
                of this worker gave, summed.
            present: Which variables have one.
            step: Index of this step among all of the run.
            scale: What the loss was scaled by.
        """
        if scale is None:
            self._apply(gradients, present, step)
            return
        bad = [
            tf.reduce_any(~tf.math.is_finite(update.values(gradient)))
            for gradient in gradients
        ]

        def apply() -> tf.Tensor:
            unscaled = [update.divided(g, scale) for g in gradients]
            self._apply(unscaled, present, step)
            keras_internals.grow_scale(self._scaler)
            return tf.constant(True)

        def skip() -> tf.Tensor:
            keras_internals.shrink_scale(self._scaler)
            return tf.constant(False)

        tf.cond(tf.reduce_any(tf.stack(bad)), skip, apply)

    def accumulate(self, step: tf.Tensor) -> None:
        """Counts a micro-batch that is only accumulated."""
        with keras_internals.counted_exactly(self._optimizer):
            keras_internals.count_micro_step(self._optimizer)
        if self._optimizer.use_ema:
            self._strategy.run(
                lambda: keras_internals.update_averages(self._optimizer)
            )
        self._overwrite_with_average(step)

    def summed(self, gradients: Gradients) -> Gradients:
        """Sums gradients over the replicas of the worker. On a replica."""
        return update.summed(
            gradients, self._strategy.num_replicas_in_sync, self._optimizer
        )

    def _apply(
        self, gradients: Gradients, present: list[bool], step: tf.Tensor
    ) -> None:
        def apply(gradients: Gradients) -> None:
            queue = iter(gradients)
            full = [next(queue) if has else None for has in present]
            self._optimizer.apply(full, self._variables)

        with (
            keras_internals.engine_order(self._optimizer, self._packs.sent),
            keras_internals.counted_exactly(self._optimizer),
        ):
            self._strategy.run(apply, args=(gradients,))
        self._overwrite_with_average(step)

    def _overwrite_with_average(self, step: tf.Tensor) -> None:
        """Writes averages over weights where it is time to.

        The step that is due by its index does so, and no other.
        """
        for optimizer in keras_internals.parts(self._optimizer):
            if not (optimizer.use_ema and optimizer.ema_overwrite_frequency):
                continue
            made = step // (optimizer.gradient_accumulation_steps or 1) + 1
            due = tf.equal(made % optimizer.ema_overwrite_frequency, 0)
            tf.cond(
                due,
                update.returning(True, keras_internals.overwrite, optimizer),
                lambda: tf.constant(False),
            )
