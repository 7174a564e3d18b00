"""Paths, and the files and folders that a run opens."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from typing import IO, Any

from mgpu_tf.errors import ConfigurationError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
# Of a name in a folder, on the file systems of Linux.
_LONGEST_NAME = 255
_LONGEST_PATH = 4095


def check_path(name: str, path: Any) -> str:
    """Refuses what is no path, or would be another path in a shell.

    Args:
        name: The argument or flag that it came from.
        path: The path, or an address such as gs://bucket/run.

    Returns:
        The path as text.

    Raises:
        ConfigurationError: It is no path; it begins with ~ or has a $NAME,
            which only a shell replaces; or no file system takes it.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        rule = "be a path"
    elif text.startswith("~") or _VARIABLE.search(text):
        rule = "be the path itself: only a shell replaces ~ and $NAME"
    else:
        rule = _broken_rule(text)
    if rule or not isinstance(text, str):
        shown = repr(path)
        shown = shown if len(shown) < 120 else f"{shown[:100]}..."
        raise ConfigurationError(
            f"{name} must {rule}. Received: {name}={shown}. Write such as "
            "/data/run."
        )
    return text


def _broken_rule(path: str) -> str:
    """Returns the rule of file systems that a path breaks, "" for none."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return "be text"
    if b"\0" in raw:
        return "have no zero byte"
    longest = max(map(len, raw.split(b"/")))
    if len(raw) > _LONGEST_PATH or longest > _LONGEST_NAME:
        return f"have names of at most {_LONGEST_NAME} bytes"
    return ""


class NotRegularError(OSError):
    """A path is no regular file, but a link, a FIFO, a device or a folder."""


def check_regular(path: str) -> None:
    """Refuses what is no regular file, without opening it; follows links.

    Raises:
        NotRegularError: It is a FIFO, a device, a socket or a folder.
        OSError: It is not there.
    """
    _check_regular(path, os.stat(path))


def check_file(name: str, path: str) -> None:
    """Refuses what is no file that can be read.

    Args:
        name: The argument or flag that it came from.
        path: Its path.

    Raises:
        ConfigurationError: It is a pipe, a device, a socket or a folder, or
            is not there.
    """
    check_path(name, path)
    try:
        check_regular(path)
    except OSError as error:
        raise ConfigurationError(
            f"{name} must be of files that can be read. Received: {path!r} "
            f"({error.strerror})."
        ) from None


def regular(
    path: str, flags: int, mode: int = 0o666, *, links: bool = True
) -> int:
    """Opens a regular file, as `opener` of `open`.

    What is none is not waited for: a FIFO has no end, and a device may act
    when it is opened.

    Args:
        path: The file.
        flags: As for `os.open`.
        mode: The permissions of a new file.
        links: Whether a link may lead to it.

    Raises:
        NotRegularError: The path is a FIFO, a device or a folder; or a link,
            unless links may be.
        OSError: It cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, os.stat(path, follow_symlinks=links))
    flags |= os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:  # It has come just now.
            raise NotRegularError(*error.args, path) from None
        raise
    try:
        _check_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str, mode: str = "r", **options: Any) -> IO[Any]:
    """Opens a regular file, as `open`; never waits.

    Raises:
        OSError: It is no regular file, or cannot be opened.
    """
    return open(path, mode, opener=regular, **options)


def is_address(path: str) -> bool:
    """Returns whether a path is an address, such as gs://bucket/run."""
    return _ADDRESS.match(path) is not None


def check_lasts(name: str, path: str) -> None:
    """Refuses an address whose files end with the process.

    Args:
        name: The argument or flag that it came from.
        path: A path or an address.

    Raises:
        ConfigurationError: It is such an address.
    """
    if path.startswith("memory://"):
        raise ConfigurationError(
            f"{name} must last longer than a process. Received: "
            f"{name}={path!r}. Give a folder, or an address such as "
            "s3://bucket/run."
        )


def check_local(name: str, path: str) -> None:
    """Refuses addresses such as gs://bucket/run, and what is no path.

    Python would make a folder of that name here.
    """
    check_path(name, path)
    if is_address(path):
        raise ConfigurationError(
            f"{name} must be a path on this machine. Received: "
            f"{name}={path!r}. Mount that storage, such as with gcsfuse or "
            "s3fs, and give the path of the mount."
        )


def not_through_links(path: str, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file, as `opener` of `open`; follows no link.

    Raises:
        NotRegularError: The path is a link, a FIFO, a device or a folder.
        OSError: It cannot be opened.
    """
    return regular(path, flags, mode, links=False)


def regular_size(path: str) -> int:
    """Returns the size of a regular file, in bytes.

    Raises:
        NotRegularError: The path is a link, a FIFO, a device or a folder.
        OSError: Its size is unknown.
    """
    found = os.lstat(path)
    _check_regular(path, found)
    return found.st_size


def _check_regular(path: str, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise NotRegularError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if stat.S_ISDIR(found.st_mode):
        raise NotRegularError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularError(errno.EINVAL, "Not a regular file", path)


def own_only(path: str, flags: int) -> int:
    """Opens a regular file, as `opener` of `open`, for its owner alone.

    Raises:
        OSError: It is a link or the like, or cannot be opened.
    """
    return not_through_links(path, flags, 0o600)


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
    # A folder of its own: nobody can have put a link there before.
    unfinished = tempfile.mkdtemp(prefix=".unfinished-", dir=folder or ".")
    try:
        made = os.path.join(unfinished, name)
        write(made)
        os.replace(made, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
            f"Received: {name}={path!r} ({error.strerror}). Give "
            "another path."
        ) from None
