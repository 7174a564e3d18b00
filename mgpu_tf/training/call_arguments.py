"""What `fit`, `evaluate` and `predict` are called with, and its rules."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.checkpoints import storage
from mgpu_tf.checkpoints.run_state import CONTENT
from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.step.base import DataFeed
from mgpu_tf.errors import ConfigurationError, check_integer, is_integer
from mgpu_tf.folders import check_path, is_address
from mgpu_tf.options import SaveOptions


def _is_collection(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, dict))


@dataclasses.dataclass(frozen=True)
class FitNumbers:
    """The numbers that `fit` was called with.

    Raises:
        ConfigurationError: One of them is not in its range.
    """

    epochs: int
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_freq: int | Collection[int]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            optional = name.endswith(("steps_per_epoch", "validation_steps"))
            several = name == "validation_freq" and _is_collection(value)
            for number in value if several else [value]:
                if number is not None or not optional:
                    least = 0 if name == "initial_epoch" else 1
                    check_integer(name, number, least)

    def validates(self, epoch: int) -> bool:
        """Returns whether an epoch, from 0, ends with an evaluation."""
        if isinstance(self.validation_freq, Collection):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0


def split_validation(
    x: Any, y: Any, sample_weight: Any, fraction: float, validation_data: Any
) -> tuple[Any, Any]:
    """Returns `(x, y, sample_weight)` to train on, and those to validate on."""
    if validation_data is not None:
        raise ConfigurationError(
            "Give validation_data or validation_split, not both. Received: "
            f"validation_split={fraction} beside validation_data."
        )
    if isinstance(x, data_lib.RandomAccess):
        raise ConfigurationError(
            "validation_split takes the last rows of arrays. Received: a "
            "RandomAccess. Pass two of them, x and validation_data."
        )
    if data_lib.is_batched(x):
        raise ConfigurationError(
            "validation_split takes the last rows of arrays. Received: data "
            "that comes in batches. Pass validation_data."
        )
    return data_lib.split_arrays((x, y, sample_weight), fraction)


def unpack_validation(
    data: Any, *, targets: bool = True
) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and weights of `validation_data`.

    Args:
        data: As in `fit`.
        targets: Whether there are targets to train on. A model that makes its
            own from the inputs has none, and takes `(x,)`, as in Keras.

    Raises:
        ConfigurationError: It is a tuple or list of another length, or an
            array without targets.
    """
    lengths = (2, 3) if targets else (1, 2, 3)
    if isinstance(data, tuple | list) and len(data) not in lengths:
        raise ConfigurationError(
            "validation_data must be (x, y), (x, y, sample_weight), or a "
            f"dataset. Received: a {type(data).__name__} of {len(data)}."
        )
    if targets and hasattr(data, "shape"):
        raise ConfigurationError(
            "validation_data must be (x, y), (x, y, sample_weight), or a "
            f"dataset. Received: one {type(data).__name__}. Pass its targets "
            "too."
        )
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    return x, y, weight


def check_evaluation(steps: Any) -> None:
    """Refuses what is no number of steps.

    Raises:
        ConfigurationError: The number is below 1, or no integer.
    """
    if steps is not None:
        check_integer("steps", steps, 1)


def file_path(path: Any) -> str:
    """Returns the path of a file.

    Raises:
        ConfigurationError: It is no path.
    """
    return check_path("path", path)


def fit_facts(
    source: data_lib.Source,
    validation: DataFeed | None,
    numbers: FitNumbers,
) -> dict[str, str]:
    """Returns what all workers must agree on before they train."""
    facts = {name: str(value) for name, value in vars(numbers).items()}
    facts |= data_facts(source)
    if validation is None:
        return facts | {"validation data": "none"}
    return facts | {
        f"validation {name}": value
        for name, value in data_facts(validation.source).items()
    }


