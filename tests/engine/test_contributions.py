"""What an author declares adds up to the mean or the sum of the batch."""

import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.author import contributions
from mgpu_tf.engine.row_proof import SUM, RowProof, noting

ROWS = 7
VALUES = np.random.default_rng(0).normal(size=(ROWS, 3))
WEIGHTS = np.random.default_rng(1).uniform(size=ROWS)
BOUNDS = {
    "mirrored_x2": [(0, 2), (2, 7)],
    "mirrored_x3": [(0, 0), (0, 1), (1, 7)],
}


def sum_of_parts(strategy, bounds, function):
    """The sum over replicas of what a function makes of their rows."""

    def replica():
        context = tf.distribute.get_replica_context()
        mine = tf.gather(bounds, context.replica_id_in_sync_group)
        low, high = tf.unstack(tf.cast(mine, tf.int64))
        total = tf.constant(ROWS, tf.int64)
        share = contributions.BatchShare(high - low, total, len(bounds))
        proof = RowProof()
        with contributions.sharing(share), noting(proof):
            values, weights = tf.constant(VALUES), tf.constant(WEIGHTS)
            value = function(values[low:high], weights[low:high])
        assert proof.of(value) == SUM
        return value

    @tf.function(autograph=False)
    def run():
        return strategy.reduce("SUM", strategy.run(replica), axis=None)

    return float(run())


@pytest.mark.parametrize("column", BOUNDS)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda v, w: mgpu_tf.mean_over_batch(v), VALUES.mean()),
        (lambda v, w: mgpu_tf.sum_over_batch(v), VALUES.sum()),
        (
            lambda v, w: mgpu_tf.mean_over_batch(v[:, 0], weights=w),
            np.average(VALUES[:, 0], weights=WEIGHTS),
        ),
        (
            lambda v, w: mgpu_tf.mean_over_batch(v, weights=w),
            np.average(VALUES.mean(1), weights=WEIGHTS),
        ),
    ],
)
def test_parts_add_up(column, function, expected, strategies):
    total = sum_of_parts(strategies[column], BOUNDS[column], function)
    assert total == pytest.approx(expected, rel=1e-14)
    # Outside of a step: the plain mean and sum.
    plain = function(VALUES, WEIGHTS)
    assert float(plain) == pytest.approx(expected, rel=1e-14)


def test_scalar_is_refused():
    with pytest.raises(mgpu_tf.ConfigurationError, match="one row for each"):
        mgpu_tf.mean_over_batch(1.0)


def test_other_number_of_rows_is_refused(strategies):
    with pytest.raises(tf.errors.InvalidArgumentError, match="of rows"):
        sum_of_parts(
            strategies["mirrored_x2"],
            BOUNDS["mirrored_x2"],
            lambda v, w: mgpu_tf.sum_over_batch(tf.concat([v, v], 0)),
        )
