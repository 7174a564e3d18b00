"""A `tf.data.Dataset` that is cut into rows before its maps do their work.

    found = early_cut_of(files.shuffle(1000, seed=1).map(decode).batch(64))
    found.elements        what is read whole: the shuffled files
    found.rows(local)     the rows of one process, decoded and batched
    found.reason          why a dataset cannot be cut; "" if it can

A map whose result depends on its element alone may be moved: behind a shuffle,
a repeat, a take, a skip or a shard, and behind the choice of rows. So a worker
reads the elements before the maps, which are cheap as file names are, and maps
its own rows alone. Global batches stay what they are.

This module holds every private name of tf.data that is used, except for those
of a serialized graph (`data.graph`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message

from mgpu_tf.data import structures
from mgpu_tf.data.tf_data.graph import Graph
from mgpu_tf.data.tf_data.order import drawn_by, serialized
from mgpu_tf.strategies.replicas.topology import LocalReplicas

# Classes of tf.data, and how their operations begin.
_MAPS = {
    "_MapDataset": "MapDataset",
    "_ParallelMapDataset": "ParallelMapDataset",
}
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
_UNCHANGED = {
    "_PrefetchDataset": "PrefetchDataset",
    "_OptionsDataset": "OptionsDataset",
    "_AssertCardinalityDataset": "AssertCardinalityDataset",
}
_COUNTED = {
    "_RepeatDataset": "RepeatDataset",
    "_TakeDataset": "TakeDataset",
    "_SkipDataset": "SkipDataset",
}
_MOVED = (
    _UNCHANGED
    | _COUNTED
    | {"_ShuffleDataset": "ShuffleDataset", "_ShardDataset": "ShardDataset"}
)

# Operations with state whose result depends on their inputs alone, or that
# call functions, which are looked at as well.
_PURE = {
    "Assert",
    "Case",
    "If",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "PrintV2",
    "ReadVariableOp",
    "StatefulPartitionedCall",
    "While",
}

# Operations that compute each number of a batch from itself and scalars.
_OF_ROWS = {
    "Abs",
    "AddV2",
    "Cast",
    "Exp",
    "Identity",
    "Log",
    "Maximum",
    "Minimum",
    "Mul",
    "Neg",
    "RealDiv",
    "Rsqrt",
    "Sigmoid",
    "Sqrt",
    "Square",
    "Sub",
    "Tanh",
}

# The most bytes of text that all workers together get of a dataset.
_TEXT_BYTES = 64_000_000

Flat = tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class _Map:
    """A function of the flat tensors of an element or of a batch."""

    function: Any
    parallel: Any

    def over(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Maps the first part of elements `(tensors, size)`."""
        return dataset.map(
            lambda flat, size: (tuple(self.function(*flat)), size),
            num_parallel_calls=self.parallel,
            deterministic=None if self.parallel is None else True,
        )


