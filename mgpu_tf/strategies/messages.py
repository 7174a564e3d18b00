"""Short texts between the processes of a cluster, and what they wait for.

    messages.put("mgpu_tf/3/0/1", "text")
    messages.take("mgpu_tf/3/0/1", 2000)      # None if nobody has put it

They go through the key-value store of TensorFlow's coordination service, a
third of a millisecond each; 64 MB pass. A key is put once. The service
reaches a worker that waits in a collective only by an error, which ends the
collectives of the cluster for good; a thread beside such a worker says what
it waits in (`Watch`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

# Who is in a collective longer than one to two of these reports it.
_TICK_SECONDS = 1.0


def put(key: str, text: str) -> bool:
    """Leaves a text for the other workers.

    Args:
        key: Its name, of this cluster.
        text: Any.

    Returns:
        Whether it was the first of this name; another one stays.
    """
    try:
        tf_context.context().set_config_key_value(key, text)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def take(key: str, milliseconds: int) -> str | None:
    """Returns a text that some worker has left.

    Args:
        key: Its name.
        milliseconds: How long to wait for it, 1 or more.

    Returns:
        The text; None if it has not come.
    """
    try:
        service = tf_context.context()
        return str(service.get_config_key_value(key, milliseconds))
    except tf.errors.DeadlineExceededError:
        return None


def end_collectives(reason: str) -> None:
    """Ends the collectives that other workers wait in, for good."""
    with contextlib.suppress(tf.errors.OpError):
        tf_context.context().report_error_to_cluster(
            tf.errors.ABORTED, reason.splitlines()[0]
        )


def packed(value: Any) -> str:
    """Returns what JSON can hold as a short text."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpacked(text: str) -> Any:
    """Returns what was packed."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


class Watch:
    """Reports to the others what this worker waits in, if it waits long.

    Nothing is sent for what ends within a second.
    """

    def __init__(self) -> None:
        self._here: tuple[str, str] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def inside(self, key: str, text: str) -> Iterator[None]:
        """Marks what other workers have to take part in.

        Args:
            key: Under which it is sent.
            text: The message.
        """
        before, self._here = self._here, (key, text)
        try:
            yield
        finally:
            self._here = before

    def end(self) -> None:
        """Ends the watch."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        last: tuple[str, str] | None = None
        reported: tuple[str, str] | None = None
        while not self._done.wait(_TICK_SECONDS):
            here = self._here
            if here is not None and here is last and here is not reported:
                # It may be the end of the cluster that is waited in.
                with contextlib.suppress(tf.errors.OpError):
                    put(*here)
                reported = here
            last = here
