"""Keras's callbacks on several workers: files by the chief alone.

Every worker runs the callbacks, so that all come to the same decisions from
the same logs. Those that write files, or report to somewhere, do so on the
chief only; what they restore is restored on all workers. `chief_only = True`,
on a callback of your own or on its class, has the same effect.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError, installing

_log = logging.getLogger("mgpu_tf")

Callbacks: TypeAlias = (
    Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None
)

# A block that all workers enter together.
Whole: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]

# What each does where it is not on the chief.
_WRITERS: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.BackupAndRestore: ("on_train_begin",),
    keras.callbacks.CSVLogger: (),
    keras.callbacks.ModelCheckpoint: (),
    keras.callbacks.RemoteMonitor: (),
    keras.callbacks.TensorBoard: (),
}

# Packages whose callbacks report to a server, where one run is one process.
_TRACKERS = ("comet_ml", "mlflow", "neptune", "wandb")


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
        if _is_for_chief(callback):
            continue
        for kind, hooks in _WRITERS.items():
            if isinstance(callback, kind):
                if hooks:
                    kept.append(_Part(callback, hooks))
                break
        else:
            kept.append(callback)
    return kept


def _is_for_chief(callback: keras.callbacks.Callback) -> bool:
    packages = {
        kind.__module__.partition(".")[0] for kind in type(callback).mro()
    }
    return bool(
        getattr(callback, "chief_only", False) or packages & set(_TRACKERS)
    )


def saving_together(
    callbacks: list[keras.callbacks.Callback],
    whole: Whole,
    *,
    is_chief: bool,
) -> list[keras.callbacks.Callback]:
    """Returns callbacks of which those that save do so with all workers.

    For a model whose weights are split over processes.

    Args:
        callbacks: The user's.
        whole: Returns a block that all workers enter together, in which the
            chief can read the model alone.
        is_chief: Whether this worker writes.

    Raises:
        ConfigurationError: One reads weights on the chief alone.
    """
    found = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            callback = _SavingTogether(callback, whole, is_chief=is_chief)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ConfigurationError(
                "BackupAndRestore saves on the chief alone. Received: a model "
                "whose weights are split over several processes. Pass "
                "checkpoint_dir to fit instead."
            )
        elif isinstance(callback, keras.callbacks.TensorBoard) and (
            callback.histogram_freq or callback.embeddings_freq
        ):
            raise ConfigurationError(
                "TensorBoard reads weights on the chief alone. Received: "
                f"histogram_freq={callback.histogram_freq}, "
                f"embeddings_freq={callback.embeddings_freq} with a model "
                "whose weights are split over several processes. Set both "
                "to 0."
            )
        found.append(callback)
    return found


# Characters of a line of progress: of a value, such as " - : 0.0000e+00", of
# slash and times, such as "/ 12:34 123ms/step", and of the bar.
_NUMBER, _TIMES, _SHORTEST_BAR = 15, 20, 4


class _Rate(float):
    """A number that Keras's bar shows as people read it: 15,803."""

    def __truediv__(self, other: float) -> _Rate:
        return _Rate(float(self) / other)

    def __format__(self, form: str) -> str:
        del form
        return f"{float(self):,.0f}" if self >= 10 else f"{float(self):.2g}"


class ProgressLine(keras.callbacks.ProgbarLogger):
    """Keras's progress bar with examples per second.

    Args:
        left_out: How the names of logs begin that the line of an epoch has no
            room for.
        examples: Returns the examples trained on so far; None where nothing
            is trained.
    """

    def __init__(
        self, left_out: str, examples: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        self._left_out = left_out
        self._examples = examples
        self._began = self._warm = (0.0, 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins the line of an epoch."""
        super().on_epoch_begin(epoch, logs)
        self._began = self._warm = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Moves the bar."""
        if self._warm == self._began:
            self._warm = self._now()  # The first call may have traced.
        super().on_train_batch_end(batch, self._fitting(self._with_rate(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the line of an epoch."""
        shown = {
            name: value
            for name, value in (logs or {}).items()
            if not name.startswith(self._left_out)
        }
        super().on_epoch_end(epoch, self._with_rate(shown))

    def _fitting(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Leaves out the rate, and shortens the bar, on a narrow terminal.

        A line that is wrapped stays there when the bar moves.
        """
        bar = self.progbar
        if bar is None or not bar.target or not sys.stdout.isatty():
            return shown
        room = shutil.get_terminal_size().columns - 2 * len(str(bar.target))
        room -= _TIMES + sum(len(name) + _NUMBER for name in shown)
        if room < _SHORTEST_BAR and "examples/s" in shown:
            del shown["examples/s"]
            room += len("examples/s") + _NUMBER
        bar.width = min(bar.width, max(_SHORTEST_BAR, room))
        return shown

    def _now(self) -> tuple[float, int]:
        return time.perf_counter(), self._examples() if self._examples else 0

    def _with_rate(self, logs: Any) -> dict[str, Any]:
        shown = dict(logs or {})
        now, examples = self._now()
        since = self._warm if examples > self._warm[1] else self._began
        if examples > since[1] and now > since[0]:
            rate = (examples - since[1]) / (now - since[0])
            shown["examples/s"] = _Rate(rate)
        return shown


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


@contextlib.contextmanager
def files_go_on(callbacks: list[keras.callbacks.Callback]) -> Iterator[None]:
    """Lets each `CSVLogger` add to its file, for a resumed run.

    It would empty the file, which has the epochs before.

    Args:
        callbacks: Their `on_train_begin`, which opens files, is called within.
    """
    loggers = [
        callback
        for callback in callbacks
        if isinstance(callback, keras.callbacks.CSVLogger)
    ]
    before = [logger.append for logger in loggers]
    for logger in loggers:
        logger.append = True
    try:
        yield
    finally:
        for logger, append in zip(loggers, before, strict=True):
            logger.append = append


def _check_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            "The callback TensorBoard needs the package of that name. "
            f"Received: a Python without it. Run: {installing('tensorboard')}"
        )


class _Saved:
    """A model whose methods that save are called by all workers.

    Args:
        model: The model.
        whole: As for `saving_together`.
        is_chief: Whether this worker writes.
    """

    def __init__(self, model: Any, whole: Whole, *, is_chief: bool) -> None:
        self._model, self._whole, self._is_chief = model, whole, is_chief

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **options: Any) -> None:
        """Saves the model."""
        with self._whole():
            if self._is_chief:
                self._model.save(*args, **options)

    def save_weights(self, *args: Any, **options: Any) -> None:
        """Saves the weights."""
        with self._whole():
            if self._is_chief:
                self._model.save_weights(*args, **options)


class _SavingTogether(keras.callbacks.Callback):
    """A `ModelCheckpoint` that decides on all workers and writes on one."""

    _HOOKS = ("on_train_batch_end", "on_epoch_begin", "on_epoch_end")

    def __init__(
        self,
        callback: keras.callbacks.ModelCheckpoint,
        whole: Whole,
        *,
        is_chief: bool,
    ) -> None:
        super().__init__()
        self._callback, self._whole = callback, whole
        self._is_chief = is_chief
        if not is_chief:
            callback.verbose = 0
        for hook in self._HOOKS:
            setattr(self, hook, getattr(callback, hook))

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._callback.set_model(
            _Saved(model, self._whole, is_chief=self._is_chief)
        )

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self._callback.set_params(params)


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
