import keras
import pytest

from mgpu_tf import optimizers
from mgpu_tf.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "kind", "rate"),
    [
        ("sgd", keras.optimizers.SGD, 0.1),
        ("momentum", keras.optimizers.SGD, 0.05),
        ("adam", keras.optimizers.Adam, 0.001),
        ("adamw", keras.optimizers.AdamW, 0.001),
        ("lamb", keras.optimizers.Lamb, 0.01),
        ("lars", optimizers.LARS, 1.0),
        ("lion", keras.optimizers.Lion, 0.0003),
    ],
)
def test_default_and_given_rate(name, kind, rate):
    optimizer = optimizers.create_optimizer(name)
    assert type(optimizer) is kind
    assert float(optimizer.learning_rate) == pytest.approx(rate)
    given = optimizers.create_optimizer(name, 0.25)
    assert float(given.learning_rate) == 0.25


def test_momentum_is_nesterov():
    optimizer = optimizers.create_optimizer("momentum")
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)


def test_refused():
    with pytest.raises(ConfigurationError, match="Did you mean 'adam'"):
        optimizers.create_optimizer("adm")
