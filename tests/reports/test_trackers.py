"""Trackers against the real packages, offline, with a run that resumes."""

import glob
import pathlib
import re

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.reports import trackers


def numbers():
    x = np.random.default_rng(3).normal(size=(24, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def fit_and_resume(make, strategies, tmp_path):
    """Two processes' worth: a new trainer and tracker go on after epoch 2."""
    found = []
    for epochs in (2, 3):
        tracker = make()
        mgpu_tf.Trainer(build, strategies["mirrored_x2"]).fit(
            *numbers(),
            batch_size=8,
            epochs=epochs,
            verbose=0,
            callbacks=[tracker],
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        found.append(tracker.run_id)
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mlflow_goes_on_with_its_run(strategies, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    # A database needs packages that a client of a server has no use for.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    one, other = fit_and_resume(
        lambda: mgpu_tf.MLflowTracker("digits", uri), strategies, tmp_path
    )
    assert one == other
    client = mlflow.MlflowClient(uri)
    assert client.get_run(one).info.status == "FINISHED"
    for name in ("loss", "mae", "examples_per_second", "goodput"):
        history = client.get_metric_history(one, name)
        assert [value.step for value in history] == [1, 2, 3], name


@pytest.mark.full
def test_wandb_goes_on_with_its_run(strategies, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    one, other = fit_and_resume(
        lambda: mgpu_tf.WandbTracker(
            "digits", mode="offline", dir=str(tmp_path)
        ),
        strategies,
        tmp_path,
    )
    assert one == other
    files = glob.glob(f"{tmp_path}/wandb/offline-run-*-{one}/run-{one}.wandb")
    assert len(files) >= 1
    kept = b"".join(pathlib.Path(path).read_bytes() for path in files)
    assert b"examples_per_second" in kept


def test_files_by_name(strategies, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mgpu_tf.Trainer(build, strategies["one_device"]).fit(
        *numbers(),
        batch_size=8,
        verbose=0,
        log_with=["tensorboard", "prometheus"],
    )
    assert glob.glob(f"{tmp_path}/runs/tensorboard/events*")
    text = (tmp_path / "runs" / "run.prom").read_text()
    assert re.search(r'^mgpu_tf_loss\{run="mgpu_tf"\} \d', text, re.M)
    assert 'mgpu_tf_epoch{run="mgpu_tf"} 1.0\n' in text
    assert text.count("# TYPE") == text.count("\n") / 2


def test_unknown():
    with pytest.raises(
        mgpu_tf.ConfigurationError, match="Did you mean 'tensorboard'"
    ):
        trackers.by_name("tensorbord")
    with pytest.raises(mgpu_tf.ConfigurationError, match="Unknown tracker"):
        mgpu_tf.RunConfig(log_with="wandb,b")


def test_chief_alone():
    from mgpu_tf.training.callbacks import for_other_workers

    assert for_other_workers([trackers.PrometheusTracker("a.prom")]) == []
