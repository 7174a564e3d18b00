"""Custom training with tf.distribute.Strategy, on Keras 3.

    python experiments/tutorials/custom_training.py
    python experiments/tutorials/custom_training.py --replicas=2

The job of TensorFlow's tutorial "Custom training with
tf.distribute.Strategy": a step written by hand, with its own loss and its own
clipping. What changed:

- The step is the `train_step` of a Keras 3 model. The loop around it, the
  distribution of the data, the metrics over replicas and the progress bar,
  which the tutorial writes out, are the trainer's; callbacks work.
- The loss is the mean over the batch at hand, as on one device, where the
  tutorial divides by the size of the global batch. Replicas weigh by the rows
  that they hold.
- Gradients are summed over replicas first and clipped then. The other way
  round, as Keras does it, each replica clips its own part and the result
  depends on the number of replicas.
- scikit-learn's digits in place of Fashion MNIST, so that nothing is
  downloaded.

Hardware: any. Expected: test accuracy above 0.95 after 5 epochs, the same
weights whatever the number of replicas. On 2 quiet CPU cores about half a
minute.
"""

import keras
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mgpu_tf

GLOBAL_BATCH_SIZE = 64

_REPLICAS = flags.DEFINE_integer(
    "replicas", 1, "Parts of the CPU to train on; 0 for what there is."
)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Passes over the data.")


@keras.saving.register_keras_serializable("mgpu_tf_tutorials")
class Classifier(keras.Model):
    """A convolutional network with a training step of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.body = keras.Sequential(
            [
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            loss = tf.reduce_mean(losses)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(losses)
            else:
                metric.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}


def build_model():
    model = Classifier()
    model.compile(
        keras.optimizers.Adam(0.002, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(argv):
    del argv
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=_REPLICAS.value or None
    )
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
    trainer = mgpu_tf.Trainer(build_model, strategy)
    trainer.fit(x, y, batch_size=GLOBAL_BATCH_SIZE, epochs=_EPOCHS.value)
    loss, accuracy = trainer.evaluate(x_test, y_test, verbose=0)
    if mgpu_tf.is_chief(strategy):
        print(f"test loss {loss:.6f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
