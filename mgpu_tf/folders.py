"""Folders that a run writes to."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

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


def not_through_links(path: str, flags: int) -> int:
    """Opens a file, as `opener` of `open`; refuses a symbolic link.

    Raises:
        OSError: The path is a link, or cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def own_only(path: str, flags: int) -> int:
    """Opens a file, as `opener` of `open`; others may not read a new one.

    Raises:
        OSError: It cannot be opened.
    """
    return os.open(path, flags, 0o600)


def keep_private() -> None:
    """Lets nobody else read what this process makes from now on.

    New folders get the mode 0700 and new files 0600.
    """
    os.umask(0o077)


def write_whole(path: str, write: Callable[[str], Any]) -> None:
    """Writes a file whole or not at all.

    Args:
        path: The file; one that is there stays until the new one is whole.
        write: Writes to the path that it gets, which has the same ending.

    Raises:
        OSError: It cannot be written; nothing of it is left then.
    """
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".unfinished-{os.getpid()}-{name}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(unfinished)


def make_folder(
    name: str, path: str, *, writes: bool = True, mode: int = 0o777
) -> None:
    """Makes a folder where it is missing.

    Args:
        name: The argument or flag that it came from.
        path: Its path.
        writes: Whether this process will write there.
        mode: The permissions of the folder, if it is made here; the umask
            may take some away.

    Raises:
        ConfigurationError: It cannot be made or written, or is on another
            file system than those of this machine.
    """
    check_local(name, path)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        os.makedirs(path, mode, exist_ok=True)
        if writes:
            # Root may write where the permissions say no, but not where the
            # file system is read-only or full.
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"x")
    except OSError as error:
        raise ConfigurationError(
            f"{name} must be a folder that can be made and written. "
            f"Received: {name}={path!r} ({error.strerror})."
        ) from None
