"""From gradients to new weights, each on the device of its stage."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.update import Gradients, Update, divided, values
from mgpu_tf.strategies.own_gradient import sum_over_replicas


class PipelineUpdate(Update):
    """Applies gradients that lie on the devices of stages.

    Args:
        *args: As for `Update`.
        **kwargs: As for `Update`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._constrains_once = True
        name = kwargs["options"].gradient_dtype
        self._dtype = tf.as_dtype(name) if name else None

    # Outside of replicas.

    def _summed(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Sums over replicas, those of a stage on one of its devices."""
        if self._replicas == 1:
            return gradients
        rows = [isinstance(self._first(g), tf.IndexedSlices) for g in gradients]
        summed = iter(
            self._rows(
                [g for g, each in zip(gradients, rows, strict=True) if each],
                [a for a, each in zip(alike, rows, strict=True) if each],
            )
        )
        return [
            next(summed) if each else self._dense_sum(gradient)
            for gradient, each in zip(gradients, rows, strict=True)
        ]

    def _dense_sum(self, gradient: Any) -> Any:
        every = self._strategy.experimental_local_results(gradient)
        sent = []
        for each in every:
            with tf.device(each.device):
                small = self._dtype and self._dtype.size < each.dtype.size
                sent.append(tf.cast(each, self._dtype) if small else each)
        with tf.device(every[0].device):
            total = tf.cast(tf.add_n(sent), every[0].dtype)
        totals = [total]
        for each in every[1:]:
            with tf.device(each.device):
                totals.append(tf.identity(total))
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: totals[context.replica_id_in_sync_group]
        )

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        return keras_internals.engine_order(
            self._optimizer, clipped=self._clipped
        )

    # On a replica.

    def _clipped(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> Gradients:
        """Clips by norms as Keras does, each gradient on its device."""
        del variables
        by_norm, by_all = optimizer.clipnorm, optimizer.global_clipnorm
        norms = []
        for gradient in gradients:
            with _beside(gradient):
                norms.append(tf.reduce_sum(tf.square(values(gradient))))
        clipped = []
        if by_norm:
            for gradient, norm in zip(gradients, norms, strict=True):
                with _beside(gradient):
                    most = tf.maximum(tf.sqrt(norm), by_norm) / by_norm
                    clipped.append(divided(gradient, most))
            return clipped
        wide = max((norm.dtype for norm in norms), key=lambda d: d.size)
        norm = tf.sqrt(tf.add_n([tf.cast(each, wide) for each in norms]))
        scale = by_all * tf.minimum(1.0 / norm, 1.0 / by_all)
        # Not finite where the norm is not, as in Keras.
        scale = scale + (norm - norm)
        for gradient in gradients:
            with _beside(gradient):
                # Rows become dense here, as in Keras.
                dense = tf.convert_to_tensor(gradient)
                clipped.append(dense * tf.cast(scale, dense.dtype))
        return clipped

    def _finite(self, gradients: Gradients) -> tf.Tensor:
        bad = []
        for gradient in gradients:
            with _beside(gradient):
                finite = tf.math.is_finite(values(gradient))
                bad.append(tf.reduce_any(~finite))
        count = tf.cast(tf.reduce_any(tf.stack(bad)), tf.float32)
        if not self._are_alike:
            count = sum_over_replicas(count)
        return tf.equal(count, 0.0)

    def _unscaled(self, gradient: Any, scale: tf.Tensor) -> Any:
        with _beside(gradient):
            return super()._unscaled(gradient, scale)

    def _plus(self, sums: Any, gradient: Any) -> tf.Tensor:
        with _beside(gradient):
            return super()._plus(sums, gradient)

    def _mean(self, gradient: tf.Tensor) -> tf.Tensor:
        with _beside(gradient):
            return super()._mean(gradient)


def _beside(gradient: Any) -> contextlib.AbstractContextManager[None]:
    """Computes on the device that has a gradient."""
    return tf.device(values(gradient).device)
