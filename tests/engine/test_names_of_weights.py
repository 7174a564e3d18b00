"""What an optimizer's author picks weights by, where these are stored anew."""

import keras
import numpy as np
import pytest
from keras import layers

import mgpu_tf
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import compared
from tests.tiers import tiered


class RatesByWeight(keras.optimizers.SGD):
    """Has another rate for some weights, by what Keras knows them by."""

    def __init__(self, weights, **options):
        super().__init__(**options)
        self.slow = {self._var_key(weight) for weight in weights}

    def update_step(self, gradient, variable, learning_rate):
        rate = 0.1 if self._var_key(variable) in self.slow else 1.0
        super().update_step(gradient, variable, rate * learning_rate)


def left_out(model, **options):
    optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.2)
    optimizer.exclude_from_weight_decay(
        var_list=[model.get_layer("last").kernel]
    )
    return optimizer


def left_out_and_built(model):
    optimizer = left_out(model)
    optimizer.build(model.trainable_variables)
    return optimizer


def by_weight(model):
    return RatesByWeight(model.get_layer("first").weights, learning_rate=0.1)


OPTIMIZERS = {
    each.__name__: each for each in (left_out, left_out_and_built, by_weight)
}


def build(name):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", name="first"),
            layers.Dense(8, activation="tanh", name="second"),
            layers.Dense(4, name="last"),
        ]
    )
    return models.compiled(model, OPTIMIZERS[name](model), "mse")


def data():
    generator = np.random.default_rng(0)
    return generator.normal(size=(37, 6)), generator.normal(size=(37, 4))


COLUMNS = [
    "mirrored_x3",
    "fsdp_x3",
    "tensor_x3",
    "data_2_tensor_2",
    "data_2_pipeline_2",
    "fsdp_3_pipeline_2",
    "tensor_2_pipeline_2",
]


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        [(column, name) for column in COLUMNS for name in OPTIMIZERS],
        [("tensor_x3", "left_out"), ("data_2_pipeline_2", "left_out")],
        [("tensor_x3", "by_weight"), ("fsdp_3_pipeline_2", "by_weight")],
    ),
)
def test_weights_are_known_by_the_same_names(column, name, strategies):
    _, difference = compared(lambda: build(name), data(), strategies[column])
    assert difference < 1e-9


def test_what_is_left_out_after_the_trainer_is_made(strategies):
    def built():
        return models.compiled(
            build("left_out"),
            keras.optimizers.AdamW(0.02, weight_decay=0.2),
            "mse",
        )

    def leave_out(model):
        model.optimizer.exclude_from_weight_decay(
            var_list=[model.get_layer("last").kernel]
        )

    x, y = data()
    fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(1)
    right = built()
    leave_out(right)
    right.fit(x, y, **fit)
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(built, strategies["tensor_x3"])
    leave_out(trainer.model)
    trainer.fit(x, y, **fit)
    for mine, other in zip(trainer.model.weights, right.weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
