"""Layers that are computed again in the backward pass give the same numbers.

The references are Keras's own `fit`, and for layers that draw at random the
same strategy without it.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.engine import keras_internals
from tests.tiers import tiered

WORDS = 30


@keras.saving.register_keras_serializable("mgpu_tf_tests")
class Block(layers.Layer):
    """Attention and a feed-forward part; takes a mask, may drop."""

    def __init__(self, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4, dropout=rate, seed=3)
        self.first = layers.LayerNormalization()
        self.second = layers.LayerNormalization()
        self.wide = layers.Dense(16, activation="gelu")
        self.narrow = layers.Dense(8)
        self.drop = layers.Dropout(rate, seed=5)
        self.supports_masking = True

    def build(self, shape):
        self.attention.build(shape, shape)
        self.first.build(shape)
        self.second.build(shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 16))

    def call(self, x, mask=None):
        # `drop` takes `training` from the call around it.
        seen = None if mask is None else mask[:, None, :]
        x = self.first(x + self.attention(x, x, attention_mask=seen))
        return self.second(x + self.drop(self.narrow(self.wide(x))))


class Tied(layers.Layer):
    """Reads the weights of another layer."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        object.__setattr__(self, "embedding", embedding)
        self.dense = layers.Dense(8)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        table = keras.ops.convert_to_tensor(self.embedding.embeddings)
        return keras.ops.matmul(self.dense(x), keras.ops.transpose(table))


class AddsLoss(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        y = self.dense(x)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        return y


def words():
    generator = np.random.default_rng(0)
    x = generator.integers(1, WORDS, size=(55, 6))
    x[:, 4:] *= generator.random((55, 2)) > 0.5
    return x, generator.integers(0, 4, 55)


def next_words():
    return words()[0], words()[0]


def images():
    generator = np.random.default_rng(1)
    return generator.normal(size=(55, 6, 6, 3)), words()[1]


def compiled(inputs, outputs, optimizer=None):
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer or keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA draws other numbers.
    )
    return model


def transformer(rate=0.0):
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    block = Block(rate)
    # One of the blocks is called twice.
    x = block(Block(rate)(block(x)))
    x = layers.GlobalAveragePooling1D()(x)
    return compiled(inputs, layers.Dense(4)(x))


def masked_attention():
    """Its mask comes with what it is called with; padding has gradients."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    seen = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, seen]))
    x = layers.Dense(4)(layers.Flatten()(x))
    return compiled(inputs, x, keras.optimizers.SGD(0.05))


def language_model():
    inputs = keras.Input((6,), dtype="int32")
    embedding = layers.Embedding(WORDS, 8)
    return compiled(inputs, Tied(embedding)(Block()(embedding(inputs))))


def convolution():
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(6, 3, activation="relu", kernel_regularizer="l2")(inputs)
    x = layers.BatchNormalization(synchronized=True)(x)
    x = layers.Flatten()(layers.SeparableConv2D(7, 3)(x))
    bounded = keras.constraints.MaxNorm(0.5)
    x = layers.Dense(9, kernel_constraint=bounded)(x)
    x = layers.Dense(4)(AddsLoss()(x))
    return compiled(inputs, x, keras.optimizers.SGD(0.05, momentum=0.9))


def assigning():
    inputs = keras.Input((6, 6, 3))
    x = layers.SpectralNormalization(layers.Dense(5))(layers.Flatten()(inputs))
    return compiled(inputs, layers.Dense(4)(x), keras.optimizers.SGD(0.05))


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    x, state = layers.GRU(6, return_state=True)(x)
    x = layers.Concatenate()([x, state])
    return compiled(inputs, layers.Dense(4)(x), keras.optimizers.RMSprop(0.01))


def frozen():
    base = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(6, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
        ]
    )
    base.trainable = False
    inputs = keras.Input((6, 6, 3))
    x = layers.Dense(8, activation="relu")(base(inputs))
    return compiled(inputs, layers.Dense(4)(x))


def mixed():
    inputs = keras.Input((6, 6, 3))
    policy = keras.DTypePolicy("mixed_float16")
    x = layers.Dense(9, dtype=policy, activation="tanh")(
        layers.Flatten()(inputs)
    )
    x = layers.Dense(4, dtype="float64")(x)
    return compiled(inputs, x, keras.optimizers.SGD(0.05))


def mixed_recurrent():
    """Weights that are read in each turn of a loop."""
    policy = keras.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input((6, 6, 3))
    x = layers.Reshape((6, 18), dtype=policy)(inputs)
    x = layers.LSTM(9, dtype=policy)(x)
    x = layers.Dense(4, dtype="float64")(x)
    return compiled(inputs, x, keras.optimizers.SGD(0.05))


class Penalty(keras.Model):
    """Its loss has a gradient inside: a gradient of a gradient is needed."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x, training=training)
        slope = tape.gradient(outputs, x)
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + keras.ops.mean(keras.ops.square(slope))


