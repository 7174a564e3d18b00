"""Estimates against hand calculations, and against the allocator."""

import dataclasses
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import planner
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.memory.per_device import memory_of, stages_of
from mgpu_tf.planner.memory.program import Program, as_they_run
from mgpu_tf.planner.memory.rules import RULES
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.graph import Operation
from mgpu_tf.planner.operations.liveness import KINDS
from mgpu_tf.planner.operations.tracing import trace
from tests.planner import counts
from tests.planner.graphs import dense_graph

MIB = 1 << 20


def kinds(layout, batch=8, **options):
    graph = dense_graph(**options)
    return memory_of(graph, layout, batch).largest.by_kind


def test_state_is_counted():
    found = kinds(Layout(), widths=(64, 64, 64))
    assert found["parameters"] == 2 * 64 * 64 * 4
    assert found["slots"] == 2 * 64 * 64 * 8
    assert tuple(found) == KINDS


def test_activations_grow_with_rows_and_state_does_not():
    few, many = kinds(Layout(), 1000), kinds(Layout(), 10_000)
    assert many["activations"] == 10 * few["activations"]
    assert many["parameters"] == few["parameters"]


def test_fsdp_stores_parts_and_gathers_at_most_two_layers():
    widths = (64,) * 9
    whole = 64 * 64 * 4
    # One after another, with nothing that runs beside.
    rules = dataclasses.replace(RULES, beside=0)
    graph = dense_graph(widths)
    found = memory_of(graph, Layout(fsdp=4), 8, rules=rules).largest.by_kind
    assert found["parameters"] == 8 * whole / 4
    assert found["slots"] == 8 * 64 * 64 * 8 / 4
    assert 0 < found["gathered weights"] <= 2 * whole
    assert kinds(Layout(data=4), widths=widths)["gathered weights"] == 0


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_fsdp_holds_few_layers_whole_and_the_parts_of_few(devices):
    """Weights of two, gradients of two, and one that is received."""
    whole = 64 * 64 * 4
    rules = dataclasses.replace(RULES, beside=0)
    graph, layout = dense_graph((64,) * 25), Layout(fsdp=devices)
    found = memory_of(graph, layout, 8, rules=rules).largest.by_kind
    held = ("gathered weights", "gradients", "reduction")
    most = sum(found[kind] for kind in held)
    parts = 3
    assert 4 * whole < most <= (5 + parts / devices) * whole


def test_splitting_only_the_optimizer_keeps_whole_weights():
    widths, part = (64, 64), 64 * 64 * 4
    found = kinds(Layout(fsdp=2, shard="optimizer"), widths=widths)
    assert found["parameters"] == part + part / 2
    assert found["slots"] == 64 * 64 * 8 / 2


def test_small_weights_are_not_split():
    found = kinds(Layout(fsdp=2), widths=(8, 8))
    assert found["parameters"] == 8 * 8 * 4


def test_a_tensor_axis_divides_weights_and_what_is_between():
    widths = (64, 256, 64)
    one = kinds(Layout(), 64, widths=widths)
    two = kinds(Layout(tensor=2), 64, widths=widths)
    assert two["parameters"] == one["parameters"] / 2
    assert two["activations"] < one["activations"]


def test_recomputing_takes_less():
    widths = (64,) * 12
    graph = dense_graph(widths)
    plain = memory_of(graph, Layout(), 64).largest.total
    again = memory_of(graph, Layout(recompute="layers"), 64).largest.total
    assert again <= plain


def test_a_pipeline_keeps_micro_batches_that_are_under_way():
    graph = dense_graph((64,) * 9)
    layout = Layout(pipeline=4, micro_batches=8)
    devices = memory_of(graph, layout, 64).devices
    assert [d.name for d in devices] == [f"stage {i}" for i in range(4)]
    parts = [d.by_kind["micro-batches"] for d in devices]
    assert parts[0] > parts[1] > parts[2] > parts[3] == 0
    flushed = Layout(pipeline=4, micro_batches=8, schedule="gpipe")
    held = memory_of(graph, flushed, 64).devices[3]
    assert held.by_kind["micro-batches"] > 0
    assert sum(d.by_kind["parameters"] for d in devices) == 8 * 64 * 64 * 4


def test_a_stage_stores_parts_and_gathers_whole_weights():
    graph = dense_graph((64,) * 9)
    kinds = [
        memory_of(graph, Layout(fsdp=fsdp, pipeline=4), 64).devices[3].by_kind
        for fsdp in (1, 2)
    ]
    whole, split = kinds
    # A stage has two kernels of 64 x 64.
    assert whole["parameters"] == 2 * 64 * 64 * 4
    assert split["parameters"] == whole["parameters"] / 2
    assert split["slots"] == whole["slots"] / 2
    assert split["gathered weights"] == whole["parameters"]
    assert whole["gathered weights"] == 0