@dataclasses.dataclass(frozen=True)
class EarlyCut:
    """A dataset in parts: elements, maps, a batch, and what follows it.

    Attributes:
        batch_size: Elements of a batch.
        drop_remainder: Whether a smaller last batch is left out.
        counts: The names and counts of what repeats or counts batches.
        reason: Always empty.
    """

    batch_size: int
    drop_remainder: bool
    counts: tuple[tuple[str, int], ...]
    _maps: tuple[_Map, ...]
    _batch_maps: tuple[_Map, ...]
    _parallel: Any
    _dataset: tf.data.Dataset
    _chain: tuple[Any, ...]
    reason: str = ""

    @functools.cached_property
    def elements(self) -> tf.data.Dataset | None:
        """Returns what is read whole, before the maps.

        None if TensorFlow cannot make it, such as of more than 2 GB in memory.
        """
        try:
            return _elements(self._chain)
        except (AttributeError, tf.errors.OpError, message.DecodeError):
            return None

    def rows(self, local: LocalReplicas, start: int = 0) -> tf.data.Dataset:
        """Returns the rows of the replicas of a process.

        Args:
            local: The replicas.
            start: The global batch to begin at. Those before it are not
                mapped, unless batches are counted (`counts`).

        Returns:
            Elements `(data, local, total)`, as of every source.
        """
        rows = _Rows(local, self.batch_size)

        def element(
            flat: Flat, size: tf.Tensor, replica: Any
        ) -> tuple[Any, tf.Tensor, tf.Tensor]:
            low, high = local.rows_of(size, replica)
            first, count = rows.of(size)
            begin, end = structures.or_another(low - first, high - first, count)
            held = tuple(leaf[begin:end] for leaf in flat)
            return self._packed(held), high - low, size

        def every(flat: Flat, size: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.range(local.count).map(
                lambda replica: element(flat, size, replica)
            )

        batches = self._batches(rows, start)
        if local.count == 1:
            batches = batches.map(lambda flat, size: element(flat, size, 0))
        else:
            batches = batches.flat_map(every)
        return batches.with_options(self._dataset.options())

    def batches(self, start: int) -> tf.data.Dataset:
        """Returns whole batches; those before `start` are not mapped."""
        return self._whole(start)

    def shares(self, count: int) -> list[tf.data.Dataset] | None:
        """Splits the batches for workers that read independently.

        Args:
            count: Number of workers.

        Returns:
            For worker w the batches w, w + count, w + 2 * count ...; None
            where each would have to be sent a large dataset.
        """
        if self.counts or count == 1 or self.elements is None:
            return None
        text = serialized(self._read_whole()).numpy()
        if len(text) * count > _TEXT_BYTES:
            return None
        return [self._whole(0, (count, place)) for place in range(count)]

    def read(self, passes: int) -> None:
        """Reads passes over the elements, and maps none of them."""
        for _ in range(passes):
            self._read_whole().reduce(np.int64(0), lambda read, _: read + 1)

    def _read_whole(self) -> tf.data.Dataset:
        assert self.elements is not None
        return self.elements

    def _whole(
        self, start: int, share: tuple[int, int] = (1, 0)
    ) -> tf.data.Dataset:
        rows = _Rows(LocalReplicas(0, 1, 1), self.batch_size)
        batches = self._batches(rows, start, share)
        return batches.map(lambda flat, size: self._packed(flat)).with_options(
            self._dataset.options()
        )

    def _batches(
        self, rows: _Rows, start: int, share: tuple[int, int] = (1, 0)
    ) -> tf.data.Dataset:
        """Returns `(rows of a batch, flat; size of the global batch)`."""
        elements = self._read_whole()
        if start and not self.counts:
            elements = elements.skip(start * self.batch_size)
        windows = elements.window(
            self.batch_size, drop_remainder=self.drop_remainder
        ).shard(*share)
        chosen = windows.flat_map(
            structures.whole(windows.element_spec, rows.chosen)
        ).map(lambda data, size: (tuple(tf.nest.flatten(data)), size))
        for one in self._maps:
            chosen = one.over(chosen)
        batches = chosen.batch(rows.most, num_parallel_calls=self._parallel)
        batches = batches.map(lambda flat, sizes: (flat, sizes[0]))
        for one in self._batch_maps:
            batches = one.over(batches)
        for name, count in self.counts:
            batches = getattr(batches, name)(count)
        return batches.skip(start) if start and self.counts else batches

    def _packed(self, flat: Flat) -> Any:
        return tf.nest.pack_sequence_as(self._dataset.element_spec, flat)


class _Rows:
    """Which elements of a global batch a process maps.

    All full batches have the same number of rows, `most`. Where a smaller
    batch would give a process more rows than a full one, or none at all, a
    process maps a row of a neighbour too, and drops it.

    Args:
        local: The replicas of the process.
        batch_size: Rows of a full batch.
    """

    def __init__(self, local: LocalReplicas, batch_size: int) -> None:
        self._local, self._batch_size = local, batch_size
        low, high = self._own(np.arange(1, batch_size + 1))
        self.most = max(1, int(np.max(high - low)))

    def of(self, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the first row of a batch, and how many follow from it."""
        low, high = self._own(size)
        few = tf.maximum(high - low, 1)
        most = tf.constant(self.most, tf.int64)
        count = tf.where(size == self._batch_size, most, few)
        return tf.maximum(tf.minimum(low, size - count), 0), count

    def chosen(self, window: Any) -> tf.data.Dataset:
        """Returns rows of a batch, each with the size of the batch."""
        elements = tf.data.Dataset.zip(window)
        size = elements.cardinality()
        first, count = self.of(size)
        sizes = tf.data.Dataset.from_tensors(size).repeat()
        return tf.data.Dataset.zip((elements.skip(first).take(count), sizes))

    def _own(self, size: Any) -> tuple[Any, Any]:
        low, _ = self._local.rows_of(size, 0)
        _, high = self._local.rows_of(size, self._local.count - 1)
        return low, high


@dataclasses.dataclass(frozen=True)
class Uncut:
    """A dataset that cannot be cut before its work.

    Attributes:
        reason: Why, as a clause.
    """

    reason: str


def early_cut_of(dataset: tf.data.Dataset) -> EarlyCut | Uncut:
    """Finds the parts of a dataset of global batches.

    Args:
        dataset: Any dataset of batches.

    Returns:
        The parts; or why the dataset must be read as it is.
    """
    try:
        return _found(dataset)
    except (AttributeError, NotImplementedError, TypeError) as error:
        return Uncut(f"TensorFlow does not show its parts ({error})")


def batches_at_end(dataset: tf.data.Dataset) -> bool:
    """Returns whether batches are made in one place, or that is not known.

    What is a zip of batches, or comes from Python, may have arrays of other
    numbers of rows.
    """
    try:
        while _kind(dataset) in {*_MAPS, *_MOVED, *_COUNTED}:
            dataset = _part(dataset, "_input_dataset")
        return "Batch" in _kind(dataset)
    except AttributeError:
        return True


def _found(dataset: tf.data.Dataset) -> EarlyCut | Uncut:
    if not _dense(dataset):
        return Uncut("its batches are not all dense tensors")
    batch_maps: list[_Map] = []
    counts: list[tuple[str, int]] = []
    batch: Any = dataset
    while _kind(batch) not in _BATCHES:
        kind = _kind(batch)
        if kind in _COUNTED:
            name = kind.strip("_").removesuffix("Dataset").lower()
            counts.insert(0, (name, int(_part(batch, "_count"))))
        elif kind in _MAPS:
            if not _ordered(batch) or not _of_rows(batch):
                return Uncut(
                    "a map after batch may mix the rows of a batch; put it "
                    "before batch if it does not"
                )
            batch_maps.insert(0, _map(batch))
        elif kind not in _UNCHANGED:
            return Uncut(f"{_name(kind)} comes after batch, or in its place")
        batch = _part(batch, "_input_dataset")
    if not _ordered(batch):
        return Uncut("batch has deterministic=False")
    drop_remainder = bool(_part(batch, "_drop_remainder"))
    if drop_remainder and batch_maps:
        return Uncut("a map follows batch(drop_remainder=True)")
    chain, maps, why = _chain(_part(batch, "_input_dataset"))
    if not maps:
        return Uncut(why)
    return EarlyCut(
        batch_size=int(_part(batch, "_batch_size")),
        drop_remainder=drop_remainder,
        counts=tuple(counts),
        _maps=tuple(maps),
        _batch_maps=tuple(batch_maps),
        _parallel=getattr(batch, "_num_parallel_calls", None),
        _dataset=dataset,
        _chain=tuple(chain),
    )


def _chain(dataset: Any) -> tuple[list[Any], list[_Map], str]:
    """Returns the datasets down to the first map that can be moved.

    Args:
        dataset: What is batched.

    Returns:
        The datasets from the last one on, the maps from the first one on, and
        why it does not go further.
    """
    chain: list[Any] = []
    maps: list[_Map] = []
    length = 0
    while True:
        kind = _kind(dataset)
        if kind in _MAPS:
            why = "" if _ordered(dataset) else "it has deterministic=False"
            why = why or _impure(dataset)
            if why:
                return chain[:length], maps, f"of the map before batch: {why}"
            maps.insert(0, _map(dataset))
            length = len(chain) + 1
        elif kind not in _MOVED:
            why = f"no map comes between {_name(kind)} and batch"
            return chain[:length], maps, why
        if not _dense(_part(dataset, "_input_dataset")):
            why = "its elements are not all dense tensors"
            return chain[:length], maps, why
        chain.append(dataset)
        dataset = _part(dataset, "_input_dataset")


def _elements(chain: tuple[Any, ...]) -> tf.data.Dataset:
    """Returns a dataset without the maps of a chain.

    A shuffle counts its passes in the process. So where one follows a map,
    the graph is changed and not the dataset made anew: both then draw from
    one count.
    """
    below = _part(chain[-1], "_input_dataset")
    if all(_kind(d) in (*_MAPS, *_UNCHANGED) for d in chain):
        return below
    graph = tf.compat.v1.GraphDef.FromString(serialized(chain[0]).numpy())
    nodes = {node.name: node for node in graph.node}
    above = next(node for node in graph.node if node.op == "_Retval")
    path = []
    for dataset in chain:
        node = nodes[above.input[0].partition(":")[0]]
        begin = (_MAPS | _MOVED)[_kind(dataset)]
        if not node.op.startswith(begin):
            raise AttributeError(f"{node.op} where {begin} was expected")
        path.append(node)
        above = node
    source = nodes[above.input[0].partition(":")[0]]
    above = next(node for node in graph.node if node.op == "_Retval")
    for node, dataset in zip(path, chain, strict=True):
        if _kind(dataset) in _MAPS:
            continue
        above.input[0] = node.name
        for name in ("output_types", "output_shapes"):
            node.attr[name].CopyFrom(source.attr[name])
        above = node
    above.input[0] = source.name
    found = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    return tf.data.experimental.from_variant(found, below.element_spec)


def _part(dataset: Any, name: str) -> Any:
    """Returns a private attribute of a class of tf.data."""
    return getattr(dataset, name)


def _kind(dataset: Any) -> str:
    return type(dataset).__name__


def _name(kind: str) -> str:
    """Returns the name of a class of tf.data in words."""
    words = kind.strip("_").removesuffix("V2").removesuffix("Dataset")
    return "".join(f" {c.lower()}" if c.isupper() else c for c in words).strip()


def _dense(dataset: tf.data.Dataset) -> bool:
    spec = tf.nest.flatten(dataset.element_spec)
    return all(isinstance(leaf, tf.TensorSpec) for leaf in spec)


def _ordered(dataset: Any) -> bool:
    return getattr(dataset, "_deterministic", "default") != "false"


def _map(dataset: Any) -> _Map:
    return _Map(
        _part(dataset, "_map_func").function,
        getattr(dataset, "_num_parallel_calls", None),
    )


def _impure(dataset: Any) -> str:
    """Returns why the result of a map depends on more than its element."""
    graph = Graph(_part(dataset, "_map_func").function.graph.as_graph_def())
    for node in graph.nodes():
        if node.op in _PURE or drawn_by(node):
            # What is drawn without a seed is another number in every run.
            continue
        if "PyFunc" in node.op and node.op != "PyFuncStateless":
            return (
                "it calls Python, which may count its calls; "
                "tf.numpy_function(..., stateful=False) says that it does not"
            )
        if _stateful(node.op):
            return (
                f"{node.op} depends on the order of calls; operations such "
                "as tf.random.stateless_uniform do not"
            )
    return ""


def _stateful(op: str) -> bool:
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    return definition is None or definition.is_stateful


def _of_rows(dataset: Any) -> bool:
    """Returns whether a map of a batch computes each row from that row."""
    function = _part(dataset, "_map_func").function
    given = {tensor.name for tensor in function.graph.inputs}
    given -= {tensor.name for tensor in function.graph.internal_captures}
    ranks: dict[str, int | None] = {}
    for operation in function.graph.get_operations():
        for tensor in operation.outputs:
            if tensor.name in given:
                ranks[tensor.name] = tensor.shape.rank
        found = [t for t in operation.inputs if t.name in ranks]
        others = [t for t in operation.inputs if t.name not in ranks]
        if not found:
            continue
        same = len({ranks[t.name] for t in found}) == 1
        if (
            operation.type not in _OF_ROWS
            or not same
            or ranks[found[0].name] in (None, 0)
            or any(t.shape.rank != 0 for t in others)
        ):
            return False
        ranks |= {t.name: ranks[found[0].name] for t in operation.outputs}
    return all(t.name in ranks for t in function.graph.outputs)
