"""The mistakes a user can make, each told in one line.

    ConfigurationError (ValueError)   an argument, flag or environment
    |                                 variable breaks a rule
    `-- ClusterError                  TF_CONFIG does not describe a cluster
    WorkerError (RuntimeError)        another worker of the cluster failed
    Preempted (SystemExit)            SIGTERM came, and the state is saved

Every message says the rule, what was received, and the remedy. The command
line prints it without a traceback and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The exit status of a process that has saved and can be started again, as
# sysexits.h has it: a temporary failure.
PREEMPTED = 75


class ConfigurationError(ValueError):
    """An argument, flag or environment variable breaks a rule."""


class ClusterError(ConfigurationError):
    """`TF_CONFIG` does not describe a usable cluster."""


class WorkerError(RuntimeError):
    """Another worker of the cluster failed; the message is its exception."""


class Preempted(SystemExit):
    """The process was told to end by SIGTERM, and its state is saved.

    Left alone it ends the process with exit code 75.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer, NumPy's included."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int) -> None:
    """Refuses what is no integer of `least` or more.

    Raises:
        ConfigurationError: The value is something else.
    """
    if not is_integer(value) or value < least:  # type: ignore[operator]
        raise ConfigurationError(
            f"{name} must be an integer of {least} or more. Received: "
            f"{name}={value!r}."
        )


def unknown_name(kind: str, received: object, valid: Iterable[str]) -> str:
    """Returns the message for a name that is not among the valid ones.

    Example:
        >>> unknown_name("strategy", "miror", ["mirrored", "tpu"])
        "Unknown strategy. Received: 'miror'. Did you mean 'mirrored'? \
Valid: mirrored, tpu."

    Args:
        kind: What the name stands for, such as "strategy".
        received: The name as it came.
        valid: The names that would have been right.

    Returns:
        One line: the rule, what was received, the nearest valid name.
    """
    names = list(valid)
    near = difflib.get_close_matches(str(received), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"Unknown {kind}. Received: {received!r}.{hint} "
        f"Valid: {', '.join(names)}."
    )
