"""Runs on pipelines: saved, resumed, moved to another mesh, refused."""

import keras
import numpy as np
import pytest
from keras import layers

import mgpu_tf
from tests.strategies.resuming import (
    check_elsewhere,
    check_same_bits,
    data,
    fit,
    state_of,
)
from tests.tiers import tiered

PIPELINES = ["pipeline_x2", "data_2_pipeline_2", "fsdp_3_pipeline_2"]


@pytest.fixture(params=tiered(PIPELINES, PIPELINES[1:2], PIPELINES[2:]))
def strategy(request, strategies):
    return strategies[request.param]


def build():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(9, activation="tanh"),
            layers.Dropout(0.3, seed=2),
            layers.Dense(8, activation="tanh"),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def plain():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(9, "tanh"), layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return model


def test_resumed_bit_for_bit(strategy, tmp_path):
    check_same_bits(build, strategy, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("pipeline_x2", "fsdp_x3"),
        ("fsdp_x3", "data_2_pipeline_2"),
        ("data_2_pipeline_2", "one_device"),
        ("one_device", "pipeline_x2"),
        ("fsdp_3_pipeline_2", "data_2_pipeline_2"),
        ("fsdp_x3", "fsdp_3_pipeline_2"),
        ("fsdp_3_pipeline_2", "one_device"),
    ],
)
def test_resumed_on_another_mesh(first, then, strategies, tmp_path):
    check_elsewhere(plain, strategies[first], strategies[then], tmp_path)


def test_a_saved_model_is_an_ordinary_one(strategy, tmp_path):
    trainer = mgpu_tf.Trainer(plain, strategy)
    fit(trainer)
    path = str(tmp_path / "model.keras")
    trainer.model.save(path)
    loaded = keras.models.load_model(path)
    for ours, theirs in zip(
        state_of(trainer.model), state_of(loaded), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)

    # A model whose optimizer is built already is moved with its slots.
    def again():
        return keras.models.load_model(path)

    resumed = mgpu_tf.Trainer(again, strategy)
    fit(resumed, epochs=1)
    fit(trainer, epochs=1)
    for ours, theirs in zip(
        state_of(resumed.model), state_of(trainer.model), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_predictions_before_training(strategies):
    x, _ = data(2, 10)
    trainer = mgpu_tf.Trainer(build, strategies["pipeline_x2"])
    expected = build()
    expected.set_weights(trainer.model.get_weights())
    found = trainer.predict(x, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, expected.predict(x, verbose=0), atol=1e-6)


def create(**options):
    return mgpu_tf.create_strategy("model_parallel", **options)


def test_names():
    strategy = create(
        num_virtual_devices=4,
        pipeline_parallel=2,
        micro_batches=6,
        pipeline_schedule="gpipe",
        pipeline_stages="second",
    )
    assert (strategy.mesh.data, strategy.mesh.pipeline) == (2, 2)
    assert strategy.micro_batches == 6
    assert strategy.schedule == "gpipe"
    assert strategy.begins == ("second",)
    assert create(num_virtual_devices=4, pipeline_parallel=4).micro_batches == (
        16
    )


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {"pipeline_parallel": 3, "data_parallel": 2},
            "data=2 x fsdp=1 x pipeline=3 = 6 for 4 devices",
        ),
        ({"pipeline_parallel": 2, "shard": "optimizer"}, "shard goes with"),
        ({"micro_batches": 2}, "effect with pipeline_parallel"),
        ({"pipeline_parallel": 4, "pipeline_stages": "a,b"}, "2 names"),
        ({"pipeline_schedule": "zb"}, "pipeline_schedule"),
        ({"pipeline_parallel": 0}, "1 or more"),
    ],
)
def test_mistakes_are_told(options, rule):
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule) as error:
        create(num_virtual_devices=4, **options)
    assert "\n" not in str(error.value)


def test_no_more_micro_batches_than_rows():
    """Each would be a part of the graph, and take minutes to trace."""
    options = {"num_virtual_devices": 4, "pipeline_parallel": 2}
    many = create(**options, micro_batches=1000)
    with pytest.raises(mgpu_tf.ConfigurationError, match="=1000 for 32 rows"):
        many.check_micro_batches(64)
    many.check_micro_batches(2000)
    # The default stays, also for a batch with fewer rows.
    create(**options).check_micro_batches(2)


@pytest.mark.parametrize("name", ["mirrored", "fsdp"])
def test_other_strategies_have_no_stages(name):
    with pytest.raises(mgpu_tf.ConfigurationError, match="has an effect with"):
        mgpu_tf.create_strategy(
            name, num_virtual_devices=2, pipeline_parallel=2
        )


class Assigns(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.scale.assign(self.scale * 0.5)
        return x * self.scale


class Reads(layers.Layer):
    """Reads a weight of another layer, unseen by Keras."""

    def __init__(self, other, **options):
        super().__init__(**options)
        object.__setattr__(self, "other", other)

    def call(self, x):
        return x @ self.other.kernel


def assigning():
    return [layers.Dense(4), Assigns(), layers.Dense(4)]


def reading():
    first = layers.Dense(6, name="first")
    return [first, layers.Dense(6), layers.Dense(6), Reads(first)]


def recurrent():
    return [
        keras.Input((6,), batch_size=12),
        layers.Reshape((1, 6)),
        layers.LSTM(4, stateful=True),
        layers.Dense(2),
    ]


def of_three_rows():
    return [keras.Input((6,), batch_size=3), layers.Dense(4), layers.Dense(2)]


def of_layers(make):
    def build():
        made = make()
        if make not in (of_three_rows, recurrent):
            made = [keras.Input((6,)), *made]
        model = keras.Sequential(made)
        model.compile("sgd", "mse")
        return model

    return build


@pytest.mark.parametrize(
    ("make", "options", "rule"),
    [
        (assigning, {}, "cannot assign its own weights"),
        (reading, {}, "first/kernel, which is of another"),
        (recurrent, {}, "stateful=True"),
        (of_three_rows, {}, "any number of rows"),
        (assigning, {"recompute": "layers"}, "recompute='stages'"),
    ],
)
def test_refused_by_name(make, options, rule, strategies):
    x = np.ones((12, 6), "float32")
    width = {"assigning": 4, "reading": 6}.get(make.__name__, 2)
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule) as error:
        trainer = mgpu_tf.Trainer(
            of_layers(make), strategies["pipeline_x2"], **options
        )
        trainer.fit(x, x[:, :width], batch_size=12, verbose=0)
    assert "\n" not in str(error.value)


def test_stages_are_not_computed_again_elsewhere(strategies):
    for name in ("one_device", "fsdp_x3"):
        trainer = mgpu_tf.Trainer(plain, strategies[name], recompute="stages")
        with pytest.raises(mgpu_tf.ConfigurationError, match="'layers'"):
            fit(trainer)


def test_a_trace_is_refused(strategies):
    trainer = mgpu_tf.Trainer(plain, strategies["pipeline_x2"])
    x, y = data(2, 12)
    with pytest.raises(mgpu_tf.ConfigurationError, match="A trace goes with"):
        trainer.trace(x, y, batch_size=4)
