"""Losses and metrics of all rows of a replica, behind the last stage.

    micro-batches   forward through all stages        -> outputs of all rows
    the head        losses and metrics of them        -> their gradients
    micro-batches   backward through all stages

Where a loss or a metric is not known to add up over micro-batches, such as one
that is divided by a sum of masks, all forward passes come first, as in the
schedule `gpipe`. The head then computes what Keras's own step does on a replica
of any other strategy, and replicas exchange what they exchange there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import ReplicaState, Writes
from mgpu_tf.engine.exchange.crossing import Exchange
from mgpu_tf.engine.row_proof import RowProof
from mgpu_tf.engine.step.losses import GlobalLoss
from mgpu_tf.engine.step.replica_step import Logs, ReplicaStep
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.trace_again import ReadRefused
from mgpu_tf.errors import ConfigurationError


class Head(ReplicaStep):
    """What follows the outputs of a model.

    Args:
        model: A compiled and built model.
        loss: Its loss, which the stages use as well.
        state: What a step may write besides weights.
        replicas: Number of replicas that step together.
        exchange: Gives replicas the rows of all; None where there is one.
        tensor: What computes with parts of weights, where weights are split
            so.
        same_rows: How many replicas compute the loss of the same rows.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: GlobalLoss,
        state: ReplicaState,
        replicas: int,
        exchange: Exchange | None,
        tensor: TensorParallel | None,
        same_rows: int,
    ) -> None:
        super().__init__(
            *(model, loss, state, replicas),
            same_rows=same_rows,
            exchange=exchange,
        )
        self._metrics_can_wait = False
        self._parts = tensor
        self._own_loss = keras_internals.has_own_loss(model)
        # Those of other losses are counted with the stages.
        self._regularized = None if self._own_loss else []
        # Each replica is a thread of its own.
        self._here = threading.local()

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss of the head may read weights.

        It has the regularizers of all of them.
        """
        return self._own_loss

    def of_outputs(
        self,
        outputs: list[tf.Tensor],
        packed: Callable[[list[tf.Tensor]], Any],
        data: Any,
        share: BatchShare,
        added: Sequence[tf.Tensor],
        weights: Writes,
        scale: Callable[[tf.Tensor], tf.Tensor] | None,
    ) -> tuple[tf.Tensor, list[Any], list[Any], Writes, Logs]:
        """Computes losses and metrics of the rows of a replica. On a replica.

        Args:
            outputs: What stages have sent of those of the model, of all rows.
            packed: Returns the outputs of the model, of these.
            data: The rows.
            share: The part of the replica in the global batch.
            added: The contributions of the stages to the loss.
            weights: The weights that the loss may read, with what this
                replica computes with of each.
            scale: Scales the loss; None where nothing is trained.

        Returns:
            The loss, the gradients of the outputs and of the weights, what is
            to be written, and logs of the author's own.
        """
        here = self._here
        here.outputs, here.added = outputs, list(added)
        here.packed = packed
        metrics = [
            (variable, value)
            for variable, value in self._state.values()
            if self._state.is_metric(variable)
        ]
        values = [value for _, value in weights]
        watched = [each for each in outputs if each.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*watched, *values])
            whole = self._whole(weights)
            given = [*self._state.replica_seeds(), *metrics, *whole]
            with reached():
                loss, writes, logs = self.forward(
                    data, share, scale is not None, given
                )
            scaled = loss if scale is None else scale(loss)
            scaled = scaled / tf.cast(self._same_rows, scaled.dtype)
        gradients: list[Any] = [None] * len(outputs)
        of_weights: list[Any] = [None] * len(values)
        if scale is not None:
            found, of_weights = tape.gradient(scaled, (watched, values))
            queue = iter(found)
            gradients = [
                next(queue) if each.dtype.is_floating else None
                for each in outputs
            ]
        return loss, gradients, of_weights, writes, logs

    def _by_rule(
        self,
        variable: keras.Variable,
        value: tf.Tensor,
        before: tf.Tensor | None,
        proof: RowProof,
        share: BatchShare,
    ) -> tf.Tensor:
        """What a head writes; where it has all rows, as on one device."""
        if share.replicas > 1:
            return super()._by_rule(variable, value, before, proof, share)
        self._state.agree(variable)
        return value

    def _whole(self, weights: Writes) -> Writes:
        """Returns whole weights, which have the gradients of their parts."""
        if self._parts is None:
            return list(weights)
        join = self._parts.join(weights)
        joined = [(variable, join(variable)) for variable, _ in weights]
        return [
            (variable, value if found is None else found)
            for (variable, value), (_, found) in zip(
                weights, joined, strict=True
            )
        ]

    def _read(self, variable: keras.Variable) -> None:
        """Refuses what only stages read, which write it after this.

        And weights, whose gradient would be lost.
        """
        trained = self._model.trainable_variables
        if any(variable is v for v in [*trained, *self._state.layers]):
            raise of_another_stage(variable.path)

    def _outputs_of_model(self, x: Any, training: bool) -> Any:
        """Returns what the stages have made."""
        del x, training
        return self._here.packed(self._here.outputs)

    def _grown(
        self, loss: tf.Tensor, terms: list[tf.Tensor], share: BatchShare
    ) -> Writes:
        """As in the base; the loss has what the stages add to it."""
        for part in self._here.added:
            loss = loss + tf.cast(part, loss.dtype)
        return super()._grown(loss, terms, share)


def of_another_stage(path: str) -> ConfigurationError:
    """Returns the refusal of what a stage reads of another."""
    return ReadRefused(
        "A stage of a pipeline reads the weights and the state of its own "
        f"layers. Received: a layer or a loss that reads {path}, which is of "
        "another layer, of the loss or of the model itself. Name "
        "pipeline_stages so that both are in one stage, call the layer in "
        "place of reading its weight, or use 'fsdp'."
    )


@contextlib.contextmanager
def reached() -> Iterator[None]:
    """Refuses tensors that were made in a graph of their own.

    Raises:
        ConfigurationError: What runs in the block reads one.
    """
    try:
        yield
    except Exception as error:
        # A class that TensorFlow does not export.
        if type(error).__name__ != "InaccessibleTensorError":
            raise
        raise ConfigurationError(
            "On a pipeline, what a layer has made reaches a loss, a metric or "
            "another stage by outputs, and not by an attribute. Received: a "
            "tensor that a layer has kept. Return it from the call of the "
            "model, or use 'fsdp'."
        ) from None
