"""What only the log file of a task has, and not the output of the launcher.

    noise = Noise()    # of one task
    noise.has(b"I0000 00:00:17.28 87 cudart_stub.cc:31] Could not find cuda")
    print_to_log("mgpu_tf: resumed after epoch 3")    # in any task

A launcher leaves out of its own output what TensorFlow prints of itself. With
`log_dir`, tasks are asked for all of it (`kept`), and their log files have it.
Errors are shown, but those of a machine without a GPU, and of a collective that
ends with another task: the launcher says which. With TF_CPP_MIN_LOG_LEVEL at 0,
1 or 2 nothing is left out.

What the chief prints for all, the other tasks print for their logs alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Those at which it prints: 3 is silence.
_LEVELS = ("0", "1", "2")
# Set for a task whose output goes to a log file as well.
LOGGED = "MGPU_TF_LOGGED"
# How a line begins that only the log file gets; it has the rest of the line.
_LOG_ONLY = "for the log: "

# Severity, date, time, thread, file: as absl's and TensorFlow's logs begin.
_LOGGED = re.compile(
    rb"(?:\d{4}-\d\d-\d\d )?(?:[IW]\d{4} )?\d\d:\d\d:\d+\.\d+(?:\s+\d+|:)"
    rb" (?:[IW] )?\S+\.(?:cc|h):\d+\]"
)
# The next lines of a message that names tasks, one in a line.
_TASKS = re.compile(rb"/job:\w+/replica:\d+/task:\d+\s*$")
_WITHOUT_GPU = re.compile(
    rb"E\d{4} .*\.cc:\d+\] (?:failed call to cuInit|Unable to register cu)"
)
# The message of a protocol buffer, and its fields. An empty line ends it.
_MESSAGE = re.compile(rb".*goo\.gle/debug\w+\s*$")
_FIELDS = re.compile(rb"\s*(?:\w+ \{|\}|\w+: .*)?\s*$")
# A collective whose other task is gone, and what follows in other lines.
_ABORTED = re.compile(rb"E\d{4} .*(?:ring_\w+|collective_executor)\.cc:\d+\] ")
_CAUSES = re.compile(
    rb"Additional GRPC error information |:UNKNOWN:Error received from peer"
    rb"|The error could be from a previous operation\. |\s*\[\[\{\{"
)
_LINES = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"To enable the following instructions: ",
    b"To enable them in other operations, rebuild TensorFlow",
)


class Noise:
    """Finds what TensorFlow says of itself in the lines of a task."""

    def __init__(self) -> None:
        self._rest: re.Pattern[bytes] | None = None

    def has(self, line: bytes) -> bool:
        """Returns whether the next line of the task is of TensorFlow.

        Args:
            line: The line.
        """
        if self._rest is not None and self._rest.match(line):
            if not line.strip():
                self._rest = None
            return True
        logged = _LOGGED.match(line) or _ABORTED.match(line)
        self._rest = None
        if logged:
            self._rest = _FIELDS if _MESSAGE.match(line) else _CAUSES
        return bool(
            logged
            or _TASKS.match(line)
            or _WITHOUT_GPU.match(line)
            or line.startswith(_LINES)
        )


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the user asked for what TensorFlow prints."""
    return environ.get(LEVEL) in _LEVELS


def print_to_log(line: str) -> None:
    """Prints a line for the log file of this task, where it has one.

    Args:
        line: The line, without its end.
    """
    if LOGGED in os.environ:
        print(f"{_LOG_ONLY}{line}", flush=True)


def log_only(line: bytes) -> bytes | None:
    """Returns what the log gets of a line that is for it alone, else None.

    Args:
        line: A line of a task.
    """
    mark = _LOG_ONLY.encode()
    return line.removeprefix(mark) if line.startswith(mark) else None


def kept(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables with which a task prints all lines, for its log.

    The level of TensorFlow is that of the user where there is one.
    """
    level = {} if LEVEL in environ else {LEVEL: _LEVELS[0]}
    return {LOGGED: "1", **level}
