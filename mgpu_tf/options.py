"""The options of strategies, steps and saving, each group as one value.

    StrategyOptions(num_virtual_devices=3, communication="ring")
    StepOptions(gradient_dtype="bfloat16")
    SaveOptions("run/checkpoints", save_every_steps=100)

`RunConfig` has the fields of all three groups. This module does not import
TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import check, option
from mgpu_tf.names import (
    BATCH_NORMALIZATION,
    COMMUNICATIONS,
    EMBEDDING_GRADIENTS,
    GRADIENT_DTYPES,
    KERNELS,
    LATE_GRADIENTS,
    LEARNING_RATE_DECAYS,
    LEARNING_RATE_RULES,
    MODES,
    ON_NAN,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    RANDOM,
    RECOMPUTE,
    RESUME,
    SAVE_EVERY,
    SHARDS,
    SNAPSHOT_IN,
    Devices,
    KeepIf,
    Recompute,
    Shares,
)

# Each is a thread pool's client with an allocator; more end in no step.
MOST_VIRTUAL_DEVICES = 1024


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """Which devices a strategy takes, and how they work together.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """

    devices: Devices = option(
        None,
        "Use the first N GPUs. Default: all GPUs. In Python, a list of GPU "
        "indices or names also works.",
    )
    communication: str = option(
        "auto", "How replicas exchange gradients.", COMMUNICATIONS
    )
    num_virtual_devices: int | None = option(
        None,
        "Split the CPU into N devices, to try replicas without GPUs; with one "
        "GPU in `devices`, split that GPU.",
        least=1,
        most=MOST_VIRTUAL_DEVICES,
    )
    tpu: str = option(
        "",
        "Name or address of a TPU. Default: the local TPU.",
        needs=("strategy=tpu",),
    )
    max_staleness: int | None = option(
        None,
        "With parameter servers, the largest staleness of a gradient: the "
        "number of updates by other workers since its weights were read. "
        "Default: no bound.",
        least=0,
        needs=("strategy=parameter_server",),
    )
    late_gradients: str = option(
        "hold",
        "What to do about max_staleness. hold: fast workers wait, so that no "
        "gradient is later. scale: later gradients get a smaller weight.",
        LATE_GRADIENTS,
        needs=("max_staleness",),
    )
    data_parallel: int | None = option(
        None,
        "With fsdp or model_parallel, the number of copies of the weights. "
        "Default: what fsdp_parallel leaves, or 1.",
        least=1,
        needs=("strategy=fsdp", "strategy=model_parallel"),
    )
    fsdp_parallel: int | None = option(
        None,
        "With fsdp or model_parallel, the number of devices that each copy "
        "of the weights is split over. Default: what data_parallel leaves.",
        least=1,
        needs=("strategy=fsdp", "strategy=model_parallel"),
    )
    tensor_parallel: int | None = option(
        None,
        "With model_parallel, the number of devices that the computing of "
        "layers is split over. They have the same rows of a batch. Default: 1.",
        least=1,
        needs=("strategy=model_parallel",),
    )
    layout: str | Mapping[str, Any] = option(
        "auto",
        "With tensor_parallel, which layers are computed in parts. auto: those "
        "that the structure of the model allows. Or a function that returns a "
        "mapping from patterns of paths to tuples: package.module:function. "
        "In Python, the mapping itself also works.",
        needs=("strategy=model_parallel",),
    )
    sequence_parallel: bool = option(
        False,
        "With tensor_parallel, devices have parts of a sequence between the "
        "layers that are computed in parts: norms, dropouts and residuals.",
        needs=("tensor_parallel",),
    )
    shard: str = option(
        "weights",
        "With fsdp or model_parallel, what is split. weights: weights, "
        "gradients and optimizer state. gradients: gradients that accumulate "
        "and optimizer state. optimizer: only optimizer state.",
        SHARDS,
        needs=("strategy=fsdp", "strategy=model_parallel"),
    )
    pipeline_parallel: int = option(
        1,
        "With model_parallel, the number of stages that the layers of each "
        "copy are cut into. Each stage has a device.",
        least=1,
        needs=("strategy=model_parallel",),
    )
    micro_batches: int | None = option(
        None,
        "With pipeline_parallel, the number of parts that the rows of a "
        "replica are cut into. Default: 4 for each stage.",
        least=1,
        needs=("pipeline_parallel",),
    )
    pipeline_schedule: str = option(
        "1f1b",
        "With pipeline_parallel, the order of work. 1f1b: a backward pass "
        "follows each forward pass as soon as it can. gpipe: all forward "
        "passes, then all backward passes.",
        PIPELINE_SCHEDULES,
        needs=("pipeline_parallel",),
    )
    pipeline_stages: str | None = option(
        None,
        "With pipeline_parallel, the names of the layers at which the second "
        "and further stages begin, separated by commas. Default: by cost.",
        needs=("pipeline_parallel",),
    )

    balance: Shares = option(
        None,
        "The share of each worker in a global batch, such as 2,1 where the "
        "first is twice as fast; on one machine, of each replica. auto: in "
        "proportion to measured speed. Default: equal shares.",
        needs=("strategy=mirrored", "strategy=multi_worker_mirrored"),
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How steps are computed. The model's `compile` has the other settings.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """

    precision: str | None = option(
        None,
        "The types that layers compute in, as Keras's dtype policies: with "
        "mixed_bfloat16 and mixed_float16 weights stay float32. Default: the "
        "policy that Keras has.",
        PRECISIONS,
    )
    gradient_dtype: str | None = option(
        None,
        "Round gradients to a 16-bit type before replicas exchange them. "
        "Default: no rounding.",
        GRADIENT_DTYPES,
    )
    embedding_gradients: str = option(
        "keras",
        "keras: the optimizer gets one gradient row for each lookup of an "
        "embedding. summed: the rows of the same index are added up first.",
        EMBEDDING_GRADIENTS,
    )
    recompute: Recompute = option(
        None,
        "layers: keep only the inputs of each layer for the backward pass, "
        "and compute the layer again there. Less memory, more computing. "
        "NAME,NAME: the same with layers or models of these names, in which * "
        "matches anything. stages: the same with the stages of a pipeline. "
        "In Python, a list of names, or a function of a layer, also works. "
        "Default: with weights that are split, layers; otherwise none.",
    )
    step_parts: int = option(
        1,
        "Compute the rows of each replica in N parts, one after another, and "
        "add up their gradients: less memory, the same numbers.",
        least=1,
    )
    auto_micro_batch: bool = option(
        False,
        "Before training, compute the gradients of a batch; while they do not "
        "fit, double step_parts, on every worker.",
    )
    kernels: str = option(
        "fused",
        "fused: where it computes the same, one operation of TensorFlow does "
        "what a layer or an optimizer of Keras does in several. keras: as "
        "Keras does it.",
        KERNELS,
    )
    random: str = option(
        "equal",
        "equal: a replica draws its rows of the random numbers that one "
        "device draws for the global batch. per_replica: each replica draws "
        "its own, from a seed to which its number is added.",
        RANDOM,
    )
    batch_normalization: str = option(
        "keras",
        "synchronized: every BatchNormalization takes the statistics of the "
        "global batch, as on one device. keras: as each layer says; by "
        "default those of the rows of each replica.",
        BATCH_NORMALIZATION,
    )
    jit_compile: str | None = option(
        None,
        "auto: a short trial decides whether XLA compiles the steps. Default: "
        "the jit_compile of the model's compile().",
        ("auto",),
    )
    noise_scale: bool = option(
        False,
        "Measure the gradient noise scale, and log it with the metrics.",
    )
    check_replicas_every: int | None = option(
        None,
        "After every N steps, check that all copies of weights and optimizer "
        "state, or of their parts, are the same, bit for bit. Default: no "
        "check.",
        least=1,
    )
    on_nan: str = option(
        "ignore",
        "What to do when the loss is NaN or infinite. stop: end, and name "
        "the step. restore: go back to the last checkpoint, and leave out the "
        "batch. ignore: go on, as Keras does.",
        ON_NAN,
    )
    max_restores: int = option(
        3,
        "With on_nan=restore, leave out at most N batches of a run.",
        least=1,
        needs=("on_nan=restore",),
    )
    max_loss: float | None = option(
        None,
        "With on_nan=stop or restore, treat a step whose loss is above N like "
        "one whose loss is NaN or infinite.",
        needs=("on_nan=stop", "on_nan=restore"),
    )

    def __post_init__(self) -> None:
        if isinstance(self.jit_compile, bool):
            raise ConfigurationError(
                "jit_compile must be 'auto', or left out. Received: "
                f"jit_compile={self.jit_compile!r}. Pass True or False to "
                "model.compile."
            )
        check(self)
        if self.recompute in ("", (), []) or (
            isinstance(self.recompute, list | tuple) and "" in self.recompute
        ):
            raise ConfigurationError(
                "recompute names layers, is 'layers' or 'stages', or is left "
                f"out. Received: recompute={self.recompute!r}."
            )
        if self.max_loss is not None and not math.isfinite(self.max_loss):
            raise ConfigurationError(
                f"max_loss must be finite. Received: max_loss={self.max_loss}."
            )

    @property
    def recomputes_all(self) -> str | None:
        """Returns "layers" or "stages", None where layers are named or none."""
        named = self.recompute
        return named if named in RECOMPUTE else None

    @property
    def sums_rows(self) -> bool:
        """Whether the gradient rows of the same index are added up."""
        return self.embedding_gradients == "summed"


