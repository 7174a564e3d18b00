"""Files in one folder for each class, as Keras reads them.

paths, labels, names = files_of("photos", "int", None, "images", (".png",))
data = labelled_files(paths, labels, names, "int", decode)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mgpu_tf.datasets.random_access import RandomAccess, Table
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import check_file, check_path

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
    directory = check_path("directory", directory)
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
        names = _names(class_names, below, directory)
        folders = [os.path.join(directory, name) for name in names]
    paths, labels = [], []
    for label, folder in enumerate(folders):
        for path in _below(folder, endings):
            paths.append(path)
            labels.append(label)
    if not paths:
        raise ConfigurationError(
            f"directory must hold {what} ({', '.join(endings)}), in a folder "
            f"for each class unless label_mode=None. Received: {directory!r} "
            "without any."
        )
    return paths, labels, names


def _names(class_names: Any, below: list[str], directory: str) -> list[str]:
    """Returns the folders of the labels 0, 1, and so on."""
    if class_names is None:
        return below
    if isinstance(class_names, str) or not isinstance(class_names, Sequence):
        raise ConfigurationError(
            "class_names must be a list of names. Received: "
            f"class_names={class_names!r}."
        )
    names = list(class_names)
    unknown = [str(name) for name in names if name not in below]
    if unknown:
        raise ConfigurationError(
            "class_names must be folders of the directory. Received: "
            f"{', '.join(unknown)}, not below {directory!r}."
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigurationError(
            "class_names must name each folder once. Received: "
            f"{twice[0]!r} {names.count(twice[0])} times."
        )
    return names


def _below(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yields the files below a folder in order.

    Raises:
        ConfigurationError: One is a pipe or device, of which to read waits.
    """
    for path, inner, files in os.walk(folder, followlinks=True):
        inner.sort()
        for name in sorted(files):
            if not name.lower().endswith(endings):
                continue
            file = os.path.join(path, name)
            check_file("directory", file)
            yield file


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
        data = RandomAccess(Table(files, len(paths)), read)
    else:
        data = RandomAccess(Table((files, classes), len(paths)), labelled)
        data.class_names = tuple(names)
    data.broken = lambda: _first_broken(paths, read)
    return data


def _first_broken(paths: list[str], read: Callable[[Any], Any]) -> str:
    """Returns the first file that cannot be read, and why; "" for none."""
    import tensorflow as tf

    for path in paths:
        try:
            with tf.device("CPU:0"):
                read(tf.constant(path))
        except tf.errors.OpError as error:
            said = (error.message or "").partition("\n")[0]
            return f"{path!r} ({said:.160})"
    return ""
