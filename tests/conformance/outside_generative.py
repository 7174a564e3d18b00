"""Generative models from outside: several networks, their averages, state."""

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


def image_network(width, steps=1):
    """Images to images of one size, with a normalization of each image."""
    x = inputs = keras.Input((6, 6, width))
    for _ in range(steps):
        x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        x = layers.GroupNormalization(groups=-1, epsilon=1e-2)(x)
        x = ops.tanh(x)
    x = layers.Conv2D(1, 3, padding="same", activation="tanh")(x)
    return keras.Model(inputs, x)


def patches(width):
    """A score for each patch of an image."""
    return keras.Sequential(
        [
            keras.Input((6, 6, width)),
            layers.Conv2D(4, 3, 2, padding="same", activation="tanh"),
            layers.Conv2D(1, 3, padding="same"),
        ]
    )


def with_optimizers(model, **optimizers):
    """Compiles a model that has an optimizer for each of its networks."""
    model.compile(jit_compile=False)
    for name, optimizer in optimizers.items():
        setattr(model, name, optimizer)
    return model


class CycleGan(keras.Model):
    """keras.io's: cycle, identity and adversarial losses by one tape."""

    def __init__(self):
        super().__init__()
        self.gen_g, self.gen_f = image_network(1), image_network(1)
        self.disc_x, self.disc_y = patches(1), patches(1)
        self.cycle = keras.losses.MeanAbsoluteError()
        self.fooled = keras.losses.MeanSquaredError()

    def generator_loss(self, fake):
        return self.fooled(ops.ones_like(fake), fake)

    def discriminator_loss(self, real, fake):
        real = self.fooled(ops.ones_like(real), real)
        return 0.5 * (real + self.fooled(ops.zeros_like(fake), fake))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_g(x), self.gen_f(y)
            cycled_x, cycled_y = self.gen_f(fake_y), self.gen_g(fake_x)
            same_x, same_y = self.gen_f(x), self.gen_g(y)
            judged_x, judged_fake_x = self.disc_x(x), self.disc_x(fake_x)
            judged_y, judged_fake_y = self.disc_y(y), self.disc_y(fake_y)
            g = self.generator_loss(judged_fake_y)
            f = self.generator_loss(judged_fake_x)
            g += 10.0 * self.cycle(y, cycled_y) + 5.0 * self.cycle(y, same_y)
            f += 10.0 * self.cycle(x, cycled_x) + 5.0 * self.cycle(x, same_x)
            d_x = self.discriminator_loss(judged_x, judged_fake_x)
            d_y = self.discriminator_loss(judged_y, judged_fake_y)
        for optimizer, loss, network in (
            (self.g_optimizer, g, self.gen_g),
            (self.f_optimizer, f, self.gen_f),
            (self.x_optimizer, d_x, self.disc_x),
            (self.y_optimizer, d_y, self.disc_y),
        ):
            learn(optimizer, tape, loss, network.trainable_variables)
        return {"G": g, "F": f, "D_X": d_x, "D_Y": d_y}


@row(GROUP)
def cycle_gan(run):
    def build():
        return with_optimizers(
            CycleGan(),
            g_optimizer=adam(),
            f_optimizer=adam(),
            x_optimizer=adam(),
            y_optimizer=adam(),
        )

    pictures = outside.images(channels=1), outside.images(channels=1, seed=7)
    run.fit(build, outside.batches(*pictures))


