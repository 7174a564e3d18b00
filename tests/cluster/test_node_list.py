"""Slurm's node lists: any list, and the mistakes."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_tf.cluster.environments.node_list import expand, tasks_per_node
from mgpu_tf.errors import ClusterError

unhurried = settings(deadline=None, database=None)

# Written by hand; tests/cluster/test_slurm.py asks scontrol about the same.
LISTS = {
    "n1": ["n1"],
    "login,n2": ["login", "n2"],
    "n[1-12]": [f"n{i}" for i in range(1, 13)],
    "n[08-11,20]": ["n08", "n09", "n10", "n11", "n20"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[9-10,3]": ["n9", "n10", "n3"],
    "a[1-2],b7": ["a1", "a2", "b7"],
    "rack[1-2]n[1-4]": [f"rack{r}n{n}" for r in (1, 2) for n in range(1, 5)],
    "r[1-2]n[01-02],x": ["r1n01", "r1n02", "r2n01", "r2n02", "x"],
    "a[0-1]b[0-1]c[0-1]": [
        *("a0b0c0", "a0b0c1", "a1b0c0", "a1b0c1"),
        *("a0b1c0", "a0b1c1", "a1b1c0", "a1b1c1"),
    ],
    "gpu-[1-2]": ["gpu-1", "gpu-2"],
}


@pytest.mark.parametrize("text", LISTS)
def test_expanded(text):
    assert expand(text) == LISTS[text]


def number_range(width):
    """A range or a number in brackets, and the numbers that it stands for."""
    limit = st.integers(0, 10**width - 1)
    return st.builds(
        lambda first, more: (
            f"{first:0{width}}-{first + more:0{width}}"
            if more
            else f"{first:0{width}}",
            [f"{n:0{width}}" for n in range(first, first + more + 1)],
        ),
        limit,
        st.integers(0, 12),
    )


words = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True).map(
    lambda word: (word, [word])
)
brackets = (
    st.lists(st.integers(1, 4).flatmap(number_range), min_size=1, max_size=3)
    .map(
        lambda ranges: (
            "[" + ",".join(text for text, _ in ranges) + "]",
            [number for _, numbers in ranges for number in numbers],
        )
    )
    # No node is named twice.
    .filter(lambda pair: len(set(pair[1])) == len(pair[1]))
)
names = st.builds(
    lambda word, rest: [word, *rest],
    words,
    st.lists(st.one_of(brackets, words), max_size=3),
)


def items_of(text):
    return re.findall(r"(?:\[[^]]*\]|[^,\[])+", text)


def combined(parts):
    """All names: the parts before the last from the right to the left."""
    *before, last = parts
    names = [""]
    for values in before[::-1]:
        names = [
            (value, *rest) for rest in map(tuple, names) for value in values
        ]
    return ["".join(name) + value for name in names for value in last]


@st.composite
def any_list(draw):
    """A node list, and the names that it stands for."""
    items = draw(st.lists(names, min_size=1, max_size=4))
    return (
        ",".join("".join(part for part, _ in item) for item in items),
        [
            name
            for item in items
            for name in combined([values for _, values in item])
        ],
    )


node_lists = any_list()


@unhurried
@given(node_lists)
def test_any_list(example):
    text, expected = example
    if len(expected) <= 65536:
        assert expand(text) == expected


@unhurried
@given(st.text("n[]-,0129x ", max_size=20))
def test_any_text_is_a_list_or_a_line(text):
    try:
        found = expand(text)
    except ClusterError as error:
        assert "\n" not in str(error)
    else:
        assert found
        assert all(re.fullmatch(r"[^\[\],\s]+", name) for name in found)


@unhurried
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_tasks_per_node(counts):
    grouped = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    text = ",".join(
        f"{n}(x{times})" if times > 1 else str(n) for n, times in grouped
    )
    assert tasks_per_node(text) == counts


def test_uneven_tasks():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", "n[1-3", "n1]", "n[3-1]", "n[]", "n[a]", "n[1]]", "a b"],
)
def test_no_list(text):
    with pytest.raises(ClusterError, match="must name the nodes of a step"):
        expand(text)


@pytest.mark.parametrize("text", ["n[0-99999]", "n[0-999]m[0-999]"])
def test_too_many_nodes(text):
    with pytest.raises(ClusterError, match="at most 65536 nodes"):
        expand(text)


@pytest.mark.parametrize("text", ["", "2(3)", "x", "2(x3),", "-1"])
def test_no_counts(text):
    with pytest.raises(ClusterError, match="the tasks on each node"):
        tasks_per_node(text)
