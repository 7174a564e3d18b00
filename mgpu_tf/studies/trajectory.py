"""The weights of a model after each of some steps, in a given precision.

    with precision("float64"):
        trajectory = record(build_model, batches, strategy)

What two of them have in common is judged by `studies/verdict.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.training.trainer import Trainer

# The relative distance of two neighbouring numbers.
UNITS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
# What draws where no layer does.
GLOBAL_DRAWS = "keras.random without a seed generator"


class OtherPrecision(Exception):
    """A model does not compute in the precision that it was built in."""


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The weights after each step.

    Attributes:
        names: The paths of the variables.
        initial: Their values before the first step.
        weights: For each step a list of arrays in the order of `names`.
        losses: The mean loss after each step, since the beginning; empty
            where the model reports none.
        trained: Of each variable, whether it is trained.
        unit: The relative distance of two neighbouring numbers in the
            coarsest type that the model computes in.
        model: The model, after the last step.
        drew: The paths of the layers that drew random numbers.
    """

    names: list[str]
    initial: list[np.ndarray]
    weights: list[list[np.ndarray]]
    losses: list[float]
    trained: list[bool]
    unit: float = UNITS["float32"]
    model: keras.Model | None = None
    drew: tuple[str, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether no weight became infinite or NaN."""
        last = self.weights[-1] if self.weights else []
        return all(np.isfinite(each.astype(np.float64)).all() for each in last)


@contextlib.contextmanager
def precision(name: str | None) -> Iterator[None]:
    """Builds models in a type; what was set before is set again at the end.

    Args:
        name: Such as "float64"; None leaves it as it is.
    """
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        if name is not None:
            keras.config.set_floatx(name)
            keras.config.set_dtype_policy(name)
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def record(
    build_model: Callable[[], keras.Model],
    batches: list[Any],
    strategy: tf.distribute.Strategy,
    seed: int = 0,
    *,
    embedding_gradients: str = "keras",
    must_be: str | None = None,
    nudge: int | None = None,
) -> Trajectory:
    """Trains on batches, one step each, and keeps the weights.

    Args:
        build_model: Returns a compiled model.
        batches: Global batches, in the structure of a dataset's elements.
        strategy: Where to train.
        seed: As for `Trainer`.
        embedding_gradients: As for `Trainer`.
        must_be: The type that all of the model must compute in; None for
            any.
        nudge: Moves each initial weight by one unit in the last place of
            what the model computes in, up or down by this seed; None leaves
            them.

    Returns:
        The weights after every step.

    Raises:
        OtherPrecision: A layer or weight is not what it must be.
    """
    trainer = Trainer(
        build_model,
        strategy,
        seed=seed,
        steps_per_execution=1,
        embedding_gradients=embedding_gradients,
    )
    initial: list[np.ndarray] = []
    weights: list[list[np.ndarray]] = []
    losses: list[float] = []
    drawn: dict[str, int] = {}

    def begin(logs: dict[str, float] | None = None) -> None:
        del logs
        if must_be is not None:
            _check_precision(trainer.model, must_be)
        if nudge is not None:
            _nudge(trainer.model, nudge)
        initial.extend(trainer.model.get_weights())
        drawn.update(_draws(trainer.model))

    def keep(batch: int, logs: dict[str, float]) -> None:
        del batch
        weights.append(trainer.model.get_weights())
        if "loss" in logs:
            losses.append(float(logs["loss"]))

    trainer.fit(
        _dataset(batches),
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_begin=begin, on_train_batch_end=keep
            )
        ],
    )
    model = trainer.model
    trained = {id(variable) for variable in model.trainable_variables}
    drew = [
        path
        for path, count in _draws(model).items()
        if count != drawn.get(path, 0)
    ]
    return Trajectory(
        [variable.path for variable in model.weights],
        initial,
        weights,
        losses,
        [id(variable) in trained for variable in model.weights],
        unit_of(model),
        model,
        tuple(drew),
    )


def unit_of(model: keras.Model) -> float:
    """Returns the unit of the coarsest type that a model computes in."""
    return max(
        (UNITS[dtype] for _, dtype in _types(model)), default=UNITS["float32"]
    )


def _types(model: keras.Model) -> list[tuple[str, str]]:
    """Returns what is made of floats, in words, and of which."""
    computed = [
        (f"{_path(layer)} computes in", layer.compute_dtype)
        for layer in keras_internals.layers_of(model)
    ]
    kept = [
        (f"{variable.path} is of", variable.dtype) for variable in model.weights
    ]
    found = [
        (text, keras.backend.standardize_dtype(dtype))
        for text, dtype in [*computed, *kept]
        if dtype is not None
    ]
    return [each for each in found if each[1] in UNITS]


def _path(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name


def _check_precision(model: keras.Model, name: str) -> None:
    for text, dtype in _types(model):
        if dtype != name:
            raise OtherPrecision(f"{text} {dtype}")


def _nudge(model: keras.Model, seed: int) -> None:
    generator = np.random.default_rng(seed)
    unit = unit_of(model)
    for variable in model.trainable_variables:
        value = keras.ops.convert_to_numpy(variable.value)
        sign = generator.choice([-1.0, 1.0], size=value.shape)
        moved = value.astype(np.float64) * (1.0 + unit * sign)
        variable.assign(moved.astype(value.dtype))


def _draws(model: keras.Model) -> dict[str, int]:
    """Returns how often each random layer has drawn, by its path."""
    states = [
        (_path(layer), state)
        for layer, state in keras_internals.random_layers(model)
    ]
    anywhere = keras_internals.global_seed_state()
    if anywhere is not None:
        states.append((GLOBAL_DRAWS, anywhere))
    counts: dict[str, int] = {}
    for path, state in states:
        count = int(keras.ops.convert_to_numpy(state.value)[1])
        counts[path] = counts.get(path, 0) + count
    return counts


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
