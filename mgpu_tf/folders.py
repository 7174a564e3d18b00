"""Folders that a run writes to."""

from __future__ import annotations

import os
import re

from mgpu_tf.errors import ConfigurationError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def check_local(name: str, path: str) -> None:
    """Refuses addresses such as gs://bucket/run.

    Python would make a folder of that name here.
    """
    if _ADDRESS.match(path):
        raise ConfigurationError(
            f"{name} must be a path on this machine. Received: "
            f"{name}={path!r}. Mount that storage, such as with gcsfuse or "
            "s3fs, and give the path of the mount."
        )


def make_folder(name: str, path: str) -> None:
    """Makes a folder where it is missing.

    Args:
        name: The argument or flag that it came from.
        path: Its path.

    Raises:
        ConfigurationError: It cannot be made, or is on another file system
            than those of this machine.
    """
    check_local(name, path)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{name} must be a folder that can be made and written. "
            f"Received: {name}={path!r} ({error.strerror})."
        ) from None
