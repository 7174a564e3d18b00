"""Files in one folder for each class, as Keras reads them.

paths, labels, names = files_of("photos", "int", None, "images", (".png",))
data = labelled_files(paths, labels, names, "int", decode)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_tf.datasets.random_access import RandomAccess, Table
from mgpu_tf.errors import ConfigurationError

_LABELS = ("int", "categorical", None)


def files_of(
    directory: str | os.PathLike[str],
    label_mode: str | None,
    class_names: Sequence[str] | None,
    what: str,
    endings: tuple[str, ...],
) -> tuple[list[str], list[int], list[str]]:
    """Finds the files, their labels and the names of the labels.

    Args:
        directory: A folder with a folder for each class; any folder with
            `label_mode=None`.
        label_mode: "int", "categorical" or None.
        class_names: The folders of the labels 0, 1, ...; by default all, in
            alphabetical order.
        what: What the files are, for errors.
        endings: Of their names, in small letters.

    Raises:
        ConfigurationError: An argument is none of these, or there is no
            file.
    """
    if label_mode not in _LABELS:
        raise ConfigurationError(
            "label_mode must be 'int', 'categorical' or None. Received: "
            f"{label_mode!r}."
        )
    directory = os.fspath(directory)
    try:
        below = sorted(
            entry.name for entry in os.scandir(directory) if entry.is_dir()
        )
    except OSError as error:
        raise ConfigurationError(
            "directory must be a folder that can be read. Received: "
            f"{directory!r} ({error.strerror})."
        ) from None
    if label_mode is None:
        names, folders = [""], [directory]
    else:
        names = list(below if class_names is None else class_names)
        unknown = sorted(set(names) - set(below))
        if unknown:
            raise ConfigurationError(
                "class_names must be folders of the directory. Received: "
                f"{', '.join(unknown)}, not below {directory!r}."
            )
        folders = [os.path.join(directory, name) for name in names]
    paths, labels = [], []
    for label, folder in enumerate(folders):
        for path, inner, files in os.walk(folder, followlinks=True):
            inner.sort()
            for name in sorted(files):
                if name.lower().endswith(endings):
                    paths.append(os.path.join(path, name))
                    labels.append(label)
    if not paths:
        raise ConfigurationError(
            f"directory must hold {what} ({', '.join(endings)}), in a folder "
            f"for each class unless label_mode=None. Received: {directory!r} "
            "without any."
        )
    return paths, labels, names


def labelled_files(
    paths: list[str],
    labels: list[int],
    names: list[str],
    label_mode: str | None,
    read: Callable[[Any], Any],
) -> RandomAccess:
    """Makes examples of files; workers read and decode their own.

    Args:
        paths: Of the files.
        labels: The number of the class of each.
        names: Of the classes.
        label_mode: "int" for labels of type int32, "categorical" for one-hot
            float32, None for files alone.
        read: From a path, a scalar string, to an example, in the graph.
    """
    import tensorflow as tf

    def labelled(path: tf.Tensor, label: tf.Tensor) -> tuple[Any, Any]:
        if label_mode == "categorical":
            return read(path), tf.one_hot(label, len(names))
        return read(path), label

    with tf.device("CPU:0"):
        files = tf.constant(paths)
        classes = tf.constant(labels, tf.int32)
    if label_mode is None:
        return RandomAccess(Table(files, len(paths)), read)
    data = RandomAccess(Table((files, classes), len(paths)), labelled)
    data.class_names = tuple(names)
    return data
