"""Programs that draw: augmentation and dropout inside, noise in own steps.

Written after keras.io's examples of these names; three epochs. Batches have
13 rows and the last one 5, so that three replicas have parts of other sizes.
The same programs are stopped and resumed in `tests/checkpoints/test_draws.py`.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add
from tests.conformance.outside import learn

GROUP = "Programs that draw"
EPOCHS = 3


def resnet():
    """Augmentation in the model, blocks with a skip, normalization."""

    def block(x, filters, strides):
        y = layers.Conv2D(filters, 3, strides, "same", use_bias=False)(x)
        y = layers.BatchNormalization(synchronized=True)(y)
        y = layers.Conv2D(filters, 3, padding="same")(layers.ReLU()(y))
        y = layers.BatchNormalization(synchronized=True)(y)
        skip = layers.Conv2D(filters, 1, strides)(x)
        return layers.ReLU()(layers.Add()([y, skip]))

    inputs = keras.Input((6, 6, 3))
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomTranslation(0.2, 0.2, fill_mode="reflect")(x)
    x = layers.RandomContrast(0.3)(x)
    x = layers.RandomErasing(factor=0.7, value_range=(0, 1))(x)
    x = block(block(x, 4, 1), 6, 2)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(3)(layers.Dropout(0.3)(x))
    return models.compiled(
        keras.Model(inputs, x),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.optimizers.SGD(0.05, momentum=0.9),
        metrics=["accuracy"],
    )


def vit():
    """Patches, positions, attention and a head, each with dropout."""
    inputs = keras.Input((6, 6, 3))
    x = layers.RandomFlip("horizontal_and_vertical")(inputs)
    x = layers.Conv2D(4, 2, 2)(x)
    x = layers.Reshape((9, 4))(x)
    x = x + layers.Embedding(9, 4)(ops.arange(9))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + layers.MultiHeadAttention(2, 4, dropout=0.2)(y, y)
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        y = layers.Dropout(0.2)(layers.Dense(8, activation="gelu")(y))
        x = x + layers.Dropout(0.2)(layers.Dense(4)(y))
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Dense(3)(layers.Dropout(0.5)(x))
    return models.compiled(
        keras.Model(inputs, x),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.optimizers.AdamW(0.01, weight_decay=1e-3),
        metrics=["accuracy"],
    )


def lstm():
    """Masked words, dropout on inputs and states in both directions."""
    options = {"dropout": 0.2, "recurrent_dropout": 0.2}
    model = keras.Sequential(
        [
            keras.Input((outside.LENGTH,), dtype="int32"),
            layers.Embedding(outside.WORDS, 4, mask_zero=True),
            layers.SpatialDropout1D(0.2),
            layers.Bidirectional(layers.LSTM(4, **options)),
            layers.GaussianNoise(0.1),
            layers.Dense(3),
        ]
    )
    return models.compiled(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.optimizers.Adam(0.02, clipnorm=1.0),
        metrics=["accuracy"],
    )


class SimClr(keras.Model):
    """Two views of each image by augmentation; all pairs of a batch."""

    def __init__(self):
        super().__init__()
        self.augment = keras.Sequential(
            [
                layers.RandomFlip("horizontal"),
                layers.RandomTranslation(0.3, 0.3, fill_mode="nearest"),
                layers.RandomBrightness(0.3, value_range=(0, 1)),
            ]
        )
        self.encoder = keras.Sequential(
            [layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten()]
        )
        self.project = keras.Sequential(
            [layers.Dense(6, activation="relu"), layers.Dense(4)]
        )

    def call(self, images):
        return self.project(self.encoder(images))

    def between(self, one, two):
        one, two = ops.normalize(one, axis=1), ops.normalize(two, axis=1)
        likeness = ops.matmul(one, ops.transpose(two)) / 0.1
        partner = ops.arange(ops.shape(one)[0])
        return ops.mean(
            ops.sparse_categorical_crossentropy(
                ops.concatenate([partner, partner]),
                ops.concatenate([likeness, ops.transpose(likeness)]),
                from_logits=True,
            )
        )

    def train_step(self, images):
        with tf.GradientTape() as tape:
            views = [
                self(self.augment(images, training=True), training=True)
                for _ in range(2)
            ]
            loss = self.between(*views)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


def sim_clr():
    return models.compiled(SimClr(), None, keras.optimizers.Adam(0.01))


class Ddpm(keras.Model):
    """Draws times and noise in its step, and keeps an average of weights."""

    def __init__(self):
        super().__init__()
        self.draws = keras.random.SeedGenerator(7)
        image, time = keras.Input((6, 6, 1)), keras.Input((), dtype="int32")
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(image)
        x = x + layers.Reshape((1, 1, 4))(layers.Embedding(8, 4)(time))
        x = layers.Dropout(0.1)(x)
        x = layers.Conv2D(1, 3, padding="same")(ops.silu(x))
        self.network = keras.Model([image, time], x)
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        alpha = ops.cumprod(1.0 - ops.linspace(1e-3, 0.3, 8))
        self.signal, self.spread = ops.sqrt(alpha), ops.sqrt(1.0 - alpha)

    def train_step(self, images):
        size = ops.shape(images)[0]
        time = keras.random.randint((size,), 0, 8, seed=self.draws)
        noise = keras.random.normal(
            ops.shape(images), dtype=images.dtype, seed=self.draws
        )
        with tf.GradientTape() as tape:
            signal = ops.take(self.signal, time)[:, None, None, None]
            spread = ops.take(self.spread, time)[:, None, None, None]
            noisy = signal * images + spread * noise
            found = self.network([noisy, time], training=True)
            loss = self.loss(noise, found)
        learn(self.optimizer, tape, loss, self.network.trainable_weights)
        for weight, average in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            average.assign(0.99 * average + 0.01 * weight)
        return {"loss": loss}


def ddpm():
    return models.compiled(
        Ddpm(), keras.losses.MeanSquaredError(), keras.optimizers.Adam(0.01)
    )


def pictures_and_kinds():
    return outside.batches(outside.images(), outside.kinds())


# By name: what builds the compiled model, and what makes its data.
PROGRAMS = {
    "a ResNet with augmentation": (resnet, pictures_and_kinds),
    "a ViT with dropout": (vit, pictures_and_kinds),
    "an LSTM with recurrent dropout": (
        lstm,
        lambda: outside.batches(outside.words(), outside.kinds()),
    ),
    "SimCLR with augmentation": (
        sim_clr,
        lambda: outside.batches(outside.images()),
    ),
    "a DDPM that draws its noise": (
        ddpm,
        lambda: outside.batches(outside.images(channels=1)),
    ),
}


def _program(build, data):
    return lambda run: run.fit(build, data(), epochs=EPOCHS)


for _name, (_build, _data) in PROGRAMS.items():
    add(GROUP, _name, _program(_build, _data))
