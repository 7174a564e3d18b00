"""All variables of a run as pieces of arrays, and back, on any mesh.

    pieces = snapshot.pieces()           # what this process writes
    snapshot.put(stored)                 # reads what this process holds

Most variables are the same on every replica and are stored once; the processes
divide them evenly. A part of a split variable is stored by the processes that
hold it. Of metrics and of accumulated gradients each replica has its own
value, and all of them are stored, so that a run of as many replicas goes on
bit for bit:

    sums     only their sum matters      on another number of replicas the
                                         first gets it, the others zero
    alike    they are the same           all get it

No value is sent between processes, and none is copied as a whole: a piece is
read from the device in chunks, and a process reads from a checkpoint one
variable after another.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Piece, Region, shares
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas.topology import LocalReplicas
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

Layouts = Mapping[str, tuple[str, tuple[int, ...]]]

# What is copied from a device at once.
CHUNK_BYTES = 1 << 23
# Own values of replicas are sent to all processes up to so much together.
COPIED_BYTES = 1 << 20


class Stored(Protocol):
    """Variables that can be read by parts."""

    @property
    def arrays(self) -> Layouts:
        """Returns type and shape of each by its name."""

    def read(self, name: str, region: Region) -> np.ndarray:
        """Returns some elements of a variable, `[region.size]`."""


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
        order: Those that are the same on every replica on some layout, in the
            order of checkpoints of one where all are.
        sums: Those of them of which replicas have parts on other layouts,
            whose sum matters: sums of gradients.
    """

    shared: list[keras.Variable]
    own: list[keras.Variable] = dataclasses.field(default_factory=list)
    is_sum: Callable[[keras.Variable], bool] = lambda variable: True
    once_means: list[keras.Variable] = dataclasses.field(default_factory=list)
    order: list[keras.Variable] = dataclasses.field(default_factory=list)
    sums: list[keras.Variable] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls,
        every: Iterable[keras.Variable],
        own: Iterable[keras.Variable] = (),
        is_sum: Callable[[keras.Variable], bool] = lambda variable: True,
        once_means: Iterable[keras.Variable] = (),
        sums: Iterable[keras.Variable] = (),
    ) -> Variables:
        """Sorts variables, each once, whatever lists it is in."""
        own_by_id = {id(v): v for v in own}
        sums_by_id = {id(v): v for v in sums}
        apart = own_by_id.keys() - sums_by_id.keys()
        order = {id(v): v for v in every if id(v) not in apart}
        shared = {k: v for k, v in order.items() if k not in own_by_id}
        return cls(
            list(shared.values()),
            list(own_by_id.values()),
            is_sum,
            [v for v in once_means if id(v) in shared],
            list(order.values()),
            [v for k, v in sums_by_id.items() if k in order],
        )


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A part of a variable that some processes hold.

    Attributes:
        name: The name of the array in a checkpoint.
        dtype: Its type.
        shape: Its shape.
        region: Which elements of it these are.
        holders: The processes that hold them.
        held: A variable with these elements, if this process holds them.
        begin: Which element of that variable is the first of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    holders: tuple[int, ...]
    held: Any
    begin: int = 0

    @property
    def bytes(self) -> int:
        """Returns the bytes of its elements."""
        return int(self.region.size * tf.as_dtype(self.dtype).size)

    def piece(self, region: Region, begin: int) -> Piece:
        """Returns some of its elements.

        Args:
            region: Which elements of the array they are.
            begin: Which element of the unit is the first of them.
        """
        itemsize = tf.as_dtype(self.dtype).size
        first = self.begin + begin
        chunks = functools.partial(_chunks, self.held, first, region.size)
        return Piece(
            self.name, self.dtype, itemsize, self.shape, region, chunks
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which process holds what of the variables.

    Attributes:
        digest: The same for what is divided in the same way.
        like: For each process those that hold all that it holds, which is
            itself at least.
    """

    digest: str
    like: list[list[int]]


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
        self._stored_once = stored_once
        self._prepare: Callable[[], None] | None = None
        self._finish: Callable[[], None] | None = None

    def before_taking(self, prepare: Callable[[], None]) -> Snapshot:
        """Has a function called before values are copied; returns itself."""
        self._prepare = prepare
        return self

    def after_putting(self, finish: Callable[[], None]) -> Snapshot:
        """Has a function called after values were put; returns itself."""
        self._finish = finish
        return self

    def pieces(self) -> Iterator[Piece]:
        """Yields what this process writes of a checkpoint.

        Together the processes write each element once. Elements are read
        from the devices when a piece is asked for its chunks.
        """
        if self._prepare is not None:
            self._prepare()
        me = self._process
        alike: dict[tuple[int, ...], list[_Unit]] = {}
        for unit in self._units():
            alike.setdefault(unit.holders, []).append(unit)
        for holders, units in alike.items():
            if me not in holders:
                continue
            regions = [
                (unit.region, tf.as_dtype(unit.dtype).size) for unit in units
            ]
            mine = shares(regions, len(holders))[holders.index(me)]
            for number, begin, region in mine:
                yield units[number].piece(region, begin)

    def everything(
        self, exchange: Callable[[bytes], list[bytes]]
    ) -> Iterator[Piece]:
        """Returns all that this process holds, for a folder of its own.

        With it come the own values of all replicas, if they are small.

        Args:
            exchange: Sends bytes to all processes, and returns those of all.
                It is called before the first piece is asked for.
        """
        if self._prepare is not None:
            self._prepare()
        me, own = self._process, list(self._units_of_own())
        copies: list[Piece] = []
        if self._copies_own(own):
            mine = [
                chunk
                for unit in own
                if me in unit.holders
                for chunk in unit.piece(unit.region, 0).chunks()
            ]
            copies = _copied(own, exchange(b"".join(mine)))
            own = []
        units = itertools.chain(self._units_of_shared(), own)
        here = (u.piece(u.region, 0) for u in units if me in u.holders)
        return itertools.chain(here, copies)

    def layout(self) -> Layout:
        """Returns which process holds what; alike on all processes."""
        digest = hashlib.sha256()
        everyone = tuple(range(self._local.num_processes))
        own = list(self._units_of_own())
        copied = self._copies_own(own)
        own_names = {unit.name for unit in own}
        groups = set()
        for unit in self._units():
            is_copied = copied and unit.name in own_names
            holders = everyone if is_copied else unit.holders
            groups.add(holders)
            known = (unit.name, unit.dtype, unit.shape, unit.region, holders)
            digest.update(repr(known).encode())
        return Layout(
            digest.hexdigest(),
            [
                [
                    other
                    for other in everyone
                    if all(other in g for g in groups if process in g)
                ]
                for process in everyone
            ],
        )

    def held(self) -> Held:
        """Returns a copy in memory of all that this process holds."""
        if self._prepare is not None:
            self._prepare()
        return Held(
            unit.piece(unit.region, 0)
            for unit in self._units()
            if self._process in unit.holders
        )

    def put(self, stored: Stored) -> None:
        """Reads and writes what this process holds.

        Args:
            stored: From `pieces` of all processes, on any mesh, or `held`.

        Raises:
            ConfigurationError: They are of another model or optimizer.
        """
        stored = self._with_sums_of_here(self._of_this_layout(stored))
        self._check(stored.arrays)
        with self._strategy.scope():
            for i, variable in enumerate(self.shared):
                self._put_shared(variable, stored, _name("shared", i))
            for name, variable in self._own(stored.arrays):
                self._put_own(variable, stored, name)
            if self._finish is not None:
                self._finish()

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

    @functools.cached_property
    def _local(self) -> LocalReplicas:
        if self._stored_once:
            return LocalReplicas(0, 1, 1)
        return topology_of(self._strategy).local

    @property
    def _rows(self) -> int:
        """How many own values there are; replicas with the same rows share."""
        return self._local.ranges

    @property
    def _process(self) -> int:
        return self._local.process

    def _own(
        self, arrays: Layouts | None = None
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

    def _units(self) -> Iterator[_Unit]:
        """Yields all parts of all variables, alike on all processes."""
        yield from self._units_of_shared()
        yield from self._units_of_own()

    def _units_of_shared(self) -> Iterator[_Unit]:
        for i, variable in enumerate(self.shared):
            yield from self._shared_units(_name("shared", i), variable)

    def _units_of_own(self) -> Iterator[_Unit]:
        for name, variable in self._own():
            yield from self._own_units(name, variable)

    def _copies_own(self, units: Sequence[_Unit]) -> bool:
        """Returns whether own values of replicas are copied to all."""
        if self._local.num_processes == 1:
            return False
        return sum(unit.bytes for unit in units) <= COPIED_BYTES

    def _shared_units(
        self, name: str, variable: keras.Variable
    ) -> Iterator[_Unit]:
        held, shape = keras_internals.stored(variable), tuple(variable.shape)
        if not isinstance(held, ShardedVariable):
            everyone = tuple(range(self._local.num_processes))
            begin = 0
            for part in self._copies(variable)[0]:
                size = part.shape.num_elements()
                region = Region(begin, size)
                begin += size
                yield _Unit(name, variable.dtype, shape, region, everyone, part)
            return
        mesh, split = held.mesh, held.split
        for rank, again in itertools.product(
            range(split.parts), range(split.again)
        ):
            replicas = [
                r
                for r in range(mesh.replicas)
                if mesh.rank(split.over, r) == rank
                and (split.again == 1 or mesh.rank("fsdp", r) == again)
            ]
            holders = {r // self._local.count for r in replicas}
            mine = [r for r in replicas if self._is_here(r)]
            part = held.values[mine[0] - self._local.first] if mine else None
            begin = 0
            for region in split.regions(rank, again):
                yield _Unit(
                    name,
                    variable.dtype,
                    shape,
                    region,
                    tuple(sorted(holders)),
                    part,
                    begin,
                )
                begin += region.size

    def _own_units(
        self, name: str, variable: keras.Variable
    ) -> Iterator[_Unit]:
        size = math.prod(variable.shape)
        for row in range(self._rows):
            replica, held = row * self._local.same_rows, None
            if self._is_here(replica):
                place = replica - self._local.first
                (held,) = self._copies(variable)[place]
            yield _Unit(
                name,
                variable.dtype,
                (self._rows, *variable.shape),
                Region(row * size, size),
                (replica // self._local.count,),
                held,
            )

    def _is_here(self, replica: int) -> bool:
        return 0 <= replica - self._local.first < self._local.count

    def _copies(self, variable: keras.Variable) -> list[list[Any]]:
        """Returns the copies of a variable here, each in parts by rows."""
        held = keras_internals.stored(variable)
        copies = self._strategy.experimental_local_results(held)
        # A table on parameter servers has parts.
        return [list(getattr(copy, "variables", [copy])) for copy in copies]

    def _put_shared(
        self, variable: keras.Variable, stored: Stored, name: str
    ) -> None:
        held = keras_internals.stored(variable)
        if isinstance(held, ShardedVariable):
            for place, part in enumerate(held.values):
                replica = self._local.first + place
                mesh, split = held.mesh, held.split
                regions = split.regions(
                    mesh.rank(split.over, replica), mesh.rank("fsdp", replica)
                )
                read = [stored.read(name, region) for region in regions]
                _assign(part, np.concatenate(read))
            held.put_by_parts()
            return
        size = math.prod(variable.shape)
        self._assign(variable, stored.read(name, Region(0, size)))

    def _assign(self, variable: keras.Variable, value: np.ndarray) -> None:
        """Writes a value to all copies that this process has."""
        if self._stored_once:
            variable.assign(value.reshape(variable.shape))
            return
        for (copy,) in self._copies(variable):
            _assign(copy, value)

    def _put_own(
        self, variable: keras.Variable, stored: Stored, name: str
    ) -> None:
        for place in range(self._local.count):
            row = (self._local.first + place) // self._local.same_rows
            value = self._row(variable, stored, name, row)
            if self._stored_once:
                self._assign(variable, value)
            else:
                _assign(self._copies(variable)[place][0], value)

    def _row(
        self, variable: keras.Variable, stored: Stored, name: str, place: int
    ) -> np.ndarray:
        """Returns the value of one place, from those of any number."""
        size = math.prod(variable.shape)
        dtype, (rows, *_) = stored.arrays[name]

        def row(number: int) -> np.ndarray:
            return stored.read(name, Region(number * size, size))

        if rows == self._rows:
            return row(place)
        if not name.startswith("sums"):
            return row(0)
        if place:
            return np.zeros(size, tf.as_dtype(dtype).as_numpy_dtype)
        total = np.array(row(0))
        for number in range(1, rows):
            total += row(number)
        return total

    def _of_this_layout(self, stored: Stored) -> Stored:
        """Returns variables of which state that is alike is stored once.

        Older checkpoints have "means", of which every replica's was stored.
        """
        if not any(name.startswith("means/") for name in stored.arrays):
            return stored
        means = {id(v): i for i, v in enumerate(self._variables.once_means)}
        others = [v for v in self.shared if id(v) not in means]
        places = {id(v): _name("shared", i) for i, v in enumerate(others)}
        places |= {key: _name("means", i) for key, i in means.items()}
        names = {n: n for n in stored.arrays if n[:5] == "sums/"}
        for i, variable in enumerate(self.shared):
            if places[id(variable)] in stored.arrays:
                names[_name("shared", i)] = places[id(variable)]
        return _Older(stored, names)

    def _with_sums_of_here(self, stored: Stored) -> Stored:
        """Returns variables with sums of gradients as this layout has them.

        On some layouts each replica has sums of its own gradients, and on
        others there are the sums of all replicas.
        """
        order, sums = self._variables.order, self._variables.sums
        keys, own = set(map(id, sums)), self._variables.own
        apart = [v for v in order if id(v) not in keys]
        rest = [v for v in own if id(v) not in keys]
        here = set(map(id, own)) >= keys
        count = sum(name.startswith("shared/") for name in stored.arrays)
        if not sums or count != len(order if here else apart):
            return stored
        # The places of sums among those of one layout and of the other.
        places = {id(v): _name("shared", i) for i, v in enumerate(order)}
        owned = {id(v): _name("sums", i) for i, v in enumerate(sums, len(rest))}
        names = {n: n for n in stored.arrays if not n.startswith("shared/")}
        for i, variable in enumerate(apart):
            one, other = places[id(variable)], _name("shared", i)
            names |= {other: one} if here else {one: other}
        for variable in sums:
            one, other = places[id(variable)], owned[id(variable)]
            names.pop(other, None)
            names |= {other: one} if here else {one: other}
        return _Elsewhere(stored, names)

    def _check(self, arrays: Layouts) -> None:
        own = [
            *((_name("shared", i), v, 0) for i, v in enumerate(self.shared)),
            *((name, v, 1) for name, v in self._own(arrays)),
        ]
        for name, variable, axes in own:
            wanted = (tuple(variable.shape), variable.dtype)
            found = None
            if name in arrays:
                dtype, shape = arrays[name]
                found = (tuple(shape[axes:]), dtype)
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


class Held:
    """Variables in memory.

    Args:
        pieces: What they are made of.

    Attributes:
        arrays: Type and shape of each by its name.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[tuple[Region, np.ndarray]]] = {}
        self.arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        for piece in pieces:
            dtype = tf.as_dtype(piece.dtype).as_numpy_dtype
            data = bytearray().join(piece.chunks())
            elements = _swapped(np.frombuffer(data, dtype))
            self.arrays[piece.name] = (piece.dtype, piece.shape)
            known = self._pieces.setdefault(piece.name, [])
            known.append((piece.region, elements))

    def read(self, name: str, region: Region) -> np.ndarray:
        """Returns some elements of a variable, `[region.size]`."""
        dtype, _ = self.arrays[name]
        found = np.empty(region.size, tf.as_dtype(dtype).as_numpy_dtype)
        for held, elements in self._pieces[name]:
            for here, there, length in region.overlaps(held):
                found[here : here + length] = elements[there : there + length]
        return found


