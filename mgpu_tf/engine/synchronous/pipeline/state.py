"""What a step writes besides weights, where a replica has micro-batches."""

from __future__ import annotations

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.rules import Rule
from mgpu_tf.engine.author.state import (
    SEED_STRIDE,
    ReplicaState,
    row_among_zeros,
    sum_tensors,
)
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.split.pipeline import StagedStrategy
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable


class PipelineState(ReplicaState):
    """State of replicas whose rows are computed in micro-batches.

    Args:
        model: A built model, in stages.
        strategy: Where the stages are.
    """

    def __init__(self, model: keras.Model, strategy: StagedStrategy) -> None:
        mesh = strategy.mesh
        same_rows = mesh.tensor * mesh.blocks
        super().__init__(model, mesh.ranges, same_rows=same_rows)
        self._strategy = strategy
        self._several = mesh.ranges * strategy.micro_batches > 1

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
        seeds = self._here(self.seeds)
        if self.draws_alike:
            return {id(state): tf.identity(state.value) for state in seeds}
        context = tf.distribute.get_replica_context()
        replica = tf.cast(
            context.replica_id_in_sync_group // self._same_rows, tf.int64
        )
        part = replica * count + micro
        offset = tf.stack([part * SEED_STRIDE, tf.zeros([], tf.int64)])
        return {
            id(state): state.value + tf.cast(offset, state.dtype)
            for state in seeds
        }

    def next_seed(self, state: keras.Variable, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the state as it was drawn; the step takes the count of it."""
        del state
        return drawn


class BlockState(PipelineState):
    """The same where each process has a block of stages.

    Replicas of a block bring its state together, since no other block knows
    the rules of it. So it is with metrics, which the last block computes; all
    others are sent what they are.

    Args:
        model: As for `PipelineState`.
        strategy: As for `PipelineState`.
    """

    def __init__(self, model: keras.Model, strategy: StagedStrategy) -> None:
        super().__init__(model, strategy)
        # The last block has the loss and all metrics.
        last = strategy.mesh.blocks - 1
        self._has_metrics = strategy.block == last
        self._first_with_metrics = next(
            replica
            for replica in range(self._total)
            if strategy.mesh.rank("blocks", replica) == last
        )

    def _here(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        return list(filter(is_here, variables))

    def _holds_part(self, replica: int) -> bool:
        return replica % self._same_rows == self._first_with_metrics

    def _counts(self, replica: int) -> bool:
        return replica == self._first_with_metrics

    def _adds_nothing(self) -> bool:
        return False  # Only the last block is given what adds up.

    def _sums(
        self,
        metrics: list[tf.Tensor],
        layers: list[tf.Tensor],
        notes: tf.Tensor,
    ) -> list[tf.Tensor]:
        if self._has_metrics:
            return [*self._sums_over_copies([*metrics, *layers]), notes]
        return [*metrics, *self._sums_over_copies(layers), notes]

    def _sums_over_copies(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        groups = self._strategy.along("data", "fsdp")
        return sum_tensors(values, groups.all_reduce)

    def _known_to_all(
        self, metrics: list[tf.Tensor], notes: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        if not self._counts(self._strategy.first_replica):
            metrics = list(map(tf.zeros_like, metrics))
        *metrics, notes = sum_tensors([*metrics, notes], sum_over_replicas)
        return metrics, notes

    def _sent(
        self, rule: Rule, value: tf.Tensor, start: tf.Tensor
    ) -> tf.Tensor:
        if rule in (Rule.SUM, Rule.MEAN):
            return value - start
        context = tf.distribute.get_replica_context()
        place = context.replica_id_in_sync_group // self._same_rows
        return row_among_zeros(value, place, self._replicas)

    def _received(
        self, rule: Rule, summed: tf.Tensor, start: tf.Tensor
    ) -> tf.Tensor:
        if rule is Rule.MEAN:
            return start + summed / self._replicas
        return super()._received(rule, summed, start)


def is_here(variable: keras.Variable) -> bool:
    """Returns whether this process has a variable, in its stages or at all."""
    held = keras_internals.stored(variable)
    return not (isinstance(held, ShardedVariable) and held.is_elsewhere)
