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

This is how losses are computed that are proven to have a value for each row,
and sums and means of such (`row_proof.py`). For every other loss, replicas send
each other targets and outputs, and each computes the loss of the global batch:
right, whatever it is, at the cost of what is sent. On one replica all is as
Keras has it.
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
from mgpu_tf.engine.author.contributions import (
    BatchShare,
    as_float,
    current_exchange,
)
from mgpu_tf.engine.author.global_sums import of_sums
from mgpu_tf.engine.author.step_scope import StepScope, leaves_of, proof_of
from mgpu_tf.engine.exchange.crossing import Exchange
from mgpu_tf.engine.row_proof import (
    FIXED,
    MEAN,
    SUM,
    UNPROVEN,
    RowProof,
    Rows,
    proving,
)
from mgpu_tf.engine.step.calls.state_parts import held, keep, parts_of
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

_log = logging.getLogger("mgpu_tf")


class NeedsAllRows(ConfigurationError):
    """Something is not known to add up over parts of a batch."""


class GlobalLoss:
    """The loss of a compiled model in contributions of one replica.

    Args:
        model: A compiled and built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own = keras_internals.has_own_loss(model)
        self._said: set[str] = set()
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
        variables: list[keras.Variable] | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Computes this replica's contribution to the loss.

        What layers add and what a `compute_loss` of the author's own returns
        is proven: a constant, as of the regularizers, counts once in all, a
        mean over the examples is the global mean, a sum the global sum.

        Args:
            x: Inputs, for a `compute_loss` of the author's own.
            y: Targets, in the structure that `compile(loss=...)` expects.
            y_pred: What the model returned.
            sample_weight: Weights or None.
            added: What layers gave to `add_loss` during the call.
            share: This replica's part of the global batch.
            training: Whether this is a step of training.
            variables: The weights whose regularizers count; by default all.

        Returns:
            The contribution, a scalar, and the contribution of each compiled
            loss before its loss weight.

        Raises:
            ConfigurationError: There is nothing to minimize, or it is not
                proven what a value is over the examples.
        """
        terms: list[tf.Tensor] = []
        current = self._current
        current.share, current.terms = share, terms
        current.plain = False
        if self._own:
            return self._of_author(
                (x, y, y_pred, sample_weight), training
            ), terms
        contributions = []
        if self._container is None:
            self._refuse_unbuilt()
        else:
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

    def _refuse_unbuilt(self) -> None:
        if keras_internals.compiled_loss(self._model) is not None:
            raise ConfigurationError(
                "A compiled loss is built on the first batch of training, "
                "where the train_step is the author's own. Received: "
                f"{type(self._model).__name__}, whose call or loss does not "
                "take such a batch. Override test_step as well, or compile "
                "without a loss."
            )

    def _of_author(self, given: Any, training: bool) -> tf.Tensor:
        """The contribution of a `compute_loss` that the author wrote.

        It is computed from the rows of this replica, with means of them for
        what Keras's own `compute_loss` and layers add. If it is not proven that
        the value is a mean or a sum of these, it is computed again from all
        rows.
        """
        current, share = self._current, self._current.share
        name = f"{type(self._model).__name__}.compute_loss"
        scope = keras_internals.stateless_scope()
        assert isinstance(scope, StepScope)

        def value_of(given: Any) -> tf.Tensor:
            value = keras_internals.compute_loss(self._model, *given, training)
            return as_float(value)

        if share.replicas == 1:
            current.whole = None
            return value_of(given)
        mark = scope.mark()
        if scope.may_try(self._model):
            part = self._of_rows(given, value_of, scope)
            if part is None:
                scope.give_up(mark, self._model)
                part = self._of_sums(given, value_of, scope)
            if part is not None:
                return share.select(part, 0)
            scope.give_up(mark, self._model)
        exchange = current_exchange()
        if exchange is None:
            raise _needs_whole_batch(name)
        if name not in self._said:
            say_gathered(name, given)
        self._said.add(name)
        fraction = share.fraction(tf.float64)
        current.whole = True
        every = exchange.whole(given, share.local, fraction, scope.has_rows)
        added = list(scope.losses)
        for place, loss in enumerate(added):
            self._make_global(scope, place, loss)
        scope.take_alike([*leaves_of(every), *leaves_of(scope.losses)])
        begun = scope.known_operations()
        with scope.of_all_rows(), self._plainly():
            value = value_of(every)
        written = list(map(scope.value, scope.written_since(mark)))
        scope.check_given(name, begun, [value, current.terms, written])
        scope.losses[: len(added)] = added
        for variable in self._without_means(scope.written_since(mark)):
            scope.agree(variable)
        current.terms[:] = [
            term * tf.cast(fraction, term.dtype) for term in current.terms
        ]
        return value * tf.cast(fraction, value.dtype)

    def _without_means(
        self, variables: list[keras.Variable]
    ) -> list[keras.Variable]:
        """Returns variables without those of the means of single losses.

        These grow by the terms.
        """
        means = {id(v) for mean in self.trackers for v in mean.variables}
        return [each for each in variables if id(each) not in means]

    def _of_rows(
        self, given: Any, value_of: Callable[[Any], tf.Tensor], scope: StepScope
    ) -> tf.Tensor | None:
        """The contribution of a value that is proven to be of the rows."""
        current = self._current
        current.proof, current.whole = self._proof_of(given, scope), False
        state = [*scope.state.metrics, *scope.state.layers]
        state = self._without_means(state)
        before, mark = held(scope, state, current.proof), scope.mark()
        with proving(current.proof):
            value = value_of(given)
        written = self._without_means(scope.written_since(mark))
        exchange = current_exchange()
        parts = parts_of(scope, current.proof, before, written, exchange)
        if parts is None:
            return None
        part = additive(current.proof, value, current.share)
        if part is None:
            known = current.proof, value, current.share, current_exchange()
            part = of_added_sums(*known)
        if part is not None:
            keep(scope, parts)
        return part

    def _of_sums(
        self, given: Any, value_of: Callable[[Any], tf.Tensor], scope: StepScope
    ) -> tf.Tensor | None:
        """The same, where what Keras's losses are given is of sums as well."""
        exchange = current_exchange()
        if exchange is None or self._container is None:
            return None
        current, share = self._current, self._current.share
        current.proof = self._proof_of(given, scope)
        state = [*scope.state.metrics, *scope.state.layers]
        state = self._without_means(state)
        before, mark = held(scope, state, current.proof), scope.mark()
        with proving(current.proof), self._plainly():
            value = value_of(given)
        written = self._without_means(scope.written_since(mark))
        parts = parts_of(scope, current.proof, before, written, exchange)
        values = [value, *current.terms]
        found = of_sums(current.proof, values, share, exchange)
        if found is None or parts is None:
            return None
        keep(scope, parts)
        pairs = zip(found.kinds, found.values, strict=True)
        part, *terms = [_part(kind, value, share) for kind, value in pairs]
        current.terms[:] = [share.select(term, 0) for term in terms]
        return part

    @contextlib.contextmanager
    def _plainly(self) -> Iterator[None]:
        """Lets Keras's own losses be computed as Keras does, from anew."""
        self._current.terms.clear()
        self._current.plain = True
        try:
            yield
        finally:
            self._current.plain = False

    def _proof_of(self, given: Any, scope: StepScope) -> RowProof:
        proof = proof_of(given)
        for loss in scope.losses:
            known = loss is scope.known_losses.get(id(loss))
            proof.take([loss], MEAN if known else UNPROVEN)
        return proof

    def _make_global(
        self, scope: StepScope, place: int, loss: tf.Tensor
    ) -> None:
        """Makes what a layer has added that of all rows."""
        part, same_rows = self._added(loss), self._current.share.same_rows
        with current_exchange().apart():
            total = sum_over_replicas(part)
        total = total / tf.cast(same_rows, part.dtype)
        scope.losses[place] = total
        scope.global_losses[id(total)] = total
        keras_internals.own_loss_instead(self._model, loss, total)

    def of_layers(
        self,
        added: list[tf.Tensor],
        share: BatchShare,
        variables: list[keras.Variable],
    ) -> list[tf.Tensor]:
        """Returns the contributions of some layers, without the outputs.

        Args:
            added: What the layers gave to `add_loss`.
            share: This replica's part of the global batch.
            variables: Their weights, for the regularizers.
        """
        current = self._current
        current.share, current.terms = share, []
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
            container = _ForAuthor(container, self._current)
        elif keras_internals.compiled_loss(self._model) is not None:
            container = _Unbuilt(self._model, self._current)

        def added(loss: tf.Tensor) -> tf.Tensor:
            scope = keras_internals.stateless_scope()
            known = getattr(scope, "global_losses", {})
            if loss is known.get(id(loss)):
                return loss
            return _for_author(self._added(loss), self._current)

        with keras_internals.losses_replaced(self._model, container, added):
            yield

    def _added(self, loss: tf.Tensor) -> tf.Tensor:
        """The contribution of what a layer added, summed as Keras sums it."""
        total = tf.reduce_sum(as_float(loss))
        share, scope = self._current.share, keras_internals.stateless_scope()
        if share.replicas == 1:
            return total
        assert isinstance(scope, StepScope)
        is_mean = loss is scope.known_losses.get(id(loss))
        part = _part(MEAN if is_mean else scope.proof.of(total), total, share)
        if part is None:
            raise ConfigurationError(
                "On several replicas what is added to the loss outside of a "
                "layer must be a sum or a mean over the examples, or a "
                "constant. Received: from add_loss, on "
                f"{share.replicas} replicas, a value of which that is not "
                "proven. Add it in the call of a layer or of the model, or "
                "reduce one value for each example by "
                "`mgpu_tf.mean_over_batch(values)` or "
                "`mgpu_tf.sum_over_batch(values)`."
            )
        return share.select(part, 0)

    def _of_weights(self, loss: Any) -> tf.Tensor:
        """The contribution of a regularizer, which no example changes."""
        total, share = tf.reduce_sum(as_float(loss)), self._current.share
        if share.replicas == 1:
            return total
        return share.select(total * share.fraction(total.dtype), 0)

    @property
    def trackers(self) -> list[keras.metrics.Mean]:
        """The means that Keras reports for single losses of several."""
        return [] if self._container is None else self._container.metrics


