"""Optimizers that follow norms of whole weights, where weights are split."""

import keras
import pytest
from keras import ops

from mgpu_tf.optimizers import LARS, ByNorms
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import compared, shares
from tests.tiers import tiered


@keras.saving.register_keras_serializable("tests")
class Normed(ByNorms):
    """Gradient descent by the direction of a gradient; of one's own."""

    def direction(self, gradient, variable):
        return ops.convert_to_tensor(gradient)

    def move(self, direction, variable, learning_rate, norms):
        rate = ops.cast(learning_rate, variable.dtype)
        scale = rate * norms.weight / (1 + norms.direction)
        self.assign_sub(variable, scale * direction)


OPTIMIZERS = {
    "lamb": lambda: keras.optimizers.Lamb(
        0.02, epsilon=1e-3, weight_decay=0.01, global_clipnorm=0.5
    ),
    "lars": lambda: LARS(
        0.2,
        momentum=0.9,
        nesterov=True,
        trust_coefficient=0.02,
        weight_decay=0.01,
        clipnorm=0.5,
    ),
    "own": lambda: Normed(0.05),
    "accumulated": lambda: keras.optimizers.Lamb(
        0.02, epsilon=1e-3, gradient_accumulation_steps=3, use_ema=True
    ),
}
# `tests/parity` has the others.
CASES = [
    "lamb on fsdp_x3",
    "lars on tensor_x3",
    "own on data_2_tensor_2",
    "accumulated on data_2_fsdp_2",
]


@pytest.mark.parametrize("case", tiered(CASES, ["lamb on fsdp_x3"]))
def test_the_numbers_of_one_device(case, strategies):
    """Weights, slots, losses and predictions over 14 steps in float64."""
    name, strategy = case.split(" on ")
    trainer, difference = compared(
        lambda: models.mlp(OPTIMIZERS[name]()),
        models.mlp_data(),
        strategies[strategy],
    )
    assert difference < 1e-9
    shares(trainer.model.variables, strategies[strategy].mesh)
