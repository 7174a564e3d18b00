"""Training steps from outside whose sums, clips and losses come late."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row

GROUP = "Outside: steps"


class Encoder(keras.Model):
    """A mean and a spread, and a decoder; noise would hide the rest."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(6, activation="tanh")
        self.mean, self.spread = layers.Dense(2), layers.Dense(2)
        self.decoder = layers.Dense(4)
        self.beta = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="beta"
        )

    def parts(self, x):
        hidden = self.hidden(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        error = ops.mean(ops.sum(ops.square(x - self.decoder(mean)), axis=1))
        kl = ops.square(mean) + ops.exp(spread) - 1.0 - spread
        return error, 0.5 * ops.sum(kl)

    def weight_of_the_sum(self):
        return self.beta

    def train_step(self, x):
        with tf.GradientTape() as tape:
            error, kl = self.parts(x)
            loss = error + self.weight_of_the_sum() * kl
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss, "kl": kl}


class Annealing(keras.callbacks.Callback):
    """Raises the weight of the divergence from zero."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.beta.assign(0.01 * (epoch + 1))


def _on_points(name, make, optimizer=models.sgd, **options):
    def program(run):
        def build():
            return models.compiled(make(), None, optimizer())

        options_ = {k: v() for k, v in options.items()}
        outside.train(run, build, outside.points(), epochs=3, **options_)

    add(GROUP, name, program)


def _slow():
    return models.sgd(0.02)


_on_points(
    "a sum that a callback anneals from zero",
    Encoder,
    _slow,
    callbacks=lambda: [Annealing()],
)


class AfterSomeSteps(Encoder):
    """The sum counts once two steps are done."""

    def weight_of_the_sum(self):
        done = self.optimizer.iterations
        return tf.where(done >= 2, 0.01, 0.0)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            error, kl = self.parts(x)
            loss = error + tf.cast(self.weight_of_the_sum(), kl.dtype) * kl
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Rising(AfterSomeSteps):
    """The weight rises with the step, as a schedule."""

    def weight_of_the_sum(self):
        done = tf.cast(self.optimizer.iterations, tf.float32)
        return 0.01 * tf.minimum(done / 6.0, 1.0)


class Small(Encoder):
    """A sum over the batch with a small weight."""

    def weight_of_the_sum(self):
        return 1e-4


class Zeros(Encoder):
    """What is summed is zero at first: the layer begins at zeros."""

    def __init__(self):
        super().__init__()
        self.extra = layers.Dense(
            3, kernel_initializer="zeros", bias_initializer="zeros"
        )

    def train_step(self, x):
        with tf.GradientTape() as tape:
            error, _ = self.parts(x)
            extra = self.extra(self.hidden(x))
            target = x[:, :1]
            penalty = ops.sum(ops.square(extra)) + ops.sum(extra * target)
            loss = error + 0.01 * penalty
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


_on_points("a sum that counts after some steps", AfterSomeSteps, _slow)
_on_points("a sum whose weight rises with the steps", Rising, _slow)
_on_points("a sum with a small weight", Small, _slow)
_on_points("a sum of a layer that begins at zeros", Zeros, _slow)


class Clipping(keras.Model):
    """What clips gradients in the step."""

    def __init__(self, clip):
        super().__init__()
        self.hidden = layers.Dense(6, activation="tanh")
        self.out = layers.Dense(1)
        self.clip = clip

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        gradients = self.clip(tape.gradient(loss, weights), self.optimizer)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def _by_norm_later(gradients, optimizer):
    """The limit falls with the steps, and acts after some."""
    limit = 10.0 * 0.3 ** tf.cast(optimizer.iterations, gradients[0].dtype)
    gradients, _ = tf.clip_by_global_norm(gradients, limit)
    return gradients


def _by_value(gradients, optimizer):
    return [tf.clip_by_value(g, -0.02, 0.02) for g in gradients]


def _each_by_norm(gradients, optimizer):
    return [tf.clip_by_norm(g, 0.05) for g in gradients]


def _signs(gradients, optimizer):
    return [tf.sign(g) for g in gradients]


def _of_unit_length(gradients, optimizer):
    norm = tf.linalg.global_norm(gradients)
    return [g / (norm + 1e-8) for g in gradients]


for _name, _clip in {
    "that clips by a norm later": _by_norm_later,
    "that clips by value": _by_value,
    "that clips each by its norm": _each_by_norm,
    "that takes the signs of gradients": _signs,
    "that divides gradients by their norm": _of_unit_length,
}.items():

    def _program(run, clip=_clip):
        def build():
            model = Clipping(clip)
            return models.compiled(model, "mse", models.sgd(0.1, momentum=0.9))

        outside.use(run, build, outside.points(), outside.numbers())

    add(GROUP, f"a step {_name}", _program)


class Quantizer(layers.Layer):
    """keras.io's VQ-VAE: a codebook, learned by two losses."""

    def __init__(self, codes=5, width=2, beta=0.25):
        super().__init__()
        self.beta, self.codes, self.width = beta, codes, width
        self.book = self.add_weight(
            shape=(width, codes),
            initializer=keras.initializers.RandomUniform(seed=5),
            name="book",
        )

    def call(self, x):
        flat = ops.reshape(x, (-1, self.width))
        distance = (
            ops.sum(ops.square(flat), axis=1, keepdims=True)
            + ops.sum(ops.square(self.book), axis=0)
            - 2.0 * ops.matmul(flat, self.book)
        )
        chosen = ops.one_hot(
            ops.argmin(distance, axis=1), self.codes, dtype=x.dtype
        )
        found = ops.matmul(chosen, ops.transpose(self.book))
        found = ops.reshape(found, ops.shape(x))
        commitment = ops.mean(ops.square(ops.stop_gradient(found) - x))
        book = ops.mean(ops.square(found - ops.stop_gradient(x)))
        self.add_loss(self.beta * commitment + book)
        return x + ops.stop_gradient(found - x)


