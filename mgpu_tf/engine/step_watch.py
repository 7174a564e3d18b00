"""The loss of each step of an execution, sent once when the execution ends.

    rows = watch.begin()
    rows = watch.after(rows, step)        # in the loop over steps
    sums, own = watch.end(rows, steps)    # one reduction
    strategy.run(watch.row)               # what a replica has now

Each replica notes its sums of the loss after each step. The sums of all
replicas come together in one reduction. So all workers know the loss of each
step, bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica

# Sum of losses, number of examples, replicas whose weights are not finite.
_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class Watched:
    """What was seen of the steps of an execution.

    Attributes:
        sums: Before the first step and after each, `[steps + 1, 3]`: the sum
            of losses since metrics were reset, the number of examples, the
            number of replicas with a weight that is not finite.
        own: The same of the replicas of this worker.
    """

    sums: np.ndarray
    own: np.ndarray

    @property
    def losses(self) -> np.ndarray:
        """The loss of each step, `[steps]`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            differences = np.diff(self.sums[:, :2], axis=0)
            return differences[:, 0] / differences[:, 1]

    def first_bad(self, max_loss: float | None) -> int:
        """Returns the index of the first bad step, -1 for none.

        A step is bad if it ends with a loss or a weight that is not finite,
        or if its loss is above a bound.

        Args:
            max_loss: The bound, None for none.
        """
        bad = ~np.isfinite(self.sums[1:, 0]) | (self.sums[1:, 2] > 0)
        if max_loss is not None:
            bad |= self.losses > max_loss
        return int(bad.argmax()) if bad.any() else -1

    def first_bad_here(self) -> int:
        """Returns the same of the loss on this worker alone."""
        bad = ~np.isfinite(self.own[1:, 0])
        return int(bad.argmax()) if bad.any() else -1


class StepWatch:
    """Notes the loss of each step, in the graph of an execution.

    Args:
        model: A built model.
        strategy: Its strategy.
        weights: Whether to look at the trainable weights as well.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        weights: bool,
    ) -> None:
        self._strategy = strategy
        self._local = topology_of(strategy).local
        self._tracker = keras_internals.loss_tracker(model)
        self._weights = [
            keras_internals.stored(variable)
            for variable in model.trainable_variables
            if weights and keras.backend.is_float_dtype(variable.dtype)
        ]

    def begin(self) -> tf.TensorArray:
        """Returns rows with what there is before the first step."""
        rows = tf.TensorArray(
            tf.float64,
            size=1,
            dynamic_size=True,
            element_shape=[self._local.count, _COLUMNS],
        )
        return self.after(rows, 0)

    def after(self, rows: tf.TensorArray, step: Any) -> tf.TensorArray:
        """Adds what there is after a step, counted from 1."""
        every = self._strategy.run(self.row)
        results = self._strategy.experimental_local_results(every)
        return rows.write(tf.cast(step, tf.int32), tf.stack(results))

    def end(
        self, rows: tf.TensorArray, steps: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of all replicas, and of those of this worker.

        Args:
            rows: From `after`.
            steps: The number of steps that were done.
        """
        # The search for the end of the data may have added one more.
        own = tf.reduce_sum(rows.stack()[: steps + 1], 1)
        if self._local.num_processes == 1:
            return own, own

        def on_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            place = context.replica_id_in_sync_group % self._local.count
            mine = tf.where(tf.equal(place, 0), own, tf.zeros_like(own))
            return sum_over_replicas(mine)

        sums = self._strategy.run(on_replica)
        return self._strategy.experimental_local_results(sums)[0], own

    def row(self) -> tf.Tensor:
        """Returns the numbers of a replica, `[3]`. On a replica."""
        finite = [
            tf.reduce_all(tf.math.is_finite(self._stored_here(weight)))
            for weight in self._weights
        ]
        broken = ~tf.reduce_all(tf.stack(finite)) if finite else False
        values = [self._tracker.total.value, self._tracker.count.value, broken]
        return tf.stack([tf.cast(value, tf.float64) for value in values])

    def _stored_here(self, weight: Any) -> tf.Tensor:
        """Returns what this replica stores of a weight. On a replica."""
        if not isinstance(weight, tf.distribute.DistributedValues):
            return tf.convert_to_tensor(weight)
        copies = self._strategy.experimental_local_results(weight)
        return copies[this_replica() % len(copies)].read_value()
