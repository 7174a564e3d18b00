"""All variables of a run as arrays, and back, on any number of replicas.

Most variables are the same on every replica and are stored once. Of metrics
and of accumulated gradients each replica has its own value, and all of them
are stored, so that a run of as many replicas goes on bit for bit:

    sums     only their sum matters      on another number of replicas the
                                         first gets it, the others zero
    alike    they are the same           all get it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Variables:
    """The variables of a run by how replicas hold them.

    Attributes:
        shared: The same on every replica.
        own: Each replica has its own value.
        is_sum: Whether of the replicas' own values only the sum matters;
            otherwise they are alike.
        once_means: Those of which every replica's value was stored once,
            in checkpoints of an older layout.
    """

    shared: list[keras.Variable]
    own: list[keras.Variable] = dataclasses.field(default_factory=list)
    is_sum: Callable[[keras.Variable], bool] = lambda variable: True
    once_means: list[keras.Variable] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls,
        every: Iterable[keras.Variable],
        own: Iterable[keras.Variable] = (),
        is_sum: Callable[[keras.Variable], bool] = lambda variable: True,
        once_means: Iterable[keras.Variable] = (),
    ) -> Variables:
        """Sorts variables, each once, whatever lists it is in."""
        own_by_id = {id(v): v for v in own}
        shared = {id(v): v for v in every if id(v) not in own_by_id}
        return cls(
            list(shared.values()),
            list(own_by_id.values()),
            is_sum,
            [v for v in once_means if id(v) in shared],
        )


class Snapshot:
    """Takes and puts back the values of variables.

    Args:
        variables: What to take.
        strategy: Where they live.
        stored_once: Whether there is one copy of each for all replicas.
    """

    def __init__(
        self,
        variables: Variables,
        strategy: tf.distribute.Strategy,
        *,
        stored_once: bool,
    ) -> None:
        self._variables = variables
        self._strategy = strategy
        self._rows = 1 if stored_once else strategy.num_replicas_in_sync
        self._gather: Callable[[], list[tf.Tensor]] | None = None
        self._scatter: Callable[[Any], None] | None = None
        self._prepare: Callable[[], None] | None = None

    def before_taking(self, prepare: Callable[[], None]) -> Snapshot:
        """Has a function called before values are copied; returns itself."""
        self._prepare = prepare
        return self

    def take(self, *, keep: bool = True) -> Arrays:
        """Copies all values; every worker of a cluster has to call it.

        Args:
            keep: Whether this worker keeps them; without, it only takes
                part, and holds one variable at a time.

        Returns:
            Arrays by name. Those of which replicas have their own have a
            first axis for the replicas.
        """
        if self._prepare is not None:
            self._prepare()
        arrays: Arrays = {}
        for i, variable in enumerate(self.shared):
            value = keras.ops.convert_to_numpy(variable)
            if keep:
                arrays[_name("shared", i)] = np.array(value)
        own = dict(self._take_own())
        return arrays | own if keep else {}

    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes values; every worker of a cluster has to call it.

        Args:
            arrays: From `take`, on any number of replicas.

        Raises:
            ConfigurationError: They are of another model or optimizer.
        """
        arrays = self._of_this_layout(arrays)
        self._check(arrays)
        with self._strategy.scope():
            for i, variable in enumerate(self.shared):
                variable.assign(arrays[_name("shared", i)])
        self._put_own(arrays)

    def paths(self) -> dict[str, str]:
        """Returns the paths of the variables by their names here."""
        named = [
            *((_name("shared", i), v) for i, v in enumerate(self.shared)),
            *self._own(),
        ]
        return {name: variable.path for name, variable in named}

    @property
    def shared(self) -> list[keras.Variable]:
        """The variables that are the same on every replica."""
        return self._variables.shared

    def _own(
        self, arrays: Mapping[str, np.ndarray] | None = None
    ) -> list[tuple[str, keras.Variable]]:
        """Returns the variables of which replicas have their own values.

        Args:
            arrays: Has the names; by default they are those of a new one.
        """
        named = []
        for i, variable in enumerate(self._variables.own):
            kind = "sums" if self._variables.is_sum(variable) else "alike"
            if arrays is not None:
                kind = "alike" if _name("alike", i) in arrays else "sums"
            named.append((_name(kind, i), variable))
        return named

    def _take_own(self) -> list[tuple[str, np.ndarray]]:
        own = self._own()
        if self._rows == 1:
            return [
                (name, np.array(keras.ops.convert_to_numpy(v))[np.newaxis])
                for name, v in own
            ]
        if not own:
            return []
        if self._gather is None:
            self._gather = tf.function(self._gathered, autograph=False)
        return [
            (name, _from_bits(rows.numpy(), variable))
            for (name, variable), rows in zip(own, self._gather(), strict=True)
        ]

    def _gathered(self) -> list[tf.Tensor]:
        every = self._strategy.run(self._gather_on_replica)
        return [
            self._strategy.experimental_local_results(rows)[0] for rows in every
        ]

    def _gather_on_replica(self) -> list[tf.Tensor]:
        """Puts this replica's values, as bits, into its row among zeros."""
        context = tf.distribute.get_replica_context()
        row = tf.one_hot(
            context.replica_id_in_sync_group, self._rows, dtype=tf.int64
        )
        rows = [
            tf.tensordot(row, _to_bits(tf.convert_to_tensor(v.value)), axes=0)
            for _, v in self._own()
        ]
        flat = tf.concat([tf.reshape(r, [-1]) for r in rows], 0)
        flat = context.all_reduce("sum", flat)
        parts = tf.split(flat, [r.shape.num_elements() for r in rows])
        return [
            tf.reshape(part, r.shape)
            for part, r in zip(parts, rows, strict=True)
        ]

    def _put_own(self, arrays: Mapping[str, np.ndarray]) -> None:
        own = self._own(arrays)
        if not own:
            return
        spread = [self._spread(name, arrays[name]) for name, _ in own]
        if self._rows == 1:
            with self._strategy.scope():
                for (_, variable), rows in zip(own, spread, strict=True):
                    variable.assign(rows[0])
            return
        if self._scatter is None:
            self._scatter = tf.function(self._scattered, autograph=False)
        self._scatter([tf.convert_to_tensor(rows) for rows in spread])

    def _scattered(self, rows: list[tf.Tensor]) -> None:
        self._strategy.run(self._scatter_on_replica, args=(rows,))

    def _scatter_on_replica(self, rows: list[tf.Tensor]) -> None:
        context = tf.distribute.get_replica_context()
        for (_, variable), values in zip(self._own(), rows, strict=True):
            variable.assign(values[context.replica_id_in_sync_group])

    def _spread(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Fits the values of other replicas to those that there are."""
        if len(rows) == self._rows:
            return rows
        spread = np.zeros([self._rows, *rows.shape[1:]], rows.dtype)
        if name.startswith("sums"):
            spread[0] = rows.sum(axis=0, dtype=rows.dtype)
        else:
            spread[:] = rows[0]
        return spread

    def _of_this_layout(
        self, arrays: Mapping[str, np.ndarray]
    ) -> Mapping[str, np.ndarray]:
        """Returns arrays in which state that is alike is stored once.

        Older checkpoints have "means", of which every replica's was stored.
        """
        if not any(name.startswith("means/") for name in arrays):
            return arrays
        means = {id(v): i for i, v in enumerate(self._variables.once_means)}
        others = [v for v in self.shared if id(v) not in means]
        places = {id(v): _name("shared", i) for i, v in enumerate(others)}
        places |= {key: _name("means", i) for key, i in means.items()}
        found = {n: rows for n, rows in arrays.items() if n[:5] == "sums/"}
        for i, variable in enumerate(self.shared):
            array = arrays.get(places[id(variable)])
            if array is None:
                continue
            if id(variable) in means:
                array = _mean_row(array)
            found[_name("shared", i)] = array
        return found

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        own = [
            *((_name("shared", i), v, 0) for i, v in enumerate(self.shared)),
            *((name, v, 1) for name, v in self._own(arrays)),
        ]
        for name, variable, axes in own:
            array = arrays.get(name)
            wanted = (tuple(variable.shape), variable.dtype)
            found = None
            if array is not None:
                found = (tuple(array.shape[axes:]), array.dtype.name)
            if found != wanted:
                raise ConfigurationError(
                    "A run resumes with the model, optimizer and metrics of "
                    f"its checkpoint. Received: {variable.path} of shape and "
                    f"type {wanted}, where the checkpoint has {found}. Use "
                    "another checkpoint_dir, or the model of before."
                )
        if len(arrays) != len(own):
            raise ConfigurationError(
                "A run resumes with the model, optimizer and metrics of its "
                f"checkpoint. Received: {len(own)} variables, where the "
                f"checkpoint has {len(arrays)}. Use another checkpoint_dir, "
                "or the model of before."
            )


def _name(kind: str, index: int) -> str:
    return f"{kind}/{index:05d}"


def _mean_row(rows: np.ndarray) -> np.ndarray:
    if all(np.array_equal(row, rows[0]) for row in rows):
        return rows[0]
    return rows.mean(axis=0, dtype=rows.dtype)


def _to_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits as int64, of which a sum with zeros changes none."""
    if value.dtype.is_integer or value.dtype.is_bool:
        return tf.cast(value, tf.int64)
    integer = {2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    return tf.cast(tf.bitcast(value, integer), tf.int64)


def _from_bits(bits: np.ndarray, variable: keras.Variable) -> np.ndarray:
    dtype = tf.as_dtype(variable.dtype)
    if dtype.is_integer or dtype.is_bool:
        return bits.astype(dtype.as_numpy_dtype)
    integer = {2: np.int16, 4: np.int32, 8: np.int64}[dtype.size]
    return bits.astype(integer).view(dtype.as_numpy_dtype)
