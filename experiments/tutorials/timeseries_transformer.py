"""A transformer that classifies time series, after keras.io, on Keras 3.

    python experiments/tutorials/timeseries_transformer.py --replicas=2
    mgpu-tf launch --num_workers=2 -- \
        python experiments/tutorials/timeseries_transformer.py

The job of keras.io's "Timeseries classification with a Transformer model":
blocks of attention and convolution over time, early stopping with the best
weights restored. What changed: the model is made in `build_model`, `fit` is
the trainer's, and the series are generated (waves of one of two shapes in
noise, in place of the FordA data set), so that nothing is downloaded.

Hardware: any; on 2 quiet CPU cores about a minute. Expected: test accuracy
above 0.9 after 15 epochs. Each replica draws dropout masks of its own; with
--dropout=0 the weights are the same whatever the number of replicas.

References:
    https://keras.io/examples/timeseries/timeseries_classification_transformer/
"""

import argparse

import keras
import numpy as np
from keras import layers

import mgpu_tf

STEPS = 48
BATCH_SIZE = 64


def series(count, seed):
    """Returns series `[count, STEPS, 1]` and the shape of each, 0 or 1."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    phase = generator.uniform(0, 2 * np.pi, (count, 1))
    speed = generator.uniform(0.2, 0.5, (count, 1))
    wave = np.sin(phase + speed * np.arange(STEPS))
    # The second shape is the wave's own cube: flatter where it crosses zero.
    x = np.where(labels[:, None] == 1, wave**3, wave)
    x = x / x.std(axis=1, keepdims=True)
    x += generator.normal(scale=0.1, size=x.shape)
    return x[..., None].astype("float32"), labels


def transformer_encoder(inputs, head_size, num_heads, ff_dim, dropout):
    x = layers.MultiHeadAttention(
        key_dim=head_size, num_heads=num_heads, dropout=dropout
    )(inputs, inputs)
    x = layers.Dropout(dropout)(x)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    res = x + inputs
    x = layers.Conv1D(filters=ff_dim, kernel_size=3, padding="same")(res)
    x = layers.Activation("gelu")(x)
    x = layers.Dropout(dropout)(x)
    x = layers.Conv1D(filters=inputs.shape[-1], kernel_size=1)(x)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    return x + res


def build_model(dropout=0.1):
    inputs = keras.Input((STEPS, 1))
    x = layers.Conv1D(8, 3, padding="same")(inputs)
    for _ in range(2):
        x = transformer_encoder(
            x, head_size=8, num_heads=2, ff_dim=16, dropout=dropout
        )
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dense(32, activation="gelu")(x)
    x = layers.Dropout(dropout)(x)
    outputs = layers.Dense(2, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(learning_rate=0.003),
        metrics=["sparse_categorical_accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="parts of the CPU")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=arguments.replicas
    )
    trainer = mgpu_tf.Trainer(lambda: build_model(arguments.dropout), strategy)
    stopping = keras.callbacks.EarlyStopping(
        patience=5, restore_best_weights=True
    )
    x, y = series(3000, seed=0)
    trainer.fit(
        x,
        y,
        validation_split=0.2,
        epochs=arguments.epochs,
        batch_size=BATCH_SIZE,
        callbacks=[stopping],
    )
    loss, accuracy = trainer.evaluate(*series(1000, seed=1), verbose=0)
    if mgpu_tf.is_chief(strategy):
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