def penalized():
    inputs = keras.Input((6, 6, 3))
    x = layers.Dense(8, activation="tanh")(layers.Flatten()(inputs))
    model = Penalty(inputs, layers.Dense(4, activation="softplus")(x))
    model.compile(
        keras.optimizers.SGD(0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


PROGRAMS = {
    "transformer": (transformer, words),
    "masked_attention": (masked_attention, words),
    "language_model": (language_model, next_words),
    "convolution": (convolution, images),
    "recurrent": (recurrent, words),
    "frozen": (frozen, images),
    "penalized": (penalized, images),
}
# Compared with the same strategy without recomputation.
DRAWING = {
    "transformer_dropout": (functools.partial(transformer, 0.3), words),
    "assigning": (assigning, images),
    "mixed": (mixed, images),
    "mixed_recurrent": (mixed_recurrent, images),
}
COLUMNS = ["one_device", "mirrored_x3", "fsdp_x3", "data_2_fsdp_2"]
# The rows of a gradient inside of a loss cannot be read on replicas.
ALONE = {"penalized": ("one_device", "fsdp_x1")}


pytestmark = pytest.mark.usefixtures("float64")


def train(build, data, strategy=None, **options):
    keras.utils.set_random_seed(0)
    x, y = data()
    if strategy is None:
        trains = model = build()
    else:
        trains = mgpu_tf.Trainer(build, strategy, **options)
        model = trains.model
    history = trains.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, verbose=0
    )
    variables = [*model.variables, *model.optimizer.variables]
    return [
        *(np.asarray(variable.numpy()) for variable in variables),
        np.array(history.history["loss"]),
        trains.predict(x, verbose=0),
    ]


def check(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@functools.cache
def stock(name):
    return train(*PROGRAMS[name])


CELLS = [
    (column, name) for name in PROGRAMS for column in ALONE.get(name, COLUMNS)
]
QUICK = [
    ("fsdp_x3", "masked_attention"),
    ("fsdp_x1", "penalized"),
]


@pytest.mark.filterwarnings("ignore:Layer 'flatten.*was passed an input")
@pytest.mark.parametrize(("column", "name"), tiered(CELLS, QUICK))
def test_same_numbers_as_keras(column, name, strategies):
    found = train(*PROGRAMS[name], strategies[column], recompute="layers")
    check(found, stock(name))


DRAWS = [
    (column, reference, name)
    for column, reference in [
        ("one_device", "one_device"),
        ("mirrored_x3", "mirrored_x3"),
        ("fsdp_x3", "mirrored_x3"),
    ]
    for name in DRAWING
]
QUICK_DRAWS = [
    ("fsdp_x3", "mirrored_x3", "assigning"),
    ("one_device", "one_device", "mixed"),
]


@pytest.mark.parametrize(
    ("column", "reference", "name"), tiered(DRAWS, QUICK_DRAWS)
)
def test_same_numbers_as_without(column, reference, name, strategies):
    check(
        train(*DRAWING[name], strategies[column], recompute="layers"),
        train(*DRAWING[name], strategies[reference]),
    )


def calls(strategy, **options):
    """How often the Python code of a layer runs while a fit is traced."""
    count = []

    class Counted(layers.Dense):
        def call(self, x, training=None):
            if tf.is_symbolic_tensor(x):
                count.append(keras_internals.stateless_scope() is not None)
            return super().call(x, training=training)

    def build():
        model = keras.Sequential(
            [keras.Input((4,)), Counted(4), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    x = np.ones((8, 4))
    mgpu_tf.Trainer(build, strategy, **options).fit(
        x, x[:, :1], batch_size=4, verbose=0
    )
    return sum(count)


def test_layers_are_computed_again(strategies):
    one = strategies["one_device"]
    assert calls(one, recompute="layers") > calls(one)


class Passing(layers.Layer):
    """Reads a tensor of an object."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")

    def call(self, x, memory=None):
        return keras.ops.matmul(x, self.kernel) * memory[0]


class Holds:
    """No structure that TensorFlow looks into."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, place):
        return self.value


class WithMemory(keras.Model):
    def __init__(self):
        super().__init__()
        self.wide, self.passing = layers.Dense(8), Passing()

    def call(self, x):
        x = self.wide(layers.Flatten()(x))
        x = self.passing(x, memory=Holds(keras.ops.tanh(x)))
        return keras.ops.softmax(x)


def with_memory():
    model = WithMemory()
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy"
    )
    return model


ONCE = "is not computed again in the backward pass"
ALL_AGAIN = ["transformer_dropout", "language_model", "recurrent", "mixed"]


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        [
            (column, name)
            for column in ("one_device", "fsdp_x3", "tensor_x3")
            for name in ALL_AGAIN
        ],
        [("fsdp_x3", "recurrent"), ("tensor_x3", "transformer_dropout")],
    ),
)
def test_layers_that_are_functions_keep_nothing(
    column, name, strategies, caplog
):
    caplog.set_level("INFO", "mgpu_tf")
    train(*(PROGRAMS | DRAWING)[name], strategies[column], recompute="layers")
    assert ONCE not in caplog.text


def test_a_layer_that_is_computed_once_is_named(strategies, caplog):
    caplog.set_level("INFO", "mgpu_tf")
    ours = train(with_memory, images, strategies["fsdp_x3"])
    found = [each for each in caplog.messages if ONCE in each]
    assert [each.split(" (")[1].split(")")[0] for each in found] == ["Passing"]
    assert "no argument" in found[0]
    check(ours, train(with_memory, images))


@pytest.mark.parametrize(
    "column", tiered(["one_device", "fsdp_x3"], ["one_device"])
)
def test_code_that_runs_eagerly(column, strategies):
    def build(eagerly=True):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(4),
            ]
        )
        optimizer = keras.optimizers.Adam(0.02, clipnorm=0.1)
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        return model

    def points():
        x = np.random.default_rng(2).normal(size=(22, 4))
        return x, 2 * x

    check(
        train(build, points, strategies[column], recompute="layers"),
        train(functools.partial(build, False), points),
    )


def test_a_step_of_ones_own_is_refused(strategies):
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    def build():
        inputs = keras.Input((4,))
        model = Own(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(
        build, strategies["one_device"], recompute="layers"
    )
    with pytest.raises(mgpu_tf.ConfigurationError, match="recompute"):
        trainer.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)


def test_a_wrong_name_is_told(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="recompute"):
        mgpu_tf.Trainer(transformer, strategies["one_device"], recompute="all")
