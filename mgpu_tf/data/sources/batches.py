"""Global batches, one pass over the data at a time.

Every element of a source is `(data, local, total)`: the rows of one replica,
their number, and the size of the global batch.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from google.protobuf import message

from mgpu_tf.data import structures
from mgpu_tf.data.structures import batch_size, whole
from mgpu_tf.data.tf_data.early_cut import (
    EarlyCut,
    batches_at_end,
    early_cut_of,
)
from mgpu_tf.data.tf_data.order import Order, anew, order_of
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas.topology import LocalReplicas, balance_of

DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays whose batches are given by row numbers.

    Attributes:
        arrays: A structure of tensors `[examples, ...]`.
        batch_size: Number of rows of a global batch; the last batch of a pass
            may have fewer.
        order: Returns the row numbers `[examples]` in pass `index`.
        finish: A function for a batch of gathered rows, or None.
    """

    arrays: Any
    batch_size: int
    order: Callable[[int], np.ndarray]
    finish: Callable[[Any], Any] | None = None


class Arrays(Protocol):
    """A source of arrays in memory."""

    @property
    def leaves(self) -> tuple[tf.Tensor, ...]:
        """Returns the arrays that passes read."""

    def reading(
        self, leaves: Sequence[tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Lets passes that are made in a block read other arrays."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What a step that is traced knows of a source, and keeps.

    Attributes:
        may_end: As of the source.
        totals_known: As of the source.
        cuts_each: As of the source.
        uncut: Whether an element may be a batch, which the step cuts.
    """

    may_end: bool
    totals_known: bool
    cuts_each: bool
    uncut: bool


class Epochs:
    """Called as Keras calls a `keras.utils.PyDataset`; here nothing follows."""

    def reset(self) -> None:
        """Is called before the first epoch, and before an evaluation."""

    def begin(self) -> None:
        """Is called before an epoch is read; again where one is resumed."""

    def end(self) -> None:
        """Is called when an epoch was read to its end."""

    def length(self) -> int | None:
        """Returns the batches of the epoch that has begun.

        None says that epochs are as long as passes, always.
        """
        return None


@dataclasses.dataclass
class RowOrder:
    """In which order a source reads its rows.

    Attributes:
        shuffle: Whether in a new order in each pass; as for `Trainer.fit`.
        seed: Decides the order, together with the pass. A resumed run takes
            that with which it began.
    """

    shuffle: bool | str = False
    seed: int = 0


class Source(abc.ABC):
    """Global batches, one pass over the data at a time.

    Attributes:
        steps: Number of global batches in a pass; None if only reading finds
            the end.
        endless: Whether a pass never ends by itself.
        seekable: Whether the number of a pass alone decides its order, so
            that passes can be chained.
        totals_known: Whether elements have the size of the global batch. If
            not, `total` is -1 and the replicas add up `local`.
        repeats: Whether there is a second pass.
        batch_size: Rows of a global batch, where they are known beforehand.
        portable: Whether another process can read the datasets. A dataset
            that uses a lookup table, such as a vocabulary, is not portable.
        cuts_each: Whether each array of a batch is cut by its own number of
            rows. Set by who takes batches that `may_differ`.
        epochs: Is to be called where epochs begin and end.
        row_order: In which order rows are read; None where the data decides.
    """

    steps: int | None
    endless: bool = False
    seekable: bool = False
    totals_known: bool = True
    repeats: bool = True
    batch_size: int | None = None
    portable: bool = True
    cuts_each: bool = False
    epochs: Epochs = Epochs()
    row_order: RowOrder | None = None

    @property
    def may_differ(self) -> bool:
        """Whether the arrays of a batch may have other numbers of rows."""
        return False

    @property
    def may_end(self) -> bool:
        """Whether a step may find the end of the data."""
        return self.steps is None and not self.endless

    @property
    def form(self) -> Form:
        """Returns what a step keeps of the source, in place of its data."""
        return Form(self.may_end, self.totals_known, self.cuts_each, False)

    @property
    def enterable(self) -> bool:
        """Whether a resumed run uses `pass_over` and `pass_from`.

        They read again, but do not do the work of the batches before.
        """
        return False

    @property
    def reads(self) -> str:
        """Returns in words what each of several workers reads."""
        return "its own rows"

    @property
    def arrays(self) -> Arrays | None:
        """Returns the source whose arrays in memory passes read, if one is."""
        return None

    @abc.abstractmethod
    def pass_dataset(self, index: Any, local: LocalReplicas) -> tf.data.Dataset:
        """Returns pass `index` (integer or tensor), ending with the data."""

    def pass_from(
        self, index: Any, local: LocalReplicas, start: int
    ) -> tf.data.Dataset:
        """Returns pass `index` from its global batch `start` on."""
        return self.pass_dataset(index, local).skip(start * local.count)

    def pass_over(self, passes: int) -> None:
        """Does what reading passes does: a shuffle draws its next order."""
        del passes

    @abc.abstractmethod
    def example(self) -> Any:
        """Returns the spec of a batch: `TensorSpec`s with batch size None."""

    def length(self) -> str:
        """Returns the length of the data in words."""
        return f"{self.steps or 'an unknown number of'} batches"

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a text that differs for other data of the same shape.

        A fingerprint of a batch uses only the targets if there are any: inputs
        may be augmented at random, and then differ between workers.
        """

    @property
    def unrepeatable(self) -> str:
        """Returns why the order differs between processes; "" if not."""
        return ""

    def anew(self) -> Source:
        """Returns the same data, to be read again from its beginning.

        Raises:
            ConfigurationError: This process cannot read it again.
        """
        if self.seekable:
            return self
        raise ConfigurationError(
            "on_nan='restore' reads data again from its beginning. Received: "
            f"{self.kind}, which can be read once in a process. Pass arrays, "
            "a RandomAccess or a tf.data.Dataset, or use on_nan='stop'."
        )

    @property
    def kind(self) -> str:
        """Returns in words what the data is."""
        return "data of this kind"

    def broken(self) -> str:
        """Looks for what cannot be read, after an error; "" for nothing."""
        return ""

    def rows(self) -> Rows | None:
        """Returns the arrays if batches are rows of arrays, else None."""
        return None

    def shards(self, count: int) -> list[tf.data.Dataset]:
        """Splits a pass for workers that read independently.

        Args:
            count: Number of workers.

        Returns:
            `count` datasets of whole batches of data; or one dataset, of which
            worker w takes the batches w, w + count, w + 2 * count ...
        """
        del count
        whole = self.pass_dataset(0, LocalReplicas(0, 1, 1))
        return [whole.map(lambda data, local, total: data)]


class BatchSource(Source):
    """A source that reads whole batches.

    The batches are global. If their totals are not known, each batch is for
    one replica. A step may take batches before they are split for the replicas
    (`feed.next_batch`).

    Attributes:
        early: Whether passes have the rows of a process alone, so that a step
            cannot take whole batches.
    """

    early: bool = False

    @property
    def form(self) -> Form:
        """Returns what a step keeps of the source."""
        return dataclasses.replace(super().form, uncut=not self.early)

    @property
    def reads(self) -> str:
        """Returns in words what each of several workers reads."""
        return (
            "every batch and keeps its rows of it; arrays, or a "
            "mgpu_tf.RandomAccess, give each worker its own rows alone"
        )

    @abc.abstractmethod
    def batches(self, index: Any) -> tf.data.Dataset:
        """Returns the batches of pass `index` (integer or tensor)."""

    def batches_from(self, index: Any, start: int) -> tf.data.Dataset:
        """Returns the batches of pass `index` from `start` on."""
        batches = self.batches(index)
        return structures.not_empty(batches.skip(start) if start else batches)

    def pass_dataset(self, index: Any, local: LocalReplicas) -> tf.data.Dataset:
        """Returns pass `index`, split for the replicas of a process."""
        return self.pass_from(index, local, 0)

    def pass_from(
        self, index: Any, local: LocalReplicas, start: int
    ) -> tf.data.Dataset:
        """Returns pass `index` from a batch on, split for the replicas."""
        if self.totals_known:
            batches = self.batches_from(index, start)
            return cut(batches, local, each=self.cuts_each)
        sized = _sized(self.batches(index))
        return repeated(sized, local).skip(start * local.count)

    def shards(self, count: int) -> list[tf.data.Dataset]:
        """Returns the batches, which the workers share."""
        del count
        return [self.batches(0)]


class DatasetSource(BatchSource):
    """A `tf.data.Dataset` of global batches.

    A worker reads the elements that come before the maps of the dataset and
    maps its own rows alone. Where that is not known to give the same batches
    (`data.early_cut`), it reads all of the dataset and keeps its rows.

    Args:
        dataset: The batches.
        early: Whether to take the rows of a process before the maps.
    """

    def __init__(self, dataset: tf.data.Dataset, early: bool = False) -> None:
        self._dataset = dataset
        self._spec = structures.specs_of_elements(dataset.element_spec)
        structures.check_batched(dataset.element_spec)
        cardinality = int(dataset.cardinality())
        if cardinality == 0:
            raise ConfigurationError(
                "A dataset must have one batch or more. Received: a dataset "
                "without elements."
            )
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY
        self.steps = cardinality if cardinality >= 0 else None
        self._cut = early_cut_of(dataset)
        self.early = early and self._parts is not None

    @functools.cached_property
    def _parts(self) -> EarlyCut | None:
        cut = self._cut
        if not isinstance(cut, EarlyCut) or cut.elements is None:
            return None
        return cut

    @property
    def may_differ(self) -> bool:
        """Whether batches are made in several places, or by Python."""
        return not batches_at_end(self._dataset)

    @property
    def enterable(self) -> bool:
        """Whether the batches before a position need not be mapped."""
        if not self.endless and self.steps is None:
            return False
        return self._parts is not None and not self._parts.counts

    @property
    def reads(self) -> str:
        """Returns in words what each of several workers reads."""
        if self.early:
            return (
                "every element before the maps of the dataset, and maps its "
                "own rows"
            )
        reason = self._cut.reason or (
            "" if self._parts else "TensorFlow cannot change its graph"
        )
        return super().reads + (f" ({reason})" if reason else "")

    def batches(self, index: Any) -> tf.data.Dataset:
        """Returns the dataset; `index` does not matter."""
        del index
        return self._dataset

    def batches_from(self, index: Any, start: int) -> tf.data.Dataset:
        """Returns the batches from `start` on; maps only these if it can."""
        if start and self._parts is not None and self.enterable:
            return self._parts.batches(start)
        return super().batches_from(index, start)

    def pass_from(
        self, index: Any, local: LocalReplicas, start: int
    ) -> tf.data.Dataset:
        """Returns the batches from `start` on, split for the replicas."""
        if self.early and self._parts is not None:
            return self._parts.rows(local, start)
        return super().pass_from(index, local, start)

    def pass_over(self, passes: int) -> None:
        """Reads the elements before the maps."""
        if self._parts is not None:
            self._parts.read(passes)

    def shards(self, count: int) -> list[tf.data.Dataset]:
        """Returns the batches of each worker, or all of them to share."""
        shares = self._parts and self._parts.shares(count)
        return shares or super().shards(count)

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec

    def fingerprint(self) -> str:
        """Returns the operations of the pipeline, and a hash of its graph."""
        return self.order.fingerprint

    @property
    def unrepeatable(self) -> str:
        """Returns why the order differs between processes; "" if not."""
        return self.order.unrepeatable

    def anew(self) -> Source:
        """Returns the same dataset, its orders at their beginning."""
        try:
            return DatasetSource(anew(self._dataset))
        except (tf.errors.OpError, message.DecodeError) as error:
            raise ConfigurationError(
                "on_nan='restore' reads data again from its beginning. "
                "Received: a tf.data.Dataset whose graph TensorFlow cannot "
                f"write ({type(error).__name__}). Pass arrays or a "
                "RandomAccess, or use on_nan='stop'."
            ) from None

    @functools.cached_property
    def order(self) -> Order:
        """Returns the order of the elements."""
        return order_of(self._dataset)


class FunctionSource(BatchSource):
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
        balance = balance_of(strategy)
        if balance.shares is not None or balance.measured:
            raise ConfigurationError(
                "balance divides global batches, and a dataset_fn makes the "
                "batches of each worker itself. Received: a dataset_fn with "
                f"balance={str(balance)!r}. Leave balance out, or give a "
                "dataset of global batches."
            )
        self._dataset_fn, self._strategy = dataset_fn, strategy
        self._dataset = dataset_fn(topology_of(strategy).input_context())
        if not isinstance(self._dataset, tf.data.Dataset):
            raise ConfigurationError(
                "A dataset_fn must return a tf.data.Dataset. Received: "
                f"{type(self._dataset).__name__}."
            )
        structures.check_batched(self._dataset.element_spec)
        self._spec = structures.specs_of_elements(self._dataset.element_spec)
        cardinality = int(self._dataset.cardinality())
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY

    @property
    def reads(self) -> str:
        """Returns in words what each of several workers reads."""
        return "what the function returns for it"

    def batches(self, index: Any) -> tf.data.Dataset:
        """Returns the dataset; `index` does not matter."""
        del index
        return self._dataset

    def shards(self, count: int) -> list[tf.data.Dataset]:
        """Returns the dataset of the function for each of `count` workers."""
        contexts = [
            tf.distribute.InputContext(count, index, count)
            for index in range(count)
        ]
        return [self._dataset_fn(context) for context in contexts]

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec

    def anew(self) -> Source:
        """Returns what the function returns when it is called again."""
        return FunctionSource(self._dataset_fn, self._strategy)

    def fingerprint(self) -> str:
        """Returns a constant: each worker has its own data."""
        return "a dataset_fn"


class MappedSource(Source):
    """A source that applies a function to the batches of another source."""

    def __init__(self, source: Source, function: Callable[[Any], Any]) -> None:
        self._source = source
        self._function = function
        self.steps, self.endless = source.steps, source.endless
        self.seekable = source.seekable
        self.totals_known = source.totals_known
        self.repeats = source.repeats
        self.batch_size = source.batch_size
        self.portable = source.portable
        self.epochs, self.row_order = source.epochs, source.row_order

    @property
    def enterable(self) -> bool:
        """Whether the source is."""
        return self._source.enterable

    def pass_over(self, passes: int) -> None:
        """Does that of the source."""
        self._source.pass_over(passes)

    @property
    def arrays(self) -> Arrays | None:
        """Returns that of the source."""
        return self._source.arrays

    def pass_dataset(self, index: Any, local: LocalReplicas) -> tf.data.Dataset:
        """Returns pass `index` of the source, mapped."""
        return self._mapped(self._source.pass_dataset(index, local))

    def pass_from(
        self, index: Any, local: LocalReplicas, start: int
    ) -> tf.data.Dataset:
        """Returns pass `index` from a batch on, mapped."""
        return self._mapped(self._source.pass_from(index, local, start))

    def _mapped(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.map(
            lambda data, local, total: (self._function(data), local, total)
        )

    def rows(self) -> Rows | None:
        """Returns the rows of the source, mapped when they are gathered."""
        inner = self._source.rows()
        if inner is None:
            return None
        if inner.finish is None:
            return dataclasses.replace(inner, finish=self._function)
        before, after = inner.finish, self._function
        return dataclasses.replace(
            inner, finish=lambda batch: after(before(batch))
        )

    def shards(self, count: int) -> list[tf.data.Dataset]:
        """Returns the shards of the source, mapped."""
        return [
            shard.map(whole(shard.element_spec, self._function))
            for shard in self._source.shards(count)
        ]

    def example(self) -> Any:
        """Returns the spec of a mapped batch."""
        concrete = tf.function(self._function).get_concrete_function(
            self._source.example()
        )
        return structures.spec_of(concrete.structured_outputs)

    @property
    def reads(self) -> str:
        """Returns that of the source."""
        return self._source.reads

    @property
    def unrepeatable(self) -> str:
        """Returns that of the source."""
        return self._source.unrepeatable

    def broken(self) -> str:
        """Returns that of the source."""
        return self._source.broken()

    def anew(self) -> Source:
        """Returns the source anew, mapped."""
        return MappedSource(self._source.anew(), self._function)

    def length(self) -> str:
        """Returns that of the source."""
        return self._source.length()

    def fingerprint(self) -> str:
        """Returns that of the source."""
        return self._source.fingerprint()


def _sized(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns per-replica batches into elements with an unknown total."""

    def element(data: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
        return data, batch_size(data), tf.constant(-1, tf.int64)

    return dataset.map(whole(dataset.element_spec, element))


def repeated(dataset: tf.data.Dataset, local: LocalReplicas) -> tf.data.Dataset:
    """Gives replicas with the same rows an element each."""
    if local.same_rows_here == 1:
        return dataset
    return dataset.flat_map(
        lambda *element: tf.data.Dataset.from_tensors(element).repeat(
            local.same_rows_here
        )
    )


def cut(
    dataset: tf.data.Dataset, local: LocalReplicas, *, each: bool = False
) -> tf.data.Dataset:
    """Splits global batches into the elements of a process's replicas.

    Args:
        dataset: Global batches.
        local: The replicas.
        each: Whether each array is cut by its own number of rows.
    """

    def rows(data: Any, replica: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
        size = batch_size(data)
        if local.total == 1:
            return data, size, size
        low, high = local.rows_of(size, replica)
        if each:
            own = structures.rows_of_each(data, local, replica)
            return own, high - low, size
        with tf.control_dependencies(structures.check_sizes(data, size)):
            size = tf.identity(size)
        computed = structures.or_another(low, high, size)
        return structures.rows(data, *computed), high - low, size

    def every(data: Any) -> tf.data.Dataset:
        return tf.data.Dataset.range(local.count).map(
            lambda replica: rows(data, replica)
        )

    spec = dataset.element_spec
    if local.count == 1:
        return dataset.map(whole(spec, lambda data: rows(data, 0)))
    return dataset.flat_map(whole(spec, every))
