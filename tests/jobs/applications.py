"""Architectures of `keras.applications`, two steps each.

Random weights, small images; statistics over all replicas and no Dropout,
since both depend on which examples share a replica. In float64, since some of
these models, with random weights, make 2e-4 of a rounding error in one step.
"""

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.models import create_model
from tests.parity.cases import set_floatx

CLASSES = 5
BATCH = 8
# The smallest side that each takes.
SIDES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "Xception": 71,
}


def images(side):
    generator = np.random.default_rng(11)
    x = generator.uniform(size=(2 * BATCH, side, side, 3)).astype("float64")
    return x, generator.integers(0, CLASSES, size=2 * BATCH)


def _without_chance(model):
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            _without_chance(layer)
        for name in ("rate", "drop_path_rate"):
            if hasattr(layer, name):
                setattr(layer, name, 0.0)


def job(name):
    side = SIDES[name]

    def build():
        model = create_model(name, (side, side, 3), CLASSES)
        _without_chance(model)
        mgpu_tf.synchronize_batch_normalization(model)
        model.compile(
            keras.optimizers.SGD(0.001),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    def run(strategy, folder):
        set_floatx("float64")
        try:
            return {"losses": train(strategy)}
        finally:
            set_floatx("float32")
            keras.backend.clear_session()

    def train(strategy):
        trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
        losses = []
        trainer.fit(
            *images(side),
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: losses.append(
                        logs["loss"]
                    )
                )
            ],
        )
        assert len(losses) == 2
        return losses

    return run


JOBS = {name: job(name) for name in SIDES}
