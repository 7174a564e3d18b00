"""Updates as one operation against Keras's own, after 50 updates.

Both get the same gradients, so nothing but the update can differ. The test
fails on the release of Keras that changes a formula.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.kernels import Kernels, optimizers
from mgpu_tf.engine.step.update import Update
from mgpu_tf.engine.synchronous.sharded import ShardedUpdate
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.registry import kind_of
from tests.parity import cases
from tests.tiers import tiered

UPDATES = 50
SHAPES = ((6, 4), (4,))
o = keras.optimizers

FUSED = {
    "sgd": lambda: o.SGD(0.05),
    "momentum": lambda: o.SGD(0.05, momentum=0.9),
    "nesterov": lambda: o.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: o.Adam(0.01),
    "adam_options": lambda: o.Adam(
        o.schedules.CosineDecay(0.01, 40), 0.8, 0.95, 1e-3
    ),
    "amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    "adamw": lambda: o.AdamW(0.01, weight_decay=0.1),
    "adamax": lambda: o.Adamax(0.01),
    "nadam": lambda: o.Nadam(0.01),
    "rmsprop": lambda: o.RMSprop(0.01, momentum=0.9),
    "adadelta": lambda: o.Adadelta(0.5),
    "ftrl": lambda: o.Ftrl(0.05),
    "ftrl_options": lambda: o.Ftrl(
        0.05,
        learning_rate_power=-0.3,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.1,
    ),
}
AS_KERAS = {
    "rmsprop_plain": lambda: o.RMSprop(0.01),
    "rmsprop_centered": lambda: o.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: o.Adagrad(0.01),
    "lion": lambda: o.Lion(0.01),
    "lamb": lambda: o.Lamb(0.01),
    "adafactor": lambda: o.Adafactor(0.01),
    "muon": lambda: o.Muon(0.01),
}
# By what part of its largest element a tensor may differ in float32. Of the
# Adam kinds, the velocity differs by the rounding of 1 - beta_2.
NOISE = {"velocity": 3e-5, "other": 3e-6}


@pytest.fixture(params=["float64", "float32"])
def floatx(request):
    cases.set_floatx(request.param)
    yield request.param
    cases.set_floatx("float32")


def updated(strategy, make, kernels):
    """Applies the same gradients; returns paths and values, and counts."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((SHAPES[0][0],)), keras.layers.Dense(SHAPES[0][1])]
        )
        model.compile(make(), "mse")
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    model.set_weights([random.normal(size=shape) for shape in SHAPES])
    every = [
        tf.constant(random.normal(size=(UPDATES, *s)), keras.config.floatx())
        for s in SHAPES
    ]
    forms = Kernels(model, strategy, kernels)

    split = kind_of(strategy).splits
    update = (ShardedUpdate if split else Update)(
        optimizer,
        model.trainable_variables,
        strategy,
        stored_once=kind_of(strategy).stored_once,
        options=StepOptions(),
    )
    update.present = [True for _ in SHAPES]
    replicas = strategy.num_replicas_in_sync

    @tf.function(autograph=False)
    def train():
        def once(step):
            with forms.in_place():
                update(
                    strategy.run(
                        lambda: [some[step] / replicas for some in every]
                    )
                )
            return (step + 1,)

        tf.while_loop(lambda step: step < UPDATES, once, (0,))

    train()
    held = [*model.variables, *optimizer.variables]
    return [(v.path, np.float64(v.numpy())) for v in held], forms.replaced


def relative(one, other):
    """The largest difference as a part of the largest element."""
    if not np.size(one):
        return 0.0
    return float(np.max(np.abs(one - other)) / (np.max(np.abs(other)) or 1.0))


def differences(strategy, make):
    fused, replaced = updated(strategy, make, "fused")
    own, none = updated(strategy, make, "keras")
    assert none == {}
    return [
        (path, relative(one, other))
        for (_, one), (path, other) in zip(fused, own, strict=True)
    ], replaced


@pytest.mark.parametrize("name", FUSED)
def test_weights_and_slots_are_keras_own(name, floatx, strategies):
    found, replaced = differences(strategies["one_device"], FUSED[name])
    assert list(replaced.values()) == [1]
    for path, difference in found:
        kind = "velocity" if "velocity" in path else "other"
        assert difference <= (NOISE[kind] if floatx == "float32" else 1e-14), (
            path
        )


QUICK = [
    ("mirrored_x3", "nesterov"),
    ("mirrored_x3", "nadam"),
    ("fsdp_x3", "adamw"),
    ("fsdp_x3", "rmsprop"),
    ("zero1_x2", "adam"),
    ("central_storage_x2", "amsgrad"),
]
ROWS = [
    *itertools.product(("mirrored_x3", "fsdp_x3"), FUSED),
    ("zero1_x2", "adam"),
    ("central_storage_x2", "amsgrad"),
]


