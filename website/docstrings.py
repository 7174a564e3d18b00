"""Docstrings as the site shows them: examples as code, options as lists.

The help of an option is in its field, which the reference shows as a table.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:\n((?:\1    .*\n?|\n)+)", re.M)
_OPTIONS = re.compile(r"^    \*\*options: .*\n((?:        .*\n?|\n)+)", re.M)
_OPTION = re.compile(r"^        (\w[\w, ]*): ", re.M)

# They import no TensorFlow.
_MODULES_OF_OPTIONS = ("mgpu_tf.options", "mgpu_tf.config")


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of this package before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            fields = fields_of(obj.path) if obj.is_class else ""
            obj.docstring.value = shown(obj.docstring.value) + fields


def fields_of(path: str) -> str:
    """Returns the options of a class as the section `Attributes` of docstrings.

    Args:
        path: Of a class, such as "mgpu_tf.options.StepOptions".

    Returns:
        The section; "" for a class without options.
    """
    module, _, name = path.rpartition(".")
    if module not in _MODULES_OF_OPTIONS:
        return ""
    kind = getattr(importlib.import_module(module), name)
    if not dataclasses.is_dataclass(kind):
        return ""
    lines = []
    for field in dataclasses.fields(kind):
        known = field.metadata
        if "help" not in known:
            continue
        text = known["help"]
        if known["choices"]:
            text += f" One of: {', '.join(known['choices'])}."
        if known["needs"]:
            text += f" Has an effect with {' or '.join(known['needs'])}."
        if field.default not in (None, "", dataclasses.MISSING):
            text += f" Default: {field.default!r}."
        lines.append(f"    {field.name}: {text}\n")
    return f"\n\nAttributes:\n{''.join(lines)}" if lines else ""


def shown(text: str) -> str:
    """Returns a docstring with fenced examples and lists of options.

    Args:
        text: As it stands in the source, without its indentation.
    """
    text = _EXAMPLE.sub(_fenced, text + "\n")
    return _OPTIONS.sub(_listed, text).rstrip()


def _fenced(found: re.Match[str]) -> str:
    inner = found[1] + "    "
    code = found[2].rstrip()
    return f"{found[1]}Example:\n{inner}```python\n{code}\n{inner}```\n\n"


def _listed(found: re.Match[str]) -> str:
    return found[0].replace(
        found[1], "\n" + _OPTION.sub(r"        - `\1`: ", found[1]), 1
    )
