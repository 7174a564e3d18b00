"""What a command is called with, and the flags that several share."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from absl import flags

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import local
from mgpu_tf.launch.job import GRACE_SECONDS
from mgpu_tf.launch.policy import RestartPolicy


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a command.

    Attributes:
        name: The command's name.
        given: The arguments as they were typed.
        values: The values of its flags.
        rest: What is no flag.
        command: What stands after `--`; None where no `--` was typed.
    """

    name: str
    given: list[str]
    values: flags.FlagValues
    rest: list[str]
    command: list[str] | None

    def takes_flags_only(self) -> None:
        """Refuses whatever is no flag."""
        other = [*self.rest, *(self.command or [])]
        if other:
            raise ConfigurationError(
                f"{self.name} takes flags only. Received: {other[0]!r}. Write "
                "--name=value."
            )

    def as_local_cluster(self, num_workers: int, **options: Any) -> int:
        """Runs the same command as worker processes of this machine.

        Args:
            num_workers: How many.
            **options: The other fields of `LaunchJob`.

        Returns:
            The exit status.
        """
        return local.launch(
            [sys.executable, "-m", "mgpu_tf", self.name, *self.given],
            num_workers,
            chief_has_terminal=True,
            **options,
        )


def define_supervision(values: flags.FlagValues) -> None:
    """Defines the flags of whatever starts processes."""
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "How often the job is started again when a process fails.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "min_workers",
        None,
        "With the restarts used up, go on with one process less, down to N.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "backoff_seconds",
        1.0,
        "The pause before a restart; it doubles while attempts fail soon.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "grace_seconds",
        GRACE_SECONDS,
        "How long processes have to save and end after a signal.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "log_dir",
        None,
        "Gets a file with the output of each process.",
        flag_values=values,
    )


def supervision(
    values: flags.FlagValues, *, asynchronous: bool
) -> dict[str, Any]:
    """Returns what those flags mean to `local.launch`."""
    return {
        "grace_seconds": values.grace_seconds,
        "policy": RestartPolicy(
            max_restarts=values.max_restarts,
            min_workers=values.min_workers,
            backoff_seconds=values.backoff_seconds,
            unit="task" if asynchronous else "job",
        ),
        "log_dir": values.log_dir,
    }
