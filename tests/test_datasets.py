import multiprocessing

import numpy as np
import pytest
from sklearn.datasets import load_digits

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
