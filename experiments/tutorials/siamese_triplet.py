"""A siamese network with a triplet loss, after keras.io, on Keras 3.

    python experiments/tutorials/siamese_triplet.py --replicas=2
    mgpu-tf launch --num_workers=2 -- \
        python experiments/tutorials/siamese_triplet.py

The job of keras.io's "Image similarity estimation using a Siamese Network
with a triplet loss": data are triplets of images (an anchor, one like it, one
unlike it) without a target; the model's `train_step` and `test_step` compute
the loss from the two distances. What changed: the model is made in
`build_model`, `fit` is the trainer's, and scikit-learn's digits stand for the
photographs, so that nothing is downloaded.

Hardware: any; on 2 quiet CPU cores about half a minute. Expected: after 10
epochs more than 0.95 of the test triplets have the like image nearer, the
same weights whatever the number of replicas.

References:
    https://keras.io/examples/vision/siamese_network/
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import mgpu_tf

MARGIN = 0.5
BATCH_SIZE = 64


def triplets(count, seed):
    """Returns anchors, like and unlike images, `[count, 8, 8, 1]` each."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    generator = np.random.default_rng(seed)
    of_label = [np.flatnonzero(labels == k) for k in range(10)]
    anchors = generator.integers(0, len(images), count)
    like = [generator.choice(of_label[labels[a]]) for a in anchors]
    other = (labels[anchors] + generator.integers(1, 10, count)) % 10
    unlike = [generator.choice(of_label[k]) for k in other]
    return images[anchors], images[like], images[unlike]


def dataset(count, seed):
    """A dataset of batches `(anchor, like, unlike)`."""
    data = tf.data.Dataset.from_tensor_slices(triplets(count, seed))
    return data.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)


class DistanceLayer(layers.Layer):
    """The distances of the anchor to the other two."""

    def call(self, anchor, positive, negative):
        near = ops.sum(ops.square(anchor - positive), -1)
        far = ops.sum(ops.square(anchor - negative), -1)
        return near, far


def make_network():
    embedding = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="tanh"),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.Dense(16),
        ],
        name="embedding",
    )
    inputs = [
        keras.Input((8, 8, 1), name=name)
        for name in ("anchor", "positive", "negative")
    ]
    distances = DistanceLayer()(*(embedding(x) for x in inputs))
    return keras.Model(inputs, distances)


class SiameseModel(keras.Model):
    """The triplet loss of a network that returns two distances."""

    def __init__(self, siamese_network, margin=MARGIN):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.nearer = keras.metrics.Mean(name="nearer")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
            # The gradient of a vector is that of its sum: declared as one.
            total = mgpu_tf.sum_over_batch(loss)
        weights = self.siamese_network.trainable_weights
        gradients = tape.gradient(total, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        loss = self._compute_loss(data)
        near, far = self.siamese_network(data)
        self.loss_tracker.update_state(loss)
        self.nearer.update_state(ops.cast(near < far, "float32"))
        return {
            "loss": self.loss_tracker.result(),
            "nearer": self.nearer.result(),
        }

    def _compute_loss(self, data):
        near, far = self.siamese_network(data)
        return ops.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker, self.nearer]


def build_model():
    model = SiameseModel(make_network())
    # The loss is a vector, whose gradient is that of its sum.
    model.compile(optimizer=keras.optimizers.Adam(0.0005))
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="parts of the CPU")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=arguments.replicas
    )
    trainer = mgpu_tf.Trainer(build_model, strategy)
    test = dataset(500, seed=1)
    trainer.fit(
        dataset(3000, seed=0), epochs=arguments.epochs, validation_data=test
    )
    scores = trainer.evaluate(test, verbose=0, return_dict=True)
    if mgpu_tf.is_chief(strategy):
        print(f"test loss {scores['loss']:.4f}, nearer {scores['nearer']:.3f}")


if __name__ == "__main__":
    main()
