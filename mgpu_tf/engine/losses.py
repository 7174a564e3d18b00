"""The loss of a global batch, as contributions that replicas can add up.

Keras divides each loss by what the replica at hand happens to hold and then
by the number of replicas: a mean of means, wrong as soon as two replicas hold
different numbers of examples, weights or unmasked steps. Here every term has
one denominator for the whole global batch,

    contribution of a replica = sum of its weighted losses / global denominator

so that the sum of the contributions over replicas is what one device would
have computed on the whole batch. Denominators by the loss's `reduction`:

    "sum"                              1
    "sum_over_batch_size", "mean"      number of losses; with a mask, of those
                                       that are not masked out
    "mean_with_sample_weight"          sum of the weights
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class BatchShare:
    """How much of the global batch a replica holds.

    Attributes:
        local: Examples on this replica, an int64 scalar; may be 0.
        total: Examples of the global batch, an int64 scalar, at least 1.
        replicas: Number of replicas.
    """

    local: tf.Tensor
    total: tf.Tensor
    replicas: int

    def fraction(self, dtype: tf.DType) -> tf.Tensor:
        """Returns local / total."""
        return tf.cast(self.local, dtype) / tf.cast(self.total, dtype)

    def select(self, held: Any, empty: Any) -> Any:
        """Returns `held`, or `empty` where the replica has no example.

        The values are selected, not multiplied: whatever a layer makes of
        an empty batch, NaN included, is dropped.
        """
        if self.replicas == 1:
            return held
        if isinstance(held, tf.IndexedSlices):
            values = tf.where(
                self.local > 0, held.values, tf.zeros_like(held.values)
            )
            return tf.IndexedSlices(values, held.indices, held.dense_shape)
        return tf.where(self.local > 0, held, tf.cast(empty, held.dtype))

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a value over all replicas, without gradient."""
        if self.replicas == 1:
            return value
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.stop_gradient(value))


class GlobalLoss:
    """The loss of a compiled model in contributions of one replica.

    Args:
        model: A compiled and built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._container = keras_internals.compiled_loss(model)
        if self._container is not None:
            # Refuses what cannot be reduced before anything is traced.
            keras_internals.with_losses_replaced(self._container, _Term)

    def __call__(
        self,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        added: list[tf.Tensor],
        share: BatchShare,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Computes this replica's contribution to the loss.

        What layers add and the regularizers of weights take part with the
        replica's share of the examples: a loss that does not depend on the
        examples counts once in all, a mean over them is the global mean.

        Args:
            y: Targets, in the structure that `compile(loss=...)` expects.
            y_pred: What the model returned.
            sample_weight: Weights or None.
            added: What layers gave to `add_loss` during the call.
            share: This replica's part of the global batch.

        Returns:
            The contribution, a scalar, and the contribution of each compiled
            loss before its loss weight.

        Raises:
            ConfigurationError: There is nothing to minimize.
        """
        contributions: list[tf.Tensor] = []
        terms: list[tf.Tensor] = []
        if self._container is not None:

            def recorded(loss: keras.losses.Loss) -> _BoundTerm:
                return _BoundTerm(_Term(loss), share, terms)

            container = keras_internals.with_losses_replaced(
                self._container, recorded
            )
            total = container(y, y_pred, sample_weight)
            if total is not None:
                contributions.append(total)
        regularizers = [
            variable.regularizer(variable)
            for variable in self._model.trainable_variables
            if variable.regularizer is not None
        ]
        for extra in map(_as_float, [*added, *regularizers]):
            contributions.append(
                share.select(
                    tf.reduce_sum(extra) * share.fraction(extra.dtype), 0
                )
            )
        if not contributions:
            raise ConfigurationError(
                "A model needs a loss to train. Received: a model compiled "
                "without `loss` that adds none itself. Pass `loss` to "
                "`compile()`."
            )
        return tf.add_n(contributions), terms

    @property
    def trackers(self) -> list[keras.metrics.Mean]:
        """The means that Keras reports for single losses of several."""
        return [] if self._container is None else self._container.metrics


class _Term:
    """One compiled loss with its denominator for the whole global batch."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        _check_reduction(loss)
        self._loss = loss
        self._unreduced = keras_internals.shallow_copy(loss)
        self._unreduced.reduction = "none"

    def contribution(
        self, y_true: Any, y_pred: Any, sample_weight: Any, share: BatchShare
    ) -> tf.Tensor:
        values = self._unreduced(y_true, y_pred, sample_weight)
        if values.shape.rank == 0:
            # The author's function took the mean over its batch itself.
            return share.select(values * share.fraction(values.dtype), 0)
        weights = keras_internals.merged_weights(
            values, sample_weight, keras_internals.mask_of(y_pred)
        )
        contribution = tf.math.divide_no_nan(
            tf.reduce_sum(values),
            self._denominator(values, weights, y_pred, share),
        )
        return share.select(contribution, 0)

    def _denominator(
        self,
        values: tf.Tensor,
        weights: tf.Tensor | None,
        y_pred: Any,
        share: BatchShare,
    ) -> tf.Tensor:
        reduction = self._loss.reduction
        if reduction == "sum":
            return tf.ones((), values.dtype)
        if reduction == "mean_with_sample_weight" and weights is not None:
            return share.sum_over_replicas(tf.reduce_sum(weights))
        per_example = _elements(values)
        mask = keras_internals.mask_of(y_pred)
        if mask is None:
            return tf.cast(share.total, values.dtype) * per_example
        kept = tf.reduce_sum(tf.cast(mask, values.dtype))
        return (
            share.sum_over_replicas(kept)
            * per_example
            / _elements(tf.cast(mask, values.dtype))
        )


class _BoundTerm:
    """A term during one step; called by Keras's container of losses."""

    def __init__(
        self, term: _Term, share: BatchShare, record: list[tf.Tensor]
    ) -> None:
        self._term = term
        self._share = share
        self._record = record

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> tf.Tensor:
        value = self._term.contribution(
            y_true, y_pred, sample_weight, self._share
        )
        self._record.append(value)
        return value


def _elements(values: tf.Tensor) -> tf.Tensor:
    """Returns the number of losses of one example."""
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)


def _as_float(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    if value.dtype.is_floating:
        return value
    return tf.cast(value, keras.config.floatx())


def _check_reduction(loss: keras.losses.Loss) -> None:
    if loss.reduction in (None, "none"):
        raise ConfigurationError(
            "A loss must be reduced to be minimized. Received: "
            f"reduction={loss.reduction!r} on the loss {loss.name!r}. Use "
            "'sum_over_batch_size', 'mean_with_sample_weight' or 'sum'."
        )
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise ConfigurationError(
            "A loss must define `call`, not `__call__`, so that its "
            "reduction can be global. Received: the loss "
            f"{type(loss).__name__!r}. Rename the method to `call` and let "
            "it return one value for each example."
        )
