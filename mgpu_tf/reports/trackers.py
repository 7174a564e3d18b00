"""Callbacks that report a run to a tracker, on the chief alone.

    trainer.fit(x, y, epochs=5, log_with="mlflow")
    trainer.fit(x, y, epochs=5, callbacks=[mgpu_tf.WandbTracker("digits")])

Each epoch is one entry: loss and metrics, examples per second, goodput, and
what the training measures besides, such as staleness and the noise scale. A run
that resumes from a checkpoint goes on with its run of the tracker: the
checkpoint has its id.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from mgpu_tf.errors import ConfigurationError, installing, unknown_name
from mgpu_tf.folders import make_folder, write_whole
from mgpu_tf.names import TRACKERS

Measured = Callable[[], Mapping[str, float]]


class _Here:
    """What belongs to this process, and not into a checkpoint."""

    is_open = False
    handle: Any = None


class Tracker(keras.callbacks.Callback):
    """What all trackers share.

    Attributes:
        chief_only: That other workers do not call it.
        run_id: The id of the run in the tracker; a checkpoint keeps it.
        measured: Returns values besides the logs; set by `fit`.
    """

    chief_only = True

    def __init__(self) -> None:
        super().__init__()
        self.run_id: str | None = None
        self.measured: Measured = dict
        self._here = _Here()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sends the values of an epoch."""
        if not self._here.is_open:
            # Not before: a checkpoint restores `run_id` after training began.
            self._here.is_open = True
            self.open()
        values = {**(logs or {}), **self.measured()}
        self.send(
            {
                name: float(value)
                for name, value in values.items()
                if math.isfinite(float(value))
            },
            epoch + 1,
        )

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the run of the tracker."""
        del logs
        if self._here.is_open:
            self._here.is_open = False
            self.close()

    def open(self) -> None:
        """Begins a run, or continues `run_id`."""

    def send(self, values: Mapping[str, float], epoch: int) -> None:
        """Sends the values of an epoch.

        Args:
            values: Finite numbers by name.
            epoch: From 1.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends the run."""


class TensorBoardTracker(Tracker):
    """Writes scalars that TensorBoard shows.

    Args:
        folder: Where event files are written.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def open(self) -> None:
        """Opens an event file."""
        import tensorflow as tf

        self._here.handle = tf.summary.create_file_writer(self._folder)

    def send(self, values: Mapping[str, float], epoch: int) -> None:
        """Writes the values of an epoch."""
        import tensorflow as tf

        with self._here.handle.as_default():
            for name, value in values.items():
                tf.summary.scalar(name, value, step=epoch)
        self._here.handle.flush()

    def close(self) -> None:
        """Closes the file."""
        self._here.handle.close()


class MLflowTracker(Tracker):
    """Reports to MLflow. Needs the extra `mlflow`.

    Args:
        experiment: The name of the experiment; MLflow's default by default.
        tracking_uri: The server or folder; what MLflow is set to by default.
        run_name: The name of a new run; MLflow chooses one by default.

    Raises:
        ConfigurationError: MLflow is not installed.
    """

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        super().__init__()
        module = _imported("mlflow", "MLflowTracker")
        self._client = module.MlflowClient(tracking_uri)
        self._experiment = experiment
        self._run_name = run_name

    def open(self) -> None:
        """Begins a run, or sets the one of the checkpoint running again."""
        if self.run_id is not None:
            self._client.update_run(self.run_id, "RUNNING")
            return
        made = self._client.create_run(
            self._experiment_id(), run_name=self._run_name
        )
        self.run_id = made.info.run_id

    def _experiment_id(self) -> str:
        if self._experiment is None:
            return "0"
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self._experiment))

    def send(self, values: Mapping[str, float], epoch: int) -> None:
        """Logs the values as metrics of a step."""
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, step=epoch)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self.run_id)


class WandbTracker(Tracker):
    """Reports to Weights & Biases. Needs the extra `wandb`.

    Args:
        project: The project; that of the variable WANDB_PROJECT by default.
        **options: Arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        ConfigurationError: The package wandb is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__()
        self._wandb = _imported("wandb", "WandbTracker")
        self._options = {"project": project, **options}

    def open(self) -> None:
        """Begins a run, or continues that of the checkpoint."""
        self._here.handle = self._wandb.init(
            **{"id": self.run_id, "resume": "allow", **self._options}
        )
        self.run_id = self._here.handle.id

    def send(self, values: Mapping[str, float], epoch: int) -> None:
        """Logs the values of a step."""
        self._here.handle.log(dict(values), step=epoch)

    def close(self) -> None:
        """Finishes the run."""
        self._here.handle.finish()


class PrometheusTracker(Tracker):
    """Writes a text file that Prometheus's node exporter collects.

    Args:
        path: The file, which ends with `.prom`. It is written whole.
        run: The label `run` of all values.
    """

    def __init__(self, path: str, run: str = "mgpu_tf") -> None:
        super().__init__()
        self._path = path
        self._run = run

    def open(self) -> None:
        """Makes the folder."""
        folder = os.path.dirname(os.path.abspath(self._path))
        make_folder("path", folder)

    def send(self, values: Mapping[str, float], epoch: int) -> None:
        """Writes the values of the last epoch."""
        label = self._run.replace("\\", r"\\").replace('"', r"\"")
        lines = []
        for name, value in {"epoch": float(epoch), **values}.items():
            metric = "mgpu_tf_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [
                f"# TYPE {metric} gauge",
                f'{metric}{{run="{label}"}} {value!r}',
            ]
        text = "\n".join(lines) + "\n"
        with contextlib.suppress(OSError):  # A full disk ends no training.
            write_whole(
                self._path,
                lambda path: pathlib.Path(path).write_text(
                    text, encoding="utf-8"
                ),
            )


def by_name(
    names: str | Sequence[str] | None, folder: str | None = None
) -> list[keras.callbacks.Callback]:
    """Returns trackers with their usual settings.

    Args:
        names: One of `TRACKERS`, several, or None. In a text, commas stand
            between names.
        folder: Where those that write files write them; `runs` by default.

    Raises:
        ConfigurationError: A name is unknown, or a package is missing.
    """
    if names is None:
        return []
    listed = names.split(",") if isinstance(names, str) else names
    if not isinstance(listed, Sequence):
        raise ConfigurationError(
            f"Trackers are named: {', '.join(TRACKERS)}, or a list of such "
            f"names. Received: {names!r}."
        )
    made: list[keras.callbacks.Callback] = []
    where = folder or "runs"
    for name in listed:
        if name not in TRACKERS:
            raise ConfigurationError(unknown_name("tracker", name, TRACKERS))
        if name == "tensorboard":
            made.append(TensorBoardTracker(os.path.join(where, name)))
        elif name == "prometheus":
            made.append(PrometheusTracker(os.path.join(where, "run.prom")))
        else:
            made.append(MLflowTracker() if name == "mlflow" else WandbTracker())
    return made


def _imported(name: str, taker: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigurationError(
            f"{taker} needs the package {name}. Received: an environment "
            f"without it. Run: {installing(name)}"
        ) from None
