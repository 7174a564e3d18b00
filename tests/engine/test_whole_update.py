"""Optimizers that need whole weights or gradients, where weights are split."""

import keras
import pytest
from keras import layers, ops

import mgpu_tf
from mgpu_tf.engine import keras_internals
from mgpu_tf.optimizers import LARS
from tests.conformance.outside_training import LookaheadAfter
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import compared
from tests.tiers import tiered


class Whitened(keras.optimizers.SGD):
    """Its own step by means over a weight; it keeps a sum for all weights."""

    def build(self, variables):
        super().build(variables)
        self.kept = [
            self.add_variable_from_reference(each, "kept") for each in variables
        ]
        self.seen = self.add_variable((), name="seen")

    def update_step(self, gradient, variable, learning_rate):
        gradient = ops.convert_to_tensor(gradient)
        kept = self.kept[self._get_variable_index(variable)]
        self.assign(kept, 0.9 * kept + gradient)
        self.assign_add(self.seen, ops.mean(ops.abs(gradient)))
        step = (kept - ops.mean(kept)) / (ops.std(kept) + 1)
        self.assign_sub(variable, learning_rate * step / (1 + self.seen))


class Elsewhere(Whitened):
    """It keeps what belongs to a weight where nobody looks for it."""

    def build(self, variables):
        super().build(variables)
        self.kept = dict(enumerate(self.kept))


class HoldsWeights(Whitened):
    """Its author compares weights with some that it holds."""

    def build(self, variables):
        super().build(variables)
        self.slow = variables[:1]


class KeepsPlaces(keras.optimizers.SGD):
    """What is named to the author of the one above."""

    def build(self, variables):
        super().build(variables)
        self.slow = {0}

    def update_step(self, gradient, variable, learning_rate):
        is_slow = self._get_variable_index(variable) in self.slow
        rate = 0.1 * learning_rate if is_slow else learning_rate
        super().update_step(gradient, variable, rate)


class ReadsAgain(Whitened):
    """It writes a weight, and reads it by what it had made of it before."""

    def update_step(self, gradient, variable, learning_rate):
        kept = self.kept[self._get_variable_index(variable)]
        before, copy = ops.convert_to_tensor(variable), ops.copy(variable)
        moves = ops.convert_to_tensor(kept)
        self.assign(kept, 0.9 * kept + gradient)
        self.assign_sub(variable, learning_rate * moves)
        self.assign_add(variable, 0.1 * before - 0.05 * copy)


class Centred(keras.optimizers.Adam):
    """It takes means of gradients, and norms of weights, before it applies."""

    def apply(self, grads, trainable_variables=None):
        given = []
        for gradient, weight in zip(grads, trainable_variables, strict=True):
            gradient = ops.convert_to_tensor(gradient)
            most = 0.1 * ops.norm(weight) / (ops.norm(gradient) + 1e-3)
            gradient = gradient * ops.minimum(most + 0.01, 1.0)
            given.append(gradient - ops.mean(gradient, 0, keepdims=True))
        super().apply(given, trainable_variables)


OPTIMIZERS = {
    "muon": lambda: keras.optimizers.Muon(
        0.02, weight_decay=0.01, adam_weight_decay=0.02, global_clipnorm=0.5
    ),
    "adafactor": lambda: keras.optimizers.Adafactor(0.02),
    "own": lambda: Whitened(0.05, clipnorm=0.1, use_ema=True),
    "accumulated": lambda: keras.optimizers.Muon(
        0.02, gradient_accumulation_steps=3
    ),
    "read again": lambda: ReadsAgain(0.05, clipnorm=0.1, use_ema=True),
    "centred": lambda: Centred(0.02, clipnorm=0.05, use_ema=True),
    "wrapped": lambda: LookaheadAfter(
        keras.optimizers.Adam(0.02, global_clipnorm=0.05)
    ),
}
CASES = [
    "muon on fsdp_x3",
    "adafactor on tensor_x3",
    "own on fsdp_2_tensor_2",
    "own on fsdp_x3",
    "adafactor on fsdp_3_pipeline_2",
    "accumulated on data_2_fsdp_2",
    "muon on zero1_x2",
    "centred on fsdp_x3",
    "centred on tensor_x3",
    "centred on fsdp_3_pipeline_2",
    "centred on data_2_fsdp_2",
    "wrapped on fsdp_x3",
    "wrapped on fsdp_2_tensor_2",
    "wrapped on zero1_x2",
]


