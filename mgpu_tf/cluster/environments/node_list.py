"""Slurm's notation for the names of nodes and for tasks on nodes.

    expand("n[08-10,20],login")      # n08, n09, n10, n20, login
    expand("rack[1-2]n[1-2]")        # rack1n1, rack1n2, rack2n1, rack2n2
    tasks_per_node("2(x3),1")        # 2, 2, 2, 1

The order is that of Slurm, which is the order of the nodes in a step.
"""

from __future__ import annotations

import itertools
import re

from mgpu_tf.errors import ClusterError

# As many nodes as a cluster of Slurm can have, and as many tasks.
MOST = 65536

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_ITEM = re.compile(r"(?:\[[^\[\]]*\]|[^\[\],\s])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand(text: str) -> list[str]:
    """Returns the names of a node list, in Slurm's order.

    Args:
        text: The node list, such as `n[1-4,7],login`.

    Raises:
        ClusterError: The text is no node list, or has too many nodes.
    """
    names: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _no_list(text)
        parts, number = [], 1
        for numbers, word in _PART.findall(item[0]):
            parts.append([word] if word else _numbers(numbers, text))
            number *= len(parts[-1])
        if len(names) + number > MOST:
            raise _too_many(text)
        names += _combined(parts)
        position = item.end()
        if position == len(text):
            return names
        if text[position] != ",":
            raise _no_list(text)
        position += 1


def tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node.

    Args:
        text: Such as `2(x3),1`.

    Raises:
        ClusterError: The text is no such list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ClusterError(
                "Slurm must name the tasks on each node, such as 2(x3),1. "
                f"Received: {text!r}. Start the script with srun."
            )
        times = int(match[2] or 1)
        if len(counts) + times > MOST:
            raise _too_many(text)
        counts += [int(match[1])] * times
    return counts


def _combined(parts: list[list[str]]) -> list[str]:
    """Returns all combinations of the parts of a name, in Slurm's order.

    The last part varies fastest, and before it the first, the second and so
    on: of two parts the first varies slowest, of three parts the second.
    """
    order = [*range(len(parts) - 2, -1, -1), len(parts) - 1]
    names = []
    for chosen in itertools.product(*(parts[index] for index in order)):
        by_part = dict(zip(order, chosen, strict=True))
        names.append("".join(by_part[index] for index in range(len(parts))))
    return names


def _numbers(text: str, whole: str) -> list[str]:
    """Returns the numbers in brackets, with the zeros in front."""
    found: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _no_list(whole)
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _no_list(whole)
        if int(last) - int(first) >= MOST:
            raise _too_many(whole)
        found += [
            str(number).zfill(len(first))
            for number in range(int(first), int(last) + 1)
        ]
    return found


def _no_list(text: str) -> ClusterError:
    return ClusterError(
        "Slurm must name the nodes of a step, such as n[1-4,7]. Received: "
        f"{text[:80]!r}. Start the script with srun."
    )


def _too_many(text: str) -> ClusterError:
    return ClusterError(
        f"A step has at most {MOST} nodes. Received: {text[:80]!r}. Start the "
        "script with srun on fewer nodes."
    )