class PixToPix(keras.Model):
    """TensorFlow's tutorial: a U-Net, an L1 loss, labels like the scores."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((6, 6, 1))
        down = layers.Conv2D(4, 3, 2, padding="same", activation="tanh")(inputs)
        deep = layers.Conv2D(6, 3, padding="same", activation="tanh")(down)
        up = layers.Conv2DTranspose(4, 3, 2, padding="same")(
            ops.concatenate([down, deep], axis=-1)
        )
        up = ops.concatenate([ops.tanh(up), inputs], axis=-1)
        out = layers.Conv2D(1, 3, padding="same", activation="tanh")(up)
        self.generator = keras.Model(inputs, out)
        self.discriminator = patches(2)
        self.loss_object = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, x):
        return self.generator(x)

    @tf.function
    def one_step(self, source, target):
        with tf.GradientTape() as of_g, tf.GradientTape() as of_d:
            made = self.generator(source, training=True)
            real = self.discriminator(
                tf.concat([source, target], axis=-1), training=True
            )
            fake = self.discriminator(
                tf.concat([source, made], axis=-1), training=True
            )
            gan = self.loss_object(tf.ones_like(fake), fake)
            l1 = tf.reduce_mean(tf.abs(target - made))
            total = gan + 100.0 * l1
            judged = self.loss_object(tf.ones_like(real), real)
            judged += self.loss_object(tf.zeros_like(fake), fake)
        learn(self.g_optimizer, of_g, total, self.generator.trainable_variables)
        learn(
            self.d_optimizer,
            of_d,
            judged,
            self.discriminator.trainable_variables,
        )
        return {"total": total, "gan": gan, "l1": l1, "disc": judged}

    def train_step(self, data):
        return self.one_step(*data)


@row(GROUP)
def pix_to_pix_in_a_tf_function(run):
    def build():
        return with_optimizers(
            PixToPix(), g_optimizer=adam(), d_optimizer=adam()
        )

    pictures = outside.images(channels=1), outside.images(channels=1, seed=7)
    run.fit(build, outside.batches(*pictures))


class Critic(keras.Model):
    """keras.io's WGAN-GP: critic steps, a penalty, then the generator."""

    def __init__(self):
        super().__init__()
        self.generator = mlp(4, 2)
        self.discriminator = mlp(1, 4)

    def penalty(self, real, fake, share):
        middle = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(middle)
            judged = self.discriminator(middle, training=True)
        slopes = tape.gradient(judged, [middle])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=[1]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real, noise, share = data
        for turn in range(3):
            with tf.GradientTape() as tape:
                fake = self.generator(noise * (1.0 + turn), training=True)
                cost = tf.reduce_mean(self.discriminator(fake))
                cost -= tf.reduce_mean(self.discriminator(real))
                d_loss = cost + 10.0 * self.penalty(real, fake, share)
            learn(
                self.d_optimizer,
                tape,
                d_loss,
                self.discriminator.trainable_variables,
            )
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True))
            g_loss = -tf.reduce_mean(judged)
        learn(
            self.g_optimizer, tape, g_loss, self.generator.trainable_variables
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


@row(GROUP)
def wgan_gp_with_critic_steps(run):
    def build():
        return with_optimizers(
            Critic(), d_optimizer=adam(0.01), g_optimizer=adam(0.01)
        )

    share = abs(outside.points(1, 33)) % 1.0
    noise = outside.points(2, 32)
    run.fit(build, outside.batches(outside.points(), noise, share))


class MinibatchSpread(layers.Layer):
    """Progressive GAN's: the spread over the batch, as one more feature."""

    def call(self, x):
        mean = ops.mean(x, axis=0, keepdims=True)
        spread = ops.mean(ops.square(x - mean), axis=0)
        average = ops.mean(ops.sqrt(spread + 1e-8))
        column = ops.ones_like(x[:, :1]) * average
        return ops.concatenate([x, column], axis=1)


class SpreadGan(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = mlp(4, 2)
        self.discriminator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                MinibatchSpread(),
                layers.Dense(1),
            ]
        )

    def train_step(self, data):
        real, noise = data
        with tf.GradientTape(persistent=True) as tape:
            real = self.discriminator(real)
            fake = self.discriminator(self.generator(noise))
            d_loss = tf.reduce_mean(tf.nn.softplus(fake))
            d_loss += tf.reduce_mean(tf.nn.softplus(-real))
            g_loss = tf.reduce_mean(tf.nn.softplus(-fake))
        learn(
            self.d_optimizer,
            tape,
            d_loss,
            self.discriminator.trainable_variables,
        )
        learn(
            self.g_optimizer, tape, g_loss, self.generator.trainable_variables
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


@row(GROUP)
def gan_with_the_spread_of_the_batch(run):
    def build():
        return with_optimizers(
            SpreadGan(), d_optimizer=adam(), g_optimizer=adam()
        )

    noise = outside.points(2, 32)
    run.fit(build, outside.batches(outside.points(), noise))


class Augmenter(keras.Model):
    """keras.io's adaptive augmentation: a chance that follows accuracy."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = mlp(4, 2), mlp(1, 4)
        self.chance = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="chance"
        )
        self.real_accuracy = keras.metrics.BinaryAccuracy(name="real_acc")
        self.loss_tracker = keras.metrics.Mean(name="d_loss")

    @property
    def metrics(self):
        return [self.real_accuracy, self.loss_tracker]

    def augmented(self, x):
        return x + self.chance * ops.sin(3.0 * x)

    def train_step(self, data):
        real, noise = data
        real = self.augmented(real)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.augmented(self.generator(noise, training=True))
            on_real = self.discriminator(real, training=True)
            on_fake = self.discriminator(fake, training=True)
            ones = ops.ones_like(on_real)
            g_loss = keras.losses.binary_crossentropy(
                ones, on_fake, from_logits=True
            )
            both = ops.concatenate([ones, ops.zeros_like(on_fake)], axis=0)
            d_loss = keras.losses.binary_crossentropy(
                both,
                ops.concatenate([on_real, on_fake], axis=0),
                from_logits=True,
            )
            g_loss, d_loss = ops.mean(g_loss), ops.mean(d_loss)
        learn(
            self.g_optimizer, tape, g_loss, self.generator.trainable_variables
        )
        learn(
            self.d_optimizer,
            tape,
            d_loss,
            self.discriminator.trainable_variables,
        )
        self.real_accuracy.update_state(1.0, ops.sigmoid(on_real))
        accuracy = self.real_accuracy.result()
        self.chance.assign(
            ops.clip(self.chance + (accuracy - 0.5) / 20.0, 0.0, 1.0)
        )
        self.loss_tracker.update_state(d_loss)
        return {m.name: m.result() for m in self.metrics} | {"g": g_loss}


@row(GROUP)
def gan_with_adaptive_augmentation(run):
    def build():
        return with_optimizers(
            Augmenter(), d_optimizer=adam(), g_optimizer=adam()
        )

    noise = outside.points(2, 32)
    run.fit(build, outside.batches(outside.points(), noise))


class ConditionalGan(keras.Model):
    """keras.io's: classes as channels of each image."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(36, activation="tanh"),
                layers.Reshape((6, 6, 1)),
            ]
        )
        self.discriminator = keras.Sequential(
            [patches(4), layers.GlobalMaxPooling2D()]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data):
        real, labels, noise = data
        channels = ops.repeat(labels[:, :, None, None], repeats=[36])
        channels = ops.reshape(channels, (-1, 6, 6, 3))
        size = ops.shape(real)[0]
        seeds = ops.concatenate([noise, labels], axis=1)
        fake = ops.concatenate([self.generator(seeds), channels], axis=-1)
        real = ops.concatenate([real, channels], axis=-1)
        both = ops.concatenate([fake, real], axis=0)
        wanted = ops.concatenate(
            [ops.ones((size, 1)), ops.zeros((size, 1))], axis=0
        )
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(wanted, self.discriminator(both))
        learn(
            self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights
        )
        with tf.GradientTape() as tape:
            fake = ops.concatenate([self.generator(seeds), channels], axis=-1)
            judged = self.discriminator(fake)
            g_loss = self.loss_fn(ops.zeros((size, 1)), judged)
        learn(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


@row(GROUP)
def conditional_gan_with_classes_as_channels(run):
    def build():
        return with_optimizers(
            ConditionalGan(), d_optimizer=adam(), g_optimizer=adam()
        )

    labels = ops.convert_to_numpy(ops.one_hot(outside.kinds(), 3))
    data = outside.images(channels=1), labels, outside.points(2, 32)
    run.fit(build, outside.batches(*data))


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
