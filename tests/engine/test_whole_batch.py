"""What is not proven to add up over rows, against Keras's own `fit`.

Batches of 13, 13 and 5 rows: three replicas share none of them evenly.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests import columns
from tests.tiers import tiered

COLUMNS = [
    "mirrored_x3",
    *columns.SPLIT,
    pytest.param("tensor_x3", marks=pytest.mark.full),
]
ROWS, STEPS, CLASSES = 31, 4, 3


pytestmark = pytest.mark.usefixtures("float64")


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, STEPS, 5))
    return x, generator.integers(0, CLASSES, size=(ROWS, STEPS))


def entropy(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def network(*middle, kind=keras.Model, loss=None, metrics=None):
    def build():
        inputs = keras.Input((STEPS, 5))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        for make in middle:
            hidden = make()(hidden)
        model = kind(inputs, layers.Dense(CLASSES)(hidden))
        own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.03), loss or own, metrics=metrics)
        return model

    return build


def flattened(y, p):
    """Tokens in a row, as Hugging Face's models compute their loss."""
    return entropy(ops.reshape(y, (-1,)), ops.reshape(p, (-1, CLASSES)))


def masked(y, p):
    kept = ops.cast(ops.not_equal(y, 0), p.dtype)
    return ops.sum(entropy(y, p) * kept) / ops.sum(kept)


def masked_accuracy(y, p):
    kept = ops.cast(ops.not_equal(y, 0), p.dtype)
    hits = ops.cast(ops.equal(ops.argmax(p, -1), ops.cast(y, "int64")), p.dtype)
    return ops.sum(hits * kept) / ops.sum(kept)


@tf.function
def neighbours(y, p):
    """Rows that are mixed where no reader of the step sees it."""
    each = entropy(y, p)
    return tf.reduce_mean(tf.abs(each[1:] - each[:-1])) + tf.reduce_mean(each)


class Published(keras.losses.Loss):
    """A loss whose author wrote `__call__`."""

    def call(self, y_true, y_pred):
        raise NotImplementedError

    def __call__(self, y_true, y_pred, sample_weight=None):
        return masked(y_true, y_pred)


class Normalized(keras.Model):
    """Weights that are divided by their sum, as for boxes."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        weight = ops.cast(ops.not_equal(y, 0), y_pred.dtype)
        return super().compute_loss(
            x, y, y_pred, weight / ops.sum(weight), training
        )


class Router(layers.Layer):
    """Switch's balancing loss, a product of two means over the batch."""

    mean = staticmethod(lambda values: ops.mean(values, axis=0))

    def __init__(self):
        super().__init__()
        self.gate, self.expert = layers.Dense(4), layers.Dense(6)

    def build(self, shape):
        self.gate.build(shape)
        self.expert.build(shape)

    def call(self, x):
        p = ops.softmax(self.gate(x))
        chosen = ops.one_hot(ops.argmax(p, -1), 4, dtype=p.dtype)
        balance = ops.sum(self.mean(chosen) * self.mean(p))
        self.add_loss(0.1 * balance)
        return self.expert(x) * ops.max(p, -1, keepdims=True)


class GlobalRouter(Router):
    mean = staticmethod(mgpu_tf.batch_mean)


