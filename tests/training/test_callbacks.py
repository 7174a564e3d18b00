"""Keras's callbacks on two real workers, against one device."""

import contextlib
import glob
import itertools
import os
import re
import sys

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.training.callbacks import ProgressLine, saving_together
from tests import clusters
from tests.jobs import callbacks

# They depend on which steps share an execution, or on rounding.
ON_THE_CLUSTER_ONLY = {"on_the_chief_only"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("callbacks"))


@pytest.fixture(scope="module")
def two_workers(folder):
    return clusters.run_jobs(callbacks, 2, folder)


@pytest.mark.parametrize("job", callbacks.JOBS)
def test_same_decisions(job, two_workers, strategies, tmp_path):
    first, second = two_workers[job]
    assert first == second
    if job in ON_THE_CLUSTER_ONLY:
        return
    alone = callbacks.JOBS[job](strategies["one_device"], str(tmp_path))
    for name in set(alone) - {"weights"}:
        if name in ("loss", "rate"):
            np.testing.assert_allclose(first[name], alone[name], rtol=1e-5)
        else:
            assert first[name] == alone[name], name


def test_decisions_were_taken(two_workers):
    stopped = two_workers["early_stopping"][0]
    assert 0 < stopped["stopped"] < 29
    assert stopped["epochs"] == stopped["stopped"] + 1
    assert two_workers["reduce_on_plateau"][0]["rate"] < 0.05
    assert two_workers["schedule"][0]["rate"] == pytest.approx(0.01)
    assert two_workers["backup_and_restore"][0]["epochs"] == 2
    assert two_workers["terminate_on_nan"][0]["epochs"] < 200
    calls = two_workers["of_lambda"][0]["calls"]
    epoch = [f"batch {b}" for b in range(4)]
    assert calls == [*epoch, "epoch 0", *epoch, "epoch 1"]
    for job in ("of_ones_own", "on_the_chief_only"):
        assert two_workers[job][0]["steps"] == 2


def test_files_are_of_the_chief_alone(two_workers, folder):
    for pattern in ("last-*.keras", "log-*.csv", "board-*"):
        [path] = glob.glob(os.path.join(folder, pattern))
        assert "-0" in os.path.basename(path)
    with open(os.path.join(folder, "log-0.csv")) as file:
        assert len(file.readlines()) == 6
    events = os.path.join(folder, "board-0", "**", "*.tfevents*")
    assert glob.glob(events, recursive=True)


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            lambda folder: keras.callbacks.TensorBoard(
                folder, histogram_freq=1
            ),
            "histogram_freq=1",
        ),
        (
            lambda folder: keras.callbacks.TensorBoard(
                folder, embeddings_freq=2
            ),
            "embeddings_freq=2",
        ),
        (keras.callbacks.BackupAndRestore, "checkpoint_dir"),
    ],
)
def test_who_reads_split_weights_alone_is_refused(callback, words, tmp_path):
    callback = callback(str(tmp_path))
    with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
        saving_together([callback], contextlib.nullcontext, is_chief=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_chief", [True, False])
def test_a_checkpoint_is_decided_everywhere_and_written_once(
    is_chief, tmp_path
):
    entered = []

    @contextlib.contextmanager
    def whole():
        entered.append(True)
        yield

    callback = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "{epoch}.keras"), monitor="loss", save_best_only=True
    )
    [together] = saving_together([callback], whole, is_chief=is_chief)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    together.set_model(model)
    for epoch, loss in enumerate([3.0, 5.0, 1.0]):
        together.on_epoch_begin(epoch)
        together.on_epoch_end(epoch, {"loss": loss})
    assert len(entered) == 2
    written = ["1.keras", "3.keras"] if is_chief else []
    assert sorted(os.listdir(tmp_path)) == written


def test_not_a_callback(strategies):
    trainer = mgpu_tf.Trainer(callbacks.build(), strategies["one_device"])
    for wrong in ([keras.callbacks.TerminateOnNaN], ["stop"], 3):
        with pytest.raises(mgpu_tf.ConfigurationError, match="callbacks must"):
            trainer.fit(*callbacks.numbers(), callbacks=wrong)


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_progress_line_leaves_out_what_is_in_the_logs(verbose, capsys):
    line = ProgressLine("staleness_")
    line.set_params({"verbose": verbose, "epochs": 2, "steps": 5})
    logs = {"loss": 0.5, "staleness_mean": 2.0, "val_loss": 0.25}
    line.on_epoch_begin(0)
    line.on_epoch_end(0, logs)
    shown = capsys.readouterr().out
    assert "loss: 0.5" in shown
    assert "val_loss: 0.25" in shown
    assert "staleness" not in shown
    assert "staleness_mean" in logs


