"""Whether replicas that hold the same hold the same bits.

    check = ReplicaCheck(variables, strategy)
    check(step=200)                    # raises DivergedError

Each replica adds up the bits of each variable as integers. A change of one
element changes the sum, however small it is. The sums of all replicas come
together in one reduction of a few bytes for each variable.

Where replicas store parts of a variable, those with the same part are compared.
A whole copy that a replica keeps beside its part is compared with all others.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.cluster import heartbeat
from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError, DivergedError
from mgpu_tf.mesh import others_than
from mgpu_tf.runtime import determinism
from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

# Variables that a message names.
_NAMED = 5
_SIZES = (1, 2, 4, 8)


class _Copies(NamedTuple):
    """What some replicas hold alike.

    Attributes:
        path: Of the variable.
        read: Returns what this replica holds. On a replica.
        groups: The replicas that hold the same.
    """

    path: str
    read: Callable[[], tf.Tensor]
    groups: list[list[int]]


class ReplicaCheck:
    """Compares the copies of variables on all replicas.

    Args:
        variables: Those that are the same everywhere, or in parts.
        strategy: A strategy whose replicas hold copies.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._strategy = strategy
        self._local = topology_of(strategy).local
        self._copies = [
            copies
            for variable in variables
            if tf.as_dtype(variable.dtype).size in _SIZES
            for copies in self._copies_of(variable)
        ]
        self._sums = tf.function(self._sums_of_all, autograph=False)

    def __call__(self, step: int) -> None:
        """Compares; every worker of a cluster has to call it.

        Args:
            step: The global step, for the message.

        Raises:
            DivergedError: A replica differs from most.
        """
        if self._local.total == 1 or not self._copies:
            return
        table = self._sums().numpy()
        heartbeat.checked(step, _digest(table[self._local.first]))
        differ: dict[str, list[int]] = {}
        for copies, sums in zip(self._copies, table.T, strict=True):
            odd = [
                group[place]
                for group in copies.groups
                for place in _odd(sums[group].tolist())
            ]
            if odd:
                # Whole copies are made of the parts, which come first.
                differ.setdefault(copies.path, odd)
        if differ:
            raise DivergedError(self._message([*differ.items()], step))

    def _copies_of(self, variable: keras.Variable) -> Iterator[_Copies]:
        every = [list(range(self._local.total))]
        if not keras_internals.is_split(variable):
            yield _Copies(variable.path, lambda: variable.value, every)
            return
        held = keras_internals.stored(variable)
        groups = held.mesh.groups(others_than(held.split.axes))
        yield _Copies(variable.path, lambda: held.here().read_value(), groups)
        if held.keeps_whole:
            yield _Copies(variable.path, held.read_here, every)

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
            + remedy(self._strategy.extended.worker_devices)
        )

    def _sums_of_all(self) -> tf.Tensor:
        """Returns the sums `[replicas, copies]`."""
        total = self._local.total

        def on_replica() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            mine = tf.stack([_bit_sum(each.read()) for each in self._copies])
            row = tf.one_hot(
                replica.replica_id_in_sync_group, total, dtype=tf.int64
            )
            return sum_over_replicas(row[:, None] * mine[None, :])

        sums = self._strategy.run(on_replica)
        return self._strategy.experimental_local_results(sums)[0]


def remedy(devices: Sequence[str]) -> str:
    """Returns what to do where copies differ.

    Args:
        devices: Those of this process.
    """
    if any("GPU" in each for each in devices) and not determinism.is_enabled():
        return (
            "Kernels of GPUs add rows of an embedding in any order, so copies "
            "of its table differ by rounding: use --deterministic, or "
            "mgpu_tf.enable_determinism()."
        )
    return (
        "Go on from an earlier checkpoint; if it comes again on the same "
        "device, replace the device."
    )


def check_copies(strategy: tf.distribute.Strategy) -> None:
    """Refuses a strategy with one copy of each weight.

    Raises:
        ConfigurationError: No two devices store the same.
    """
    kind, mesh = kind_of(strategy), getattr(strategy, "mesh", None)
    copied = not kind.stored_once
    where = repr(kind.name)
    if mesh is not None and mesh.size > 1 and mesh.data == 1:
        copied = getattr(strategy, "shard", "weights") != "weights"
        where += f" with {mesh}"
    if not copied:
        raise ConfigurationError(
            "check_replicas_every compares copies of weights on several "
            f"devices. Received: {where}, which has one copy. Leave it out, or "
            "use data_parallel=2 or more, or 'mirrored'."
        )


def _bit_sum(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of all elements, added up modulo 2**64."""
    value = tf.convert_to_tensor(value)
    with tf.device(value.device):
        return _sum_of_words(value)


def _sum_of_words(value: tf.Tensor) -> tf.Tensor:
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
