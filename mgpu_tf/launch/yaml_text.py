"""YAML of plain values: the same text for the same value, always.

    yaml_text.document({"kind": "Job", "spec": {"completions": 2}})

Only what manifests need: objects, lists, strings, integers, booleans. What
could be read as something else is in double quotes.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Neither a number, nor a date, nor a word such as `no` or `null`.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/_.-]*(:[A-Za-z0-9/_.-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
# What YAML does not take as it is, inside quotes either.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def document(value: dict[str, Any]) -> str:
    """Returns a value as a document of YAML, with the line that begins it."""
    return "---\n" + "\n".join(_lines(value)) + "\n"


def _lines(value: dict[str, Any] | list[Any]) -> list[str]:
    """Returns an object or a list that is not empty as lines."""
    lines: list[str] = []
    if isinstance(value, dict):
        for name, member in value.items():
            lines += _member(f"{_text(name)}:", member)
        return lines
    for member in value:
        if isinstance(member, dict | list) and member:
            first, *rest = _lines(member)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines.append(f"- {_scalar(member)}")
    return lines


def _member(head: str, member: Any) -> list[str]:
    if isinstance(member, dict | list) and member:
        return [head, *(f"  {line}" for line in _lines(member))]
    return [f"{head} {_scalar(member)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if value in ({}, []):
        return "{}" if value == {} else "[]"
    if not isinstance(value, int):
        raise TypeError(f"No value of a manifest: {value!r}")
    return str(value)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
