"""Whether all replicas hold the same bits.

    check = ReplicaCheck(variables, strategy)
    check(step=200)                    # raises DivergedError

Each replica adds up the bits of each variable as integers. A change of one
element changes the sum, however small it is. The sums of all replicas come
together in one reduction of a few bytes for each variable.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.cluster import heartbeat
from mgpu_tf.errors import DivergedError
from mgpu_tf.strategies.own_gradient import sum_over_replicas
from mgpu_tf.strategies.registry import topology_of

# Variables that a message names.
_NAMED = 5
_SIZES = (1, 2, 4, 8)


class ReplicaCheck:
    """Compares the copies of variables on all replicas.

    Args:
        variables: Those that are the same everywhere.
        strategy: A strategy whose replicas hold whole copies.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._variables = [
            variable
            for variable in variables
            if tf.as_dtype(variable.dtype).size in _SIZES
        ]
        self._strategy = strategy
        self._local = topology_of(strategy).local
        self._sums = tf.function(self._sums_of_all, autograph=False)

    def __call__(self, step: int) -> None:
        """Compares; every worker of a cluster has to call it.

        Args:
            step: The global step, for the message.

        Raises:
            DivergedError: A replica differs from most.
        """
        if self._local.total == 1 or not self._variables:
            return
        table = self._sums().numpy()
        heartbeat.checked(step, _digest(table[self._local.first]))
        differ = [
            (variable.path, odd)
            for variable, sums in zip(self._variables, table.T, strict=True)
            if (odd := _odd(sums.tolist()))
        ]
        if differ:
            raise DivergedError(self._message(differ, step))

    def _message(self, differ: list[tuple[str, list[int]]], step: int) -> str:
        count = self._local.count
        odd = sorted(
            {replica for _, replicas in differ for replica in replicas}
        )
        where = ", ".join(
            f"replica {replica} of worker {replica // count}" for replica in odd
        )
        paths = ", ".join(path for path, _ in differ[:_NAMED])
        more = len(differ) - _NAMED
        paths += f" and {more} more" if more > 0 else ""
        return (
            "All replicas must hold the same weights and optimizer state. "
            f"Received: others on {where} at step {step}, in {paths}. "
            "Go on from an earlier checkpoint; if it comes again on the same "
            "device, replace the device."
        )

    def _sums_of_all(self) -> tf.Tensor:
        """Returns the sums `[replicas, variables]`."""
        total = self._local.total

        def on_replica() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            mine = tf.stack([_bit_sum(v.value) for v in self._variables])
            row = tf.one_hot(
                replica.replica_id_in_sync_group, total, dtype=tf.int64
            )
            return sum_over_replicas(row[:, None] * mine[None, :])

        sums = self._strategy.run(on_replica)
        return self._strategy.experimental_local_results(sums)[0]


def _bit_sum(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of all elements, added up modulo 2**64."""
    value = tf.convert_to_tensor(value)
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    # Eight bytes at a time; what is left is filled up with zeros.
    flat = tf.reshape(value, [-1])
    at_once = 8 // value.dtype.size
    if missing := -flat.shape[0] % at_once:
        flat = tf.pad(flat, [[0, missing]])
    words = tf.reshape(flat, [-1, at_once] if at_once > 1 else [-1])
    return tf.reduce_sum(tf.bitcast(words, tf.int64))


def _digest(sums: np.ndarray) -> int:
    """Returns 64 bits that stand for the sums of all variables."""
    found = hashlib.blake2b(sums.tobytes(), digest_size=8)
    return int.from_bytes(found.digest(), "little")


def _odd(sums: Sequence[int]) -> list[int]:
    """Returns the places of what most do not have.

    Example:
        >>> _odd([7, 7, 8]), _odd([7, 7])
        ([2], [])

    Where two differ, nobody can say which is right: the later is named.
    """
    counted = collections.Counter(sums)
    most = max(counted.values())
    usual = next(value for value in sums if counted[value] == most)
    return np.flatnonzero(np.array(sums) != usual).tolist()
