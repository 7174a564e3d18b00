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
applies in the engine's order: reduce, then clip, then apply.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.contributions import (
    BatchShare,
    as_float,
    current_share,
    sharing,
)
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.reading import Reader
from mgpu_tf.engine.state import ReplicaState
from mgpu_tf.engine.update import Update
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.mirrored import OneReplicaView, as_one_replica

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
        if self._replicas > 1 and not isinstance(strategy, OneReplicaView):
            raise ConfigurationError(
                f"A {method} of one's own goes with the strategies of "
                "mgpu_tf.create_strategy that train in step. Received: "
                f"{type(strategy).__name__}. Make it with create_strategy."
            )

    def __call__(
        self, data: Any, local: Any, total: tf.Tensor
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
                self._on_replica, args=(data, local, total)
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
        self, data: Any, local: tf.Tensor, total: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        if self._replicas == 1:
            values = flat_logs(getattr(self._model, self._method)(data))
            self._names = list(values)
            return {name: tf.convert_to_tensor(v) for name, v in values.items()}
        keras_internals.lend_global_seed(self._generator)
        check = tf.debugging.assert_positive(local, NO_EXAMPLES)
        with tf.control_dependencies([check]):
            data = _copied(data)
        share = BatchShare(local, total, self._replicas)
        self._here.reader = Reader([data, local])
        with (
            self._state.replica_seeds_in_place(),
            as_one_replica(),
            sharing(share, stands=True),
        ):
            values = flat_logs(getattr(self._model, self._method)(data))
        self._names = list(values)
        self._results = {
            name: self._read[id(value)][:2]
            for name, value in values.items()
            if id(value) in self._read
        }
        context = tf.distribute.get_replica_context()
        return {
            name: context.all_reduce("sum", _weighted(as_float(value), share))
            for name, value in values.items()
            if name not in self._results
        }

    @contextlib.contextmanager
    def _as_alone(self) -> Iterator[None]:
        """Lets optimizers and metrics do what one device would.

        All replicas have the same ones, so this is entered once for all.
        """
        if self._replicas == 1:
            yield
            return
        with (
            keras_internals.caught_by(self._optimizers, self._apply),
            keras_internals.watched_metrics(
                self._metrics, _of_batch, self._note
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
    ) -> None:
        """Reduces, clips and applies what the replicas have."""
        share = current_share()
        assert share is not None
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
            )
            update.present, update.alike = present, alike
            with keras_internals.applying_itself(optimizer):
                update(gradients)

        context = tf.distribute.get_replica_context()
        context.merge_call(apply, args=(weighted,))


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
    metric: keras.metrics.Metric, values: list[Any]
) -> dict[str, Any]:
    """Lets one number of a batch weigh as much as the replica has of it."""
    share = current_share()
    plain = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
    if share is None or not plain or len(values) != 1:
        return {}
    if tf.convert_to_tensor(values[0]).shape.rank != 0:
        return {}
    return {"sample_weight": share.fraction(metric.dtype)}
