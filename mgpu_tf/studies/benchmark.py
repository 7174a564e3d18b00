"""Measures how throughput grows with devices.

    table = measure("mlp", [1, 2, 4], kind="virtual", scaling="weak")
    print(table.text())

Each point trains the same model for a few epochs of made-up images; the first
warms up and is dropped. With virtual devices or GPUs the points take turns,
so that what else the machine does meets all alike.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.models import create_model
from mgpu_tf.optimizers import create_optimizer
from mgpu_tf.reports.scaling import ScalingPoint, ScalingTable
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.synchronous import (
    create_mirrored_strategy,
    create_multi_worker_mirrored_strategy,
    create_one_device_strategy,
)
from mgpu_tf.training.trainer import Trainer

INPUT_SHAPE = (32, 32, 3)
CLASSES = 10
_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every point trains.

    Attributes:
        model: A name of the zoo.
        batch_size: Examples of a device (weak) or of all (strong).
        scaling: "weak" or "strong".
        steps: Steps in a repeat.
        repeats: How often a point is measured.
    """

    model: str = "mlp"
    batch_size: int = 64
    scaling: str = "weak"
    steps: int = 20
    repeats: int = 3

    def global_batch_size(self, devices: int) -> int:
        """Returns the examples in a step on a number of devices."""
        return self.batch_size * (devices if self.scaling == "weak" else 1)


def measure(
    workload: Workload, devices: Sequence[int], kind: str
) -> ScalingTable:
    """Measures points in this process, in turns.

    Args:
        workload: What to train.
        devices: Numbers of devices.
        kind: "virtual" or "gpu".

    Returns:
        The table.

    Raises:
        ConfigurationError: There are fewer GPUs than asked for.
    """
    _log_progress("tracing, then measuring in turns")
    runs = [
        _Run(workload, count, _strategy(kind, count))
        for count in sorted(devices, reverse=True)
    ][::-1]
    for _ in range(workload.repeats):
        for run in runs:
            run.repeat()
            _log_progress(run.text())
    points = [run.point() for run in runs]
    return ScalingTable(workload.model, kind, workload.scaling, points)


def measure_cluster(workload: Workload) -> ScalingPoint:
    """Measures the cluster of which this process is a worker.

    Args:
        workload: What to train.

    Returns:
        The point, on every worker.
    """
    strategy = create_multi_worker_mirrored_strategy()
    run = _Run(workload, topology_of(strategy).num_workers, strategy)
    for _ in range(workload.repeats):
        run.repeat()
    return run.point()


class _Run:
    """One point under way."""

    def __init__(
        self,
        workload: Workload,
        devices: int,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._workload = workload
        self._devices = devices
        self._batch = workload.global_batch_size(devices)
        self._data = _images(self._batch)

        def build_model() -> keras.Model:
            model = create_model(workload.model, INPUT_SHAPE, CLASSES)
            model.compile(
                create_optimizer("momentum"),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
            return model

        self._trainer = Trainer(build_model, strategy)
        self._fit(1)
        self._warm = len(self._trainer.records)

    def repeat(self) -> None:
        """Measures once more; the first epoch finds the pace again."""
        self._fit(2)

    def text(self) -> str:
        """Returns what the last repeat reached."""
        rate = self._trainer.records[-1].examples_per_second
        noun = "device" if self._devices == 1 else "devices"
        return f"{self._devices} {noun}: {rate:,.0f} examples/s"

    def point(self) -> ScalingPoint:
        """Returns what the last epochs of the repeats reached."""
        records = self._trainer.records[self._warm + 1 :: 2]
        return ScalingPoint(
            self._devices,
            self._batch,
            [record.examples_per_second for record in records],
            float(records[-1].logs["loss"]),
        )

    def _fit(self, epochs: int) -> None:
        self._trainer.fit(
            self._data,
            epochs=epochs,
            steps_per_epoch=self._workload.steps,
            verbose=0,
        )


def _log_progress(text: str) -> None:
    print(f"mgpu-tf benchmark: {text}", file=sys.stderr, flush=True)


def _images(batch_size: int) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    rows = _BATCHES * batch_size
    x = random.random((rows, *INPUT_SHAPE), np.float32)
    y = random.integers(0, CLASSES, rows)
    shaped = x.reshape(_BATCHES, batch_size, *INPUT_SHAPE)
    batches = (shaped, y.reshape(_BATCHES, batch_size))
    return tf.data.Dataset.from_tensor_slices(batches).repeat()


def _strategy(kind: str, count: int) -> tf.distribute.Strategy:
    if kind == "virtual":
        return create_mirrored_strategy(num_virtual_devices=count)
    available = len(tf.config.list_physical_devices("GPU"))
    if count > available:
        raise ConfigurationError(
            f"There are {available} GPUs on this machine. Received: "
            f"devices={count}. Use --kind=virtual or --kind=processes."
        )
    if count == 1:
        return create_one_device_strategy("GPU:0")
    return create_mirrored_strategy(devices=count)
