"""The pipeline of every contestant on TensorFlow: ready batches, repeated."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from experiments.benchmarks.jobs import Job


def of_worker(job: Job, index: int, workers: int) -> tf.data.Dataset:
    """Returns a worker's part of each global batch, for ever."""
    return _repeated(*job.part(index, workers))


def of_all(job: Job, workers: int) -> tf.data.Dataset:
    """Returns the global batches, for ever."""
    x, y = job.data(workers)
    batches = len(x) // job.batch(workers)
    return _repeated(np.split(x, batches), np.split(y, batches))


def _repeated(x: list[np.ndarray], y: list[np.ndarray]) -> tf.data.Dataset:
    batches = tf.data.Dataset.from_tensor_slices((np.stack(x), np.stack(y)))
    return batches.repeat().prefetch(2)
