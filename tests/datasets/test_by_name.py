import multiprocessing

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

import mgpu_tf
from mgpu_tf import datasets
from mgpu_tf.datasets.digits import Digits
from mgpu_tf.errors import ConfigurationError


def test_digits_are_scikit_learns(data_dir):
    splits = datasets.load("digits", data_dir)
    (train_x, train_y), (test_x, test_y) = splits.train, splits.test
    assert train_x.shape == (1437, 8, 8, 1)
    assert test_x.shape == (360, 8, 8, 1)
    assert splits.input_shape == (8, 8, 1)
    assert splits.num_classes == 10
    assert train_x.dtype == np.float32
    assert (train_x.min(), train_x.max()) == (0.0, 1.0)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    ours = np.concatenate([train_x, test_x]).reshape(-1, 64) * 16
    theirs = np.column_stack([images, labels])
    both = np.column_stack([ours, np.concatenate([train_y, test_y])])
    order = np.lexsort(both.T), np.lexsort(theirs.T)
    np.testing.assert_array_equal(both[order[0]], theirs[order[1]])


def test_kept_in_several_shards(data_dir):
    datasets.load("digits", data_dir)
    info = Digits(data_dir=data_dir).info
    assert info.splits["train"].num_shards == 4


def test_same_order_every_time(data_dir):
    first = datasets.load("digits", data_dir).train[1]
    np.testing.assert_array_equal(
        first, datasets.load("digits", data_dir).train[1]
    )


@pytest.mark.full
def test_processes_that_start_together(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = [("digits", str(tmp_path))] * 2
    with context.Pool(2) as pool:
        one, two = pool.starmap_async(datasets.load, arguments).get(600)
    np.testing.assert_array_equal(one.train[0], two.train[0])


def test_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="Did you mean 'digits'"):
        datasets.load("digit")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationError, match="can be written"):
        datasets.load("digits", str(blocked))


def test_table_is_learned_by_a_network_only(data_dir, strategies):
    splits = datasets.load("tabular", data_dir)
    (x, y), (x_test, y_test) = splits.train, splits.test
    assert x.shape == (8000, 20)
    assert x_test.shape == (2000, 20)
    assert sorted(np.unique(y)) == list(range(10))

    def build(*hidden):
        model = keras.Sequential(
            [keras.Input((20,)), *hidden, keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.Adam(0.005),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    accuracies = []
    for hidden in ([], [keras.layers.Dense(256, activation="relu")]):
        trainer = mgpu_tf.Trainer(
            lambda hidden=hidden: build(*hidden), strategies["one_device"]
        )
        trainer.fit(x, y, batch_size=100, epochs=8, verbose=0)
        accuracies.append(trainer.evaluate(x_test, y_test, verbose=0)[1])
    linear, network = accuracies
    assert network > 0.85
    assert linear < network - 0.1


def test_images_stream_in_one_order(data_dir):
    streams = datasets.load("images/16", data_dir, seed=3)
    assert streams.input_shape == (16, 16, 3)
    assert streams.num_classes == 10
    first = [y.numpy() for _, y in streams.training(300)["x"].take(2)]
    again = datasets.load("images/16", data_dir, seed=3)
    for one, two in zip(first, again.training(300)["x"], strict=False):
        np.testing.assert_array_equal(one, two[1])
    other = datasets.load("images/16", data_dir, seed=4)
    [(x, y)] = other.training(300)["x"].take(1)
    assert (y.numpy() != first[0]).any()
    assert 0 <= x.numpy().min() < x.numpy().max() <= 1
    assert sum(len(y) for _, y in streams.testing(100)["x"]) == 256


def test_workers_read_their_own_files(data_dir):
    streams = datasets.load("images/16", data_dir, deterministic=False)
    shard = streams.training(64)["x"]
    seen = []
    for worker in range(2):
        context = tf.distribute.InputContext(2, worker, 2)
        batches = [x.numpy() for x, _ in shard(context)]
        assert max(map(len, batches)) == 32
        seen.append({image.tobytes() for b in batches for image in b})
    assert len(seen[0] | seen[1]) == 1024
    assert not seen[0] & seen[1]
    with pytest.raises(ConfigurationError, match="8 files for 9 workers"):
        shard(tf.distribute.InputContext(9, 0, 9))
    with pytest.raises(ConfigurationError, match="64 for 3 replicas"):
        shard(tf.distribute.InputContext(3, 0, 3))


def test_set_of_tfds_that_is_there(tmp_path):
    """Any set that TFDS has prepared is found by its name."""
    Digits(data_dir=str(tmp_path)).download_and_prepare()
    (tmp_path / "digits").rename(tmp_path / "figures")
    info = next(tmp_path.glob("figures/*/dataset_info.json"))
    info.write_text(info.read_text().replace('"digits"', '"figures"'))
    for part in info.parent.glob("digits-*"):
        part.rename(info.parent / part.name.replace("digits", "figures"))
    streams = datasets.load("figures", str(tmp_path))
    assert streams.input_shape == (8, 8, 1)
    assert sum(len(y) for _, y in streams.testing(100)["x"]) == 360


def test_set_of_tfds_that_cannot_be_had(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(
        tfds.core.DatasetBuilder, "download_and_prepare", unreachable
    )
    with pytest.raises(ConfigurationError, match="tfds build") as raised:
        datasets.load("mnist", str(tmp_path))
    assert "no route to host" in str(raised.value)
    assert "\n" not in str(raised.value)
