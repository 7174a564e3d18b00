"""Names the tasks of a cluster that a task waits for while it starts.

    with naming_missing(cluster):
        strategy = ...   # returns when every task has been reached

While TensorFlow waits for the other tasks, it holds Python's lock. No thread of
the process runs then, and no signal handler of Python. So a child process
looks for the missing tasks and names them, and Ctrl-C and SIGTERM have the
effect that the system gives them: the process ends.

    python -m mgpu_tf.cluster.waiting SECONDS < TF_CONFIG

is the child process. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.ports import answers

FIRST_SECONDS = 20.0
_CONNECT_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PACKAGES = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)


def missing_tasks(cluster: ClusterConfig) -> list[str]:
    """Returns the tasks whose address takes no connection.

    Args:
        cluster: The cluster as one of its tasks sees it.

    Returns:
        Such as `worker 1 at 10.0.0.2:12345`; never the task itself.
    """
    found = []
    for name, addresses in cluster.tasks.items():
        for index, address in enumerate(addresses):
            if address == cluster.address or name == "evaluator":
                continue
            if not answers(address, _CONNECT_SECONDS):
                found.append(f"{name} {index} at {address}")
    return found


@contextlib.contextmanager
def naming_missing(
    cluster: ClusterConfig | None, first_seconds: float = FIRST_SECONDS
) -> Iterator[None]:
    """Writes to stderr who is missing, again and again, while the block waits.

    Ctrl-C and SIGTERM end the process at once while the block waits.

    Args:
        cluster: The cluster; nothing is printed where there is none.
        first_seconds: When the first line comes; the others come after twice
            the time of the one before.
    """
    if cluster is None:
        yield
        return
    path = os.pathsep.join(
        part for part in (_PACKAGES, os.environ.get("PYTHONPATH")) if part
    )
    child = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "mgpu_tf.cluster.waiting",
            str(first_seconds),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        # It ends with its input, not by the Ctrl-C for this process.
        start_new_session=True,
        text=True,
    )
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(cluster.to_json() + "\n")
            child.stdin.flush()
        with _signals_end():
            yield
    finally:
        child.kill()
        child.wait()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end the process without a handler of Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _watch(wait: float) -> None:
    """Names the missing tasks until the input ends. In the child process."""
    cluster = ClusterConfig.from_json(sys.stdin.readline())
    start = time.monotonic()
    while not select.select([sys.stdin], [], [], wait)[0]:
        missing = missing_tasks(cluster)
        if missing:
            print(
                f"mgpu_tf: {cluster.task_name} waits for "
                f"{', '.join(missing)} (since "
                f"{time.monotonic() - start:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
        wait *= 2


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _watch(float(sys.argv[1]))
