"""State that layers write, and values that pass by their arguments.

Keras's own `fit` is the reference. With 3 replicas, since 2 divide exactly.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(18, 6))
Y = X[:, :1] ** 2


def fitted(build, strategy=None, validates=False, **options):
    """Returns all variables and the history of a short fit."""
    keras.utils.set_random_seed(1)
    if strategy is None:
        model = build()
    else:
        model = mgpu_tf.Trainer(build, strategy, **options)
    # The last batch leaves one replica without a row.
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    if validates:
        # Of 4, 4 and 3 rows.
        fit |= {"validation_data": (X[:11], Y[:11])}
        fit |= {"validation_batch_size": 4}
    history = model.fit(X, Y, **fit)
    trained = model if strategy is None else model.model
    values = [(v.path, v.numpy()) for v in trained.variables]
    return values, history.history


def check(build, strategy, **options):
    """Compares a fit on a strategy with Keras's."""
    validates = options.get("validates", False)
    known, known_logs = fitted(build, validates=validates)
    found, logs = fitted(build, strategy, **options)
    for (path, value), (_, other) in zip(known, found, strict=True):
        np.testing.assert_allclose(
            other, value, rtol=1e-9, atol=1e-11, err_msg=path
        )
    assert logs.keys() == known_logs.keys()
    for name, values in known_logs.items():
        np.testing.assert_allclose(logs[name], values, 1e-9, err_msg=name)


class Writing(layers.Layer):
    """Gives its inputs on, and writes a number of them to its state."""

    def __init__(self, write, **kwargs):
        super().__init__(**kwargs)
        self.write = write

    def build(self, shape):
        self.state = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="state"
        )

    def call(self, inputs, training=False):
        if training:
            self.write(self.state, inputs)
        return inputs


def model_of(*middle, loss="mse", metrics=()):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activation="tanh"),
            *middle,
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics))
    return model


def assign(value):
    return lambda state, x: state.assign(value(state, x))


def add(value):
    return lambda state, x: state.assign_add(ops.cast(value(x), "float64"))


def median(x):
    value = tf.numpy_function(np.median, [x], tf.float64)
    return tf.ensure_shape(value, ())


def squared_thrice(x):
    return tf.while_loop(
        lambda n, total: n < 3,
        lambda n, total: (n + 1, total + ops.mean(x) ** 2),
        [0, tf.constant(0.0, tf.float64)],
    )[1]


def within_function(state, x):
    @tf.function
    def write(x):
        state.assign_add(ops.abs(ops.mean(x)))

    write(x)


def within_branch(state, x):
    def write():
        state.assign_add(ops.mean(x))
        return 0

    tf.cond(ops.mean(x) > 0, write, lambda: 0)


def counted_within_function(state, x):
    @tf.function
    def write():
        state.assign_add(1.0)

    write()