def _fits(values: Any, weights: Any) -> bool:
    """Returns whether each row has its own weight, as Keras aligns them."""
    if weights is None:
        return True
    shapes = tf.TensorShape(values.shape), tf.TensorShape(weights.shape)
    ranks = [shape.rank for shape in shapes]
    if ranks[0] == ranks[1] or None in ranks:
        return ranks[0] is not None
    longer = max(shapes, key=lambda shape: shape.rank)
    return abs(ranks[0] - ranks[1]) == 1 and longer[-1] == 1


class _Term:
    """One compiled loss with its denominator for the whole global batch."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        _check_reduction(loss)
        self.loss = loss
        self._said = False

    def contribution(
        self, y_true: Any, y_pred: Any, sample_weight: Any, share: BatchShare
    ) -> tf.Tensor:
        if share.replicas == 1:
            return self.loss(y_true, y_pred, sample_weight)
        given = (y_true, y_pred, sample_weight)
        scope = keras_internals.stateless_scope()
        known = keras_internals.is_known_by_example(self.loss)
        tries = not isinstance(scope, StepScope) or scope.may_try(self.loss)
        calls = keras_internals.calls_loss(self.loss)
        by_class = known and tf.executing_eagerly()
        if not calls or not (tries or by_class):
            return self._of_batch(*given, share, tries)
        written = _Writes()
        values, raw = keras_internals.unreduced(self.loss, *given)
        proof = proof_of(given)
        by_row = known and bool(raw.shape.rank)
        by_row &= keras_internals.are_aligned(y_true, y_pred)
        by_row = by_row or _is_by_row(proof.of(raw))
        by_row &= _fits(raw, sample_weight)
        if not by_row or written.has_state:
            written.undo(self.loss)
            return self._of_batch(*given, share, tries)
        mask = keras_internals.mask_of_loss(y_pred, raw)
        weights = keras_internals.merged_weights(values, sample_weight, mask)
        contribution = tf.math.divide_no_nan(
            tf.reduce_sum(values),
            self._denominator(values, weights, mask, share),
        )
        return share.select(contribution, 0)

    def _of_batch(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any,
        share: BatchShare,
        tries: bool,
    ) -> tf.Tensor:
        """The contribution of a loss that was reduced over the rows.

        It may be computed of this replica's rows first, to see what it is.
        """
        given = (y_true, y_pred, sample_weight)
        proof, written = proof_of(given), _Writes()
        value = self.loss(*given) if tries else None
        exchange = current_exchange()
        if value is not None and not written.has_state:
            part = additive(proof, value, share)
            if part is None:
                part = of_added_sums(proof, value, share, exchange)
            if part is not None:
                return share.select(part, 0)
        written.undo(self.loss)
        if exchange is None:
            raise _needs_whole_batch(f"the loss {self.loss.name!r}")
        fraction = share.fraction(tf.float64)
        if not self._said:
            say_gathered(f"the loss {self.loss.name!r}", given)
        self._said = True
        scope = keras_internals.stateless_scope()
        assert isinstance(scope, StepScope)
        every = exchange.whole(given, share.local, fraction, scope.has_rows)
        scope.take_alike(leaves_of(every))
        name = f"the loss {self.loss.name!r}"
        begun = scope.known_operations()
        with scope.of_all_rows():
            value = self.loss(*every)
        state = written.variables
        scope.check_given(name, begun, [value, *map(scope.value, state)])
        for variable in state:
            scope.agree(variable)
        return value * tf.cast(fraction, value.dtype)

    def _denominator(
        self,
        values: tf.Tensor,
        weights: tf.Tensor | None,
        mask: Any,
        share: BatchShare,
    ) -> tf.Tensor:
        reduction = self.loss.reduction
        if reduction == "sum":
            return tf.ones((), values.dtype)
        if reduction == "mean_with_sample_weight" and weights is not None:
            return share.sum_over_replicas(tf.reduce_sum(weights))
        per_example = _elements(values, share)
        if mask is None:
            return tf.cast(share.total, values.dtype) * per_example
        kept = tf.reduce_sum(tf.cast(mask, values.dtype))
        return (
            share.sum_over_replicas(kept)
            * per_example
            / _elements(tf.cast(mask, values.dtype), share)
        )


class _Writes:
    """What a step writes from here on; nothing outside of a step."""

    def __init__(self) -> None:
        scope = keras_internals.stateless_scope()
        self._scope = scope if isinstance(scope, StepScope) else None
        self._mark = () if self._scope is None else self._scope.mark()

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that were written."""
        if self._scope is None:
            return []
        return self._scope.written_since(self._mark)

    @property
    def has_state(self) -> bool:
        """Whether more than the seeds of draws was written."""
        written = self.variables
        if self._scope is None or not written:
            return False
        seeds = set(map(id, self._scope.state.seeds))
        return any(id(variable) not in seeds for variable in written)

    def undo(self, loss: keras.losses.Loss) -> None:
        """Forgets what a loss wrote, or traces again without that."""
        if self._scope is not None:
            self._scope.give_up(self._mark, loss)


