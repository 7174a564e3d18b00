"""The call of a command, and the flags that several commands share."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import check_needs
from mgpu_tf.launch import isolation, local
from mgpu_tf.launch.job import GRACE_SECONDS, REPLAY
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.names import ISOLATE
from mgpu_tf.options import WatchOptions


@dataclasses.dataclass(frozen=True)
class Call:
    """The call of a command.

    Attributes:
        name: The name of the command.
        given: The arguments as they were typed.
        values: The values of the flags.
        rest: The arguments that are not flags.
        command: The arguments after `--`; None if no `--` was typed.
        commands: All commands of the program, by name.
    """

    name: str
    given: list[str]
    values: flags.FlagValues
    rest: list[str]
    command: list[str] | None
    commands: Mapping[str, ModuleType] = dataclasses.field(default_factory=dict)

    def takes_flags_only(self) -> None:
        """Refuses arguments that are not flags."""
        other = [*self.rest, *(self.command or [])]
        if other:
            raise ConfigurationError(
                f"{self.name} takes flags only. Received: {other[0]!r}. Write "
                "--name=value."
            )

    def own_command(self, flags_needed: str) -> list[str]:
        """Returns the command after `--`; a script is started by `python`.

        Args:
            flags_needed: An example of the flags before it.

        Raises:
            ConfigurationError: There is no command, or an argument before it
                is no flag.
        """
        if self.rest or not self.command:
            raise ConfigurationError(
                f"{self.name} takes flags, then -- and the command. Received: "
                f"{' '.join(self.given) or 'nothing'!r}. Write mgpu-tf "
                f"{self.name} {flags_needed} -- python script.py."
            )
        if self.command[0].endswith(".py"):
            return ["python", *self.command]
        return self.command

    def as_local_cluster(self, num_workers: int, **options: Any) -> int:
        """Runs the same command as worker processes of this machine.

        Args:
            num_workers: Number of worker processes.
            **options: The other fields of `LaunchJob`.

        Returns:
            The exit status.
        """
        # A module of the current folder must not stand for one of Python's,
        # unless that folder is where this package is.
        home = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        apart = [] if os.path.samefile(home, ".") else ["-P"]
        return local.launch(
            [sys.executable, *apart, "-m", "mgpu_tf", self.name, *self.given],
            num_workers,
            chief_has_terminal=True,
            isolate=self.values.isolate,
            needs=self._needs(),
            **options,
        )

    def _needs(self) -> str:
        """Returns what the command needs a network for, "" for nothing."""
        values = self.values
        data_dir = values.data_dir if "data_dir" in values else None
        return isolation.download(
            values.dataset, data_dir
        ) or isolation.outside(self.given, os.environ)


# What makes a command start processes of this machine.
STARTED = ("num_workers", "num_ps", "strategy=parameter_server")
# Flags of commands that start processes, and what each needs.
RESTART_NEEDS = {
    "backoff_seconds": ("max_restarts", "min_workers", "max_workers"),
}


def check_flags(
    values: flags.FlagValues, needs: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuses flags that have no effect beside the others.

    Args:
        values: The values of the flags.
        needs: For flags that need others, what they need, as for
            `fields.option`.

    Raises:
        ConfigurationError: A flag that was given has no effect.
    """
    every = {name: values[name].value for name in values}
    changed = {n for n, value in every.items() if value != values[n].default}
    for name, needed in needs.items():
        if values[name].present:
            check_needs(name, needed, every, changed)


def check_evaluator(values: flags.FlagValues) -> None:
    """Refuses an evaluator of a job whose workers wait for each other.

    Raises:
        ConfigurationError: --evaluator without parameter servers.
    """
    if values.evaluator and not values.num_ps:
        raise ConfigurationError(
            "An evaluator goes with parameter servers. Received: --evaluator "
            "without --num_ps. Write --num_ps=1, or leave it out."
        )


def define_supervision(values: flags.FlagValues) -> None:
    """Defines the flags of commands that start processes."""
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "Restart after a failure, at most N times.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "min_workers",
        None,
        "When no restart is left, continue with one worker less, down to N "
        "workers.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_workers",
        None,
        "After a failure, continue at once with the workers that there are "
        "machines for, from min_workers to N, and with more of them when "
        "machines come back.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "spares",
        0,
        "Keep N more processes that have imported TensorFlow, to take the "
        "place of processes of this machine that are restarted.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "backoff_seconds",
        1.0,
        "Seconds to wait before a restart. When the job fails again within a "
        "minute, the wait doubles.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "grace_seconds",
        GRACE_SECONDS,
        "Seconds that processes have to save and end after a signal.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "log_dir",
        None,
        "The folder for log files: one file for each process.",
        flag_values=values,
    )


def define_isolation(values: flags.FlagValues) -> None:
    """Defines the flag of commands that start processes on this machine."""
    flags.DEFINE_enum(
        "isolate",
        "auto",
        list(ISOLATE),
        "Give the processes of this machine a network of their own, so that "
        "nobody else reaches TensorFlow's ports. auto: where the kernel allows "
        "it, and no argument names an address on the network. The processes "
        "cannot download then.",
        flag_values=values,
    )


def supervision(
    values: flags.FlagValues, *, asynchronous: bool
) -> dict[str, Any]:
    """Returns the arguments of `local.launch` from these flags."""
    again = REPLAY not in os.environ  # A replay is not started again.
    return {
        "grace_seconds": values.grace_seconds,
        "watch": run_flags.options(WatchOptions, values),
        "policy": RestartPolicy(
            max_restarts=values.max_restarts if again else 0,
            min_workers=values.min_workers if again else None,
            max_workers=values.max_workers if again else None,
            backoff_seconds=values.backoff_seconds,
            unit="task" if asynchronous else "job",
        ),
        "log_dir": values.log_dir,
        "spares": values.spares if again else 0,
    }
