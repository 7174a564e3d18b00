"""The line that says what runs where."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import data
from mgpu_tf.training import opening


@pytest.mark.parametrize(
    ("column", "batch", "line"),
    [
        ("one_device", 64, "one_device on CPU:0; 1 replica, batch 64"),
        (
            "mirrored_x2",
            64,
            "mirrored on CPU:0 and CPU:1; 2 replicas, global batch 64, 32 each",
        ),
        (
            "mirrored_x3",
            None,
            "mirrored on CPU:0 to CPU:2; 3 replicas, global batches as the "
            "data has them",
        ),
        (
            "fsdp_x3",
            7,
            "model_parallel on CPU:0 to CPU:2; fsdp 3, 3 replicas, global "
            "batch 7, 2 or 3 each",
        ),
    ],
)
def test_a_line(column, batch, line, strategies):
    assert opening.what_runs(strategies[column], batch) == line


def test_shares(strategies):
    strategy = mgpu_tf.create_mirrored_strategy(
        num_virtual_devices=2, balance="2,1"
    )
    assert opening.what_runs(strategy, 9).endswith("global batch 9, shares 2,1")


def test_the_batch_size(strategies):
    one = strategies["one_device"]
    dataset = tf.data.Dataset.range(8).map(lambda x: x[None]).batch(4)
    assert opening.batch_size_of(data.as_source(dataset, strategy=one)) is None
    rows = data.as_source(np.zeros([9, 2]), batch_size=4, strategy=one)
    assert opening.batch_size_of(rows) == 4


def test_normalization_by_replicas():
    def model(**options):
        return keras.Sequential(
            [keras.Input((2,)), keras.layers.BatchNormalization(**options)]
        )

    assert opening.of_normalization(model(), 1) == ""
    assert opening.of_normalization(model(synchronized=True), 2) == ""
    told = opening.of_normalization(model(), 2)
    assert told.startswith("1 BatchNormalization layer normalized by each")
    assert told.endswith('Trainer(..., batch_normalization="synchronized")')
