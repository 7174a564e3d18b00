"""Replicas draw their rows of what one device draws, bit for bit."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.random_rows import (
    rows_of_global_draws,
    scope,
    seed_for_rows,
)
from mgpu_tf.engine.random_rows.dimensions import (
    Dimension,
    Follows,
    RowDimensions,
)
from mgpu_tf.engine.row_proof import RowProof, Rows, note_drawn, proving
from tests.tiers import full, tiered

B = 13
# Ranges that divide nothing, one of them empty.
CUTS = ((0, 5), (5, 9), (9, 9), (9, B))

shape_of = keras.ops.shape
draw = keras.random


class Holder(keras.Model):
    """Holds the generator that a test draws from."""

    def __init__(self):
        super().__init__()
        self.seeds = draw.SeedGenerator(7)


def whole_and_parts(make, row, dtype="float32", jit=False):
    """What one device makes of all rows, and replicas of theirs together.

    Args:
        make: A function of rows and a seed.
        row: The shape of a row.
        dtype: The type of the rows.
        jit: Whether XLA compiles it.
    """
    x = np.random.default_rng(0).normal(size=(B, *row)).astype(dtype)
    holder = Holder()

    def part(x, low, local):
        x = tf.ensure_shape(x, [None, *row])
        total = tf.constant(B, tf.int64)
        with rows_of_global_draws(low, local, total, x, compiled=jit):
            return make(x, holder.seeds)

    whole = tf.function(
        lambda x: make(x, holder.seeds), autograph=False, jit_compile=jit
    )(x)
    parts = []
    replica = tf.function(
        part,
        autograph=False,
        jit_compile=jit,
        input_signature=[
            tf.TensorSpec([None, *row], dtype),
            *[tf.TensorSpec([], tf.int64)] * 2,
        ],
    )
    with keras_internals.seeds_replaced([holder.seeds], seed_for_rows):
        for low, high in CUTS:
            holder.seeds.state.assign([7, 0])
            parts.append(replica(x[low:high], low, high - low))
    assert holder.seeds.state.numpy().tolist() == [7, draws_of(make)]
    return whole.numpy(), np.concatenate(parts)


def draws_of(make):
    return getattr(make, "draws", 1)


def _drawn(function, **options):
    return lambda x, seed: function(shape_of(x), seed=seed, **options)


def _flattened(x, seed):
    """Rows of four words each, joined into one axis."""
    joined = keras.ops.reshape(x, (-1, 3))
    return keras.ops.reshape(draw.dropout(joined, 0.5, seed=seed), (-1, 4, 3))


def _time_major(x, seed):
    words = keras.ops.transpose(x, (1, 0, 2))
    return keras.ops.transpose(draw.dropout(words, 0.5, seed=seed), (1, 0, 2))


def _beta(x, seed):
    return draw.beta(shape_of(x), keras.ops.abs(x) + 0.1, 2.0, seed=seed)


def _binomial(x, seed):
    return draw.binomial(shape_of(x), 10.0, keras.ops.sigmoid(x), seed=seed)


DRAWS = {
    "uniform": (_drawn(draw.uniform), (3,)),
    "uniform, whole counters": (_drawn(draw.uniform), (8,)),
    "uniform float64": (_drawn(draw.uniform, dtype="float64"), (3,)),
    "uniform bfloat16": (_drawn(draw.uniform, dtype="bfloat16"), (3,)),
    "normal": (_drawn(draw.normal), (3,)),
    "normal float64": (_drawn(draw.normal, dtype="float64"), (3,)),
    "truncated normal": (_drawn(draw.truncated_normal), (2, 5)),
    "integers": (_drawn(draw.randint, minval=0, maxval=1000), (3,)),
    "long integers": (
        _drawn(draw.randint, minval=0, maxval=1000, dtype="int64"),
        (3,),
    ),
    "dropout": (lambda x, seed: draw.dropout(x, 0.5, seed=seed), (7,)),
    "dropout of channels": (
        lambda x, seed: draw.dropout(x, 0.5, (None, 1, 3), seed=seed),
        (5, 3),
    ),
    "a number for each row": (
        lambda x, seed: draw.uniform((shape_of(x)[0],), seed=seed),
        (5,),
    ),
    "rows joined with words": (_flattened, (4, 3)),
    "rows on the second axis": (_time_major, (4, 3)),
    "no rows": (lambda x, seed: 0 * x + draw.uniform((3,), seed=seed), (3,)),
    "gamma": (_drawn(draw.gamma, alpha=2.0), (3,)),
    "gamma of columns": (_drawn(draw.gamma, alpha=[1.0, 2.0, 3.0]), (3,)),
    "beta of rows": (_beta, (3,)),
    "binomial of rows": (_binomial, (3,)),
    "categories": (lambda x, seed: draw.categorical(x, 5, seed=seed), (3,)),
}
COMPILED = [
    name
    for name in DRAWS
    if not name.startswith(("gamma", "beta", "binomial", "categories"))
]


@pytest.mark.parametrize("name", DRAWS)
def test_rows_are_those_of_the_whole(name):
    make, row = DRAWS[name]
    whole, parts = whole_and_parts(make, row)
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize(
    "name",
    tiered(
        COMPILED,
        ["uniform", "normal", "rows joined with words"],
        ["truncated normal", "long integers", "rows on the second axis"],
    ),
)
def test_compiled_rows_are_those_of_the_whole(name):
    make, row = DRAWS[name]
    whole, parts = whole_and_parts(make, row, jit=True)
    np.testing.assert_array_equal(parts, whole)


def _constant_seed(x, seed):
    del seed
    return draw.uniform(shape_of(x), seed=3)


def _of_tensorflow(x, seed):
    del seed
    return x + tf.random.uniform(shape_of(x))


def _sampled(x, seed):
    """What `tf.nn.sampled_softmax_loss` and `tf.nn.nce_loss` draw by."""
    del seed
    ids, *_ = tf.random.log_uniform_candidate_sampler(
        tf.ones([1, 1], tf.int64), 1, 3, True, 9, seed=3
    )
    return x + tf.cast(ids[0], x.dtype)


def test_replicas_with_the_same_rows_know_the_draws_of_each_other(caplog):
    holder = Holder()

    def step(x):
        zero, count = tf.constant(0, tf.int64), tf.constant(B, tf.int64)
        x = tf.ensure_shape(x, [None, 4])
        with rows_of_global_draws(zero, count, count, x):
            # In the turn of another replica.
            with rows_of_global_draws(zero, count, count, x):
                other = draw.uniform(shape_of(x), seed=holder.seeds)
            return other + draw.uniform(shape_of(x), seed=holder.seeds)

    with (
        keras_internals.seeds_replaced([holder.seeds], seed_for_rows),
        caplog.at_level(logging.WARNING, "mgpu_tf"),
    ):
        scope.warned.clear()
        tf.function(step, autograph=False).get_concrete_function(
            tf.TensorSpec([None, 4])
        )
    assert not caplog.records


def _pairs(x, seed):
    rows = shape_of(x)[0]
    return x + keras.ops.mean(draw.uniform((rows, rows), seed=seed))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_constant_seed, "no generator of a layer"),
        (_of_tensorflow, "has a state of its own"),
        (_sampled, "has a state of its own"),
        (_pairs, "otherwise than by one dimension"),
    ],
)
def test_what_cannot_be_moved_is_named(make, words, caplog):
    scope.warned.clear()
    make.draws = int(make is _pairs)
    with caplog.at_level(logging.WARNING, "mgpu_tf"):
        whole_and_parts(make, (3,))
    [text] = {record.getMessage() for record in caplog.records}
    assert words in text


def dimensions(make, signature):
    """The dimensions of a shape that is made of a batch."""
    found = []

    def trace(*data):
        found.append(RowDimensions(data).of(tf.convert_to_tensor(make(*data))))

    tf.function(trace, autograph=False).get_concrete_function(*signature)
    return found[0]


def _through_a_function(x):
    @tf.function(autograph=False)
    def inner(x):
        return tf.reshape(x, [-1, 2, 5])

    return tf.shape(inner(x))


ROWS, UNKNOWN = Dimension(Follows.ROWS, 1), Dimension(Follows.UNKNOWN)
OPEN, MIXED = Dimension(Follows.OTHERS), Dimension(Follows.MIXED)
# As many for each row as a batch has.
SEVERAL = Dimension(Follows.ROWS)


def _pooled(size, x, padding="VALID"):
    return tf.nn.avg_pool1d(x, size, size, padding)


@pytest.mark.parametrize(
    ("make", "row", "expected"),
    [
        (tf.shape, [10], [ROWS, 10]),
        (lambda x: [tf.shape(x)[0], 4], [10], [ROWS, 4]),
        (
            lambda x: tf.shape(tf.reshape(x, [-1, 2])),
            [10],
            [Dimension(Follows.ROWS, 5), 2],
        ),
        (lambda x: tf.shape(tf.transpose(x)), [10], [10, ROWS]),
        # A length that the graph does not know is none of rows.
        (tf.shape, [None, 3], [SEVERAL, OPEN, 3]),
        (lambda x: tf.shape(x)[1:], [None, 3], [OPEN, 3]),
        # Nor is one that follows from it.
        (lambda x: tf.shape(x[:, 1:-1]), [None, 3], [SEVERAL, OPEN, 3]),
        (lambda x: tf.shape(_pooled(32, x)), [None, 3], [SEVERAL, OPEN, 3]),
        (lambda x: tf.shape(_pooled(320, x)), [None, 3], [SEVERAL, OPEN, 3]),
        *(
            (
                lambda x, size=size, padding=padding: tf.shape(
                    tf.reshape(_pooled(size, x, padding), [-1, 3])
                ),
                [None, 3],
                [rows, 3],
            )
            for size, padding, rows in [
                (32, "VALID", SEVERAL),
                (5_000, "SAME", SEVERAL),
                (5_000, "VALID", UNKNOWN),
            ]
        ),
        # The copy has no place for such a window.
        (
            lambda x: tf.shape(_pooled(5_000, x)),
            [None, 3],
            [UNKNOWN, UNKNOWN, 3],
        ),
        (tf.shape, [None, None, 3], [SEVERAL, OPEN, OPEN, 3]),
        (tf.shape, [None] * 3 + [64], [SEVERAL, *[OPEN] * 3, 64]),
        # So many elements that TensorFlow has no such shape.
        (tf.shape, [None] * 6, [SEVERAL, *[UNKNOWN] * 6]),
        (lambda x: [tf.shape(x)[0] // 8, 3], [10], [MIXED, 3]),
        (lambda x: [tf.reduce_sum(tf.shape(x))], [None], [MIXED]),
        # What a function makes is not read.
        (_through_a_function, [10], [UNKNOWN, 2, 5]),
        (
            lambda x: tf.shape(tf.boolean_mask(x, x[:, 0] > 0)),
            [3],
            [UNKNOWN, 3],
        ),
    ],
)
def test_dimensions(make, row, expected):
    spec = tf.TensorSpec([None, *row], tf.float32)
    assert dimensions(make, [spec]) == [
        Dimension(Follows.OTHERS, each) if isinstance(each, int) else each
        for each in expected
    ]


def test_a_tensor_of_unknown_rank_has_no_dimensions():
    def trace(x):
        unknown = tf.compat.v1.placeholder_with_default(x, None)
        assert RowDimensions([x]).of_tensor(unknown) == []

    spec = tf.TensorSpec([None, 3])
    tf.function(trace, autograph=False).get_concrete_function(spec)


def test_a_length_that_is_no_multiple_of_the_rows_ends_the_run():
    def some(x, seed):
        kept = tf.boolean_mask(x, x[:, 0] > 0)
        drawn = draw.uniform(shape_of(kept), seed=seed)
        return x + tf.reduce_mean(drawn)

    with pytest.raises(tf.errors.InvalidArgumentError, match="in proportion"):
        whole_and_parts(some, (3,))


# Training.


def noisy():
    """A model with each kind of layer that draws."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.RandomFlip(),
            layers.RandomTranslation(0.2, 0.2),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.SpatialDropout2D(0.3),
            layers.Reshape((16, 4)),
            layers.LSTM(
                3, dropout=0.2, recurrent_dropout=0.2, return_sequences=True
            ),
            layers.GaussianNoise(0.1),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.AlphaDropout(0.1),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def examples(rows=31):
    """Batches of 13, and a last one of 5."""
    generator = np.random.default_rng(0)
    x = generator.uniform(size=(rows, 6, 6, 3))
    return x, generator.normal(size=(rows, 2))


