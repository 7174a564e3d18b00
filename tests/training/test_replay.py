"""A replayed step: faults in data, model and hardware are told apart."""

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.training import replay as replay_lib

ROWS, SIZE = 48, 8
STEP = 5  # Of the six steps of an epoch; the fourth has a checkpoint.


class Logarithm(keras.layers.Layer):
    """A model's fault: the logarithm of numbers that may be 0."""

    def call(self, x):
        return keras.ops.log(keras.ops.abs(x))


def build(*inner):
    def make():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                *(layer() for layer in inner),
                keras.layers.Dense(5, name="first"),
                keras.layers.Dense(1, name="last"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    return make


def numbers():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return x, x[:, :1] + 0.1


class Flip(keras.callbacks.Callback):
    """Flips a bit of a weight after a step, as a device might."""

    def __init__(self, times):
        super().__init__()
        self._times = times

    def on_train_batch_end(self, batch, logs=None):
        if batch != STEP - 2 or not self._times:
            return
        self._times.pop()
        kernel = self.model.get_layer("first").kernel
        value = keras.ops.convert_to_numpy(kernel).copy()
        value.view("uint32").flat[3] ^= 1 << 20
        kernel.assign(value)


def fit(strategy, folder, data, model=None, flips=(), on_nan="ignore"):
    trainer = mgpu_tf.Trainer(
        model or build(), strategy, on_nan=on_nan, steps_per_execution=1
    )
    trainer.fit(
        *data,
        batch_size=SIZE,
        shuffle=False,
        verbose=0,
        callbacks=[Flip(list(flips))],
        checkpoint=mgpu_tf.SaveOptions(str(folder), save_every_steps=2),
    )


def told(monkeypatch, capsys, *arguments, step=STEP, **options):
    """Returns the status of a replay, and what it prints."""
    monkeypatch.setenv(replay_lib.STEP, str(step))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        fit(*arguments, **options)
    monkeypatch.delenv(replay_lib.STEP)
    return ended.value.code, capsys.readouterr().out


def test_data_model_and_hardware(strategies, tmp_path, monkeypatch, capsys):
    strategy = strategies["mirrored_x3"]

    def replayed(name, *arguments, **options):
        return told(
            *(monkeypatch, capsys, strategy, tmp_path / name),
            *arguments,
            **options,
        )

    good, (x, y) = numbers(), numbers()
    x[SIZE * (STEP - 1) + 4] = np.inf
    fit(strategy, tmp_path / "data", (x, y))
    status, text = replayed("data", (x, y))
    assert status == 1
    # Of the eight rows the second replica has 2, 3 and 4.
    assert text == (
        f"replay of step {STEP}: data (x, row 2 of replica 1, is not finite)\n"
    )
    # A healthy run, from which the bits of a weight differ afterwards.
    fit(strategy, tmp_path / "flip", good, flips=[1], on_nan="stop")
    status, text = replayed("flip", good)
    assert status == 1
    assert f"step {STEP}: hardware (the run had loss" in text
    status, text = replayed("flip", good, flips=[1])
    assert f"hardware (two repeats of step {STEP} have loss" in text
    fit(strategy, tmp_path / "good", good, on_nan="stop")
    assert replayed("good", good) == (
        0,
        f"replay of step {STEP}: no fault (two repeats have the same bits, "
        "all of them finite)\n",
    )


@pytest.mark.full
def test_a_model_at_fault(strategies, tmp_path, monkeypatch, capsys):
    strategy, (x, y) = strategies["mirrored_x3"], numbers()
    x[SIZE * (STEP - 1) + 4, 1] = 0.0
    model = build(lambda: Logarithm(name="log"))
    fit(strategy, tmp_path, (x, y), model)
    again = (monkeypatch, capsys, strategy, tmp_path, (x, y), model)
    status, text = told(*again)
    assert status == 1
    assert text == (
        f"replay of step {STEP}: model (the batch is finite; not finite "
        "first: the output of the layer 'log')\n"
    )


def test_a_replay_writes_nothing_and_needs_a_checkpoint(
    strategies, tmp_path, monkeypatch, capsys
):
    strategy, data = strategies["one_device"], numbers()
    monkeypatch.setenv(replay_lib.STEP, "1")
    with pytest.raises(ConfigurationError, match="of the steps: none") as error:
        fit(strategy, tmp_path / "none", data)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "none").exists()
    for wrong in ("0", "x", "-1"):
        monkeypatch.setenv(replay_lib.STEP, wrong)
        with pytest.raises(ConfigurationError, match="number of a step"):
            fit(strategy, tmp_path / "none", data)
