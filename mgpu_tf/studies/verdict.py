"""Whether two trajectories are the same but for rounding.

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
from collections.abc import Sequence

import numpy as np

from mgpu_tf.studies.trajectory import UNITS, Trajectory

NOISE_FACTOR = 5.0
# A difference of at most N units in the last place of a weight is no mismatch,
# even if the nudged runs show less noise.
ROUNDING_UNITS = 64.0
# Nor below this part of how far the weights have moved: no run is worse for
# it. A part of the model may be in float32, such as a loss that was made
# before it.
MOTION = 1e-6
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
