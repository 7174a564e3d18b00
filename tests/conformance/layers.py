"""Every layer of Keras with state or chance, and layers of one's own."""

import inspect

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.conformance import models
from tests.conformance.harness import Excuse, add, row

GROUP = "Layers with state or chance"
UNSYNCHRONIZED = Excuse("", "BatchNormalization that is not synchronized")
UNKNOWN_SIZE = Excuse(
    "",
    "where the graph knows the batch size, and all in the same way where it "
    "does not",
)


def _on_points(make, excuses=(), **options):
    def program(run):
        build = models.dense(make, **options)
        run.fit(build, models.points(), models.numbers())

    return program, excuses


def _on_images(make, excuses=()):
    def program(run):
        build = models.on_images(make)
        run.fit(build, models.images(), models.numbers())

    return program, excuses


def _on_words(make, excuses=(), **options):
    def program(run):
        build = models.per_word(
            make, lambda: layers.GlobalAveragePooling1D(), width=1, **options
        )
        run.fit(build, models.words(), models.numbers())

    return program, excuses


def _on_videos(make, shape, excuses=()):
    def program(run):
        def build():
            model = keras.Sequential(
                [
                    keras.Input(shape),
                    make(),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )
            return models.compiled(model)

        x = models.points(29, int(np.prod(shape))).reshape(-1, *shape)
        run.fit(build, x, models.numbers())

    return program, excuses


class Attends(layers.Layer):
    """A layer of attention that looks at its own input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs, training=None):
        if isinstance(self.inner, layers.Attention):
            return self.inner([inputs, inputs], training=training)
        return self.inner(inputs, inputs, training=training)


def _attention(make, excuses=()):
    return _on_words(lambda: Attends(make()), excuses)


def _random(make, excuses=()):
    return _on_images(make, excuses)


# What builds each layer that has state or draws numbers.
SUITED = {
    "AlphaDropout": _on_points(lambda: layers.AlphaDropout(0.3, seed=1)),
    "Attention": _attention(lambda: layers.Attention(dropout=0.3, seed=1)),
    "BatchNormalization": _on_points(
        layers.BatchNormalization, (UNSYNCHRONIZED,)
    ),
    "ConvLSTM1D": _on_videos(
        lambda: layers.ConvLSTM1D(2, 2, dropout=0.2, seed=1), (3, 4, 2)
    ),
    "ConvLSTM2D": _on_videos(
        lambda: layers.ConvLSTM2D(2, 2, seed=1), (3, 3, 3, 2)
    ),
    "ConvLSTM3D": _on_videos(
        lambda: layers.ConvLSTM3D(1, 2, seed=1), (2, 2, 2, 2, 1)
    ),
    "CutMix": _random(lambda: layers.CutMix(seed=1)),
    "Dropout": _on_points(lambda: layers.Dropout(0.3, seed=1)),
    "GRU": _on_words(lambda: layers.GRU(3, return_sequences=True)),
    "GaussianDropout": _on_points(lambda: layers.GaussianDropout(0.3, seed=1)),
    "GaussianNoise": _on_points(lambda: layers.GaussianNoise(0.3, seed=1)),
    "GroupNormalization": _on_points(lambda: layers.GroupNormalization(2)),
    "GroupQueryAttention": _attention(
        lambda: layers.GroupQueryAttention(2, 2, 1, dropout=0.2, seed=1)
    ),
    "LSTM": _on_words(lambda: layers.LSTM(3, return_sequences=True)),
    "LayerNormalization": _on_points(layers.LayerNormalization),
    "MixUp": _random(lambda: layers.MixUp(seed=1)),
    "MultiHeadAttention": _attention(
        lambda: layers.MultiHeadAttention(2, 2, dropout=0.2, seed=1)
    ),
    "Normalization": _on_points(lambda: _adapted()),
    "RMSNormalization": _on_points(layers.RMSNormalization),
    "RNN": _on_words(
        lambda: layers.RNN(layers.GRUCell(3), return_sequences=True)
    ),
    "RandAugment": _random(
        lambda: layers.RandAugment(value_range=(0, 1), seed=1, dtype="float32")
    ),
    "RandomBrightness": _random(
        lambda: layers.RandomBrightness(0.2, value_range=(0, 1), seed=1)
    ),
    "RandomColorDegeneration": _random(
        lambda: layers.RandomColorDegeneration(0.5, seed=1)
    ),
    "RandomColorJitter": _random(
        lambda: layers.RandomColorJitter(
            value_range=(0, 1), brightness_factor=0.2, seed=1
        )
    ),
    "RandomContrast": _random(
        lambda: layers.RandomContrast(0.3, value_range=(0, 1), seed=1)
    ),
    "RandomCrop": _random(lambda: layers.RandomCrop(4, 4, seed=1)),
    "RandomElasticTransform": _random(
        lambda: layers.RandomElasticTransform(seed=1), (UNKNOWN_SIZE,)
    ),
    "RandomErasing": _random(lambda: layers.RandomErasing(seed=1)),
    "RandomFlip": _random(lambda: layers.RandomFlip(seed=1)),
    "RandomGaussianBlur": _random(
        lambda: layers.RandomGaussianBlur(value_range=(0, 1), seed=1)
    ),
    "RandomGrayscale": _random(lambda: layers.RandomGrayscale(seed=1)),
    "RandomHue": _random(
        lambda: layers.RandomHue(0.3, value_range=(0, 1), seed=1)
    ),
    "RandomInvert": _random(
        lambda: layers.RandomInvert(value_range=(0, 1), seed=1)
    ),
    "RandomPerspective": _random(lambda: layers.RandomPerspective(seed=1)),
    "RandomPosterization": _random(
        lambda: layers.RandomPosterization(4, value_range=(0, 1), seed=1)
    ),
    "RandomRotation": _random(
        lambda: layers.RandomRotation(0.2, seed=1, dtype="float32")
    ),
    "RandomSaturation": _random(
        lambda: layers.RandomSaturation(0.3, value_range=(0, 1), seed=1)
    ),
    "RandomSharpness": _random(
        lambda: layers.RandomSharpness(0.3, value_range=(0, 1), seed=1)
    ),
    "RandomShear": _random(lambda: layers.RandomShear(0.2, seed=1)),
    "RandomTranslation": _random(
        lambda: layers.RandomTranslation(0.2, 0.2, seed=1)
    ),
    "RandomZoom": _random(lambda: layers.RandomZoom(0.2, seed=1)),
    "SimpleRNN": _on_words(lambda: layers.SimpleRNN(3, return_sequences=True)),
    "Solarization": _random(
        lambda: layers.Solarization(value_range=(0, 1), seed=1)
    ),
    "SpatialDropout1D": _on_words(lambda: layers.SpatialDropout1D(0.3, seed=1)),
    "SpatialDropout2D": _random(lambda: layers.SpatialDropout2D(0.3, seed=1)),
    "SpatialDropout3D": _on_videos(
        lambda: layers.SpatialDropout3D(0.3, seed=1), (2, 2, 2, 2)
    ),
    "SpectralNormalization": _on_points(
        lambda: layers.SpectralNormalization(layers.Dense(4))
    ),
    "StackedRNNCells": _on_words(
        lambda: layers.RNN(
            layers.StackedRNNCells([layers.GRUCell(3), layers.LSTMCell(2)]),
            return_sequences=True,
        )
    ),
    "UnitNormalization": _on_points(layers.UnitNormalization),
}
# Cells are rows by the RNN that runs them; JaxLayer needs JAX; AugMix draws
# its layers from Python's generator whenever it is traced.
ELSEWHERE = {"AugMix", "GRUCell", "LSTMCell", "SimpleRNNCell", "JaxLayer"}


def classes():
    """The layers of Keras that normalize, recur or draw numbers, by name."""
    return {
        name: found
        for name, found in vars(layers).items()
        if inspect.isclass(found)
        and issubclass(found, layers.Layer)
        and (
            "seed" in inspect.signature(found.__init__).parameters
            or "RNN" in name
            or "Normalization" in name
        )
    }


def _adapted():
    layer = layers.Normalization()
    layer.adapt(models.points(features=4, seed=21))
    return layer


for _name, (_program, _excuses) in SUITED.items():
    add(GROUP, _name, _program, excuses=_excuses)


def _point_row(name, make, excuses=(), **options):
    program, _ = _on_points(make, **options)
    add(GROUP, name, program, excuses=excuses)


_point_row(
    "BatchNormalization, synchronized",
    lambda: layers.BatchNormalization(synchronized=True),
)
_point_row(
    "BatchNormalization, frozen",
    lambda: layers.BatchNormalization(trainable=False),
)
_point_row(
    "BatchNormalization, renormalizing momentum 0",
    lambda: layers.BatchNormalization(synchronized=True, momentum=0.0),
)
_point_row("Dense, frozen", lambda: layers.Dense(4, trainable=False))
_point_row("Dropout without a seed", lambda: layers.Dropout(0.3))
_point_row("Dropout of 0", lambda: layers.Dropout(0.0))
_point_row(
    "SpectralNormalization of 3 iterations",
    lambda: layers.SpectralNormalization(layers.Dense(4), power_iterations=3),
)


def _masked_normalization(synchronized):
    def program(run):
        build = models.per_word(
            lambda: layers.BatchNormalization(synchronized=synchronized)
        )
        y = models.points(29, 10).reshape(29, 5, 2)
        run.fit(build, models.words(), y)

    return program


add(
    GROUP,
    "BatchNormalization with a mask",
    _masked_normalization(False),
    excuses=(UNSYNCHRONIZED,),
)
add(
    GROUP,
    "BatchNormalization with a mask, synchronized",
    _masked_normalization(True),
)


@row(GROUP)
def batch_normalization_of_images_synchronized(run):
    build = models.on_images(
        lambda: layers.Conv2D(3, 3),
        lambda: layers.BatchNormalization(synchronized=True),
    )
    run.fit(build, models.images(), models.numbers())


@row(GROUP)
def batch_normalization_synchronized_a_replica_empty(run):
    build = models.dense(lambda: layers.BatchNormalization(synchronized=True))
    run.fit(build, models.points(25), models.numbers(25))


@row(GROUP)
def spectral_normalization_of_a_convolution(run):
    build = models.on_images(
        lambda: layers.SpectralNormalization(layers.Conv2D(3, 3))
    )
    run.fit(build, models.images(), models.numbers())


@row(GROUP, floatx="float32", tolerance=1e-5)
def a_frozen_backbone(run):
    """Weights that training must not touch, of every type, for long."""

    def build():
        model = models.dense(lambda: layers.Dense(16))()
        model.layers[0].trainable = False
        return models.compiled(model)

    trainer = run.fit(build, models.points(), models.numbers(), epochs=12)
    before = run.trainer(build).model.layers[0].get_weights()
    after = trainer.model.layers[0].get_weights()
    run.see(
        "frozen as it was",
        [np.array_equal(a, b) for a, b in zip(before, after, strict=True)],
    )


@row(GROUP, floatx="float32", tolerance=1e-2)
def a_frozen_backbone_in_bfloat16(run):
    def build():
        keras.config.set_dtype_policy("bfloat16")
        frozen = layers.Dense(16, trainable=False)
        keras.config.set_dtype_policy("float32")
        return models.dense(lambda: frozen)()

    trainer = run.fit(build, models.points(), models.numbers(), epochs=12)
    before = run.trainer(build).model.layers[1].get_weights()
    after = trainer.model.layers[1].get_weights()
    run.see(
        "frozen as it was",
        [np.array_equal(a, b) for a, b in zip(before, after, strict=True)],
    )


class Counts(layers.Layer):
    """Counts its calls in training in a float."""

    def __init__(self, dtype="float64", **options):
        super().__init__()
        self.count = self.add_weight(
            shape=(),
            initializer="zeros",
            trainable=False,
            dtype=dtype,
            name="count",
            **options,
        )

    def call(self, inputs, training=None):
        if training:
            self.count.assign_add(1)
        return inputs


_point_row("own: a float that counts steps", Counts)
_point_row("own: an integer that counts steps", lambda: Counts("int32"))
_point_row(
    "own: a float that counts, only the first replica's",
    lambda: Counts(aggregation="only_first_replica"),
)


class Seen(layers.Layer):
    """Counts its examples: a sum over all that replicas see."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(
            shape=(),
            initializer="zeros",
            trainable=False,
            name="seen",
            aggregation="sum",
        )

    def call(self, inputs, training=None):
        if training:
            size = tf.shape(inputs)[0]
            self.count.assign_add(tf.cast(size, self.count.dtype))
        return inputs


