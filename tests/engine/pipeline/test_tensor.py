"""Stages that several devices compute in parts, against Keras's own `fit`."""

import collections
import itertools
import re

import keras
import numpy as np
import pytest
from keras import layers
from tensorflow.python.eager import context

import mgpu_tf
from tests.engine.pipeline import models, test_shared_weights, test_training
from tests.engine.pipeline.test_training import assert_close, fit, state_of
from tests.tiers import tiered

# data, fsdp, tensor, pipeline
MESHES = (
    (1, 1, 2, 2),
    (1, 1, 3, 2),
    (1, 1, 2, 3),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
)
# Each model on each mesh, the orders in turn.
ROWS = [
    (model, optimizer, *mesh, *test_training.ORDERS[number % 6])
    for number, (mesh, (model, optimizer)) in enumerate(
        itertools.product(
            MESHES,
            [
                ("skip", "adam"),
                ("convolutions", "momentum"),
                ("transformer", "adamw"),
            ],
        )
    )
]
QUICK = [("skip", "adam", 1, 1, 2, 2, 2, "1f1b")]

pytestmark = pytest.mark.usefixtures("float64")


def strategy_of(data, fsdp, tensor, pipeline, micro_batches, **options):
    return mgpu_tf.create_model_parallel_strategy(
        data=data,
        fsdp=fsdp,
        tensor=tensor,
        pipeline=pipeline,
        micro_batches=micro_batches,
        num_virtual_devices=data * fsdp * tensor * pipeline,
        smallest_split=4,
        **options,
    )


@pytest.mark.parametrize(
    (
        "model",
        "optimizer",
        "data",
        "fsdp",
        "tensor",
        "stages",
        "micro_batches",
        "schedule",
    ),
    tiered([*QUICK, *ROWS], QUICK),
)
def test_as_on_one_device(
    model, optimizer, data, fsdp, tensor, stages, micro_batches, schedule
):
    strategy = strategy_of(
        data, fsdp, tensor, stages, micro_batches, schedule=schedule
    )
    build = models.compiled(test_training.MODELS[model], optimizer)
    trainer, history = fit(build, strategy)
    curves, state, scores, predicted = test_training.stock(model, optimizer)
    for name, curve in curves.items():
        np.testing.assert_allclose(history[name], curve, rtol=1e-9)
    assert_close(state_of(trainer.model), state)
    x, y = models.data_for(trainer.model, test_training.EXAMPLES)
    found = trainer.evaluate(x, y, batch_size=16, verbose=0)
    np.testing.assert_allclose(found, scores, rtol=1e-9)
    found = trainer.predict(x, batch_size=16, verbose=0)
    assert_close([found], [predicted])


def drops():
    """Dropout between layers that take parts from each other."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, "tanh"),
            layers.Dropout(0.4, seed=3),
            layers.Dense(6),
            layers.Dense(12, "tanh"),
            layers.Dropout(0.4, seed=4),
            layers.Dense(2),
        ]
    )


def normalizes():
    """BatchNormalization in both stages, of parts and of whole outputs."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, "tanh"),
            layers.BatchNormalization(momentum=0.7),
            layers.Dense(6, "tanh"),
            layers.Dense(12, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(2),
        ]
    )


@pytest.mark.parametrize(
    ("model", "column", "parts", "options"),
    tiered(
        [
            (drops, "tensor_2_pipeline_2", 2, ()),
            (drops, "fsdp_2_tensor_2_pipeline_2", 4, ("recompute",)),
            (normalizes, "data_2_tensor_2_pipeline_2", 4, ()),
        ],
        [],
    ),
)
def test_micro_batches_are_as_replicas_are(
    model, column, parts, options, strategies
):
    """Random numbers and statistics are those of as many replicas."""
    build = models.compiled(model, "momentum")
    replicas = mgpu_tf.create_mirrored_strategy(num_virtual_devices=parts)
    expected, curves = fit(build, replicas, steps_per_execution=1)
    found, history = fit(
        build,
        strategies[column],
        steps_per_execution=1,
        **dict.fromkeys(options, "stages"),
    )
    np.testing.assert_allclose(history["loss"], curves["loss"], rtol=1e-9)
    assert_close(state_of(found.model), state_of(expected.model))


# data, fsdp, tensor, stages
SHARED = [
    ("language", 1, 1, 2, 2),
    ("language", 1, 1, 2, 3),
    ("reversible", 2, 1, 2, 2),
    ("recurrent", 1, 1, 3, 2),
    ("recurrent", 2, 1, 2, 2),
    ("frozen", 1, 1, 2, 3),
    ("own loss", 2, 1, 2, 2),
    ("own step", 1, 1, 2, 2),
    ("lookups", 1, 2, 2, 2),
    ("places", 1, 1, 2, 2),
]


@pytest.mark.parametrize(
    ("name", "data", "fsdp", "tensor", "stages"), tiered(SHARED, [])
)
def test_weights_that_stages_share(name, data, fsdp, tensor, stages):
    begins = test_shared_weights.MODELS[name][1][stages]
    strategy = strategy_of(data, fsdp, tensor, stages, 2, stages=begins)
    test_shared_weights.check(name, strategy)


def pair():
    """A pair of layers in each stage."""
    inputs = keras.Input((6,))
    x = inputs
    for stage in range(2):
        x = layers.Dense(12, "tanh", name=f"columns_{stage}")(x)
        x = layers.Dense(6, name=f"rows_{stage}")(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(global_clipnorm=0.1), "mse")
    return model


def test_where_parts_are_stored_and_computed():
    """Three devices compute each stage, and each has a third of its layers."""
    strategy = strategy_of(1, 1, 3, 2, 2, stages=["columns_1"])
    trainer = mgpu_tf.Trainer(pair, strategy, steps_per_execution=1)
    x = np.ones((12, 6))
    context.enable_run_metadata()
    try:
        trainer.fit(x, x, batch_size=12, verbose=0)
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    computing = collections.defaultdict(set)
    for graph in graphs:
        for node in graph.node:
            named = re.search(r"/stage_(\d)/forward_\d/", node.name)
            if named and re.search("MatMul|Tanh|BiasAdd", node.op):
                backward = "gradient_tape" in node.name
                computing[backward, int(named[1])].add(node.device[-5:])
    devices = [{"CPU:0", "CPU:2", "CPU:4"}, {"CPU:1", "CPU:3", "CPU:5"}]
    for backward, stage in itertools.product((False, True), range(2)):
        assert computing[backward, stage] == devices[stage]
    model = trainer.model
    for stage in range(2):
        for name, shape in ("columns", [6, 4]), ("rows", [4, 6]):
            kernel = model.get_layer(f"{name}_{stage}").kernel
            kept = [
                v
                for v in model.optimizer.variables
                if f"{name}_{stage}_kernel" in v.path
            ]
            assert len(kept) == 2
            for variable in [kernel, *kept]:
                parts = variable.value.values
                assert {part.device[-5:] for part in parts} == devices[stage]
                assert [part.shape for part in parts] == [shape] * 3
    held = 2 * 6 * 12 // 3 + 12 // 3 + 6
    rows = trainer.memory().rows
    assert [row.weights for row in rows] == [8 * held] * 6
