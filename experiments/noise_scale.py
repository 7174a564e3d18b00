"""McCandlish et al. in small: the gradient noise scale while a model trains.

    python experiments/noise_scale.py

Paper: S. McCandlish et al., An Empirical Model of Large-Batch Training, 2018,
arXiv 1812.06162, section 2.2 and appendix A.

A network learns scikit-learn's digits on two replicas. The noise scale that
`noise_scale=True` logs comes from the gradients of replicas and their sum. At
the end of each epoch it is compared with the noise scale of the definition,
from the gradient of every single row.

Expected from the paper: the noise scale grows by much while the loss falls; on
MNIST it is about 900 rows. The logged one looks back over 100 steps, so it is
behind.

It writes noise_scale.json and noise_scale.png. Hardware: any; on 2 CPU cores
that other work shared, about one minute.
"""

import json
import os

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import mgpu_tf
from mgpu_tf.models import create_model
from mgpu_tf.reports import figures

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/noise_scale", "Where to write.")
flags.DEFINE_integer("epochs", 12, "Passes over the rows.")
flags.DEFINE_integer("batch_size", 32, "Global batch size.")
flags.DEFINE_integer("num_virtual_devices", 2, "Number of replicas.")

CHUNK = 128


class Definition(keras.callbacks.Callback):
    """The noise scale of all rows, one by one, at the end of each epoch.

    Args:
        model: A model of the same layers, outside of the strategy.
        x: The rows.
        y: Their labels.
    """

    def __init__(self, model, x, y):
        super().__init__()
        self.alone, self.x, self.y = model, x, y
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.alone.set_weights(self.model.get_weights())
        total, squares = 0.0, 0.0
        for first in range(0, len(self.x), CHUNK):
            rows = slice(first, first + CHUNK)
            for gradient in self.of_rows(self.x[rows], self.y[rows]):
                total = total + gradient.sum(0)
                squares += np.square(gradient).sum()
        count = len(self.x)
        square = np.square(total / count).sum()
        variance = (squares - count * square) / (count - 1)
        self.found.append(float(variance / square))

    def of_rows(self, x, y):
        """Returns one array of the gradients of rows, `[rows, weights]`."""
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, self.alone(x), from_logits=True
            )
        weights = [v.value for v in self.alone.trainable_variables]
        parts = tape.jacobian(losses, weights, experimental_use_pfor=True)
        flat = [np.reshape(part, (len(x), -1)) for part in parts]
        yield np.concatenate(flat, 1).astype("float64")


def main(argv):
    del argv
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    strategy = mgpu_tf.create_strategy(
        "mirrored", num_virtual_devices=FLAGS.num_virtual_devices
    )
    digits = mgpu_tf.datasets.load("digits")
    x, y = digits.train

    def network():
        return create_model("mlp", digits.input_shape, digits.num_classes)

    def build():
        model = network()
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    definition = Definition(network(), x, y)
    trainer = mgpu_tf.Trainer(build, strategy, seed=0, noise_scale=True)
    history = trainer.fit(
        x,
        y,
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
        callbacks=[definition],
        verbose=2,
    ).history
    logged = history["noise_scale"]
    print("epoch   loss  logged  definition")
    for epoch, values in enumerate(
        zip(history["loss"], logged, definition.found, strict=True), 1
    ):
        print("{:5d} {:6.3f} {:7.1f} {:11.1f}".format(epoch, *values))
    curves = {"logged": logged, "by definition": definition.found}
    figures.draw_curves(
        curves,
        os.path.join(FLAGS.output_dir, "noise_scale.png"),
        "noise scale, rows",
    )
    results = {
        "batch_size": FLAGS.batch_size,
        "replicas": FLAGS.num_virtual_devices,
        "loss": history["loss"],
        **curves,
    }
    with open(os.path.join(FLAGS.output_dir, "noise_scale.json"), "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    app.run(main)
