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

A loss whose function has reduced the rows itself is read, as are the losses
that layers add and what a `compute_loss` of the author's own returns
(`reading.py`). On one replica all is as Keras has it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.contributions import BatchShare, as_float
from mgpu_tf.engine.reading import Reader, Unreadable, of_degree
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")

# An attribute of the record that warns of a loss over a whole batch: its name.
LOSS_OF_BATCH = "loss_of_batch"


class GlobalLoss:
    """The loss of a compiled model in contributions of one replica.

    Args:
        model: A compiled and built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own = keras_internals.overrides(model, "compute_loss")
        self._current = threading.local()
        self._container = keras_internals.with_losses_replaced(
            keras_internals.compiled_loss(model),
            lambda loss: _BoundTerm(loss, self._current),
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
        reader: Reader | None = None,
        variables: list[keras.Variable] | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Computes this replica's contribution to the loss.

        What layers add and what a `compute_loss` of the author's own returns
        is read: a constant, as of the regularizers, counts once in all, a
        mean over the examples is the global mean, a sum the global sum.

        Args:
            x: Inputs, for a `compute_loss` of the author's own.
            y: Targets, in the structure that `compile(loss=...)` expects.
            y_pred: What the model returned.
            sample_weight: Weights or None.
            added: What layers gave to `add_loss` during the call.
            share: This replica's part of the global batch.
            training: Whether this is a step of training.
            reader: Reads the step; by default one that knows of the
                arguments alone.
            variables: The weights whose regularizers count; by default all.

        Returns:
            The contribution, a scalar, and the contribution of each compiled
            loss before its loss weight.

        Raises:
            ConfigurationError: There is nothing to minimize, or it cannot be
                read what a value is over the examples.
        """
        terms: list[tf.Tensor] = []
        if reader is None:
            reader = Reader([x, y, y_pred, sample_weight])
        current = self._current
        current.share, current.terms, current.reader = share, terms, reader
        if self._own:
            arguments = (x, y, y_pred, sample_weight, training)
            value = keras_internals.compute_loss(self._model, *arguments)
            name = f"{type(self._model).__name__}.compute_loss"
            return _read(reader, as_float(value), share, name), terms
        contributions = []
        if self._container is not None:
            total = self._container(y, y_pred, sample_weight)
            if total is not None:
                contributions.append(total)
        if variables is None:
            variables = self._model.trainable_variables
        contributions += self._of_layers(added, variables)
        if not contributions:
            raise ConfigurationError(
                "A model needs a loss to train. Received: a model compiled "
                "without `loss` that adds none itself. Pass `loss` to "
                "`compile()`."
            )
        return tf.add_n(contributions), terms

    def of_layers(
        self,
        added: list[tf.Tensor],
        share: BatchShare,
        reader: Reader,
        variables: list[keras.Variable],
    ) -> list[tf.Tensor]:
        """Returns the contributions of some layers, without the outputs.

        Args:
            added: What the layers gave to `add_loss`.
            share: This replica's part of the global batch.
            reader: Reads the step.
            variables: Their weights, for the regularizers.
        """
        current = self._current
        current.share, current.terms, current.reader = share, [], reader
        return self._of_layers(added, variables)

    def _of_layers(
        self, added: list[tf.Tensor], variables: list[keras.Variable]
    ) -> list[tf.Tensor]:
        regularizers = [
            variable.regularizer(variable)
            for variable in variables
            if variable.regularizer is not None
        ]
        return [
            *map(self._added, added),
            *map(self._of_weights, regularizers),
        ]

    def regularized(
        self, given: list[tuple[keras.Variable, tf.Tensor]]
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the weights with regularizers, for the scope of a step.

        A `compute_loss` of the author's own asks Keras for their losses,
        which looks for the weights there and nowhere else.

        Args:
            given: The variables that have a value there already.
        """
        known = {id(variable) for variable, _ in given}
        return [
            (variable, tf.convert_to_tensor(variable))
            for variable in self._model.trainable_variables
            if self._own
            and variable.regularizer is not None
            and id(variable) not in known
        ]

    def joined(
        self, join: Callable[[keras.Variable], tf.Tensor | None]
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the same of weights that are stored in parts.

        Args:
            join: Makes a whole weight of parts; None of one that has none.
        """
        if not self._own:
            return []
        pairs = [
            (variable, join(variable))
            for variable in self._model.trainable_variables
            if variable.regularizer is not None
        ]
        return [(v, value) for v, value in pairs if value is not None]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets a `compute_loss` of the author's own see global losses.

        While a step is traced, what `super().compute_loss(...)` inside of it
        returns is made of contributions.
        """
        if not self._own:
            yield
            return
        container = self._container
        if container is not None:
            container = _Declared(container, self._current)
        elif keras_internals.compiled_loss(self._model) is not None:
            container = _Unbuilt(self._model, self._current)

        def added(loss: tf.Tensor) -> tf.Tensor:
            return self._current.reader.declare(self._added(loss))

        with keras_internals.losses_replaced(self._model, container, added):
            yield

    def _added(self, loss: tf.Tensor) -> tf.Tensor:
        """The contribution of what a layer added, summed as Keras sums it."""
        total = tf.reduce_sum(as_float(loss))
        current = self._current
        return _read(current.reader, total, current.share, "add_loss")

    def _of_weights(self, loss: Any) -> tf.Tensor:
        """The contribution of a regularizer, which no example changes."""
        total, share = tf.reduce_sum(as_float(loss)), self._current.share
        if share.replicas == 1:
            return total
        return share.select(of_degree(0, total, share), 0)

    @property
    def trackers(self) -> list[keras.metrics.Mean]:
        """The means that Keras reports for single losses of several."""
        return [] if self._container is None else self._container.metrics


def _read(
    reader: Reader, value: tf.Tensor, share: BatchShare, name: str
) -> tf.Tensor:
    """The contribution to a value that the author's code has reduced."""
    if share.replicas == 1:
        return value
    try:
        return share.select(reader.contribution(value, share), 0)
    except Unreadable as error:
        raise ConfigurationError(
            "On several replicas a loss must be a sum of means, sums and "
            "constants over the examples, or be declared. Received: from "
            f"{name}, on {share.replicas} replicas, {error}. Reduce one "
            "value for each example by `mgpu_tf.mean_over_batch(values)` or "
            "`mgpu_tf.sum_over_batch(values)`."
        ) from None


class _Term:
    """One compiled loss with its denominator for the whole global batch."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        _check_reduction(loss)
        self._loss = loss
        self._warned = False

    def contribution(
        self, y_true: Any, y_pred: Any, sample_weight: Any, share: BatchShare
    ) -> tf.Tensor:
        if share.replicas == 1:
            return self._loss(y_true, y_pred, sample_weight)
        values, raw = keras_internals.unreduced(
            self._loss, y_true, y_pred, sample_weight
        )
        reader = Reader([y_true, y_pred, sample_weight])
        if tf.is_symbolic_tensor(raw) and raw.shape.rank is not None:
            if not reader.has_rows(raw):
                value = self._loss(y_true, y_pred, sample_weight)
                return self._of_batch(value, reader, share)
            known = keras_internals.is_known_by_example(self._loss)
            if not known and not reader.is_by_example(raw):
                self._warn()
        mask = keras_internals.mask_of_loss(y_pred, raw)
        weights = keras_internals.merged_weights(values, sample_weight, mask)
        contribution = tf.math.divide_no_nan(
            tf.reduce_sum(values),
            self._denominator(values, weights, mask, share),
        )
        return share.select(contribution, 0)

    def _of_batch(
        self, value: tf.Tensor, reader: Reader, share: BatchShare
    ) -> tf.Tensor:
        """The contribution of a loss that was reduced over the rows."""
        value = keras_internals.before_scaling(value.op, value)
        try:
            contribution = reader.contribution(value, share)
        except Unreadable:
            self._warn()
            contribution = value * share.fraction(value.dtype)
        return share.select(contribution, 0)

    def _warn(self) -> None:
        if not self._warned:
            _log.warning(
                "the loss %r is not a sum over examples: each replica takes "
                "it of its own rows and the mean of these is minimized, "
                "which is not the loss of the batch that one device takes",
                self._loss.name,
                extra={LOSS_OF_BATCH: self._loss.name},
            )
        self._warned = True

    def _denominator(
        self,
        values: tf.Tensor,
        weights: tf.Tensor | None,
        mask: Any,
        share: BatchShare,
    ) -> tf.Tensor:
        reduction = self._loss.reduction
        if reduction == "sum":
            return tf.ones((), values.dtype)
        if reduction == "mean_with_sample_weight" and weights is not None:
            return share.sum_over_replicas(tf.reduce_sum(weights))
        per_example = _elements(values)
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


class _Declared:
    """A container of losses whose sum is known for a contribution."""

    def __init__(self, container: Any, current: threading.local) -> None:
        self._container = container
        self._current = current

    def __call__(self, *arguments: Any) -> tf.Tensor | None:
        total = self._container(*arguments)
        return None if total is None else self._current.reader.declare(total)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)


class _Unbuilt:
    """The compiled losses of a model that did not use them when built."""

    def __init__(self, model: keras.Model, current: threading.local) -> None:
        self._container: Any = keras_internals.compiled_loss(model)
        self._name = type(model).__name__
        self._current = current

    def __call__(self, *arguments: Any) -> tf.Tensor | None:
        if self._current.share.replicas == 1:
            return self._container(*arguments)
        raise ConfigurationError(
            "A compute_loss of one's own must call Keras's in training and "
            f"in evaluation, or in neither. Received: {self._name}, which "
            "does in training only. Call it in both, or leave out the loss "
            "in `compile()`."
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)


def _elements(values: tf.Tensor) -> tf.Tensor:
    """Returns the number of losses of one example."""
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)


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