class _BoundTerm:
    """A term in Keras's container of losses, for the step at hand."""

    def __init__(
        self,
        loss: keras.losses.Loss,
        current: threading.local,
    ) -> None:
        self._term = _Term(loss)
        self._current = current

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> tf.Tensor:
        current, given = self._current, (y_true, y_pred, sample_weight)
        if current.plain:
            value = self._term.loss(*given)
        else:
            value = self._term.contribution(*given, current.share)
        current.terms.append(value)
        return value


def _for_author(
    part: tf.Tensor, current: threading.local, proven: bool = True
) -> tf.Tensor:
    """Returns what a `compute_loss` of the author's gets for a contribution.

    Args:
        part: The contribution.
        current: The step.
        proven: Whether it is made of rows that are each an example's own.
    """
    share = current.share
    if share.replicas == 1:
        return part
    if current.whole:
        total = sum_over_replicas(part)
        total /= tf.cast(share.same_rows, total.dtype)
        scope = keras_internals.stateless_scope()
        assert isinstance(scope, StepScope)
        scope.take_alike([total])
        return total
    mean = tf.identity(part / share.fraction(part.dtype))
    current.proof.take([mean], MEAN if proven else UNPROVEN)
    return mean


class _ForAuthor:
    """A container of losses, as a `compute_loss` of the author's calls it."""

    def __init__(self, container: Any, current: threading.local) -> None:
        self._container = container
        self._current = current

    def __call__(self, *arguments: Any) -> tf.Tensor | None:
        total = self._container(*arguments)
        if total is None or self._current.plain:
            return total
        kinds = [
            self._current.proof.of(leaf)
            for leaf in tf.nest.flatten(arguments)
            if self._current.share.replicas > 1 and leaf is not None
        ]
        return _for_author(total, self._current, all(map(_is_by_row, kinds)))

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
            "A compute_loss of your own must call Keras's in training and "
            f"in evaluation, or in neither. Received: {self._name}, which "
            "does in training only. Call it in both, or leave out the loss "
            "in `compile()`."
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)


