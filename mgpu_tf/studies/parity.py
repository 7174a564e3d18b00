"""Does a model train to the same numbers on a strategy as on one device?

    report = check_parity(build_model, (x, y), ["mirrored"], batch_size=64)
    print(report)      # a table; the first difference named, and its causes

The model is trained for a few steps on one device and on each strategy, and
the weights are compared after every step. All runs are in float64, where
rounding is a billion times smaller than what a fault does. A model that
computes in another type whatever Keras is told is compared in its own.

Numbers that are summed in another order are never equal, and some optimizers
turn rounding into motion where the true gradient is zero (a bias before
BatchNormalization). So the noise is measured as well: one device once more,
each initial weight moved to its neighbouring number. How much else the
weights then move is what rounding does to them.

    allowed = the largest of   a multiple of the noise of that weight
                               what storing the weight rounds
                               a millionth of how far weights have moved
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import create_strategy, kind_of, topology_of
from mgpu_tf.strategies.synchronous import create_one_device_strategy
from mgpu_tf.studies.causes import causes_in, told_by_engine
from mgpu_tf.studies.trajectory import (
    UNITS,
    OtherPrecision,
    Trajectory,
    precision,
    record,
)

NOISE_FACTOR = 5.0
# Below so many units in the last place of a weight nothing is a mismatch,
# however quiet the nudged runs were.
ROUNDING_UNITS = 64.0
# Nor below this part of how far the weights have moved: no run is worse for
# it. A part of the model may be in float32, such as a loss that was made
# before it.
MOTION = 1e-6
# Runs on one device that measure the noise: where rounding is large one may
# be quiet by chance.
NUDGES = {"float64": 1}
OTHER_NUDGES = 3
# A weight whose noise is more than this part of how far weights have moved
# goes where rounding takes it: its gradient is zero, and the optimizer takes
# the sign of it, as Lion does. It is named, and not judged.
ADRIFT = {UNITS["float64"]: MOTION}
OTHERS_ADRIFT = 0.1


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The first weight that differs by more than its noise.

    Attributes:
        step: From 1.
        variable: Path of the variable.
        difference: The largest difference of an element.
        allowed: The most that it may be.
    """

    step: int
    variable: str
    difference: float
    allowed: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy against one device.

    Attributes:
        strategy: Its name and number of replicas.
        difference: The largest difference of any weight after any step, of
            those that are judged.
        noise: The same of all weights for one device, nudged.
        loss_difference: The largest relative difference of the loss.
        mismatch: The first mismatch, None where there is none.
        adrift: The weights that rounding alone moves, which are not judged.
    """

    strategy: str
    difference: float
    noise: float
    loss_difference: float
    mismatch: Mismatch | None
    adrift: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found.

    Attributes:
        rows: One for each strategy.
        steps: Steps compared.
        precision: What was computed in, in words.
        causes: What is known to make such a model differ, a line for each;
            empty where no strategy differs.
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
            f"{self.steps} steps compared in {self.precision}",
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
        steps: Steps to compare; fewer where the data has fewer.
        num_virtual_devices: Replicas of the strategies that are given by
            name, where there are no GPUs.
        seed: As for `Trainer`.
        embedding_gradients: As for `Trainer`, for the strategies; one device
            always has "keras", as Keras's own `fit`.

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
    with precision(name), told_by_engine() as losses:
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
    causes = causes_in(
        reference.model, reference.drew, losses, embedding_gradients
    )
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


def compare(
    name: str,
    trajectory: Trajectory,
    reference: Trajectory,
    nudged: Sequence[Trajectory],
) -> Row:
    """Judges a run against one device and the noise of one device.

    Args:
        name: What to call the run.
        trajectory: The run.
        reference: One device.
        nudged: One device, its initial weights moved by rounding.

    Returns:
        The row of the report.
    """
    judge = _Judge(reference, nudged)
    for step, (ours, theirs) in enumerate(
        zip(trajectory.weights, reference.weights, strict=True)
    ):
        judge.weights(step, ours, theirs)
    for step, (loss, other) in enumerate(
        zip(trajectory.losses, reference.losses, strict=True)
    ):
        judge.loss(step, loss, other)
    return Row(
        name,
        judge.difference,
        max(judge.noise, default=0.0),
        judge.loss_difference,
        judge.mismatch,
        tuple(reference.names[index] for index in sorted(judge.adrift)),
    )


class _Judge:
    """Goes through the steps of a run and keeps the first mismatch.

    Args:
        reference: One device.
        nudged: One device, nudged.
    """

    def __init__(
        self, reference: Trajectory, nudged: Sequence[Trajectory]
    ) -> None:
        self._reference = reference
        self._nudged = nudged
        self._moved = 0.0
        self._loss_noise = 0.0
        self.noise = [0.0] * len(reference.names)
        self.difference = 0.0
        self.loss_difference = 0.0
        self.mismatch: Mismatch | None = None
        self.adrift = self._find_adrift()

    def _find_adrift(self) -> set[int]:
        """Returns the places of weights that go where rounding takes them."""
        of, last = self._reference, len(self._reference.weights) - 1
        motions = list(map(_largest, of.weights[last], of.initial))
        trained = [index for index, each in enumerate(of.trained) if each]
        farthest = max((motions[index] for index in trained), default=0.0)
        limit = ADRIFT.get(of.unit, OTHERS_ADRIFT)
        found = {
            index
            for index, motion in enumerate(motions)
            if np.issubdtype(of.weights[last][index].dtype, np.floating)
            for moved in [farthest if of.trained[index] else motion]
            for run in self._nudged
            for step in range(last + 1)
            if _noise(run, of, step, index) > limit * moved > 0.0
        }
        # Where all are, they are judged by their noise after all.
        return set() if found.issuperset(trained) else found

    def weights(
        self, step: int, ours: list[np.ndarray], theirs: list[np.ndarray]
    ) -> None:
        """Judges the weights after a step."""
        of = self._reference
        motions = list(map(_largest, theirs, of.initial))
        trained = [m for m, t in zip(motions, of.trained, strict=True) if t]
        self._moved = max([self._moved, *trained])
        for index, name in enumerate(of.names):
            noises = [_noise(run, of, step, index) for run in self._nudged]
            self.noise[index] = noise = max([self.noise[index], *noises])
            motion = motions[index]
            if of.trained[index]:
                motion = max(motion, self._moved)
            difference = _largest(ours[index], theirs[index])
            if index in self.adrift:
                continue
            self.difference = float(np.maximum(self.difference, difference))
            allowed = _allowed(noise, theirs[index], motion, of.unit)
            self._note(step, name, difference, allowed)

    def loss(self, step: int, ours: float, theirs: float) -> None:
        """Judges the reported loss after a step."""
        of = self._reference
        noises = [abs(run.losses[step] - theirs) for run in self._nudged]
        self._loss_noise = max([self._loss_noise, *noises])
        difference = abs(ours - theirs)
        relative = difference / (abs(theirs) or 1.0)
        self.loss_difference = float(np.maximum(self.loss_difference, relative))
        allowed = max(
            NOISE_FACTOR * self._loss_noise,
            max(MOTION, ROUNDING_UNITS * of.unit) * max(abs(theirs), 1e-3),
        )
        self._note(step, "the reported loss", difference, allowed)

    def _note(
        self, step: int, name: str, difference: float, allowed: float
    ) -> None:
        # Written so that NaN is a mismatch.
        if self.mismatch is None and not difference <= allowed:
            self.mismatch = Mismatch(step + 1, name, difference, allowed)


def _noise(
    run: Trajectory, reference: Trajectory, step: int, index: int
) -> float:
    """How else a weight has moved in a nudged run."""
    return _largest(_motion(run, step, index), _motion(reference, step, index))


def _motion(run: Trajectory, step: int, index: int) -> np.ndarray:
    after = run.weights[step][index].astype(np.float64)
    return after - run.initial[index].astype(np.float64)


def _allowed(
    noise: float, weight: np.ndarray, motion: float, unit: float
) -> float:
    if not np.issubdtype(weight.dtype, np.floating):
        return np.inf  # Seeds and counters; their replicas' own affair.
    stored = float(np.finfo(weight.dtype).eps)
    size = float(np.abs(weight).max(initial=0.0))
    return max(
        NOISE_FACTOR * noise,
        ROUNDING_UNITS * stored * max(size, 1e-3),
        max(MOTION, 4.0 * unit) * motion,
    )


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.size == 0:
        return 0.0
    both = np.stack([a, b]).astype(np.float64)
    return float(np.abs(both[0] - both[1]).max())


def _batches(data: Any, batch_size: int, steps: int) -> list[Any]:
    """Returns the first global batches as arrays."""
    if steps < 1:
        raise ConfigurationError(
            f"steps must be 1 or more. Received: steps={steps}."
        )
    if not isinstance(data, tf.data.Dataset):
        if not isinstance(data, tuple):
            raise ConfigurationError(
                "Data must be arrays (x, y) or a batched tf.data.Dataset. "
                f"Received: {type(data).__name__}."
            )
        return _slices(data, batch_size, steps)
    return list(data.take(steps).as_numpy_iterator())


def _slices(data: Any, batch_size: int, steps: int) -> list[Any]:
    examples = len(tf.nest.flatten(data)[0])
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
    """Creates a strategy with several replicas, on parts of the CPU if need be.

    Args:
        name: A name for `create_strategy`.
        num_virtual_devices: Replicas where there are no GPUs.

    Returns:
        The strategy.
    """
    several = ("mirrored", "central_storage", "multi_worker_mirrored")
    on_cpu = not tf.config.list_physical_devices("GPU")
    virtual = num_virtual_devices if name in several and on_cpu else None
    return create_strategy(name, num_virtual_devices=virtual)


def _describe(strategy: tf.distribute.Strategy) -> str:
    workers = topology_of(strategy).num_workers
    spread = f", {workers} workers" if workers > 1 else ""
    replicas = strategy.num_replicas_in_sync
    return f"{kind_of(strategy).name} ({replicas} replicas{spread})"
