"""What `run_eagerly=True` computes of the rows of all, against Keras's `fit`.

Batches of 6, 6 and 1 rows: one replica of three has no row of the last.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")

X = np.random.default_rng(0).normal(size=(13, 3))
Y = np.random.default_rng(1).normal(size=(13, 2))
OPTIONS = {"batch_size": 6, "verbose": 0}


class Gathered(keras.metrics.Metric):
    """It begins, and begins again, at a number of its own."""

    def __init__(self, gather, begin, **named):
        super().__init__(**named)
        self.gather, self.begin = gather, begin
        start = keras.initializers.Constant(begin)
        self.value = self.add_weight(shape=(), initializer=start)

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.abs(y_true - y_pred)
        self.value.assign(self.gather(self.value, error))

    def result(self):
        return self.value + 0.0

    def reset_state(self):
        self.value.assign(self.begin)


GATHERS = {
    "sum": lambda old, error: old + ops.sum(error),
    "most": lambda old, error: ops.maximum(old, ops.max(error)),
    "root": lambda old, error: old + ops.sqrt(ops.mean(error)),
    "last": lambda old, error: ops.mean(error),
    "steps": lambda old, error: old + 1,
}


def gathered():
    return [
        Gathered(gather, begin, name=f"{name}_from_{begin}")
        for name, gather in GATHERS.items()
        for begin in (0.0, 40.5, -np.inf)
    ]


def ratio(y, p):
    return ops.sum(y * p) / (1 + ops.sum(p * p))


def contrast(y, p):
    likeness = ops.logsumexp(ops.matmul(p, ops.transpose(p)), axis=1)
    return ops.mean(likeness) - ratio(y, p)


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return contrast(y, y_pred)


class Anchors(keras.Model):
    """It returns a table beside its rows, as long as a batch."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.table = self.add_weight(shape=(6, 2), name="table")

    def call(self, x, training=False):
        return {"rows": super().call(x), "table": self.table + 0.0}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        rows, table = y_pred["rows"], y_pred["table"]
        return contrast(y, rows) + ops.sum(table**2) * ops.mean(rows**2)


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return found | {"own": ops.max(ops.abs(y - y_pred))}


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class Watching(layers.Layer):
    """It keeps metrics that begin at numbers, of rows and of a mean."""

    def __init__(self):
        super().__init__()
        self.most = Gathered(GATHERS["most"], -np.inf, name="most")
        self.sum = Gathered(GATHERS["sum"], 40.5, name="sum")
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x, training=False):
        if training:
            self.most.update_state(x, 0.0)
        self.sum.update_state(x, 0.0)
        self.mean.update_state(ops.mean(x))
        return x


class Adding(layers.Layer):
    """It adds a mean, a sum and a constant to the loss, and has a layer."""

    def __init__(self):
        super().__init__()
        penalty = keras.regularizers.L2(0.1)
        self.dense = layers.Dense(4, activity_regularizer=penalty)

    def call(self, x):
        x = self.dense(x)
        self.add_loss(0.3 * ops.mean(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.exp(x)))
        self.add_loss(ops.convert_to_tensor(0.5, x.dtype))
        return x


class Mixing(layers.Layer):
    """Each row of its outputs comes of all rows."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Varying(layers.Layer):
    """It adds to the loss in some steps alone."""

    def call(self, x, training=False):
        if tf.is_symbolic_tensor(x) or float(ops.mean(x)) > 0:
            self.add_loss(ops.mean(x))
        return x


class Kept(layers.Layer):
    """It keeps its inputs, and a state of them, for losses and metrics."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.3, seed=3)

    def build(self, shape):
        self.mean = self.add_weight(shape=(), initializer="zeros")
        self.mean.trainable = False

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + ops.mean(x))
        self.rows = x
        return self.dropout(x, training=training)


def passes_by_attributes():
    """A loss and metrics read more than their arguments."""
    kept = Kept()
    inputs = keras.Input((3,))
    outputs = layers.Dense(2)(kept(inputs))

    def loss(y, p):
        return ops.square(y - p) * (1 + ops.max(kept.rows)) + kept.mean**2

    def score(y, p):
        return ops.abs(y - p) + ops.max(kept.rows)

    def state(y, p):
        return ops.abs(y - p) * kept.mean

    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss, metrics=[score, state], run_eagerly=True)
    return model


def of_numpy():
    model = network()()

    def ranks(y, p):
        return float(np.argsort(y.numpy()[:, 0]) @ np.argsort(p.numpy()[:, 0]))

    model.compile("sgd", "mse", metrics=[ranks], run_eagerly=True)
    return model


def recurrent():
    """It takes no batch without rows: TensorFlow's BiasAdd fails."""
    return keras.Sequential([layers.Reshape((2, 2)), layers.LSTM(4)])


def network(kind=keras.Model, loss="mse", middle=None, metrics=list):
    def build():
        x = inputs = keras.Input((3,))
        if middle is not None:
            x = middle()(layers.Dense(4, activation="tanh")(x))
        model = kind(inputs, layers.Dense(2)(x))
        model.compile(
            keras.optimizers.SGD(0.1), loss, metrics=metrics(), run_eagerly=True
        )
        return model

    return build


