"""Layouts, and the options that stand for them."""

import pytest

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.layout import Layout, layout_of


@pytest.mark.parametrize(
    ("layout", "strategy", "options"),
    [
        (Layout(), "one_device", {}),
        (Layout(4), "mirrored", {}),
        (Layout(2, 4), "fsdp", {"data_parallel": 2, "fsdp_parallel": 4}),
        (
            Layout(1, 1, 2),
            "model_parallel",
            {"data_parallel": 1, "tensor_parallel": 2},
        ),
        (
            Layout(1, 1, 1, 2, micro_batches=6),
            "model_parallel",
            {"data_parallel": 1, "pipeline_parallel": 2, "micro_batches": 6},
        ),
        (Layout(2, num_ps=1), "parameter_server", {}),
        (Layout(2, central=True), "central_storage", {}),
        (Layout(recompute="layers"), "one_device", {"recompute": "layers"}),
    ],
)
def test_names_and_options(layout, strategy, options):
    assert layout.strategy == strategy
    assert layout.options == options
    assert "recompute" not in layout.strategy_options


def test_rows_of_a_replica_are_those_of_the_fullest():
    assert Layout(4).rows(10) == 3
    assert Layout(1, 1, 4).rows(10) == 10
    assert Layout(2, accumulation=4).rows(64) == 8
    with pytest.raises(ConfigurationError, match="each part of a batch"):
        Layout(4).rows(3)
    with pytest.raises(ConfigurationError, match="global_batch_size"):
        Layout().rows(0)


def test_options_make_the_layout():
    made = layout_of("fsdp", 8, data_parallel=2)
    assert (made.data, made.fsdp) == (2, 4)
    made = layout_of("model_parallel", 4, tensor_parallel=2)
    assert (made.data, made.tensor) == (2, 2)
    with pytest.raises(ConfigurationError, match="multiply"):
        layout_of("fsdp", 4, data_parallel=3)


def test_it_reads_as_words():
    text = str(Layout(2, 4, accumulation=2, recompute="layers"))
    assert text == "data 2 x fsdp 4, accumulation 2, recompute layers"
    assert str(Layout()) == "one device"
