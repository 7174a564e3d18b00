"""A cluster of processes of this machine, started from a cell of a notebook.

    def train(epochs):
        strategy = mgpu_tf.create_strategy("auto")
        trainer = mgpu_tf.Trainer(build_model, strategy)
        return trainer.fit(x, y, epochs=epochs).history

    history = mgpu_tf.launch_from_notebook(train, 5, num_workers=2)

What the tasks print comes below the cell, line by line. The error of a task is
raised in the cell. Interrupting the cell ends all tasks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from mgpu_tf.errors import (
    ConfigurationError,
    WorkerError,
    installing,
    unknown_name,
)
from mgpu_tf.fields import names_of
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.local import supervise
from mgpu_tf.launch.machines import ThisMachine
from mgpu_tf.launch.processes.process import Task

# What `signal` and the supervisor say of Ctrl-C.
_INTERRUPTED = 130


def launch_from_notebook(
    target: Callable[..., Any] | str,
    *arguments: Any,
    num_workers: int = 2,
    **options: Any,
) -> Any:
    """Runs a function or a script as a cluster of processes, from a notebook.

    A function of the notebook is sent with what it uses, such as other
    functions and arrays. What only exists in the notebook's process cannot be
    sent: strategies, and files that are open. Make these in the function.

    Example:
        history = mgpu_tf.launch_from_notebook(train, num_workers=2)

    Args:
        target: A function, which every process calls, or the path of a
            script.
        *arguments: For the function, or words for the script.
        num_workers: How many processes of task type `worker`.
        **options: The other fields of `LaunchJob`, such as `num_ps` and
            `log_dir`.

    Returns:
        What the function returned on the chief; None for a script.

    Raises:
        ConfigurationError: The function cannot be sent, the script does not
            exist, or an option is out of range.
        WorkerError: A task failed. The message has the last line of its
            output, a note has the lines before it.
        KeyboardInterrupt: The cell was interrupted; all tasks have ended.
    """
    known = names_of(LaunchJob)
    for name in options:
        if name not in known:
            raise ConfigurationError(
                unknown_name("argument of launch_from_notebook", name, known)
            )
    with tempfile.TemporaryDirectory(prefix="mgpu_tf-") as folder:
        command = _command(target, arguments, pathlib.Path(folder))
        job = LaunchJob(tuple(command), num_workers, **options)
        failures: list[Task] = []
        with _modules_of_the_notebook():
            status = supervise(job, ThisMachine(job), failures.append)
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise _error(status, failures)
        return None if isinstance(target, str) else _result(folder)


def _command(
    target: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    folder: pathlib.Path,
) -> list[str]:
    """Returns what each process runs; writes a function into the folder."""
    if isinstance(target, str):
        if not os.path.isfile(target):
            raise ConfigurationError(
                "launch_from_notebook takes a function or the path of a "
                f"script. Received: {target!r}, and no such file. Look for "
                f"it in {os.getcwd()}."
            )
        return [sys.executable, target, *map(str, arguments)]
    if not callable(target):
        raise ConfigurationError(
            "launch_from_notebook takes a function or the path of a script. "
            f"Received: {target!r}. Pass train and its arguments, not what "
            "train() returns."
        )
    sent = folder / "function"
    sent.write_bytes(_pickled(target, arguments))
    return [sys.executable, "-m", "mgpu_tf.launch.called", str(sent)]


def _pickled(target: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise ConfigurationError(
            "launch_from_notebook sends functions with cloudpickle. Received: "
            f"an environment without it. Run: {installing('notebook')}. Or "
            "give the path of a script."
        ) from None
    try:
        return cloudpickle.dumps((target, arguments))
    except Exception as error:
        name = getattr(target, "__name__", repr(target))
        raise ConfigurationError(
            "The function and what it uses must be sent to other processes. "
            f"Received: {name}, and {_first_line(error)}. Make strategies, "
            "models and open files inside of the function, or give the path "
            "of a script."
        ) from None


@contextlib.contextmanager
def _modules_of_the_notebook() -> Iterator[None]:
    """Lets processes import what the notebook can."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        os.path.abspath(path) for path in sys.path
    )
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _result(folder: str) -> Any:
    path = pathlib.Path(folder, "function.result")
    if not path.exists():
        return None
    return importlib.import_module("cloudpickle").loads(path.read_bytes())


def _error(status: int, failures: list[Task]) -> WorkerError:
    """Returns what is raised in the cell."""
    if not failures:
        return WorkerError(f"The tasks ended with exit code {status}.")
    task = failures[-1]
    lines = task.tail()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    error = WorkerError(
        f"{task.name} failed with {task.cause()}: {last or 'no output'}"
    )
    error.add_note("\n".join(lines))
    return error


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else repr(error)
