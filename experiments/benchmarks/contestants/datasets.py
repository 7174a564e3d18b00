"""The pipelines of the contestants on TensorFlow.

Made-up examples come as ready batches, repeated. The package's sets come
through a pipeline written by hand here, and as the package reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from experiments.benchmarks.jobs import Job
from mgpu_tf.datasets import Splits, Streams, indexed_records, load

_SHUFFLE_BUFFER = 10_000


def of_worker(job: Job, index: int, workers: int) -> tf.data.Dataset:
    """Returns a worker's part of each global batch, for ever.

    Of a set, every worker reads all of it: written by hand for one.
    """
    if job.dataset is not None:
        return by_hand(job).repeat()
    return _repeated(*job.part(index, workers))


def for_fit(job: Job, workers: int) -> dict[str, Any]:
    """Returns the arguments of `Trainer.fit` for the global batches."""
    if job.dataset is not None:
        return load(job.dataset).training(job.batch(workers))
    return {"x": of_all(job, workers)}


def of_all(job: Job, workers: int) -> tf.data.Dataset:
    """Returns the global batches, for ever."""
    x, y = job.data(workers)
    batches = len(x) // job.batch(workers)
    return _repeated(np.split(x, batches), np.split(y, batches))


def by_hand(job: Job) -> tf.data.Dataset:
    """Returns one shuffled pass over a set, as tf.data's guide writes it.

    The package has prepared the files, and no more.
    """
    found = load(job.dataset)
    if isinstance(found, Splits):
        data = tf.data.Dataset.from_tensor_slices(found.train)
        data = data.shuffle(job.examples, seed=0)
    else:
        data = _decoded(found).shuffle(_SHUFFLE_BUFFER, seed=0)
    return data.batch(job.batch(1)).prefetch(tf.data.AUTOTUNE)


def by_number(job: Job) -> dict[str, Any]:
    """Returns the arguments of `Trainer.fit` for the same files by number."""
    found = load(job.dataset)
    pattern = f"{_files(found)[0].rpartition('-of-')[0][:-5]}*-of-*"
    data = indexed_records(pattern, _decode_of(found))
    return {"x": data, "batch_size": job.batch(1)}


def _decoded(found: Streams) -> tf.data.Dataset:
    records = tf.data.TFRecordDataset(_files(found))
    return records.map(_decode_of(found), num_parallel_calls=tf.data.AUTOTUNE)


def _files(found: Streams) -> list[str]:
    return [str(f) for f in found.builder.info.splits["train"].filepaths]


def _decode_of(found: Streams) -> Callable[[tf.Tensor], Any]:
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, features)
        image = tf.io.decode_jpeg(example["image"], channels=3)
        image = tf.ensure_shape(image, found.input_shape)
        scaled = tf.cast(image, tf.float32) / found.scale
        return scaled, tf.cast(example["label"], tf.int32)

    return decode


def _repeated(x: list[np.ndarray], y: list[np.ndarray]) -> tf.data.Dataset:
    batches = tf.data.Dataset.from_tensor_slices((np.stack(x), np.stack(y)))
    return batches.repeat().prefetch(2)
