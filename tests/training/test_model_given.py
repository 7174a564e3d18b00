"""A model that was made in `with strategy.scope():`, and other short words."""

import re

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.training import callbacks as callbacks_lib


def numbers():
    x = np.random.default_rng(3).normal(size=(40, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def compiled(rate=0.05):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate, clipnorm=0.1), "mse")
    return model


def made_in(strategy):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return compiled()


def trained(trainer):
    trainer.fit(*numbers(), batch_size=14, epochs=2, verbose=0, shuffle=False)
    return trainer.model.get_weights()


def test_the_weights_of_one_device(strategies, capsys):
    one = trained(mgpu_tf.Trainer(made_in(strategies["one_device"])))
    model = made_in(strategies["mirrored_x3"])
    trainer = mgpu_tf.Trainer(model)
    assert trainer.strategy is strategies["mirrored_x3"]
    assert trainer.model is model
    for a, b in zip(one, trained(trainer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    assert int(model.optimizer.iterations) == 6
    model.optimizer.learning_rate = 0.25
    assert float(model.optimizer.learning_rate) == 0.25
    # Said once, and not where a call is silent.
    assert capsys.readouterr().out == ""
    trainer.fit(*numbers(), batch_size=14, verbose=2)
    trainer.fit(*numbers(), batch_size=14, verbose=2)
    shown = capsys.readouterr().out
    assert len(re.findall(r" - examples/s: [\d,]+\n", shown)) == 2
    said = [x for x in shown.splitlines() if x.startswith("mgpu_tf: ")]
    assert said == [
        "mgpu_tf: mirrored on CPU:0 to CPU:2; 3 replicas, global batch 14, "
        "4 or 5 each"
    ]


def test_fsdp_is_told_by_its_name(strategies):
    strategy = mgpu_tf.create_strategy("fsdp", num_virtual_devices=2)
    assert mgpu_tf.strategies.registry.kind_of(strategy).name == "fsdp"
    assert "fsdp 2" in mgpu_tf.training.opening.what_runs(strategy, 8)


def test_one_word_for_the_chief():
    class Own(keras.callbacks.Callback):
        chief_only = True

    class Wandb(keras.callbacks.Callback):
        pass

    Wandb.__module__ = "wandb.integration.keras"
    both = keras.callbacks.LambdaCallback()
    kept = callbacks_lib.for_other_workers([Own(), Wandb(), both])
    assert kept == [both]


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_precision_in_one_word(precision, strategies):
    before = keras.config.dtype_policy().name
    trainer = mgpu_tf.Trainer(
        compiled, strategies["mirrored_x2"], precision=precision
    )
    assert keras.config.dtype_policy().name == before
    assert trainer.model.layers[-1].dtype_policy.name == precision
    assert trainer.model.layers[-1].dtype == "float32"
    scales = isinstance(
        trainer.model.optimizer, keras.optimizers.LossScaleOptimizer
    )
    assert scales is (precision == "mixed_float16")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda s: mgpu_tf.Trainer(made_in(s), s, precision="float32"),
            "precision is set before a model is built",
        ),
        (
            lambda s: mgpu_tf.Trainer(keras.Model, s),
            "build_model must be a function",
        ),
        (
            lambda s: mgpu_tf.Trainer(compiled, s, num_virtual_devices=2),
            "num_virtual_devices is an argument of create_strategy",
        ),
        (
            lambda s: mgpu_tf.Trainer(compiled, s, save_every_steps=2),
            "save_every_steps is an argument of SaveOptions",
        ),
        (
            lambda s: mgpu_tf.create_strategy(gpus=2),
            "Did you mean 'devices'",
        ),
        (
            lambda s: mgpu_tf.create_strategy(precision="float32"),
            "precision is an argument of Trainer",
        ),
    ],
)
def test_refused(make, words, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
        make(strategies["mirrored_x2"])
    assert "\n" not in str(error.value)
