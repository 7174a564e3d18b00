"""Docstrings name every option that a function takes."""

import dataclasses
import inspect
import re

import pytest

import mgpu_tf
from mgpu_tf.options import StepOptions, StrategyOptions


def options_in(text):
    """The names of the list below `**options`, some with one text."""
    block = re.search(r"\*\*options: .*\n((?: {8}.*\n)+)", text)[1]
    entries = re.split(r"^ {8}(?=\w)", block, flags=re.M)
    heads = [entry.partition(":")[0] for entry in entries]
    return {name for head in heads for name in re.findall(r"\w+", head)}


@pytest.mark.parametrize(
    ("taker", "kind"),
    [
        (mgpu_tf.Trainer, StepOptions),
        (mgpu_tf.create_strategy, StrategyOptions),
    ],
)
def test_every_option_is_told(taker, kind):
    names = {field.name for field in dataclasses.fields(kind)}
    assert names == options_in(inspect.getdoc(taker))


def arguments(function):
    found = inspect.signature(function).parameters
    return {name for name in found if name not in ("self", "options")}


@pytest.mark.parametrize("name", sorted(mgpu_tf.__all__))
def test_every_argument_is_told(name):
    value = getattr(mgpu_tf, name)
    functions = []
    if inspect.isfunction(value):
        functions.append((value, inspect.getdoc(value)))
    elif inspect.isclass(value) and not issubclass(value, BaseException):
        functions += [
            (method, inspect.getdoc(method))
            for key, method in vars(value).items()
            if inspect.isfunction(method)
            and not key.startswith("_")
            # What a base class declares has its arguments there.
            and not any(hasattr(base, key) for base in value.__mro__[1:])
        ]
        if not dataclasses.is_dataclass(value) and "__init__" in vars(value):
            functions.append((value.__init__, inspect.getdoc(value)))
    for function, text in functions:
        told = set(re.findall(r"^\s+\*{0,2}(\w+): ", text or "", re.M))
        told |= {
            each
            for line in re.findall(r"^\s+(\w+(?:, \w+)+): ", text or "", re.M)
            for each in line.split(", ")
        }
        assert arguments(function) <= told, function.__qualname__