class _Older:
    """Variables of a checkpoint by the names that they have today.

    Args:
        stored: The checkpoint.
        names: Its names by those of today.
    """

    def __init__(self, stored: Stored, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, older in names.items():
            dtype, shape = stored.arrays[older]
            of_rows = older.startswith("means/")
            self.arrays[name] = (dtype, shape[1:] if of_rows else shape)

    def read(self, name: str, region: Region) -> np.ndarray:
        """Returns some elements of a variable, `[region.size]`."""
        older = self._names[name]
        if not older.startswith("means/"):
            return self._stored.read(older, region)
        _, shape = self._stored.arrays[older]
        every = self._stored.read(older, Region(0, math.prod(shape)))
        mean = _mean_row(every.reshape(shape)).reshape(-1)
        whole = Region(0, mean.size)
        found = np.empty(region.size, mean.dtype)
        for here, there, length in region.overlaps(whole):
            found[here : here + length] = mean[there : there + length]
        return found


class _Elsewhere:
    """Variables of a checkpoint of a layout that has sums otherwise.

    Args:
        stored: The checkpoint.
        names: Its names by those of this layout. Where one is of replicas'
            own sums and the other is not, the sums of all replicas are as
            those of one replica.
    """

    def __init__(self, stored: Stored, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, other in names.items():
            dtype, shape = stored.arrays[other]
            if self._adds_up(name):
                shape = shape[1:]
            elif self._is_of_one(name):
                shape = (1, *shape)
            self.arrays[name] = (dtype, shape)

    def _adds_up(self, name: str) -> bool:
        other = self._names[name]
        return other.startswith("sums/") and not name.startswith("sums/")

    def _is_of_one(self, name: str) -> bool:
        other = self._names[name]
        return name.startswith("sums/") and not other.startswith("sums/")

    def read(self, name: str, region: Region) -> np.ndarray:
        """Returns some elements of a variable, `[region.size]`."""
        other = self._names[name]
        if not self._adds_up(name):
            return self._stored.read(other, region)
        _, (rows, *shape) = self._stored.arrays[other]
        size = math.prod(shape)
        parts = [
            self._stored.read(
                other,
                dataclasses.replace(region, first=row * size + region.first),
            )
            for row in range(rows)
        ]
        total = np.array(parts[0])
        for part in parts[1:]:
            total += part
        return total


def _copied(units: Sequence[_Unit], received: Sequence[bytes]) -> list[Piece]:
    """Returns units that processes have sent.

    Args:
        units: Each is held by one process.
        received: From each process the bytes of its units, in their order.
    """
    ends = [0] * len(received)
    pieces = []
    for unit in units:
        (process,) = unit.holders
        begin, ends[process] = ends[process], ends[process] + unit.bytes
        data = received[process][begin : ends[process]]
        piece = unit.piece(unit.region, 0)
        pieces.append(
            dataclasses.replace(piece, chunks=functools.partial(list, [data]))
        )
    return pieces


def _chunks(held: Any, begin: int, size: int) -> Iterator[Any]:
    """Yields the bytes of some elements of a variable."""
    step = CHUNK_BYTES // held.dtype.size
    with tf.device(held.device):
        flat = tf.reshape(held.read_value(), [-1])
    if size and _is_on_host(held):
        with tf.device(held.device):
            data = memoryview(tf.bitcast(flat, tf.uint8)).cast("B")
        itemsize = held.dtype.size
        for first in range(begin, begin + size, step):
            last = min(first + step, begin + size)
            yield data[first * itemsize : last * itemsize]
        return
    for first in range(begin, begin + size, step):
        last = min(first + step, begin + size)
        with tf.device(held.device):
            chunk = flat[first:last]
        yield _swapped(chunk.numpy()).view(np.uint8).data


def _is_on_host(held: tf.Variable) -> bool:
    """Whether this process can read the bytes of a variable in place."""
    spec = tf.DeviceSpec.from_string(held.device)
    return (
        spec.device_type == "CPU"
        and spec.job != "ps"
        and not held.dtype.is_bool
        and sys.byteorder == "little"
    )


def _assign(held: tf.Variable, value: np.ndarray) -> None:
    with tf.device(held.device):
        held.assign(tf.constant(value.reshape(held.shape)))


def _swapped(array: np.ndarray) -> np.ndarray:
    """Returns an array with its bytes as in a checkpoint, or back."""
    return array.byteswap() if sys.byteorder == "big" else array


def _name(kind: str, index: int) -> str:
    return f"{kind}/{index:05d}"


def _mean_row(rows: np.ndarray) -> np.ndarray:
    if all(np.array_equal(row, rows[0]) for row in rows):
        return rows[0]
    return rows.mean(axis=0, dtype=rows.dtype)
