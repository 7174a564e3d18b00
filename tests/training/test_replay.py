"""A replayed step: faults in data, model and hardware are told apart."""

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.job import REPLAY
from tests.tiers import tiered

ROWS, SIZE = 48, 8
STEP = 5  # Of the six steps of an epoch; every second has a checkpoint.


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
        # A replay gives callbacks back what they were, but no iterator.
        self._times = iter(times)

    def on_train_batch_end(self, batch, logs=None):
        if batch != STEP - 1 or next(self._times, None) is None:
            return
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
    monkeypatch.setenv(REPLAY, str(step))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        fit(*arguments, **options)
    monkeypatch.delenv(REPLAY)
    return ended.value.code, capsys.readouterr().out


@pytest.mark.full
def test_data_at_fault(strategies, tmp_path, monkeypatch, capsys):
    strategy, (x, y) = strategies["mirrored_x3"], numbers()
    x[SIZE * (STEP - 1) + 4] = np.inf
    fit(strategy, tmp_path, (x, y))
    files = sorted(str(path) for path in tmp_path.rglob("*"))
    status, text = told(monkeypatch, capsys, strategy, tmp_path, (x, y))
    assert status == 1
    # Of the eight rows the second replica has 2, 3 and 4.
    assert text == (
        f"replay of step {STEP}: data (x, row 2 of replica 1, is not finite)\n"
    )
    assert sorted(str(path) for path in tmp_path.rglob("*")) == files


@pytest.mark.parametrize(
    ("flips", "again", "words"),
    tiered(
        [
            (1, 0, f"{STEP + 1}: hardware (the run had loss "),
            (0, 1, f"{STEP + 1}: hardware (two repeats of step {STEP + 1} "),
            (
                *(0, 0),
                f"{STEP + 1}: no fault (two repeats have the same bits, all "
                "of them finite)\n",
            ),
        ],
        [(1, 0, f"{STEP + 1}: hardware (the run had loss ")],
    ),
)
def test_hardware_at_fault(
    flips, again, words, strategies, tmp_path, monkeypatch, capsys
):
    strategy, data = strategies["one_device"], numbers()
    fit(strategy, tmp_path, data, flips=[1] * flips, on_nan="stop")
    status, text = told(
        *(monkeypatch, capsys, strategy, tmp_path, data),
        step=STEP + 1,
        flips=[1] * again,
    )
    assert text.startswith(f"replay of step {words}")
    assert status == (1 if flips or again else 0)


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
    monkeypatch.setenv(REPLAY, "1")
    with pytest.raises(ConfigurationError, match="of the steps: none") as error:
        fit(strategy, tmp_path / "none", data)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "none").exists()
    for wrong in ("0", "x", "-1"):
        monkeypatch.setenv(REPLAY, wrong)
        with pytest.raises(ConfigurationError, match="number of a step"):
            fit(strategy, tmp_path / "none", data)
