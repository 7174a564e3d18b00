"""Input: one order of examples, whatever the number of workers.

    source = as_source(x, y, batch_size=64, shuffle=True, seed=0)
    iterator = iter(distribute(source, strategy, epoch=3))

A source describes *global* batches. Global batch k holds the same examples on
one device and on any number of replicas; replica r of n takes a contiguous
part of it:

    rows [size * r // n, size * (r + 1) // n)

    size 5, n 4 -> rows 0 | 1 | 2 | 3 4     parts differ by one row at most
    size 2, n 4 ->      - | 0 | - | 1       a part may be empty

Every element that reaches a replica is `(data, local, total)`: its rows, how
many they are, and the size of the global batch. `total == 0` says that the
data has ended. Elements never run out, so that no replica has to ask the
others whether they still have data.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategy import local_replica_count

DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]

DEFAULT_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Part:
    """Which replicas of how many a pipeline feeds.

    Attributes:
        first: The first replica that this process holds.
        local: How many replicas this process holds.
        total: How many replicas there are.
    """

    first: int
    local: int
    total: int

    def bounds(self, size: Any, replica: Any) -> tuple[Any, Any]:
        """Returns the rows of a global batch that belong to a replica.

        Example:
            >>> [Part(0, 4, 4).bounds(5, r) for r in range(4)]
            [(0, 1), (1, 2), (2, 3), (3, 5)]

        Args:
            size: Rows of the global batch, integer or tensor.
            replica: The local replica, integer or tensor.

        Returns:
            The first row, and the row after the last.
        """
        index = self.first + replica
        return size * index // self.total, size * (index + 1) // self.total


class Source(abc.ABC):
    """Global batches, one pass over the data at a time.

    Attributes:
        steps: Global batches in a pass, None where only a pass can tell.
        endless: Whether a pass never ends by itself.
        seekable: Whether the number of a pass alone decides its order, so
            that passes can be chained.
        totals_known: Whether elements carry the size of the global batch;
            otherwise `total` is -1 and the replicas add up `local`.
    """

    steps: int | None
    endless: bool = False
    seekable: bool = False
    totals_known: bool = True

    @property
    def may_end(self) -> bool:
        """Whether a step may find that the data has ended."""
        return self.steps is None and not self.endless

    @abc.abstractmethod
    def pass_dataset(self, index: Any, part: Part) -> tf.data.Dataset:
        """Returns pass `index` (integer or tensor), ending with the data."""

    @abc.abstractmethod
    def example(self) -> Any:
        """Returns the spec of a batch: `TensorSpec`s with batch size None."""


class ArraySource(Source):
    """Arrays in memory; every worker gathers only the rows that it needs."""

    seekable = True

    def __init__(
        self, data: Any, batch_size: int, shuffle: bool, seed: int
    ) -> None:
        self._data = tf.nest.map_structure(_to_tensor, data)
        self._examples = _common_length(self._data)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._steps = -(-self._examples // batch_size)
        self.steps = self._steps

    def pass_dataset(self, index: Any, part: Part) -> tf.data.Dataset:
        """Returns pass `index`; the order comes from (seed, index) alone."""
        order = None
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(
                tf.range(self._examples, dtype=tf.int64),
                seed=tf.stack(
                    [tf.cast(self._seed, tf.int64), tf.cast(index, tf.int64)]
                ),
            )

        def element(position: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
            start = (position // part.local) * self._batch_size
            size = tf.minimum(
                tf.constant(self._batch_size, tf.int64),
                self._examples - start,
            )
            low, high = part.bounds(size, position % part.local)
            rows = slice(start + low, start + high)
            if order is None:
                data = tf.nest.map_structure(lambda t: t[rows], self._data)
            else:
                chosen = order[rows]
                data = tf.nest.map_structure(
                    lambda t: tf.gather(t, chosen), self._data
                )
            return data, high - low, size

        return tf.data.Dataset.range(self._steps * part.local).map(element)

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), self._data
        )


class DatasetSource(Source):
    """A `tf.data.Dataset` of global batches.

    Every worker reads all of it and keeps its rows: the price of one order.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._spec = tf.nest.map_structure(_batch_free, dataset.element_spec)
        _check_batched(dataset.element_spec)
        cardinality = int(dataset.cardinality())
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY
        self.steps = cardinality if cardinality >= 0 else None

    def pass_dataset(self, index: Any, part: Part) -> tf.data.Dataset:
        """Returns a pass; `index` does not matter."""
        del index

        def cut(data: Any, replica: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
            size = _batch_size(data)
            low, high = part.bounds(size, replica)
            return (
                tf.nest.map_structure(lambda t: t[low:high], data),
                high - low,
                size,
            )

        if part.local == 1:
            return self._dataset.map(lambda *data: cut(_one(data), 0))
        return self._dataset.flat_map(
            lambda *data: tf.data.Dataset.range(part.local).map(
                lambda replica: cut(_one(data), replica)
            )
        )

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec


class FunctionSource(Source):
    """A function from `tf.distribute.InputContext` to a dataset.

    The function shards the data itself and batches with the per-replica
    size; each replica takes the next batch of its process. Workers may have
    different numbers of batches.
    """

    totals_known = False
    steps = None

    def __init__(
        self, dataset_fn: DatasetFn, strategy: tf.distribute.Strategy
    ) -> None:
        self._dataset = dataset_fn(input_context(strategy))
        if not isinstance(self._dataset, tf.data.Dataset):
            raise ConfigurationError(
                "A dataset_fn must return a tf.data.Dataset. Received: "
                f"{type(self._dataset).__name__}."
            )
        _check_batched(self._dataset.element_spec)
        self._spec = tf.nest.map_structure(
            _batch_free, self._dataset.element_spec
        )
        cardinality = int(self._dataset.cardinality())
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY

    def pass_dataset(self, index: Any, part: Part) -> tf.data.Dataset:
        """Returns a pass; `index` does not matter."""
        del index, part

        def element(*data: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
            data = _one(data)
            return data, _batch_size(data), tf.constant(-1, tf.int64)

        return self._dataset.map(element)

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec


class _MappedSource(Source):
    """Another source with a function over its batches."""

    def __init__(self, source: Source, function: Callable[[Any], Any]) -> None:
        self._source = source
        self._function = function
        self.steps, self.endless = source.steps, source.endless
        self.seekable = source.seekable
        self.totals_known = source.totals_known

    def pass_dataset(self, index: Any, part: Part) -> tf.data.Dataset:
        """Returns pass `index` of the source, mapped."""
        return self._source.pass_dataset(index, part).map(
            lambda data, local, total: (self._function(data), local, total)
        )

    def example(self) -> Any:
        """Returns the spec of a mapped batch."""
        concrete = tf.function(self._function).get_concrete_function(
            self._source.example()
        )
        return tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype),
            concrete.structured_outputs,
        )


