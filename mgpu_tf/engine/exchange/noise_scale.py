"""The gradient noise scale, from gradients that a step has anyway.

The mean gradient of few rows is noisier than that of many. A step has both:
the gradients of replicas or micro-batches, and their mean. Group j of n_j rows
has the mean gradient g_j, and the part a_j of the step, so that the step's
gradient is g = sum of a_j g_j. With G the gradient of all data and S the
covariance of the gradient of a row,

    E sum a_j |g_j|^2  =  |G|^2 + tr(S) U        U = sum a_j / n_j
    E |g|^2            =  |G|^2 + tr(S) V        V = sum a_j^2 / n_j

The two equations give unbiased estimates of |G|^2 and tr(S), whatever the
number of rows of each group. For n equal groups of a batch of B rows U is n / B
and V is 1 / B.

Both estimates are averaged over steps, each step by its rows 1 / V. Their
quotient tr(S) / |G|^2 is the simple noise scale, a number of rows.

References:
    S. McCandlish et al.: An Empirical Model of Large-Batch Training, 2018,
    arXiv 1812.06162, appendix A.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine.exchange.embedding_rows import summed_rows
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

# What an average keeps of itself in a step: it looks back over 100 steps.
DECAY = 0.99

SCALE = "noise_scale"
NAMES = (SCALE, "gradient_square", "gradient_variance")


class NoiseScale:
    """Measures the noise scale while a model trains.

    Args:
        strategy: A strategy whose replicas step together.
        scaler: The loss scaling, or None.
        optimizer: The optimizer inside of it.
        every: Micro-batches in an update.

    Attributes:
        variables: What a run that is resumed goes on with.

    Raises:
        ConfigurationError: A step has one gradient only.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        scaler: keras.optimizers.LossScaleOptimizer | None,
        optimizer: keras.optimizers.Optimizer,
        every: int,
    ) -> None:
        local = topology_of(strategy).local
        if local.ranges * every == 1:
            raise ConfigurationError(
                "noise_scale compares gradients of several data-parallel "
                "replicas or micro-batches. Received: one replica, and no "
                "accumulation. Use more replicas, such as data=2, or "
                "gradient_accumulation_steps=2."
            )
        self._strategy = strategy
        self._same_rows = local.same_rows
        self._scaler = scaler
        self._factor = optimizer.loss_scale_factor or 1.0
        self._every = every
        with strategy.scope():
            # |G|^2 and tr(S) times rows, and rows.
            self._averages = _zeros(3, "noise_averages")
            # The sums over the micro-batches that wait for the update.
            self._waiting = _zeros(3, "noise_waiting")
        self._now: tf.Tensor
        self.variables = [self._averages, self._waiting]

    # In the graph, outside of replicas.

    def observe(self, squares: Any, local: Any, total: tf.Tensor) -> None:
        """Looks at the contributions of replicas before they are summed.

        Args:
            squares: The squared norm of the contribution of each replica. Of
                replicas with the same rows, what adds up to it.
            local: Rows of each replica.
            total: Rows of the global batch.
        """
        found = self._strategy.run(
            self._of_replicas, args=(squares, local, total)
        )
        squares, groups = tf.unstack(self._first(found))
        if self._scaler is not None:
            squares /= tf.cast(self._scaler.dynamic_scale, tf.float64) ** 2
        rows, every = tf.cast(total, tf.float64), self._every
        self._now = tf.stack(
            [squares / every, groups / rows / every, 1 / rows / every**2]
        )

    def accumulate(self) -> None:
        """Keeps what was observed for the update that it is part of."""
        self._waiting.assign(self._waiting + self._now)

    def update(self, big: tf.Tensor) -> None:
        """Compares with the gradient that the optimizer gets.

        Args:
            big: The squared norm of the gradients that are summed over
                replicas, their mean over micro-batches.
        """
        sums = self._now
        if self._every > 1:
            sums += tf.convert_to_tensor(self._waiting)
            self._waiting.assign(tf.zeros(3, tf.float64))
        small, u, v = tf.unstack(sums)
        # A step with one group says nothing: u equals v.
        holds = u - v > 1e-9 * u
        below = tf.where(holds, u - v, 1.0)
        estimates = tf.stack([u * big - v * small, small - big]) / below
        estimates /= self._factor**2
        holds &= tf.reduce_all(tf.math.is_finite(estimates))
        rows = 1 / v
        seen = rows * tf.concat([estimates, [1.0]], 0)
        before = tf.convert_to_tensor(self._averages)
        after = DECAY * before + (1 - DECAY) * seen
        self._averages.assign(tf.where(holds, after, before))

    def logs(self) -> dict[str, float]:
        """Returns the noise scale, |G|^2 and tr(S). Outside of the graph.

        The noise scale is infinite where the noise hides the gradient, and
        all are NaN before the first step that has several groups.
        """
        square, variance, rows = np.array(self._averages)
        if not rows:
            return dict.fromkeys(NAMES, math.nan)
        scale = variance / square if square > 0 else math.inf
        values = (scale, square / rows, variance / rows)
        return dict(zip(NAMES, map(float, values), strict=True))

    def _first(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    # On a replica.

    def _of_replicas(
        self, square: tf.Tensor, local: tf.Tensor, total: tf.Tensor
    ) -> tf.Tensor:
        """Returns sum of a_j |g_j|^2, and the number of groups with rows."""
        local, total = (tf.cast(n, tf.float64) for n in (local, total))
        # A contribution is a_j g_j, and a_j is local / total.
        square = square * total / tf.maximum(local, 1.0)
        held = local > 0
        group = tf.cast(held, tf.float64) / self._same_rows
        found = tf.stack([tf.where(held, square, 0.0), group])
        return sum_over_replicas(found)


def _zeros(size: int, name: str) -> keras.Variable:
    return keras.Variable(
        np.zeros(size), trainable=False, dtype="float64", name=name
    )


def square_of(gradient: Any) -> tf.Tensor:
    """Returns the squared norm of a gradient, in float64."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = summed_rows(gradient).values
    return tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)))
