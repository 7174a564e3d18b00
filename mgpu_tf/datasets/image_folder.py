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

from mgpu_tf.datasets.class_folders import files_of, labelled_files
from mgpu_tf.datasets.random_access import RandomAccess
from mgpu_tf.errors import ConfigurationError, is_integer
from mgpu_tf.fields import checked

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
# Whether an image that has the wanted size stays as it is, bit for bit.
_INTERPOLATIONS = {
    "area": True,
    "bicubic": True,
    "bilinear": True,
    "gaussian": False,
    "lanczos3": False,
    "lanczos5": False,
    "mitchellcubic": False,
    "nearest": True,
}


@checked
def image_folder(
    directory: str | os.PathLike[str],
    *,
    image_size: Sequence[int] = (256, 256),
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
        interpolation: As for `tf.image.resize`. With "gaussian" and
            "mitchellcubic", images that have this size already are smoothed
            too.

    Returns:
        What `Trainer.fit` takes, with `class_names`: images
        `[height, width, channels]` of type float32 from 0 to 255.

    Raises:
        ConfigurationError: An argument is none of these, or there is no
            image.
    """
    import tensorflow as tf

    if color_mode not in _CHANNELS:
        raise ConfigurationError(
            "color_mode must be 'grayscale', 'rgb' or 'rgba'. Received: "
            f"{color_mode!r}."
        )
    if interpolation not in _INTERPOLATIONS:
        raise ConfigurationError(
            f"interpolation must be one of {', '.join(_INTERPOLATIONS)}. "
            f"Received: {interpolation!r}."
        )
    image_size = _size(image_size)
    paths, labels, names = files_of(
        directory, label_mode, class_names, "images", _ENDINGS
    )
    channels = _CHANNELS[color_mode]

    def resized(image: tf.Tensor) -> tf.Tensor:
        image = tf.image.resize(image, image_size, interpolation)
        return tf.cast(image, tf.float32)

    def decoded(path: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(
            tf.io.read_file(path), channels, expand_animations=False
        )
        if _INTERPOLATIONS[interpolation]:
            image = tf.cond(
                tf.reduce_all(tf.shape(image)[:2] == image_size),
                lambda: tf.cast(image, tf.float32),
                lambda: resized(image),
            )
        else:
            image = resized(image)
        return tf.ensure_shape(image, [*image_size, channels])

    return labelled_files(paths, labels, names, label_mode, decoded)


def _size(given: Any) -> tuple[int, int]:
    """Returns height and width.

    Raises:
        ConfigurationError: It is no pair of integers from 1 on.
    """
    if (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(is_integer(side) and side > 0 for side in given)
    ):
        return int(given[0]), int(given[1])
    raise ConfigurationError(
        "image_size must be height and width in pixels, such as (224, 224). "
        f"Received: image_size={given!r}."
    )