def with_class_weight(source: Source, class_weight: dict[int, float]) -> Source:
    """Weights each example by its class, as Keras's `class_weight` does.

    Args:
        source: Batches of `(x, y)`; y integers `[batch]` or `[batch, 1]`, or
            one-hot `[batch, classes]`.
        class_weight: Weight by class; 1 for a class that is not there.

    Returns:
        A source of `(x, y, sample_weight)`.

    Raises:
        ConfigurationError: There are weights already, or no single target.
    """
    data = source.example()
    if (
        not isinstance(data, tuple)
        or len(data) != 2
        or tf.nest.is_nested(data[1])
    ):
        raise ConfigurationError(
            "class_weight needs data of (x, y) with one target and no "
            "sample_weight. Received: "
            f"{len(data) if isinstance(data, tuple) else 1} parts. Pass "
            "sample_weight instead."
        )
    largest = max(class_weight, default=0)
    table = [class_weight.get(index, 1.0) for index in range(largest + 1)]

    def weigh(data: tuple[Any, Any]) -> tuple[Any, Any, tf.Tensor]:
        x, y = data
        rank = y.shape.rank
        if rank is not None and rank > 1 and y.shape[-1] != 1:
            indices = tf.argmax(y, axis=-1)
        else:
            indices = tf.cast(tf.reshape(y, [-1]), tf.int64)
        known = tf.minimum(indices, largest)
        weights = tf.gather(tf.constant(table, keras.config.floatx()), known)
        return x, y, tf.where(indices > largest, tf.ones_like(weights), weights)

    return _MappedSource(source, weigh)


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    strategy: tf.distribute.Strategy,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Source:
    """Makes a source of what Keras's `fit`, `evaluate` and `predict` take.

    Args:
        x: Arrays (or a tuple `(x, y)` or `(x, y, sample_weight)` of them), a
            `tf.data.Dataset` batched with the global batch size, or a
            function from `tf.distribute.InputContext` to a dataset batched
            with the per-replica size.
        y: Targets, for arrays.
        sample_weight: Weights of shape `[examples, ...]`, for arrays.
        strategy: The strategy that the source will feed.
        batch_size: Global batch size, for arrays; 32 by default.
        shuffle: Whether arrays come in a new order each epoch.
        seed: Decides the order, together with the epoch.

    Returns:
        The source.

    Raises:
        ConfigurationError: The data is of no known kind, or arguments are
            given that its kind has no use for.
    """
    if x is None:
        raise ConfigurationError(
            "Data must be arrays, a tf.data.Dataset or a dataset_fn. "
            "Received: None."
        )
    if isinstance(x, tf.data.Dataset) or inspect.isroutine(x):
        _refuse_array_arguments(x, y, sample_weight, batch_size)
        if isinstance(x, tf.data.Dataset):
            return DatasetSource(x)
        return FunctionSource(x, strategy)
    if isinstance(x, tuple) and y is None and 1 < len(x) <= 3:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(x)
    if batch_size is None:
        batch_size = DEFAULT_BATCH_SIZE
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigurationError(
            "batch_size is the global batch size, an integer of 1 or more. "
            f"Received: batch_size={batch_size!r}."
        )
    data = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    return ArraySource(data, batch_size, shuffle, seed)


