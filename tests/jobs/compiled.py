"""Steps that a trial decides whether to compile, and steps as they are."""

import logging

import keras
import numpy as np

import mgpu_tf

SIZE = 80
BATCH = 8


def build():
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def train(strategy, jit_compile):
    told = []

    class Lines(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    log, lines = logging.getLogger("mgpu_tf"), Lines()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        trainer = mgpu_tf.Trainer(
            build, strategy, steps_per_execution=2, jit_compile=jit_compile
        )
        generator = np.random.default_rng(0)
        x = generator.normal(size=(SIZE, 6)).astype("float32")
        history = trainer.fit(
            x, x[:, :1], batch_size=BATCH, epochs=4, verbose=0
        )
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
    found = [line for line in told if "jit_compile" in line]
    return {"losses": history.history["loss"], "told": found}


def by_trial(strategy, folder):
    return train(strategy, "auto")


JOBS = {"by_trial": by_trial}
