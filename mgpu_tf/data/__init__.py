"""Input: one order of examples, whatever the number of workers.

    source = as_source(x, y, batch_size=64, shuffle=True, seed=0)
    iterator = iter(distribute(source, strategy, epoch=3))

A source describes *global* batches. Global batch k holds the same examples on
one device and on any number of replicas; each replica takes its part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data.feed import Feed, distribute, drop, next_batch
from mgpu_tf.data.sources.arrays import (
    ArraySource,
    rows_of_arrays,
    split_arrays,
)
from mgpu_tf.data.sources.batches import (
    DatasetFn,
    DatasetSource,
    Form,
    FunctionSource,
    Source,
)
from mgpu_tf.data.sources.indexed import RandomAccessSource
from mgpu_tf.data.sources.python import GeneratorSource, PyDatasetSource
from mgpu_tf.data.sources.tasks import (
    PreprocessedSource,
    arrays_of,
    is_task,
    kept_order,
    preprocess_of,
)
from mgpu_tf.data.sources.weights import with_class_weight
from mgpu_tf.data.structures import NO_BATCH, NO_ROW, SIZES_DIFFER, pack
from mgpu_tf.datasets.random_access import RandomAccess
from mgpu_tf.errors import ConfigurationError, check_integer
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas.topology import balance_of

__all__ = [
    "NO_BATCH",
    "NO_ROW",
    "SIZES_DIFFER",
    "ArraySource",
    "DatasetFn",
    "DatasetSource",
    "Feed",
    "Form",
    "FunctionSource",
    "GeneratorSource",
    "PreprocessedSource",
    "PyDatasetSource",
    "RandomAccess",
    "RandomAccessSource",
    "Source",
    "arrays_of",
    "as_source",
    "batch_rows",
    "distribute",
    "drop",
    "is_task",
    "kept_order",
    "next_batch",
    "pack",
    "preprocess_of",
    "split_arrays",
    "with_class_weight",
]


# More rows are not numbered by all of TensorFlow's operations.
_MOST_ROWS = 2**31 - 1


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    strategy: tf.distribute.Strategy,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    seed: int = 0,
    steps: int | None = None,
) -> Source:
    """Makes a source of what Keras's `fit`, `evaluate` and `predict` take.

    Args:
        x: An array, or a list, tuple or dict of them, nested; a
            `RandomAccess`; a `tf.data.Dataset`, a `keras.utils.PyDataset` or
            a generator of global batches; or a function from
            `tf.distribute.InputContext` to a dataset batched with the
            per-replica size.
        y: Targets, for arrays; nested as well.
        sample_weight: Weights of shape `[examples, ...]`, for arrays.
        strategy: The strategy that the source will feed.
        batch_size: Global batch size, for arrays and examples by number; 32
            by default, or with `steps` what that number of batches needs.
        shuffle: Whether arrays, examples by number, and the batches of a
            PyDataset, come in a new order each epoch; "batch" shuffles
            within batches of arrays.
        seed: Decides the order, together with the epoch.
        steps: Steps that are wanted of a pass over arrays.

    Returns:
        The source.

    Raises:
        ConfigurationError: The data is of no known kind, or arguments are
            given that its kind has no use for.
    """
    if x is None:
        raise ConfigurationError(
            "Data must be arrays, a RandomAccess, a tf.data.Dataset, a "
            "PyDataset, a generator or a dataset_fn. Received: None."
        )
    kind = _kind_with_batches(x)
    is_known = isinstance(shuffle, bool | int) and shuffle in (0, 1)
    if not is_known and not (isinstance(shuffle, str) and shuffle == "batch"):
        raise ConfigurationError(
            "shuffle must be True, False or 'batch'. Received: "
            f"shuffle={shuffle!r}."
        )
    if kind is not None:
        _refuse_array_arguments(kind, y, sample_weight, batch_size)
    if isinstance(x, RandomAccess):
        _refuse_array_arguments("RandomAccess", y, sample_weight)
    if isinstance(x, tf.data.Dataset):
        local = topology_of(strategy).local
        # Shares that are measured change while passes are read.
        fixed = not balance_of(strategy).measured
        return DatasetSource(x, early=fixed and local.num_processes > 1)
    if isinstance(x, keras.utils.PyDataset):
        return PyDatasetSource(x, bool(shuffle), seed)
    if isinstance(x, Iterator):
        return GeneratorSource(x)
    if callable(x):
        return FunctionSource(x, strategy)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1, _MOST_ROWS)
    if isinstance(x, RandomAccess):
        return RandomAccessSource(x, batch_size, shuffle, seed, steps)
    return ArraySource(
        pack(x, y, sample_weight), batch_size, shuffle, seed, steps
    )


def batch_rows(x: Any) -> int:
    """Returns the rows of arrays that are one batch.

    Raises:
        ConfigurationError: They are no arrays, or of other lengths.
    """
    kind = _kind_with_batches(x)
    if x is None or kind is not None:
        raise ConfigurationError(
            "A batch must be arrays. Received: "
            f"{kind or type(x).__name__}. Pass the arrays of one batch."
        )
    return rows_of_arrays(x)


def is_batched(x: Any) -> bool:
    """Returns whether data comes in batches already."""
    return _kind_with_batches(x) is not None


def _kind_with_batches(x: Any) -> str | None:
    if inspect.isgeneratorfunction(x):
        raise ConfigurationError(
            "A generator is what a generator function returns. Received: the "
            f"function {x.__name__}. Pass {x.__name__}()."
        )
    if isinstance(x, tf.data.Dataset):
        return "tf.data.Dataset"
    if isinstance(x, keras.utils.PyDataset):
        return "PyDataset"
    if isinstance(x, Iterator):
        return "generator"
    return "dataset_fn" if callable(x) else None


def _refuse_array_arguments(
    kind: str, y: Any, sample_weight: Any, batch_size: int | None = None
) -> None:
    given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    names = [name for name, value in given.items() if value is not None]
    if names:
        size = "" if kind == "RandomAccess" else " and batch size"
        raise ConfigurationError(
            f"A {kind} brings its targets, weights{size} itself. "
            f"Received: {', '.join(names)} beside it. Leave out "
            f"{', '.join(names)}."
        )