def input_context(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.InputContext:
    """Returns the place of this process's pipeline among all pipelines."""
    part = part_of(strategy)
    return tf.distribute.InputContext(
        num_input_pipelines=part.total // part.local,
        input_pipeline_id=part.first // part.local,
        num_replicas_in_sync=part.total,
    )


def part_of(strategy: tf.distribute.Strategy) -> Part:
    """Returns which replicas of the strategy this process feeds."""
    local = local_replica_count(strategy)
    total = strategy.num_replicas_in_sync
    index = 0
    if local != total:
        resolver = strategy.cluster_resolver
        has_chief = "chief" in resolver.cluster_spec().as_dict()
        is_worker = resolver.task_type == "worker"
        index = resolver.task_id + (1 if has_chief and is_worker else 0)
    return Part(first=index * local, local=local, total=total)


def distribute(
    source: Source,
    strategy: tf.distribute.Strategy,
    epoch: int = 0,
    *,
    continuous: bool = False,
) -> tf.distribute.DistributedDataset:
    """Spreads one pass, or a chain of passes, over the replicas.

    Args:
        source: The global batches.
        strategy: Who takes them.
        epoch: Index of the (first) pass.
        continuous: Whether the next pass follows when one has ended, for
            epochs of a given number of steps.

    Returns:
        An endless distributed dataset of `(data, local, total)`.
    """
    part = part_of(strategy)
    if source.endless:
        dataset = source.pass_dataset(epoch, part)
    elif continuous:
        dataset = tf.data.Dataset.counter(epoch).flat_map(
            lambda index: source.pass_dataset(index, part)
        )
    elif source.steps is not None:
        dataset = source.pass_dataset(epoch, part).repeat()
    else:
        ended = tf.data.Dataset.from_tensors(_ended(source)).repeat()
        dataset = source.pass_dataset(epoch, part).concatenate(ended)
    if not source.endless:
        dataset = dataset.apply(
            tf.data.experimental.assert_cardinality(
                tf.data.INFINITE_CARDINALITY
            )
        )
    dataset = dataset.prefetch(2 * part.local)
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = dataset.with_options(options)
    return strategy.distribute_datasets_from_function(lambda _: dataset)


def _ended(source: Source) -> tuple[Any, tf.Tensor, tf.Tensor]:
    total = 0 if source.totals_known else -1
    data = tf.nest.map_structure(_empty, source.example())
    return data, tf.constant(0, tf.int64), tf.constant(total, tf.int64)


def _empty(spec: Any) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros(
            [0] + [0] * (spec.shape.rank - spec.ragged_rank - 1), spec.dtype
        )
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(values, splits)
    shape = [0, *(size or 0 for size in spec.shape[1:])]
    if spec.dtype == tf.string:
        return tf.constant([], tf.string, shape=shape)
    return tf.zeros(shape, spec.dtype)


def _one(data: tuple[Any, ...]) -> Any:
    """Undoes tf.data's unpacking of an element into arguments."""
    return data if len(data) > 1 else data[0]


def _batch_size(data: Any) -> tf.Tensor:
    first = tf.nest.flatten(data)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(out_type=tf.int64)
    return tf.shape(first, out_type=tf.int64)[0]


def _batch_free(spec: Any) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _check_batched(spec: Any) -> None:
    leaves = tf.nest.flatten(spec)
    if not leaves or any(leaf.shape.rank == 0 for leaf in leaves):
        raise ConfigurationError(
            "A dataset must be batched: `dataset.batch(global_batch_size)`. "
            f"Received: elements {spec}."
        )


def _to_tensor(array: Any) -> tf.Tensor:
    """Converts as Keras does: floats to `keras.config.floatx()`."""
    if isinstance(array, tf.Tensor):
        tensor = array
    else:
        array = np.asarray(array)
        if array.dtype == object:
            array = array.astype(str)
        with tf.device("CPU:0"):
            tensor = tf.convert_to_tensor(array)
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, keras.config.floatx())
    return tensor