@pytest.mark.parametrize(("columns", "rate"), [(80, False), (120, True)])
def test_the_progress_line_fits_the_terminal(
    columns, rate, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    counts = itertools.count(64, 64)
    line = ProgressLine("staleness_", lambda: next(counts))
    line.set_params({"verbose": 1, "epochs": 1, "steps": 125})
    line.on_epoch_begin(0)
    line.progbar.interval = 0.0
    for step in range(125):
        line.on_train_batch_end(step, {"accuracy": 0.0, "loss": 12345.0})
    shown = re.sub(r"\x1b\[\d+m|\x08", "", capsys.readouterr().out)
    _, *lines = shown.split("\r")
    assert len(lines) == 125
    assert max(map(len, lines)) < columns
    assert ("examples/s" in lines[-1]) == rate
    assert "━━━━" in lines[-1]


@pytest.mark.parametrize("own", [[], [keras.callbacks.ProgbarLogger()]])
def test_one_progress_line(own, strategies, capsys):
    trainer = mgpu_tf.Trainer(callbacks.build(), strategies["one_device"])
    data = callbacks.numbers()
    trainer.fit(*data, epochs=1, verbose=2, callbacks=own)
    assert capsys.readouterr().out.count("loss:") == 1
    trainer.fit(*data, epochs=1, verbose=0)
    assert capsys.readouterr().out == ""


class Sets(keras.callbacks.Callback):
    """Sets `trainable` of a layer at the beginning of an epoch."""

    def __init__(self, trainable_at):
        super().__init__()
        self._trainable_at = trainable_at

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = self._trainable_at(epoch)


def square(layers_trained=True):
    """Returns what builds layers whose weights have the same shapes."""

    def build():
        model = keras.Sequential(
            [keras.Input((4,)), *[keras.layers.Dense(4) for _ in range(3)]]
        )
        model.layers[0].trainable = layers_trained
        model.compile("adam", "mse")
        return model

    return build


@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3", "pipeline_x2"])
@pytest.mark.parametrize("trained", [True, False])
def test_what_is_trained_is_set_before_a_fit(trained, column, strategies):
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    fit = {"batch_size": 6, "verbose": 0, "shuffle": False}
    trainer = mgpu_tf.Trainer(square(trained), strategies[column])
    with pytest.raises(
        mgpu_tf.ConfigurationError, match=r"kernel, .* Set it in"
    ):
        trainer.fit(x, x, callbacks=[Sets(lambda epoch: not trained)], **fit)
    # As the message says.
    trainer = mgpu_tf.Trainer(square(trained), strategies[column])
    trainer.fit(x, x, **fit)
    trainer.model.layers[0].trainable = not trained
    with trainer.strategy.scope():
        trainer.model.compile("adam", "mse")
    before = np.array(trainer.model.layers[0].kernel)
    trainer.fit(x, x, **fit)
    after = np.array(trainer.model.layers[0].kernel)
    assert (before == after).all() == trained


def test_a_later_change_of_what_is_trained_waits_as_in_keras(strategies):
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    fit = {"batch_size": 6, "verbose": 0, "shuffle": False, "epochs": 3}
    kept = Sets(lambda epoch: epoch < 1)
    keras.utils.set_random_seed(0)
    theirs = square()().fit(x, x, callbacks=[kept], **fit)
    trainer = mgpu_tf.Trainer(square(), strategies["mirrored_x3"])
    ours = trainer.fit(x, x, callbacks=[kept], **fit)
    np.testing.assert_allclose(
        ours.history["loss"], theirs.history["loss"], rtol=1e-5
    )


def test_a_prediction_that_a_callback_ends(strategies):
    class Ends(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 1

    trainer = mgpu_tf.Trainer(square(), strategies["mirrored_x3"])
    x = np.ones((12, 4), "float32")
    assert len(trainer.predict(x, batch_size=3, callbacks=[Ends()])) == 6
    assert len(trainer.predict(x, batch_size=3)) == 12


def test_a_resumed_run_adds_to_the_file_of_a_logger(strategies, tmp_path):
    path = str(tmp_path / "log.csv")

    def fit(epochs, **options):
        log = keras.callbacks.CSVLogger(path, **options)
        folder = str(tmp_path / "run")
        callbacks.fit(
            strategies["one_device"], [log], epochs, checkpoint_dir=folder
        )
        assert log.append is options.get("append", False)
        with open(path) as file:
            return [line.partition(",")[0] for line in file]

    assert fit(1) == ["epoch", "0"]
    assert fit(2, append=True) == ["epoch", "0", "1"]
    assert fit(3) == ["epoch", "0", "1", "2"]
    assert fit(3) == ["epoch", "0", "1", "2"]
