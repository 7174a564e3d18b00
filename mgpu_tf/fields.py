"""Fields of options: dataclass fields that know their help and their rule.

    @dataclasses.dataclass(frozen=True)
    class StepOptions:
        gradient_dtype: str | None = option(
            None, "Send gradients with half the bytes.", GRADIENT_DTYPES
        )

        def __post_init__(self):
            check(self)

An option is defined once, there. Its flag, its help, its check and when it has
an effect come from the field; what reads it is the second place that knows it.

An option that has an effect with others alone names them in `needs`, any one of
them: "checkpoint_dir" (it is given), "on_nan=restore" (it has this value), or
"not print" (it is not given). It is refused without them.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from mgpu_tf.errors import ConfigurationError, is_integer, unknown_name
from mgpu_tf.folders import check_path

T = TypeVar("T")


def option(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    least: int | None = None,
    most: int | None = None,
    above: float | None = None,
    is_path: bool = False,
    needs: tuple[str, ...] = (),
) -> Any:
    """Returns a field for an option.

    Args:
        default: The value where none is given.
        text: The help: sentences that end with a full stop.
        choices: The names that it takes, where it takes names.
        least: The least number that it takes.
        most: The greatest number that it takes.
        above: The number that it must be above, and finite.
        is_path: Whether it is the path of a file or folder.
        needs: Without what it has no effect; any one of them is enough.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": text,
            "choices": choices,
            "least": least,
            "most": most,
            "above": above,
            "is_path": is_path,
            "needs": needs,
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
    check_effects(options)


def check_effects(
    options: Any,
    given: Collection[str] = (),
    known: Mapping[str, Any] | None = None,
) -> None:
    """Refuses options that have no effect.

    Args:
        options: A dataclass whose fields are made by `option`.
        given: Names of options that were given, also with their defaults.
        known: More values, by name, that others need.

    Raises:
        ConfigurationError: An option that was given needs one that was not.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    values = {name: getattr(options, name) for name in fields} | dict(
        known or {}
    )
    if values.get("strategy") == "auto":
        del values["strategy"]  # It is known when the strategy is created.
    changed = {
        name
        for name, value in values.items()
        if name not in fields or value != fields[name].default
    }
    for name, field in fields.items():
        if name in changed or name in given:
            check_needs(name, field.metadata["needs"], values, changed)


def check_needs(
    name: str,
    needs: tuple[str, ...],
    values: Mapping[str, Any],
    changed: Collection[str],
) -> None:
    """Refuses an option or flag that has no effect.

    Args:
        name: Of the option, which was given.
        needs: As for `option`.
        values: The values of all options by their names; what is not among
            them is not checked.
        changed: The names of those that are not their defaults.

    Raises:
        ConfigurationError: It needs what was not given.
    """
    if not needs or any(_is_met(one, values, changed) for one in needs):
        return
    names = dict.fromkeys(
        one.removeprefix("not ").split("=")[0] for one in needs
    )
    told = ", ".join(f"{one}={values[one]!r}" for one in (name, *names))
    if needs[0].startswith("not "):
        raise ConfigurationError(
            f"{name} has no effect with {' and '.join(names)}. Received: "
            f"{told}. Leave one of them out."
        )
    raise ConfigurationError(
        f"{name} has an effect with {' or '.join(needs)} only. Received: "
        f"{told}. Give it too, or leave {name} out."
    )


def _is_met(
    need: str, values: Mapping[str, Any], changed: Collection[str]
) -> bool:
    name, _, wanted = need.removeprefix("not ").partition("=")
    if name not in values:
        return True
    value = values[name]
    if wanted:
        return str(value) == wanted
    is_set = name in changed and value not in (None, False, "", ())
    return is_set != need.startswith("not ")


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
    if rule["is_path"]:
        check_path(name, value)
    least, most, above = rule["least"], rule["most"], rule["above"]
    if least is not None and value < least:
        raise ConfigurationError(
            f"{name} must be {least} or more. Received: {name}={value}."
        )
    if most is not None and value > most:
        raise ConfigurationError(
            f"{name} must be {most} or less. Received: {name}={value}."
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


def made_of(kind: type[T], values: Mapping[str, Any], taker: str) -> T:
    """Returns options of one kind from keyword arguments.

    Args:
        kind: The dataclass.
        values: The arguments.
        taker: The function that was called with them.

    Raises:
        ConfigurationError: It has no such option, or a value breaks a rule.
    """
    known = names_of(kind)
    for name in values:
        if name not in known:
            raise ConfigurationError(
                unknown_name(f"argument of {taker}", name, known)
            )
    return kind(**values)
