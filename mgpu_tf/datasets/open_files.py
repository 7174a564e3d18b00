"""Many files of which few are open at a time.

    files = OpenFiles(open_one, close_one)
    with files.opened(path) as file:          # open until the block ends
        ...

A process may have about a thousand files open, and data sets have more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

# What is left to TensorFlow, and to the rest of the program.
_SHARE, _MOST = 8, 128


@dataclasses.dataclass
class _Open:
    """An open file, and how many read from it."""

    file: Any
    readers: int = 0


class OpenFiles:
    """Keeps the files open that were read last.

    Args:
        open: From a path to an open file.
        close: Closes one.
        most: How many stay open that nobody reads from. Default: 128, or an
            eighth of what the process may open.
    """

    def __init__(
        self,
        open: Callable[[str], Any],
        close: Callable[[Any], None],
        most: int | None = None,
    ) -> None:
        self._open, self._close = open, close
        self._most = most_open() if most is None else most
        self._held: collections.OrderedDict[str, _Open] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns how many files are open."""
        return len(self._held)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[Any]:
        """Opens a file for a block, where it is not open yet.

        Args:
            path: Its path.

        Yields:
            What `open` has returned for it.
        """
        with self._lock:
            if path not in self._held:
                self._held[path] = _Open(self._open(path))
            held = self._held[path]
            held.readers += 1
            self._held.move_to_end(path)
            self._close_some()
        try:
            yield held.file
        finally:
            with self._lock:
                held.readers -= 1

    def _close_some(self) -> None:
        """Closes those that were read longest ago, and are not being read."""
        idle = [path for path, held in self._held.items() if not held.readers]
        for path in idle[: max(len(self._held) - self._most, 0)]:
            self._close(self._held.pop(path).file)

    def close(self) -> None:
        """Closes all files."""
        with self._lock:
            while self._held:
                self._close(self._held.popitem()[1].file)


def most_open() -> int:
    """Returns how many files a source of data may keep open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(_MOST, soft // _SHARE))
