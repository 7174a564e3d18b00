"""What the reader makes of small traced functions."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.reading import Reader, Unreadable

ROWS = 7
BOUNDS = [(0, 2), (2, 3), (3, 7)]
X = np.random.default_rng(0).uniform(0.5, 2.0, size=(ROWS, 3))
Y = np.random.default_rng(1).uniform(0.5, 2.0, size=(ROWS, 3))


def count(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


def many(x):
    """A sum as long as that of the losses of a deep model."""
    return sum([tf.reduce_mean(x * i) for i in range(400)])


MEANS_AND_SUMS = {
    "mean": lambda x, y: tf.reduce_mean(x * y),
    "keras_mean": lambda x, y: keras.ops.mean(keras.ops.square(x - y)),
    "sum": lambda x, y: tf.reduce_sum(tf.square(x)),
    "constant": lambda x, y: tf.constant(0.3, tf.float64),
    "sum_and_constant": lambda x, y: tf.reduce_sum(x) + 0.3,
    "mean_and_sum": lambda x, y: 2.0 * tf.reduce_mean(x) - tf.reduce_sum(y),
    "sum_of_list": lambda x, y: keras.ops.sum(
        [keras.ops.mean(x), keras.ops.sum(y)]
    ),
    "scaled": lambda x, y: -tf.reduce_mean(x) / 3.0,
    "sum_by_count": lambda x, y: tf.reduce_sum(x) / count(x),
    "rows_by_count": lambda x, y: tf.reduce_sum(x / count(x)),
    "sum_by_size": lambda x, y: tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype),
    "sum_by_product_of_shape": lambda x, y: (
        tf.reduce_sum(x)
        / keras.ops.cast(keras.ops.prod(keras.ops.shape(x)), x.dtype)
    ),
    "sum_by_count_of_one_or_more": lambda x, y: (
        tf.reduce_sum(x) / tf.maximum(count(x), 1.0)
    ),
    "mean_by_count": lambda x, y: tf.reduce_mean(x) * count(x),
    "sum_by_count_twice": lambda x, y: tf.reduce_sum(x) * count(x),
    "count": lambda x, y: count(y),
    "not_the_rows": lambda x, y: (
        tf.reduce_sum(x) / tf.cast(tf.shape(x)[1], x.dtype)
    ),
    "by_steps": lambda x, y: tf.reduce_mean(tf.reduce_sum(x, 1)),
    "over_rows_first": lambda x, y: tf.reduce_sum(tf.reduce_mean(x, 0)),
    "flattened": lambda x, y: tf.reduce_mean(tf.reshape(x, [-1])),
    "two_means": lambda x, y: tf.reduce_sum(x + tf.reduce_mean(y)),
    "l2": lambda x, y: tf.nn.l2_loss(x),
    "network": lambda x, y: tf.reduce_mean(
        tf.nn.softmax(tf.matmul(tf.tanh(x), np.ones((3, 2))))[:, 0]
    ),
    "average": lambda x, y: tf.nn.compute_average_loss(
        tf.reduce_sum(x, 1), global_batch_size=tf.shape(x)[0]
    ),
    "keras_loss": lambda x, y: keras.losses.MeanSquaredError(dtype="float64")(
        y, x
    ),
    "keras_sum": lambda x, y: keras.losses.Huber(
        reduction="sum", dtype="float64"
    )(y, x),
    "flattened_and_back": lambda x, y: tf.reduce_sum(
        tf.reshape(tf.reshape(x, [-1]) * 2.0, tf.shape(y))
    ),
    "crossentropy": lambda x, y: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(y > 1, tf.int32), tf.stack([x, y], -1)
        )
    ),
    "long": lambda x, y: many(x),
    "dense_over_steps": lambda x, y: tf.reduce_mean(
        tf.tensordot(tf.stack([x, y], 1), np.ones((3, 2)), 1)
    ),
    "product_over_rows": lambda x, y: tf.reduce_sum(
        tf.matmul(x, y, transpose_a=True)
    ),
    "transposed_product": lambda x, y: tf.reduce_mean(
        tf.matmul(tf.transpose(x), y) + 0.1 * tf.reduce_mean(x)
    ),
}

NOT = {
    "log": (lambda x, y: tf.math.log(tf.reduce_sum(x)), "Log"),
    "square": (lambda x, y: tf.square(tf.reduce_mean(x)), "Square"),
    "product": (lambda x, y: tf.reduce_sum(x) * tf.reduce_sum(y), "Mul"),
    "ratio": (lambda x, y: tf.reduce_sum(x) / tf.reduce_sum(y), "RealDiv"),
    "maximum": (lambda x, y: tf.reduce_max(x), "Max"),
    "variance": (lambda x, y: tf.math.reduce_variance(x), ""),
    "pairs": (lambda x, y: tf.reduce_mean(tf.matmul(x, y, False, True)), ""),
    "pairs_by_axis": (
        lambda x, y: tf.reduce_mean(tf.square(x[:, None] - y[None])),
        "",
    ),
    "pairs_by_transposing": (
        lambda x, y: tf.reduce_mean(tf.square(x[:, :1] - tf.transpose(y)[:1])),
        "",
    ),
    "pairs_by_broadcast": (
        lambda x, y: tf.reduce_mean(tf.square(x[:, :1] - y[:, 0])),
        "",
    ),
    "some_rows": (lambda x, y: tf.reduce_sum(x[::2]), ""),
    "neighbours": (lambda x, y: tf.reduce_mean(x[1:] * x[:-1]), ""),
    "selected": (
        lambda x, y: tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 1)),
        "",
    ),
    "joined": (lambda x, y: tf.reduce_mean(tf.reshape(x, [-1, 2, 3])), ""),
    "another_axis": (lambda x, y: tf.reduce_sum(tf.expand_dims(x, 0)), ""),
    "both": (lambda x, y: tf.reduce_mean(tf.concat([x, y], 0)), ""),
}


def on_parts(function, bounds):
    """What each part of the rows gives."""

    @tf.function(autograph=False, reduce_retracing=True)
    def part(x, y, local):
        share = BatchShare(local, tf.constant(ROWS, tf.int64), len(bounds))
        return Reader([x, y]).contribution(function(x, y), share)

    rows = tf.TensorSpec([None, 3], tf.float64)
    part = part.get_concrete_function(rows, rows, tf.TensorSpec([], tf.int64))
    return [
        float(
            part(
                tf.constant(X[low:high]),
                tf.constant(Y[low:high]),
                tf.constant(high - low, tf.int64),
            )
        )
        for low, high in bounds
    ]


@pytest.mark.parametrize("name", MEANS_AND_SUMS)
def test_parts_add_up(name):
    function = MEANS_AND_SUMS[name]
    expected = float(function(tf.constant(X), tf.constant(Y)))
    assert sum(on_parts(function, BOUNDS)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", NOT)
def test_is_never_guessed(name):
    function, operation = NOT[name]
    with pytest.raises(Unreadable) as error:
        on_parts(function, BOUNDS)
    assert operation in str(error.value)


ADDED_TO_STATE = {
    "sum": (lambda held, x: held + tf.reduce_sum(x), X.sum()),
    "mean_of_a_loss": (lambda held, x: held + tf.reduce_mean(x), X.mean()),
    "step": (lambda held, x: held + 1.0, 1.0),
    "twice": (lambda held, x: held + 1.0 + tf.reduce_mean(x), 1.0 + X.mean()),
}


def after_a_step(function, dtype, strategy):
    """What replicas with parts of the rows hold together, from 2 each."""

    def replica():
        held = tf.constant(2, dtype)
        context = tf.distribute.get_replica_context()
        mine = tf.gather(BOUNDS, context.replica_id_in_sync_group)
        low, high = tf.unstack(tf.cast(mine, tf.int64))
        x = tf.compat.v1.placeholder_with_default(
            tf.constant(X)[low:high], [None, 3]
        )
        share = BatchShare(high - low, tf.constant(ROWS, tf.int64), len(BOUNDS))
        return Reader([x]).contribution(function(held, x), share, state=held)

    @tf.function(autograph=False)
    def run():
        return strategy.reduce("SUM", strategy.run(replica), axis=None)

    return run().numpy()


@pytest.mark.parametrize("name", ADDED_TO_STATE)
def test_increments_of_a_state_add_up(name, strategies):
    function, increment = ADDED_TO_STATE[name]
    total = after_a_step(function, tf.float64, strategies["mirrored_x3"])
    # What each replica held stays.
    assert total == pytest.approx(3 * 2 + increment, rel=1e-13)


def test_a_count_of_steps_is_counted_by_one_replica(strategies):
    total = after_a_step(
        lambda held, x: held + 1, tf.int32, strategies["mirrored_x3"]
    )
    assert total == 3 * 2 + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda held, x: tf.maximum(held, tf.reduce_max(x)),
        lambda held, x: held * tf.reduce_mean(x),
        lambda held, x: tf.sqrt(held) + tf.reduce_mean(x),
    ],
)
def test_other_functions_of_a_state(function, strategies):
    with pytest.raises(Unreadable):
        after_a_step(function, tf.float64, strategies["mirrored_x3"])


def test_rows_behind_rows_are_read_where_it_is_said():
    """As in a GAN: what is made and what is real, with a label for each."""

    @tf.function
    def parts(x, y):
        both = tf.concat([x, y], 0)
        rows = tf.shape(x)[:1]
        labels = tf.concat([tf.ones(rows), tf.zeros(rows)], 0)
        loss = tf.reduce_mean(tf.cast(labels, x.dtype)[:, None] * both)
        share = BatchShare(
            tf.shape(x, out_type=tf.int64)[0], tf.constant(7, tf.int64), 2
        )
        reader = Reader([x, y, share.local], blocks=True)
        return reader.contribution(loss, share)

    spec = tf.TensorSpec([None, 3], tf.float64)
    parts = parts.get_concrete_function(spec, spec)
    added = sum(
        parts(tf.constant(X[low:high]), tf.constant(Y[low:high]))
        for low, high in BOUNDS
    )
    assert float(added) == pytest.approx(X.sum() / (2 * X.size), rel=1e-13)
