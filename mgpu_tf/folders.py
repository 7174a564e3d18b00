"""Folders that a run writes to."""

from __future__ import annotations

import os

from mgpu_tf.errors import ConfigurationError


def make_folder(name: str, path: str) -> None:
    """Makes a folder where it is missing.

    Args:
        name: The argument or flag that it came from.
        path: Its path.

    Raises:
        ConfigurationError: It cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{name} must be a folder that can be made and written. "
            f"Received: {name}={path!r} ({error.strerror})."
        ) from None
