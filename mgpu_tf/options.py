"""The options of strategies, steps and saving, each group as one value.

    StrategyOptions(num_virtual_devices=3, communication="ring")
    StepOptions(gradient_dtype="bfloat16")
    SaveOptions("run/checkpoints", save_every_steps=100)

A group is handed on whole, from the flag to what reads it. `RunConfig` has
the fields of all three. No TensorFlow here.
"""

from __future__ import annotations

import dataclasses

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import check, option
from mgpu_tf.names import (
    COMMUNICATIONS,
    EMBEDDING_GRADIENTS,
    GRADIENT_DTYPES,
    LATE_GRADIENTS,
    RESUME,
    Devices,
)


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """Which devices a strategy takes, and how they work together.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """

    devices: Devices = option(
        None,
        "Use the first N GPUs; all by default. In Python also GPUs by index "
        "or name.",
    )
    communication: str = option(
        "auto", "How replicas reduce gradients.", COMMUNICATIONS
    )
    num_virtual_devices: int | None = option(
        None, "Split the CPU into N devices, to try replicas.", least=1
    )
    tpu: str = option("", "Name or address of a TPU; the local one by default.")
    max_staleness: int | None = option(
        None,
        "How many updates of others a gradient may be late, with parameter "
        "servers; no bound by default.",
        least=0,
    )
    late_gradients: str = option(
        "hold",
        "What keeps max_staleness. hold: fast workers wait. scale: late "
        "gradients count less.",
        LATE_GRADIENTS,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How steps are made, beside what the model's `compile` says.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """

    gradient_dtype: str | None = option(
        None,
        "Send gradients between replicas with half the bytes, and round them.",
        GRADIENT_DTYPES,
    )
    embedding_gradients: str = option(
        "keras",
        "keras: the optimizer sees a row for each lookup of an embedding; "
        "summed: the rows of one index are added up first.",
        EMBEDDING_GRADIENTS,
    )
    jit_compile: str | None = option(
        None,
        "auto: a short trial decides whether XLA compiles steps; by default "
        "the model's compile() does.",
        ("auto",),
    )

    def __post_init__(self) -> None:
        if isinstance(self.jit_compile, bool):
            raise ConfigurationError(
                "jit_compile must be 'auto', or left out. Received: "
                f"jit_compile={self.jit_compile!r}. Pass True or False to "
                "model.compile."
            )
        check(self)

    @property
    def sums_rows(self) -> bool:
        """Whether the rows of one index are added up."""
        return self.embedding_gradients == "summed"


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Where, when and how many checkpoints a run keeps.

    Raises:
        ConfigurationError: A value breaks the rule of its field, two exclude
            each other, or one is given without `checkpoint_dir`.
    """

    checkpoint_dir: str | None = option(
        None,
        "A folder that every worker sees, for checkpoints of the whole state.",
    )
    save_every_steps: int | None = option(
        None,
        "Save after every N steps; after each epoch by default, and always "
        "at the end of the run.",
        least=1,
    )
    save_every_seconds: float | None = option(
        None, "Save when N seconds have passed.", above=0.0
    )
    keep_checkpoints: int = option(3, "How many checkpoints are kept.", least=1)
    resume: str = option(
        "auto",
        "auto: go on from the newest usable checkpoint, if any. always: only "
        "from a checkpoint. never: only where there is none.",
        RESUME,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.save_every_steps and self.save_every_seconds:
            raise ConfigurationError(
                "Give save_every_steps or save_every_seconds, not both. "
                f"Received: {self.save_every_steps} and "
                f"{self.save_every_seconds}."
            )
        if self.checkpoint_dir is not None:
            return
        for field in dataclasses.fields(SaveOptions):
            value = getattr(self, field.name)
            if value != field.default:
                raise ConfigurationError(
                    "Saving and resuming need checkpoint_dir. Received: "
                    f"{field.name}={value!r} without it."
                )

    @property
    def folder(self) -> str:
        """Returns the folder, where there is one."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir
