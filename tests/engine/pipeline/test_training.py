"""Training in stages against Keras's own `fit` on one device, in float64."""

import itertools

import keras
import numpy as np
import pytest

import mgpu_tf
from tests.engine.pipeline import models
from tests.tiers import tiered

# 16 steps in 2 epochs; the last batch of each has 5 rows.
EXAMPLES = 117
BATCH = 16

MODELS = {
    "skip": models.skip,
    "convolutions": models.convolutions,
    "transformer": models.transformer,
}
# data, fsdp, pipeline
MESHES = (
    (1, 1, 2),
    (1, 1, 3),
    (1, 1, 4),
    (2, 1, 2),
    (1, 3, 2),
    (1, 2, 3),
    (2, 2, 2),
)
ORDERS = [
    (micro_batches, schedule)
    for micro_batches in (4, 1, 8)
    for schedule in ("1f1b", "gpipe")
]
# Each order on each mesh with one model, then each model with each optimizer
# on each mesh, the orders in turn.
ROWS = [
    ("skip", "momentum", *mesh, *order) for mesh in MESHES for order in ORDERS
]
ROWS += [
    (model, optimizer, *mesh, *ORDERS[number % len(ORDERS)])
    for number, (model, optimizer, mesh) in enumerate(
        itertools.product(MODELS, models.OPTIMIZERS, MESHES)
    )
]
ROWS = list(dict.fromkeys(ROWS))
QUICK = [
    ("skip", "momentum", 1, 1, 3, 4, "1f1b"),
]
# What replicas of other strategies share as micro-batches do.
SHARED = [models.drops, models.normalizes]


pytestmark = pytest.mark.usefixtures("float64")


def fit(build, strategy, batch=BATCH, **options):
    """Trains as `stock` does; returns the trainer and the history."""
    trainer = mgpu_tf.Trainer(build, strategy, seed=None, **options)
    x, y = models.data_for(trainer.model, EXAMPLES)
    history = trainer.fit(
        x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0
    )
    return trainer, history.history


_stock = {}


def stock(model, optimizer):
    """Keras's own result, computed once."""
    if (model, optimizer) not in _stock:
        built = models.compiled(MODELS[model], optimizer)()
        x, y = models.data_for(built, EXAMPLES)
        options = {"shuffle": False, "verbose": 0}
        history = built.fit(x, y, BATCH, epochs=2, **options).history
        scores = built.evaluate(x, y, BATCH, verbose=0)
        predicted = built.predict(x, BATCH, verbose=0)
        _stock[model, optimizer] = (
            history,
            state_of(built),
            scores,
            predicted,
        )
    return _stock[model, optimizer]


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables]


def assert_close(found, expected, atol=1e-9):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "model, optimizer, data, fsdp, stages, micro_batches, schedule",
    tiered(ROWS, QUICK),
)
def test_as_on_one_device(
    model, optimizer, data, fsdp, stages, micro_batches, schedule
):
    strategy = mgpu_tf.create_model_parallel_strategy(
        data=data,
        fsdp=fsdp,
        pipeline=stages,
        micro_batches=micro_batches,
        schedule=schedule,
        num_virtual_devices=data * fsdp * stages,
        smallest_split=4,
    )
    build = models.compiled(MODELS[model], optimizer)
    trainer, history = fit(build, strategy)
    curves, state, scores, predicted = stock(model, optimizer)
    assert trainer.global_step == 16
    for name, curve in curves.items():
        np.testing.assert_allclose(history[name], curve, rtol=1e-9)
    assert_close(state_of(trainer.model), state)
    x, y = models.data_for(trainer.model, EXAMPLES)
    found = trainer.evaluate(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(found, scores, rtol=1e-9)
    found = trainer.predict(x, batch_size=BATCH, verbose=0)
    assert_close([found], [predicted])


@pytest.mark.parametrize(
    ("model", "column", "parts", "batch"),
    tiered(
        [
            (model, *row)
            for model in SHARED
            # Three replicas of two micro-batches cut rows as six do.
            for row in (("pipeline_x2", 3, 16), ("fsdp_3_pipeline_2", 6, 24))
        ],
        [],
        [
            (models.drops, "pipeline_x2", 3, 16),
            (models.normalizes, "fsdp_3_pipeline_2", 6, 24),
        ],
    ),
)
def test_micro_batches_are_as_replicas_are(
    model, column, parts, batch, strategies
):
    """Random numbers and statistics are those of as many replicas."""
    build = models.compiled(model, "momentum")
    options = {"batch": batch, "steps_per_execution": 1}
    replicas = mgpu_tf.create_mirrored_strategy(num_virtual_devices=parts)
    expected, curves = fit(build, replicas, **options)
    found, history = fit(build, strategies[column], **options)
    np.testing.assert_allclose(history["loss"], curves["loss"], rtol=1e-9)
    assert_close(state_of(found.model), state_of(expected.model))


def test_computed_again(strategies):
    build = models.compiled(models.drops, "adam")
    _, kept = fit(build, strategies["pipeline_x2"])
    trainer, again = fit(build, strategies["pipeline_x2"], recompute="stages")
    np.testing.assert_allclose(again["loss"], kept["loss"], rtol=1e-12)
    del trainer


class Draws(keras.layers.Layer):
    """Draws from Keras's generator of unseeded draws."""

    def call(self, x):
        return x * (0.5 + keras.random.uniform((4,)))


def unseeded():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4),
            Draws(),
            keras.layers.Dense(4),
            Draws(),
            keras.layers.Dense(2),
        ]
    )


def test_unseeded_draws_go_on_from_stage_to_stage():
    strategy = mgpu_tf.create_model_parallel_strategy(
        pipeline=2, micro_batches=1, num_virtual_devices=2
    )
    build = models.compiled(unseeded, "momentum")
    keras.utils.set_random_seed(5)
    expected, curves = fit(build, mgpu_tf.create_strategy("one_device"))
    keras.utils.set_random_seed(5)
    found, history = fit(build, strategy)
    np.testing.assert_allclose(history["loss"], curves["loss"], rtol=1e-9)
    assert_close(state_of(found.model), state_of(expected.model))
