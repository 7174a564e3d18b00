"""Fields of options: dataclass fields that know their help and their rule.

    @dataclasses.dataclass(frozen=True)
    class StepOptions:
        gradient_dtype: str | None = option(
            None, "Send gradients with half the bytes.", GRADIENT_DTYPES
        )

        def __post_init__(self):
            check(self)

An option is defined once, there. Its flag, its help and its check come from
the field; what reads it is the second place that knows it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from mgpu_tf.errors import ConfigurationError, is_integer, unknown_name

T = TypeVar("T")


def option(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    least: int | None = None,
    above: float | None = None,
) -> Any:
    """Returns a field for an option.

    Args:
        default: The value where none is given.
        text: The help: sentences that end with a full stop.
        choices: The names that it takes, where it takes names.
        least: The least number that it takes.
        above: The number that it must be above, and finite.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": text,
            "choices": choices,
            "least": least,
            "above": above,
        },
    )


def check(options: Any) -> None:
    """Checks type, name and range of every option.

    Args:
        options: A dataclass whose fields are made by `option`.

    Raises:
        ConfigurationError: A value breaks the rule of its field.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        _check_type(field.name, value, hints[field.name])
        if value is not None:
            _check_value(field.name, value, field.metadata)


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = [
        typing.get_origin(kind) or kind
        for kind in (typing.get_args(hint) or (hint,))
    ]
    if float in kinds:
        kinds.append(int)
    fits = isinstance(value, tuple(kinds))
    if isinstance(value, bool):
        fits = bool in kinds
    elif int in kinds:
        fits = fits or is_integer(value)
    if not fits:
        names = [
            "None" if kind is type(None) else kind.__name__ for kind in kinds
        ]
        raise ConfigurationError(
            f"{name} must be of type {' or '.join(names)}. Received: "
            f"{name}={value!r}."
        )


def _check_value(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigurationError(unknown_name(name, value, rule["choices"]))
    least, above = rule["least"], rule["above"]
    if least is not None and value < least:
        raise ConfigurationError(
            f"{name} must be {least} or more. Received: {name}={value}."
        )
    if above is not None and not above < value < math.inf:
        raise ConfigurationError(
            f"{name} must be above {above:g} and finite. Received: "
            f"{name}={value}."
        )


def names_of(kind: type) -> list[str]:
    """Returns the names of the options of a dataclass."""
    return [field.name for field in dataclasses.fields(kind)]


def pick(kind: type[T], source: Any) -> T:
    """Returns options of one kind, taken from a value that has them all."""
    return kind(**{name: getattr(source, name) for name in names_of(kind)})


def made_of(
    kind: type[T],
    values: Mapping[str, Any],
    taker: str,
    others: Mapping[str, type] | None = None,
) -> T:
    """Returns options of one kind from keyword arguments.

    Args:
        kind: The dataclass.
        values: The arguments.
        taker: The function that was called with them.
        others: What takes the options of other kinds, by its name.

    Raises:
        ConfigurationError: It has no such option, or a value breaks a rule.
    """
    known = names_of(kind)
    for name in values:
        if name not in known:
            for other, its_kind in (others or {}).items():
                if name in names_of(its_kind):
                    raise ConfigurationError(
                        f"{name} is an argument of {other}. Received: "
                        f"{name}={values[name]!r} for {taker}. Pass it to "
                        f"{other}."
                    )
            raise ConfigurationError(
                unknown_name(f"argument of {taker}", name, known)
            )
    return kind(**values)
