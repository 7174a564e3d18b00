"""A model that goes on elsewhere: saved here, trained on there."""

import os

import keras
import numpy as np
from keras import layers

import mgpu_tf

SIZE = 44
BATCH = 8


def numbers():
    generator = np.random.default_rng(6)
    x = generator.normal(size=(SIZE, 5)).astype("float32")
    return x, generator.integers(0, 3, size=SIZE)


def architecture():
    return keras.Sequential(
        [
            keras.Input((5,)),
            # A bias there has no gradient, and Adam would turn rounding
            # into motion.
            layers.Dense(6, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3),
        ]
    )


def build():
    model = architecture()
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def path(folder, kind, strategy):
    return os.path.join(folder, f"{kind}-of-{strategy.num_replicas_in_sync}")


def train(trainer, epochs, first=0):
    history = trainer.fit(
        *numbers(),
        batch_size=BATCH,
        epochs=epochs,
        initial_epoch=first,
        verbose=0,
    )
    return history.history["loss"]


def first_half(strategy, folder):
    """Trains two epochs and saves in every way; then trains two more."""
    trainer = mgpu_tf.Trainer(build, strategy)
    losses = train(trainer, 2)
    trainer.save(path(folder, "model", strategy) + ".keras")
    trainer.save_weights(path(folder, "model", strategy) + ".weights.h5")
    trainer.export(path(folder, "served", strategy), verbose=False)
    predictions = trainer.predict(numbers()[0], verbose=0)
    return {
        "losses": losses + train(trainer, 4, 2),
        "predictions": predictions.tolist(),
    }


def second_half(strategy, folder):
    """Goes on from the file of the other side."""
    other = {1: 2, 2: 1}[strategy.num_replicas_in_sync]
    file = os.path.join(folder, f"model-of-{other}.keras")
    trainer = mgpu_tf.Trainer(lambda: keras.models.load_model(file), strategy)
    return {"losses": train(trainer, 4, 2)}


def weights_only(strategy, folder):
    """Fine-tunes: weights from a file, the first layer frozen, recompiled."""

    def frozen():
        model = architecture()
        other = {1: 2, 2: 1}[strategy.num_replicas_in_sync]
        model.load_weights(os.path.join(folder, f"model-of-{other}.weights.h5"))
        model.layers[0].trainable = False
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    trainer = mgpu_tf.Trainer(frozen, strategy)
    before = trainer.model.layers[0].get_weights()
    losses = train(trainer, 2)
    for old, new in zip(
        before, trainer.model.layers[0].get_weights(), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    return {"losses": losses}


JOBS = {job.__name__: job for job in (first_half, second_half, weights_only)}