# What replicas bring together by what is proven of it.
PARTS = {
    "a count of rows": add(lambda x: tf.shape(x)[0]),
    "a count of batches": add(lambda x: 1.0),
    "a sum": add(ops.sum),
    "a mean": add(ops.mean),
    "a moving mean": assign(lambda s, x: 0.9 * s + 0.1 * ops.mean(x)),
    "the mean": assign(lambda s, x: ops.mean(x)),
    "the sum": assign(lambda s, x: ops.sum(x)),
    "the largest": assign(lambda s, x: ops.maximum(s, ops.max(x))),
    "the smallest": assign(lambda s, x: ops.minimum(ops.min(x), s)),
}
# What is made of sums over the rows, which they add up.
SUMS = {
    "a moving sum": assign(lambda s, x: 0.9 * s + 0.1 * ops.sum(x)),
    "a ratio": assign(lambda s, x: ops.sum(x) / ops.sum(ops.square(x))),
    "absolute mean": add(lambda x: ops.abs(ops.mean(x))),
    "rounded sum": add(lambda x: ops.floor(ops.sum(x))),
    "a comparison": add(lambda x: ops.mean(x) > 0),
    "a choice": add(lambda x: ops.where(ops.mean(x) > 0, 1.0, 2.0)),
    "product of sums": add(lambda x: ops.sum(x) * ops.mean(x)),
    "place of a mean": add(lambda x: ops.argmax(ops.mean(x, axis=0))),
    "largest mean": assign(lambda s, x: ops.maximum(s, ops.mean(x))),
    "smallest sum": assign(lambda s, x: ops.minimum(s, ops.sum(x))),
}
# What is computed from the rows of all.
WHOLE = {
    "largest of differences": assign(
        lambda s, x: ops.maximum(s, ops.max(x - ops.mean(x, axis=0)))
    ),
    "largest of this batch": assign(lambda s, x: ops.max(x)),
    "sign of a mean": add(lambda x: ops.sign(ops.mean(x))),
    "positive part of a sum": add(lambda x: ops.relu(ops.sum(x))),
    "place of the largest": add(lambda x: ops.argmax(x[:, 0])),
    "first row": add(lambda x: x[0, 0]),
    "sorted": add(lambda x: ops.sum(ops.sort(x, axis=0)[0])),
    "top": add(lambda x: ops.sum(tf.math.top_k(x[:, 0], 1).values)),
    "determinant": add(
        lambda x: tf.linalg.det(tf.matmul(x, x, transpose_a=True))
    ),
    "median in Python": add(median),
    "distinct rows": add(
        lambda x: tf.size(tf.unique(tf.cast(2 * x[:, 0], tf.int32)).y)
    ),
    "a loop": add(squared_thrice),
    "rows above three": add(lambda x: tf.maximum(tf.shape(x)[0] - 3, 0)),
    "norm": add(tf.norm),
    "deviation": assign(lambda s, x: 0.9 * s + 0.1 * ops.std(x)),
}
WITHIN = {
    "of the rows in a function": within_function,
    "of the rows in a branch": within_branch,
    "a count in a function": counted_within_function,
}


def all_of(writes):
    return lambda: model_of(
        *(Writing(each, name=name.replace(" ", "_")) for name, each in writes)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "column",
    ["mirrored_x3", "central_storage_x2", "fsdp_x3", "data_2_tensor_2"],
)
def test_every_way_to_write(column, strategies):
    build = all_of([*PARTS.items(), *SUMS.items(), *WHOLE.items()])
    check(build, strategies[column])


def test_a_way_of_each_kind(strategies):
    writes = {**PARTS, **SUMS, **WHOLE}
    names = ["a moving mean", "the largest", "the smallest"]
    names += ["rounded sum", "sorted"]
    build = all_of([(name, writes[name]) for name in names])
    check(build, strategies["mirrored_x3"])


def test_what_is_proven_moves_no_rows(strategies, caplog):
    with caplog.at_level("INFO", "mgpu_tf"):
        fitted(
            all_of([*PARTS.items(), *SUMS.items()]), strategies["mirrored_x3"]
        )
    assert "computed whole" not in caplog.text


@pytest.mark.parametrize("column", ["one_device", "mirrored_x3"])
def test_what_is_written_within_a_function(column, strategies):
    check(all_of(WITHIN.items()), strategies[column])


@pytest.mark.full
@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("fsdp_x3", "of the rows in a function"),
        ("fsdp_x3", "a count in a function"),
        ("fsdp_x3", "of the rows in a branch"),
        ("pipeline_x2", "a count in a function"),
    ],
)
def test_a_function_that_writes_is_traced_with_the_step(
    column, name, strategies
):
    check(all_of([(name, WITHIN[name])]), strategies[column])


@pytest.mark.full
def test_a_layer_that_is_computed_again_writes_once(strategies):
    build = all_of(WITHIN.items())
    check(build, strategies["mirrored_x3"], recompute="layers")


