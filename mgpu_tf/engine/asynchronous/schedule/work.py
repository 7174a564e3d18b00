"""What the coordinator hands out, and how a worker reads its examples.

    work.take(10) -> 10 steps and the arguments that name their examples
    work.reader(iterator, arguments)(k) -> the batch of step k

    RowWork     arrays: the coordinator deals row numbers, so each example
                comes once in a pass whoever takes it; every worker holds
                small arrays, and gets its rows alone of large ones
    StreamWork  training from datasets: every worker reads a share of its own
    ShardWork   evaluating datasets: a piece of work is one share, read whole
    FedWork     Python's batches: the coordinator makes and sends them

A piece of work that is handed out again, to another worker, is the same
examples with all but `StreamWork`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.data.feed import ended
from mgpu_tf.data.structures import batch_size, gather, rows
from mgpu_tf.data.tf_data.order import serialized
from mgpu_tf.strategies.replicas.topology import LocalReplicas

# Larger arrays are not copied to workers: each piece of work has its rows.
HELD_BYTES = 256_000_000
# The most bytes of rows of a piece of work, if a batch has not more.
SENT_BYTES = 16_000_000

Batch = tuple[Any, tf.Tensor]
Arguments = tuple[Any, ...]


class Work(abc.ABC):
    """The work of one epoch, or of one evaluation.

    Attributes:
        per_worker: What each worker reads from.
        may_end: Whether only the worker knows how many steps there are.
        limit: Steps in all; None where only the workers know.
        stride: By how many batches the next batch of a piece of work is
            later.
    """

    per_worker: Any
    may_end: bool = False
    stride: int = 1
    limit: int | None

    @abc.abstractmethod
    def take(self, steps: int) -> tuple[int, Arguments] | None:
        """Returns how many steps to do next, and on what; None at the end."""

    @abc.abstractmethod
    def reader(
        self, iterator: Any, arguments: Arguments
    ) -> Callable[[tf.Tensor], Batch]:
        """Returns a function from a step of a piece of work to its batch.

        Called on a worker, in the graph. A batch is the data and its number
        of examples, 0 where the data has ended.
        """

    @property
    @abc.abstractmethod
    def key(self) -> Any:
        """What is equal for work that the same graph can read."""


class RowReader:
    """Arrays that workers read, for any number of `RowWork`s.

    Args:
        coordinator: TensorFlow's.
        source: Arrays.

    Attributes:
        held: Whether every worker holds the arrays.
    """

    def __init__(self, coordinator: Any, source: Source) -> None:
        known = source.rows()
        assert known is not None
        self.rows, self.source = known, source
        self.held = _bytes_of(known.arrays) <= HELD_BYTES
        self.per_worker = None
        if self.held:
            arrays = (known.arrays,)
            self.per_worker = iter(
                coordinator.create_per_worker_dataset(
                    lambda: tf.data.Dataset.from_tensors(arrays).repeat()
                )
            )
        self._orders: dict[int, np.ndarray] = {}

    def most(self, steps: int, every: int) -> int:
        """Returns the most steps of a piece of work.

        Args:
            steps: What the engine allows.
            every: Steps in an update; a piece has whole updates.
        """
        if self.held:
            return steps
        batch = gather(self.rows.arrays, [0] * self.rows.batch_size)
        updates = SENT_BYTES // _bytes_of(batch) // every
        return min(steps, max(1, updates) * every)

    def batch(self, position: int) -> np.ndarray:
        """Returns the rows of a batch, counted from the first pass on."""
        assert self.source.steps is not None
        index, place = divmod(position, self.source.steps)
        if index not in self._orders:
            self._orders = {index: self.rows.order(index)}
        start = place * self.rows.batch_size
        return self._orders[index][start : start + self.rows.batch_size]


class RowWork(Work):
    """Batches of arrays, dealt by their row numbers.

    Args:
        reader: The arrays.
        first: The first batch, counted from the first pass on.
        limit: How many batches.
        most: The most steps of a piece of work.
        every: Steps in an update.
    """

    def __init__(
        self,
        reader: RowReader,
        first: int,
        limit: int,
        most: int,
        every: int = 1,
    ) -> None:
        self._reader, self._most = reader, reader.most(most, every)
        self._next, self._end = first, first + limit
        self.per_worker, self.limit = reader.per_worker, limit

    def take(self, steps: int) -> tuple[int, Arguments] | None:
        """Deals the next batches."""
        steps = min(steps, self._most, self._end - self._next)
        if steps == 0:
            return None
        positions = range(self._next, self._next + steps)
        self._next += steps
        batches = [self._reader.batch(position) for position in positions]
        # Of one length whatever the steps: another shape is another graph.
        numbers = np.zeros(self._most * self._reader.rows.batch_size, np.int64)
        ends = np.zeros(self._most + 1, np.int64)
        ends[1 : steps + 1] = np.cumsum([len(batch) for batch in batches])
        numbers[: ends[steps]] = np.concatenate(batches)
        if self._reader.held:
            return steps, (tf.constant(numbers), tf.constant(ends))
        with tf.device("CPU:0"):
            sent = gather(self._reader.rows.arrays, numbers)
        return steps, (sent, tf.constant(ends))

    def reader(
        self, iterator: Any, arguments: Arguments
    ) -> Callable[[tf.Tensor], Batch]:
        """Gathers rows of the arrays that the worker holds, or was sent."""
        held = self._reader.held
        dealt, ends = arguments
        arrays = next(iterator)[0] if held else None
        finish = self._reader.rows.finish

        def read(step: tf.Tensor) -> Batch:
            low, high = ends[step], ends[step + 1]
            data = rows(dealt, low, high)
            if held:
                data = gather(arrays, data)
            return finish(data) if finish else data, high - low

        return read

    @property
    def key(self) -> Any:
        """The form of the arrays, and what is done to a batch."""
        finish = self._reader.rows.finish
        form = str(self._reader.source.example())
        return ("rows", form, id(finish), self._reader.held)


class Shards:
    """Datasets as text, which a worker reads without the coordinator.

    Args:
        coordinator: TensorFlow's.
        source: Any source but arrays.
        workers: Number of workers.
        steps: Steps in an evaluation; all by default.
    """

    def __init__(
        self,
        coordinator: Any,
        source: Source,
        workers: int,
        steps: int | None = None,
    ) -> None:
        self.source, self.workers = source, workers
        self._coordinator = coordinator
        shards = source.shards(workers)
        self._apart = len(shards) == 1
        if steps is not None:
            shards = [
                shard.take(len(range(place, steps, len(shards))))
                for place, shard in enumerate(shards)
            ]
        self._spec = shards[0].element_spec
        self.graphs = tf.stack([serialized(shard) for shard in shards])

    def dataset(self, graphs: tf.Tensor, place: tf.Tensor) -> tf.data.Dataset:
        """Returns the share at one place. On a worker."""
        graph = graphs[0] if self._apart else tf.gather(graphs, place)
        dataset = self._of_text(graph)
        return dataset.shard(self.workers, place) if self._apart else dataset

    def _of_text(self, graph: tf.Tensor) -> tf.data.Dataset:
        return tf.data.experimental.from_variant(
            tf.raw_ops.DatasetFromGraph(graph_def=graph), self._spec
        )

    @property
    def key(self) -> Any:
        """What is equal for datasets that the same graph can read."""
        return (str(self._spec), self._apart)

    def streams(self) -> Any:
        """Starts an endless stream of its share on every worker.

        A worker whose share has no batch reads the shares of all.
        """
        graphs, source = self.graphs, self.source
        place_of_worker = (
            tf.distribute.coordinator.experimental_get_current_worker_index
        )

        def stream() -> tf.data.Dataset:
            dataset = self.dataset(graphs, place_of_worker())
            texts = tf.data.Dataset.from_tensor_slices(graphs)
            every = texts.flat_map(self._of_text)
            if not source.endless:
                # Of nothing there is no repetition.
                dataset, every = dataset.repeat(), every.repeat()
            return dataset.concatenate(every).prefetch(2)

        return iter(self._coordinator.create_per_worker_dataset(stream))

    def texts(self) -> Any:
        """Puts the text of the datasets on every worker."""
        graphs = self.graphs
        return iter(
            self._coordinator.create_per_worker_dataset(
                lambda: tf.data.Dataset.from_tensors(graphs).repeat()
            )
        )


class FedWork(Work):
    """Batches that only Python can make, one by one.

    Args:
        source: Where they come from.
        batches: From `batches_of`; goes on where an epoch stops.
        limit: How many; None until the data ends.
    """

    def __init__(
        self,
        source: Source,
        batches: Iterator[Any],
        limit: int | None,
    ) -> None:
        self._source, self._batches, self._left = source, batches, limit
        self.per_worker, self.limit = None, limit

    def take(self, steps: int) -> tuple[int, Arguments] | None:
        """Makes the next batch."""
        del steps
        if self._left == 0:
            return None
        batch = next(self._batches, None)
        if batch is None:
            return None
        if self._left is not None:
            self._left -= 1
        data, local, _ = batch
        return 1, (data, local)

    def reader(
        self, iterator: Any, arguments: Arguments
    ) -> Callable[[tf.Tensor], Batch]:
        """Returns what was sent."""
        del iterator
        data, size = arguments
        return lambda step: (data, size)

    @property
    def key(self) -> Any:
        """The form of a batch."""
        return ("fed", str(self._source.example()))


class StreamWork(Work):
    """Steps of training from a stream on every worker.

    Args:
        shards: The datasets.
        streams: From `Shards.streams`.
        limit: How many steps.
    """

    def __init__(self, shards: Shards, streams: Any, limit: int) -> None:
        self._shards = shards
        self._left = limit
        self.per_worker, self.limit = streams, limit

    def take(self, steps: int) -> tuple[int, Arguments] | None:
        """Deals a number of steps."""
        steps = min(steps, self._left)
        self._left -= steps
        return (steps, ()) if steps else None

    def reader(
        self, iterator: Any, arguments: Arguments
    ) -> Callable[[tf.Tensor], Batch]:
        """Takes the next batch of the worker's stream."""
        del arguments
        return _next_of(iterator)

    @property
    def key(self) -> Any:
        """The form of a batch."""
        return ("stream", *self._shards.key)