class Widest(layers.Layer):
    """Divides by the largest value that earlier batches had.

    Args:
        late: Whether the batch at hand is looked at first.
    """

    def __init__(self, late=False):
        super().__init__()
        self.late = late
        self.most = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="most"
        )

    def call(self, inputs, training=None):
        before = tf.convert_to_tensor(self.most)
        if training:
            most = tf.reduce_max(tf.abs(inputs))
            self.most.assign(tf.maximum(self.most, most))
        return inputs / (1.0 + (self.most if self.late else before))


class Moving(layers.Layer):
    """A moving mean of its inputs, which it takes away."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, inputs, training=None):
        if training:
            mean = tf.reduce_mean(inputs)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return inputs - self.mean


class Decays(layers.Layer):
    """Assigns one of its own trainable weights while it is called."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],), initializer="ones", name="scale"
        )

    def call(self, inputs, training=None):
        if training:
            self.scale.assign(0.99 * self.scale)
        return inputs * self.scale


_point_row("own: a sum of examples seen", Seen)
_point_row("own: a maximum", Widest)
_point_row("own: a maximum of the rows at hand", lambda: Widest(late=True))
_point_row("own: a moving mean, not synchronized", Moving)
_point_row("own: it assigns its own weight", Decays)


class Noisy(layers.Layer):
    """Draws by `keras.random` from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(5)

    def call(self, inputs, training=None):
        if not training:
            return inputs
        noise = keras.random.normal(
            keras.ops.shape(inputs), dtype=inputs.dtype, seed=self.generator
        )
        return inputs + 0.1 * noise


_point_row("own: noise by keras.random", Noisy)


def _recurrent(name, make, **arguments):
    def program(run):
        def build():
            model = keras.Sequential(
                [
                    keras.Input(batch_shape=(8, 5, 3)),
                    make(),
                    layers.Dense(1),
                ]
            )
            return models.compiled(model)

        x = models.points(24, 15).reshape(24, 5, 3)
        run.fit(build, x, models.numbers(24), **arguments)

    add(GROUP, name, program)


for _class in (layers.LSTM, layers.GRU, layers.SimpleRNN):
    _recurrent(
        f"{_class.__name__}, stateful",
        lambda make=_class: make(3, stateful=True),
    )


@row(GROUP)
def bidirectional_with_a_mask(run):
    build = models.per_word(
        lambda: layers.Bidirectional(layers.LSTM(3)), width=1
    )
    run.fit(build, models.words(), models.numbers())


@row(GROUP)
def recurrent_with_dropout(run):
    build = models.per_word(
        lambda: layers.LSTM(3, recurrent_dropout=0.2, dropout=0.2, seed=1),
        width=1,
    )
    run.fit(build, models.words(), models.numbers(), epochs=1)


@row(GROUP)
def time_distributed(run):
    build = models.per_word(
        lambda: layers.TimeDistributed(layers.Dense(3)),
        layers.GlobalMaxPooling1D,
        width=1,
    )
    run.fit(build, models.words(), models.numbers())


@row(GROUP)
def masking_of_values(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((5, 2)),
                layers.Masking(),
                layers.LSTM(3, return_sequences=True),
                layers.Dense(1),
            ]
        )
        return models.compiled(model)

    x = models.points(29, 10).reshape(29, 5, 2)
    x = np.where(models.words()[..., None] > 0, x, 0.0)
    y = models.points(29, 5).reshape(29, 5, 1)
    run.fit(build, x, y)


@row(GROUP)
def lookups_and_encodings(run):
    """The preprocessing layers of a table, adapted in `build_model`."""

    def build():
        color = keras.Input((1,), dtype="string")
        size = keras.Input((1,))
        lookup = layers.StringLookup(output_mode="one_hot")
        lookup.adapt(_colors())
        bins = layers.Discretization(num_bins=3, output_mode="one_hot")
        bins.adapt(models.points(features=1))
        normalize = layers.Normalization()
        normalize.adapt(models.points(features=1))
        hidden = layers.Concatenate()(
            [lookup(color), bins(size), normalize(size)]
        )
        return models.compiled(
            keras.Model([color, size], layers.Dense(1)(hidden))
        )

    x = [tf.constant(_colors()), models.points(features=1)]
    run.fit(build, x, models.numbers())


def _colors():
    names = np.array(["red", "green", "blue"])[models.kinds()][:, None]
    return names.astype(object)


@row(GROUP)
def hashing_and_crossing(run):
    def build():
        first = keras.Input((1,), dtype="int32")
        second = keras.Input((1,), dtype="int32")
        crossed = layers.HashedCrossing(5, output_mode="one_hot")(
            (first, second)
        )
        hashed = layers.Hashing(4, output_mode="one_hot")(first)
        hidden = layers.Concatenate()([crossed, hashed])
        return models.compiled(
            keras.Model([first, second], layers.Dense(1)(hidden))
        )

    x = [models.kinds()[:, None], models.kinds(seed=22)[:, None]]
    run.fit(build, x, models.numbers())


@row(GROUP)
def text_vectorization(run):
    def build():
        inputs = keras.Input((), dtype="string")
        vectorize = layers.TextVectorization(output_sequence_length=4)
        vectorize.adapt(_texts())
        hidden = layers.Embedding(vectorize.vocabulary_size(), 3)(
            vectorize(inputs)
        )
        hidden = layers.GlobalAveragePooling1D()(hidden)
        return models.compiled(keras.Model(inputs, layers.Dense(1)(hidden)))

    run.fit(build, _texts(), models.numbers())


def _texts():
    known = np.array(["red", "green", "blue", "grey"])
    generator = models.random(23)
    return np.array(
        [
            " ".join(known[generator.integers(0, 4, 1 + i % 4)])
            for i in range(29)
        ],
        dtype=object,
    )


# Keras keeps the matrices of LoRA in float32.
@row(GROUP, tolerance=1e-6)
def lora_on_a_frozen_layer(run):
    def build():
        model = models.dense()()
        model.layers[0].enable_lora(2)
        return models.compiled(model)

    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def a_nested_model(run):
    def build():
        inner = keras.Sequential([layers.Dense(3), layers.Dense(3)])
        outer = keras.Sequential([keras.Input((4,)), inner, layers.Dense(1)])
        return models.compiled(outer)

    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def a_layer_shared_by_two_branches(run):
    def build():
        first, second = keras.Input((4,)), keras.Input((4,))
        shared = layers.Dense(3, activation="tanh")
        hidden = layers.Concatenate()([shared(first), shared(second)])
        return models.compiled(
            keras.Model([first, second], layers.Dense(1)(hidden))
        )

    x = [models.points(), models.points(seed=24)]
    run.fit(build, x, models.numbers())


class Unbuilt(keras.Model):
    """A subclass whose layers are built by the first batch."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3, activation="tanh")
        self.outer = layers.Dense(1)

    def call(self, inputs, training=None):
        return self.outer(self.inner(inputs))


@row(GROUP)
def a_subclassed_model(run):
    run.fit(
        lambda: models.compiled(Unbuilt()), models.points(), models.numbers()
    )


@row(GROUP)
def a_sequential_model_without_an_input(run):
    def build():
        return models.compiled(
            keras.Sequential([layers.Dense(3), layers.Dense(1)])
        )

    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def weights_that_have_no_gradient(run):
    """A layer that the loss does not depend on."""

    class Idle(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = layers.Dense(1)
            self.idle = layers.Dense(2)

        def call(self, x):
            self.idle(x)
            return self.used(x)

    run.fit(lambda: models.compiled(Idle()), models.points(), models.numbers())
