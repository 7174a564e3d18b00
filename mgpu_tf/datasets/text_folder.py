"""Folders of texts, one folder for each class.

    data = text_folder("reviews")
    data.class_names                    # ("bad", "good")
    trainer.fit(data, batch_size=64)

The examples are those of `keras.utils.text_dataset_from_directory`. Each
worker reads its own texts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_tf.datasets.class_folders import files_of, labelled_files
from mgpu_tf.datasets.random_access import RandomAccess
from mgpu_tf.errors import check_integer
from mgpu_tf.fields import checked

if TYPE_CHECKING:
    import tensorflow as tf

_ENDINGS = (".txt",)


@checked
def text_folder(
    directory: str | os.PathLike[str],
    *,
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    max_length: int | None = None,
) -> RandomAccess:
    """Reads text files by their number; the folder of a file is its class.

    Args:
        directory: A folder with a folder for each class, or with
            `label_mode=None` any folder with `.txt` files below it.
        label_mode: "int" for labels of type int32, "categorical" for one-hot
            float32, None for texts alone.
        class_names: The folders of the labels 0, 1, ...; by default all, in
            alphabetical order.
        max_length: Bytes after which a text is cut off.

    Returns:
        What `Trainer.fit` takes, with `class_names`: scalar strings.

    Raises:
        ConfigurationError: An argument is none of these, or there is no
            text.
    """
    import tensorflow as tf

    if max_length is not None:
        check_integer("max_length", max_length, 1)
    paths, labels, names = files_of(
        directory, label_mode, class_names, "texts", _ENDINGS
    )

    def text(path: tf.Tensor) -> tf.Tensor:
        found = tf.io.read_file(path)
        if max_length is not None:
            found = tf.strings.substr(found, 0, max_length)
        return found

    return labelled_files(paths, labels, names, label_mode, text)
