"""Processes that wait to take the place of tasks.

    spares = Spares(("python", "train.py"), count=1)
    spares.keep()                   # starts what is missing
    process = spares.take(variables)     # runs the command now; None for none
    spares.close()

Most of the time that a task takes to start, it imports TensorFlow. A spare has
done this (`waiting`). It gets the environment of a task by a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.processes import waiting
from mgpu_tf.launch.processes.process import start_process
from mgpu_tf.reports.goodput import BEGAN

_PYTHON = re.compile(r"python[\d.]*$")
# Options of Python whose value is the next word.
_WITH_VALUE = ("-X", "-W")


class Spares:
    """Some processes that wait.

    Args:
        command: What tasks run: Python with a script or a module.
        count: How many wait.
        environment: Variables that they have before they are tasks.

    Raises:
        ConfigurationError: The command is another.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = waiting_command(command)
        self._count = count
        self._environment = {"PYTHONUNBUFFERED": "1", **(environment or {})}
        self._waiting: list[subprocess.Popen[bytes]] = []

    def keep(self) -> None:
        """Starts those that are missing; none after one that has failed."""
        for process in self._waiting:
            if code := process.poll():
                self.close()
                self._count = 0
                print(
                    f"mgpu-tf launch: a spare process failed with exit code "
                    f"{code}; the job goes on without spares.",
                    file=sys.stderr,
                    flush=True,
                )
        while len(self._waiting) < self._count:
            self._waiting.append(
                start_process(
                    self._command,
                    os.environ | self._environment,
                    has_input=True,
                    raw=False,
                )
            )

    def take(
        self, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """Makes a process that waits a task.

        Args:
            variables: Environment variables for the task.

        Returns:
            The process, which runs the command; None where none waits.
        """
        line = json.dumps({**variables, BEGAN: repr(time.time())}) + "\n"
        while self._waiting:
            process = self._waiting.pop(0)
            if process.poll() is None and process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line.encode())
                    process.stdin.close()
                    return process
            _end(process)
        return None

    def close(self) -> None:
        """Ends those that wait."""
        for process in self._waiting:
            _end(process)
        self._waiting = []


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def waiting_command(command: Sequence[str]) -> list[str]:
    """Returns the command of a process that waits to run a command.

    Example:
        >>> waiting_command(["python", "-P", "-m", "a.b", "-v"])
        ['python', '-P', '.../waiting.py', '-m', 'a.b', '-v']

    Args:
        command: Python with a script or a module.

    Raises:
        ConfigurationError: The command is another.
    """
    words = list(command)
    index = 1
    while index < len(words) and words[index].startswith("-"):
        if words[index] == "-m":
            break
        index += 2 if words[index] in _WITH_VALUE else 1
    options, rest = words[1:index], words[index:]
    runs_code = any(
        set(option) & set("cm")
        for option in options
        if not option.startswith((*_WITH_VALUE, "--"))
    )
    is_python = _PYTHON.match(os.path.basename(words[0]))
    if not is_python or runs_code or not rest or rest == ["-m"]:
        raise ConfigurationError(
            "spares go with a Python script or module. Received: "
            f"{' '.join(words)[:200]!r}. Write the code into a file, or leave "
            "spares out."
        )
    return [words[0], *options, waiting.__file__, *rest]
