"""A `.keras` file that is written without a copy of the model in memory.

    streamed(model.save)("model.keras")

Keras writes such a file in memory where that has room for it, with the
optimizer's state three times the weights of Adam. It writes a folder variable
by variable; the file is a zip archive of the folder.

HDF5, which Keras writes weights with, ends the process where a file that it is
to close cannot be written, as on a full disk. So `check_room` comes first; what
others write to the disk meanwhile it cannot know.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals

# What a file has beside the numbers: for itself, for each layer and variable.
_BYTES, _OF_EACH = 2**16, 2**12


def check_room(path: str, model: keras.Model) -> None:
    """Raises where a folder has no room for a file of a model.

    Args:
        path: The file.
        model: The model that is written, with its optimizer.

    Raises:
        OSError: There is less room than the file may take.
    """
    kept = [*model.variables]
    if model.optimizer is not None:
        kept += model.optimizer.variables
    count = len(kept) + len(keras_internals.layers_of(model))
    sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in kept]
    needed = _BYTES + count * _OF_EACH + sum(sizes)
    if shutil.disk_usage(os.path.dirname(path) or ".").free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def streamed(save: Callable[..., Any]) -> Callable[[str], None]:
    """Returns what saves as a method of a model does, through a folder.

    Args:
        save: `keras.Model.save`, or a method that writes files of another
            ending, which is called as it is.
    """

    def write(path: str) -> None:
        if not path.endswith(".keras"):
            save(path)
            return
        beside = os.path.dirname(path) or "."
        with tempfile.TemporaryDirectory(
            prefix=".unfinished-", dir=beside
        ) as folder:
            save(folder, zipped=False)
            _pack(folder, path)

    return write


def _pack(folder: str, path: str) -> None:
    """Writes the files of a folder to an archive, without compression."""
    with zipfile.ZipFile(path, "w") as archive:
        for parent, _, names in sorted(os.walk(folder)):
            for name in sorted(names):
                file = os.path.join(parent, name)
                archive.write(file, os.path.relpath(file, folder))