@dataclasses.dataclass(frozen=True)
class LargeBatchOptions:
    """What lets a large batch learn, for models that are not compiled.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """

    base_batch: int | None = option(
        None,
        "The global batch size that learning_rate suits. The learning rate is "
        "scaled from it to global_batch_size. Default: no scaling.",
        least=1,
    )
    learning_rate_rule: str = option(
        "linear",
        "How the learning rate grows with the batch size: in proportion, "
        "with its square root, or not at all.",
        LEARNING_RATE_RULES,
        needs=("base_batch",),
    )
    warmup_epochs: float = option(
        0.0,
        "Let the learning rate grow for N epochs, from its value before "
        "scaling, or from 0 without base_batch.",
        least=0,
    )
    learning_rate_decay: str = option(
        "constant",
        "The learning rate after warm-up. cosine: it falls to 0 at the end "
        "of the training.",
        LEARNING_RATE_DECAYS,
    )
    weight_decay: float | None = option(
        None,
        "Weight decay of all weights but biases and normalizations. Default: "
        "that of the optimizer.",
        least=0,
    )
    label_smoothing: float = option(
        0.0,
        "The part of each label that all classes share, below 1.",
        least=0,
    )
    zero_init_residual: bool = option(
        False,
        "Let each residual block of resnet begin as the identity.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.label_smoothing >= 1:
            raise ConfigurationError(
                "label_smoothing must be below 1. Received: "
                f"label_smoothing={self.label_smoothing}."
            )
        for name in ("warmup_epochs", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigurationError(
                    f"{name} must be finite. Received: {name}={value}."
                )


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """When a task that makes no progress is ended.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """

    stall_timeout_seconds: float = option(
        600.0,
        "End the job when a task makes no progress for N seconds: no step, no "
        "callback, no save. 0: no limit.",
        least=0,
    )
    first_step_seconds: float = option(
        1800.0,
        "The same limit for what a process does for the first time: the "
        "start-up, the first step, the first evaluation. 0: no limit.",
        least=0,
    )

    def __post_init__(self) -> None:
        check(self)
        for field in dataclasses.fields(WatchOptions):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ConfigurationError(
                    f"{field.name} must be finite, 0 for no limit. Received: "
                    f"{field.name}={value}."
                )

    @property
    def watches(self) -> bool:
        """Whether there is any limit."""
        return bool(self.stall_timeout_seconds or self.first_step_seconds)

    def to_environment(self) -> dict[str, str]:
        """Returns the variables of what is not the default."""
        return {
            f"MGPU_TF_{field.name.upper()}": str(getattr(self, field.name))
            for field in dataclasses.fields(WatchOptions)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def from_environment(cls) -> WatchOptions:
        """Returns the options from variables such as
        `MGPU_TF_STALL_TIMEOUT_SECONDS`, or the defaults.

        Raises:
            ConfigurationError: A value is no number, or out of range.
        """
        values = {}
        for field in dataclasses.fields(cls):
            variable = f"MGPU_TF_{field.name.upper()}"
            text = os.environ.get(variable)
            if text is None:
                continue
            try:
                values[field.name] = float(text)
            except ValueError:
                raise ConfigurationError(
                    f"{variable} must be a number of seconds. Received: "
                    f"{text!r}."
                ) from None
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Where and when a run saves, and how many checkpoints it keeps.

    Raises:
        ConfigurationError: A value breaks the rule of its field, two values
            exclude each other, or a value is given without `checkpoint_dir`.
    """

    checkpoint_dir: str | None = option(
        None,
        "The folder for checkpoints. Every worker must see it. It may be an "
        "address of object storage, such as s3://bucket/run or gs://bucket/run.",
        is_path=True,
    )
    save_every_steps: int | None = option(
        None,
        "Save after every N steps. Default: save after each epoch. The end of "
        "the run is always saved.",
        least=1,
        needs=("checkpoint_dir",),
    )
    save_every_seconds: float | None = option(
        None,
        "Save when N seconds have passed since the last save.",
        above=0.0,
        needs=("checkpoint_dir",),
    )
    save_every: str | None = option(
        None,
        "auto: choose how often to save from the measured cost of a save and "
        "the rate of failures. Default: the other two options decide.",
        SAVE_EVERY,
        needs=("checkpoint_dir",),
    )
    mean_hours_between_failures: float = option(
        24.0,
        "With save_every=auto, how often a failure is expected. The restarts "
        "of the run correct it.",
        above=0.0,
        needs=("save_every=auto",),
    )
    local_checkpoint_dir: str | None = option(
        None,
        "A folder of each machine alone, such as on its own disk. Most "
        "checkpoints go there; checkpoint_dir gets one of shared_every.",
        is_path=True,
        needs=("checkpoint_dir",),
    )
    shared_every: int = option(
        10,
        "With local_checkpoint_dir, save to checkpoint_dir at every Nth save, "
        "at the end, and on SIGTERM.",
        least=1,
        needs=("local_checkpoint_dir",),
    )
    keep_checkpoints: int = option(
        3,
        "Keep the N newest checkpoints.",
        least=1,
        needs=("checkpoint_dir",),
    )
    keep_every_steps: int | None = option(
        None,
        "Keep for good the first checkpoint at or after every Nth step.",
        least=1,
        needs=("checkpoint_dir",),
    )
    keep_every_hours: float | None = option(
        None,
        "Keep a checkpoint for good when the run has taken N hours since the "
        "last one that was kept so.",
        above=0.0,
        needs=("checkpoint_dir",),
    )
    keep_if: KeepIf = option(
        None,
        "Keep for good each checkpoint for which a function of the step and of "
        "the logs of an epoch returns true: package.module:function. The logs "
        "are empty within an epoch.",
        needs=("checkpoint_dir",),
    )
    monitor: str | None = option(
        None,
        "Keep the best checkpoint by this metric too: a name in the logs of an "
        "epoch, such as loss or, with validation data, val_loss. Then each "
        "epoch ends with a save.",
        needs=("checkpoint_dir",),
    )
    monitor_mode: str | None = option(
        None,
        "Which values of monitor are best. Default: min, where its name ends "
        "with loss.",
        MODES,
        needs=("monitor",),
    )
    keep_best: int = option(
        1,
        "With monitor, keep the N best checkpoints.",
        least=1,
        needs=("monitor",),
    )
    resume: str = option(
        "auto",
        "auto: resume from the newest usable checkpoint, if there is one. "
        "always: fail if there is no checkpoint. never: fail if there is a "
        "checkpoint.",
        RESUME,
        needs=("checkpoint_dir",),
    )
    restart_from_nothing: bool = option(
        False,
        "Begin at the first step when checkpoint_dir has checkpoints and all "
        "of them are damaged. They stay there. Default: end with an error.",
        needs=("checkpoint_dir",),
    )
    snapshot_in: str = option(
        "file",
        "file: training waits until the state is written to the files, but not "
        "until it is on the disk; no copy is in memory. memory: training waits "
        "until the process has a copy in its memory. For a folder to which "
        "writing is slow.",
        SNAPSHOT_IN,
        needs=("checkpoint_dir",),
    )
    private: bool = option(
        False,
        "Let only the owner read what the run writes: new folders get the "
        "mode 0700, new files 0600. This is the umask of the process.",
    )

    def __post_init__(self) -> None:
        check(self)
        names = ("save_every", "save_every_steps", "save_every_seconds")
        given = [name for name in names if getattr(self, name)]
        if len(given) > 1:
            raise ConfigurationError(
                f"Give {given[0]} or {given[1]}, not both. Received: "
                f"{getattr(self, given[0])} and {getattr(self, given[1])}."
            )
        monitor = self.monitor
        if monitor == "":
            raise ConfigurationError(
                "monitor is the name of a metric. Received: monitor=''. Write "
                "monitor='val_loss', or leave it out."
            )
        if monitor and not self.monitor_mode and not monitor.endswith("loss"):
            raise ConfigurationError(
                "A monitor that is no loss needs monitor_mode. Received: "
                f"monitor={monitor!r}. Set monitor_mode='max' where larger "
                "values are better, 'min' where smaller ones are."
            )
        local = self.local_checkpoint_dir
        if local is not None and os.path.realpath(local) == os.path.realpath(
            self.folder
        ):
            raise ConfigurationError(
                "local_checkpoint_dir must be another folder than "
                f"checkpoint_dir. Received: {local!r} for both. Give a folder "
                "on a disk of each machine."
            )

    @property
    def folder(self) -> str:
        """Returns `checkpoint_dir`, which must be set."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir
