"""Generative models from outside: diffusion, codes, flows, likeness, rays."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: generative models"


def adam(rate=0.02):
    return keras.optimizers.Adam(rate)


class Ddim(keras.Model):
    """keras.io's: signal and noise by an angle, two errors, an average."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        image = keras.Input((6, 6, 1))
        variance = keras.Input((1, 1, 1))
        wave = ops.concatenate([ops.sin(variance), ops.cos(variance)], -1)
        wave = layers.UpSampling2D(6)(wave)
        x = layers.Concatenate()([image, wave])
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
        skip = x
        x = layers.AveragePooling2D(2)(x)
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
        x = layers.UpSampling2D(2, interpolation="bilinear")(x)
        x = layers.Concatenate()([x, skip])
        x = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
        self.network = keras.Model([image, variance], x)
        self.ema_network = keras.models.clone_model(self.network)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")
        self.image_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_tracker, self.image_tracker]

    def denoise(self, noisy, noise_rate, signal_rate, training):
        network = self.network if training else self.ema_network
        noise = network([noisy, noise_rate**2], training=training)
        return noise, (noisy - noise_rate * noise) / signal_rate

    def step(self, data, training):
        pictures, noise, time = data
        pictures = self.normalizer(pictures, training=training)
        angle = 0.3 + time * 1.0
        signal_rate, noise_rate = ops.cos(angle), ops.sin(angle)
        noisy = signal_rate * pictures + noise_rate * noise
        with tf.GradientTape() as tape:
            found, made = self.denoise(noisy, noise_rate, signal_rate, training)
            noise_loss = self.loss(noise, found)
            image_loss = self.loss(pictures, made)
        if training:
            learn(
                self.optimizer, tape, noise_loss, self.network.trainable_weights
            )
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, data):
        logs = self.step(data, True)
        for weight, average in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            average.assign(0.9 * average + 0.1 * weight)
        return logs

    def test_step(self, data):
        return self.step(data, False)


@row(GROUP)
def ddim_with_an_average_that_is_tested(run):
    pictures = outside.images(channels=1)

    def build():
        model = Ddim()
        model.normalizer.adapt(pictures)
        return models.compiled(
            model,
            keras.losses.MeanAbsoluteError(),
            keras.optimizers.AdamW(0.01, weight_decay=1e-3),
        )

    noise = outside.images(channels=1, seed=8)
    time = abs(outside.points(1, 33))[:, :, None, None] % 1.0
    data = outside.batches(pictures, noise, time)
    outside.on_batches(run, build, data, predict=False)


class Ddpm(keras.Model):
    """keras.io's: steps of time gathered from a table, an average each step."""

    def __init__(self):
        super().__init__()
        image, time = keras.Input((4,)), keras.Input((), dtype="int32")
        x = layers.Dense(6)(image) + layers.Embedding(8, 6)(time)
        x = layers.Dense(4)(ops.silu(x))
        self.network = keras.Model([image, time], x)
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        beta = ops.linspace(1e-3, 0.3, 8)
        alpha = ops.cumprod(1.0 - beta)
        self.signal, self.noise = ops.sqrt(alpha), ops.sqrt(1.0 - alpha)

    def train_step(self, data):
        pictures, noise, time = data
        with tf.GradientTape() as tape:
            signal = ops.take(self.signal, time)[:, None]
            spread = ops.take(self.noise, time)[:, None]
            found = self.network(
                [signal * pictures + spread * noise, time], training=True
            )
            loss = self.loss(noise, found)
        learn(self.optimizer, tape, loss, self.network.trainable_weights)
        for weight, average in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            average.assign(0.99 * average + 0.01 * weight)
        return {"loss": loss}


@row(GROUP)
def ddpm_with_a_table_of_times(run):
    def build():
        return models.compiled(
            Ddpm(), keras.losses.MeanSquaredError(), adam(0.01)
        )

    time = models.random(34).integers(0, 8, outside.EXAMPLES)
    noise = outside.points(seed=32)
    run.fit(build, outside.batches(outside.points(), noise, time))


class AverageQuantizer(layers.Layer):
    """A codebook that is an average of what falls to its codes."""

    def __init__(self, codes=5, width=4, decay=0.9):
        super().__init__()
        self.codes, self.width, self.decay = codes, width, decay

    def build(self, shape):
        options = {"trainable": False}
        self.book = self.add_weight(
            shape=(self.codes, self.width),
            initializer=keras.initializers.RandomUniform(seed=5),
            name="book",
            **options,
        )
        self.counts = self.add_weight(
            shape=(self.codes,), initializer="ones", name="counts", **options
        )
        self.sums = self.add_weight(
            shape=(self.codes, self.width),
            initializer=keras.initializers.RandomUniform(seed=5),
            name="sums",
            **options,
        )

    def call(self, x, training=False):
        distance = (
            ops.sum(ops.square(x), axis=1, keepdims=True)
            - 2.0 * ops.matmul(x, ops.transpose(self.book))
            + ops.sum(ops.square(self.book), axis=1)
        )
        chosen = ops.one_hot(
            ops.argmin(distance, axis=1), self.codes, dtype=x.dtype
        )
        found = ops.matmul(chosen, self.book)
        if training:
            count = ops.sum(chosen, axis=0)
            total = ops.matmul(ops.transpose(chosen), x)
            self.counts.assign(
                self.decay * self.counts + (1 - self.decay) * count
            )
            self.sums.assign(self.decay * self.sums + (1 - self.decay) * total)
            n = ops.sum(self.counts)
            smooth = (self.counts + 1e-3) / (n + self.codes * 1e-3) * n
            self.book.assign(self.sums / smooth[:, None])
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2))
        return x + ops.stop_gradient(found - x)


@row(GROUP)
def vq_vae_whose_codebook_is_an_average(run):
    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(4, activation="tanh")(inputs)
        x = AverageQuantizer()(x)
        return models.compiled(keras.Model(inputs, layers.Dense(4)(x)))

    outside.use(run, build, outside.points(), outside.points())


class MaskedConv(layers.Layer):
    """keras.io's PixelCNN: a kernel that the call itself multiplies."""

    def __init__(self, kind, **options):
        super().__init__()
        self.kind = kind
        self.conv = layers.Conv2D(**options)

    def build(self, shape):
        self.conv.build(shape)
        height, width, *_ = self.conv.kernel.shape
        mask = np.zeros(tuple(self.conv.kernel.shape))
        mask[: height // 2] = 1.0
        mask[height // 2, : width // 2] = 1.0
        if self.kind == "B":
            mask[height // 2, width // 2] = 1.0
        self.mask = mask

    def call(self, x):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(x)


@row(GROUP)
def pixel_cnn_whose_call_masks_its_kernel(run):
    def build():
        inputs = keras.Input((6, 6, 1))
        x = MaskedConv(
            "A",
            filters=4,
            kernel_size=5,
            padding="same",
            activation="tanh",
        )(inputs)
        x = x + MaskedConv("B", filters=4, kernel_size=3, padding="same")(x)
        x = layers.Conv2D(1, 1, activation="sigmoid")(x)
        model = keras.Model(inputs, x)
        return models.compiled(model, "binary_crossentropy", adam())

    pictures = (outside.images(channels=1) > 0.4).astype("float64")
    outside.use(run, build, pictures, pictures)


class RealNvp(keras.Model):
    """keras.io's: coupling layers and a likelihood; only the loss is tested."""

    def __init__(self, couplings=4):
        super().__init__()
        self.couplings = couplings
        self.masks = ops.array([[0, 1], [1, 0]] * (couplings // 2), "float64")
        self.scales = [self.coupling("tanh") for _ in range(couplings)]
        self.shifts = [self.coupling(None) for _ in range(couplings)]
        self.tracker = keras.metrics.Mean(name="loss")

    def coupling(self, activation):
        return keras.Sequential(
            [
                keras.Input((2,)),
                layers.Dense(5, activation="tanh"),
                layers.Dense(
                    2,
                    activation=activation,
                    kernel_regularizer=keras.regularizers.L2(0.01),
                ),
            ]
        )

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x, training=False):
        volume = 0.0
        for i in range(self.couplings)[::-1]:
            kept = x * self.masks[i]
            free = 1.0 - self.masks[i]
            scale = self.scales[i](kept) * free
            shift = self.shifts[i](kept) * free
            x = free * (x - shift) * ops.exp(-scale) + kept
            volume -= ops.sum(scale, axis=1)
        return x, volume

    def log_loss(self, x):
        y, volume = self(x)
        likelihood = -0.5 * ops.sum(ops.square(y), axis=1) + volume
        return -ops.mean(likelihood)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.log_loss(data))
        return {"loss": self.tracker.result()}


@row(GROUP)
def real_nvp(run):
    def build():
        return models.compiled(RealNvp(), None, adam())

    outside.on_batches(run, build, outside.batches(outside.points(2)))


class ScoreMatching(keras.Model):
    """A trace of the Jacobian of a network with respect to its inputs."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3, 3)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = self.network(x)
            slopes = inner.batch_jacobian(score, x)
            trace = tf.linalg.trace(slopes)
            loss = tf.reduce_mean(trace + 0.5 * tf.reduce_sum(score**2, axis=1))
        learn(self.optimizer, tape, loss, self.network.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def score_matching_by_a_batch_jacobian(run):
    def build():
        return models.compiled(ScoreMatching(), None, adam())

    outside.train(run, build, outside.points(3))


class InfoVae(keras.Model):
    """A maximum mean discrepancy between codes of the batch and a prior."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(2, 4), mlp(4, 2)

    def kernel(self, a, b):
        gaps = a[:, None, :] - b[None, :, :]
        return ops.mean(ops.exp(-ops.mean(gaps**2, axis=-1)))

    def train_step(self, data):
        x, prior = data
        with tf.GradientTape() as tape:
            code = self.encoder(x)
            apart = self.kernel(prior, prior) + self.kernel(code, code)
            apart -= 2.0 * self.kernel(prior, code)
            error = ops.mean(ops.square(self.decoder(code) - x))
            loss = error + 5.0 * apart
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss, "mmd": apart}


@row(GROUP)
def vae_with_a_maximum_mean_discrepancy(run):
    def build():
        return models.compiled(InfoVae(), None, adam())

    prior = outside.points(2, 32)
    run.fit(build, outside.batches(outside.points(), prior))


class StyleTransfer(keras.Model):
    """keras.io's AdaIN: a frozen encoder, moments of each image's features."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(4, 3, padding="same", activation="tanh"),
            ]
        )
        self.encoder.trainable = False
        self.decoder = keras.Sequential(
            [keras.Input((6, 6, 4)), layers.Conv2D(1, 3, padding="same")]
        )
        self.style_tracker = keras.metrics.Mean(name="style")
        self.content_tracker = keras.metrics.Mean(name="content")

    @property
    def metrics(self):
        return [self.style_tracker, self.content_tracker]

    def moments(self, x):
        mean, variance = tf.nn.moments(x, axes=[1, 2], keepdims=True)
        return mean, tf.sqrt(variance + 1e-3)

    def losses_of(self, style, content):
        style, content = self.encoder(style), self.encoder(content)
        mean, spread = self.moments(content)
        wanted_mean, wanted_spread = self.moments(style)
        wanted = wanted_spread * (content - mean) / spread + wanted_mean
        made = self.encoder(self.decoder(wanted))
        content_loss = self.loss(wanted, made)
        mean, spread = self.moments(made)
        style_loss = self.loss(wanted_mean, mean)
        style_loss += self.loss(wanted_spread, spread)
        return 4.0 * style_loss, content_loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            style, content = self.losses_of(*data)
            total = style + content
        learn(self.optimizer, tape, total, self.decoder.trainable_variables)
        return self.report(style, content)

    def test_step(self, data):
        return self.report(*self.losses_of(*data))

    def report(self, style, content):
        self.style_tracker.update_state(style)
        self.content_tracker.update_state(content)
        return {m.name: m.result() for m in self.metrics}


@row(GROUP)
def adain_style_transfer(run):
    def build():
        return models.compiled(
            StyleTransfer(), keras.losses.MeanSquaredError(), adam()
        )

    pictures = outside.images(channels=1), outside.images(channels=1, seed=7)
    outside.on_batches(run, build, outside.batches(*pictures), predict=False)


class Picture(keras.Model):
    """Neural style transfer: the image is the weight, by Gram matrices."""

    def __init__(self):
        super().__init__()
        self.features = layers.Conv2D(3, 3, activation="tanh")
        self.features.trainable = False
        self.image = self.add_weight(
            shape=(1, 6, 6, 1), initializer="zeros", name="image"
        )

    def gram(self, x):
        flat = ops.reshape(x, (ops.shape(x)[0], -1, 3))
        return ops.einsum("bpc,bpd->bcd", flat, flat) / 16.0

    def train_step(self, pictures):
        with tf.GradientTape() as tape:
            made, wanted = self.features(self.image), self.features(pictures)
            gap = self.gram(made) - ops.mean(
                self.gram(wanted), axis=0, keepdims=True
            )
            content = ops.mean(ops.square(made - wanted))
            rough = tf.reduce_sum(
                tf.image.total_variation(tf.convert_to_tensor(self.image))
            )
            loss = ops.sum(ops.square(gap)) + content + 1e-3 * rough
        learn(self.optimizer, tape, loss, [self.image])
        return {"loss": loss}


@row(GROUP)
def neural_style_transfer_to_one_image(run):
    def build():
        return models.compiled(Picture(), None, adam())

    outside.train(run, build, outside.images(channels=1))


class NeRF(keras.Model):
    """keras.io's: samples composed along each ray; PSNR as a metric."""

    def __init__(self):
        super().__init__()
        self.network = mlp(4, 6)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.psnr_metric = keras.metrics.Mean(name="psnr")

    @property
    def metrics(self):
        return [self.loss_tracker, self.psnr_metric]

    def render(self, rays, places):
        found = self.network(tf.reshape(rays, [-1, 6]))
        found = tf.reshape(found, tf.concat([tf.shape(rays)[:-1], [4]], 0))
        color = tf.sigmoid(found[..., :-1])
        density = tf.nn.softplus(found[..., -1])
        gaps = places[..., 1:] - places[..., :-1]
        last = tf.broadcast_to([1e2], tf.shape(gaps[..., :1]))
        gaps = tf.concat([gaps, tf.cast(last, gaps.dtype)], axis=-1)
        alpha = 1.0 - tf.exp(-density * gaps)
        light = tf.math.cumprod(1.0 - alpha + 1e-10, axis=-1, exclusive=True)
        weights = alpha * light
        return tf.reduce_sum(weights[..., None] * color, axis=-2)

    def step(self, inputs, training):
        images, (rays, places) = inputs
        with tf.GradientTape() as tape:
            made = self.render(rays, places)
            loss = self.loss(images, made)
        if training:
            learn(self.optimizer, tape, loss, self.network.trainable_variables)
        psnr = tf.image.psnr(images, made, max_val=1.0)
        self.loss_tracker.update_state(loss)
        self.psnr_metric.update_state(psnr)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, inputs):
        return self.step(inputs, True)

    def test_step(self, inputs):
        return self.step(inputs, False)


# TensorFlow computes the ratio in float32.
@row(GROUP, tolerance=1e-6)
def nerf(run):
    def build():
        return models.compiled(
            NeRF(), keras.losses.MeanSquaredError(), adam(0.01)
        )

    random = models.random(35)
    shape = (outside.EXAMPLES, 3, 3)
    rays = random.normal(size=(*shape, 4, 6))
    places = random.uniform(size=(*shape, 4)).cumsum(-1)
    data = tf.data.Dataset.zip(
        (
            outside.batches(outside.images(3)),
            outside.batches(rays, places),
        )
    )
    outside.on_batches(run, build, data, predict=False)


class TextualInversion(keras.Model):
    """Only the new word's row of an embedding learns, the rest is masked."""

    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        self.embed = layers.Embedding(outside.WORDS, 4)
        self.rest = layers.Dense(2)
        self.rest.trainable = False

    def call(self, x):
        return self.rest(ops.mean(self.embed(x), axis=1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_weights
        (gradient,) = tape.gradient(loss, weights)
        if self.sparse:
            new = tf.cast(gradient.indices == 3, gradient.values.dtype)
            gradient = tf.IndexedSlices(
                gradient.values * new[:, None],
                gradient.indices,
                gradient.dense_shape,
            )
        else:
            rows = tf.range(outside.WORDS) == 3
            gradient = tf.convert_to_tensor(gradient)
            gradient *= tf.cast(rows, gradient.dtype)[:, None]
        self.optimizer.apply_gradients([(gradient, weights[0])])
        return {"loss": loss}


for _sparse in (True, False):

    def _program(run, sparse=_sparse):
        def build():
            return models.compiled(TextualInversion(sparse))

        outside.use(run, build, outside.words(), outside.numbers(2))

    add(
        GROUP,
        f"one word learns, by {'rows' if _sparse else 'a mask'}",
        _program,
    )
