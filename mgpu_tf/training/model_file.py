"""A `.keras` file that is written without a copy of the model in memory.

    streamed(model.save)("model.keras")

Keras writes such a file in memory where that has room for it, with the
optimizer's state three times the weights of Adam. It writes a folder variable
by variable; the file is a zip archive of the folder.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any


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
