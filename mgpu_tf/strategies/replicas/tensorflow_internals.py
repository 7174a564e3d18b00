"""What strategies and tapes of TensorFlow's keep to themselves.

`test_collectives.py` and `test_own_gradient.py` in `tests/strategies` fail on a
release that moves what is read here.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops
from tensorflow.python.eager import forwardprop_util


def ordering_tokens(strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns what orders a strategy's own exchanges, one for each device.

    Operations that take the token of a device run in the order in which they
    were traced.

    Args:
        strategy: A `MirroredStrategy`, or one of several workers.
    """
    extended = strategy.extended
    for exchange in (
        extended._cross_device_ops,
        # Between GPUs of one process, where `cross_device_ops` was given.
        getattr(extended, "_collective_ops", None),
    ):
        if isinstance(exchange, cross_device_ops.CollectiveAllReduce):
            return [each._ordering_token for each in exchange._launchers]
    raise AssertionError(f"{strategy!r} has no collective operations.")


def have_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether a `tf.autodiff.ForwardAccumulator` follows some tensor.

    Args:
        tensors: Of this thread.
    """
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)
