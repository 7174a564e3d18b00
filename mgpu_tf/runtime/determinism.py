"""Runs that repeat bit for bit: deterministic kernels, thread counts.

    mgpu_tf.enable_determinism()         # at the top of a script
    strategy = mgpu_tf.create_strategy()

Kernels that add up in the order in which threads finish are not used. The order
of some sums depends on the numbers of threads, so these are fixed. A run with
checkpoints does this by itself, and saves the numbers in its checkpoints.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

_log = logging.getLogger("mgpu_tf")


def enable_determinism(
    intra_op_threads: int | None = None, inter_op_threads: int | None = None
) -> None:
    """Makes operations repeat bit for bit on the same hardware.

    Thread counts can be set only before TensorFlow runs its first operation.
    Later they do not change.

    Args:
        intra_op_threads: Number of threads for one operation. Default: the
            number that is set, or one thread for each CPU.
        inter_op_threads: Number of operations at the same time. Default: as
            for `intra_op_threads`.
    """
    tf.config.experimental.enable_op_determinism()
    threading = tf.config.threading
    try:
        threading.set_intra_op_parallelism_threads(
            intra_op_threads or threads()["intra_op"]
        )
        threading.set_inter_op_parallelism_threads(
            inter_op_threads or threads()["inter_op"]
        )
    except RuntimeError:  # TensorFlow has begun; it keeps what it has.
        if intra_op_threads or inter_op_threads:
            _log.warning(
                "thread counts must be set before TensorFlow runs its first "
                "op; they stay at %s",
                threads(),
            )


def is_enabled() -> bool:
    """Returns whether operations repeat bit for bit."""
    return bool(tf_config.is_op_determinism_enabled())


def seconds() -> tf.Tensor:
    """Returns the time in a graph; 0 if operations must repeat.

    TensorFlow's deterministic operations cannot read a clock.
    """
    return tf.zeros([], tf.float64) if is_enabled() else tf.timestamp()


def clock() -> tf.Tensor:
    """Returns the time in a graph, also if operations must repeat.

    Python reads it then, which costs some hundredths of a millisecond.
    """
    if not is_enabled():
        return tf.timestamp()
    now = tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64)
    now.set_shape([])
    return now


def threads() -> dict[str, int]:
    """Returns the numbers of threads that TensorFlow uses or will use."""
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    return {
        "intra_op": tf.config.threading.get_intra_op_parallelism_threads()
        or cpus,
        "inter_op": tf.config.threading.get_inter_op_parallelism_threads()
        or cpus,
    }


def environment() -> dict[str, str | int]:
    """Returns what the bits of a run depend on, apart from its settings."""
    return {"tensorflow": tf.__version__, **threads()}


def warn_of_other_environment(saved: Mapping[str, str | int]) -> None:
    """Logs the differences from the environment of a checkpoint."""
    here = environment()
    other = {k: v for k, v in saved.items() if here.get(k) != v}
    if other:
        _log.warning(
            "resumed where %s, saved where %s: weights may differ in the last "
            "bits from those of a run without a break",
            {k: here.get(k) for k in other},
            other,
        )
