"""Jobs of a test cluster: steps and loops that their author wrote."""

import os

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from tests.engine import test_overridden_step
from tests.parity import cases
from tests.training import test_custom_loop, test_on_batch

ops = keras.ops


def _in_float64(job):
    def run(strategy, folder):
        cases.set_floatx("float64")
        return job(strategy, folder)

    return run


def gan(strategy, folder):
    del folder
    trainer = mgpu_tf.Trainer(test_overridden_step.build_gan, strategy)
    history = trainer.fit(
        *test_overridden_step.arrays((3, 5)), **test_overridden_step.FIT
    ).history
    weights = [weight.tolist() for weight in trainer.model.get_weights()]
    return {"history": history, "weights": weights}


def on_batch(strategy, folder):
    del folder
    trainer = mgpu_tf.Trainer(test_on_batch.build, strategy)
    x, y = test_overridden_step.arrays()
    scores = [trainer.train_on_batch(x[:n], y[:n]) for n in (8, 7)]
    predicted = trainer.predict_on_batch(x[:7]).tolist()
    return {"scores": scores, "predicted": predicted}


class Hinge(keras.Model):
    """Only some rows have a gradient."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x):
        return ops.mean(ops.maximum(self(x), 0.0))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


class SumOfHinges(Hinge):
    def loss_of(self, x):
        return ops.sum(ops.maximum(self(x), 0.0))


def hinge_data():
    """Batches whose first half of rows alone has a gradient."""
    x = np.abs(test_overridden_step.arrays((3, 5))[0][:16])
    x[4:8] *= -1
    x[12:] *= -1
    return x, x[:, :1]


def hinge_model(model=Hinge):
    made = model()
    made.compile(keras.optimizers.SGD(0.1))
    return made


def sum_over_rows(strategy, folder):
    """One worker alone has rows with a gradient."""
    del folder
    trainer = mgpu_tf.Trainer(lambda: hinge_model(SumOfHinges), strategy)
    trainer.fit(*hinge_data(), batch_size=8, epochs=2, shuffle=False)
    return [weight.tolist() for weight in trainer.model.get_weights()]


WORDS, LENGTH = 7, 3
FLAT_FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def flat_model():
    """Its outputs are rows of tokens, several of an example."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Dense(WORDS)(keras.layers.Embedding(WORDS, 5)(words))
    model = keras.Model(words, ops.reshape(x, (-1, WORDS)))

    def loss(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(
            ops.reshape(y_true, (-1,)), y_pred, from_logits=True
        )

    model.compile(keras.optimizers.SGD(0.5), loss)
    return model


def sentences():
    """The last batch has fewer examples than there are workers."""
    return np.random.default_rng(6).integers(0, WORDS, (17, LENGTH))


def flat_outputs(trains):
    """Trains on rows of tokens; returns losses and predictions."""
    words = sentences()
    losses = trains.fit(words, np.roll(words, -1, 1), **FLAT_FIT).history[
        "loss"
    ]
    return losses, trains.predict(words, batch_size=8, verbose=0).tolist()


def rows_of_tokens(strategy, folder):
    """Predicts what has several rows for an example."""
    del folder
    return flat_outputs(mgpu_tf.Trainer(flat_model, strategy))


class ManyKinds(Hinge):
    """It predicts what TensorFlow's collective operations do not take."""

    def predict_step(self, data):
        x = self(data, training=False)
        return {
            "uint8": tf.cast(tf.round(255 * tf.sigmoid(x)), tf.uint8),
            "bool": x > 0.5,
            "bfloat16": tf.cast(x, tf.bfloat16),
            "complex": tf.complex(x, 1 - x),
            "uint32": tf.cast(tf.abs(x) * 1e9, tf.uint32),
        }


def predicted_kinds(trains):
    """Returns predictions of each type as numbers, and whether it is kept."""
    found = trains.predict(hinge_data()[0], batch_size=8, verbose=0)
    kept = all(v.dtype.name.startswith(name) for name, v in found.items())
    numbers = {name: v.astype("complex128") for name, v in found.items()}
    return kept, {
        name: [v.real.tolist(), v.imag.tolist()] for name, v in numbers.items()
    }


def kinds(strategy, folder):
    """Predicts values of many types."""
    del folder
    trainer = mgpu_tf.Trainer(lambda: hinge_model(ManyKinds), strategy)
    return predicted_kinds(trainer)


def quantized(strategy, folder):
    """Predicts after a quantization, which makes weights of int8."""
    del folder
    trainer = mgpu_tf.Trainer(flat_model, strategy)
    words = sentences()
    trainer.fit(words, np.roll(words, -1, 1), **FLAT_FIT)
    with trainer.strategy.scope():
        trainer.model.quantize("int8")
    return trainer.predict(words, batch_size=8, verbose=0).tolist()


def loop(strategy, folder):
    """Goes on from a checkpoint in the middle."""
    saved = os.path.join(folder, "loop")
    own = mgpu_tf.Loop(test_custom_loop.build, strategy)
    logs = []
    for number, batch in enumerate(test_custom_loop.batches()):
        if number == 3:
            own.save(saved, number=number)
            own = mgpu_tf.Loop(test_custom_loop.build, strategy, seed=5)
            assert own.restore(saved) == {"number": number}
        logs.append(own.run(test_custom_loop.d_step, batch))
        logs.append(own.run(test_custom_loop.g_step, batch))
    values = test_custom_loop.values(own.objects)
    return {"logs": logs, "values": [value.tolist() for value in values]}


JOBS = {
    job.__name__: _in_float64(job)
    for job in (
        gan,
        on_batch,
        sum_over_rows,
        rows_of_tokens,
        kinds,
        quantized,
        loop,
    )
}
