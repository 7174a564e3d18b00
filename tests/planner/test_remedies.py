"""The line for a step that does not fit, and the largest batch that does."""

import pytest

from mgpu_tf.planner.choice.remedies import explain, remedies
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.machine.largest import fitting_rows
from mgpu_tf.planner.memory.per_device import memory_of
from tests.planner.graphs import dense_graph

GRAPH = dense_graph((256,) * 9)


def test_the_line_names_kinds_and_three_remedies():
    line = explain(GRAPH, Layout(2), 8192)
    assert "\n" not in line
    assert "global_batch_size=8192 on data 2" in line
    assert "activations" in line
    assert line.count(" saves ") == 3


def test_remedies_save_what_the_estimate_says():
    found = {r.words: r.saves for r in remedies(GRAPH, Layout(), 8192)}
    now = memory_of(GRAPH, Layout(), 8192).largest.total
    half = memory_of(GRAPH, Layout(), 4096).largest.total
    assert found["global_batch_size=4096"] == now - half
    assert found["the policy 'mixed_bfloat16'"] > 0


def test_a_batch_of_unknown_size_has_a_line_too():
    assert "--auto_micro_batch" in explain(GRAPH, Layout(), 0)


@pytest.mark.parametrize("layout", [Layout(), Layout(fsdp=2)])
def test_the_largest_batch_is_the_largest(layout):
    room = 16 << 20
    rows = fitting_rows(GRAPH, layout, room)

    def needed(rows):
        return memory_of(GRAPH, layout, rows * layout.replicas).largest.total

    assert needed(rows) <= room < needed(rows + 1)


def test_no_row_fits():
    assert fitting_rows(GRAPH, Layout(), 1000) == 0
