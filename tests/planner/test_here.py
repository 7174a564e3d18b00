"""A plan for the devices that are here, and the strategy that it makes."""

import logging

import keras
import pytest

import mgpu_tf
from mgpu_tf import planner
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StrategyOptions
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.machine import here
from mgpu_tf.planner.memory.per_device import memory_of
from mgpu_tf.planner.operations.tracing import trace
from mgpu_tf.strategies.registry import kind_of
from tests.planner import counts

BATCH = 24


def build():
    inputs = keras.Input((256,))
    hidden = inputs
    for _ in range(4):
        hidden = keras.layers.Dense(256, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def test_parts_of_one_cpu_are_not_used_where_one_device_will_do(caplog):
    caplog.set_level(logging.INFO, "mgpu_tf")
    strategy = mgpu_tf.create_strategy(
        "auto",
        for_model=build,
        global_batch_size=BATCH,
        num_virtual_devices=3,
    )
    assert kind_of(strategy).name == "one_device"
    assert "strategy one_device: one device: it takes" in caplog.text


def test_what_does_not_fit_on_one_is_split(monkeypatch):
    graph = trace(build)
    room = memory_of(graph, Layout(), BATCH).largest.total
    monkeypatch.setattr(here, "host_memory", lambda: 0.9 * 3 * room)
    options = StrategyOptions(num_virtual_devices=3)
    choice = here.choose(build, BATCH, options)
    assert choice.strategy in ("fsdp", "model_parallel")
    assert choice.options["num_virtual_devices"] in (2, 3)
    assert "it takes" in choice.why
    strategy = mgpu_tf.create_strategy(choice.strategy, **choice.options)
    assert kind_of(strategy).splits or strategy.mesh.pipeline > 1


def test_nothing_fits(monkeypatch):
    monkeypatch.setattr(here, "host_memory", lambda: 1000.0)
    with pytest.raises(ConfigurationError, match="a layout that fits"):
        here.choose(build, BATCH, StrategyOptions())


@pytest.mark.parametrize(
    "options",
    [
        {"for_model": build},
        {"global_batch_size": 8},
        {"name": "fsdp", "for_model": build, "global_batch_size": 8},
    ],
)
def test_options_that_go_together(options):
    with pytest.raises(ConfigurationError, match="go together, with 'auto'"):
        mgpu_tf.create_strategy(**options)


def test_the_run_of_a_plan(tmp_path):
    from mgpu_tf.reports import terminal
    from mgpu_tf.reports.report import Report

    config = mgpu_tf.RunConfig(
        strategy="plan", epochs=1, output_dir=str(tmp_path)
    )
    report = mgpu_tf.run(config, verbose=0)
    assert report.strategy == "one_device"
    told = Report.read(str(tmp_path)).predicted
    assert told["memory_bytes"]["predicted"] > 0
    measured = told["memory_bytes"]["measured"]
    assert measured > 0 if counts.are_there() else measured is None
    assert told["step_seconds"]["measured"] > 0
    assert "ms a step" in terminal.predicted_text(told)


def test_the_largest_batch_is_tried_by_one_step():
    graph = trace(build)
    room = memory_of(graph, Layout(), 512).largest.total
    rows = planner.largest_batch(build, memory_bytes=room)
    assert rows == pytest.approx(512, abs=1)
    with pytest.raises(ConfigurationError, match="a row for each device"):
        planner.largest_batch(build, memory_bytes=1000)
