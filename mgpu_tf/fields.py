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
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from mgpu_tf.errors import ConfigurationError, is_integer, unknown_name
from mgpu_tf.folders import check_path

P = ParamSpec("P")
R = TypeVar("R")
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
    check_types(options)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
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
    received = ", ".join(f"{one}={values[one]!r}" for one in (name, *names))
    if needs[0].startswith("not "):
        raise ConfigurationError(
            f"{name} has no effect with {' and '.join(names)}. Received: "
            f"{received}. Leave one of them out."
        )
    raise ConfigurationError(
        f"{name} has an effect with {' or '.join(needs)} only. Received: "
        f"{received}. Give it too, or leave {name} out."
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


def check_types(values: Any) -> None:
    """Checks that the fields of a dataclass have the types they declare.

    Raises:
        ConfigurationError: One has another type.
    """
    hints = typing.get_type_hints(type(values))
    for field in dataclasses.fields(values):
        _check_type(field.name, getattr(values, field.name), hints[field.name])


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Has the arguments of a public function checked by their annotations.

    Raises, when the function is called:
        ConfigurationError: An argument has another type.
    """
    signature = inspect.signature(function)
    takes_any = _VAR_KEYWORD in {
        parameter.kind for parameter in signature.parameters.values()
    }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = _annotations(function)
        for name in kwargs:
            if not takes_any and name not in signature.parameters:
                raise ConfigurationError(
                    unknown_name(
                        f"argument of {function.__name__}",
                        name,
                        signature.parameters,
                    )
                )
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{function.__name__}: {error}. Its arguments are "
                f"{', '.join(signature.parameters)}."
            ) from None
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind not in (inspect.Parameter.VAR_POSITIONAL, _VAR_KEYWORD):
                _check_type(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call


_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


@functools.cache
def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of arguments that are known when a program runs."""
    found = {}
    for name, text in function.__annotations__.items():
        try:
            found[name] = eval(text, function.__globals__)
        except NameError:
            found[name] = Any  # It is imported for type checkers alone.
    return found


def _check_type(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise ConfigurationError(
            f"{name} must be of type {_named(hint)}. Received: "
            f"{name}={repr(value)[:100]}."
        )


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is of a type, and so are its elements."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if hint is Any:
        return True
    if hint is int:
        return is_integer(value)
    if hint is float:
        is_number = isinstance(value, numbers.Real)
        return is_number and not isinstance(value, bool)
    if not isinstance(value, origin or hint):
        return False
    if origin in (tuple, Sequence):
        is_text = isinstance(value, str | bytes)
        return not is_text and all(_fits(one, inner[0]) for one in value)
    return True


def _named(hint: Any) -> str:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_named, inner))
    if hint is type(None):
        return "None"
    return getattr(hint, "__name__", str(hint))


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
