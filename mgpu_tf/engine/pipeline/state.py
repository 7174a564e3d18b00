"""What a step writes besides weights, where a replica has micro-batches."""

from __future__ import annotations

import keras
import tensorflow as tf

from mgpu_tf.engine.rules import Rule
from mgpu_tf.engine.state import SEED_STRIDE, ReplicaState


class PipelineState(ReplicaState):
    """State of replicas whose rows are computed in micro-batches.

    Args:
        model: A built model.
        replicas: Number of replicas.
        micro_batches: Of each replica.
    """

    def __init__(
        self, model: keras.Model, replicas: int, micro_batches: int
    ) -> None:
        super().__init__(model, replicas)
        self._several = replicas * micro_batches > 1

    def is_declared_mean(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is a mean over replicas, unread."""
        declared = id(variable) in self._declared
        return declared and self.rule(variable) is Rule.MEAN

    def is_global_seed(self, variable: keras.Variable) -> bool:
        """Returns whether a seed is that of unseeded draws."""
        return self.generator is not None and variable is self.generator.state

    def seeds_of(self, micro: int, count: int) -> dict[int, tf.Tensor]:
        """Returns the seeds of a micro-batch, by variable. On a replica.

        They are those of the replica of that number, where there are as many
        replicas as micro-batches in all.

        Args:
            micro: The micro-batch.
            count: Micro-batches of a replica.
        """
        if not self._several:
            return {}
        if self.draws_alike:
            return {id(state): tf.identity(state.value) for state in self.seeds}
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        part = replica * count + micro
        offset = tf.stack([part * SEED_STRIDE, tf.zeros([], tf.int64)])
        return {
            id(state): state.value + tf.cast(offset, state.dtype)
            for state in self.seeds
        }

    def next_seed(self, state: keras.Variable, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the state as it was drawn; the step takes the count of it."""
        del state
        return drawn