class ShardWork(Work):
    """One pass over datasets, a share at a time.

    Args:
        shards: The datasets.
        texts: From `Shards.texts`.
        limit: Steps in all, where that is known.
    """

    may_end = True

    def __init__(self, shards: Shards, texts: Any, limit: int | None) -> None:
        self._shards = shards
        self._next = 0
        self.per_worker, self.limit = texts, limit
        self.stride = shards.workers

    def take(self, steps: int) -> tuple[int, Arguments] | None:
        """Deals the next share, however long."""
        del steps
        if self._next == self._shards.workers:
            return None
        place = tf.constant(self._next, tf.int64)
        self._next += 1
        return 0, (place,)

    def reader(
        self, iterator: Any, arguments: Arguments
    ) -> Callable[[tf.Tensor], Batch]:
        """Reads the share from its beginning."""
        (place,) = arguments
        dataset = self._shards.dataset(next(iterator), place)
        none, _, _ = ended(self._shards.source)
        end = tf.data.Dataset.from_tensors(none)
        return _next_of(iter(dataset.concatenate(end.repeat())))

    @property
    def key(self) -> Any:
        """The form of a batch."""
        return ("shard", *self._shards.key)


def _next_of(iterator: Any) -> Callable[[tf.Tensor], Batch]:
    """Returns what takes batch after batch, whichever step it is for."""

    def read(step: tf.Tensor) -> Batch:
        del step
        data = next(iterator)
        return data, batch_size(data)

    return read


def _bytes_of(arrays: Any) -> int:
    """Returns about how much memory tensors take; 32 bytes for a text."""
    leaves = tf.nest.flatten(arrays, expand_composites=True)
    return sum(
        int(tf.size(leaf, tf.int64)) * (leaf.dtype.size or 32)
        for leaf in leaves
        if leaf is not None
    )


def calls_python(source: Source) -> bool:
    """Returns whether a source's datasets need the coordinator's Python.

    Or what else there is in its process alone.
    """
    if not source.repeats or not source.portable:
        return True
    return b"PyFunc" in serialized(source.shards(1)[0]).numpy()


def batches_of(
    source: Source, position: int = 0, *, once: bool
) -> Iterator[Any]:
    """Yields the elements of a source on the coordinator.

    Args:
        source: Any source.
        position: How many batches were taken before.
        once: Whether to end with the pass, and not to go on into the next.
    """
    index, skipped = divmod(position, source.steps or position + 1)
    while True:
        yield from source.pass_from(index, LocalReplicas(0, 1, 1), skipped)
        if once or not source.repeats:
            return
        index, skipped = index + 1, 0
