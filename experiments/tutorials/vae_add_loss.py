"""A variational autoencoder by `add_loss`, on Keras 3.

    python experiments/tutorials/vae_add_loss.py --replicas=2
    mgpu-tf launch --num_workers=2 -- \
        python experiments/tutorials/vae_add_loss.py

The autoencoder of Keras's guide "Making new layers and models via
subclassing": the model adds the divergence to the loss in its `call`, and the
reconstruction is a compiled loss. What changed: the model is made in
`build_model`, `fit` is the trainer's, and scikit-learn's digits stand for
MNIST, so that nothing is downloaded.

Hardware: any; on 2 quiet CPU cores about half a minute. Expected: after 30
epochs a mean squared error below 0.05. Each replica draws noise of its own,
so the numbers of several replicas are near those of one, not equal.

References:
    https://keras.io/guides/making_new_layers_and_models_via_subclassing/
"""

import argparse

import keras
from keras import layers, ops
from sklearn.datasets import load_digits

import mgpu_tf

ORIGINAL = 64
LATENT = 8
BATCH_SIZE = 64


def digits(count=None):
    """Rows `[count, 64]` between 0 and 1."""
    x, _ = load_digits(return_X_y=True)
    return (x / 16).astype("float32")[:count]


class Sampling(layers.Layer):
    """Draws a point from the distribution that the encoder describes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class Encoder(layers.Layer):
    """Maps digits to a distribution and a point of it."""

    def __init__(self, latent_dim, intermediate_dim, **options):
        super().__init__(**options)
        self.dense_proj = layers.Dense(intermediate_dim, activation="tanh")
        self.dense_mean = layers.Dense(latent_dim)
        self.dense_log_variance = layers.Dense(latent_dim)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.dense_proj(inputs)
        mean = self.dense_mean(x)
        log_variance = self.dense_log_variance(x)
        return mean, log_variance, self.sampling((mean, log_variance))


class Decoder(layers.Layer):
    """Maps a point back to a digit."""

    def __init__(self, original_dim, intermediate_dim, **options):
        super().__init__(**options)
        self.dense_proj = layers.Dense(intermediate_dim, activation="tanh")
        self.dense_output = layers.Dense(original_dim, activation="sigmoid")

    def call(self, inputs):
        return self.dense_output(self.dense_proj(inputs))


class VariationalAutoEncoder(keras.Model):
    """Encoder and decoder, and the divergence as a loss of its own."""

    def __init__(self, original_dim, intermediate_dim, latent_dim, **options):
        super().__init__(**options)
        self.encoder = Encoder(latent_dim, intermediate_dim)
        self.decoder = Decoder(original_dim, intermediate_dim)

    def call(self, inputs):
        mean, log_variance, point = self.encoder(inputs)
        kl_loss = -0.5 * ops.mean(
            log_variance - ops.square(mean) - ops.exp(log_variance) + 1
        )
        self.add_loss(0.01 * kl_loss)
        return self.decoder(point)


def build_model():
    vae = VariationalAutoEncoder(ORIGINAL, 32, LATENT)
    vae.compile(
        optimizer=keras.optimizers.Adam(learning_rate=0.003),
        loss=keras.losses.MeanSquaredError(),
    )
    return vae


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="parts of the CPU")
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=arguments.replicas
    )
    trainer = mgpu_tf.Trainer(build_model, strategy)
    x = digits()
    trainer.fit(x, x, batch_size=BATCH_SIZE, epochs=arguments.epochs)
    made = trainer.predict(x, batch_size=BATCH_SIZE, verbose=0)
    if mgpu_tf.is_chief(strategy):
        print(f"mean squared error {((made - x) ** 2).mean():.4f}")


if __name__ == "__main__":
    main()
