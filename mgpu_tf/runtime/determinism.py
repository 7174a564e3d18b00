"""What makes a run repeat bit for bit: kernels, thread counts, seeds.

    mgpu_tf.enable_determinism()         # at the top of a script
    strategy = mgpu_tf.create_strategy()

Kernels that add up in the order in which threads finish are left out, and the
numbers of threads, on which the order of some sums depends, are fixed. A run
with checkpoints does this by itself and writes the numbers down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.python.framework import config as tf_config

_log = logging.getLogger("mgpu_tf")


def enable_determinism(
    intra_op_threads: int | None = None, inter_op_threads: int | None = None
) -> None:
    """Makes operations repeat bit for bit on the same hardware.

    Thread counts can be set before TensorFlow runs its first op only; later
    they stay as they are.

    Args:
        intra_op_threads: Threads for one operation; those that are set, or
            one for each CPU, by default.
        inter_op_threads: Operations at the same time; likewise.
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
    """Returns the time in a graph; 0 where operations must repeat.

    TensorFlow lets none of them look at a clock.
    """
    return tf.zeros([], tf.float64) if is_enabled() else tf.timestamp()


def threads() -> dict[str, int]:
    """Returns the numbers of threads, as they are or will be."""
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
    """Returns what the bits of a run depend on besides its own settings."""
    return {"tensorflow": tf.__version__, **threads()}


def warn_of_other_environment(saved: Mapping[str, str | int]) -> None:
    """Logs what differs from the environment of a checkpoint."""
    here = environment()
    other = {k: v for k, v in saved.items() if here.get(k) != v}
    if other:
        _log.warning(
            "resumed where %s, saved where %s: weights may differ in the last "
            "bits from those of a run without a break",
            {k: here.get(k) for k in other},
            other,
        )