def _elements(values: tf.Tensor, share: BatchShare) -> tf.Tensor:
    """Returns the number of losses of one example.

    An example may have several on the first axis, as of a flattened sequence.
    """
    local = tf.maximum(share.local, 1)
    return tf.cast(tf.size(values, tf.int64) // local, values.dtype)


def _is_by_row(kind: Any) -> bool:
    return isinstance(kind, Rows) and not kind.axis and not kind.listed


def additive(
    proof: RowProof, value: tf.Tensor, share: BatchShare
) -> tf.Tensor | None:
    """Returns what a replica gives to a value that is proven to add up.

    Args:
        proof: Knows the graph.
        value: A sum or a mean over the rows.
        share: This replica's part of the global batch.

    Returns:
        The contribution; None where nothing is proven.
    """
    return _part(proof.of(value), value, share)


def _part(kind: Any, value: tf.Tensor, share: BatchShare) -> tf.Tensor | None:
    if kind == SUM:
        return value
    # What is the same on all replicas is its own mean.
    if kind in (FIXED, MEAN) and value.dtype.is_floating:
        return value * share.fraction(value.dtype)
    return None


def of_added_sums(
    proof: RowProof,
    value: tf.Tensor,
    share: BatchShare,
    exchange: Exchange | None,
) -> tf.Tensor | None:
    """Returns what a replica gives to a value that is made of sums over rows.

    Args:
        proof: Knows the graph.
        value: Of the rows of this replica.
        share: This replica's part of the global batch.
        exchange: Of the replicas, which add up the sums.

    Returns:
        The contribution; None where nothing is proven.
    """
    found = of_sums(proof, [value], share, exchange)
    if found is None:
        return None
    return _part(found.kinds[0], found.values[0], share)


def say_gathered(what: str, values: Any) -> None:
    """Says what replicas hand each other for something of the whole batch.

    Args:
        what: What needs it.
        values: The rows, a structure of tensors.
    """
    size = sum(
        tensor.dtype.size * (tensor.shape[1:].num_elements() or 0)
        for tensor in tf.nest.flatten(values)
        if isinstance(tensor, tf.Tensor) and tensor.shape.rank
    )
    _log.info(
        "%s is not proven to be a sum or a mean over examples: replicas send "
        "each other %s bytes for each example and compute it on the global "
        "batch. A function that returns one value for each example, "
        "[batch], sends none",
        what,
        f"{size:,}" if size else "the",
    )


def _needs_whole_batch(what: str) -> NeedsAllRows:
    return NeedsAllRows(
        "Where a replica never has all rows at once, a loss must be a sum or "
        f"a mean over examples. Received: {what}, which is not proven to be "
        "one. Let it return one value for each example."
    )


def _check_reduction(loss: keras.losses.Loss) -> None:
    if loss.reduction in (None, "none"):
        raise ConfigurationError(
            "A loss must be reduced to be minimized. Received: "
            f"reduction={loss.reduction!r} on the loss {loss.name!r}. Use "
            "'sum_over_batch_size', 'mean_with_sample_weight' or 'sum'."
        )
