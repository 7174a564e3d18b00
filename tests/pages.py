"""The commands of a page in docs, for the tests that run them."""

import pathlib
import re

from tests import clusters

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(name, language):
    """Returns the fenced blocks of a page in one language.

    Args:
        name: The file, such as "slurm.md".
        language: Such as "sh".
    """
    page = pathlib.Path(clusters.ROOT, "docs", name).read_text()
    return [text for kind, text in _FENCE.findall(page) if kind == language]


def languages(name):
    """Returns the languages of the fenced blocks of a page."""
    page = pathlib.Path(clusters.ROOT, "docs", name).read_text()
    return [kind for kind, _ in _FENCE.findall(page)]
