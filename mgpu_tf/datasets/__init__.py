"""Data sets by name: those of this package, and those of TFDS.

    splits = load("digits")
    trainer.fit(**splits.training(batch_size=64), epochs=5)
    trainer.evaluate(**splits.testing(batch_size=64))

`digits`, `tabular` and `images` need no download. Sets are prepared once by
`tensorflow_datasets` and kept in its folder; a lock makes processes that start
together wait for the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu_tf.datasets.files import by_file, records
from mgpu_tf.datasets.image_folder import image_folder
from mgpu_tf.datasets.parquet import parquet
from mgpu_tf.datasets.record_index import indexed_records
from mgpu_tf.datasets.text_folder import text_folder
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.folders import check_path, is_address, open_regular
from mgpu_tf.names import DATASETS
from mgpu_tf.runtime.remote import check_reachable

if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_datasets as tfds

__all__ = [
    "NAMES",
    "Arrays",
    "Splits",
    "Streams",
    "image_folder",
    "indexed_records",
    "load",
    "parquet",
    "records",
    "text_folder",
]

Arrays = tuple[np.ndarray, np.ndarray]

NAMES = tuple(DATASETS)

_SHUFFLE_BUFFER = 10_000


@dataclasses.dataclass(frozen=True)
class Splits:
    """A classification set in memory.

    Attributes:
        train: Inputs `[examples, ...]`, float32, and labels `[examples]`.
        test: The same for testing.
        num_classes: Labels are 0 to num_classes - 1.
    """

    train: Arrays
    test: Arrays
    num_classes: int

    @property
    def num_examples(self) -> int:
        """Returns the number of examples to train on."""
        return len(self.train[1])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Returns the shape of an example."""
        return self.train[0].shape[1:]

    def training(self, batch_size: int) -> dict[str, Any]:
        """Returns arguments of `Trainer.fit`."""
        x, y = self.train
        return {"x": x, "y": y, "batch_size": batch_size}

    def testing(self, batch_size: int) -> dict[str, Any]:
        """Returns arguments of `Trainer.evaluate`."""
        x, y = self.test
        return {"x": x, "y": y, "batch_size": batch_size}


