"""Where stages compute, in which order, and what they keep."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import mgpu_tf
from mgpu_tf.engine.row_proof import Rows
from mgpu_tf.engine.row_proof import note as note_kind
from mgpu_tf.engine.synchronous.pipeline.schedule import (
    Pass,
    live,
    orders,
    timing,
)
from mgpu_tf.mesh import bubble
from tests.tiers import tiered

MICRO_BATCHES = 4


def strategy_of(stages, schedule="1f1b", data=1):
    return mgpu_tf.create_model_parallel_strategy(
        data=data,
        pipeline=stages,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        num_virtual_devices=data * stages,
    )


class Noted(layers.Layer):
    """Notes each pass of a micro-batch, forward and backward."""

    def __init__(self, stage, notes, **options):
        super().__init__(**options)
        object.__setattr__(self, "note", (stage, notes))

    def call(self, x):
        stage, notes = self.note

        def noted(rows, values, backward):
            def note(rows, values):
                # The last column has the number of the row.
                notes.append(Pass(stage, int(rows.min()) // 4, backward))
                return values

            # TensorFlow runs stateful functions in the order of a program.
            made = tf.numpy_function(
                note, [rows, values], tf.float32, stateful=False
            )
            # No proof sees into a function of Python.
            return note_kind(tf.ensure_shape(made, values.shape), Rows())

        @tf.custom_gradient
        def passes(x):
            rows = x[:, -1]

            def backward(gradient):
                return noted(rows, gradient, True)

            return noted(rows, x, False), backward

        return passes(x)


class Same(layers.Layer):
    """Applies a weight to all columns but the last, which is kept."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1] - 1,))

    def call(self, x):
        changed = keras.ops.tanh(x[:, :-1] * self.weight)
        return keras.ops.concatenate([changed, x[:, -1:]], -1)


def noting(stages, notes):
    def build():
        inputs = keras.Input((4,))
        x = inputs
        for stage in range(stages):
            x = Same(name=f"same_{stage}")(x)
            x = Noted(stage, notes)(x)
        model = keras.Model(inputs, layers.Dense(1, name="end")(x))
        model.compile("sgd", "mse")
        return model

    return build


def numbered():
    x = np.ones((4 * MICRO_BATCHES, 4), "float32")
    x[:, -1] = np.arange(len(x))
    return x, x[:, :1]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    tiered(
        [(s, n) for s in ("1f1b", "gpipe") for n in (2, 3, 4)],
        [("1f1b", 3)],
    ),
)
def test_the_order_of_what_runs(schedule, stages):
    notes = []
    strategy = mgpu_tf.create_model_parallel_strategy(
        pipeline=stages,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        stages=[f"same_{i}" for i in range(1, stages)],
        num_virtual_devices=stages,
    )
    trainer = mgpu_tf.Trainer(noting(stages, notes), strategy)
    x, y = numbered()
    trainer.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    ran = [[each for each in notes if each.stage == s] for s in range(stages)]
    assert ran == orders(schedule, stages, MICRO_BATCHES)
    if schedule == "1f1b":
        most = [min(MICRO_BATCHES, stages - s) for s in range(stages)]
    else:
        most = [MICRO_BATCHES] * stages
    assert [live(order) for order in ran] == most
    assert trainer.pipeline.live == most
    measured = timing(ran).bubble
    assert measured == pytest.approx(bubble(stages, MICRO_BATCHES))
    assert trainer.pipeline.bubble == pytest.approx(measured)


def test_a_stage_that_keeps_only_its_inputs_computes_twice():
    notes = []
    strategy = strategy_of(2)
    trainer = mgpu_tf.Trainer(noting(2, notes), strategy, recompute="stages")
    x, y = numbered()
    trainer.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    passes = collections.Counter(notes)
    assert set(passes) == {
        Pass(stage, micro, backward)
        for stage in range(2)
        for micro in range(MICRO_BATCHES)
        for backward in (False, True)
    }
    assert {n for each, n in passes.items() if each.backward} == {1}
    assert {n for each, n in passes.items() if not each.backward} == {2}


def dense():
    inputs = keras.Input((6,))
    x = inputs
    for i in range(4):
        x = layers.Dense(9, "tanh", name=f"dense_{i}")(x)
    model = keras.Model(inputs, layers.Dense(2, name="end")(x))
    model.compile(keras.optimizers.Adam(global_clipnorm=0.1), "mse")
    return model


