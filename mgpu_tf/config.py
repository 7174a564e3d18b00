"""What a run is: one frozen value, made of flags or of keyword arguments.

    config = RunConfig(strategy="mirrored", model="cnn", epochs=5)

The fields carry their own help text; `mgpu_tf.flags` turns each into a flag.
This module does not import TensorFlow, so that a mistake is told at once.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import check, option, pick
from mgpu_tf.names import (
    APPLICATIONS,
    DATASETS,
    MODELS,
    OPTIMIZERS,
    STRATEGIES,
)
from mgpu_tf.options import SaveOptions, StepOptions, StrategyOptions

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunConfig(StrategyOptions, StepOptions, SaveOptions):
    """A training run.

    Example:
        >>> RunConfig(model="cnn").global_batch_size
        64

    Attributes: see the help text of each field, and of the three groups.

    Raises:
        ConfigurationError: A name is unknown or a number out of range.
    """

    strategy: str = option(
        "auto",
        "How to distribute. auto: TF_CONFIG, several GPUs, one GPU or the "
        "CPU decide.",
        STRATEGIES,
    )
    num_workers: int = option(
        1,
        "Worker processes. Above 1 and with no TF_CONFIG, they are started "
        "on this machine.",
        least=1,
    )
    num_ps: int = option(
        0,
        "Parameter servers; with any, workers do not wait for each other. "
        "With no TF_CONFIG, they are started on this machine.",
        least=0,
    )
    model: str = option(
        "mlp",
        f"The model to train: {', '.join(MODELS)}, resnet/DEPTH, a name of "
        "keras.applications such as MobileNetV2, or package.module:function.",
    )
    initial_model: str | None = option(
        None,
        "Go on from a .keras file, optimizer included, or start with the "
        "weights of a .weights.h5 file.",
    )
    sync_batch_norm: bool = option(
        False, "Take the statistics of batches over all replicas."
    )
    dataset: str = option(
        "digits",
        f"The data to train on: {', '.join(DATASETS)}, images/SIDE, a name of "
        "TFDS such as mnist, or package.module:function.",
    )
    deterministic: bool = option(
        True,
        "All workers read all data, so that batches are the same on any "
        "number of them; otherwise each reads its own files.",
    )
    data_dir: str | None = option(
        None, "Where prepared data is kept; TFDS's folder by default."
    )
    global_batch_size: int = option(
        64, "Examples in a step, over all replicas.", least=1
    )
    epochs: int = option(5, "Passes over the data.", least=1)
    steps_per_epoch: int | None = option(
        None, "Steps in an epoch; one pass by default.", least=1
    )
    optimizer: str = option("adam", "The optimizer.", OPTIMIZERS)
    learning_rate: float | None = option(
        None,
        "The learning rate; one that suits the optimizer by default.",
        above=0.0,
    )
    seed: int = option(0, "Decides initial weights and the order of examples.")
    profile: str | None = option(
        None,
        "START,STEPS: trace STEPS steps after the first START, into "
        "output_dir/profile, for TensorBoard.",
    )
    output_dir: str | None = option(None, "Gets model.keras and report.json.")

    def __post_init__(self) -> None:
        check(self)
        for group in (StrategyOptions, StepOptions, SaveOptions):
            self.options(group)  # Each has rules of its own.
        if not 0 <= self.seed < 2**32:
            raise ConfigurationError(
                f"seed must be 0 to 4294967295. Received: seed={self.seed}."
            )
        _check_profile(self)
        _check_model(self.model)
        _check_initial_model(self.initial_model)
        _check_workers(self)

    def options(self, group: type[T]) -> T:
        """Returns the options of a group, such as `SaveOptions`."""
        return pick(group, self)


def _check_profile(config: RunConfig) -> None:
    if config.profile is None:
        return
    start, _, steps = config.profile.partition(",")
    if not (start.isdecimal() and steps.isdecimal() and int(steps)):
        raise ConfigurationError(
            "profile is two numbers, the steps before and the steps to "
            f"trace. Received: profile={config.profile!r}. Write "
            "--profile=100,20."
        )
    if config.output_dir is None:
        raise ConfigurationError(
            "profile needs output_dir, which gets the trace. Received: "
            f"profile={config.profile!r} without it."
        )
    if config.num_ps or config.strategy == "parameter_server":
        raise ConfigurationError(
            "profile goes with strategies whose replicas step together. "
            f"Received: profile={config.profile!r} with parameter servers."
        )


def _check_model(model: str) -> None:
    base, _, rest = model.partition("/")
    if ":" in model or (model in (*MODELS, *APPLICATIONS)):
        return
    if base == "resnet" and rest:
        if rest.isdecimal() and int(rest) >= 8 and (int(rest) - 2) % 6 == 0:
            return
        raise ConfigurationError(
            "resnet/DEPTH takes a depth of 6 n + 2, such as 20, 32, 56 or "
            f"110. Received: {model!r}."
        )
    message = unknown_name("model", model, [*MODELS, *APPLICATIONS])
    raise ConfigurationError(
        f"{message.partition(' Valid:')[0]} Valid: {', '.join(MODELS)}, "
        "resnet/DEPTH, the names of keras.applications, and "
        "package.module:function."
    )


def _check_initial_model(path: str | None) -> None:
    if path is not None and not path.endswith((".keras", ".weights.h5")):
        raise ConfigurationError(
            "initial_model must end with .keras or .weights.h5. Received: "
            f"initial_model={path!r}."
        )


def _check_workers(config: RunConfig) -> None:
    several = ("auto", "multi_worker_mirrored", "parameter_server")
    if config.num_ps and config.strategy not in ("auto", "parameter_server"):
        raise ConfigurationError(
            "num_ps needs the strategy 'parameter_server'. Received: "
            f"num_ps={config.num_ps}, strategy={config.strategy!r}."
        )
    if config.num_workers > 1 and config.strategy not in several:
        raise ConfigurationError(
            "num_workers above 1 needs the strategy 'multi_worker_mirrored' "
            "or 'parameter_server'. Received: "
            f"num_workers={config.num_workers}, strategy={config.strategy!r}."
        )
    if isinstance(config.devices, int) and config.devices < 1:
        raise ConfigurationError(
            f"devices must be 1 or more. Received: devices={config.devices}."
        )
    if config.devices is not None and config.num_virtual_devices is not None:
        raise ConfigurationError(
            "Give devices (GPUs) or num_virtual_devices (parts of the CPU), "
            f"not both. Received: devices={config.devices}, "
            f"num_virtual_devices={config.num_virtual_devices}."
        )
