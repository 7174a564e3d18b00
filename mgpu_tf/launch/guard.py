"""A small process that ends the tasks of a supervisor that was killed.

    with Guard() as guard:
        guard.watch(process.pid)       # a process group
        guard.release(process.pid)

It reads the numbers of process groups from a pipe. The pipe ends with the
supervisor, whatever ended that, and the groups that were not released are
killed, with the children that a task has started.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import TracebackType

_CODE = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Watches process groups from outside of the supervisor."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Neither Ctrl-C nor a signal to the supervisor's group.
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """Has a process group killed when this process ends."""
        self._send(f"+{group}\n")

    def release(self, group: int) -> None:
        """Leaves a process group alone again."""
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(line)
                pipe.flush()

    def close(self) -> None:
        """Ends the guard, and the groups that were not released."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
