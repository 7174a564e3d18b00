"""What the build of the site adds: the table of errors, and links out of docs.

The table has the message of every error that the package raises, read from its
source. A link to a file that the site does not have, outside of `docs/` or a
.json file in it, becomes the path of the file.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
ERRORS = ("ConfigurationError", "ClusterError", "DivergedError", "NoRoom")

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./([^)#]+)|([^)#/]+\.json))[^)]*\)")
_MARK = "<!-- errors: the table -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds the table of errors, and rewrites links out of the site."""
    if page.file.src_uri == "errors.md":
        markdown = markdown.replace(_MARK, table())
    return _OUTSIDE.sub(_path, markdown)


def _path(link: re.Match[str]) -> str:
    text, path = link[1], link[2] or f"docs/{link[3]}"
    inside = text.startswith("`") or "/" in text or path.endswith(text)
    return f"`{path}`" if inside else f"{text} (`{path}`)"


def table() -> str:
    """Returns the errors as tables, one for each part of the package."""
    parts: dict[str, list[str]] = {}
    for path in sorted((ROOT / "mgpu_tf").rglob("*.py")):
        room = path.relative_to(ROOT / "mgpu_tf").parts[0].removesuffix(".py")
        for message in sorted(set(messages(ast.parse(path.read_text())))):
            parts.setdefault(room, []).append(_row(message))
    lines = []
    for room, rows in sorted(parts.items()):
        lines += [f"### {room}", "", "| rule | remedy |", "|---|---|"]
        lines += [*rows, ""]
    return "\n".join(lines)


def messages(tree: ast.AST) -> Iterator[str]:
    """Yields the messages of the errors that a module raises.

    Args:
        tree: The module. What an error is told at run time stands as `…`.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            text = " ".join(_text(node.args[0]).split())
            if "Received:" in text:
                yield text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body)
    return "…"


def _row(message: str) -> str:
    rule, _, rest = message.partition(" Received:")
    # The remedy follows the first sentence of what was received.
    _, _, remedy = rest.partition(". ")
    return f"| {_cell(rule)} | {_cell(remedy)} |"


def _cell(text: str) -> str:
    for mark, safe in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(mark, safe)
    return text.replace("`", "'")
