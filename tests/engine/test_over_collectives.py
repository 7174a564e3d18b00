"""Weights that replicas gather by collectives, as GPUs and processes do.

A graph of one process shows what its replicas copy from each other. What a
collective brings it does not show. The references are Keras's own `fit`.
"""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

WORDS = 30
MESHES = {
    "fsdp_x3": {"fsdp": 3},
    "zero1_x3": {"fsdp": 3, "shard": "optimizer"},
    "data_2_fsdp_2": {"data": 2, "fsdp": 2},
    "data_2_tensor_2": {"data": 2, "tensor": 2},
    "fsdp_2_tensor_2": {"fsdp": 2, "tensor": 2},
}


class Projection(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.bias = self.add_weight(shape=(self.units,))

    def call(self, x):
        return ops.gelu(ops.matmul(x, self.kernel) + self.bias)


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wide = Projection(16)
        self.narrow = layers.Dense(8)
        self.drop = layers.Dropout(0.3, seed=5)

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 16))

    def call(self, x):
        return x + self.drop(self.narrow(self.wide(x)))


class Tied(layers.ReversibleEmbedding):
    """A class of the author's: it is proven by what it computes."""


class Keeper(layers.Layer):
    """Leaves its rows in an attribute."""

    def call(self, x):
        self.kept = x
        return 1.0 * x


class Centered(layers.Layer):
    """Mixes rows that it finds in another layer."""

    def __init__(self, keeper, **kwargs):
        super().__init__(**kwargs)
        object.__setattr__(self, "keeper", keeper)

    def call(self, x):
        return x - ops.mean(self.keeper.kept, 0)


def vectors():
    generator = np.random.default_rng(0)
    return generator.normal(size=(40, 8)), generator.normal(size=(40, 1))


def words():
    generator = np.random.default_rng(0)
    x = generator.integers(1, WORDS, size=(40, 6))
    return x, np.roll(x, -1, 1)


def compiled(model, loss="mse"):
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss)
    return model


def functional():
    inputs = keras.Input((8,))
    x = Projection(8)(Block()(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), Projection(1)

    def call(self, x):
        return self.head(self.block(x))


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 8)))
    return compiled(model)


def language_model():
    table = Tied(WORDS, 8, tie_weights=True)
    inputs = keras.Input((6,), dtype="int32")
    x = Block()(table(inputs))
    return compiled(
        keras.Model(inputs, table(x, reverse=True)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def read_aside():
    """The whole model is computed from the rows of all replicas."""
    inputs, keeper = keras.Input((8,)), Keeper()
    x = Block()(keeper(Projection(8)(inputs)))
    x = Centered(keeper)(x)
    return compiled(keras.Model(inputs, layers.Dense(1)(x)))


PROGRAMS = {
    "functional": (functional, vectors),
    "subclassed": (subclassed, vectors),
    "language_model": (language_model, words),
}
pytestmark = pytest.mark.usefixtures("float64")


def train(program, strategy=None, **options):
    build, data = program
    keras.utils.set_random_seed(0)
    x, y = data()
    if strategy is None:
        trains = model = build()
    else:
        trains = mgpu_tf.Trainer(build, strategy, **options)
        model = trains.model
    trains.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    return [
        *(np.asarray(variable.numpy()) for variable in variables),
        trains.predict(x, verbose=0),
    ]


@functools.cache
def stock(name):
    return train(PROGRAMS[name])


def check(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@functools.cache
def over_collectives(mesh):
    sizes = [each for each in MESHES[mesh].values() if isinstance(each, int)]
    return mgpu_tf.create_model_parallel_strategy(
        **MESHES[mesh],
        num_virtual_devices=int(np.prod(sizes)),
        smallest_split=4,
        communication="ring",
    )


CELLS = [(mesh, name) for mesh in MESHES for name in PROGRAMS]
QUICK = [("fsdp_x3", "functional")]


@pytest.mark.parametrize(("mesh", "name"), tiered(CELLS, QUICK))
def test_layers_of_the_author_keep_their_rows(mesh, name, strategies, caplog):
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        found = train(PROGRAMS[name], over_collectives(mesh))
    check(found, stock(name))
    assert "computed whole" not in caplog.text


@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("fsdp_x3", {}),
        pytest.param("over_collectives", {}, marks=pytest.mark.full),
        pytest.param(
            "mirrored_x3", {"recompute": "layers"}, marks=pytest.mark.full
        ),
    ],
)
def test_a_model_that_is_computed_whole_draws_once(
    column, options, strategies, caplog
):
    """The backward pass draws again what the forward pass has drawn."""
    strategy = strategies.get(column) or over_collectives("fsdp_x3")
    program = read_aside, vectors
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        found = train(program, strategy, **options)
    check(found, train(program))
    assert "(Functional) is computed whole" in caplog.text
    assert "is not computed again" not in caplog.text


@pytest.fixture
def mixed_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("mesh", tiered(list(MESHES), ["fsdp_x3"]))
def test_weights_travel_in_bfloat16(mesh, mixed_bfloat16):
    """TensorFlow gathers no bfloat16: its bits are sent."""
    found = train(PROGRAMS["functional"], over_collectives(mesh))
    theirs = train(PROGRAMS["functional"])
    for one, other in zip(found, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype("float32"), other.astype("float32"), atol=2e-2
        )


class ScoreMatching(keras.Model):
    """A step with a gradient of what a vectorized loop of gradients makes."""

    def __init__(self):
        super().__init__()
        self.network = Projection(8)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = self.network(x)
            slopes = tf.linalg.trace(inner.batch_jacobian(score, x))
            loss = tf.reduce_mean(slopes + tf.reduce_sum(score**2, 1))
        weights = self.network.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}

    def call(self, x):
        return self.network(x)


def score_matching():
    model = ScoreMatching()
    model(np.zeros((1, 8)))
    return compiled(model)


def test_gradients_of_a_vectorized_loop(caplog):
    """TensorFlow's loop takes what comes of others for the same in each turn.

    Processes gather rows by collectives, as is done here once.
    """
    program = score_matching, vectors
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        found = train(program, over_collectives("fsdp_x3"))
    check(found, train(program))
    assert "is computed whole" in caplog.text