class VectorQuantized(keras.Model):
    """keras.io's trainer: it reads `losses` after the weights have moved."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((6, 6, 1))
        x = layers.Conv2D(4, 3, 2, padding="same", activation="tanh")(inputs)
        encoder = keras.Model(inputs, layers.Conv2D(2, 1)(x))
        inputs = keras.Input((3, 3, 2))
        x = layers.Conv2DTranspose(4, 3, 2, padding="same", activation="tanh")(
            inputs
        )
        decoder = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))
        inputs = keras.Input((6, 6, 1))
        codes = Quantizer()(encoder(inputs))
        self.vqvae = keras.Model(inputs, decoder(codes))
        self.trackers = [
            keras.metrics.Mean(name=name)
            for name in ("total", "reconstruction", "vq")
        ]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, x):
        with tf.GradientTape() as tape:
            made = self.vqvae(x)
            error = ops.mean(ops.square(x - made)) / 0.08
            total = error + sum(self.vqvae.losses)
        outside.learn(
            self.optimizer, tape, total, self.vqvae.trainable_variables
        )
        values = total, error, sum(self.vqvae.losses)
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        return {t.name: t.result() for t in self.trackers}


@row(GROUP)
def vq_vae_that_reads_losses_after_the_update(run):
    def build():
        return models.compiled(
            VectorQuantized(), None, keras.optimizers.Adam(0.02)
        )

    outside.train(run, build, outside.images(channels=1))


class Penalties(Clipping):
    """It adds `self.losses`, and returns them after the update."""

    def __init__(self):
        super().__init__(None)
        self.hidden = layers.Dense(
            6,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.01),
            activity_regularizer=keras.regularizers.L1(0.02),
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = ops.mean(ops.square(self(x, training=True) - y))
            loss = error + sum(self.losses)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss, "penalty": sum(self.losses)}


@row(GROUP)
def penalties_read_after_the_update(run):
    def build():
        return models.compiled(Penalties(), "mse")

    outside.use(run, build, outside.points(), outside.numbers())


def _quantized(run, then):
    trainer = outside.train(
        run, models.dense(width=3), outside.points(), outside.numbers(3)
    )
    size = {"batch_size": 13, "verbose": 0}
    run.see("before", trainer.predict(outside.points(), **size))
    trainer.model.quantize("int8")
    run.see("after", trainer.predict(outside.points(), **size))
    then(trainer, size)
    run.look(trainer)


@row(GROUP)
def predictions_of_a_model_quantized_after_training(run):
    _quantized(run, lambda trainer, size: None)


@row(GROUP)
def scores_of_a_model_quantized_after_training(run):
    def then(trainer, size):
        data = outside.points(), outside.numbers(3)
        run.see("scores", trainer.evaluate(*data, **size))

    _quantized(run, then)