def test_stages_are_as_even_as_can_be():
    stages = stages_of(dense_graph((64,) * 9), 4)
    assert [len(stage) for stage in stages] == [2, 2, 2, 2]
    with pytest.raises(ConfigurationError, match="a layer for each stage"):
        stages_of(dense_graph(), 5)


def test_servers_hold_state_and_workers_hold_a_copy():
    graph = dense_graph((64, 64))
    found = memory_of(graph, Layout(2, num_ps=2), 8)
    worker, server, coordinator = found.devices
    assert worker.by_kind["parameters"] == 64 * 64 * 4
    assert worker.by_kind["slots"] == 0
    assert server.by_kind["slots"] == 64 * 64 * 8 / 2
    assert (worker.count, server.count, coordinator.count) == (2, 2, 1)
    assert found.largest is worker


def test_accumulated_gradients_are_counted():
    one, two = kinds(Layout(), 8), kinds(Layout(accumulation=2), 16)
    extra = two["gradients"] - one["gradients"]
    assert extra == two["parameters"]


def test_the_table_has_every_kind_that_is_there():
    text = planner.estimate_memory(dense_graph(), 8).text()
    assert "parameters" in text and "total" in text
    assert "micro-batches" not in text


def network(units=512, depth=4):
    inputs = keras.Input((256,))
    hidden = inputs
    for _ in range(depth):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    outputs = keras.layers.Dense(10)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def convolutions():
    inputs = keras.Input((32, 32, 3))
    hidden = inputs
    for filters in (16, 32):
        hidden = keras.layers.Conv2D(filters, 3, padding="same")(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Activation("relu")(hidden)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def measured(build_model, batch, strategy):
    """Returns the most that a step holds, beside what was there before."""

    def used(name):
        return tf.config.experimental.get_memory_info("CPU:0")[name]

    gc.collect()  # What is freed later would be missing from the peak.
    before = used("current")
    trainer = mgpu_tf.Trainer(build_model, strategy, seed=0)
    shape = trainer.model.inputs[0].shape[1:]
    x = np.zeros((batch, *shape), "float32")
    y = np.zeros((batch,), "int32")
    peaks = []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("CPU:0")
        trainer.train_on_batch(x, y)
        peaks.append(used("peak") - before)
    return max(peaks[1:])


@pytest.mark.parametrize(
    ("build_model", "batch"), [(network, 1024), (convolutions, 128)]
)
def test_estimates_are_near_the_allocator(build_model, batch):
    counts.needed()
    found = planner.estimate_memory(build_model, batch)
    assert found.largest.total == pytest.approx(
        measured(build_model, batch, mgpu_tf.create_strategy("one_device")),
        # Processes differ by 5%, as operations of a step meet or do not.
        rel=0.3,
    )


def test_tracing_allocates_nothing():
    """A model of 8 GB of weights, in a process that has less for it."""

    def build():
        return network(units=16_384, depth=8)

    def used():
        return tf.config.experimental.get_memory_info("CPU:0")["current"]

    counts.needed()
    before = used()
    graph = trace(build)
    assert graph.parameters * 4 > 7 << 30
    assert used() - before < MIB
    assert planner.estimate_memory(graph, 8).largest.total > 4 * (7 << 30)


def test_what_activations_alone_give_is_made_in_the_forward_pass():
    def operation(kind, inputs, made, backward=False):
        return Operation(kind, inputs, (made,), 0, backward)

    operations = [
        operation("MatMul", (0, 1), 2),
        operation("Erfc", (2,), 3),
        operation("Mul", (2, 3), 4),
        operation("MatMul", (4, 5), 6),
        operation("Sum", (6,), 7),
        operation("Fill", (7,), 8, True),
        operation("Const", (), 9, True),
        operation("MatMul", (8, 5), 10, True),
        operation("Exp", (2,), 11, True),
        operation("AddV2", (3, 11), 12, True),
        operation("Mul", (10, 12), 13, True),
    ]
    found = as_they_run(operations)
    assert [each.outputs[0] for each in found] == [
        *(2, 11, 3, 12, 4, 6, 7),
        *(8, 9, 10, 13),
    ]
    assert [each.backward for each in found] == [False] * 7 + [True] * 4


def test_devices_of_a_tensor_axis_hold_copies_of_what_they_join():
    graph = dense_graph((64, 64, 512))
    graph = dataclasses.replace(graph, operations=list(graph.forward()))
    (last,) = splits.parts_of(graph).summed.values()
    alone = Program(graph, 8.0, Layout(tensor=2))
    alone._exchanged = set()
    together = Program(graph, 8.0, Layout(tensor=2)).peak().bytes
    copies = graph.tensors[last].bytes(8.0)
    # Without the loss, which is a number.
    assert together == alone.peak().bytes + copies - 4
