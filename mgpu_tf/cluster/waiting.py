"""Names the tasks of a cluster that a task waits for while it starts.

    with told_of_missing(cluster):
        strategy = ...   # returns when every task has been reached

TensorFlow waits without a word.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.ports import answers

FIRST_SECONDS = 20.0
_CONNECT_SECONDS = 2.0

_log = logging.getLogger("mgpu_tf")


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
def told_of_missing(
    cluster: ClusterConfig | None, first_seconds: float = FIRST_SECONDS
) -> Iterator[None]:
    """Logs who is missing, again and again, while the block waits.

    Args:
        cluster: The cluster; nothing is told where there is none.
        first_seconds: When the first line comes; the others come after twice
            the time of the one before.
    """
    if cluster is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        wait = first_seconds
        while not done.wait(wait):
            missing = missing_tasks(cluster)
            if missing:
                _log.warning(
                    "%s waits for %s", cluster.task_name, ", ".join(missing)
                )
            wait *= 2

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
