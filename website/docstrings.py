"""Docstrings as the site shows them: examples as code, options as lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:\n((?:\1    .*\n?|\n)+)", re.M)
_OPTIONS = re.compile(r"^    \*\*options: .*\n((?:        .*\n?|\n)+)", re.M)
_OPTION = re.compile(r"^        (\w[\w, ]*): ", re.M)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of this package before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)


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