@dataclasses.dataclass(frozen=True)
class Streams:
    """A classification set that is read from its files.

    Attributes:
        builder: The prepared set.
        input_shape: The shape of an example.
        num_classes: Labels are 0 to num_classes - 1.
        scale: Inputs are divided by it.
        seed: Decides the order of training.
        deterministic: Whether all workers read all files.
    """

    builder: tfds.core.DatasetBuilder
    input_shape: tuple[int, ...]
    num_classes: int
    scale: float
    seed: int = 0
    deterministic: bool = True

    @property
    def num_examples(self) -> int:
        """Returns the number of examples to train on."""
        return self.builder.info.splits["train"].num_examples

    def training(self, batch_size: int) -> dict[str, Any]:
        """Returns arguments of `Trainer.fit`."""
        files = self.builder.info.splits["train"].num_shards

        def pipeline(first: int, step: int, batch: int) -> tf.data.Dataset:
            import tensorflow as tf
            import tensorflow_datasets as tfds

            context = tf.distribute.InputContext(step, first)
            config = tfds.ReadConfig(
                input_context=context if step > 1 else None,
                shuffle_seed=self.seed,
                try_autocache=False,
            )
            data = self._read("train", read_config=config)
            data = data.shuffle(_SHUFFLE_BUFFER, seed=self.seed)
            return self._batches(data, batch)

        if self.deterministic:
            return {"x": pipeline(0, 1, batch_size)}
        return {"x": by_file(files, pipeline, batch_size)}

    def testing(self, batch_size: int) -> dict[str, Any]:
        """Returns arguments of `Trainer.evaluate`."""
        splits = self.builder.info.splits
        name = next(n for n in ("test", "validation", "train") if n in splits)
        return {"x": self._batches(self._read(name), batch_size)}

    def _read(self, split: str, **options: Any) -> tf.data.Dataset:
        return self.builder.as_dataset(
            split=split, as_supervised=True, shuffle_files=False, **options
        )

    def _batches(self, data: tf.data.Dataset, size: int) -> tf.data.Dataset:
        """Scales whole batches: what is shuffled and copied are bytes."""
        import tensorflow as tf

        def scaled(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.cast(x, tf.float32) / self.scale, tf.cast(y, tf.int32)

        return data.batch(size).map(scaled, num_parallel_calls=tf.data.AUTOTUNE)


@checked
def load(
    name: str,
    data_dir: str | None = None,
    *,
    seed: int = 0,
    deterministic: bool = True,
) -> Splits | Streams:
    """Loads a set, preparing it where that has not been done.

    Args:
        name: `digits`, `tabular`, `images` or `images/SIDE`, or a supervised
            classification set of TFDS such as `mnist`.
        data_dir: Where prepared sets are kept; by default the folder of
            TFDS, which the variable TFDS_DATA_DIR sets.
        seed: Decides the order of what is read from files.
        deterministic: As for `records`.

    Returns:
        The set, in memory where it is of this package and small.

    Raises:
        ConfigurationError: The name is unknown, the set can neither be found
            nor made, or the folder cannot be written.
    """
    if data_dir is not None:
        check_path("data_dir", data_dir)
        check_reachable("data_dir", data_dir)
    own = _own(name)
    if own is None:
        return _streams(_of_tfds(name, data_dir), 255.0, seed, deterministic)
    options = own.options_of(name) if hasattr(own, "options_of") else {}
    builder = _prepare(own, data_dir, own.NUM_SHARDS, **options)
    if not own.IN_MEMORY:
        return _streams(builder, own.SCALE, seed, deterministic)
    label = builder.info.supervised_keys[1]
    return Splits(
        _arrays(builder, "train", own.SCALE),
        _arrays(builder, "test", own.SCALE),
        builder.info.features[label].num_classes,
    )


def _own(name: str) -> Any:
    """Returns the builder of a set of this package, None for another."""
    base, size, _ = name.partition("/")
    if base not in DATASETS:
        return None
    module, _, builder = DATASETS[base].partition(":")
    own = getattr(importlib.import_module(module), builder)
    return own if not size or hasattr(own, "options_of") else None


def _of_tfds(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError):
        names = [*NAMES, *tfds.list_builders(with_community_datasets=False)]
        message = unknown_name("dataset", name, names)
        raise ConfigurationError(
            f"{message.partition(' Valid:')[0]} Valid: {', '.join(NAMES)}, "
            "and the sets of TFDS."
        ) from None
    if not builder.info.splits:
        _prepare(lambda **_: builder, data_dir, None)
    return builder


def _streams(
    builder: tfds.core.DatasetBuilder,
    scale: float,
    seed: int,
    deterministic: bool,
) -> Streams:
    keys, features = builder.info.supervised_keys, builder.info.features
    if keys is None or not hasattr(features[keys[1]], "num_classes"):
        raise ConfigurationError(
            "A data set by name must have an input and a class for each "
            f"example. Received: {builder.name!r} with {list(features)}. Pass "
            "its tf.data.Dataset to Trainer.fit."
        )
    shape = features[keys[0]].shape
    if None in shape:
        raise ConfigurationError(
            "A data set by name must have examples of one shape. Received: "
            f"{builder.name!r} with examples of shape {shape}. Resize them in "
            "a tf.data.Dataset for Trainer.fit."
        )
    if features[keys[0]].np_dtype != np.uint8:
        scale = 1.0
    return Streams(
        builder,
        tuple(shape),
        features[keys[1]].num_classes,
        scale,
        seed,
        deterministic,
    )


def _prepare(
    builder_class: Callable[..., tfds.core.DatasetBuilder],
    data_dir: str | None,
    shards: int | None,
    **options: Any,
) -> tfds.core.DatasetBuilder:
    import tensorflow_datasets as tfds

    folder = os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR)
    try:
        with _locked(folder), contextlib.redirect_stdout(io.StringIO()):
            tfds.disable_progress_bar()
            builder = builder_class(data_dir=data_dir, **options)
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(num_shards=shards)
            )
    except PermissionError as error:
        raise ConfigurationError(_not_writable(data_dir, error)) from None
    except Exception as error:
        if shards is not None:
            if isinstance(error, OSError):
                raise ConfigurationError(
                    _not_writable(data_dir, error)
                ) from None
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"The data set {builder_class().name!r} must be in the folder of "
            "TFDS, or a download must be possible. Received: "
            f"data_dir={folder!r} without it, and no download ({reason:.120}). "
            "Run `tfds build` where there is a network, and copy its folder."
        ) from None
    return builder


def _not_writable(data_dir: str | None, error: OSError) -> str:
    return (
        "data_dir must be a folder that can be written. Received: "
        f"data_dir={data_dir!r} ({error})."
    )


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    if is_address(folder):
        yield  # Such a file system locks nothing.
        return
    os.makedirs(folder, exist_ok=True)
    with open_regular(os.path.join(folder, ".mgpu_tf.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _arrays(
    builder: tfds.core.DatasetBuilder, split: str, scale: float
) -> Arrays:
    import tensorflow_datasets as tfds

    examples = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    x, y = (examples[key] for key in builder.info.supervised_keys)
    return x.astype(np.float32) / np.float32(scale), y.astype(np.int32)
