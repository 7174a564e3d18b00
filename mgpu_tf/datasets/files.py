"""Data that is read from files while training goes on.

dataset = records("gs://bucket/train-*.tfrecord", parse, batch_size=256)
trainer.fit(dataset, epochs=5)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.folders import check_file, check_path

# A dataset, or a function that a trainer calls with an `InputContext`.
Batches: TypeAlias = (
    tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset]
)

_COMPRESSIONS = ("", "GZIP", "ZLIB")

_log = logging.getLogger("mgpu_tf")


@checked
def records(
    pattern: str,
    parse: Callable[[tf.Tensor], Any],
    *,
    batch_size: int,
    shuffle_buffer: int = 0,
    seed: int = 0,
    compression: str = "",
    deterministic: bool = True,
) -> Batches:
    """Reads TFRecord files.

    Args:
        pattern: Files, such as `/data/train-*.tfrecord`; a remote path such
            as `gs://...` goes to TensorFlow's file systems.
        parse: From a record, a scalar string, to `x`, `(x, y)` or
            `(x, y, sample_weight)` of one example.
        batch_size: Global batch size.
        shuffle_buffer: Examples among which the next is drawn; 0 keeps the
            order of the files.
        seed: Decides the order.
        compression: "", "GZIP" or "ZLIB".
        deterministic: Whether all workers read all files, so that global
            batches are the same on any number of them. If not, and there is
            a file for each, workers read their own files only; batches then
            depend on how many workers there are.

    Returns:
        What `Trainer.fit` takes.

    Raises:
        ConfigurationError: No file matches.
    """
    if compression not in _COMPRESSIONS:
        raise ConfigurationError(
            unknown_name("compression", compression, map(repr, _COMPRESSIONS))
        )
    check_integer("batch_size", batch_size, 1)
    check_integer("shuffle_buffer", shuffle_buffer, 0)
    files = _matching(pattern)

    def pipeline(chosen: list[str], batch: int) -> tf.data.Dataset:
        data = tf.data.TFRecordDataset(
            chosen, compression, num_parallel_reads=None
        )
        if shuffle_buffer:
            data = data.shuffle(shuffle_buffer, seed=seed)
        data = data.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        return data.batch(batch)

    if deterministic:
        return pipeline(files, batch_size)
    return by_file(
        len(files),
        lambda first, step, batch: pipeline(files[first::step], batch),
        batch_size,
    )


def by_file(
    files: int,
    pipeline: Callable[[int, int, int], tf.data.Dataset],
    batch_size: int,
) -> Batches:
    """Returns data of which each worker reads its own files.

    Args:
        files: How many there are.
        pipeline: From the first file, the distance to the next one and the
            batch size to a dataset.
        batch_size: Global batch size.

    Returns:
        A function for `Trainer.fit`.
    """

    def shard(context: tf.distribute.InputContext) -> tf.data.Dataset:
        workers = context.num_input_pipelines
        replicas = context.num_replicas_in_sync
        if files < workers:
            raise ConfigurationError(
                "deterministic=False gives each worker its own files, of "
                f"which there must be as many. Received: {files} files for "
                f"{workers} workers. Write more files, or leave "
                "deterministic=True."
            )
        if batch_size % replicas:
            raise ConfigurationError(
                "deterministic=False splits batches evenly, so batch_size "
                "must be a multiple of the replicas. Received: batch_size="
                f"{batch_size} for {replicas} replicas."
            )
        if workers > 1:
            _log.info(
                "deterministic=False: each of %d workers reads its own of %d "
                "files; batches depend on the number of workers",
                workers,
                files,
            )
        return pipeline(
            context.input_pipeline_id, workers, batch_size // replicas
        )

    return shard


def _matching(pattern: str) -> list[str]:
    check_path("pattern", pattern)
    try:
        files = sorted(tf.io.gfile.glob(pattern))
    except (tf.errors.OpError, NotImplementedError) as error:
        raise ConfigurationError(
            "pattern must be of a file system that TensorFlow can read. "
            f"Received: pattern={pattern!r} ({str(error).splitlines()[0]})."
        ) from None
    if not files:
        raise ConfigurationError(
            "pattern must match one file or more. Received: "
            f"pattern={pattern!r}, which matches none."
        )
    for file in files:
        if "://" not in file:
            check_file("pattern", file)
    return files
