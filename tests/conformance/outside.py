"""What the programs from outside share: data in batches that nothing divides.

Programs of `outside_*` are written from the examples, guides and packages of
others, without a look at the engine. Their batches have 13 rows, the last one
5, so that two and three replicas have parts of other sizes.
"""

import keras
import tensorflow as tf
from keras import layers

from tests.conformance import models
from tests.conformance.harness import EPOCHS

BATCH = 13
# Batches of 13, 13, 13 and 5.
EXAMPLES = 44
# The last batch has fewer rows than three replicas.
SHORT = 41
WORDS = 9
LENGTH = 5


def points(features=models.FEATURES, seed=1, examples=EXAMPLES):
    return models.points(examples, features, seed)


def numbers(width=1, seed=2, examples=EXAMPLES):
    return models.numbers(examples, width, seed)


def kinds(classes=3, seed=3, examples=EXAMPLES):
    return models.random(seed).integers(0, classes, size=examples)


def weights(seed=4, examples=EXAMPLES):
    return models.weights(examples, seed)


def words(seed=5, length=LENGTH, padded=True, examples=EXAMPLES):
    """Integers below `WORDS`, zeros at the end."""
    generator = models.random(seed)
    found = generator.integers(1, WORDS, size=(examples, length))
    if padded:
        lengths = generator.integers(1, length + 1, size=(examples, 1))
        found *= tf.range(length).numpy() < lengths
    return found


def images(size=6, channels=3, seed=6, examples=EXAMPLES):
    return models.images(examples, size, channels, seed)


def batches(*arrays, size=BATCH):
    """A dataset of batches of a tuple of arrays, or of one array."""
    data = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def use(run, build, *data, **options):
    """Trains, evaluates and predicts in batches of 13."""
    return run.use(build, *data, **({"batch_size": BATCH} | options))


def train(run, build, *data, **options):
    """Trains on batches of 13."""
    return run.fit(build, *data, **({"batch_size": BATCH} | options))


def on_batches(run, build, data, evaluate=True, predict=True, **options):
    """Trains, evaluates and predicts on batches that a dataset makes."""
    trainer = run.trainer(build)
    options = {"epochs": EPOCHS, "verbose": 0} | options
    run.see_history(trainer.fit(data, **options))
    if evaluate:
        run.see("evaluate", trainer.evaluate(data, verbose=0))
    if predict:
        run.see("predict", trainer.predict(data, verbose=0))
    run.look(trainer)
    return trainer


def learn(optimizer, tape, loss, variables):
    """One step of an optimizer, as examples write it in `train_step`."""
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def mlp(outputs, inputs=models.FEATURES, width=6, activation=None):
    """A small network on vectors."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(width, activation="tanh"),
            layers.Dense(outputs, activation=activation),
        ]
    )
