"""One replica's part of a step: forward pass, loss contribution, gradients.

The forward pass runs in a `keras.StatelessScope`: what layers and metrics
would write is collected, and the engine decides where it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.losses import BatchShare, GlobalLoss
from mgpu_tf.engine.state import ReplicaState, Writes
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")


class ReplicaStep:
    """The computation of one replica.

    Args:
        model: A compiled and built model.
        loss: Its loss in contributions.
        state: What a step may write besides weights.
        replicas: Number of replicas that step together.

    Attributes:
        present: Which trainable variables have a gradient; known once a step
            was traced.
        written: The variables that a step writes, in the order of the values
            that `gradients` returns.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: GlobalLoss,
        state: ReplicaState,
        replicas: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._state = state
        self._replicas = replicas
        self.present: list[bool] = []
        self.written: list[keras.Variable] = []

    def forward(
        self,
        data: Any,
        share: BatchShare,
        training: bool,
        given: Writes | None = None,
    ) -> tuple[tf.Tensor, Writes]:
        """Computes the loss and what is to be written.

        Args:
            data: The rows of this replica.
            share: This replica's part of the global batch.
            training: Whether this is a step of training.
            given: Values that variables have for this step in place of
                their own, weights too; by default the seeds of this replica.

        Returns:
            The loss contribution, and the writes.
        """
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if given is None:
            given = self._state.replica_seeds()
        with keras.StatelessScope(given, collect_losses=True) as scope:
            if keras_internals.takes_training(model):
                y_pred = model(x, training=training)
            else:
                y_pred = model(x)
            loss, terms = self._loss(
                x, y, y_pred, sample_weight, scope.losses, share, training
            )
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        # By variable, since Keras writes to some of these means as well.
        writes: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        before = {id(variable): value for variable, value in given}
        seeds = {id(state) for state in self._state.seeds}
        for variable in self._state.variables:
            value = scope.get_current_value(variable)
            if value is None:
                continue
            if id(variable) in seeds and id(variable) in before:
                value = self._state.next_seed(variable, value)
            elif not self._state.is_agreed(variable):
                value = share.select(value, before.get(id(variable), variable))
            writes[id(variable)] = (variable, value)
        tracker = keras_internals.loss_tracker(model)
        for mean, contribution in [
            (tracker, loss),
            *zip(self._loss.trackers, terms, strict=False),
        ]:
            for variable, increment in _mean_increments(
                mean, contribution, share
            ):
                base = before.get(id(variable), variable)
                writes[id(variable)] = (variable, base + increment)
        return loss, list(writes.values())

    def gradients(
        self,
        data: Any,
        local: tf.Tensor,
        total: tf.Tensor,
        scale: Callable[[tf.Tensor], tf.Tensor],
        given: Writes | None = None,
        jit_compile: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Computes gradients.

        Args:
            data: The rows of this replica.
            local: How many they are.
            total: Rows of the global batch.
            scale: Scales the loss.
            given: As for `forward`.
            jit_compile: Whether XLA compiles this, where it can.

        Returns:
            The gradients that there are, and the values to be written to
            `written`.
        """

        def compute(
            data: Any, local: tf.Tensor, total: tf.Tensor
        ) -> tuple[list[Any], list[tf.Tensor]]:
            share = BatchShare(local, total, self._replicas)
            variables = self._model.trainable_variables
            values = {id(variable): value for variable, value in given or ()}
            weights = [values.get(id(v), v) for v in variables]
            with tf.GradientTape() as tape:
                tape.watch([w for w in weights if isinstance(w, tf.Tensor)])
                loss, writes = self.forward(
                    data, share, training=True, given=given
                )
                loss = scale(loss)
            gradients = tape.gradient(loss, weights)
            _check_gradients(gradients, variables)
            self.present = [g is not None for g in gradients]
            self.written = [variable for variable, _ in writes]
            present = [g for g in gradients if g is not None]
            return present, [value for _, value in writes]

        if not jit_compile or not self._compiled_by_xla():
            return compute(data, local, total)
        jitted = tf.function(compute, jit_compile=True, autograph=False)
        return jitted(data, local, total)

    @property
    def can_be_compiled(self) -> bool:
        """Returns whether XLA can compile forward and backward pass."""
        alone = self._replicas == 1
        apart = alone or not keras_internals.communicates(self._model)
        return apart and not self._state.stored_once

    def _compiled_by_xla(self) -> bool:
        can_be = self.can_be_compiled
        if not can_be:
            _log.info(
                "jit_compile=True: the replicas of %s exchange values or "
                "share variables in the forward pass, which XLA does not "
                "compile; it runs without",
                self._model.name,
            )
        return can_be


def outputs_of(model: keras.Model, data: Any) -> Any:
    """Returns what a model predicts for the rows of one replica."""
    if keras_internals.overrides(model, "predict_step"):
        return model.predict_step(data)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    if keras_internals.takes_training(model):
        return model(x, training=False)
    return model(x)


def _mean_increments(
    mean: keras.metrics.Mean, value: tf.Tensor, share: BatchShare
) -> Writes:
    """What a contribution adds to a global mean over examples."""
    weight = tf.cast(share.total, mean.total.dtype)
    value = tf.cast(tf.stop_gradient(value), mean.total.dtype)
    return [
        (mean.total, value * weight),
        (mean.count, tf.cast(share.local, mean.count.dtype)),
    ]


def _check_gradients(
    gradients: list[Any], variables: list[keras.Variable]
) -> None:
    if all(gradient is None for gradient in gradients):
        raise ConfigurationError(
            "The loss must depend on the trainable variables. Received: a "
            f"loss that depends on none of {len(variables)}. Check that the "
            "loss is computed from the model's outputs and that layers are "
            "trainable."
        )
