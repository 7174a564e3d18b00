"""Batches that Python makes: `keras.utils.PyDataset` and generators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.cluster import heartbeat
from mgpu_tf.data import structures
from mgpu_tf.data.sources.batches import BatchSource, Epochs, RowOrder, Source
from mgpu_tf.errors import ConfigurationError

# Batches that show which dimensions vary, such as padded lengths.
PEEKED = 2
_END = object()


class _PyDatasetEpochs(Epochs):
    """Calls a dataset as Keras does: before the first epoch, it is ended.

    Its calls may change how many batches there are. Keras does not read more
    of them than there were before the first epoch.
    """

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self._dataset = dataset
        self._most = dataset.num_batches
        self._within = False

    def reset(self) -> None:
        self._most = self._dataset.num_batches
        self.end()

    def begin(self) -> None:
        if not self._within:
            self._dataset.on_epoch_begin()
        self._within = True

    def end(self) -> None:
        self._dataset.on_epoch_end()
        self._within = False

    def length(self) -> int | None:
        now = self._dataset.num_batches
        if self._most is None or now is None or not _has_hooks(self._dataset):
            return None
        return min(self._most, now)


class PyDatasetSource(BatchSource):
    """A `keras.utils.PyDataset` of global batches.

    Every worker makes every batch and keeps its rows. `workers` threads make
    them, in order. `on_epoch_begin` and `on_epoch_end` are called around each
    epoch, and the second before the first epoch too, as Keras does. An epoch
    ends where the dataset has fewer batches since.

    Args:
        dataset: The batches.
        shuffle: Whether batches come in a new order in each pass.
        seed: Decides the order, together with the pass.
    """

    def __init__(
        self, dataset: keras.utils.PyDataset, shuffle: bool, seed: int
    ) -> None:
        self._dataset = dataset
        self.row_order: RowOrder = RowOrder(shuffle, seed)
        self.epochs = _PyDatasetEpochs(dataset)
        self.steps = dataset.num_batches
        self.endless = self.steps is None
        if self.steps == 0:
            raise ConfigurationError(
                "A PyDataset must have one batch or more. Received: "
                f"{type(dataset).__name__} with num_batches=0."
            )
        peeked = min(PEEKED, self.steps or PEEKED)
        batches = [_batch(dataset[index]) for index in range(peeked)]
        self._spec = _common_spec(batches)
        self._fingerprint = structures.targets_digest(batches[0])

    def batches(self, index: Any) -> tf.data.Dataset:
        """Returns pass `index`, made as it is read."""
        return _dataset_of(self._batches, self._spec, [index])

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec

    def fingerprint(self) -> str:
        """Returns a hash of the targets of the first batch."""
        return self._fingerprint

    @property
    def kind(self) -> str:
        """Returns in words what the data is."""
        return (
            f"{type(self._dataset).__name__}, a PyDataset that changes at the "
            "end of a pass"
        )

    def anew(self) -> Source:
        """Returns itself, if no pass changes the batches of the next."""
        return super().anew() if _has_hooks(self._dataset) else self

    def _batches(self, index: Any) -> Iterator[Any]:
        dataset = self._dataset
        order: Iterator[int] = itertools.count()
        if self.steps is not None:
            length = self.epochs.length()
            number = self.steps if length is None else dataset.num_batches
            indices = np.arange(number)
            if self.row_order.shuffle:
                seeds = [self.row_order.seed, int(index)]
                generator = np.random.default_rng(seeds)
                generator.shuffle(indices)
            order = iter(indices[:length].tolist())
        threads = max(1, dataset.workers)
        ahead = max(threads, dataset.max_queue_size) if threads > 1 else 1
        with futures.ThreadPoolExecutor(threads) as pool:
            waiting = [
                pool.submit(dataset.__getitem__, position)
                for position in itertools.islice(order, ahead)
            ]
            while waiting:
                batch = waiting.pop(0).result()
                for position in itertools.islice(order, 1):
                    waiting.append(pool.submit(dataset.__getitem__, position))
                yield _batch(batch)


def _has_hooks(dataset: keras.utils.PyDataset) -> bool:
    """Returns whether the author's code runs where epochs begin or end."""
    own, base = type(dataset), keras.utils.PyDataset
    hooks = ("on_epoch_begin", "on_epoch_end")
    return any(getattr(own, name) is not getattr(base, name) for name in hooks)


class GeneratorSource(BatchSource):
    """A Python iterator of global batches, which can be read once.

    Args:
        iterator: Yields `x`, `(x, y)` or `(x, y, sample_weight)`.
    """

    repeats = False
    steps = None

    def __init__(self, iterator: Iterator[Any]) -> None:
        peeked = [_batch(b) for b in itertools.islice(iterator, PEEKED)]
        if not peeked:
            raise ConfigurationError(
                "A generator must yield one batch or more. Received: a "
                "generator without elements."
            )
        self._spec = _common_spec(peeked)
        self._fingerprint = structures.targets_digest(peeked[0])
        self._rest = itertools.chain(peeked, map(_batch, iterator))

    @property
    def kind(self) -> str:
        """Returns in words what the data is."""
        return "a generator"

    def batches(self, index: Any) -> tf.data.Dataset:
        """Returns what is left of the iterator."""
        del index
        return _dataset_of(lambda: self._rest, self._spec)

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec

    def fingerprint(self) -> str:
        """Returns a hash of the targets of the first batch."""
        return self._fingerprint


def _dataset_of(
    batches: Callable[..., Iterator[Any]], spec: Any, arguments: Any = None
) -> tf.data.Dataset:
    """Makes a dataset, which cannot have None from Python, of batches."""
    present = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]

    def leaves(*given: Any) -> Iterator[Any]:
        iterator = iter(batches(*given))
        while True:
            with heartbeat.reading():
                batch = next(iterator, _END)
            if batch is _END:
                return
            _check_like(batch, spec)
            yield tuple(t for t in tf.nest.flatten(batch) if t is not None)

    def packed(*leaves: Any) -> Any:
        queue = iter(leaves)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(queue), spec
        )

    return tf.data.Dataset.from_generator(
        leaves, args=arguments, output_signature=tuple(present)
    ).map(packed)


def _check_like(batch: Any, spec: Any) -> None:
    """Refuses a batch of another structure or type than the first ones."""
    try:
        tf.nest.assert_same_structure(spec, batch)
    except (TypeError, ValueError):
        raise ConfigurationError(
            "All batches must have one structure. Received: "
            f"{structures.spec_of(batch)} after {spec}."
        ) from None
    for leaf, wanted in zip(
        tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True
    ):
        dtype = getattr(leaf, "dtype", None)
        if dtype != getattr(wanted, "dtype", None):
            raise ConfigurationError(
                "All batches must have one type. Received: "
                f"{getattr(dtype, 'name', dtype)} after "
                f"{getattr(wanted.dtype, 'name', None)}. Convert them, such as "
                "with np.float32."
            )


def _batch(data: Any) -> Any:
    data = structures.batch_of(data)
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ConfigurationError(
            "A batch must hold arrays with the same number of examples. "
            f"Received: shapes {[tuple(leaf.shape) for leaf in leaves]}."
        )
    return data


def _common_spec(batches: list[Any]) -> Any:
    return tf.nest.map_structure(
        _common, *(structures.spec_of(batch) for batch in batches)
    )


def _common(*specs: Any) -> Any:
    first = specs[0]
    if not isinstance(first, tf.TensorSpec):
        return first
    shape = first.shape
    for spec in specs[1:]:
        shape = shape.most_specific_compatible_shape(spec.shape)
    return tf.TensorSpec(shape, first.dtype)