PROGRAMS = {
    "metrics": network(metrics=gathered),
    "metrics of functions": network(metrics=lambda: [ratio, contrast]),
    "a loss": network(loss=contrast),
    "compute_loss": network(OwnLoss),
    "a table beside rows": network(Anchors, None),
    "compute_metrics": network(OwnMetrics, metrics=gathered),
    "train_step": network(OwnStep, contrast, metrics=gathered),
    "metrics of a layer": network(middle=Watching),
    "add_loss": network(middle=Adding),
    "no row on a replica": network(
        middle=recurrent,
        metrics=lambda: [keras.metrics.F1Score(dtype="float64")],
    ),
    "add_loss, a loss": network(loss=contrast, middle=Adding),
    "add_loss in some steps": network(middle=Varying),
    "a layer that mixes rows": network(middle=Mixing),
    "batch normalization": network(middle=layers.BatchNormalization),
    "attributes": passes_by_attributes,
    "NumPy": of_numpy,
}


def act(trainer, model):
    history = trainer.fit(
        X, Y, epochs=2, shuffle=False, validation_data=(X, Y), **OPTIONS
    )
    scores = trainer.evaluate(X, Y, return_dict=True, **OPTIONS)
    weights = dict(enumerate(model().get_weights()))
    return {**history.history, **{f"now {n}": scores[n] for n in scores}}, (
        weights
    )


COLUMNS = ["mirrored_x3", "fsdp_x3", "data_2_tensor_2"]
EVERY = [(column, name) for column in COLUMNS for name in PROGRAMS]
QUICK = [
    ("mirrored_x3", name)
    for name in ("metrics", "a loss", "add_loss", "no row on a replica")
]


@pytest.mark.parametrize(("column", "name"), tiered(EVERY, QUICK))
def test_as_in_keras(column, name, strategies):
    build = PROGRAMS[name]
    keras.utils.set_random_seed(0)
    model = build()
    expected = act(model, lambda: model)
    trainer = mgpu_tf.Trainer(build, strategies[column])
    received = act(trainer, lambda: trainer.model)
    for theirs, ours in zip(expected, received, strict=True):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(
                ours[key], value, rtol=1e-9, atol=1e-12, err_msg=str(key)
            )


@pytest.mark.parametrize(
    ("column", "options", "match"),
    [
        ("data_2_pipeline_2", {}, "A pipeline proves in a graph"),
        ("mirrored_x3", {"step_parts": 2}, "all rows of a batch at once"),
        ("mirrored_x3", {"noise_scale": True}, "all rows of a batch at once"),
    ],
)
def test_what_needs_parts_of_a_batch_is_refused(
    column, options, match, strategies
):
    with pytest.raises(mgpu_tf.ConfigurationError, match=match):
        mgpu_tf.Trainer(network(), strategies[column], **options)


def test_a_model_is_debugged_between_two_fits(strategies):
    def numbers(model):
        trained = getattr(model, "model", model)
        for eager in (False, True, False):
            trained.run_eagerly = eager
            model.fit(X, Y, shuffle=False, **OPTIONS)
        return trained.get_weights()

    def build():
        model = network(middle=Mixing)()
        model.compile("adam", contrast)
        return model

    keras.utils.set_random_seed(0)
    expected = numbers(build())
    found = numbers(mgpu_tf.Trainer(build, strategies["mirrored_x3"]))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def looked_up():
    """Words of each row, and places that all rows look up alike."""
    keras.utils.set_random_seed(0)
    words = keras.Input((3,), dtype="int32")
    x = layers.Embedding(7, 4)(words)
    places = layers.Embedding(3, 4)
    x = layers.Lambda(lambda x: x + places(ops.arange(3)))(x)
    model = keras.Model(words, layers.Dense(1)(layers.Flatten()(x)))
    model.places = places
    model.compile(
        keras.optimizers.Adam(0.1, global_clipnorm=0.01),
        "mse",
        run_eagerly=True,
    )
    return model


def test_rows_of_tables(strategies):
    x = np.random.default_rng(0).integers(0, 7, size=(12, 3))
    model = looked_up()
    trainer = mgpu_tf.Trainer(looked_up, strategies["mirrored_x3"])
    for trains in (model, trainer):
        trains.fit(x, x[:, :1], batch_size=6, shuffle=False, verbose=0)
    for ours, theirs in zip(
        trainer.model.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


class CountsCalls(keras.layers.Layer):
    """It counts its calls in a variable that Keras does not know."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * (1 + 0.1 * tf.cast(self.calls, x.dtype))


@pytest.mark.parametrize("column", ["one_device", "mirrored_x3"])
def test_building_leaves_a_plain_variable_as_it_was(column, strategies):
    def build():
        model = keras.Sequential(
            [keras.Input((3,)), CountsCalls(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    x = np.random.default_rng(0).normal(size=(14, 3)).astype("float32")
    fit = {"batch_size": 5, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(x, x[:, :1], **fit)
    trainer = mgpu_tf.Trainer(build, strategies[column])
    trainer.fit(x, x[:, :1], **fit)
    pairs = zip(model.get_weights(), trainer.model.get_weights(), strict=True)
    for ref, own in pairs:
        np.testing.assert_allclose(own, ref, rtol=1e-5, atol=1e-6)
    assert trainer.model.layers[0].calls.numpy() == 3
    assert model.layers[0].calls.numpy() == 3
