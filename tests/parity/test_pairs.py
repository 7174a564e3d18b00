"""Pairs of options of `compile` and `fit` against Keras's own `fit`.

The default tier has a few of the programs, the full tier more, and `make
matrix` all of them.
"""

import itertools

import keras
import numpy as np
import pytest

import mgpu_tf
from tests.parity import pairs
from tests.tiers import tiered

NUMBERS = range(len(pairs.CASES))
QUICK = NUMBERS[:3]
FULL = NUMBERS[4:16]


def _differing(strategies, number):
    """What a program differs by; nothing if it is refused by a known rule."""
    case = pairs.CASES[number]
    try:
        return pairs.compare(case, strategies)
    except mgpu_tf.ConfigurationError as error:
        assert "\n" not in str(error)
        assert any(words in str(error) for _, words in pairs.REFUSED), error
        return {}


@pytest.mark.parametrize("number", tiered(list(NUMBERS), QUICK, []))
def test_same_numbers(number, strategies, float64):
    assert not _differing(strategies, number), pairs.CASES[number]


@pytest.mark.full
def test_same_numbers_of_more(strategies, float64):
    found = {number: _differing(strategies, number) for number in FULL}
    assert not {n: by for n, by in found.items() if by}


def test_all_pairs_are_covered():
    values = [
        (axis, value)
        for axis, several in pairs.AXES.items()
        for value in several
    ]
    covered = {
        pair
        for case in pairs.CASES
        for pair in itertools.combinations(case.items(), 2)
    }
    missing = [
        pair
        for pair in itertools.combinations(values, 2)
        if pair[0][0] != pair[1][0] and pair not in covered
    ]
    assert missing
    for pair in missing:
        assert not pairs.allowed(dict(pair))


@pytest.mark.full
def test_keras_refuses(float64):
    """What is left out as refused by Keras is so."""
    for pair in pairs.KERAS_REFUSES:
        with pytest.raises((ValueError, TypeError, IndexError)):
            pairs.stock(pairs.PLAIN | pair)


@pytest.mark.full
def test_refused_by_name(strategies, float64):
    for pair, words in pairs.REFUSED:
        case = pairs.PLAIN | pair
        with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
            pairs.run(case, strategies)
        assert "\n" not in str(error.value)


class Mixing(keras.layers.Layer):
    """Mixes rows, with statistics of a batch inside."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.norm = keras.layers.BatchNormalization(synchronized=True)

    def call(self, x, training=False):
        x = x - 0.5 * keras.ops.flip(x, 0)
        return self.norm(self.dense(x), training=training)


def _mixing_model():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(5),
            Mixing(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(
    "column", tiered(["mirrored_x3", "fsdp_x3"], ["mirrored_x3"])
)
def test_statistics_of_a_layer_that_is_computed_whole(
    column, strategies, float64
):
    """Replicas without an example have all rows too, and no gradient."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 5))
    given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    model = _mixing_model()
    model.fit(x, x[:, :2], **given)
    trainer = mgpu_tf.Trainer(_mixing_model, strategies[column])
    trainer.fit(x, x[:, :2], **given)
    for ours, theirs in zip(
        trainer.model.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@pytest.mark.full
def test_statistics_of_a_model_that_runs_eagerly(strategies, float64):
    case = {"layers": "batch_norm", "rows": "one", "run": "eagerly"}
    assert not pairs.compare(pairs.PLAIN | case, strategies)


def _moved(column, to):
    return pairs.PLAIN | {
        "column": column,
        "moves_to": to,
        "optimizer": "adam",
        "accumulate": "3",
        "loss": "two_outputs",
        "metric": "accuracy",
        "rows": "smaller",
        "interrupted": "moved",
    }


COLUMNS = pairs.AXES["column"]
MOVES = [(one, to) for one in COLUMNS for to in COLUMNS if one != to]


@pytest.mark.parametrize(
    ("column", "to"),
    tiered(MOVES, [("fsdp_x3", "tensor_x3"), ("tensor_x3", "mirrored_x3")]),
)
def test_a_run_moves_within_an_epoch_and_an_accumulation(
    column, to, strategies, float64
):
    assert not pairs.compare(_moved(column, to), strategies)
