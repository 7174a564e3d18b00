"""One pass, or a chain of passes, spread over the replicas.

`total == 0` in an element says that the data has ended. Elements never run
out, so that no replica has to ask the others whether they still have data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.data.sources.batches import BatchSource, Epochs, Form, Source
from mgpu_tf.data.structures import batch_size
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import topology_of


def distribute(
    source: Source,
    strategy: tf.distribute.Strategy,
    epoch: int = 0,
    *,
    continuous: bool = False,
    start: int = 0,
) -> tf.data.Dataset | tf.distribute.DistributedDataset:
    """Spreads one pass, or a chain of passes, over the replicas.

    Args:
        source: The global batches.
        strategy: Who takes them.
        epoch: Index of the (first) pass.
        continuous: Whether the next pass follows when one has ended, for
            epochs of a given number of steps.
        start: The global batch at which the first pass begins.

    Returns:
        An endless dataset for `next_batch`.
    """
    local = topology_of(strategy).local
    uncut = _uncut(source, strategy)

    def one_pass(index: Any, first: int = 0) -> tf.data.Dataset:
        if uncut is None:
            return source.pass_from(index, local, first)
        return uncut.batches_from(index, first)

    arrays = source.arrays
    held = None
    if arrays is not None:
        held = tf.data.Dataset.from_tensors(arrays.leaves)

    def reading(
        *leaves: tf.Tensor, index: Any, first: int = 0
    ) -> tf.data.Dataset:
        assert arrays is not None
        with arrays.reading(leaves):
            return one_pass(index, first)

    def from_here() -> tf.data.Dataset:
        if held is None:
            return one_pass(epoch, start)
        return held.flat_map(
            functools.partial(reading, index=epoch, first=start)
        )

    if source.endless:
        dataset = from_here()
    elif continuous:
        following = epoch + 1 if start else epoch
        # counter() would leave a function in TensorFlow's global graph.
        numbers = tf.data.Dataset.range(following, np.iinfo(np.int64).max)
        if held is None:
            dataset = numbers.flat_map(one_pass)
        else:
            dataset = tf.data.Dataset.zip(numbers, held.repeat()).flat_map(
                lambda index, leaves: reading(*leaves, index=index)
            )
        if start:
            dataset = from_here().concatenate(dataset)
    else:
        element = ended(source)
        end = tf.data.Dataset.from_tensors(element[0] if uncut else element)
        dataset = from_here().concatenate(end.repeat())
    if not source.endless:
        dataset = dataset.apply(
            tf.data.experimental.assert_cardinality(
                tf.data.INFINITE_CARDINALITY
            )
        )
    if source.repeats:
        # Two global batches: what data is made of may change meanwhile.
        dataset = dataset.prefetch(2 * (local.count if uncut is None else 1))
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = dataset.with_options(options)
    if _on_host(strategy):
        return dataset
    return strategy.distribute_datasets_from_function(lambda _: dataset)


def next_batch(
    iterator: Any,
    form: Form,
    strategy: tf.distribute.Strategy,
    bounds: tf.Tensor | None = None,
) -> tuple[Any, Any, Any]:
    """Takes a global batch; in the graph of a step, outside of replicas.

    A distributed iterator moves data to accelerators ahead of time, and costs
    as much as a small step. Where replicas run on the CPU the batch is cut
    here instead.

    Args:
        iterator: Of a dataset from `distribute`.
        form: Of what was distributed.
        strategy: Who takes it.
        bounds: Those of `LocalReplicas`. Default: those of now.

    Returns:
        `(data, local, total)`, a value for each local replica.
    """
    if not _on_host(strategy):
        return next(iterator)
    local = topology_of(strategy).local
    if bounds is not None:
        local = dataclasses.replace(local, bounds=bounds)
    if not form.uncut or not form.totals_known:
        if not form.uncut:
            elements = [next(iterator) for _ in range(local.count)]
        else:
            unknown = tf.constant(-1, tf.int64)
            elements = []
            for _ in range(local.count // local.same_rows_here):
                batch = next(iterator)
                element = (batch, batch_size(batch), unknown)
                elements += [element] * local.same_rows_here
        return _for_replicas(strategy, lambda replica: elements[replica])
    batch = next(iterator)
    size = batch_size(batch)
    one_size = local.ranges > 1 and not form.cuts_each
    checks = structures.check_sizes(batch, size) if one_size else []
    if checks:
        with tf.control_dependencies(checks):
            size = tf.identity(size)

    def cut(replica: int) -> tuple[Any, tf.Tensor, tf.Tensor]:
        if local.ranges == 1:
            return batch, size, size
        # Numbers where the shape tells, so that the step need not ask.
        known = tf.get_static_value(size)
        number = size if known is None else int(known)
        low, high = local.rows_of(number, replica)
        if form.cuts_each:
            data = structures.rows_of_each(batch, local, replica)
        else:
            computed = structures.or_another(low, high, number)
            data = structures.rows(batch, *computed)
        return data, tf.convert_to_tensor(high - low, tf.int64), size

    return _for_replicas(strategy, cut)


def _for_replicas(
    strategy: tf.distribute.Strategy, element: Callable[[int], Any]
) -> Any:
    first = topology_of(strategy).local.first
    return strategy.experimental_distribute_values_from_function(
        lambda context: element(context.replica_id_in_sync_group - first)
    )


def _uncut(
    source: Source, strategy: tf.distribute.Strategy
) -> BatchSource | None:
    """Returns the source if its batches are cut in the step, else None."""
    if isinstance(source, BatchSource) and source.form.uncut:
        return source if _on_host(strategy) else None
    return None


def _on_host(strategy: tf.distribute.Strategy) -> bool:
    devices = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
    return all(device.device_type == "CPU" for device in devices)


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
        self._first = self._began = first
        self._chain = chain
        self._start = 0
        self._iterator: Any = None
        self._resumed: Any = None

    def iterator(self, epoch: int, limit: int | None = None) -> Any:
        """Returns an iterator at the beginning of an epoch."""
        del limit
        if self._resumed is not None:
            iterator, self._resumed = self._resumed, None
            return iterator
        if not self._chain and self.source.repeats:
            return iter(distribute(self.source, self._strategy, epoch))
        if self._iterator is None:
            chained = distribute(
                self.source,
                self._strategy,
                self._first,
                continuous=self.source.repeats,
                start=self._start,
            )
            self._iterator = iter(chained)
        return self._iterator

    def resume(self, finished: Sequence[int], step: int) -> None:
        """Goes to where a run that was broken off had read to.

        A seekable source is entered there. A dataset whose maps are known is
        read again as far as its maps. Any other is read again from the
        beginning, as fast as it can be read.

        Args:
            finished: The steps of each epoch since the first.
            step: Steps of the epoch after them.
        """
        self.source.epochs.reset()
        self._go_to(finished, step, self.source.epochs)

    def _go_to(
        self, finished: Sequence[int], step: int, epochs: Epochs
    ) -> None:
        """Goes to a step, by epochs that begin and end again."""
        done = sum(finished) + step
        if self.source.seekable and self.source.steps is not None:
            self._first += done // self.source.steps
            self._start = done % self.source.steps
        elif self.source.enterable and self._chain:
            passes = done // self.source.steps if self.source.steps else 0
            self.source.pass_over(passes)
            self._start = done - passes * (self.source.steps or 0)
        elif self.source.enterable:
            self.source.pass_over(len(finished))
            epoch = self._first + len(finished)
            rest = distribute(self.source, self._strategy, epoch, start=step)
            self._resumed = iter(rest)
        else:
            one = self._chain or not self.source.repeats
            for epoch, steps in enumerate(finished, self._first):
                epochs.begin()
                if not one:
                    # The last may be one that a callback has stopped.
                    is_last = epoch + 1 == self._first + len(finished)
                    _check_length(epochs, epoch, steps, ended=not is_last)
                # What says that the data has ended was read as well.
                self._read(self.iterator(epoch), steps + (not one))
                epochs.end()
            epochs.begin()
            following = self._first + len(finished)
            if not one:
                _check_length(epochs, following, step, ended=False)
            iterator = self.iterator(following)
            self._read(iterator, step)
            self._resumed = None if one else iterator

    def cut_anew(self, finished: Sequence[int]) -> None:
        """Reads from here on with the shares that replicas have now.

        Args:
            finished: The steps of each epoch since the first.
        """
        if self._iterator is None or _uncut(self.source, self._strategy):
            return  # The next iterator, or the next step, cuts by them.
        self._iterator = None
        self._first, self._start = self._began, 0
        self._go_to(finished, 0, Epochs())

    def _read(self, iterator: Any, steps: int) -> None:
        drop(iterator, self.source, self._strategy, steps)

    def restart(self) -> None:
        """Forgets where an epoch that was cut short has stopped."""
        if self.source.repeats:
            self._iterator = None


def _check_length(
    epochs: Epochs, epoch: int, steps: int, *, ended: bool
) -> None:
    """Refuses data whose epoch is of another length when it is read again.

    Args:
        epochs: Those of the data, in which the epoch has begun.
        epoch: Which one it is.
        steps: What was read of it before.
        ended: Whether it was read to its end.

    Raises:
        ConfigurationError: It has another number of batches now.
    """
    length = epochs.length()
    if length is None or length == steps or (steps < length and not ended):
        return
    raise ConfigurationError(
        "A resumed run reads data again, in epochs of the same length. "
        f"Received: a PyDataset with {length} batches in epoch {epoch + 1}, of "
        f"which {steps} were read before. Let its length follow from the calls "
        "of on_epoch_end alone, or start anew in another folder."
    )


def drop(
    iterator: Any,
    source: Source,
    strategy: tf.distribute.Strategy,
    steps: int,
) -> None:
    """Reads global batches as training does, and drops them.

    Args:
        iterator: Of a dataset from `distribute`.
        source: What was distributed.
        strategy: Who reads it.
        steps: The number of batches.
    """

    def one(done: tf.Tensor) -> list[tf.Tensor]:
        next_batch(iterator, source.form, strategy)
        return [done + 1]

    @tf.function(autograph=False)
    def read(steps: tf.Tensor) -> tf.Tensor:
        zero = tf.constant(0, tf.int64)
        return tf.while_loop(
            lambda done: done < steps, one, [zero], parallel_iterations=1
        )

    if steps:
        read(tf.constant(steps, tf.int64))


def ended(source: Source) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """Returns the element that says that the data has ended."""
    total = 0 if source.totals_known else -1
    data = structures.empty(source.example())
    return data, tf.constant(0, tf.int64), tf.constant(total, tf.int64)