@pytest.mark.parametrize(
    "case", tiered(CASES, ["own on fsdp_x3", "centred on fsdp_x3"])
)
def test_the_numbers_of_one_device(case, strategies):
    """Weights, slots, losses and predictions over 14 steps in float64."""
    name, strategy = case.split(" on ")
    trainer, difference = compared(
        lambda: models.mlp(OPTIMIZERS[name]()),
        models.mlp_data(),
        strategies[strategy],
    )
    assert difference < 1e-9
    slots = trainer.model.optimizer.variables
    assert any(map(keras_internals.is_split, slots))


@pytest.mark.full
def test_what_an_update_has_read_follows_the_weight(strategies):
    """What `ops.convert_to_tensor` makes of a weight is the weight itself."""
    test_the_numbers_of_one_device("read again on fsdp_2_tensor_2", strategies)


def tagger(optimizer):
    """Rows that are looked up twice in a batch."""
    model = keras.Sequential(
        [keras.Input((3,)), layers.Embedding(9, 4), layers.Dense(1)]
    )
    return models.compiled(model, optimizer, "mse")


def tokens():
    rows = models.np.random.default_rng(0)
    return rows.integers(0, 9, (22, 3)), rows.normal(size=(22, 3, 1))


ROWS = ["muon on fsdp_x3", "adafactor on fsdp_x3", "muon on data_2_fsdp_2"]
ROWS += ["muon on fsdp_3_pipeline_2", "centred on fsdp_x3"]


@pytest.mark.parametrize("case", tiered(ROWS, ["muon on fsdp_x3"]))
def test_rows_that_are_looked_up(case, strategies):
    name, strategy = case.split(" on ")
    _, difference = compared(
        lambda: tagger(OPTIMIZERS[name]()), tokens(), strategies[strategy]
    )
    assert difference < 1e-9


def refused(build, data, strategy):
    trainer = mgpu_tf.Trainer(build, strategy)
    with pytest.raises(mgpu_tf.ConfigurationError) as error:
        trainer.fit(*data, batch_size=8, verbose=0)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_of_a_table_in_parts_are_refused(strategies):
    words = refused(
        lambda: tagger(OPTIMIZERS["muon"]()), tokens(), strategies["tensor_x3"]
    )
    assert "looked up by its rows" in words


@pytest.mark.parametrize(
    ("optimizer", "remedy"),
    [(Elsewhere, "Put it into a list"), (HoldsWeights, "Keep its place")],
)
def test_what_is_kept_elsewhere_is_refused(optimizer, remedy, strategies):
    words = refused(
        lambda: models.mlp(optimizer(0.1)),
        models.mlp_data(),
        strategies["fsdp_x3"],
    )
    assert remedy in words


def test_the_remedy_for_weights_that_are_held(strategies):
    _, difference = compared(
        lambda: models.mlp(KeepsPlaces(0.1)),
        models.mlp_data(),
        strategies["fsdp_x3"],
    )
    assert difference < 1e-9


def test_gradients_that_keras_accumulates_later_are_refused(strategies):
    words = refused(
        lambda: models.mlp(Centred(0.1, gradient_accumulation_steps=2)),
        models.mlp_data(),
        strategies["mirrored_x2"],
    )
    assert "gradient_accumulation_steps of Centred" in words


class Changed(LARS):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, 0.1 * gradient)


@pytest.mark.full
def test_a_step_that_replaces_two_is_taken(strategies):
    """An optimizer by norms whose author has written its `update_step`."""
    _, difference = compared(
        lambda: models.mlp(Changed(0.1)),
        models.mlp_data(),
        strategies["fsdp_x3"],
    )
    assert difference < 1e-9
