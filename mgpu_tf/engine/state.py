"""What a step writes besides weights: metrics, moving statistics, seeds.

Two kinds of strategy, two rules:

    a copy on each replica    written locally; metrics are summed and moving
                              statistics averaged at the end of an execution,
                              all in one reduction
    one copy for all          the replicas' values are brought together before
                              they are written, in every step
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals

Writes = list[tuple[keras.Variable, tf.Tensor]]

# A prime; Keras takes seeds modulo 2**31 - 2, which keeps multiples apart.
_SEED_STRIDE = 1_181_783_497


class ReplicaState:
    """State of which every replica has a copy.

    Attributes:
        metrics: The variables of the model's metrics.
        variables: All that a step may write besides weights.
        seeds: The states of random layers, among them.
        moving: Moving statistics, averaged over replicas in `collect`.
        stored_once: Whether there is one copy for all replicas.

    Args:
        model: A built model.
        replicas: Number of replicas.
    """

    stored_once = False

    def __init__(self, model: keras.Model, replicas: int) -> None:
        self._replicas = replicas
        self.metrics = _unique(
            variable
            for metric in model.metrics
            for variable in metric.variables
        )
        self.variables = _unique(
            [*model.non_trainable_variables, *self.metrics]
        )
        self.moving = [v for v in model.non_trainable_variables if _is_float(v)]
        synchronized = keras_internals.synchronized_statistics(model)
        self.seeds = keras_internals.seed_states(model)
        self._agreed = {id(v) for v in synchronized} | {
            id(v) for v in model.non_trainable_variables if not _is_float(v)
        }

    def is_agreed(self, variable: keras.Variable) -> bool:
        """Returns whether every replica writes the same value by itself.

        So do counters, seeds and synchronized statistics, on a replica
        without examples too; other state is left alone there.
        """
        return id(variable) in self._agreed

    def replica_seeds(self) -> Writes:
        """Returns the seeds of this replica, for a step. On a replica.

        Random layers draw from (seed, count); the replica is added to the
        seed, so that masks differ between replicas while the state that is
        kept is one for all.
        """
        if self._replicas == 1:
            return []
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        offset = tf.stack([replica * _SEED_STRIDE, tf.zeros([], tf.int64)])
        return [
            (state, state.value + tf.cast(offset, state.dtype))
            for state in self.seeds
        ]

    @contextlib.contextmanager
    def replica_seeds_in_place(self) -> Iterator[None]:
        """Gives random layers this replica's seeds, and takes them again."""
        seeds = self.replica_seeds()
        own = [tf.identity(state.value) for state, _ in seeds]
        self.write(seeds)
        yield
        self.write(
            [
                (state, tf.stack([before[0], state.value[1]]))
                for (state, _), before in zip(seeds, own, strict=True)
            ]
        )

    def next_seed(self, state: keras.Variable, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the state after a step: the seed, and the new count."""
        return tf.stack([state.value[0], drawn[1]])

    def write(self, writes: Writes) -> None:
        """Writes what a step on this replica gave. On a replica."""
        for variable, value in writes:
            variable.assign(value)

    def collect(self, notes: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Makes the state that of all replicas. On a replica.

        Args:
            notes: Numbers of this replica's worker, `[notes]`.

        Returns:
            The metric variables' values over all replicas, and the means of
            the notes.
        """
        metrics = [tf.identity(v.value) for v in self.metrics]
        moving = [tf.identity(v.value) for v in self.moving]
        if self._replicas == 1:
            return metrics, notes
        summed = _sum_over_replicas([*metrics, *moving, notes])
        means = summed[len(metrics) : -1]
        for variable, value in zip(self.moving, means, strict=True):
            variable.assign(value / self._replicas)
        return summed[: len(metrics)], summed[-1] / self._replicas


class SharedState(ReplicaState):
    """State of which there is one copy for all replicas."""

    stored_once = True

    def write(self, writes: Writes) -> None:
        """Writes what the replicas gave, brought together. On a replica."""
        variables = [variable for variable, _ in writes]
        metrics = {id(variable) for variable in self.metrics}

        def write_once(
            strategy: tf.distribute.Strategy, values: list[tf.Tensor]
        ) -> None:
            for variable, value in zip(variables, values, strict=True):
                parts = strategy.experimental_local_results(value)
                if id(variable) in metrics:
                    new = variable + tf.add_n([p - variable for p in parts])
                elif _is_float(variable):
                    new = tf.add_n(parts) / len(parts)
                else:
                    new = parts[0]
                variable.assign(new)

        context = tf.distribute.get_replica_context()
        context.merge_call(write_once, args=([v for _, v in writes],))

    def collect(self, notes: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Reads the state; it is already that of all replicas."""
        return [tf.identity(v.value) for v in self.metrics], notes


def state_for(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> ReplicaState:
    """Returns the rule that fits how a strategy stores variables."""
    replicas = strategy.num_replicas_in_sync
    stored_once = isinstance(
        strategy, tf.distribute.experimental.CentralStorageStrategy
    )
    if stored_once and replicas > 1:
        return SharedState(model, replicas)
    return ReplicaState(model, replicas)


def _is_float(variable: keras.Variable) -> bool:
    return keras.backend.is_float_dtype(variable.dtype)


def _sum_over_replicas(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over replicas with one reduction for each dtype."""
    context = tf.distribute.get_replica_context()
    summed: list[tf.Tensor] = list(values)
    for dtype in sorted({v.dtype for v in values}, key=lambda d: d.name):
        places = [i for i, v in enumerate(values) if v.dtype == dtype]
        flat = tf.concat([tf.reshape(values[i], [-1]) for i in places], 0)
        flat = context.all_reduce("sum", flat)
        sizes = [values[i].shape.num_elements() for i in places]
        for i, part in zip(places, tf.split(flat, sizes), strict=True):
            summed[i] = tf.reshape(part, values[i].shape)
    return summed


def _unique(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