def check_real(source: data_lib.Source, model: keras.Model) -> None:
    """Refuses complex numbers, of which Keras would drop the imaginary part.

    Args:
        source: The data.
        model: A model whose declared inputs are complex takes such inputs.
    """
    takes = any(
        "complex" in str(tensor.dtype)
        for tensor in keras.tree.flatten(getattr(model, "inputs", None) or [])
    )
    for name, part in structures.parts_of(source.example()):
        for spec in tf.nest.flatten(part):
            is_complex = spec is not None and spec.dtype.is_complex
            if is_complex and not (takes and name == "x"):
                raise ConfigurationError(
                    "The data must be real numbers: of others Keras drops "
                    f"the imaginary part. Received: {name} of type "
                    f"{spec.dtype.name}. Pass real and imaginary parts as two "
                    "features."
                )


def check_called(model: keras.Model, *methods: str) -> None:
    """Refuses methods of the author's that a `Trainer` calls nowhere.

    Args:
        model: The model.
        methods: Those of which a call of the `Trainer` stands in the place.

    Raises:
        ConfigurationError: The author wrote one of them.
    """
    for method in methods:
        if keras_internals.wrote(model, method):
            raise ConfigurationError(
                "A Trainer trains, evaluates and predicts in the place of the "
                "model, by its train_step, test_step and predict_step. "
                f"Received: {type(model).__name__}, whose author wrote "
                f"{method}. Do what it does around the call of the Trainer, "
                "in a callback or in a step, and leave it out."
            )


def check_trained(model: keras.Model) -> None:
    """Refuses a model that says by itself which of its weights are trained.

    Keras's own `train_step` trains `trainable_weights`, and its optimizer is
    built for `trainable_variables`. A `Trainer` knows both by the attribute
    `trainable` of each weight.

    Args:
        model: The model.

    Raises:
        ConfigurationError: The author wrote one of them, and no `train_step`.
    """
    if keras_internals.overrides(model, "train_step"):
        return
    for name in ("trainable_weights", "trainable_variables"):
        if keras_internals.overrides(model, name):
            raise ConfigurationError(
                "A Trainer trains the weights that are trainable. Received: "
                f"{type(model).__name__}, whose author wrote {name}. Leave it "
                "out, and set layer.trainable = False before model.compile, "
                "or write a train_step."
            )


def data_facts(source: data_lib.Source) -> dict[str, str]:
    """Returns what distinguishes data: shapes, length, order."""
    return data_shape(source) | {CONTENT: source.fingerprint()}


def data_shape(source: data_lib.Source) -> dict[str, str]:
    """Returns what distinguishes data before any of it is read."""
    return {
        "data's shapes and types": str(source.example()),
        "data's length": source.length(),
    }


def check_seeded(source: data_lib.Source) -> None:
    """Refuses an order that other processes cannot repeat."""
    if source.unrepeatable:
        raise ConfigurationError(
            "Data that several workers read, or that a resumed run reads "
            f"again, must come in one order. Received: {source.unrepeatable}"
        )


def by_batch(method: str) -> str:
    """Returns the message for a method that takes single batches."""
    return (
        "With parameter servers, workers train on whole epochs. Received: "
        f"{method}(). Call fit(...), evaluate(...) or predict(...)."
    )


def without_trainer(method: str) -> str:
    """Returns the message for a method of a model whose trainer is gone."""
    return (
        "With parameter servers, a model trains and predicts by its Trainer. "
        f"Received: {method}() of a model whose Trainer is gone. Keep the "
        "Trainer in a variable."
    )


def check_verbose(verbose: int | str) -> None:
    """Refuses a verbosity that Keras does not know."""
    is_number = is_integer(verbose) or isinstance(verbose, bool)
    known = (0, 1, 2) if is_number else ("auto",)
    if not (is_number or isinstance(verbose, str)) or verbose not in known:
        raise ConfigurationError(
            f"verbose must be 'auto', 0, 1 or 2. Received: verbose={verbose!r}."
        )


