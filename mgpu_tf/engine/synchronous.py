"""The synchronous engine: several steps in one `tf.function`, reduce first.

A training step is the same on every synchronous strategy:

    on each replica    forward, loss contribution, gradients of it
    `Update`           sum over replicas -> clip -> apply -> EMA

Gradients are reduced before the optimizer sees them, so what it does with
them (clipping above all) is the same on all replicas and the same as on one
device. The forward pass runs in a `keras.StatelessScope`: what layers and
metrics would write is collected, dropped where the replica had no example,
and only then written.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import Source, part_of
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author import NO_EXAMPLES, AuthorStep
from mgpu_tf.engine.losses import BatchShare, GlobalLoss
from mgpu_tf.engine.state import ReplicaState, Writes, state_for
from mgpu_tf.engine.update import Update
from mgpu_tf.errors import ConfigurationError

Logs = dict[str, Any]

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass(frozen=True)
class Execution:
    """What one call of the engine did.

    Attributes:
        steps: Steps done; fewer than asked for where the data ended.
        examples: Examples in those steps, over all replicas.
        logs: The metrics since they were last reset, over all replicas.
        seconds: The mean over workers of the time given to the call.
    """

    steps: int
    examples: int
    logs: Logs
    seconds: float


class SynchronousEngine:
    """Trains, evaluates and predicts with a compiled model on a strategy.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: Any synchronous strategy.

    Raises:
        ConfigurationError: The model is not compiled, or was made elsewhere.
    """

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        _check_compiled(model, strategy)
        self._model = model
        self._strategy = strategy
        self._part = part_of(strategy)
        self._compiled = keras_internals.compiled_state(model)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._prepared = False
        self._written: list[keras.Variable] = []
        self._loss: GlobalLoss
        self._state: ReplicaState
        self._update: Update

    def is_current(self) -> bool:
        """Returns whether the model is compiled as when this was made."""
        return self._compiled == keras_internals.compiled_state(self._model)

    def train(
        self, iterator: Any, steps: int, source: Source, seconds: float = 0.0
    ) -> Execution:
        """Runs training steps.

        Args:
            iterator: From `mgpu_tf.data.distribute`.
            steps: How many steps at most.
            source: Where the iterator comes from.
            seconds: Any time of this worker; its mean over workers comes
                back, equal on all of them.

        Returns:
            What was done.
        """
        return self._execute("train", iterator, steps, source, seconds)

    def evaluate(
        self, iterator: Any, steps: int, source: Source, seconds: float = 0.0
    ) -> Execution:
        """Runs evaluation steps; arguments and result as for `train`."""
        return self._execute("evaluate", iterator, steps, source, seconds)

    def predict(self, iterator: Any, source: Source) -> Any | None:
        """Runs one prediction step.

        Args:
            iterator: From `mgpu_tf.data.distribute`.
            source: Where the iterator comes from.

        Returns:
            The outputs for one global batch as arrays, in the order of its
            rows and the same on every worker; None where the data has ended.
        """
        if not self._model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(source.example())
            with self._strategy.scope():
                keras_internals.build_layers(self._model, x)
        predict = self._function("predict", source, self._predict_step)
        outputs, total = predict(iterator)
        if int(total) == 0:
            return None
        return tf.nest.map_structure(lambda t: t.numpy(), outputs)

    def prepare(self, source: Source) -> None:
        """Creates what training and evaluation need, once.

        Args:
            source: Tells the shapes and types of a batch.
        """
        if self._prepared:
            return
        batch = keras.utils.unpack_x_y_sample_weight(source.example())
        with self._strategy.scope():
            keras_internals.build(self._model, batch)
        self._loss = GlobalLoss(self._model)
        self._state = state_for(self._model, self._strategy)
        self._update = Update(
            self._model,
            self._strategy,
            stored_once=self._state.stored_once,
        )
        self._prepared = True

    def reset_metrics(self) -> None:
        """Sets every metric of the model to its beginning."""
        self._model.reset_metrics()

    def _execute(
        self,
        kind: str,
        iterator: Any,
        steps: int,
        source: Source,
        seconds: float,
    ) -> Execution:
        self.prepare(source)
        step = self._step_of(kind)
        run = self._function(
            kind,
            source,
            lambda *args: self._steps(step, source, *args),
        )
        try:
            done, examples, logs, mean_seconds = run(
                iterator, tf.constant(steps, tf.int64), tf.constant(seconds)
            )
        except tf.errors.InvalidArgumentError as error:
            if NO_EXAMPLES not in str(error):
                raise
            raise ConfigurationError(NO_EXAMPLES) from None
        return Execution(
            steps=int(done),
            examples=int(examples),
            logs={name: _number(value) for name, value in logs.items()},
            seconds=float(mean_seconds),
        )

    def _step_of(self, kind: str) -> Callable[..., dict[str, tf.Tensor]]:
        """Returns the engine's step, or the one that the author wrote."""
        method = {"train": "train_step", "evaluate": "test_step"}[kind]
        if keras_internals.overrides(self._model, method):
            if self._state.stored_once:
                raise ConfigurationError(
                    f"A {method} of one's own does not go with "
                    "'central_storage', whose one copy of each metric it "
                    "would write from every replica. Received: "
                    f"{type(self._model).__name__}. Use 'mirrored'."
                )
            return AuthorStep(self._model, method, self._strategy, self._state)
        return self._train_step if kind == "train" else self._evaluate_step

    def _function(
        self, kind: str, source: Source, python: Callable[..., Any]
    ) -> Callable[..., Any]:
        key = (kind, source.may_end, source.totals_known)
        if key not in self._functions:
            self._functions[key] = tf.function(
                python, autograph=False, reduce_retracing=True
            )
        return self._functions[key]

    # In the graph, outside of replicas.

    def _steps(
        self,
        step: Callable[[Any, tf.Tensor, tf.Tensor], Any],
        source: Source,
        iterator: Any,
        steps: tf.Tensor,
        seconds: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Runs up to `steps` steps and sums the metrics over replicas."""

        def once() -> tuple[tf.Tensor, tf.Tensor, Any]:
            """Runs a step; returns its count, its examples and its logs."""
            data, local, total = self._next(iterator, source)
            if not source.may_end:
                logs = step(data, local, total)
                return tf.constant(1, tf.int64), total, logs
            shapes: list[Any] = []

            def go_on() -> Any:
                logs = step(data, local, total)
                shapes.append(logs)
                return tf.constant(1, tf.int64), logs

            def end() -> Any:
                zeros = tf.nest.map_structure(
                    lambda t: tf.zeros(t.shape, t.dtype), shapes[0]
                )
                return tf.constant(0, tf.int64), zeros

            count, logs = tf.cond(total > 0, go_on, end)
            return count, total, logs

        def body(
            done: tf.Tensor, examples: tf.Tensor, ended: tf.Tensor, _: Any
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, Any]:
            count, total, logs = once()
            return done + count, examples + total, total == 0, logs

        zero = tf.constant(0, tf.int64)
        begin: tuple[Any, ...] = (zero, zero, tf.constant(False), {})
        if isinstance(step, AuthorStep):
            # The first step stands alone: it tells what the others return.
            count, total, logs = once()
            begin = (count, total, total == 0, logs)
        done, examples, _, returned = tf.while_loop(
            lambda done, examples, ended, _: (done < steps) & ~ended,
            body,
            begin,
            parallel_iterations=1,
        )
        with tf.control_dependencies([done]):
            results = self._strategy.run(self._state.collect, args=(seconds,))
        metrics, mean_seconds = tf.nest.map_structure(self._first, results)
        state = zip(self._state.metrics, metrics, strict=True)
        with keras.StatelessScope(state_mapping=state):
            logs = self._model.get_metrics_result()
        return done, examples, returned or logs, mean_seconds

    def _next(
        self, iterator: Any, source: Source
    ) -> tuple[Any, Any, tf.Tensor]:
        """Takes a global batch; its size comes as one tensor."""
        data, local, total = next(iterator)
        if source.totals_known:
            return data, local, self._first(total)
        return data, local, self._strategy.reduce("SUM", local, axis=None)

    def _train_step(
        self, data: Any, local: Any, total: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        with self._loss.in_place():
            gradients = self._strategy.run(
                self._replica_gradients, args=(data, local, total)
            )
        self._update(gradients)
        return {}

    def _evaluate_step(
        self, data: Any, local: Any, total: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        with self._loss.in_place():
            self._strategy.run(
                self._replica_evaluate, args=(data, local, total)
            )
        return {}

    def _predict_step(self, iterator: Any) -> tuple[Any, tf.Tensor]:
        data, _, total = next(iterator)
        total = self._first(total)
        outputs = self._strategy.run(self._replica_predict, args=(data,))
        outputs = tf.nest.map_structure(self._rows_of_worker, outputs)
        if self._part.local < self._part.total:
            outputs = tf.nest.map_structure(
                lambda rows: self._rows_of_all(rows, total), outputs
            )
        return outputs, total

    def _rows_of_worker(self, value: Any) -> tf.Tensor:
        return tf.concat(self._strategy.experimental_local_results(value), 0)

    def _rows_of_all(self, rows: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Joins the rows of all workers in order.

        Every worker puts its rows where they belong among zeros; the sum
        over workers is all of them.
        """
        before, _ = self._part.bounds(total, 0)
        after = total - before - tf.shape(rows, out_type=tf.int64)[0]
        paddings = tf.pad([[before, after]], [[0, tf.rank(rows) - 1], [0, 0]])
        carrier = tf.int32 if rows.dtype == tf.bool else rows.dtype
        padded = tf.pad(tf.cast(rows, carrier), paddings)
        every = self._strategy.run(self._replica_gather, args=(padded,))
        return tf.cast(self._first(every), rows.dtype)

    def _first(self, value: Any) -> tf.Tensor:
        return self._strategy.experimental_local_results(value)[0]

    # In the graph, on a replica.

    def _forward(
        self, data: Any, share: BatchShare, training: bool
    ) -> tuple[tf.Tensor, Writes]:
        """Returns the loss contribution and what is to be written."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        seeds = self._state.replica_seeds()
        with keras.StatelessScope(seeds, collect_losses=True) as scope:
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
        drawn = {id(state) for state, _ in seeds}
        for variable in self._state.variables:
            value = scope.get_current_value(variable)
            if value is None:
                continue
            if id(variable) in drawn:
                value = self._state.next_seed(variable, value)
            elif not self._state.is_agreed(variable):
                value = share.select(value, variable)
            writes[id(variable)] = (variable, value)
        tracker = keras_internals.loss_tracker(model)
        for mean, contribution in [
            (tracker, loss),
            *zip(self._loss.trackers, terms, strict=False),
        ]:
            for variable, value in _mean_writes(mean, contribution, share):
                writes[id(variable)] = (variable, value)
        return loss, list(writes.values())

    def _replica_gradients(
        self, data: Any, local: tf.Tensor, total: tf.Tensor
    ) -> list[Any]:
        gradients, values = self._backward(data, local, total)
        self._state.write(list(zip(self._written, values, strict=True)))
        share = BatchShare(local, total, self._part.total)
        return [share.select(gradient, 0) for gradient in gradients]

    def _backward(self, data: Any, local: tf.Tensor, total: tf.Tensor) -> Any:
        """Computes gradients, compiled by XLA where that was asked for.

        Returns:
            The gradients that there are, and the values to be written to
            `self._written`.
        """

        def compute(
            data: Any, local: tf.Tensor, total: tf.Tensor
        ) -> tuple[list[Any], list[tf.Tensor]]:
            share = BatchShare(local, total, self._part.total)
            variables = self._model.trainable_variables
            with tf.GradientTape() as tape:
                loss, writes = self._forward(data, share, training=True)
                loss = self._model.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, variables)
            _check_gradients(gradients, variables)
            self._update.present = [g is not None for g in gradients]
            self._written = [variable for variable, _ in writes]
            present = [g for g in gradients if g is not None]
            return present, [value for _, value in writes]

        if not self._compiled_by_xla():
            return compute(data, local, total)
        jitted = tf.function(compute, jit_compile=True, autograph=False)
        return jitted(data, local, total)

    def _compiled_by_xla(self) -> bool:
        """Returns whether XLA compiles forward and backward pass."""
        if not self._model.jit_compile:
            return False
        apart = not self._state.stored_once
        if self._part.total > 1:
            apart = apart and not keras_internals.communicates(self._model)
        if not apart:
            _log.info(
                "jit_compile=True: the replicas of %s exchange values or "
                "share variables in the forward pass, which XLA does not "
                "compile; it runs without",
                self._model.name,
            )
        return apart

    def _replica_evaluate(
        self, data: Any, local: tf.Tensor, total: tf.Tensor
    ) -> None:
        share = BatchShare(local, total, self._part.total)
        _, writes = self._forward(data, share, training=False)
        self._state.write(writes)

    def _replica_predict(self, data: Any) -> Any:
        if keras_internals.overrides(self._model, "predict_step"):
            return self._model.predict_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        if keras_internals.takes_training(self._model):
            return self._model(x, training=False)
        return self._model(x)

    def _replica_gather(self, padded: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        first = replica % self._part.local == 0
        mine = tf.where(first, padded, tf.zeros_like(padded))
        return context.all_reduce("sum", mine)


def _mean_writes(
    mean: keras.metrics.Mean, value: tf.Tensor, share: BatchShare
) -> Writes:
    """A global mean over examples from contributions that add up to it."""
    weight = tf.cast(share.total, mean.total.dtype)
    value = tf.cast(tf.stop_gradient(value), mean.total.dtype)
    return [
        (mean.total, mean.total + value * weight),
        (mean.count, mean.count + tf.cast(share.local, mean.count.dtype)),
    ]


def _number(value: tf.Tensor) -> Any:
    array = value.numpy()
    return float(array) if array.ndim == 0 else array


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


def _check_compiled(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            "build_model must return a compiled keras.Model. Received: "
            f"{type(model).__name__}."
        )
    if not model.compiled:
        raise ConfigurationError(
            "build_model must return a compiled model. Received: the model "
            f"{model.name!r}, not compiled. Call `model.compile(...)` before "
            "returning it."
        )
    if model.distribute_strategy is not strategy:
        raise ConfigurationError(
            "The model must be made in the strategy's scope. Received: the "
            f"model {model.name!r}, made outside. Create it inside "
            "build_model."
        )
