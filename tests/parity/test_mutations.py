"""The matrix can fail: each fault planted here makes a named case red."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.losses import BatchShare, _Term
from mgpu_tf.engine.update import Update
from tests.parity import cases
from tests.parity.test_one_machine import stock


def difference(name, strategy):
    """The largest difference of weights or losses; NaN where one is NaN."""
    result = cases.run(cases.CASES[name], strategy)
    expected = stock(name, "float64")
    return np.max(
        [result.largest_difference(expected), result.loss_difference(expected)]
    )


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clip_before_reduce(clip, strategies, float64, monkeypatch):
    """Keras's own order: clip what the replica has, then sum."""
    monkeypatch.setattr(Update, "_sum", lambda self, gradients: gradients)
    monkeypatch.setattr(
        keras_internals,
        "engine_order",
        lambda optimizer: contextlib.nullcontext(),
    )
    assert difference(f"sgd/{clip}", strategies["mirrored_x2"]) > 1e-3


def test_mean_of_means(strategies, float64, monkeypatch):
    """Keras's own denominator: the replica's count, times the replicas."""

    def local_denominator(self, values, weights, y_pred, share):
        count = tf.cast(tf.size(values), values.dtype)
        return count * share.replicas

    monkeypatch.setattr(_Term, "_denominator", local_denominator)
    name = "sgd/uneven"
    assert difference(name, strategies["mirrored_x2"]) > 1e-4


def test_empty_replica_multiplied(strategies, float64, monkeypatch):
    """What an empty replica computes must be dropped, not weighted by 0."""
    monkeypatch.setattr(BatchShare, "select", lambda self, held, empty: held)
    name = "sgd/add_loss_empty_replica"
    assert not difference(name, strategies["mirrored_x2"]) < 1e-9
