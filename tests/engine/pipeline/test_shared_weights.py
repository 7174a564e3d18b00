"""Weights that several stages use, against Keras's `fit` in float64."""

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

WORDS, PLACES = 12, 5
# 8 steps in 2 epochs; the last batch of each has 13 rows.
EXAMPLES, BATCH = 61, 16

pytestmark = pytest.mark.usefixtures("float64")


class Logits(layers.Layer):
    """The words that come out, by the table of those that go in."""

    def __init__(self, table, **options):
        super().__init__(**options)
        self.table = table

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.table.embeddings))


def language():
    """A causal language model with one table for both ends."""
    words = keras.Input((PLACES,), dtype="int32")
    table = layers.Embedding(
        WORDS, 8, name="table", embeddings_regularizer="l2"
    )
    x = table(words)
    for block in range(2):
        attended = layers.MultiHeadAttention(2, 4, name=f"attention_{block}")(
            x, x, use_causal_mask=True
        )
        x = layers.LayerNormalization()(x + attended)
        x = x + layers.Dense(8, "tanh", name=f"wide_{block}")(x)
    return keras.Model(words, Logits(table, name="logits")(x))


def reversible():
    """The same with a layer that is called at both ends."""
    hub = pytest.importorskip("keras_hub")
    words = keras.Input((PLACES,), dtype="int32")
    table = hub.layers.ReversibleEmbedding(WORDS, 8, name="table")
    x = layers.Dense(8, "tanh", name="attention_1")(table(words))
    return keras.Model(words, table(x, reverse=True))


def recurrent(kind=keras.Model):
    """One dense layer, three times."""
    inputs = keras.Input((6,))
    dense = layers.Dense(6, "tanh", kernel_regularizer="l2", name="shared")
    x = layers.Dense(6, "tanh", name="first")(dense(inputs))
    x = layers.Dense(6, "tanh", name="second")(dense(x))
    return kind(inputs, layers.Dense(2)(dense(x)))


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + 3 * sum(self.losses)


class OwnStep(keras.Model):
    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def frozen():
    model = recurrent()
    model.get_layer("shared").trainable = False
    return model


def lookups():
    """A table that is looked up by words, and by words that are guessed."""
    words = keras.Input((PLACES,), dtype="int32")
    table = layers.Embedding(WORDS, 8, name="table")
    x = layers.Dense(8, name="hidden")(table(words))
    guessed = layers.Lambda(
        lambda x: ops.argmax(x, -1), output_shape=(PLACES,), name="guessed"
    )(x)
    x = layers.Add()([x, table(guessed)])
    return keras.Model(words, layers.Dense(2)(layers.Flatten()(x)))


class Placed(layers.Layer):
    """Adds the rows of a table for the places."""

    def __init__(self, table, **options):
        super().__init__(**options)
        self.table = table

    def call(self, x):
        return x + self.table(ops.arange(PLACES))


def places():
    """A table that is looked up by words, and by their places."""
    words = keras.Input((PLACES,), dtype="int32")
    table = layers.Embedding(WORDS, 8, name="table")
    x = Placed(table, name="placed")(layers.Dense(8)(table(words)))
    return keras.Model(words, layers.Dense(2)(layers.Flatten()(x)))


MODELS = {
    "language": (language, {2: ["attention_1"], 3: ["wide_0", "attention_1"]}),
    "reversible": (reversible, {2: ["attention_1"]}),
    "recurrent": (recurrent, {2: ["second"], 3: ["first", "second"]}),
    "frozen": (frozen, {2: ["second"], 3: ["first", "second"]}),
    "own loss": (lambda: recurrent(OwnLoss), {2: ["second"]}),
    "own step": (lambda: recurrent(OwnStep), {2: ["second"]}),
    "lookups": (lookups, {2: ["guessed"]}),
    "places": (places, {2: ["placed"]}),
}


def data_of(model):
    generator = np.random.default_rng(3)
    if model.inputs[0].dtype != "int32":
        x = generator.normal(size=(EXAMPLES, 6))
        return x, x[:, :2] * 0.3
    x = generator.integers(0, WORDS, (EXAMPLES, PLACES)).astype("int32")
    if len(model.outputs[0].shape) == 2:
        return x, x[:, :2] * 0.3
    return x, (x * 3 + 1) % WORDS


def builder(name):
    def build():
        keras.utils.set_random_seed(1)
        model = MODELS[name][0]()
        loss = "mse"
        if len(model.outputs[0].shape) == 3:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.3), loss)
        return model

    return build


def strategy_of(name, data, fsdp, stages):
    return mgpu_tf.create_model_parallel_strategy(
        data=data,
        fsdp=fsdp,
        pipeline=stages,
        micro_batches=2,
        stages=MODELS[name][1][stages],
        num_virtual_devices=data * fsdp * stages,
        smallest_split=4,
    )


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables]


QUICK = [("recurrent", 1, 1, 3)]
ROWS = [
    *QUICK,
    ("language", 1, 1, 2),
    ("language", 1, 1, 3),
    ("language", 2, 1, 2),
    ("language", 1, 3, 2),
    ("reversible", 2, 1, 2),
    ("reversible", 1, 2, 2),
    ("recurrent", 2, 1, 2),
    ("recurrent", 1, 2, 3),
    ("frozen", 1, 2, 3),
    ("own loss", 2, 1, 2),
    ("own step", 1, 2, 2),
    ("lookups", 2, 1, 2),
    ("lookups", 1, 3, 2),
    ("places", 1, 1, 2),
]


@pytest.mark.parametrize(
    ("name", "data", "fsdp", "stages"), tiered(ROWS, QUICK)
)
def test_as_on_one_device(name, data, fsdp, stages):
    check(name, strategy_of(name, data, fsdp, stages))


def check(name, strategy):
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = builder(name)()
    x, y = data_of(expected)
    curve = expected.fit(x, y, BATCH, **options).history["loss"]
    trainer = mgpu_tf.Trainer(builder(name), strategy, seed=None)
    found = trainer.fit(x, y, batch_size=BATCH, **options).history["loss"]
    np.testing.assert_allclose(found, curve, rtol=1e-9)
    for ours, theirs in zip(
        state_of(trainer.model), state_of(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        trainer.evaluate(x, y, batch_size=BATCH, verbose=0),
        expected.evaluate(x, y, BATCH, verbose=0),
        rtol=1e-9,
    )
    np.testing.assert_allclose(
        trainer.predict(x, batch_size=BATCH, verbose=0),
        expected.predict(x, BATCH, verbose=0),
        atol=1e-9,
    )


def test_it_is_stored_in_one_stage(caplog):
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        trainer = mgpu_tf.Trainer(
            builder("language"), strategy_of("language", 1, 1, 3)
        )
    assert (
        "table/embeddings is stored in stage 0 and sent to stage 2"
        in caplog.text
    )
    (table,) = trainer.model.get_layer("table").weights
    assert [part.device[-5:] for part in table.value.values] == ["CPU:0"]
    assert sum(trainer.pipeline.parameters) == trainer.model.count_params()


def test_a_table_of_words_and_places_needs_one_replica():
    trainer = mgpu_tf.Trainer(builder("places"), strategy_of("places", 2, 1, 2))
    x, y = data_of(trainer.model)
    with pytest.raises(mgpu_tf.ConfigurationError, match="both ways") as error:
        trainer.fit(x, y, batch_size=BATCH, verbose=0)
    assert "\n" not in str(error.value)