def _common_length(data: Any) -> int:
    leaves = tf.nest.flatten(data)
    lengths = {int(leaf.shape[0]) if leaf.shape.rank else 0 for leaf in leaves}
    if len(lengths) != 1 or lengths == {0}:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ConfigurationError(
            "All arrays must have the same number of examples, 1 or more. "
            f"Received: shapes {shapes}."
        )
    return lengths.pop()


def _refuse_array_arguments(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> None:
    kind = "tf.data.Dataset" if isinstance(x, tf.data.Dataset) else "dataset_fn"
    given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigurationError(
            f"A {kind} brings its targets, weights and batch size itself. "
            f"Received: {', '.join(names)} beside it. Leave out "
            f"{', '.join(names)}."
        )


class Feed:
    """Where the epochs of a run read from.

    Passes are chained into one iterator where they can be, since making an
    iterator costs as much as many small steps.

    Args:
        source: The global batches.
        strategy: Who takes them.
        first: The first pass.
        chain: Whether every pass is read to its end, or goes on into the
            next epoch.
    """

    def __init__(
        self,
        source: Source,
        strategy: tf.distribute.Strategy,
        first: int = 0,
        *,
        chain: bool,
    ) -> None:
        self.source = source
        self._strategy = strategy
        self._first = first
        self._chain = chain
        self._iterator: Any = None

    def iterator(self, epoch: int) -> Any:
        """Returns an iterator at the beginning of an epoch."""
        if not self._chain:
            return iter(distribute(self.source, self._strategy, epoch))
        if self._iterator is None:
            chained = distribute(
                self.source, self._strategy, self._first, continuous=True
            )
            self._iterator = iter(chained)
        return self._iterator

    def restart(self) -> None:
        """Forgets where an epoch that was cut short has stopped."""
        self._iterator = None