def check_flag(name: str, value: Any) -> bool:
    """Returns a value that is true or false.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, bool | np.bool_) or (
        is_integer(value) and value in (0, 1)
    ):
        return bool(value)
    raise ConfigurationError(
        f"{name} must be True or False. Received: {name}={value!r}."
    )


def check_fraction(value: Any) -> bool:
    """Returns whether a `validation_split` is given.

    Raises:
        ConfigurationError: It is no number.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return value != 0
    raise ConfigurationError(
        "validation_split must be a fraction between 0 and 1. Received: "
        f"validation_split={value!r}."
    )


def check_build_model(build_model: Any) -> None:
    """Refuses what cannot build a model."""
    if isinstance(build_model, type) or not callable(build_model):
        received = type(build_model).__name__
        if isinstance(build_model, type):
            received = f"the class {build_model.__name__}"
        raise ConfigurationError(
            "build_model must be a function that returns a compiled model, or "
            f"that model. Received: {received}. Write `def "
            "build_model(): ...` that makes and compiles it."
        )


def check_repeats(numbers: FitNumbers, source: data_lib.Source) -> None:
    """Refuses several epochs of what can be read once."""
    epochs = numbers.epochs - numbers.initial_epoch
    if source.repeats or numbers.steps_per_epoch is not None or epochs == 1:
        return
    raise ConfigurationError(
        f"A generator can be read once. Received: a generator for {epochs} "
        "epochs and steps_per_epoch=None. Pass steps_per_epoch, or a "
        "PyDataset or tf.data.Dataset."
    )


def check_restores(source: data_lib.Source, saving: SaveOptions | None) -> None:
    """Refuses a run that could not go back to a checkpoint.

    Args:
        source: The data.
        saving: Where the run saves; None if it does not.
    """
    if saving is None:
        raise ConfigurationError(
            "on_nan='restore' goes back to a checkpoint. Received: no "
            "checkpoint_dir. Pass one to fit()."
        )
    source.anew()


def check_steps_per_execution(value: int | str) -> None:
    """Refuses what is no number of steps."""
    is_auto = isinstance(value, str) and value == "auto"
    if is_auto or (is_integer(value) and int(value) >= 1):
        return
    raise ConfigurationError(
        "steps_per_execution must be 1 or more, or 'auto'. Received: "
        f"steps_per_execution={value!r}."
    )


def saving_of(
    checkpoint_dir: str | os.PathLike[str] | None,
    checkpoint: SaveOptions | None,
) -> SaveOptions | None:
    """Returns where and when a `fit` saves; None where it does not."""
    if checkpoint is not None and checkpoint_dir is not None:
        raise ConfigurationError(
            "Give checkpoint_dir or checkpoint, not both. Received: "
            f"{checkpoint_dir!r} beside {checkpoint}."
        )
    if checkpoint is None and checkpoint_dir is not None:
        checkpoint = SaveOptions(check_path("checkpoint_dir", checkpoint_dir))
    if checkpoint is not None and not isinstance(checkpoint, SaveOptions):
        raise ConfigurationError(
            "checkpoint must be a SaveOptions. Received: "
            f"{type(checkpoint).__name__}. Write "
            "mgpu_tf.SaveOptions(folder, save_every_steps=100)."
        )
    if checkpoint is None or checkpoint.checkpoint_dir is None:
        return None
    storage.check("checkpoint_dir", checkpoint.checkpoint_dir)
    # Code of the author's may change the working directory.
    folders = {
        name: os.path.abspath(path)
        for name in ("checkpoint_dir", "local_checkpoint_dir")
        if (path := getattr(checkpoint, name)) and not is_address(path)
    }
    return dataclasses.replace(checkpoint, **folders)


def check_finite(
    method: str,
    source: data_lib.Source,
    steps: int | None,
    argument: str = "steps",
) -> None:
    """Refuses data without an end where no steps are given."""
    if source.endless and steps is None:
        raise ConfigurationError(
            f"Data without an end needs {argument}. Received: an infinite "
            f"dataset and {argument}=None. Call {method}(..., {argument}=N)."
        )
