"""The tutorials after keras.io, each in a tiny version.

A job is a function from a strategy and a folder to what it observed: the
history, and for each weight the sums of its values and of their squares.
Without a strategy Keras's own `fit` trains, on one device.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from experiments.tutorials import (
    bert_classifier,
    dcgan,
    siamese_triplet,
    structured_data,
    timeseries_transformer,
    vae,
    vae_add_loss,
)

EXAMPLES = 29
BATCH = 8
EPOCHS = 2


def _batches(*data):
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


def _reviews():
    return functools.partial(bert_classifier.build_model, 0.0, 8), dict(
        zip(("x", "y"), bert_classifier.reviews(EXAMPLES, 0), strict=True)
    )


def _series():
    build = functools.partial(timeseries_transformer.build_model, 0.0)
    x, y = timeseries_transformer.series(EXAMPLES, 0)
    return build, {"x": x, "y": y, "validation_split": 0.2}


def _patients():
    build = functools.partial(structured_data.build_model, EXAMPLES)
    data = _batches(*structured_data.patients(EXAMPLES, 0))
    return build, {"x": data, "validation_data": data}


def _triplets():
    data = _batches(*siamese_triplet.triplets(EXAMPLES, 0))
    return siamese_triplet.build_model, {"x": data, "validation_data": data}


def _add_loss():
    x = vae_add_loss.digits(EXAMPLES)
    return vae_add_loss.build_model, {"x": x, "y": x}


PROGRAMS = {
    "bert_classifier": _reviews,
    "dcgan": lambda: (dcgan.build_model, {"x": dcgan.digits(EXAMPLES)}),
    "siamese_triplet": _triplets,
    "structured_data": _patients,
    "timeseries_transformer": _series,
    "vae": lambda: (vae.build_model, {"x": vae.digits(EXAMPLES)}),
    "vae_add_loss": _add_loss,
}
# Each replica draws noise of its own.
NOISY = {"dcgan", "vae", "vae_add_loss"}


def observe(name, strategy):
    """Trains one of the programs."""
    build, data = PROGRAMS[name]()
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    if not isinstance(data["x"], tf.data.Dataset):
        options["batch_size"] = BATCH
    if strategy is None:
        keras.utils.set_random_seed(0)
        with tf.device("CPU:0"):
            model = build()
            history = model.fit(**data, **options)
    else:
        trainer = mgpu_tf.Trainer(build, strategy)
        history = trainer.fit(**data, **options)
        model = trainer.model
    weights = [
        [float(np.sum(w)), float(np.sum(np.square(w)))]
        for w in model.get_weights()
        if np.issubdtype(w.dtype, np.floating)
    ]
    logs = {
        name: [float(value) for value in values]
        for name, values in history.history.items()
    }
    return {"history": logs, "weights": weights}


JOBS = {
    name: lambda strategy, folder, name=name: observe(name, strategy)
    for name in PROGRAMS
}
