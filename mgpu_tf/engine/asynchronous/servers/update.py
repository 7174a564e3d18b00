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

import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.asynchronous.servers.packed_variables import Packs
from mgpu_tf.engine.asynchronous.servers.sections import whole
from mgpu_tf.engine.exchange.embedding_rows import RowGather
from mgpu_tf.engine.step import update
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

Gradients = list[Any]


class AsynchronousUpdate:
    """Applies gradients with the optimizer of a model.

    Args:
        model: A compiled and built model.
        strategy: Its strategy.
        packs: Whose gradients go together.
        options: How steps are made.

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
        options: StepOptions,
    ) -> None:
        self._strategy, self._packs = strategy, packs
        self._rows = RowGather(strategy, options, apart=False)
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
            self._rescale(keras_internals.grow_scale)
            return tf.constant(True)

        def skip() -> tf.Tensor:
            self._rescale(keras_internals.shrink_scale)
            return tf.constant(False)

        tf.cond(tf.reduce_any(tf.stack(bad)), skip, apply)

    def accumulate(self, step: tf.Tensor) -> None:
        """Moves averages on after a micro-batch that is only accumulated.

        Micro-batches are counted with the update that they end in.
        """
        if not self._optimizer.use_ema:
            return
        values = [
            tf.convert_to_tensor(variable.value)
            for variable in keras_internals.own_variables(self._optimizer)
        ]
        for name, group in self._packs.groups(self._variables).items():
            self._whole(name, self._optimizer, group, None, step, values, None)

    def summed(self, gradients: Gradients) -> Gradients:
        """Sums gradients over the replicas of the worker. On a replica."""
        context = tf.distribute.get_replica_context()
        sparse = [isinstance(g, tf.IndexedSlices) for g in gradients]
        found = list(itertools.compress(gradients, sparse))
        if found:
            found = turns.merged(
                lambda _, *every: self._rows(list(every)), found
            )
        dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
        if dense and context.num_replicas_in_sync > 1:
            dense = sum_over_replicas(dense)
        rows, sums = iter(found), iter(dense)
        return [next(rows) if each else next(sums) for each in sparse]

    def _apply(
        self, gradients: Gradients, present: list[bool], step: tf.Tensor
    ) -> None:
        queue = iter(gradients)
        full = [next(queue) if has else None for has in present]
        self._constraints = {id(v): v.constraint for v in self._variables}

        def apply(
            part: keras.optimizers.Optimizer,
            gradients: Gradients,
            variables: list[keras.Variable],
        ) -> None:
            values, rate = self._counted(part)
            sent = self._packs.sent(gradients, variables)
            of = {id(v): g for v, g in zip(variables, sent, strict=True)}
            for name, group in self._packs.groups(variables).items():
                some = [of[id(variable)] for variable in group]
                self._whole(name, part, group, some, step, values, rate)

        with keras_internals.applied_by(self._optimizer, apply):
            update.hand_over(
                self._optimizer,
                full,
                self._variables,
                by_pairs=self._scaler is None,
            )

    def _rescale(self, change: Callable[[Any], None]) -> None:
        """Changes the scale of the loss and its counter together."""

        def body() -> list[tf.Tensor]:
            change(self._scaler)
            return []

        whole("scale", self._scaler.dynamic_scale.value.device, body, [])

    def _counted(
        self, part: keras.optimizers.Optimizer
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Gives an update a number of its own; no two have the same."""

        device = keras_internals.counter(part).value.device
        elsewhere = [
            variable
            for variable in keras_internals.own_variables(part)
            if variable.value.device != device
        ]

        def count(read: list[tf.Tensor]) -> list[tf.Tensor]:
            every = part.gradient_accumulation_steps or 1
            given = list(zip(elsewhere, read, strict=True))
            values, rate = keras_internals.count_update(part, every, given)
            return [*values, rate]

        read = [tf.convert_to_tensor(variable.value) for variable in elsewhere]
        *values, rate = whole("count", device, count, [read])
        return values, rate

    def _whole(
        self,
        name: str,
        part: keras.optimizers.Optimizer,
        group: list[keras.Variable],
        gradients: Gradients | None,
        step: tf.Tensor,
        values: list[tf.Tensor],
        rate: tf.Tensor | None,
    ) -> None:
        """Updates some weights of a server and all that belongs to them.

        Args:
            name: What is locked.
            part: Their optimizer.
            group: The weights.
            gradients: Theirs; None moves averages on only.
            step: Index of this step among all of the run.
            values: What the optimizer keeps for all weights.
            rate: The learning rate.
        """

        def update_all(
            gradients: Gradients | None,
            values: list[tf.Tensor],
            rate: tf.Tensor,
            overwrite: tf.Tensor,
        ) -> list[tf.Tensor]:
            if gradients is not None:
                keras_internals.update_weights(
                    part, gradients, group, values, rate
                )
            keras_internals.average_weights(part, group, values, overwrite)
            for variable in group:
                constrain = self._constraints[id(variable)]
                if constrain is not None:
                    variable.assign(constrain(variable))
            return []

        whole(
            name,
            group[0].value.device,
            update_all,
            [gradients, values, rate, self._overwrites(part, step)],
        )

    def _overwrites(
        self, part: keras.optimizers.Optimizer, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns whether averages are written over weights in this step.

        The step that is due by its index does so, and no other.
        """
        if not (part.use_ema and part.ema_overwrite_frequency):
            return tf.constant(False)
        made = step // (part.gradient_accumulation_steps or 1) + 1
        return tf.equal(made % part.ema_overwrite_frequency, 0)
