"""A DCGAN that overrides `train_step`, after keras.io, on Keras 3.

    python experiments/tutorials/dcgan.py --replicas=2
    mgpu-tf launch --num_workers=2 -- python experiments/tutorials/dcgan.py

The job of keras.io's "DCGAN to generate face images": a generator, a
discriminator, two optimizers, and a model without a `call` that trains both
in its `train_step`. What changed: the model is made in `build_model`, `fit` is
the trainer's, and scikit-learn's digits stand for the faces, so that nothing
is downloaded.

Hardware: any; on 2 quiet CPU cores about a minute. Expected: after 20 epochs
both losses are between 0.4 and 1.2, and made digits are as bright as real
ones, within a third. Each replica draws noise of its own, so the numbers of
several replicas are near those of one, not equal.

References:
    https://keras.io/examples/generative/dcgan_overriding_train_step/
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import mgpu_tf

LATENT = 16
BATCH_SIZE = 64


def digits(count=None):
    """Images `[count, 8, 8, 1]` between 0 and 1."""
    x, _ = load_digits(return_X_y=True)
    return (x.reshape(-1, 8, 8, 1) / 16).astype("float32")[:count]


def make_generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(2 * 2 * 32),
            layers.Reshape((2, 2, 32)),
            layers.Conv2DTranspose(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


def make_discriminator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(1, activation="sigmoid"),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """A generator and a discriminator, trained against each other."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def noise(self, count):
        return keras.random.normal(
            (count, self.latent_dim), seed=self.seed_generator
        )

    def train_step(self, real):
        count = tf.shape(real)[0]
        made = self.generator(self.noise(count))
        images = tf.concat([made, real], axis=0)
        # Ones for what is made; the labels are noisy, which helps.
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(
            tf.shape(labels), seed=self.seed_generator
        )
        with tf.GradientTape() as tape:
            judged = self.discriminator(images)
            d_loss = self.loss_fn(labels, judged)
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))

        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(self.noise(count)))
            g_loss = self.loss_fn(tf.zeros((count, 1)), judged)
        weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {
            "d_loss": self.d_loss_metric.result(),
            "g_loss": self.g_loss_metric.result(),
        }


def build_model():
    gan = GAN(make_discriminator(), make_generator(), LATENT)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(0.0005),
        g_optimizer=keras.optimizers.Adam(0.001),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
    return gan


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="parts of the CPU")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=arguments.replicas
    )
    trainer = mgpu_tf.Trainer(build_model, strategy)
    images = digits()
    trainer.fit(images, batch_size=BATCH_SIZE, epochs=arguments.epochs)
    made = trainer.model.generator(
        np.random.default_rng(0).normal(size=(100, LATENT)).astype("float32")
    )
    if mgpu_tf.is_chief(strategy):
        print(f"mean of made digits {float(tf.reduce_mean(made)):.3f}", end="")
        print(f", of real ones {images.mean():.3f}")


if __name__ == "__main__":
    main()