def test_where_it_computes_and_stores():
    strategy = strategy_of(2, data=2)
    trainer = mgpu_tf.Trainer(dense, strategy, steps_per_execution=1)
    x = np.ones((16, 6), "float32")
    context.enable_run_metadata()
    try:
        trainer.fit(x, x[:, :2], batch_size=16, verbose=0)
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    found = collections.defaultdict(set)
    kinds = collections.defaultdict(set)
    updates = collections.Counter()
    for graph in graphs:
        for node in graph.node:
            device = node.device[-5:]
            named = re.search(r"stage_(\d)/(forward|backward)_\d", node.name)
            if named and re.search("MatMul|Tanh|BiasAdd", node.op):
                found[named[2], int(named[1])].add(device)
                kinds[named[2]].add(node.op)
            if node.op == "ResourceApplyAdam":
                updates[device] += 1
    assert {"TanhGrad", "BiasAddGrad"} <= kinds["backward"] - kinds["forward"]
    for kind in ("forward", "backward"):
        assert found[kind, 0] == {"CPU:0", "CPU:2"}
        assert found[kind, 1] == {"CPU:1", "CPU:3"}
    sizes = [0, 0]
    for number in range(2):
        devices = {"CPU:0", "CPU:2"} if number == 0 else {"CPU:1", "CPU:3"}
        first = trainer.model.get_layer("dense_0")
        last = trainer.model.get_layer("end")
        layer = first if number == 0 else last
        optimizer = trainer.model.optimizer
        slots = [
            v for v in optimizer.variables if v.path.count(f"{layer.name}_")
        ]
        assert len(slots) == 4
        for variable in [*layer.variables, *slots]:
            assert copies_of(variable, strategy) == devices
    for variable in trainer.model.trainable_variables:
        number = "CPU:1" in copies_of(variable, strategy)
        sizes[number] += 1
    assert updates == {
        "CPU:0": sizes[0],
        "CPU:2": sizes[0],
        "CPU:1": sizes[1],
        "CPU:3": sizes[1],
    }
    rows = trainer.memory().rows
    assert [row.stage for row in rows] == [0, 1, 0, 1]
    assert [row.name for row in rows[:2]] == ["CPU:0 stage 0", "CPU:1 stage 1"]
    weights = trainer.pipeline.parameters
    assert [row.weights for row in rows] == [4 * w for w in weights] * 2


def test_a_stage_is_stored_in_parts():
    """Three devices compute each stage, and each stores a third of it."""
    strategy = mgpu_tf.create_model_parallel_strategy(
        fsdp=3,
        pipeline=2,
        micro_batches=2,
        smallest_split=16,
        num_virtual_devices=6,
    )
    trainer = mgpu_tf.Trainer(dense, strategy, steps_per_execution=1)
    x = np.ones((12, 6), "float32")
    context.enable_run_metadata()
    try:
        trainer.fit(x, x[:, :2], batch_size=12, verbose=0)
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    computing = collections.defaultdict(set)
    updates = collections.Counter()
    for graph in graphs:
        for node in graph.node:
            named = re.search(r"stage_(\d)/(forward|backward)_\d", node.name)
            if named and re.search("MatMul|Tanh|BiasAdd", node.op):
                computing[int(named[1])].add(node.device[-5:])
            if node.op == "ResourceApplyAdam":
                updates[node.device[-5:]] += 1
    devices = [{"CPU:0", "CPU:2", "CPU:4"}, {"CPU:1", "CPU:3", "CPU:5"}]
    assert [computing[0], computing[1]] == devices
    model = trainer.model
    stages = {"dense_0": 0, "dense_1": 0, "dense_3": 1, "end": 1}
    for name, stage in stages.items():
        kernel, bias = model.get_layer(name).weights
        kept = [
            v for v in model.optimizer.variables if f"{name}_kernel" in v.path
        ]
        assert len(kept) == 2
        for variable in [kernel, *kept]:
            parts = variable.value.values
            assert {part.device[-5:] for part in parts} == devices[stage]
            rows = [part.shape[0] for part in parts]
            assert sum(rows) == kernel.shape[0]
            assert max(rows) - min(rows) <= 1
        # Too small to be split.
        assert copies_of(bias, strategy) == devices[stage]
        assert bias.value.values[0].shape == bias.shape
    count = len(model.trainable_variables)
    assert sum(updates.values()) == 3 * count
    for stage in devices:
        assert len({updates[device] for device in stage}) == 1
    stored = {row.device: row for row in trainer.memory().rows}
    assert {row.stage for row in stored.values()} == {0, 1}
    for stage in (0, 1):
        variables = [
            variable
            for variable in model.trainable_variables
            if copies_of(variable, strategy) == devices[stage]
        ]
        split = [v for v in variables if v.path.endswith("kernel")]
        whole = [v for v in variables if v.path.endswith("bias")]
        held = [stored[device].weights for device in devices[stage]]
        sizes = [sum(4 * np.prod(v.shape) for v in vs) for vs in (split, whole)]
        assert sum(held) == sizes[0] + 3 * sizes[1]


def copies_of(variable, strategy):
    copies = strategy.experimental_local_results(variable.value)
    return {copy.device[-5:] for copy in copies}


def test_weights_are_on_the_host_before_the_cut():
    strategy = strategy_of(2)
    with strategy.scope():
        built = keras.Sequential([layers.Dense(2)])
        built.build((None, 3))
    assert copies_of(built.layers[0].kernel, strategy) == {"CPU:0"}