def trained(fit, **options):
    x, y = examples()
    options = {"batch_size": 13, "epochs": 2, **options}
    return fit(x, y, shuffle=False, verbose=0, **options)


@functools.cache
def reference():
    """Keras's own `fit`, in float64."""
    keras.utils.set_random_seed(3)
    model = noisy()
    trained(model.fit)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


def differences(trainer):
    return [
        np.abs(keras.ops.convert_to_numpy(variable) - expected).max()
        for variable, expected in zip(
            trainer.model.variables, reference(), strict=True
        )
    ]


@pytest.mark.parametrize(
    "name",
    tiered(
        [
            "mirrored_x3",
            "fsdp_x3",
            "data_2_tensor_2",
            "pipeline_x2",
            "data_2_pipeline_2",
            "central_storage_x2",
        ],
        [],
        ["mirrored_x3", "fsdp_x3", "data_2_pipeline_2"],
    ),
)
def test_layers_that_draw(name, strategies, float64):
    trainer = mgpu_tf.Trainer(noisy, strategies[name], seed=3)
    trained(trainer.fit)
    assert max(differences(trainer)) < 1e-9


@full
@pytest.mark.parametrize("options", [{"recompute": "layers"}])
def test_layers_that_are_computed_again(options, strategies, float64):
    trainer = mgpu_tf.Trainer(
        noisy, strategies["mirrored_x3"], seed=3, **options
    )
    trained(trainer.fit)
    assert max(differences(trainer)) < 1e-9


@full
def test_replicas_may_draw_their_own(strategies, float64):
    trainer = mgpu_tf.Trainer(
        noisy, strategies["mirrored_x3"], seed=3, random="per_replica"
    )
    trained(trainer.fit)
    assert max(differences(trainer)) > 1e-3


def test_draws_of_what_a_loop_made_are_proven():
    layer, holder, kinds = keras.layers.GRU(4), Holder(), []
    layer.build([None, 5, 3])

    def take(drawn, rows):
        assert rows.block is None  # A shape does not show it.
        assert note_drawn(drawn, rows.shape, rows.axis, rows.block)

    @tf.function(autograph=False)
    def traced(x):
        proof = RowProof([x])
        count = tf.shape(x, tf.int64)[0]
        zero = tf.constant(0, tf.int64)
        with (
            proving(proof),
            rows_of_global_draws(zero, count, count, x, taken=take),
        ):
            made = layer(x)
            drawn = draw.uniform(shape_of(made), seed=holder.seeds)
        kinds.append(proof.of(made * drawn))

    with keras_internals.seeds_replaced([holder.seeds], seed_for_rows):
        traced.get_concrete_function(tf.TensorSpec([None, 5, 3]))
    assert kinds == [Rows()]
