"""One piece of work as a worker does it: a few steps in one `tf.function`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data.structures import rows
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.asynchronous.schedule.work import Work
from mgpu_tf.engine.asynchronous.servers.packed_variables import Packs
from mgpu_tf.engine.asynchronous.servers.state import SharedStatistics
from mgpu_tf.engine.asynchronous.servers.update import AsynchronousUpdate
from mgpu_tf.engine.asynchronous.traced_workers import worker_index
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.rules import Rule
from mgpu_tf.engine.author.state import ReplicaState, Writes
from mgpu_tf.engine.step.replica_step import ReplicaStep, outputs_of
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.parameter_server import ParameterServerStrategy
from mgpu_tf.strategies.replicas.topology import LocalReplicas

State = list[tf.Tensor]

# Keeps the seeds of steps apart; Keras takes them modulo 2**31 - 2.
_SEED_STRIDE = 1_181_783_497


class Piece:
    """Steps of training or evaluation, for tracing.

    Args:
        model: A compiled and built model.
        strategy: Its strategy.
        step: What one replica computes.
        state: What it may write besides weights.
        update: What happens with gradients.
        loss: The model's loss.
        packs: Which weights a worker reads together.
        shared: How what is written besides is brought together.
        measured: Whether staleness is measured.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ParameterServerStrategy,
        step: ReplicaStep,
        state: ReplicaState,
        update: AsynchronousUpdate,
        packs: Packs,
        shared: SharedStatistics,
        *,
        measured: bool,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync
        self._step, self._state = step, state
        self._update = update
        self._packs, self._shared = packs, shared
        options = strategy.staleness
        self._scaled_by = None
        if options.late_gradients == "scale":
            self._scaled_by = options.max_staleness
        self._measured = measured or self._scaled_by is not None
        # Of the step that was traced last, while its graph is made.
        self.applied: list[Any] = []

    def __call__(
        self,
        training: bool,
        work: Work,
        iterator: Any,
        arguments: Any,
        steps: tf.Tensor,
        first: tf.Tensor,
    ) -> tf.Tensor:
        """Runs the steps.

        Args:
            training: Whether these are steps of training.
            work: How to read.
            iterator: What this worker reads from.
            arguments: Which examples.
            steps: How many steps, unless the data ends.
            first: Index of the first step among all of the run.

        Returns:
            One float64 vector, which is one message: steps, examples, the
            sums of the metrics' state, and the staleness of each gradient
            where it was measured.
        """
        read = work.reader(iterator, arguments)
        zero = tf.constant(0, tf.int64)
        metrics = [tf.zeros(v.shape, v.dtype) for v in self._state.metrics]
        sums = []
        if training and self._update.every > 1:
            sums = [
                tf.zeros(v.shape, v.dtype)
                for v in self._model.trainable_variables
            ]
        measured = training and self._measured
        late = []
        if measured:
            late.append(
                tf.TensorArray(
                    tf.float64, 0, dynamic_size=True, element_shape=[]
                )
            )

        def body(
            done: tf.Tensor,
            examples: tf.Tensor,
            ended: tf.Tensor,
            metrics: State,
            sums: State,
            late: list[tf.TensorArray],
        ) -> Any:
            data, size = read(done)

            def go_on() -> tuple[State, State, tf.Tensor]:
                with self._step.in_place():
                    if training:
                        return self._train(
                            data, size, done, first + done, metrics, sums
                        )
                    # A branch has its own names for what is outside, and
                    # what is proven of rows goes by names.
                    own = tf.nest.map_structure(
                        lambda leaf: (
                            None if leaf is None else tf.identity(leaf)
                        ),
                        (data, size, metrics),
                        expand_composites=True,
                    )
                    return self._evaluate(*own), sums, zero

            if work.may_end:
                metrics, sums, staleness = tf.cond(
                    size > 0, go_on, lambda: (metrics, sums, zero)
                )
                done += tf.cast(size > 0, tf.int64)
                ended = tf.equal(size, 0)
            else:
                metrics, sums, staleness = go_on()
                late = [
                    array.write(array.size(), tf.cast(staleness, tf.float64))
                    for array in late
                ]
                done += 1
            return done, examples + size, ended, metrics, sums, late

        def more(done: tf.Tensor, _: Any, ended: tf.Tensor, *__: Any) -> Any:
            return ~ended if work.may_end else done < steps

        done, examples, _, metrics, _, late = tf.while_loop(
            more,
            body,
            (zero, zero, tf.constant(False), metrics, sums, late),
            parallel_iterations=1,
        )
        counts = [tf.cast(t, tf.float64)[None] for t in (done, examples)]
        flat = [tf.cast(tf.reshape(m, [-1]), tf.float64) for m in metrics]
        return tf.concat([*counts, *flat, *(a.stack() for a in late)], 0)

    def _train(
        self,
        data: Any,
        size: tf.Tensor,
        place: tf.Tensor,
        index: tf.Tensor,
        metrics: State,
        sums: State,
    ) -> tuple[State, State, tf.Tensor]:
        """Makes one step of training."""
        scale = self._update.scale()
        gradients, metrics, values, staleness = self._strategy.run(
            self._replica_train, args=(data, size, index, metrics, scale)
        )
        gradients = [self._first(g) for g in gradients]
        metrics = [self._total(m) for m in metrics]
        staleness = self._first(staleness)
        self._shared.write(self._others(), [self._mean(v) for v in values])
        present, every = self._step.present, self._update.every
        self.applied = gradients
        if every == 1:
            self._update(gradients, present, index, scale)
            return metrics, sums, staleness
        queue = iter(gradients)
        sums = [
            total + tf.convert_to_tensor(next(queue)) if has else total
            for total, has in zip(sums, present, strict=True)
        ]

        def apply() -> State:
            means = [
                total / every
                for total, has in zip(sums, present, strict=True)
                if has
            ]
            self._update(means, present, index, None)
            return [tf.zeros_like(total) for total in sums]

        def keep() -> State:
            self._update.accumulate(index)
            return sums

        due = tf.equal((place + 1) % every, 0)
        return metrics, tf.cond(due, apply, keep), staleness

    def trace(
        self, work: Work, iterator: Any, arguments: Any, index: tf.Tensor
    ) -> tuple[Any, ...]:
        """Makes one step of training, and returns what it did.

        Args:
            work: How to read.
            iterator: What this worker reads from.
            arguments: Which examples.
            index: Index of the step among all of the run.

        Returns:
            The worker, the batch, its examples, the gradients that the
            optimizer got, and the sums of the metrics' state.
        """
        data, size = work.reader(iterator, arguments)(tf.constant(0, tf.int64))
        metrics = [tf.zeros(v.shape, v.dtype) for v in self._state.metrics]
        with self._step.in_place():
            metrics, _, _ = self._train(data, size, size, index, metrics, [])
        flat = [tf.cast(tf.reshape(m, [-1]), tf.float64) for m in metrics]
        return (
            worker_index(),
            data,
            size,
            [tf.convert_to_tensor(gradient) for gradient in self.applied],
            tf.concat(flat, 0),
        )

    def _evaluate(self, data: Any, size: tf.Tensor, metrics: State) -> State:
        results = self._strategy.run(
            self._replica_evaluate, args=(data, size, metrics)
        )
        return [self._total(m) for m in results]

    # On a replica.

    def _replica_train(
        self,
        data: Any,
        size: tf.Tensor,
        index: tf.Tensor,
        metrics: State,
        scale: tf.Tensor | None,
    ) -> tuple[list[Any], State, list[tf.Tensor], tf.Tensor]:
        data, local = _share_of(data, size, self._replicas)
        start = tf.constant(0, tf.int64)
        if self._measured:
            start = tf.cast(self._update.steps_made(), tf.int64)
        with tf.control_dependencies([start]):
            given = self._given(metrics, index)
            gradients, values, _ = self._step.gradients(
                data,
                BatchShare(local, size, self._replicas),
                lambda loss: self._update.scaled(loss, scale),
                given,
            )
        self._check_logs()
        staleness = tf.constant(0, tf.int64)
        if self._measured:
            ready = [tf.convert_to_tensor(g) for g in gradients]
            with tf.control_dependencies(ready):
                now = tf.cast(self._update.steps_made(), tf.int64)
            staleness = now - start
        share = BatchShare(local, size, self._replicas)
        gradients = [share.select(gradient, 0) for gradient in gradients]
        if self._scaled_by is not None:
            gradients = [self._weighed(g, staleness) for g in gradients]
        gradients = self._update.summed(gradients)
        self._check_metrics()
        new = {
            id(variable): value
            for variable, value in zip(self._step.written, values, strict=True)
        }
        metrics = [new[id(variable)] for variable in self._state.metrics]
        before = {id(variable): value for variable, value in given}
        others = [
            self._shared.change(v, before.get(id(v), v), new[id(v)])
            for v in self._others()
        ]
        return gradients, metrics, others, staleness

    def _replica_evaluate(
        self, data: Any, size: tf.Tensor, metrics: State
    ) -> State:
        data, local = _share_of(data, size, self._replicas)
        share = BatchShare(local, size, self._replicas)
        given = self._given(metrics, tf.constant(0, tf.int64))
        _, writes, _ = self._step.forward(data, share, False, given)
        self._check_logs()
        self._check_metrics()
        new = {id(variable): value for variable, value in writes}
        return [new[id(variable)] for variable in self._state.metrics]

    def _check_logs(self) -> None:
        names = self._step.log_names
        if names:
            raise ConfigurationError(
                "With parameter servers a compute_metrics of your own must "
                "return the model's metrics. Received: one that returns "
                f"{', '.join(names)}. Make metrics of them, or use a "
                "synchronous strategy."
            )

    def _check_metrics(self) -> None:
        """Refuses metrics whose parts the coordinator cannot add up."""
        for variable in self._state.metrics:
            rule = self._state.rule(variable)
            if rule not in (Rule.SUM, Rule.AGREED):
                raise ConfigurationError(
                    "On 'parameter_server' the state of a metric must be a "
                    f"sum over examples. Received: {variable.path}, which is "
                    f"a {rule.value}. Use another strategy, or compute it in "
                    "evaluate() of one."
                )

    def _given(self, metrics: State, index: tf.Tensor) -> Writes:
        """Returns what variables are for this step, and this replica.

        Metrics go on from what the piece has added up; random layers draw
        from (seed, step, replica), so that no two steps draw alike whichever
        worker makes them.
        """
        if self._replicas > 1:
            first = tf.equal(_replica(), 0)
            metrics = [tf.where(first, m, tf.zeros_like(m)) for m in metrics]
        given: Writes = list(zip(self._state.metrics, metrics, strict=True))
        given += self._packs.read()
        given += self._shared.read()
        number = index * self._replicas + _replica()
        for state in self._state.seeds:
            value = state.value
            offset = tf.stack([number * _SEED_STRIDE, tf.zeros_like(number)])
            given.append((state, value + tf.cast(offset, value.dtype)))
        return given

    def _weighed(self, gradient: Any, staleness: tf.Tensor) -> Any:
        """Counts a gradient less that is later than the bound."""
        limit = tf.constant(self._scaled_by, tf.float32)
        late = tf.maximum(tf.cast(staleness, tf.float32), 1.0)
        weight = tf.minimum(1.0, tf.maximum(limit, 1.0) / late)
        return _scaled(gradient, weight)

    # Outside of replicas.

    def _others(self) -> list[keras.Variable]:
        """The variables to be written that are neither metrics nor seeds."""
        apart = {id(v) for v in [*self._state.metrics, *self._state.seeds]}
        return [v for v in self._step.written if id(v) not in apart]

    def _first(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    def _total(self, value: Any) -> tf.Tensor:
        return tf.add_n(self._strategy.experimental_local_results(value))

    def _mean(self, value: Any) -> tf.Tensor:
        parts = self._strategy.experimental_local_results(value)
        if len(parts) == 1 or not parts[0].dtype.is_floating:
            return parts[0]
        return tf.add_n(parts) / len(parts)


def predict(
    model: keras.Model,
    strategy: ParameterServerStrategy,
    work: Work,
    iterator: Any,
    arguments: Any,
    steps: tf.Tensor,
) -> tuple[tf.Tensor, Any]:
    """Computes the model's outputs, for tracing.

    Args:
        model: A built model.
        strategy: Its strategy.
        work: How to read.
        iterator: What this worker reads from.
        arguments: Which examples.
        steps: How many batches, unless the data ends.

    Returns:
        The sizes of the batches, and the outputs for all their rows.
    """
    read = work.reader(iterator, arguments)
    replicas = strategy.num_replicas_in_sync
    generator = keras_internals.global_seed_generator()

    def on_replica(data: Any, size: tf.Tensor) -> Any:
        rows = _share_of(data, size, replicas)[0]
        return outputs_of(model, rows, generator)

    def outputs(data: Any, size: tf.Tensor) -> Any:
        return tf.nest.map_structure(
            lambda v: tf.concat(strategy.experimental_local_results(v), 0),
            strategy.run(on_replica, args=(data, size)),
        )

    data, size = read(tf.constant(0, tf.int64))
    first = outputs(data, size)
    arrays = [
        tf.TensorArray(
            t.dtype,
            1,
            dynamic_size=True,
            infer_shape=False,
            element_shape=[None, *t.shape[1:]],
        ).write(0, t)
        for t in tf.nest.flatten(first)
    ]
    sizes = tf.TensorArray(tf.int64, 1, dynamic_size=True).write(0, size)

    def body(
        done: tf.Tensor, _: Any, arrays: list[Any], sizes: tf.TensorArray
    ) -> Any:
        data, size = read(done)
        place = tf.cast(done, tf.int32)
        rows = tf.nest.flatten(outputs(data, size))
        arrays = [
            array.write(place, t) for array, t in zip(arrays, rows, strict=True)
        ]
        sizes = sizes.write(place, size)
        return done + 1, tf.equal(size, 0), arrays, sizes

    _, _, arrays, sizes = tf.while_loop(
        lambda done, ended, *_: ~ended if work.may_end else done < steps,
        body,
        (tf.constant(1, tf.int64), tf.equal(size, 0), arrays, sizes),
        parallel_iterations=1,
    )
    rows = [array.concat() for array in arrays]
    return sizes.stack(), tf.nest.pack_sequence_as(first, rows)


def _share_of(data: Any, size: tf.Tensor, replicas: int) -> tuple[Any, Any]:
    """Returns the rows of this replica, one GPU of the worker."""
    if replicas == 1:
        return data, size
    low, high = LocalReplicas(0, replicas, replicas).rows_of(size, _replica())
    return rows(data, low, high), high - low


def _replica() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.int64)


def _scaled(gradient: Any, weight: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scaled(gradient.values, weight),
            gradient.indices,
            gradient.dense_shape,
        )
    return gradient * tf.cast(weight, gradient.dtype)
