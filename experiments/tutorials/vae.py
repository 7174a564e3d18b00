"""A variational autoencoder that overrides `train_step`, on Keras 3.

    python experiments/tutorials/vae.py --replicas=2
    mgpu-tf launch --num_workers=2 -- python experiments/tutorials/vae.py

The job of keras.io's "Variational AutoEncoder": a model without a `call`
whose `train_step` adds up a reconstruction loss and a divergence, each a sum
over an image and a mean over the batch. What changed: the model is made in
`build_model`, `fit` is the trainer's, and scikit-learn's digits stand for
MNIST, so that nothing is downloaded.

Hardware: any; on 2 quiet CPU cores about half a minute. Expected: after 20
epochs a loss of about 29, of it a divergence of about 4. Each replica draws
noise of its own, so the numbers of several replicas are near those of one,
not equal.

References:
    https://keras.io/examples/generative/vae/
"""

import argparse

import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import mgpu_tf

LATENT = 2
BATCH_SIZE = 64


def digits(count=None):
    """Images `[count, 8, 8, 1]` between 0 and 1."""
    x, _ = load_digits(return_X_y=True)
    return (x.reshape(-1, 8, 8, 1) / 16).astype("float32")[:count]


class Sampling(layers.Layer):
    """Draws a point from the distribution that the encoder describes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def make_encoder():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, activation="tanh", strides=2, padding="same")(
        inputs
    )
    x = layers.Flatten()(x)
    x = layers.Dense(32, activation="tanh")(x)
    mean = layers.Dense(LATENT, name="mean")(x)
    log_variance = layers.Dense(LATENT, name="log_variance")(x)
    point = Sampling()([mean, log_variance])
    return keras.Model(inputs, [mean, log_variance, point], name="encoder")


def make_decoder():
    inputs = keras.Input((LATENT,))
    x = layers.Dense(4 * 4 * 16, activation="tanh")(inputs)
    x = layers.Reshape((4, 4, 16))(x)
    x = layers.Conv2DTranspose(
        16, 3, activation="tanh", strides=2, padding="same"
    )(x)
    outputs = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
    return keras.Model(inputs, outputs, name="decoder")


class VAE(keras.Model):
    """Encoder, sampling and decoder."""

    def __init__(self, encoder, decoder, **options):
        super().__init__(**options)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(
            name="reconstruction_loss"
        )
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, point = self.encoder(data)
            made = self.decoder(point)
            reconstruction_loss = ops.mean(
                ops.sum(
                    keras.losses.binary_crossentropy(data, made), axis=(1, 2)
                )
            )
            kl_loss = -0.5 * (
                1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            )
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def build_model():
    vae = VAE(make_encoder(), make_decoder())
    vae.compile(optimizer=keras.optimizers.Adam(0.002))
    return vae


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="parts of the CPU")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=arguments.replicas
    )
    trainer = mgpu_tf.Trainer(build_model, strategy)
    history = trainer.fit(
        digits(), batch_size=BATCH_SIZE, epochs=arguments.epochs
    )
    if mgpu_tf.is_chief(strategy):
        last = {name: values[-1] for name, values in history.history.items()}
        print(", ".join(f"{name} {value:.2f}" for name, value in last.items()))


if __name__ == "__main__":
    main()