@pytest.mark.parametrize(("column", "name"), tiered(ROWS, QUICK))
def test_on_several_replicas(column, name, float64, strategies):
    found, replaced = differences(strategies[column], FUSED[name])
    assert list(replaced.values()) == [1]
    assert max(difference for _, difference in found) <= 1e-14


def test_rows_are_updated_where_keras_leaves_the_others_alone():
    assert optimizers.update_of(o.Adagrad(), rows=True) is not None
    # Keras divides rows that were never looked up by zero.
    assert optimizers.update_of(o.Adagrad(epsilon=0.0), rows=True) is None
    # Keras decays all rows.
    for make in FUSED.values():
        assert optimizers.update_of(make(), rows=True) is None


@pytest.mark.parametrize("name", AS_KERAS)
def test_what_no_operation_computes_stays_with_keras(name):
    assert optimizers.update_of(AS_KERAS[name]()) is None


def test_another_class_stays_with_keras():
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_add(variable, gradient)

    assert optimizers.update_of(Own()) is None
    assert optimizers.update_of(keras.optimizers.SGD()) is not None


def test_variables_of_16_bits_stay_with_keras(strategies):
    cases.set_floatx("bfloat16")
    try:
        _, replaced = updated(
            strategies["one_device"], FUSED["momentum"], "fused"
        )
    finally:
        cases.set_floatx("float32")
    assert replaced == {}


def test_an_update_that_a_user_has_set_stays(strategies):
    def make():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.update_step = lambda g, v, rate: v.assign_add(g)
        return optimizer

    _, replaced = updated(strategies["one_device"], make, "fused")
    assert replaced == {}


def unit_norm():
    return keras.constraints.UnitNorm(axis=0)


def scaled_and_averaging():
    return o.LossScaleOptimizer(
        o.SGD(
            o.schedules.CosineDecay(0.1, 8),
            momentum=0.9,
            weight_decay=0.01,
            global_clipnorm=0.5,
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=3,
        ),
        initial_scale=8.0,
    )


def accumulating():
    return o.Adam(
        0.02, gradient_accumulation_steps=2, clipnorm=0.1, use_ema=True
    )


@pytest.mark.parametrize("make", [scaled_and_averaging, accumulating])
@pytest.mark.parametrize(
    "column",
    ["one_device", pytest.param("mirrored_x3", marks=pytest.mark.full)],
)
def test_around_the_update_all_is_as_before(column, make, float64, strategies):
    """Decay, clipping, scaling, averages, constraints; sparse rows too."""

    def build():
        inputs = keras.Input((6,))
        words = keras.ops.cast(keras.ops.abs(inputs[:, :2]) > 0.5, "int32")
        rows = keras.layers.Embedding(2, 3)(words)
        both = keras.layers.Concatenate()(
            [inputs, keras.layers.Flatten()(rows)]
        )
        outputs = keras.layers.Dense(3, kernel_constraint=unit_norm())(both)
        model = keras.Model(inputs, outputs)
        model.compile(make(), "mse")
        return model

    random = np.random.default_rng(0)
    x, y = random.normal(size=(47, 6)), random.normal(size=(47, 3))
    found = []
    for kernels in ("fused", "keras"):
        trainer = mgpu_tf.Trainer(
            build, strategies[column], kernels=kernels, seed=0
        )
        trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        optimizer = trainer.model.optimizer
        held = [*trainer.model.weights, *optimizer.variables]
        found.append([variable.numpy() for variable in held])
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        fused = {"Embedding": 1, type(inner).__name__: 1}
        expected = fused if kernels == "fused" else {}
        assert trainer.fused == expected
    for one, other in zip(*found, strict=True):
        assert relative(one, other) <= 1e-13


class Twice(keras.Model):
    """Its optimizer makes two updates in a step, in one graph."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        for scale in (1.0, -0.3):
            with tf.GradientTape() as tape:
                loss = scale * tf.reduce_mean(tf.square(self(x) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("make", [FUSED["adam_options"], FUSED["nadam"]])
@pytest.mark.parametrize(
    "column",
    ["one_device", pytest.param("mirrored_x3", marks=pytest.mark.full)],
)
def test_each_update_in_a_graph_has_its_number(
    make, column, float64, strategies
):
    def build():
        model = Twice()
        model.compile(make())
        return model

    x = np.random.default_rng(0).normal(size=(14, 4))
    fit = {"batch_size": 5, "epochs": 3, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(x, x[:, :3], **fit)
    trainer = mgpu_tf.Trainer(build, strategies[column])
    trainer.fit(x, x[:, :3], **fit)
    assert int(trainer.model.optimizer.iterations.numpy()) == 18
    pairs = zip(model.get_weights(), trainer.model.get_weights(), strict=True)
    for ref, own in pairs:
        np.testing.assert_allclose(own, ref, rtol=1e-9)
