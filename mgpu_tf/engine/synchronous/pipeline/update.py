"""From gradients to new weights, each on the device of its stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.exchange.noise_scale import square_of
from mgpu_tf.engine.exchange.reduction import of_shape
from mgpu_tf.engine.step.update import Gradients, beside, values
from mgpu_tf.engine.synchronous.pipeline.state import is_here
from mgpu_tf.engine.synchronous.sharded import ShardedUpdate
from mgpu_tf.mesh import others_than
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable, part_of


class PipelineUpdate(ShardedUpdate):
    """Applies gradients that lie on the devices of stages.

    Args:
        *args: As for `Update`.
        **kwargs: As for `Update`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits = any(map(keras_internals.is_split, self._variables))
        if not self._splits and self._mesh.fsdp * self._mesh.tensor == 1:
            # Sums over micro-steps are those of each replica.
            self._reduces_first = self._every == 1 or self._reduced
            self._are_alike = self._reduces_first or self._replicas == 1

    # Outside of replicas.

    def _summed(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Sums over replicas, those of a stage on one of its devices.

        Of a weight that replicas store in parts, each gets that of its part.
        """
        if self._mesh.ranges * self._mesh.tensor == 1:
            return gradients
        here = list(map(is_here, variables))
        summed = iter(
            self._summed_by_axes(
                list(itertools.compress(gradients, here)),
                list(itertools.compress(variables, here)),
                list(itertools.compress(alike, here)),
            )
        )
        return [
            next(summed) if is_held else gradient
            for gradient, is_held in zip(gradients, here, strict=True)
        ]

    def _dense_of_axes(
        self,
        axes: tuple[str, ...],
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> Gradients:
        if self._strategy.is_apart:
            return super()._dense_of_axes(axes, gradients, variables)
        return list(map(self._dense_sum, gradients, variables))

    def _dense_sum(self, gradient: Any, variable: keras.Variable) -> Any:
        every = self._strategy.experimental_local_results(gradient)
        totals: dict[int, tf.Tensor] = {}
        for same, senders in self._same_parts(variable):
            sent = [every[sender] for sender in senders]
            parts = [self._part_for(same[0], each, variable) for each in sent]
            with tf.device(every[same[0]].device):
                total = tf.cast(tf.add_n(parts), every[0].dtype)
            totals[same[0]] = total
            for replica in same[1:]:
                with tf.device(every[replica].device):
                    totals[replica] = tf.identity(total)
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: totals[context.replica_id_in_sync_group]
        )

    def _same_parts(
        self, variable: keras.Variable
    ) -> list[tuple[list[int], list[int]]]:
        """Returns the replicas that store the same of a weight, together.

        With them come those that have something of its gradient.
        """
        axes: tuple[str, ...] = ()
        if keras_internals.is_split(variable):
            axes = keras_internals.stored(variable).split.axes
        senders = others_than([axis for axis in axes if axis != "fsdp"])
        return [
            (same, self._mesh.along(senders, same[0]))
            for same in self._mesh.groups(others_than(axes))
        ]

    def _part_for(
        self, replica: int, gradient: tf.Tensor, variable: keras.Variable
    ) -> tf.Tensor:
        """Returns what a replica stores of a gradient, where that one lies."""
        with tf.device(gradient.device):
            if self._dtype and self._dtype.size < gradient.dtype.size:
                gradient = tf.cast(gradient, self._dtype)
            if not keras_internals.is_split(variable):
                return gradient
            inner = keras_internals.stored(variable).inner(replica)
            if inner is None:
                return gradient
            whole = of_shape(gradient, inner.shape)
            return part_of(whole, inner, self._mesh.rank("fsdp", replica))

    # On a replica.

    def _moved(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Any],
        variables: list[keras.Variable],
    ) -> bool:
        """As in `ShardedUpdate`; a process updates what it stores alone."""
        if self._splits and super()._moved(optimizer, gradients, variables):
            return True
        if self._strategy.mesh.blocks == 1:
            return False
        here = list(map(is_here, variables))
        keras_internals.update_by_steps(
            optimizer,
            list(itertools.compress(gradients, here)),
            list(itertools.compress(variables, here)),
        )
        return True

    def _own_part(self, gradient: Any, held: ShardedVariable) -> Any:
        with beside(gradient):
            return super()._own_part(gradient, held)

    def own_square(
        self, gradients: Gradients, known: dict[int, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the squared norm of a replica's gradients, in float64."""
        if self._mesh.tensor > 1:
            return super().own_square(gradients, known)
        return tf.add_n(self._squares_of(gradients))

    def _squares_of(self, gradients: Gradients) -> list[tf.Tensor]:
        squares = []
        for gradient in gradients:
            with beside(gradient):
                squares.append(square_of(gradient))
        return squares

    def _of_all_parts(
        self,
        sums: list[tf.Tensor],
        variables: list[keras.Variable],
        whole: Iterable[bool] = (),
    ) -> tf.Tensor:
        """As in `ShardedUpdate`; of whole weights each replica has all."""
        if self._splits:
            return super()._of_all_parts(sums, variables, whole)
        wide = max((each.dtype for each in sums), key=lambda d: d.size)
        return tf.stack([tf.cast(each, wide) for each in sums])

    def _finite(self, gradients: Gradients) -> tf.Tensor:
        bad = []
        for gradient in gradients:
            with beside(gradient):
                finite = tf.math.is_finite(values(gradient))
                bad.append(tf.reduce_any(~finite))
        count = tf.cast(tf.reduce_any(tf.stack(bad)), tf.float32)
        if not self._are_alike:
            count = sum_over_replicas(count)
        return tf.equal(count, 0.0)

    def _unscaled(self, gradient: Any, scale: tf.Tensor) -> Any:
        with beside(gradient):
            return super()._unscaled(gradient, scale)

    def _sum(self, sums: Any, gradient: Any) -> tf.Tensor:
        with beside(gradient):
            return super()._sum(sums, gradient)

    def _mean(self, gradient: tf.Tensor) -> tf.Tensor:
        with beside(gradient):
            return super()._mean(gradient)