@pytest.mark.full
@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("pipeline_x2", "of the rows in a function"),
        ("pipeline_x2", "of the rows in a branch"),
    ],
)
def test_where_nothing_can_be_written_in_place(column, name, strategies):
    build = all_of([(name, WITHIN[name])])
    with pytest.raises(mgpu_tf.ConfigurationError) as error:
        fitted(build, strategies[column])
    assert "\n" not in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("name", ["largest mean", "a choice", "sorted"])
def test_a_pipeline_refuses_what_needs_all_rows(name, strategies):
    build = all_of([(name, {**SUMS, **WHOLE}[name])])
    with pytest.raises(mgpu_tf.ConfigurationError, match="what it writes"):
        fitted(build, strategies["pipeline_x2"])


@pytest.mark.full
def test_a_pipeline_brings_parts_together(strategies):
    check(all_of(PARTS.items()), strategies["pipeline_x2"])


# Metrics that layers update.


class Measuring(layers.Layer):
    def __init__(self, value, metric=keras.metrics.Mean):
        super().__init__()
        self.value, self.metric = value, metric(name="measured")

    def call(self, inputs):
        self.metric.update_state(self.value(inputs))
        return inputs


MEASURED = {
    "rows": lambda: model_of(Measuring(ops.square)),
    "a sum of rows": lambda: model_of(Measuring(ops.square, keras.metrics.Sum)),
    "a mean": lambda: model_of(Measuring(ops.mean)),
    "the largest": lambda: model_of(Measuring(ops.max)),
    "an absolute mean": lambda: model_of(
        Measuring(lambda x: ops.abs(ops.mean(x)))
    ),
    "columns": lambda: model_of(
        Measuring(lambda x: ops.square(ops.mean(x, axis=0)))
    ),
}


@pytest.mark.parametrize(
    "name", tiered(list(MEASURED), ["columns", "an absolute mean"])
)
def test_metrics_of_layers(name, strategies):
    check(MEASURED[name], strategies["mirrored_x3"])


# What one part of a model leaves for another, in state or in an attribute.


def leaves_a_mean():
    return Writing(assign(lambda s, x: 0.9 * s + 0.1 * ops.mean(x)))


class Keeping(layers.Layer):
    def call(self, inputs):
        self.kept = inputs
        return inputs


def read_after_it_was_written():
    class Reading(Writing):
        def call(self, inputs, training=False):
            return super().call(inputs, training) + self.state

    return model_of(Reading(add(ops.mean)))


def read_by_another_layer():
    first = leaves_a_mean()
    return model_of(first, layers.Lambda(lambda x: x + first.state))


def read_by_a_loss():
    first = leaves_a_mean()
    return model_of(first, loss=lambda y, p: ops.square(y - p + first.state))


def read_by_a_metric():
    first = leaves_a_mean()

    def score(y, p):
        return ops.square(y - p + first.state)

    return model_of(first, metrics=[score])


def kept_for_a_layer():
    first = Keeping()
    mean = layers.Lambda(lambda x: x + ops.mean(first.kept, axis=0))
    return model_of(first, mean)


def kept_for_a_loss():
    first = Keeping()
    return model_of(
        first, loss=lambda y, p: ops.square(y - p + ops.mean(first.kept))
    )


class MeanIn(layers.Layer):
    """Keeps a mean of all rows in training or elsewhere, and rows else."""

    def __init__(self, training):
        super().__init__()
        self.when = training

    def call(self, inputs, training=False):
        mixes = bool(training) == self.when
        mean = ops.mean(inputs, axis=0, keepdims=True)
        self.kept = mean if mixes else inputs
        return inputs


