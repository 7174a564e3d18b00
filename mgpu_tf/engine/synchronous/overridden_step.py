"""Running a `train_step` or `test_step` that the model's author wrote.

The author writes for one device: a loss is a mean over the rows of the batch,
and an optimizer applies its gradients. On several replicas, each replica runs
the method on its rows of the global batch:

    every loss is a mean over the rows of the replica
        -> gradients, values and metrics of scalars are weighted by the
           replica's share of the rows, and summed over replicas

So the means are those of the global batch, however the batch is split. A sum
over rows must be declared by `mgpu_tf.sum_over_batch`. Keras is told that there
is one replica, and divides no loss. Every optimizer that the model holds
applies in the engine's order: reduce, then clip, then apply. State that the
method writes is kept in an `AuthorScope` and brought together by its rule.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author_scope import AuthorScope, graph_here
from mgpu_tf.engine.contributions import (
    BatchShare,
    as_float,
    current_share,
    sharing,
)
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.random_rows import seed_for_rows
from mgpu_tf.engine.reading import Reader, Unreadable, variable_read_by
from mgpu_tf.engine.state import ReplicaState, Writes
from mgpu_tf.engine.step import drawing, drawn_in, of_unknown_length
from mgpu_tf.engine.update import Update
from mgpu_tf.engine.written import by_rule, check_plain_variables
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.mirrored import OneReplicaView, as_one_replica
from mgpu_tf.strategies.own_gradient import sum_over_replicas

_log = logging.getLogger("mgpu_tf")

NO_EXAMPLES = (
    "An overridden train_step or test_step needs an example on every replica "
    "in every step. Received: a batch smaller than the number of replicas. "
    "Drop the remainder, or use another batch size."
)


def check_held(model: keras.Model) -> None:
    """Refuses an optimizer that is used in train_step and found nowhere.

    Args:
        model: A model with a `train_step` of its own.

    Raises:
        ConfigurationError: There is one.
    """
    held = {id(part) for part in keras_internals.optimizers_of(model)}
    function = inspect.unwrap(type(model).train_step)
    if not inspect.isfunction(function):
        return
    names = inspect.getclosurevars(function)
    for name, value in {**names.nonlocals, **names.globals}.items():
        known = not isinstance(value, keras.optimizers.Optimizer)
        if not known and id(value) not in held:
            raise ConfigurationError(
                "The optimizers of a train_step must be attributes of the "
                f"model. Received: {name!r}, a variable around train_step. "
                "Set it on the model in build_model."
            )


class AuthorStep:
    """One overridden step method of a model.

    Args:
        model: A built model.
        method: "train_step" or "test_step".
        strategy: The model's strategy.
        state: What the step writes besides weights.
        options: How steps are made.

    Raises:
        ConfigurationError: The strategy is none of `create_strategy`.
    """

    def __init__(
        self,
        model: keras.Model,
        method: str,
        strategy: tf.distribute.Strategy,
        state: ReplicaState,
        options: StepOptions,
    ) -> None:
        self._model = model
        self._method = method
        self._strategy = strategy
        self._state = state
        self._options = options
        self._replicas = strategy.num_replicas_in_sync
        self._optimizers = keras_internals.optimizers_of(model)
        self._metrics = keras_internals.metrics_of(model)
        self._results: dict[str, tuple[keras.metrics.Metric, str | None]] = {}
        self._names: list[str] = []
        self._generator: Any = None
        # By the id of what a metric returned: the metric, where in its
        # result that is, and the object, whose id is then no other's.
        self._read: dict[int, tuple[Any, Any, Any]] = {}
        # What reads the step; each replica is a thread of its own.
        self._here = threading.local()
        self._warned: set[str] = set()
        if self._replicas > 1 and not isinstance(strategy, OneReplicaView):
            raise ConfigurationError(
                f"A {method} of one's own goes with the strategies of "
                "mgpu_tf.create_strategy that train in step. Received: "
                f"{type(strategy).__name__}. Make it with create_strategy."
            )

    def __call__(
        self, data: Any, local: Any, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        """Runs the method once on every replica. Outside of replicas.

        Returns:
            What the method returned, over all replicas, but for the results
            of metrics; `logs` has those as well.
        """
        self._read.clear()
        self._generator = keras_internals.global_seed_generator()
        with self._as_alone():
            values = self._strategy.run(
                self._on_replica, args=(data, local, total, low)
            )
        return {
            name: self._strategy.experimental_local_results(value)[0]
            for name, value in values.items()
        }

    def logs(self, values: dict[str, tf.Tensor]) -> dict[str, Any]:
        """Returns what the method returned, as it returned it.

        Args:
            values: What the last step gave. The results of metrics are read
                anew, from a scope that has their state over all replicas.
        """
        scores = flat_logs(self._model.get_metrics_result())
        if set(scores) == set(self._names):
            # As Keras tells them apart.
            return scores
        every: dict[str, Any] = {}
        for name in self._names:
            if name in values:
                every[name] = values[name]
            else:
                metric, part = self._results[name]
                result = metric.result()
                every[name] = result if part is None else result[part]
        return every

    # On a replica.

    def _on_replica(
        self, data: Any, local: tf.Tensor, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        if self._replicas == 1:
            values = flat_logs(getattr(self._model, self._method)(data))
            self._names = list(values)
            return {name: tf.convert_to_tensor(v) for name, v in values.items()}
        keras_internals.lend_global_seed(self._generator)
        check = tf.debugging.assert_positive(local, NO_EXAMPLES)
        with tf.control_dependencies([check]):
            data = _copied(data)
        if low is not None:
            data = tf.nest.map_structure(of_unknown_length, data)
        share = BatchShare(local, total, self._replicas, low=low)
        with self._state.replica_seeds_in_place():
            values, writes = self._run(data, share)
        self._state.write(writes)
        self._names = list(values)
        self._results = {
            name: self._read[id(value)][:2]
            for name, value in values.items()
            if id(value) in self._read
        }
        return {
            name: sum_over_replicas(self._part(name, as_float(value), share))
            for name, value in values.items()
            if name not in self._results
        }

    def _run(self, data: Any, share: BatchShare) -> tuple[Any, Writes]:
        """Runs the author's method on the rows of this replica.

        Returns:
            What it returned, and what it wrote to state, to be brought
            together.
        """
        state = self._state
        seeds = [] if state.draws_alike else state.seeds
        drawn = [variable_read_by(seed.value) for seed in seeds]
        before = state.values()
        given = [*before, *state.metric_values(before)]
        given += state.layer_values(given)
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_one_replica())
            means = stack.enter_context(sharing(share, stands=True))
            draws = stack.enter_context(drawing(share, data))
            self._here.means = means
            self._here.reader = reader = Reader(
                [data, share.local, share.low, drawn_in(draws), *drawn],
                means=means,
                blocks=True,
            )
            self._here.graph = graph_here()
            scope = stack.enter_context(AuthorScope(given, self._write))
            values = self._returned(data)
        known = {id(variable): value for variable, value in before}
        writes = [
            (
                variable,
                by_rule(
                    state,
                    variable,
                    scope.get_current_value(variable),
                    known.get(id(variable)),
                    reader,
                    share,
                    in_own_step=True,
                ),
            )
            for variable in scope.written.values()
        ]
        optimizers = (v for each in self._optimizers for v in each.variables)
        check_plain_variables([*state.variables, *optimizers], reader)
        return values, writes

    def _returned(self, data: Any) -> dict[str, Any]:
        try:
            return flat_logs(getattr(self._model, self._method)(data))
        except Exception as error:
            # AutoGraph wraps what is raised in a tf.function of the author's.
            refusal = _refusal_within(error)
            if refusal is None:
                raise
            raise refusal from None

    def _write(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Writes to a weight, or to a variable that is no state."""
        drawn = any(variable is seed for seed in self._state.seeds)
        if not drawn and self._here.reader.depends(value):
            raise ConfigurationError(
                f"A {self._method} may write to a weight only what is the same "
                f"on all replicas. Received: {type(self._model).__name__}, "
                f"which writes what depends on its rows to {variable.path}. "
                "Let an optimizer apply gradients, or use 'one_device'."
            )
        keras_internals.write_here(variable, value)

    def _part(self, name: str, value: tf.Tensor, share: BatchShare) -> Any:
        """Returns this replica's part of what the method returned."""
        self._take_for_mean(f"the value {name!r}", value, share)
        try:
            return self._here.reader.contribution(value, share)
        except Unreadable:
            return _weighted(value, share)

    def _take_for_mean(self, name: str, value: Any, share: BatchShare) -> None:
        """Counts a number of the batch that cannot be read as a mean."""
        if not tf.is_symbolic_tensor(value) or value.shape.rank != 0:
            return
        try:
            self._here.reader.contribution(value, share)
        except Unreadable as error:
            self._here.means.append(value)
            self._warn(name, error)

    def _warn(self, name: str, error: Unreadable) -> None:
        if name not in self._warned:
            _log.warning(
                "%s of %s: %s is taken for a mean over rows, since it cannot "
                "be read (%s)",
                self._method,
                type(self._model).__name__,
                name,
                error,
            )
        self._warned.add(name)

    def _given_to(
        self, metric: keras.metrics.Metric, values: list[Any]
    ) -> dict[str, Any]:
        """Looks at what a metric is updated with; returns a weight for it."""
        share = current_share()
        if share is None:
            return {}
        for value in values:
            self._take_for_mean(
                f"what metric {metric.name!r} is given", value, share
            )
        return _of_batch(metric, values, share)

    @contextlib.contextmanager
    def _as_alone(self) -> Iterator[None]:
        """Lets optimizers and metrics do what one device would.

        All replicas have the same ones, so this is entered once for all.
        """
        if self._replicas == 1:
            yield
            return
        generator = self._generator
        with (
            keras_internals.seeds_replaced(
                self._model, generator, seed_for_rows
            ),
            keras_internals.caught_by(self._optimizers, self._apply),
            keras_internals.watched_metrics(
                self._metrics, self._given_to, self._note
            ),
        ):
            yield

    def _note(self, metric: keras.metrics.Metric, result: Any) -> None:
        """Notes what a metric has returned, to know it in the logs."""
        parts = result if isinstance(result, dict) else {None: result}
        for part, value in parts.items():
            self._read[id(value)] = (metric, part, value)

    def _apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Any],
        variables: list[keras.Variable],
        by_pairs: bool,
    ) -> None:
        """Reduces, clips and applies what the replicas have."""
        share = current_share()
        assert share is not None
        if graph_here() is not self._here.graph:
            raise ConfigurationError(
                "On several replicas an optimizer applies outside of "
                "tf.function, tf.cond and loops of TensorFlow. Received: "
                f"{optimizer.name!r}, inside of one in {self._method} of "
                f"{type(self._model).__name__}. Apply in the step itself, "
                "without tf.function; the option gradient_accumulation_steps "
                "of an optimizer accumulates."
            )
        weighted = [
            _weighted(gradient, share)
            for gradient in gradients
            if gradient is not None
        ]
        present = [gradient is not None for gradient in gradients]
        alike = [
            self._here.reader.looks_up_alike(gradient) for gradient in weighted
        ]

        def apply(strategy: tf.distribute.Strategy, gradients: Any) -> None:
            update = Update(
                optimizer,
                variables,
                strategy,
                stored_once=False,
                options=self._options,
                by_pairs=by_pairs,
            )
            update.present, update.alike = present, alike
            with keras_internals.applying_itself(optimizer):
                update(gradients)

        context = tf.distribute.get_replica_context()
        context.merge_call(apply, args=(weighted,))


def _refusal_within(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__ or error.__context__
    return error


def _copied(data: Any) -> Any:
    """Copies a batch, in which a part may be missing."""
    return tf.nest.map_structure(
        lambda part: None if part is None else tf.identity(part), data
    )


def _weighted(value: Any, share: BatchShare) -> Any:
    """Returns a tensor, dense or sparse, times the share of the rows."""
    values = value.values if isinstance(value, tf.IndexedSlices) else value
    fraction = share.fraction(values.dtype)
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            values * fraction, value.indices, value.dense_shape
        )
    return values * fraction


def _of_batch(
    metric: keras.metrics.Metric, values: list[Any], share: BatchShare
) -> dict[str, Any]:
    """Lets one number of a batch weigh as much as the replica has of it."""
    plain = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
    if not plain or len(values) != 1:
        return {}
    if tf.convert_to_tensor(values[0]).shape.rank != 0:
        return {}
    return {"sample_weight": share.fraction(metric.dtype)}
