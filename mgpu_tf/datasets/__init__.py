"""Data sets that need no download, as arrays.

    splits = load("digits")
    x, y = splits.train

Sets are prepared once by `tensorflow_datasets` and kept in its folder; a
lock makes processes that start together wait for the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mgpu_tf.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Arrays = tuple[np.ndarray, np.ndarray]

NAMES = ("digits",)


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
    def input_shape(self) -> tuple[int, ...]:
        """Returns the shape of an example."""
        return self.train[0].shape[1:]


def load(name: str, data_dir: str | None = None) -> Splits:
    """Loads a set, preparing it where that has not been done.

    Args:
        name: `digits`.
        data_dir: Where prepared sets are kept; by default the folder of
            TFDS, which the variable TFDS_DATA_DIR sets.

    Returns:
        The set.

    Raises:
        ConfigurationError: The name is unknown, or the folder cannot be
            written.
    """
    if name not in NAMES:
        raise ConfigurationError(unknown_name("dataset", name, NAMES))
    from mgpu_tf.datasets.digits import Digits

    builder = _prepare(Digits, data_dir)
    train, test = (_arrays(builder, split) for split in ("train", "test"))
    return Splits(train, test, builder.info.features["label"].num_classes)


def _prepare(
    builder_class: type[tfds.core.GeneratorBasedBuilder],
    data_dir: str | None,
) -> tfds.core.DatasetBuilder:
    import tensorflow_datasets as tfds

    try:
        with (
            _locked(data_dir or tfds.core.constants.DATA_DIR),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            tfds.disable_progress_bar()
            builder = builder_class(data_dir=data_dir)
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(
                    num_shards=builder_class.NUM_SHARDS
                )
            )
    except OSError as error:
        raise ConfigurationError(
            "data_dir must be a folder that can be written. Received: "
            f"data_dir={data_dir!r} ({error})."
        ) from None
    return builder


@contextlib.contextmanager
def _locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    folder = os.path.expanduser(os.fspath(folder))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".mgpu_tf.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _arrays(builder: tfds.core.DatasetBuilder, split: str) -> Arrays:
    import tensorflow_datasets as tfds

    examples = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    scale = np.float32(builder.SCALE)
    inputs = examples["image"].astype(np.float32) / scale
    return inputs, examples["label"].astype(np.int32)
