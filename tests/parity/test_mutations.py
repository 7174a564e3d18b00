"""The matrix can fail: each fault planted here turns a named row red."""

import contextlib

import pytest
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author import state
from mgpu_tf.engine.author.rules import Rule
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.exchange.reduction import Reduction
from mgpu_tf.engine.random_rows import scope
from mgpu_tf.engine.step import replica_step as step
from mgpu_tf.engine.step.losses import BatchShare, _Term
from mgpu_tf.engine.step.update import Update
from mgpu_tf.strategies.replicas.topology import LocalReplicas
from tests.parity import cases, judge
from tests.tiers import tiered


def clip_before_reduce(patch):
    """Keras's own order: clip what the replica has, then sum."""
    patch.setattr(Reduction, "__call__", lambda self, gradients: gradients)
    patch.setattr(
        keras_internals, "engine_order", lambda _: contextlib.nullcontext()
    )


def mean_of_means(patch):
    """Keras's own denominator: the replica's count, times the replicas."""
    patch.setattr(
        _Term,
        "_denominator",
        lambda self, values, weights, y_pred, share: tf.cast(
            tf.size(values) * share.replicas, values.dtype
        ),
    )


def no_reduction(patch):
    patch.setattr(Reduction, "__call__", lambda self, gradients: gradients)


def mean_reduction(patch):
    def mean(self, gradients):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("mean", gradients)

    patch.setattr(Reduction, "__call__", mean)


def empty_replica_weighted(patch):
    """Multiplied by 0, NaN stays NaN."""
    patch.setattr(BatchShare, "select", lambda self, held, empty: held)


def local_weight_sum(patch):
    patch.setattr(
        BatchShare,
        "sum_over_replicas",
        lambda self, value: value * self.replicas,
    )


def regularizers_on_each_replica(patch):
    patch.setattr(
        BatchShare, "fraction", lambda self, dtype: tf.ones([], dtype)
    )


def lost_metric(patch):
    """Metrics of the first replica only."""
    patch.setattr(state, "sum_tensors", lambda values, total: values)


def first_rows_drawn(patch):
    """Every replica draws what one device draws for the first rows."""
    original = scope.RowScope.__init__

    def begin(self, low, *args, **options):
        original(self, tf.zeros_like(low), *args, **options)

    patch.setattr(scope.RowScope, "__init__", begin)


def draws_cut_nowhere(patch):
    """No draw has rows."""
    patch.setattr(scope.RowScope, "rows_of", lambda self, shape: None)


def own_seeds_of_replicas(patch):
    patch.setattr(
        ReplicaState,
        "draws_alike",
        property(lambda self: False, lambda self, value: None),
        raising=False,
    )


def accumulate_over_each_other(patch):
    patch.setattr(Update, "_add", lambda self, gradients: None)


def sum_of_micro_steps(patch):
    """The sum over micro-steps where Keras takes the mean."""
    original = Update._take

    def take(self, gradients):
        every = self._every
        return [g * every for g in original(self, gradients)]

    patch.setattr(Update, "_take", take)


def no_finite_check(patch):
    patch.setattr(Update, "_finite", lambda self, gradients: tf.constant(True))


def scale_kept_after_overflow(patch):
    patch.setattr(keras_internals, "shrink_scale", lambda scaler: None)


def scale_not_taken_out(patch):
    patch.setattr(Update, "_unscale", lambda self, gradients: gradients)


def average_not_written(patch):
    patch.setattr(keras_internals, "overwrite", lambda optimizer: None)


def average_not_updated(patch):
    patch.setattr(keras_internals, "update_averages", lambda optimizer: None)


def rows_dealt_twice(patch):
    """Every replica reads the whole batch."""
    patch.setattr(
        LocalReplicas, "rows_of", lambda self, size, replica: (0, size)
    )


def last_rows_dropped(patch):
    """A share of equal parts, the remainder left out."""

    def bounds(self, size, replica):
        part = size // self.total
        return (self.first + replica) * part, (self.first + replica + 1) * part

    patch.setattr(LocalReplicas, "rows_of", bounds)


def batch_statistics_left_on_replicas(patch):
    """The moving statistics of an empty replica stay behind."""

    def rule(self, variable, *_):
        return Rule.SUM if self.is_metric(variable) else Rule.MEAN

    patch.setattr(ReplicaState, "read_rule", rule)


def loss_mean_over_batches(patch):
    """The epoch's loss as a mean over batches, not over examples."""

    def increments(mean, value, share):
        one = tf.ones([], mean.count.dtype)
        part = tf.cast(share.fraction(mean.count.dtype), mean.count.dtype)
        total = tf.cast(tf.stop_gradient(value), mean.total.dtype)
        return [(mean.total, total), (mean.count, part * one)]

    patch.setattr(step, "mean_increments", increments)


MUTATIONS = [
    (clip_before_reduce, "sgd_clipnorm"),
    (clip_before_reduce, "sgd_global_clipnorm"),
    (clip_before_reduce, "sgd_clipvalue"),
    (mean_of_means, "sgd"),
    (no_reduction, "sgd"),
    (mean_reduction, "momentum"),
    (empty_replica_weighted, "add_loss_empty_replica"),
    (local_weight_sum, "weighted_mean"),
    (local_weight_sum, "mask"),
    (regularizers_on_each_replica, "sgd"),
    (lost_metric, "auc"),
    (accumulate_over_each_other, "accumulation_2"),
    (sum_of_micro_steps, "accumulation_3_uneven"),
    (no_finite_check, "loss_scale_overflow"),
    (scale_kept_after_overflow, "loss_scale_overflow"),
    (scale_not_taken_out, "loss_scale_overflow"),
    (average_not_written, "ema_overwrite"),
    (average_not_updated, "ema"),
    (rows_dealt_twice, "sgd"),
    (last_rows_dropped, "sgd"),
    (batch_statistics_left_on_replicas, "batch_norm_synchronized_empty"),
    (loss_mean_over_batches, "sgd"),
    (first_rows_drawn, "dropout"),
    (draws_cut_nowhere, "augmentation"),
    (own_seeds_of_replicas, "dropout"),
]


# Of each part of the engine one; `make mutations` plants faults in its files.
FULL = [
    (mean_of_means, "sgd"),
    (clip_before_reduce, "sgd_global_clipnorm"),
    (lost_metric, "auc"),
    (first_rows_drawn, "dropout"),
]


@pytest.mark.parametrize(("plant", "name"), tiered(MUTATIONS, [], FULL))
def test_row_turns_red(plant, name, strategies, floatx_of, monkeypatch):
    floatx_of(cases.CASES[name])
    judge.expected(name)
    floatx_of(cases.CASES[name])
    plant(monkeypatch)
    try:
        result = cases.run(cases.CASES[name], strategies["mirrored_x2"])
    except AssertionError:
        return  # The examples were not seen once each.
    holds, difference = judge.verdict(name, result)
    assert not holds, difference
