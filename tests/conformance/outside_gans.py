"""Adversarial networks from outside: several optimizers, state of the step."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import outside
from tests.conformance.harness import row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: adversarial networks"


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
