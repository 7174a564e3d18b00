"""What a run is: one frozen value, made of flags or of keyword arguments.

    config = RunConfig(strategy="mirrored", model="cnn", epochs=5)

The fields carry their own help text; `mgpu_tf.flags` turns each into a flag.
This module does not import TensorFlow, so that a mistake is told at once.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

from mgpu_tf.checkpoints.options import RESUME, SaveOptions, save_options
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.names import (
    APPLICATIONS,
    COMMUNICATIONS,
    DATASETS,
    EMBEDDING_GRADIENTS,
    GRADIENT_DTYPES,
    LATE_GRADIENTS,
    MODELS,
    OPTIMIZERS,
    STRATEGIES,
)


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
    num_ps: int = _field(
        0,
        "Parameter servers; with any, workers do not wait for each other. "
        "With no TF_CONFIG, they are started on this machine.",
    )
    max_staleness: int | None = _field(
        None,
        "How many updates of others a gradient may be late, with parameter "
        "servers; no bound by default.",
    )
    late_gradients: str = _field(
        "hold",
        "What keeps max_staleness. hold: fast workers wait. scale: late "
        "gradients count less.",
        LATE_GRADIENTS,
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
    model: str = _field(
        "mlp",
        f"The model to train: {', '.join(MODELS)}, resnet/DEPTH, a name of "
        "keras.applications such as MobileNetV2, or package.module:function.",
    )
    initial_model: str | None = _field(
        None,
        "Go on from a .keras file, optimizer included, or start with the "
        "weights of a .weights.h5 file.",
    )
    sync_batch_norm: bool = _field(
        False, "Take the statistics of batches over all replicas."
    )
    dataset: str = _field(
        "digits",
        f"The data to train on: {', '.join(DATASETS)}, images/SIDE, a name of "
        "TFDS such as mnist, or package.module:function.",
    )
    deterministic: bool = _field(
        True,
        "All workers read all data, so that batches are the same on any "
        "number of them; otherwise each reads its own files.",
    )
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
    gradient_dtype: str | None = _field(
        None,
        "Send gradients with half the bytes, and round them.",
        GRADIENT_DTYPES,
    )
    embedding_gradients: str = _field(
        "keras",
        "keras: the optimizer sees a row for each lookup of an embedding; "
        "summed: the rows of one index are added up first.",
        EMBEDDING_GRADIENTS,
    )
    jit_compile: str | None = _field(
        None,
        "auto: a short trial decides whether XLA compiles steps; by default "
        "the model's compile() does.",
        ("auto",),
    )
    profile: str | None = _field(
        None,
        "START,STEPS: trace so many steps after so many, into "
        "output_dir/profile, for TensorBoard.",
    )
    output_dir: str | None = _field(None, "Gets model.keras and report.json.")
    checkpoint_dir: str | None = _field(
        None, "Gets checkpoints of the whole state, to go on from."
    )
    save_every_steps: int | None = _field(
        None, "Save after each so many steps; after each epoch by default."
    )
    save_every_seconds: float | None = _field(
        None, "Save when so much time has passed."
    )
    keep_checkpoints: int = _field(3, "How many checkpoints are kept.")
    resume: str = _field(
        "auto",
        "auto: go on from the newest usable checkpoint, if any. always: only "
        "so. never: only where there is none.",
        RESUME,
    )

    def __post_init__(self) -> None:
        _check_types(self)
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if choices and value is not None and value not in choices:
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
        _check_profile(self)
        _check_model(self.model)
        _check_initial_model(self.initial_model)
        _check_workers(self)
        _ = self.save_options

    @property
    def save_options(self) -> SaveOptions | None:
        """When and where the run saves, None for not at all."""
        return save_options(
            self.checkpoint_dir,
            every_steps=self.save_every_steps,
            every_seconds=self.save_every_seconds,
            keep=self.keep_checkpoints,
            resume=self.resume,
        )


def _check_types(config: RunConfig) -> None:
    hints = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        kinds = typing.get_args(hint) or (hint,)
        if float in kinds:
            kinds = (*kinds, int)
        fits = isinstance(value, kinds)
        if isinstance(value, bool) and bool not in kinds:
            fits = False
        if not fits:
            names = [
                "None" if kind is type(None) else kind.__name__
                for kind in kinds
            ]
            raise ConfigurationError(
                f"{field.name} must be of type {' or '.join(names)}. Received: "
                f"{field.name}={value!r}."
            )


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


def _check_at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigurationError(
            f"{name} must be 1 or more. Received: {name}={value}."
        )


def _check_workers(config: RunConfig) -> None:
    several = ("auto", "multi_worker_mirrored", "parameter_server")
    for name in ("num_ps", "max_staleness"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ConfigurationError(
                f"{name} must be 0 or more. Received: {name}={value}."
            )
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
    if config.devices is not None and config.num_virtual_devices is not None:
        raise ConfigurationError(
            "Give devices (GPUs) or num_virtual_devices (parts of the CPU), "
            f"not both. Received: devices={config.devices}, "
            f"num_virtual_devices={config.num_virtual_devices}."
        )
