"""Does a model train to the same numbers on a strategy as on one device?

    report = check_parity(build_model, (x, y), ["mirrored"], batch_size=64)
    print(report)      # a table; the first difference named, and its causes

The model is trained for a few steps on one device and on each strategy, and
the weights are compared after every step. All runs are in float64, where
rounding is a billion times smaller than what a fault does. A model that
computes in another type whatever Keras's float type is compared in its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError, check_integer
from mgpu_tf.fields import checked
from mgpu_tf.runtime.devices import several_here
from mgpu_tf.strategies.registry import create_strategy, kind_of, topology_of
from mgpu_tf.strategies.synchronous import create_one_device_strategy
from mgpu_tf.studies.causes import causes_in
from mgpu_tf.studies.trajectory import (
    UNITS,
    OtherPrecision,
    Trajectory,
    precision,
    record,
)
from mgpu_tf.studies.verdict import Row, compare

# Number of runs on one device that measure the noise. In types with large
# rounding, a single run may show little noise by chance.
NUDGES = {"float64": 1}
OTHER_NUDGES = 3


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`.

    Attributes:
        rows: One row for each strategy.
        steps: Number of steps that were compared.
        precision: The type of the computation, in words.
        causes: One line for each known cause of a difference in the model;
            empty if no strategy differs.
    """

    rows: list[Row]
    steps: int
    precision: str = "float64"
    causes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether no strategy differs."""
        return all(row.mismatch is None for row in self.rows)

    def __str__(self) -> str:
        width = max(
            [len("strategy"), *(len(row.strategy) for row in self.rows)]
        )
        lines = [
            f"{self.steps} step{'s' * (self.steps != 1)} compared in "
            f"{self.precision}",
            f"{'strategy':<{width}}  difference  noise     loss      verdict",
        ]
        for row in self.rows:
            verdict = "same"
            if row.adrift:
                names = ", ".join(row.adrift)
                verdict = f"same but for what rounding alone moves: {names}"
            if row.mismatch is not None:
                first = row.mismatch
                verdict = (
                    f"differs at step {first.step} in {first.variable}: "
                    f"{first.difference:.1e}, allowed {first.allowed:.1e}"
                )
            lines.append(
                f"{row.strategy:<{width}}  {row.difference:.1e}     "
                f"{row.noise:.1e}   {row.loss_difference:.1e}   {verdict}"
            )
        return "\n".join([*lines, *self.causes])


@checked
def check_parity(
    build_model: Callable[[], keras.Model],
    data: Any,
    strategies: Sequence[str | tf.distribute.Strategy] = ("mirrored",),
    *,
    batch_size: int = 32,
    steps: int = 10,
    num_virtual_devices: int = 2,
    seed: int = 0,
    embedding_gradients: str = "keras",
) -> ParityReport:
    """Trains a model on one device and on strategies, and compares.

    Example:
        report = mgpu_tf.check_parity(build_model, (x, y))
        assert report.same, report

    Args:
        build_model: Returns a compiled model, as for `Trainer`.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`, or a
            `tf.data.Dataset` batched with the global batch size.
        strategies: Names for `create_strategy`, or strategies.
        batch_size: Global batch size, for arrays.
        steps: Number of steps to compare, if the data has as many.
        num_virtual_devices: Number of replicas of strategies that are given by
            name, on a machine without GPUs.
        seed: As for `Trainer`.
        embedding_gradients: As for `Trainer`, for the strategies. One device
            always uses "keras".

    Returns:
        The report.

    Raises:
        ConfigurationError: The data cannot be compared, a strategy does not
            exist, or the weights do not stay finite on one device.
    """
    batches = _batches(data, batch_size, steps)
    # First, since devices are chosen before the first op.
    made = [
        create_for_check(each, num_virtual_devices)
        if isinstance(each, str)
        else each
        for each in strategies
    ]
    alone = create_one_device_strategy()
    name, why, reference = _reference(build_model, batches, alone, seed)
    _check_finite(reference)
    with precision(name):
        nudged = [
            record(build_model, batches, alone, seed, nudge=seed + number)
            for number in range(NUDGES.get(name or "", OTHER_NUDGES))
        ]
        rows = [
            compare(
                _describe(strategy),
                record(
                    build_model,
                    batches,
                    strategy,
                    seed,
                    embedding_gradients=embedding_gradients,
                ),
                reference,
                nudged,
            )
            for strategy in made
        ]
    report = ParityReport(rows, len(batches), why)
    if report.same or reference.model is None:
        return report
    causes = causes_in(reference.model, reference.drew, embedding_gradients)
    return dataclasses.replace(report, causes=tuple(causes))


def _reference(
    build_model: Callable[[], keras.Model],
    batches: list[Any],
    alone: tf.distribute.Strategy,
    seed: int,
) -> tuple[str | None, str, Trajectory]:
    """Trains on one device, in float64 where the model can.

    Returns:
        The type to build in, what it is in words, and the weights.
    """
    policy = keras.config.dtype_policy()
    if policy.compute_dtype not in (keras.config.floatx(), "float64"):
        why = f"the policy is {policy.name}"
    else:
        try:
            with precision("float64"):
                run = record(
                    build_model, batches, alone, seed, must_be="float64"
                )
            return "float64", "float64", run
        except ConfigurationError:
            raise
        except OtherPrecision as error:
            why = str(error)
        # The user's model, in a type that it was not made for.
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            why = f"in float64 it fails: {type(error).__name__}: {first:.100}"
    with precision(None):
        run = record(build_model, batches, alone, seed)
    used = next(name for name, unit in UNITS.items() if unit == run.unit)
    return (
        None,
        f"{used}, where rounding may hide a small fault ({why})",
        run,
    )


def _check_finite(reference: Trajectory) -> None:
    if not reference.is_finite:
        raise ConfigurationError(
            "Weights must stay finite to be compared. Received: a model whose "
            f"weights are not after {len(reference.weights)} steps on one "
            "device. Lower the learning rate, or look for values in the data "
            "that are not finite."
        )


def _batches(data: Any, batch_size: int, steps: int) -> list[Any]:
    """Returns the first global batches as arrays."""
    check_integer("steps", steps, 1)
    check_integer("batch_size", batch_size, 1)
    if not isinstance(data, tf.data.Dataset):
        if not isinstance(data, tuple):
            raise ConfigurationError(
                "Data must be arrays (x, y) or a batched tf.data.Dataset. "
                f"Received: {type(data).__name__}."
            )
        return _slices(data, batch_size, steps)
    return list(data.take(steps).as_numpy_iterator())


def _slices(data: Any, batch_size: int, steps: int) -> list[Any]:
    shapes = [np.shape(leaf) for leaf in tf.nest.flatten(data)]
    if not shapes or not all(shapes):
        raise ConfigurationError(
            "Data must be arrays of examples. Received: arrays of the shapes "
            f"{shapes}."
        )
    examples = shapes[0][0]
    starts = range(0, examples, batch_size)[:steps]
    return [
        tf.nest.map_structure(
            lambda array, start=start: np.asarray(
                array[start : start + batch_size]
            ),
            data,
        )
        for start in starts
    ]


def create_for_check(
    name: str, num_virtual_devices: int
) -> tf.distribute.Strategy:
    """Creates a strategy with replicas, on parts of a device if need be.

    Args:
        name: A name for `create_strategy`.
        num_virtual_devices: Replicas where there is one GPU or none.

    Returns:
        The strategy.
    """
    several = ("mirrored", "central_storage", "multi_worker_mirrored")
    options = several_here(num_virtual_devices) if name in several else {}
    return create_strategy(name, **options)


def _describe(strategy: tf.distribute.Strategy) -> str:
    workers = topology_of(strategy).num_workers
    spread = f", {workers} workers" if workers > 1 else ""
    replicas = strategy.num_replicas_in_sync
    return f"{kind_of(strategy).name} ({replicas} replicas{spread})"
