"""Where, when and how many checkpoints a run keeps, as one value.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name

RESUME = ("auto", "always", "never")


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Where, when and how many checkpoints a run keeps.

    Attributes:
        folder: Where they are kept; every worker has to see it.
        every_steps: Save after each so many steps.
        every_seconds: Save when so much time has passed.
        keep: How many are kept.
        resume: "auto" goes on from the newest usable one, "always" refuses
            to begin without one, "never" refuses a folder that has any.

    Raises:
        ConfigurationError: A value is out of range, or two exclude each
            other.
    """

    folder: str
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    resume: str = "auto"

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            check_integer("save_every_steps", self.every_steps, 1)
        check_integer("keep_checkpoints", self.keep, 1)
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise ConfigurationError(
                "save_every_seconds must be above 0. Received: "
                f"save_every_seconds={self.every_seconds!r}."
            )
        if self.every_steps is not None and self.every_seconds is not None:
            raise ConfigurationError(
                "Give save_every_steps or save_every_seconds, not both. "
                f"Received: {self.every_steps} and {self.every_seconds}."
            )
        if self.resume not in RESUME:
            raise ConfigurationError(
                unknown_name("resume", self.resume, RESUME)
            )


def save_options(folder: str | None, **options: Any) -> SaveOptions | None:
    """Returns what `fit` was given, None without a folder.

    Raises:
        ConfigurationError: An option is given without a folder, or is out
            of range.
    """
    if folder is not None:
        return SaveOptions(os.fspath(folder), **options)
    defaults = {f.name: f.default for f in dataclasses.fields(SaveOptions)}
    for name, value in options.items():
        if value != defaults[name]:
            raise ConfigurationError(
                "Saving and resuming need checkpoint_dir. Received: "
                f"{name}={value!r} without it."
            )
    return None
