"""The configuration of a run: one frozen value from flags or arguments.

    config = RunConfig(strategy="mirrored", model="cnn", epochs=5)

Each field has its help text, and `mgpu_tf.flags` defines a flag for it. This
module does not import TensorFlow, so that a mistake is reported at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import check, option, pick
from mgpu_tf.folders import check_lasts
from mgpu_tf.names import (
    APPLICATIONS,
    DATASETS,
    MODELS,
    OPTIMIZERS,
    REPORTS,
    STRATEGIES,
    TRACKERS,
)
from mgpu_tf.options import (
    LargeBatchOptions,
    SaveOptions,
    StepOptions,
    StrategyOptions,
    WatchOptions,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunConfig(
    StrategyOptions, StepOptions, LargeBatchOptions, SaveOptions, WatchOptions
):
    """The configuration of a training run.

    Example:
        >>> RunConfig(model="cnn").global_batch_size
        64

    Each field has a help text. The fields of `StrategyOptions`, `StepOptions`,
    `LargeBatchOptions`, `SaveOptions` and `WatchOptions` are fields of this
    class.

    Raises:
        ConfigurationError: A name is unknown or a number out of range.
    """

    strategy: str = option(
        "auto",
        "How to distribute the training. auto: choose from TF_CONFIG, the "
        "scheduler and the GPUs of this machine. plan: the fastest layout "
        "that fits, as mgpu-tf plan predicts.",
        STRATEGIES,
    )
    num_workers: int = option(
        1,
        "Number of worker processes. If it is above 1 and there is no cluster, "
        "the workers are started on this machine.",
        least=1,
    )
    num_ps: int = option(
        0,
        "Number of parameter servers. If it is above 0, workers do not wait "
        "for each other. If there is no cluster, the servers are started on "
        "this machine.",
        least=0,
    )
    model: str = option(
        "mlp",
        f"The model to train: {', '.join(MODELS)}, resnet/DEPTH, a name of "
        "keras.applications such as MobileNetV2, or package.module:function.",
    )
    initial_model: str | None = option(
        None,
        "A .keras file: continue with its model and optimizer. A .weights.h5 "
        "file: start with its weights.",
        is_path=True,
    )
    dataset: str = option(
        "digits",
        f"The data to train on: {', '.join(DATASETS)}, images/SIDE, a name of "
        "TFDS such as mnist, or package.module:function.",
    )
    deterministic: bool = option(
        True,
        "Every worker reads all data, so that batches do not depend on the "
        "number of workers. If false, each worker reads its own files.",
    )
    data_dir: str | None = option(
        None,
        "The folder for prepared data. Default: the folder of TFDS.",
        is_path=True,
    )
    global_batch_size: int = option(
        64, "Number of examples in a step, over all replicas.", least=1
    )
    epochs: int = option(5, "Number of epochs.", least=1)
    steps_per_epoch: int | None = option(
        None,
        "Number of steps in an epoch. Default: one pass over the data.",
        least=1,
    )
    optimizer: str = option("adam", "The optimizer.", OPTIMIZERS)
    learning_rate: float | None = option(
        None,
        "The learning rate. Default: a value for the chosen optimizer.",
        above=0.0,
    )
    seed: int = option(
        0, "The seed of the initial weights and of the order of examples."
    )
    profile: str | None = option(
        None,
        "START,STEPS: skip START steps, then trace STEPS steps. The trace is "
        "written to output_dir/profile, for xprof.",
        needs=("output_dir",),
    )
    output_dir: str | None = option(
        None,
        "The folder for model.keras and report.json.",
        is_path=True,
    )
    report: str | None = option(
        None,
        "html: write report.html too, a page with the curves and the times of "
        "the run, into output_dir.",
        REPORTS,
        needs=("output_dir",),
    )

    log_with: str | None = option(
        None,
        "Report the epochs to trackers: tensorboard, mlflow, wandb, "
        "prometheus; several with commas. Files go to output_dir, or to runs.",
    )

    def __post_init__(self) -> None:
        check(self)
        for name in (self.log_with or "").split(","):
            if self.log_with and name not in TRACKERS:
                raise ConfigurationError(
                    unknown_name("tracker", name, TRACKERS)
                )
        for group in (
            StrategyOptions,
            StepOptions,
            LargeBatchOptions,
            SaveOptions,
            WatchOptions,
        ):
            self.options(group)  # Checks the rules of the group.
        if not 0 <= self.seed < 2**32:
            raise ConfigurationError(
                f"seed must be 0 to 4294967295. Received: seed={self.seed}."
            )
        _check_profile(self)
        _check_model(self.model)
        _check_initial_model(self)
        _check_workers(self)
        _check_large_batch(self)
        _check_monitor(self)
        check_lasts("checkpoint_dir", self.checkpoint_dir or "")

    def options(self, group: type[T]) -> T:
        """Returns the options of one group.

        Args:
            group: Its class, such as `SaveOptions`.
        """
        return pick(group, self)


def changed_fields(config: RunConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that are not the default.

    Args:
        config: The configuration of a run.
    """
    return {
        field.name: value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
    }


