"""Metrics of the global batch.

Keras's own metrics add up: replicas update them with their rows, and the sums
are added over replicas. So does a metric whose update is proven to add sums or
means over the rows. Any other metric is updated, on each replica, with the rows
of all: what it holds is that of one device, whatever it is. So is what a
`compute_metrics` of the author's own returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import (
    BatchShare,
    current_exchange,
    current_share,
)
from mgpu_tf.engine.author.global_sums import of_sums
from mgpu_tf.engine.author.rules import rule_of_part, sent_of_part
from mgpu_tf.engine.author.step_scope import (
    StepScope,
    is_alike,
    leaves_of,
    proof_of,
)
from mgpu_tf.engine.row_proof import FIXED, Held, RowProof, active, taken
from mgpu_tf.engine.step.losses import NeedsAllRows, say_gathered
from mgpu_tf.errors import ConfigurationError


class GlobalMetrics:
    """The metrics of a model, in a step on one replica.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own = keras_internals.overrides(model, "compute_metrics")
        self._said: set[str] = set()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets metrics be updated so, while a step is traced."""
        metrics = keras_internals.single_metrics(
            keras_internals.metrics_of(self._model)
        )
        with keras_internals.metric_updates_replaced(metrics, self._update):
            yield

    def computed(self, given: Any) -> dict[str, Any]:
        """Calls the model's `compute_metrics`. On a replica, in a step.

        Args:
            given: Inputs, targets, outputs and sample weights.

        Returns:
            What it returned.
        """
        share = current_share()
        if not self._own or share is None or share.replicas == 1:
            return self._called(given)
        name = f"{type(self._model).__name__}.compute_metrics"
        return self._of_all(name, given, self._called)

    def computed_before(
        self, given: Any, scope: StepScope
    ) -> tuple[dict[str, Any], keras.Variable | None]:
        """Calls `compute_metrics` before the weights are updated.

        Args:
            given: As for `computed`.
            scope: The scope of the step.

        Returns:
            What it returned, and a variable that it has read and that the
            update writes, if there is one: Keras calls it afterwards.
        """
        begun = scope.known_operations()
        with scope.reading() as read:
            returned = self.computed(given)
        captured = _handles_since(begun, scope)
        state = keras_internals.state_of(self._model.optimizer)
        late = (
            variable
            for variable in [*self._model.trainable_variables, *state]
            if id(variable) in read
            # A function that was traced before reads it by itself.
            or keras_internals.handles_of([variable]) & captured
        )
        return returned, next(late, None)

    def _called(self, given: Any) -> dict[str, Any]:
        x, y, y_pred, sample_weight = given
        scope = keras_internals.stateless_scope()
        with contextlib.ExitStack() as stack:
            if isinstance(scope, StepScope) and not self._own:
                # Keras reads all results, which a step leaves.
                stack.enter_context(scope.updating(scope.state.metrics))
            return self._model.compute_metrics(
                x, y, y_pred, sample_weight=sample_weight
            )

    def _of_all(
        self, name: str, given: Any, compute: Callable[[Any], Any]
    ) -> Any:
        """Computes something of the rows of all replicas."""
        exchange = current_exchange()
        if exchange is None:
            raise NeedsAllRows(
                "Where a replica never has all rows at once, metrics must be "
                f"sums or means over examples. Received: {name}, which is not "
                "proven to be one. Let its function return one value for each "
                "example."
            )
        if name not in self._said:
            say_gathered(name, given)
        self._said.add(name)
        scope, share = keras_internals.stateless_scope(), current_share()
        assert isinstance(scope, StepScope) and share is not None
        mark = scope.mark()
        fraction = share.fraction(tf.float64)
        every = exchange.whole(given, share.local, fraction, scope.has_rows)
        scope.take_alike(leaves_of(every))
        begun = scope.known_operations()
        with scope.of_all_rows():
            found = compute(every)
        written = list(map(scope.value, scope.written_since(mark)))
        scope.check_given(name, begun, [found, written])
        for variable in scope.written_since(mark):
            scope.agree(variable)
        return found

    def _update(
        self,
        metric: keras.metrics.Metric,
        own: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Updates a metric, in place of its own method."""
        scope = keras_internals.stateless_scope()
        if not isinstance(scope, StepScope):
            return own(*arguments, **named)
        with scope.updating(metric.variables):
            return self._updated(scope, metric, own, *arguments, **named)

    def _updated(
        self,
        scope: StepScope,
        metric: keras.metrics.Metric,
        own: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        share = current_share()
        if share is None or share.replicas == 1 or scope.has_all_rows:
            return own(*arguments, **named)
        eager = tf.executing_eagerly()
        if active() or (eager and scope.within_graph):
            # The proof of the layer in which it is updated says what it adds.
            return own(*arguments, **named)
        given = [arguments, named]
        if any(map(scope.state.is_whole, metric.variables)):
            return self._of_all_given(metric, own, given)
        # A number of the batch may be a mean over its rows.
        by_row = not any(
            _is_number(leaf) or is_alike(leaf) for leaf in leaves_of(given)
        )
        if by_row and keras_internals.adds_up(metric, arguments, named):
            written = set(map(id, filter(scope.is_written, metric.variables)))
            if written - scope.added - scope.parts.keys():
                raise _in_two_ways(metric)
            scope.added |= set(map(id, metric.variables))
            return own(*arguments, **named)
        if not scope.may_try(metric):
            return self._of_all_given(metric, own, given)
        held = [(v, scope.hold(v)) for v in metric.variables]
        mark = scope.mark()
        proof = proof_of(given)
        for _, value in held:
            proof.take([value], Held())
        found = own(*arguments, **named)
        after = [(v, value, scope.value(v)) for v, value in held]
        parts = [_part(proof, *each[1:], share) for each in after]
        if None not in parts:
            for (variable, value, now), part in zip(after, parts, strict=True):
                if now is not value:
                    scope.add_update((variable, part))
                    scope.added.add(id(variable))
            return found
        scope.give_up(mark, metric)
        if any(id(v) in scope.added for v in metric.variables):
            raise _in_two_ways(metric)
        if self._of_sums(metric, own, given, scope, share):
            return None
        return self._of_all_given(metric, own, given)

    def _of_all_given(
        self, metric: keras.metrics.Metric, own: Callable[..., Any], given: Any
    ) -> Any:
        """Updates a metric with the rows of all replicas."""
        name = f"the metric {metric.name!r}"
        return self._of_all(
            name, given, lambda every: own(*every[0], **every[1])
        )

    def _of_sums(
        self,
        metric: keras.metrics.Metric,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> bool:
        """Updates a metric with sums of all replicas, if that is proven.

        What it holds is then the same on all of them.
        """
        proof = proof_of(given)
        proof.take(list(map(scope.hold, metric.variables)), FIXED)
        mark = scope.mark()
        own(*given[0], **given[1])
        written = scope.written_since(mark)
        found = of_sums(
            proof, list(map(scope.value, written)), share, current_exchange()
        )
        if found is None or set(found.kinds) != {FIXED}:
            scope.give_up(mark, metric)
            return False
        for variable, value in zip(written, found.values, strict=True):
            scope.add_update((variable, value))
            scope.agree(variable)
        return True


def _handles_since(begun: int, scope: StepScope) -> set[int]:
    """Returns the ids of the handles that this replica's new operations take.

    Between them are those of other replicas, which have their turn where rows
    are exchanged.
    """
    if tf.executing_eagerly():
        return set()
    graph = tf.compat.v1.get_default_graph()

    def is_of_others(place: int) -> bool:
        return scope.proof.is_of_others(graph, place)

    return {
        id(source)
        for _, given, source in taken(graph, begun, is_of_others)
        if given.dtype == tf.resource
    }


def reads_late(variable: keras.Variable) -> ConfigurationError:
    """Returns the refusal of a metric that reads what the update writes."""
    return ConfigurationError(
        "On a pipeline and with step_parts, metrics read nothing that the "
        f"update of the weights writes. Received: {variable.path}, which a "
        "metric reads. Read it in a callback, at the end of a batch or of an "
        "epoch."
    )


def _in_two_ways(metric: keras.metrics.Metric) -> ConfigurationError:
    return ConfigurationError(
        "A metric is updated in one way in a step. Received: "
        f"{metric.name!r}, which is updated once with sums over the "
        "rows and once with something else. Use two metrics."
    )


def _is_number(leaf: Any) -> bool:
    return tf.is_symbolic_tensor(leaf) and leaf.shape.rank == 0


def _part(
    proof: RowProof, before: tf.Tensor, now: tf.Tensor, share: BatchShare
) -> tf.Tensor | None:
    """Returns what a variable holds of this replica's rows, None if unknown."""
    if now is before:
        return before
    kind = proof.of(now)
    if rule_of_part(kind, now.dtype, of_metric=True) is None:
        return None
    return sent_of_part(kind, before, now, share)
