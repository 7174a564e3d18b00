"""Keras's callbacks on several workers: files by the chief alone.

Every worker runs the callbacks, so that all come to the same decisions from
the same logs. Those that write files, or report to somewhere, do so on the
chief only; what they restore is restored on all workers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError

Callbacks: TypeAlias = (
    Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None
)

# What each does where it is not on the chief.
_WRITERS: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.BackupAndRestore: ("on_train_begin",),
    keras.callbacks.CSVLogger: (),
    keras.callbacks.ModelCheckpoint: (),
    keras.callbacks.RemoteMonitor: (),
    keras.callbacks.TensorBoard: (),
}


def as_list(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list.

    Args:
        callbacks: One, several or none.

    Returns:
        The callbacks.

    Raises:
        ConfigurationError: Something else is among them.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ConfigurationError(
            "callbacks must be a list of keras.callbacks.Callback. Received: "
            "a CallbackList. Pass the callbacks themselves."
        )
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    if not isinstance(callbacks, Sequence):
        callbacks = [callbacks]
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard):
            _check_tensorboard()
        if not isinstance(callback, keras.callbacks.Callback):
            hint = ""
            if isinstance(callback, type):
                hint = f" Pass an object: {callback.__name__}(...)."
            raise ConfigurationError(
                "callbacks must be a list of keras.callbacks.Callback. "
                f"Received: {callback!r} among them.{hint}"
            )
    return list(callbacks)


def for_other_workers(
    callbacks: list[keras.callbacks.Callback],
) -> list[keras.callbacks.Callback]:
    """Returns what a worker runs that is not the chief.

    Args:
        callbacks: What the chief runs.

    Returns:
        The same without what writes files.
    """
    kept = []
    for callback in callbacks:
        for kind, hooks in _WRITERS.items():
            if isinstance(callback, kind):
                if hooks:
                    kept.append(_Part(callback, hooks))
                break
        else:
            kept.append(callback)
    return kept


class ProgressLine(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, without some logs of an epoch.

    Args:
        left_out: How the names of those begin.
    """

    def __init__(self, left_out: str) -> None:
        super().__init__()
        self._left_out = left_out

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the line of an epoch."""
        shown = {
            name: value
            for name, value in (logs or {}).items()
            if not name.startswith(self._left_out)
        }
        super().on_epoch_end(epoch, shown)


class StalenessHistogram(keras.callbacks.Callback):
    """Writes how late gradients were beside what a `TensorBoard` writes.

    Args:
        tensorboard: Whose folder gets a histogram for each epoch.
        values: Returns the staleness of each gradient that was measured in
            the epoch that ends.
    """

    def __init__(
        self,
        tensorboard: keras.callbacks.TensorBoard,
        values: Callable[[], list[float]],
    ) -> None:
        super().__init__()
        self._folder = os.path.join(tensorboard.log_dir, "train")
        self._values = values
        self._writer: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the histogram of an epoch, where there is any."""
        del logs
        values = self._values()
        if not values:
            return
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder)
        with self._writer.as_default():
            tf.summary.histogram("staleness", values, step=epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the file."""
        del logs
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def histograms(
    callbacks: list[keras.callbacks.Callback],
    values: Callable[[], list[float]],
) -> list[keras.callbacks.Callback]:
    """Returns a `StalenessHistogram` for each `TensorBoard` there is."""
    return [
        StalenessHistogram(callback, values)
        for callback in callbacks
        if isinstance(callback, keras.callbacks.TensorBoard)
    ]


def refuse_restoring(callbacks: list[keras.callbacks.Callback]) -> None:
    """Refuses Keras's way to resume beside `checkpoint_dir`.

    Raises:
        ConfigurationError: There is a `BackupAndRestore`.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ConfigurationError(
                "checkpoint_dir resumes by itself. Received: a "
                "BackupAndRestore beside it. Leave out the callback."
            )


def _check_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            "The callback TensorBoard needs the package of that name. "
            "Received: a Python without it. Run: pip install "
            "'mgpu_tf[tensorboard]'"
        )


class _Part(keras.callbacks.Callback):
    """Some of the hooks of another callback."""

    def __init__(
        self, callback: keras.callbacks.Callback, hooks: tuple[str, ...]
    ) -> None:
        super().__init__()
        self._callback = callback
        for hook in hooks:
            setattr(self, hook, getattr(callback, hook))

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self._callback.set_params(params)
