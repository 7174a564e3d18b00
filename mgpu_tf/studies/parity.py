"""Does a model train to the same numbers on a strategy as on one device?

    report = check_parity(build_model, (x, y), ["mirrored"], batch_size=64)
    print(report)                       # a table; the first difference named

The model is trained for a few steps on one device and on each strategy, and
the weights are compared after every step. Numbers of floats summed in another
order are never equal, and an optimizer such as Adam turns rounding into
motion where the true gradient is zero (a bias before BatchNormalization, an
attention key's bias). So the noise is measured as well: one device once more,
with the examples permuted within each batch. A weight that differs by more
than a multiple of its noise is a mismatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import create_strategy, kind_of, topology_of
from mgpu_tf.strategies.synchronous import create_one_device_strategy
from mgpu_tf.training.trainer import Trainer

NOISE_FACTOR = 5.0
# Below so many units in the last place of a weight nothing is a mismatch,
# however quiet the permuted run was.
ROUNDING_UNITS = 64.0


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The weights after each step.

    Attributes:
        names: The paths of the variables.
        weights: For each step a list of arrays in the order of `names`.
        losses: The mean loss after each step, since the beginning.
    """

    names: list[str]
    weights: list[list[np.ndarray]]
    losses: list[float]


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
        difference: The largest difference of any weight after any step.
        noise: The same for one device with permuted batches.
        loss_difference: The largest relative difference of the loss.
        mismatch: The first mismatch, None where there is none.
    """

    strategy: str
    difference: float
    noise: float
    loss_difference: float
    mismatch: Mismatch | None


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found.

    Attributes:
        rows: One for each strategy.
        steps: Steps compared.
    """

    rows: list[Row]
    steps: int

    @property
    def same(self) -> bool:
        """Whether no strategy differs."""
        return all(row.mismatch is None for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.strategy) for row in self.rows)
        lines = [
            f"{'strategy':<{width}}  difference  noise     loss      verdict"
        ]
        for row in self.rows:
            verdict = "same"
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
        return "\n".join(lines)


def check_parity(
    build_model: Callable[[], keras.Model],
    data: Any,
    strategies: Sequence[str | tf.distribute.Strategy] = ("mirrored",),
    *,
    batch_size: int = 32,
    steps: int = 10,
    num_virtual_devices: int = 2,
    seed: int = 0,
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

    Returns:
        The report.

    Raises:
        ConfigurationError: The data cannot be compared, or a strategy does
            not exist.
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
    reference = record(build_model, batches, alone, seed)
    permuted = record(build_model, _permuted(batches, seed), alone, seed)
    rows = [
        compare(
            _describe(strategy),
            record(build_model, batches, strategy, seed),
            reference,
            permuted,
        )
        for strategy in made
    ]
    return ParityReport(rows, len(batches))


def record(
    build_model: Callable[[], keras.Model],
    batches: list[Any],
    strategy: tf.distribute.Strategy,
    seed: int = 0,
) -> Trajectory:
    """Trains on batches, one step each, and keeps the weights.

    Args:
        build_model: Returns a compiled model.
        batches: Global batches, in the structure of a dataset's elements.
        strategy: Where to train.
        seed: As for `Trainer`.

    Returns:
        The weights after every step.
    """
    trainer = Trainer(build_model, strategy, seed=seed, steps_per_execution=1)
    weights: list[list[np.ndarray]] = []
    losses: list[float] = []

    def keep(batch: int, logs: dict[str, float]) -> None:
        del batch
        weights.append(trainer.model.get_weights())
        losses.append(logs["loss"])

    trainer.fit(
        _dataset(batches),
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=keep)],
    )
    names = [variable.path for variable in trainer.model.weights]
    return Trajectory(names, weights, losses)


def compare(
    name: str,
    trajectory: Trajectory,
    reference: Trajectory,
    permuted: Trajectory,
) -> Row:
    """Judges a run against one device and the noise of one device.

    Args:
        name: What to call the run.
        trajectory: The run.
        reference: One device.
        permuted: One device, the examples permuted within each batch.

    Returns:
        The row of the report.
    """
    mismatch = None
    largest = loudest = 0.0
    noise = [0.0] * len(reference.names)
    for step, every in enumerate(
        zip(
            trajectory.weights, reference.weights, permuted.weights, strict=True
        )
    ):
        for index, (ours, theirs, shuffled) in enumerate(
            zip(*every, strict=True)
        ):
            difference = _largest(ours, theirs)
            noise[index] = max(noise[index], _largest(shuffled, theirs))
            allowed = _allowed(noise[index], theirs)
            largest = max(largest, difference)
            loudest = max(loudest, noise[index])
            if mismatch is None and not difference <= allowed:
                mismatch = Mismatch(
                    step + 1, reference.names[index], difference, allowed
                )
    ratios = np.array(trajectory.losses) / np.array(reference.losses)
    return Row(
        name, largest, loudest, float(np.abs(ratios - 1).max()), mismatch
    )


def _allowed(noise: float, weight: np.ndarray) -> float:
    if not np.issubdtype(weight.dtype, np.floating):
        return np.inf  # Seeds and counters; their replicas' own affair.
    unit = float(np.finfo(weight.dtype).eps)
    size = float(np.abs(weight).max(initial=0.0))
    return max(NOISE_FACTOR * noise, ROUNDING_UNITS * unit * max(size, 1e-3))


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


def _permuted(batches: list[Any], seed: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    result = []
    for batch in batches:
        order = generator.permutation(len(tf.nest.flatten(batch)[0]))
        result.append(
            tf.nest.map_structure(lambda a, order=order: a[order], batch)
        )
    return result


def _dataset(batches: Iterable[Any]) -> tf.data.Dataset:
    batches = list(batches)

    def spec(array: Any) -> tf.TensorSpec:
        return tf.TensorSpec(
            [None, *array.shape[1:]], tf.as_dtype(_kept(array).dtype)
        )

    dataset = tf.data.Dataset.from_generator(
        lambda: iter(
            [tf.nest.map_structure(_kept, batch) for batch in batches]
        ),
        output_signature=tf.nest.map_structure(spec, batches[0]),
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _kept(array: Any) -> np.ndarray:
    """Floats as Keras takes them."""
    array = np.asarray(array)
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(keras.config.floatx())
    return array


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
