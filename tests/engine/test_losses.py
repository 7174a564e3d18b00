"""Contributions of parts of a batch add up to the loss of the whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.author.step_scope import StepScope
from mgpu_tf.engine.step.losses import GlobalLoss

ROWS = 7
STEPS = 4


def model_with(reduction, masked=False):
    inputs = keras.Input((STEPS,), dtype="int32")
    hidden = keras.layers.Embedding(9, 3, mask_zero=masked)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    spec = (
        tf.TensorSpec([None, STEPS], tf.int32),
        tf.TensorSpec([None, STEPS, 2]),
        None,
    )
    keras_internals.build(model, spec)
    return model


def batch():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 4, size=[ROWS, STEPS])
    x[:, 0] = 1  # Not all masked out.
    y = generator.normal(size=[ROWS, STEPS, 2]).astype("float32")
    weight = generator.uniform(size=[ROWS, STEPS]).astype("float32")
    return x, y, weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "reduction",
    ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"],
)
def test_parts_add_up(reduction, masked, weighted):
    model = model_with(reduction, masked)
    x, y, weight = batch()
    weight = weight if weighted else None
    expected = float(model.compute_loss(x, y, model(x), weight))

    bounds = [(0, 0), (0, 1), (1, 6), (6, 7)]
    loss = GlobalLoss(model)
    whole = _local_sums(loss, model, x, y, weight)
    total = 0.0
    for low, high in bounds:
        share = _FixedSums(
            tf.constant(high - low, tf.int64),
            tf.constant(ROWS, tf.int64),
            len(bounds),
        )
        object.__setattr__(share, "queue", list(whole))
        part = None if weight is None else weight[low:high]
        contribution, [term] = loss(
            None, y[low:high], model(x[low:high]), part, [], share
        )
        assert float(contribution) == float(term)
        total += float(contribution)
    assert total == pytest.approx(expected, rel=1e-5)


class _FixedSums(BatchShare):
    """Answers each sum over replicas with that of the whole batch."""

    def sum_over_replicas(self, value):
        return self.queue.pop(0)


class _Recording(BatchShare):
    def sum_over_replicas(self, value):
        self.record.append(value)
        return value


def _local_sums(loss, model, x, y, weight):
    """What one replica with the whole batch gives to be summed."""
    rows = tf.constant(ROWS, tf.int64)
    share = _Recording(rows, rows, 2)
    object.__setattr__(share, "record", [])
    loss(None, y, model(x), weight, [], share)
    return share.record


def test_regularizers_and_added_losses_count_once():
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(
        1, kernel_regularizer=keras.regularizers.L2(0.5)
    )(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    keras_internals.build(
        model, (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]), None)
    )
    x, y = tf.ones([4, 3]), tf.zeros([4, 1])
    expected = float(model.compute_loss(x, y, model(x))) + 6.0
    loss = GlobalLoss(model)
    total = 0.0
    for low, high in [(0, 1), (1, 4)]:
        share = BatchShare(
            tf.constant(high - low, tf.int64), tf.constant(4, tf.int64), 2
        )

        total += float(
            _traced(loss, model, 6.0, share)(x[low:high], y[low:high])
        )
    assert total == pytest.approx(expected, rel=1e-6)


def test_empty_part_is_dropped():
    model = model_with("sum_over_batch_size")
    share = BatchShare(tf.constant(0, tf.int64), tf.constant(3, tf.int64), 2)
    x, y, _ = batch()
    loss = GlobalLoss(model)
    part = _traced(loss, model, float("nan"), share)
    assert float(part(x[:0], y[:0])) == 0.0


def _traced(loss, model, added, share):
    """The contribution of a part, computed in a graph as in a step."""

    @tf.function(autograph=False)
    def part(x, y):
        extra = [tf.constant(added)]
        with StepScope(model, [], None) as scope:
            scope.share, scope.state = share, ReplicaState(model, 2)
            return loss(None, y, model(x), None, extra, share)[0]

    return part
