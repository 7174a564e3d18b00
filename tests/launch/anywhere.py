"""A training script, as users write it. The tests run it on every platform.

    python anywhere.py FOLDER

It takes no argument that says where it runs. The chief leaves the losses of
all epochs in the folder, as `losses.json`.
"""

import json
import logging
import pathlib
import sys

import keras
import numpy as np

EPOCHS, BATCH = 3, 32


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(150, 8))
    return x, generator.integers(0, 3, size=150)


def build_model():
    model = keras.Sequential(
        [
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, kernel_regularizer="l2"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    import mgpu_tf

    # What was found of the cluster is logged.
    logging.basicConfig(level=logging.INFO)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    # With parameter servers a late gradient would not be that of
    # one device. Other strategies have no late ones.
    strategy = mgpu_tf.create_strategy("auto", max_staleness=0)
    trainer = mgpu_tf.Trainer(build_model, strategy)
    history = trainer.fit(
        *arrays(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0
    )
    if mgpu_tf.is_chief(strategy):
        pathlib.Path(sys.argv[1], "losses.json").write_text(
            json.dumps(history.history["loss"])
        )


if __name__ == "__main__":
    main()
