"""Optimizers by name, LARS, LazyAdam, and what large batches need.

optimizer = mgpu_tf.optimizers.LARS(4.0, momentum=0.9, weight_decay=1e-4)
rate = mgpu_tf.optimizers.scale_learning_rate(0.1, 256, 8192)
"""

from __future__ import annotations

from mgpu_tf.optimizers.by_norms import ByNorms, Norms
from mgpu_tf.optimizers.large_batch import (
    LargeBatchRecipe,
    SmoothedCrossentropy,
    large_batch_recipe,
    scale_learning_rate,
)
from mgpu_tf.optimizers.lars import LARS
from mgpu_tf.optimizers.lazy_adam import LazyAdam
from mgpu_tf.optimizers.named import create_optimizer

__all__ = [
    "LARS",
    "ByNorms",
    "LargeBatchRecipe",
    "LazyAdam",
    "Norms",
    "SmoothedCrossentropy",
    "create_optimizer",
    "large_batch_recipe",
    "scale_learning_rate",
]
