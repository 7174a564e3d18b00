"""What TensorFlow prints of itself, which nobody reads a job for.

    is_noise(b"I0000 00:00:17.28 87 cudart_stub.cc:31] Could not find cuda")

A launcher leaves such lines out of its own output. With `log_dir`, tasks are
asked for all of them (`kept`), and their log files have them. Errors are shown,
but those of a machine without a GPU. With TF_CPP_MIN_LOG_LEVEL at 0, 1 or 2
nothing is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Those at which it prints: 3 is silence.
_LEVELS = ("0", "1", "2")

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
_LINES = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"To enable the following instructions: ",
    b"To enable them in other operations, rebuild TensorFlow",
)


def is_noise(line: bytes) -> bool:
    """Returns whether TensorFlow's C++ side says a line of itself.

    Args:
        line: A line of a task.
    """
    return bool(
        _LOGGED.match(line)
        or _TASKS.match(line)
        or _WITHOUT_GPU.match(line)
        or line.startswith(_LINES)
    )


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the user asked for what TensorFlow prints."""
    return environ.get(LEVEL) in _LEVELS


def kept(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variable with which a task prints all lines, for its log.

    It is that of the user where there is one.
    """
    return {} if LEVEL in environ else {LEVEL: _LEVELS[0]}
