"""Models as people train them on meshes, small, and runs that end early.

A causal language model with a tied table and attention of its own, a mixture
of experts with Switch's balancing loss, a tagger of two LSTMs with masks, a
vision transformer with Lion, a ConvNeXt, and keras-hub's GPT-2 and Llama.
"""

import functools
import os
import signal

import keras
import numpy as np
from keras import layers, ops

import mgpu_tf
from tests.engine import hub_tasks, test_experts
from tests.engine import tensor_models as models

VOCABULARY, LENGTH, WIDTH = models.VOCABULARY, models.LENGTH, 8
TAGS, SIDE, CLASSES = 4, 8, 3
# 8 steps in an epoch, the last of 7 rows.
EXAMPLES, BATCH, EPOCHS = models.ROWS, models.BATCH, 2
# In the second epoch.
KILLED_AT = 10
CROSS_ENTROPY = functools.partial(
    keras.losses.SparseCategoricalCrossentropy, from_logits=True
)


def adam():
    return keras.optimizers.Adam(0.02, epsilon=1e-3, global_clipnorm=0.5)


class CausalAttention(layers.Layer):
    """Attention written by hand, with a mask that it makes itself."""

    def __init__(self, heads=2, **options):
        super().__init__(**options)
        self.heads = heads
        self.query = layers.Dense(WIDTH)
        # The bias of keys would have a gradient of 0.
        self.key = layers.Dense(WIDTH, use_bias=False)
        self.value = layers.Dense(WIDTH)
        self.output_dense = layers.Dense(WIDTH)

    def build(self, shape):
        for layer in (self.query, self.key, self.value, self.output_dense):
            layer.build(shape)
        self.built = True

    def _heads(self, x):
        return ops.reshape(x, (-1, LENGTH, self.heads, WIDTH // self.heads))

    def call(self, x):
        query, key, value = (
            self._heads(layer(x))
            for layer in (self.query, self.key, self.value)
        )
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key)
        scores = scores / (WIDTH // self.heads) ** 0.5
        allowed = ops.tril(ops.ones((LENGTH, LENGTH), "bool"))
        scores = ops.where(allowed, scores, -1e9)
        mixed = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), value)
        return self.output_dense(ops.reshape(mixed, (-1, LENGTH, WIDTH)))


def language_model():
    words = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, WIDTH, tie_weights=True)
    x = table(words)
    for _ in range(4):
        x = x + CausalAttention()(layers.LayerNormalization()(x))
        y = layers.Dense(4 * WIDTH, activation="gelu")(
            layers.LayerNormalization()(x)
        )
        x = x + layers.Dense(WIDTH)(y)
    x = layers.LayerNormalization()(x)
    model = keras.Model(words, table(x, reverse=True))
    model.compile(adam(), CROSS_ENTROPY(), metrics=["accuracy"])
    return model


def tagger():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(words)
    for _ in range(2):
        x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    model = keras.Model(words, layers.Dense(TAGS)(x))
    model.compile(adam(), CROSS_ENTROPY(), weighted_metrics=["accuracy"])
    return model


class ClassToken(layers.Layer):
    """Puts a learned token before the others and adds places."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, WIDTH), name="token")
        self.places = self.add_weight(shape=(shape[1] + 1, WIDTH))

    def call(self, x):
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, WIDTH))
        return ops.concatenate([token, x], 1) + self.places

    def compute_output_shape(self, shape):
        return (shape[0], shape[1] + 1, WIDTH)


def vision_transformer():
    image = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(WIDTH, 4, strides=4)(image)
    x = ClassToken()(layers.Reshape((4, WIDTH))(x))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        # Lion would turn the rounding of a gradient of 0 into motion.
        y = layers.MultiHeadAttention(2, 4, use_bias=False)(y, y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.LayerNormalization()(x)
    model = keras.Model(image, layers.Dense(CLASSES)(x[:, 0]))
    optimizer = keras.optimizers.Lion(0.003, weight_decay=0.05)
    model.compile(optimizer, CROSS_ENTROPY(), metrics=["accuracy"])
    return model


class LayerScale(layers.Layer):
    """A factor for each channel, small at first."""

    def build(self, shape):
        self.gamma = self.add_weight(
            shape=(shape[-1],), initializer=keras.initializers.Constant(0.1)
        )

    def call(self, x):
        return x * self.gamma


def convnext():
    image = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(WIDTH, 2, strides=2)(image)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    for _ in range(2):
        y = layers.DepthwiseConv2D(7, padding="same")(x)
        y = layers.LayerNormalization(epsilon=1e-6)(y)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = layers.Add()([x, LayerScale()(layers.Dense(WIDTH)(y))])
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(image, layers.Dense(CLASSES)(x))
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.05, epsilon=1e-3)
    model.compile(optimizer, CROSS_ENTROPY(), metrics=["accuracy"])
    return model


def of_words(masked=False):
    generator = np.random.default_rng(3)
    words = generator.integers(1, VOCABULARY, (EXAMPLES, LENGTH))
    if masked:
        lengths = generator.integers(2, LENGTH + 1, (EXAMPLES, 1))
        words = words * (np.arange(LENGTH) < lengths)
        return {"x": words, "y": words % TAGS}
    return {"x": words, "y": np.roll(words, -1, 1)}


def of_images():
    generator = np.random.default_rng(5)
    x = generator.normal(size=(EXAMPLES, SIDE, SIDE, 3))
    return {"x": x, "y": generator.integers(0, CLASSES, EXAMPLES)}


def of_task(name):
    x, y, weight = hub_tasks.data_of(name)
    return {"x": x, "y": y, "sample_weight": weight}


# How to build each, and its data.
PROGRAMS = {
    "language_model": (language_model, of_words),
    "experts": (test_experts.build, of_words),
    "tagger": (tagger, functools.partial(of_words, masked=True)),
    "vision_transformer": (vision_transformer, of_images),
    "convnext": (convnext, of_images),
    "gpt2": (hub_tasks.gpt2, functools.partial(of_task, "gpt2")),
    "llama": (hub_tasks.llama, functools.partial(of_task, "llama")),
}


def build(name):
    keras.utils.set_random_seed(1)
    model = PROGRAMS[name][0]()
    return hub_tasks.compiled(model) if name in hub_tasks.TASKS else model


FIT = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "verbose": 0}


def left(history, model):
    """What a run ends with: its curves, its weights and slots."""
    variables = [*model.variables, *model.optimizer.variables]
    return history.history, [np.array(v.numpy()) for v in variables]


def stock(name):
    """What Keras's own `fit` ends with."""
    model = build(name)
    return left(model.fit(**PROGRAMS[name][1](), **FIT), model)


class Kills(keras.callbacks.Callback):
    """Kills its process after some steps, if it is to."""

    acts = False  # Of the class: what an object has goes into checkpoints.

    def __init__(self):
        super().__init__()
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        if self.acts and self._steps == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy, name, folder):
    """Trains to the end; returns what is left, and the trainer."""
    trainer = mgpu_tf.Trainer(
        lambda: build(name), strategy, seed=None, steps_per_execution=1
    )
    history = trainer.fit(
        **PROGRAMS[name][1](),
        **FIT,
        checkpoint=mgpu_tf.SaveOptions(folder, save_every_steps=3),
        callbacks=[Kills()],
    )
    return *left(history, trainer.model), trainer