class Largest(keras.metrics.Metric):
    """It begins at a number that is not zero."""

    def __init__(self, first):
        super().__init__(name="largest")
        self.first = first
        start = keras.initializers.Constant(-9.0)
        self.most = self.add_variable(shape=(), initializer=start)
        self.rows = self.add_variable(shape=(), initializer="ones")

    def update_state(self, y, p, sample_weight=None):
        most = ops.max(p) - ops.max(self.first.kept)
        self.most.assign(ops.maximum(self.most, most))
        self.rows.assign_add(ops.cast(ops.shape(p)[0], self.rows.dtype))

    def result(self):
        return self.most * self.rows

    def reset_state(self):
        self.most.assign(-9.0)
        self.rows.assign(1.0)


def of_all_rows_in(training):
    """Metrics of all rows in one kind of step, and of sums in the other."""

    def build():
        first = MeanIn(training)

        def score(y, p):
            last = ops.max(first.kept, axis=-1, keepdims=True)
            return ops.mean(ops.square(y - p) + last, axis=-1)

        return model_of(first, metrics=[score, Largest(first), "mae"])

    return build


class Own(keras.Model):
    """Two layers, and what is between them kept for `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(5), layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.state = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="state"
        )
        self.compile(keras.optimizers.SGD(0.1), "mse")

    def call(self, inputs):
        self.kept = self.first(inputs)
        return self.last(self.kept)


class KeptForComputeLoss(Own):
    """Between the call and the loss, replicas exchange statistics."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(synchronized=True)

    def call(self, inputs, training=False):
        self.kept = self.first(inputs)
        return self.last(self.norm(self.kept, training=training))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2) + ops.mean(self.kept) ** 2


class TracksInComputeLoss(Own):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        self.tracker.update_state(ops.abs(ops.mean(y_pred)))
        return super().compute_loss(x, y, y_pred, sample_weight)


class WritesInComputeLoss(Own):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        self.state.assign_add(ops.abs(ops.mean(y_pred)))
        return super().compute_loss(x, y, y_pred, sample_weight)


class ReadsAMetric(Own):
    """A number of all batches so far, of which a replica has a part."""

    def __init__(self, kept=None, tracks=True):
        super().__init__()
        self.tracks = tracks
        # A compiled metric is updated after the call and the loss.
        self.read = self.tracker if kept is None else kept
        metrics = None if kept is None else [kept]
        self.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics)

    def call(self, inputs):
        return self.last(self.first(inputs) * self.so_far())

    def so_far(self):
        return 1.0 + 0.1 * ops.cast(self.read.result(), keras.config.floatx())

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        if self.tracks:
            self.tracker.update_state(ops.abs(y_pred - y))
        return loss


class MeanLossScalesTheCall(ReadsAMetric):
    """The mean that Keras itself keeps of the loss."""

    def so_far(self):
        means = [metric for metric in self.metrics if metric.name == "loss"]
        self.read = means[0] if means else keras.metrics.Mean()
        return super().so_far()


class MetricScalesTheLoss(ReadsAMetric):
    def call(self, inputs):
        return self.last(self.first(inputs))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred) * self.so_far()


READ = {
    "tracked, by the call": lambda: ReadsAMetric(),
    "tracked, by the loss": lambda: MetricScalesTheLoss(),
    "compiled, by the call": lambda: ReadsAMetric(
        keras.metrics.MeanAbsoluteError(), tracks=False
    ),
    "compiled, by the loss": lambda: MetricScalesTheLoss(
        keras.metrics.RootMeanSquaredError()
    ),
    "the mean loss, by the call": lambda: MeanLossScalesTheCall(),
}


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        [
            (column, name)
            for column in ("mirrored_x3", "fsdp_x3", "data_2_tensor_2")
            for name in READ
        ],
        [
            ("mirrored_x3", "tracked, by the call"),
            ("mirrored_x3", "compiled, by the loss"),
            ("fsdp_x3", "the mean loss, by the call"),
        ],
    ),
)
def test_a_metric_that_a_step_reads(column, name, strategies):
    check(READ[name], strategies[column], validates=True)


def reads_a_metric_in_a_layer():
    metric = keras.metrics.MeanAbsoluteError()
    scaled = layers.Lambda(
        lambda x: x * (1.0 + ops.cast(metric.result(), x.dtype))
    )
    return model_of(scaled, metrics=[metric])


