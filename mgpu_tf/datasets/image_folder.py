"""Folders of images, one folder for each class.

    data = image_folder("photos", image_size=(224, 224))
    data.class_names                    # ("cat", "dog")
    trainer.fit(data, batch_size=64)

The examples are those of `keras.utils.image_dataset_from_directory`. Each
worker reads and decodes its own images.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mgpu_tf.datasets.random_access import RandomAccess, Table
from mgpu_tf.errors import ConfigurationError

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
_LABELS = ("int", "categorical", None)


def image_folder(
    directory: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] = (256, 256),
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    interpolation: str = "bilinear",
) -> RandomAccess:
    """Reads images by their number; the folder of an image is its class.

    Args:
        directory: A folder with a folder for each class, or with
            `label_mode=None` any folder with images below it.
        image_size: Height and width in pixels that images are resized to.
        label_mode: "int" for labels of type int32, "categorical" for one-hot
            float32, None for images alone.
        class_names: The folders of the labels 0, 1, ...; by default all, in
            alphabetical order.
        color_mode: "grayscale", "rgb" or "rgba".
        interpolation: As for `tf.image.resize`.

    Returns:
        What `Trainer.fit` takes, with `class_names`: images
        `[height, width, channels]` of type float32 from 0 to 255.

    Raises:
        ConfigurationError: An argument is none of these, or there is no
            image.
    """
    import tensorflow as tf

    if color_mode not in _CHANNELS or label_mode not in _LABELS:
        raise ConfigurationError(
            "color_mode must be 'grayscale', 'rgb' or 'rgba', and label_mode "
            f"'int', 'categorical' or None. Received: {color_mode!r}, "
            f"{label_mode!r}."
        )
    directory = os.fspath(directory)
    paths, labels, names = _found(directory, label_mode, class_names)
    channels = _CHANNELS[color_mode]

    def decoded(path: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(
            tf.io.read_file(path), channels, expand_animations=False
        )
        image = tf.image.resize(image, image_size, interpolation)
        image = tf.ensure_shape(image, [*image_size, channels])
        return tf.cast(image, tf.float32)

    def labelled(path: tf.Tensor, label: tf.Tensor) -> tuple[Any, Any]:
        if label_mode == "categorical":
            return decoded(path), tf.one_hot(label, len(names))
        return decoded(path), label

    with tf.device("CPU:0"):
        files = tf.constant(paths)
        classes = tf.constant(labels, tf.int32)
    if label_mode is None:
        return RandomAccess(Table(files, len(paths)), decoded)
    data = RandomAccess(Table((files, classes), len(paths)), labelled)
    data.class_names = tuple(names)
    return data


def _found(
    directory: str, label_mode: str | None, class_names: Sequence[str] | None
) -> tuple[list[str], list[int], list[str]]:
    """Returns the images, their labels and the names of the labels."""
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
                if name.lower().endswith(_ENDINGS):
                    paths.append(os.path.join(path, name))
                    labels.append(label)
    if not paths:
        raise ConfigurationError(
            f"directory must hold images ({', '.join(_ENDINGS)}), in a folder "
            f"for each class unless label_mode=None. Received: {directory!r} "
            "without any."
        )
    return paths, labels, names
