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

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
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
        if self.replicas == 1 or self._surely_holds():
            return held
        if isinstance(held, tf.IndexedSlices):
            values = tf.where(
                self.local > 0, held.values, tf.zeros_like(held.values)
            )
            return tf.IndexedSlices(values, held.indices, held.dense_shape)
        return tf.where(self.local > 0, held, tf.cast(empty, held.dtype))

    def select_all(self, held: list[Any]) -> list[Any]:
        """Returns tensors, or zeros where the replica has no example.

        As `select`, but what is held is not copied.
        """
        if self.replicas == 1 or self._surely_holds():
            return held
        return tf.cond(
            self.local > 0,
            lambda: [_identity(value) for value in held],
            lambda: [_zeros_like(value) for value in held],
        )

    def _surely_holds(self) -> bool:
        return bool(tf.get_static_value(self.local))

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a value over all replicas, without gradient."""
        if self.replicas == 1:
            return value
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.stop_gradient(value))


def _identity(value: Any) -> Any:
    return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _zeros_like(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        zeros = tf.zeros_like(value.values)
        return tf.IndexedSlices(zeros, value.indices, value.dense_shape)
    return tf.zeros_like(value)


class GlobalLoss:
    """The loss of a compiled model in contributions of one replica.

    Args:
        model: A compiled and built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own = keras_internals.overrides(model, "compute_loss")
        self._current = threading.local()
        self._container = keras_internals.compiled_loss(model)
        if self._container is not None:
            self._container = keras_internals.with_losses_replaced(
                self._container, lambda loss: _BoundTerm(loss, self._current)
            )

    def __call__(
        self,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        added: list[tf.Tensor],
        share: BatchShare,
        training: bool = True,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Computes this replica's contribution to the loss.

        What layers add and the regularizers of weights take part with the
        replica's share of the examples: a loss that does not depend on the
        examples counts once in all, a mean over them is the global mean.

        Args:
            x: Inputs, for a `compute_loss` of the author's own.
            y: Targets, in the structure that `compile(loss=...)` expects.
            y_pred: What the model returned.
            sample_weight: Weights or None.
            added: What layers gave to `add_loss` during the call.
            share: This replica's part of the global batch.
            training: Whether this is a step of training.

        Returns:
            The contribution, a scalar, and the contribution of each compiled
            loss before its loss weight.

        Raises:
            ConfigurationError: There is nothing to minimize.
        """
        terms: list[tf.Tensor] = []
        self._current.share, self._current.terms = share, terms
        regularizers = [
            variable.regularizer(variable)
            for variable in self._model.trainable_variables
            if variable.regularizer is not None
        ]
        extra = [
            tf.reduce_sum(_as_float(loss)) for loss in [*added, *regularizers]
        ]
        contributions = []
        if self._own:
            contributions += self._of_author(
                (x, y, y_pred, sample_weight, training), extra, share
            )
        elif self._container is not None:
            total = self._container(y, y_pred, sample_weight)
            if total is not None:
                contributions.append(total)
        if not self._own:
            contributions += [_part(loss, share) for loss in extra]
        if not contributions:
            raise ConfigurationError(
                "A model needs a loss to train. Received: a model compiled "
                "without `loss` that adds none itself. Pass `loss` to "
                "`compile()`."
            )
        return tf.add_n(contributions), terms

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets a `compute_loss` of the author's own see global losses.

        While a step is traced, `super().compute_loss(...)` inside of it uses
        the denominators of the global batch.
        """
        if not self._own or self._container is None:
            yield
            return
        with keras_internals.compiled_loss_replaced(
            self._model, _Recorded(self._container, self._current)
        ):
            yield

    def _of_author(
        self,
        arguments: tuple[Any, ...],
        extra: list[tf.Tensor],
        share: BatchShare,
    ) -> list[tf.Tensor]:
        """The contributions in what a `compute_loss` of one's own returns.

        Where it calls Keras's, the compiled losses in it are contributions
        already, and what layers added is there divided by the number of
        replicas. All else counts as a mean over the examples.
        """
        self._current.total = None
        value = _as_float(keras_internals.compute_loss(self._model, *arguments))
        compiled = self._current.total
        if compiled is None:
            return [_part(value, share)]
        rest = value - compiled
        for loss in extra:
            rest -= tf.cast(loss, value.dtype) / share.replicas
        return [
            share.select(compiled, 0),
            *(_part(loss, share) for loss in [*extra, rest]),
        ]

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
    """A term in Keras's container of losses, for the step at hand."""

    def __init__(
        self, loss: keras.losses.Loss, current: threading.local
    ) -> None:
        self._term = _Term(loss)
        self._current = current

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> tf.Tensor:
        value = self._term.contribution(
            y_true, y_pred, sample_weight, self._current.share
        )
        self._current.terms.append(value)
        return value


class _Recorded:
    """A container of losses that notes what it returned."""

    def __init__(self, container: Any, current: threading.local) -> None:
        self._container = container
        self._current = current

    def __call__(self, *arguments: Any) -> tf.Tensor:
        self._current.total = self._container(*arguments)
        return self._current.total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)


def _part(loss: tf.Tensor, share: BatchShare) -> tf.Tensor:
    """A mean over the replica's examples as a part of the global mean."""
    return share.select(loss * share.fraction(loss.dtype), 0)


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