class Running(layers.Layer):
    """It subtracts a running mean that it has just moved."""

    def build(self, shape):
        self.kept = self.add_weight(
            shape=shape[-1:], initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            mean = ops.mean(x, axis=(0, 1))
            self.kept.assign(0.9 * self.kept + 0.1 * mean)
        return x - self.kept


class OfTokens(layers.Layer):
    """A router of the tokens of all rows, in one axis."""

    def __init__(self):
        super().__init__()
        self.router = Router()

    def build(self, shape):
        self.router.build(shape[-1:])

    def call(self, x):
        tokens = ops.reshape(x, (-1, x.shape[-1]))
        return ops.reshape(self.router(tokens), (-1, *x.shape[1:]))


class Centre(layers.Layer):
    """It moves by what is no sum of rows, and is read in the next step."""

    def build(self, shape):
        self.kept = self.add_weight(
            shape=shape[-1:], initializer="ones", trainable=False
        )

    def call(self, x, training=False):
        before = ops.convert_to_tensor(self.kept)
        if training:
            square = ops.sum(x * x, axis=(0, 1))
            self.kept.assign_sub(0.1 * square / (1.0 + ops.max(square)))
        return x - before


class Neighbourly(layers.Layer):
    """Each row gets what is like it of all others."""

    def call(self, x):
        every = mgpu_tf.gather_batch(x)
        likeness = ops.softmax(ops.einsum("bth,cth->bc", x, every))
        return x + ops.einsum("bc,cth->bth", likeness, every)


def centred(x):
    return x - ops.mean(x, axis=0)


def over_rows(x):
    return ops.softmax(x, axis=0)


class MixingCell(layers.Layer):
    """It mixes the rows within the loop of the layer that calls it."""

    state_size = output_size = 6

    def call(self, x, states):
        outputs = centred(ops.tanh(x)) + 0.5 * states[0]
        return outputs, [outputs]


class HoldsOne(layers.Layer):
    """The layer inside of it mixes rows."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(5, activation=over_rows)

    def call(self, x):
        return 2 * self.inner(x)


class MixesTwice(layers.Layer):
    """It mixes what a layer inside of it has mixed."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Lambda(over_rows)

    def call(self, x):
        return centred(self.inner(x) * x)


def time_major(x):
    """Steps on the first axis, rows on the second."""
    turned = layers.LSTM(4, return_sequences=True)(ops.transpose(x, (1, 0, 2)))
    return ops.transpose(turned, (1, 0, 2))


def as_tokens(x):
    tokens = layers.Dense(4)(ops.reshape(x, (-1, x.shape[-1])))
    return ops.reshape(ops.tanh(tokens), (-1, STEPS, 4))


# Of Keras's own parts alone: what they are given mixes rows.
OF_KERAS = {
    "a lambda": network(lambda: layers.Lambda(centred)),
    "functions": network(lambda: centred),
    "rows in another order": network(lambda: lambda x: ops.roll(x, 1, axis=0)),
    "likeness to other rows": network(
        lambda: lambda x: x + ops.einsum("bth,cth,csh->bsh", x, x, x) / 99
    ),
    "an activation": network(lambda: layers.Dense(5, activation=over_rows)),
    "an activation within a layer": network(HoldsOne),
    "an axis of rows": network(lambda: layers.Softmax(axis=0)),
    "a cell": network(lambda: layers.RNN(MixingCell(), return_sequences=True)),
    "a wrapper": network(
        lambda: layers.TimeDistributed(layers.Lambda(centred))
    ),
    "a nested model": network(
        lambda: keras.Sequential([layers.Dense(3), layers.Lambda(over_rows)])
    ),
    "time on the first axis": network(lambda: time_major),
    "tokens and back": network(lambda: as_tokens),
    "a layer that mixes twice": network(MixesTwice),
}

CASES = OF_KERAS | {
    "flattened tokens": network(loss=flattened),
    "masked": network(loss=masked, metrics=[masked_accuracy]),
    "within a function": network(loss=neighbours),
    "dice": network(loss=lambda y, p: 1 - ops.sum(ops.softmax(p) ** 2) / 9),
    "published": network(loss=Published()),
    "weights by their sum": network(kind=Normalized),
    "a router": network(Router),
    "a router that stays cut": network(GlobalRouter),
    "a running mean": network(Running),
    "pairs in a layer": network(Neighbourly),
    "a router of tokens": network(OfTokens),
    "state that is no sum": network(Centre),
}
QUICK = [
    "masked",
    "a router",
    "a router that stays cut",
    "a cell",
    "functions",
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", tiered(list(CASES), QUICK))
def test_as_keras(name, column, strategies):
    x, y = data()
    fit = {"batch_size": 13, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    model = CASES[name]()
    theirs = model.fit(x, y, **fit).history
    trainer = mgpu_tf.Trainer(CASES[name], strategies[column])
    ours = trainer.fit(x, y, **fit).history
    for key, values in theirs.items():
        np.testing.assert_allclose(ours[key], values, rtol=1e-9)
    pairs = zip(model.get_weights(), trainer.model.get_weights(), strict=True)
    for ref, own in pairs:
        np.testing.assert_allclose(own, ref, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(
        trainer.predict(x, batch_size=13),
        model.predict(x, batch_size=13, verbose=0),
        rtol=1e-9,
    )


def test_an_activation_that_mixes_rows_after_a_sum_over_tensor(strategies):
    test_as_keras("an activation", "data_2_tensor_2", strategies)


@pytest.mark.parametrize(
    "name", tiered(["functions", "within a function"], ["functions"])
)
def test_without_xla_where_rows_are_exchanged(name, strategies, caplog):
    def build():
        model = CASES[name]()
        model.jit_compile = True
        return model

    x, y = data()
    fit = {"batch_size": 13, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    model = CASES[name]()
    theirs = model.fit(x, y, **fit).history
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with caplog.at_level(logging.INFO, logger="mgpu_tf"):
        ours = trainer.fit(x, y, **fit).history
    assert "which XLA does not compile" in caplog.text
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-9)


def fitted_as_keras(build, strategy, given=None, rows=13, **options):
    """Trains with Keras and with the Trainer; compares logs and weights."""
    x, y = given or data()
    fit = {"batch_size": rows, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    model = build()
    theirs = model.fit(x, y, **fit).history
    trainer = mgpu_tf.Trainer(build, strategy, **options)
    ours = trainer.fit(x, y, **fit).history
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-9, err_msg=name)
    pairs = zip(model.get_weights(), trainer.model.get_weights(), strict=True)
    for ref, own in pairs:
        np.testing.assert_allclose(own, ref, rtol=1e-9, atol=1e-11)
    return model, trainer


class Centred(layers.Layer):
    """It takes what all rows of the batch have in common."""

    def call(self, x):
        return x - mgpu_tf.batch_mean(x)


@pytest.mark.parametrize("layer", [Centred, GlobalRouter, Neighbourly])
@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("one_device", {"step_parts": 2}),
        ("mirrored_x3", {"step_parts": 2}),
        ("pipeline_x2", {}),
        pytest.param("data_2_pipeline_2", {}, marks=pytest.mark.full),
        pytest.param("tensor_2_pipeline_2", {}, marks=pytest.mark.full),
        pytest.param("tensor_x3", {"step_parts": 2}, marks=pytest.mark.full),
    ],
)
def test_means_of_all_rows_need_all_rows(layer, column, options, strategies):
    build = network(layer)
    trainer = mgpu_tf.Trainer(build, strategies[column], **options)
    with pytest.raises(
        mgpu_tf.ConfigurationError,
        match=r"mgpu_tf\.batch_mean|gather_batch goes with steps",
    ):
        trainer.fit(*data(), batch_size=13, verbose=0)


class Decays(layers.Layer):
    """It assigns its own weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        self.scale.assign(0.9 * self.scale)
        return x * self.scale


@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("one_device", {"step_parts": 2}),
        ("pipeline_x2", {}),
        pytest.param("mirrored_x3", {"step_parts": 2}, marks=pytest.mark.full),
    ],
)
def test_a_weight_is_assigned_once_for_a_batch(column, options, strategies):
    trainer = mgpu_tf.Trainer(network(Decays), strategies[column], **options)
    with pytest.raises(mgpu_tf.ConfigurationError, match=r"writes|assign"):
        trainer.fit(*data(), batch_size=13, verbose=0)


def below_the_mean(y, p):
    return entropy(y, p) - 0.1 * ops.sum(mgpu_tf.batch_mean(p) ** 2)


@pytest.mark.parametrize(
    "column",
    [
        "pipeline_x2",
        pytest.param("data_2_pipeline_2", marks=pytest.mark.full),
        pytest.param("tensor_2_pipeline_2", marks=pytest.mark.full),
    ],
)
def test_losses_of_a_pipeline_have_means_of_all_rows(column, strategies):
    build = network(loss=below_the_mean)
    fitted_as_keras(build, strategies[column])


class NeedsValues(layers.Layer):
    """It cannot be traced: nobody knows what it does."""

    def call(self, x):
        return x if float(ops.max(x)) < -9 else centred(x)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: centred, marks=pytest.mark.full),
        pytest.param(lambda: layers.Lambda(centred), marks=pytest.mark.full),
        NeedsValues,
        lambda: layers.Dense(4, "relu"),
    ],
    ids=["functions", "a lambda", "what needs values", "nothing"],
)
@pytest.mark.parametrize(
    "column", ["mirrored_x3", pytest.param("fsdp_x3", marks=pytest.mark.full)]
)
def test_eagerly_as_keras(make, column, strategies):
    x, _ = data()

    def build():
        inputs = keras.Input((STEPS, 5))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        outer = keras.Model(inputs, hidden)
        middle, after = make(), layers.Dense(CLASSES)

        class Eager(keras.Model):
            def __init__(self):
                super().__init__()
                self.parts = [outer, middle, after]

            def call(self, x):
                return after(middle(outer(x)))

        model = Eager()
        own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", own, run_eagerly=True)
        return model

    model, trainer = fitted_as_keras(build, strategies[column])
    np.testing.assert_allclose(
        trainer.predict(x, batch_size=13),
        model.predict(x, batch_size=13, verbose=0),
        rtol=1e-9,
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flattened tokens", 0),
        ("masked", 0),
        ("a router that stays cut", 0),
    ],
)
def test_what_is_sent_is_said(name, said, strategies, caplog):
    trainer = mgpu_tf.Trainer(CASES[name], strategies["mirrored_x2"])
    with caplog.at_level(logging.INFO, logger="mgpu_tf"):
        trainer.fit(*data(), batch_size=13, verbose=0)
    lines = [r.getMessage() for r in caplog.records if "proven" in r.message]
    assert len(lines) == said, lines
    assert all("bytes for each example" in line for line in lines)


@pytest.mark.parametrize("options", [{}, {"step_parts": 2}])
def test_metrics_of_keras_are_known_in_a_step(options, strategies, caplog):
    """Also those that no proof knows, though a step replaces their update."""
    x, y = data()
    y = (y > 0).astype(float)

    def build():
        model = keras.Sequential(
            [keras.Input((STEPS, 5)), layers.Flatten(), layers.Dense(STEPS)]
        )
        auc = keras.metrics.AUC(name="auc")
        model.compile("sgd", "mse", metrics=[auc])
        return model

    with caplog.at_level(logging.INFO, logger="mgpu_tf"):
        fitted_as_keras(build, strategies["mirrored_x3"], (x, y), **options)
    assert "bytes for each example" not in caplog.text


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_a_quantized_model_predicts_as_such(strategies):
    x, y = data()
    for column in ("one_device", "mirrored_x2"):
        trainer = mgpu_tf.Trainer(network(), strategies[column])
        trainer.fit(x, y, batch_size=13, verbose=0)
        before = trainer.predict(x, batch_size=13)
        with trainer.strategy.scope():
            trainer.model.quantize("int8")
        after = trainer.predict(x, batch_size=13)
        assert np.abs(after - before).max() > 1e-6
        own = trainer.model(x[:13]).numpy()
        np.testing.assert_allclose(after[:13], own, rtol=1e-6, atol=1e-9)


class Folds(layers.Layer):
    """It makes a fixed number of rows of all rows of a batch."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def call(self, x):
        return x, tf.reshape(x - ops.mean(x, axis=0), (self.number, -1))


@pytest.mark.parametrize("number", [4, 8])
def test_a_fixed_number_of_rows_is_not_taken_for_those_of_the_batch(
    number, strategies
):
    """Whether there is one for each example is not known where both fit."""

    def build():
        inputs = keras.Input((3,))
        x, folded = Folds(number)(layers.Dense(2)(inputs))
        model = keras.Model(inputs, {"x": x, "folded": ops.tanh(folded)})
        model.compile(
            keras.optimizers.SGD(0.1),
            {"x": "mse", "folded": lambda y, p: ops.sum(p**2)},
        )
        return model

    x = np.random.default_rng(0).normal(size=(12, 3))
    y = {"x": x[:, :2], "folded": x[:, :1]}

    if number == 8:
        fitted_as_keras(build, strategies["mirrored_x3"], (x, y), rows=4)
        return
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(
        mgpu_tf.ConfigurationError, match=r"take the number.* returns 4"
    ):
        trainer.fit(x, y, batch_size=4, verbose=0)
