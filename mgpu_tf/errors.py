"""The errors that a user sees, each with a message of one line.

    ConfigurationError (ValueError)   an argument, flag or environment
    |                                 variable breaks a rule
    `-- ClusterError                  TF_CONFIG or the scheduler describes no
                                      usable cluster
    CheckpointError (RuntimeError)    a checkpoint cannot be used
    WorkerError (RuntimeError)        another worker of the cluster failed
    DivergedError (RuntimeError)      replicas hold other weights, or the loss
                                      is not finite
    OutOfMemoryError (RuntimeError)   a device has no room for a step
    Preempted (SystemExit)            SIGTERM was received; state is saved

The message of a `ConfigurationError` has the rule, what was received, and the
remedy. The command line prints it without a traceback and exits with status 2.
After a `CheckpointError` it exits with status 1, and a job may begin again.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from importlib import metadata

from mgpu_tf.names import ELSEWHERE

# The exit status of a process that has saved its state and can be started
# again: EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75

# The letters of a part of a name by which the whole is found.
_LEAST_PART = 3


class ConfigurationError(ValueError):
    """An argument, flag or environment variable breaks a rule."""

    # Keras adds the arguments of a layer to errors that its call raises, many
    # lines of them, unless an error says that it has been there.
    _keras_call_info_injected = True


class ClusterError(ConfigurationError):
    """`TF_CONFIG` or the scheduler describes no usable cluster."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names it and says why."""


class WorkerError(RuntimeError):
    """Another worker of the cluster failed; the message has its exception."""


class DivergedError(RuntimeError):
    """Replicas differ that must be the same, or the loss is not finite."""


class OutOfMemoryError(RuntimeError):
    """A device has no room for a step; the message says what takes it."""


class Preempted(SystemExit):
    """SIGTERM was received, and the state is saved.

    If the exception is not caught, the process ends with exit code 75.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


def printable(text: str) -> str:
    """Returns a text whose control characters are escaped.

    For what others have written, and a terminal would obey.

    Example:
        >>> print(printable("step\\x1b[2J"))
        step\\x1b[2J
    """
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer of Python or NumPy."""
    if isinstance(value, bool | type):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except Exception:
        return False  # An array has the method too, and raises.
    return True


def check_integer(
    name: str, value: object, least: int, most: int | None = None
) -> None:
    """Checks that a value is an integer of `least` or more, to `most`.

    Raises:
        ConfigurationError: The value is no such integer.
    """
    if not is_integer(value) or value < least:  # type: ignore[operator]
        raise ConfigurationError(
            f"{name} must be an integer of {least} or more. Received: "
            f"{name}={repr(value)[:100]}."
        )
    if most is not None and value > most:  # type: ignore[operator]
        raise ConfigurationError(
            f"{name} must be {most} or less. Received: "
            f"{name}={repr(value)[:100]}."
        )


def check_number(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Checks that a value is a finite number in a range.

    Args:
        name: What it is.
        value: A number of Python or NumPy.
        least: The least that it may be.
        above: What it must be above.
        below: What it must be below.

    Raises:
        ConfigurationError: The value is no such number.
    """
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if math.isfinite(number) and (
        least <= number and above < number and number < below
    ):
        return
    ends = (
        ("of", least, "or more"),
        ("above", above, ""),
        ("below", below, ""),
    )
    bounds = " and ".join(
        f"{word} {end:g} {rest}".strip()
        for word, end, rest in ends
        if math.isfinite(end)
    )
    raise ConfigurationError(
        f"{name} must be a finite number {bounds}".strip()
        + f". Received: {name}={repr(value)[:100]}."
    )


def check_names(name: str, value: object) -> None:
    """Checks that a value is a list, tuple or set of names.

    Raises:
        ConfigurationError: It is something else, such as a single name.
    """
    if isinstance(value, list | tuple | set | frozenset) and all(
        isinstance(part, str) for part in value
    ):
        return
    raise ConfigurationError(
        f"{name} must be a list of names. Received: {name}={repr(value)[:100]}."
    )


def installing(extra: str) -> str:
    """Returns the command that installs the packages of an extra.

    It works wherever this package was installed from.

    Example:
        >>> installing("plot")
        "pip install 'matplotlib>=3.8'"

    Args:
        extra: The name of an extra of this package.
    """
    try:
        lines = metadata.requires("mgpu_tf") or []
    except metadata.PackageNotFoundError:
        lines = []
    named = [
        line.partition(";")[0].strip()
        for line in lines
        if line.partition(";")[2].replace("'", '"').strip()
        == f'extra == "{extra}"'
    ]
    return "pip install " + " ".join(f"'{one}'" for one in named)


def nearest(received: str, valid: Sequence[str]) -> str:
    """Returns the valid name that was meant, "" where none is near.

    Args:
        received: A name that is not valid.
        valid: The valid names.
    """
    meant = ELSEWHERE.get(received)
    if meant is not None:
        return next((name for name in meant.names if name in valid), "")
    near = difflib.get_close_matches(received, valid, n=1, cutoff=0.6)
    if near or len(received) < _LEAST_PART:
        return near[0] if near else ""
    return min((n for n in valid if received in n), key=len, default="")


def hint(received: str, valid: Sequence[str], prefix: str = "") -> str:
    """Returns a sentence on what was meant, "" where nothing is known.

    Example:
        >>> hint("lr", ["precision"])
        'Use the optimizer in build_model (learning_rate=0.1).'

    Args:
        received: A name that is not valid.
        valid: The valid names.
        prefix: What stands before a name where it is written, such as "--".
    """
    near = nearest(received, valid)
    if near:
        return f"Did you mean {prefix + near!r}?"
    meant = ELSEWHERE.get(received)
    return f"Use {meant.place}." if meant is not None and meant.place else ""


def unknown_name(kind: str, received: object, valid: Iterable[str]) -> str:
    """Returns the message for a name that is not among the valid ones.

    Example:
        >>> unknown_name("strategy", "miror", ["mirrored", "tpu"])
        "Unknown strategy. Received: 'miror'. Did you mean 'mirrored'? \
Valid: mirrored, tpu."

    Args:
        kind: The kind of the name, such as "strategy".
        received: The unknown name.
        valid: The valid names.

    Returns:
        One line: the rule, what was received, the name or place that was
        meant.
    """
    names = list(valid)
    parts = (
        f"Unknown {kind}. Received: {received!r}.",
        hint(str(received), names),
        f"Valid: {', '.join(names)}.",
    )
    return " ".join(filter(None, parts))
