"""What strategies and tapes of TensorFlow's keep to themselves.

`test_collectives.py`, `test_own_gradient.py` and `test_mirrored.py` in
`tests/strategies` fail on a release that moves what is read here.
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


def this_replica(where_all_are_one: int | None = None) -> int:
    """Returns the number of this replica among all. On a replica.

    `replica_id_in_sync_group` is a new constant in the graph each time.

    Args:
        where_all_are_one: Returned where one trace is that of all replicas,
            as on a TPU. Default: that is an error.
    """
    context = tf.distribute.get_replica_context()
    number = context._replica_id_in_sync_group
    if isinstance(number, int):
        return number
    assert where_all_are_one is not None, "One trace is that of all replicas."
    return where_all_are_one


def have_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether a `tf.autodiff.ForwardAccumulator` follows some tensor.

    Args:
        tensors: Of this thread.
    """
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)
