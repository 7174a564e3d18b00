"""What a run is: one frozen value, made of flags or of keyword arguments.

    config = RunConfig(strategy="mirrored", model="cnn", epochs=5)

The fields carry their own help text; `mgpu_tf.flags` turns each into a flag.
This module does not import TensorFlow, so that a mistake is told at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mgpu_tf.errors import ConfigurationError, unknown_name

STRATEGIES = (
    "auto",
    "one_device",
    "mirrored",
    "multi_worker_mirrored",
    "central_storage",
    "tpu",
)
COMMUNICATIONS = ("auto", "nccl", "ring", "hierarchical_copy")
MODELS = ("mlp", "cnn")
DATASETS = ("digits",)
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb", "lion")


def _field(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(
        default=default, metadata={"help": text, "choices": choices}
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run.

    Example:
        >>> RunConfig(model="cnn").global_batch_size
        64

    Attributes: see the help text of each field.

    Raises:
        ConfigurationError: A name is unknown or a number out of range.
    """

    strategy: str = _field(
        "auto",
        "How to distribute. auto: TF_CONFIG, several GPUs, one GPU or the "
        "CPU decide.",
        STRATEGIES,
    )
    num_workers: int = _field(
        1,
        "Worker processes. Above 1 and with no TF_CONFIG, they are started "
        "on this machine.",
    )
    num_virtual_devices: int | None = _field(
        None, "Split the CPU into so many devices, to try replicas."
    )
    devices: int | None = _field(
        None, "Use the first so many GPUs; all by default."
    )
    communication: str = _field(
        "auto", "How replicas reduce gradients.", COMMUNICATIONS
    )
    model: str = _field("mlp", "The model to train.", MODELS)
    dataset: str = _field("digits", "The data to train on.", DATASETS)
    data_dir: str | None = _field(
        None, "Where prepared data is kept; TFDS's folder by default."
    )
    global_batch_size: int = _field(
        64, "Examples in a step, over all replicas."
    )
    epochs: int = _field(5, "Passes over the data.")
    steps_per_epoch: int | None = _field(
        None, "Steps in an epoch; one pass by default."
    )
    optimizer: str = _field("adam", "The optimizer.", OPTIMIZERS)
    learning_rate: float | None = _field(
        None, "The learning rate; one that suits the optimizer by default."
    )
    seed: int = _field(0, "Decides initial weights and the order of examples.")
    output_dir: str | None = _field(None, "Gets model.keras and report.json.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise ConfigurationError(
                    unknown_name(field.name, value, choices)
                )
        for name in (
            "num_workers",
            "num_virtual_devices",
            "devices",
            "global_batch_size",
            "epochs",
            "steps_per_epoch",
        ):
            _check_at_least_one(name, getattr(self, name))
        rate = self.learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigurationError(
                "learning_rate must be above 0 and finite. Received: "
                f"learning_rate={rate}."
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigurationError(
                f"seed must be 0 to 4294967295. Received: seed={self.seed}."
            )
        _check_workers(self)


def _check_at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigurationError(
            f"{name} must be 1 or more. Received: {name}={value}."
        )


def _check_workers(config: RunConfig) -> None:
    several = ("auto", "multi_worker_mirrored")
    if config.num_workers > 1 and config.strategy not in several:
        raise ConfigurationError(
            "num_workers above 1 needs the strategy 'multi_worker_mirrored'. "
            f"Received: num_workers={config.num_workers}, "
            f"strategy={config.strategy!r}."
        )
    if config.devices is not None and config.num_virtual_devices is not None:
        raise ConfigurationError(
            "Give devices (GPUs) or num_virtual_devices (parts of the CPU), "
            f"not both. Received: devices={config.devices}, "
            f"num_virtual_devices={config.num_virtual_devices}."
        )