def test_parts_of_a_batch_read_no_metric(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="Leave out step_pa"):
        fitted(
            reads_a_metric_in_a_layer, strategies["mirrored_x3"], step_parts=2
        )
    check(reads_a_metric_in_a_layer, strategies["mirrored_x3"])


@pytest.mark.full
def test_a_stage_reads_no_metric(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="reads no metric"):
        fitted(reads_a_metric_in_a_layer, strategies["pipeline_x2"])


class CalledTwice(Own):
    """Once with a mean, which adds up, and once with what does not."""

    def __init__(self):
        super().__init__()
        self.ways = [add(ops.mean), add(median)]
        self.between = Writing(lambda state, x: self.ways[self.way](state, x))

    def call(self, inputs):
        self.way = 0
        hidden = self.between(self.first(inputs), training=True)
        self.way = 1
        return self.last(self.between(hidden * 0.5, training=True))


PASSED = {
    "state, in one layer": read_after_it_was_written,
    "state, to a layer": read_by_another_layer,
    "state, to a loss": read_by_a_loss,
    "state, to a metric": read_by_a_metric,
    "rows, to a layer": kept_for_a_layer,
    "rows, to a loss": kept_for_a_loss,
    "rows, to compute_loss": lambda: KeptForComputeLoss(),
    "a metric in compute_loss": lambda: TracksInComputeLoss(),
    "state in compute_loss": lambda: WritesInComputeLoss(),
    "a layer called twice": lambda: CalledTwice(),
    "all rows in training": of_all_rows_in(True),
    "all rows in validation": of_all_rows_in(False),
}


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        [
            (column, name)
            for column in ("mirrored_x3", "fsdp_x3", "data_2_tensor_2")
            for name in PASSED
        ],
        [
            ("mirrored_x3", "state, to a layer"),
            ("mirrored_x3", "rows, to compute_loss"),
            ("fsdp_x3", "state, to a metric"),
            ("mirrored_x3", "all rows in training"),
        ],
    ),
)
def test_what_passes_by_the_arguments(column, name, strategies):
    check(PASSED[name], strategies[column], validates=True)


class KeptForTheStep(Own):
    """A train_step reads rows that the call of the model has kept."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = ops.mean((y - y_pred) ** 2) + ops.mean(self.kept) ** 2
            loss += ops.mean(self.kept[0])
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


@pytest.mark.parametrize(
    "column", tiered(["mirrored_x3", "fsdp_x3"], ["mirrored_x3"])
)
def test_a_step_reads_what_a_call_has_kept(column, strategies):
    check(lambda: KeptForTheStep(), strategies[column])


def once_a_mean_and_once_rows():
    class Twice(Own):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.tracker.update_state(y_pred)
            self.tracker.update_state(ops.abs(ops.mean(y_pred)))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    return Twice()


def test_a_metric_that_is_updated_in_two_ways(strategies):
    """`compute_metrics` has the rows of all, so both are right."""
    check(once_a_mean_and_once_rows, strategies["mirrored_x3"])


class Lowest(keras.metrics.Metric):
    """The sum of a number of each batch that is no sum of its rows."""

    def __init__(self):
        super().__init__(name="lowest")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ordered = ops.sort(y_true - y_pred, axis=0)
        self.total.assign_add(ops.sum(ordered[:1]))

    def result(self):
        return self.total + 0.0


def test_a_metric_of_all_rows_is_added_once(strategies):
    check(lambda: model_of(metrics=[Lowest()]), strategies["mirrored_x3"])


@pytest.mark.full
@pytest.mark.parametrize("name", list(PASSED)[:6])
def test_a_pipeline_refuses_what_passes_by(name, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError) as error:
        fitted(PASSED[name], strategies["pipeline_x2"])
    assert "\n" not in str(error.value)
