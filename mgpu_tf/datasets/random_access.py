"""Examples that are read by their number.

    data = RandomAccess(tfds.data_source("mnist", split="train"), map=parse)
    trainer.fit(data, batch_size=64)

A source is any object with `len(source)` and `source[number]`: a NumPy
memmap, `tfds.data_source`, a data set of array_record, grain, Hugging Face or
PyTorch. Each worker reads its own rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mgpu_tf.errors import ConfigurationError, check_integer


class RandomAccess:
    """Examples by their number, for `fit`, `evaluate` and `predict`.

    Global batch k has the same examples on any number of workers and
    replicas. Each worker reads its own rows. A resumed run reads nothing of
    what was done. With `shuffle=True` the order is a permutation of the whole
    source, which is computed and not held in memory.

    Example:
        >>> data = mgpu_tf.RandomAccess(source, map=decode)
        >>> trainer.fit(data, batch_size=64, epochs=5)

    Args:
        source: An object with `len(source)` and `source[number]`, which
            returns one example: `x`, `(x, y)` or `(x, y, sample_weight)`,
            where each may be a dict. `source.__getitems__(numbers)` is called
            in its place if it exists, with a list of numbers, for a list of
            examples. Several threads call them.
        map: A function of one example in TensorFlow operations, as of
            `tf.data.Dataset.map`: a tuple is passed as several arguments.
            What it gets must have one shape in all examples, such as encoded
            images; what it returns as well.
        threads: How many examples are read at a time; by default the number
            of processor cores and 4 more, at most 32.

    Attributes:
        class_names: The names of the labels 0, 1, ...; empty where the source
            does not have them.
        broken: Reads all until an example fails, and returns what it is; None
            where the only message is that of TensorFlow.

    Raises:
        ConfigurationError: The source has no length, no example or no
            `__getitem__`, or `map` is no function.
    """

    def __init__(
        self,
        source: Any,
        map: Callable[..., Any] | None = None,
        threads: int | None = None,
    ) -> None:
        kind = type(source)
        if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")) or (
            isinstance(source, (dict, str, bytes))
        ):
            raise ConfigurationError(
                "The source of a RandomAccess must have len(source) and "
                f"source[number]. Received: {kind.__name__}. Pass an object "
                "with both, or give fit the data itself."
            )
        if len(source) == 0:
            raise ConfigurationError(
                "The source of a RandomAccess must have one example or more. "
                f"Received: {kind.__name__} of length 0."
            )
        if map is not None and not callable(map):
            raise ConfigurationError(
                f"map must be a function of an example. Received: map={map!r}."
            )
        if threads is not None:
            check_integer("threads", threads, 1)
        self.source, self.map, self.threads = source, map, threads
        self.class_names: tuple[str, ...] = ()
        self.broken: Callable[[], str] | None = None

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.source)


class Table:
    """Examples whose rows are arrays of TensorFlow: read without Python.

    Args:
        arrays: Tensors `[examples, ...]`, nested.
        length: The number of examples.
    """

    def __init__(self, arrays: Any, length: int) -> None:
        self.arrays, self._length = arrays, length

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._length

    def __getitem__(self, number: int) -> Any:
        """Returns the rows of one example."""
        import tensorflow as tf

        return tf.nest.map_structure(lambda a: a[number], self.arrays)