def _check_monitor(config: RunConfig) -> None:
    if (config.monitor or "").startswith("val_"):
        raise ConfigurationError(
            "A run of mgpu-tf train is evaluated at its end, and not after "
            f"each epoch. Received: monitor={config.monitor!r}. Write "
            "--monitor=loss, or call fit in a script, with validation_data."
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


def _check_large_batch(config: RunConfig) -> None:
    if config.warmup_epochs >= config.epochs and config.warmup_epochs:
        raise ConfigurationError(
            "warmup_epochs must be less than epochs. Received: "
            f"warmup_epochs={config.warmup_epochs:g}, epochs={config.epochs}."
        )
    if config.zero_init_residual and config.model.partition("/")[0] != "resnet":
        raise ConfigurationError(
            "zero_init_residual goes with the model 'resnet'. Received: "
            f"model={config.model!r}."
        )


def _check_initial_model(config: RunConfig) -> None:
    path = config.initial_model
    if path is None:
        return
    if not path.endswith((".keras", ".weights.h5")):
        raise ConfigurationError(
            "initial_model must end with .keras or .weights.h5. Received: "
            f"initial_model={path!r}."
        )
    if path.endswith(".keras") and config.model != RunConfig.model:
        raise ConfigurationError(
            "A .keras file has its model. Received: "
            f"initial_model={path!r} beside model={config.model!r}. Leave out "
            "model, or give a .weights.h5 file."
        )


def _check_workers(config: RunConfig) -> None:
    several = (
        "auto",
        "plan",
        "multi_worker_mirrored",
        "parameter_server",
        "fsdp",
        "model_parallel",
    )
    if config.num_ps and config.strategy not in ("auto", "parameter_server"):
        raise ConfigurationError(
            "num_ps needs the strategy 'parameter_server'. Received: "
            f"num_ps={config.num_ps}, strategy={config.strategy!r}."
        )
    if config.num_workers > 1 and config.strategy not in several:
        raise ConfigurationError(
            "num_workers above 1 needs the strategy 'multi_worker_mirrored', "
            "'fsdp', 'model_parallel' or 'parameter_server'. Received: "
            f"num_workers={config.num_workers}, strategy={config.strategy!r}."
        )
    if isinstance(config.devices, int) and config.devices < 1:
        raise ConfigurationError(
            f"devices must be 1 or more. Received: devices={config.devices}."
        )
    gpus = config.devices
    if isinstance(gpus, list | tuple):
        gpus = len(gpus)
    if (gpus or 1) != 1 and config.num_virtual_devices is not None:
        raise ConfigurationError(
            "num_virtual_devices splits the CPU, or the one GPU that devices "
            f"names. Received: devices={config.devices}, "
            f"num_virtual_devices={config.num_virtual_devices}. Use devices=1."
        )
