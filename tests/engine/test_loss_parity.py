"""Losses of every shape against Keras's own `fit` on one device.

Batches of 8, 8 and 2 rows: on three replicas no part is like another, and
the last leaves a replica without an example.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests import columns
from tests.tiers import tiered

ROWS = 18
BATCH = 8
STEPS = 4
COLUMNS = columns.EVERY


pytestmark = pytest.mark.usefixtures("float64")


def points():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 3))
    return {"x": x, "y": generator.uniform(0.1, 1.0, size=(ROWS, 2))}


def labels():
    data = points()
    return data | {"y": (data["y"] > 0.5).astype("float64")}


def weighted_points():
    weight = np.random.default_rng(3).uniform(0.2, 2.0, size=ROWS)
    return points() | {"sample_weight": weight}


def words():
    """Padded words, a class for each, some to be ignored."""
    generator = np.random.default_rng(1)
    x = generator.integers(1, 7, size=(ROWS, STEPS))
    lengths = generator.integers(1, STEPS + 1, size=(ROWS, 1))
    x = np.where(np.arange(STEPS) < lengths, x, 0)
    return {"x": x, "y": generator.integers(0, 3, size=(ROWS, STEPS))}


def weighted_words():
    weight = np.random.default_rng(2).uniform(0.2, 2.0, size=(ROWS, STEPS))
    return words() | {"sample_weight": weight}


def sgd():
    return keras.optimizers.SGD(0.02, momentum=0.9)


def dense(*middle, loss="mse", model=keras.Model, **arguments):
    """Returns what builds a small network with layers in its middle."""

    def build():
        inputs = keras.Input((3,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        for make in middle:
            hidden = make()(hidden)
        outputs = layers.Dense(2, activation="sigmoid")(hidden)
        built = model(inputs, outputs)
        compiled = {
            name: value() if callable(value) else value
            for name, value in arguments.items()
        }
        built.compile(sgd(), loss() if callable(loss) else loss, **compiled)
        return built

    return build


def tagger(*middle, mask_zero=True, loss="mse", **arguments):
    def build():
        inputs = keras.Input((STEPS,), dtype="int32")
        hidden = layers.Embedding(7, 4, mask_zero=mask_zero)(inputs)
        for make in middle:
            hidden = make()(hidden)
        outputs = layers.Dense(3)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(sgd(), loss(), **arguments)
        return model

    return build


def ignoring(reduction):
    return lambda: keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=0, reduction=reduction
    )


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adding(function):
    """A layer that adds to the loss what a function makes of its inputs."""

    class Adding(layers.Layer):
        def call(self, inputs):
            self.add_loss(function(inputs))
            return inputs

    return Adding


def computing(function, **attributes):
    """A model whose `compute_loss` is a function."""

    class Computing(keras.Model):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            for name, make in attributes.items():
                setattr(self, name, make())

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            keras_own = super().compute_loss

            def compiled():
                return keras_own(x, y, y_pred, sample_weight, training)

            return function(self, compiled, y, y_pred)

    return Computing


def scoring(function, **attributes):
    """A model whose `compute_metrics` is a function."""

    class Scoring(keras.Model):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            for name, make in attributes.items():
                setattr(self, name, make())

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return function(self, results, y, y_pred)

    return Scoring


def tracked(self, compiled, y, y_pred):
    """As a variational autoencoder is often written."""
    loss = compiled()
    extra = ops.mean(ops.square(y_pred))
    self.tracker.update_state(loss + extra)
    self.extra_tracker.update_state(extra)
    self.weighted_tracker.update_state(extra, ops.shape(y_pred)[0])
    return loss + extra


def own_mean(self, results, y, y_pred):
    return results | {"own": ops.mean(ops.abs(y - y_pred)), "two": 2.0}


def read_before(self, results, y, y_pred):
    """As in Keras's guide: the results hold `extra` before its update."""
    self.extra.update_state(ops.abs(y - y_pred))
    return results | {"twice": 2 * self.extra.result()}


def f1(self, results, y, y_pred):
    """Of two metrics' results, in a name of its own."""
    self.precision.update_state(y, y_pred)
    self.recall.update_state(y, y_pred)
    precision, recall = self.precision.result(), self.recall.result()
    return {
        "loss": results["loss"],
        "f1": 2 * precision * recall / (precision + recall + 1e-9),
    }


class TwoResults(keras.metrics.Metric):
    """A metric whose result is a dict."""

    def __init__(self, name="two_results", **named):
        super().__init__(name=name, **named)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")
        self.updates = self.add_variable(
            (), "zeros", name="updates", dtype="int32"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.count.assign_add(ops.cast(ops.size(y_true), self.dtype))
        self.updates.assign_add(1)

    def result(self):
        return {
            "mean_error": self.total / (self.count + 1e-9),
            "sum_error": self.total,
            "updates": self.updates,
        }


class InCall(layers.Layer):
    """Updates a metric and adds a loss in `call`."""

    def __init__(self, **named):
        super().__init__(**named)
        self.tracker = keras.metrics.Mean(name="in_call")

    def call(self, inputs):
        mean = ops.mean(ops.square(inputs))
        self.tracker.update_state(mean)
        self.add_loss(mean)
        return inputs


def regularized():
    return layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1))


def synchronized():
    return layers.BatchNormalization(synchronized=True)


def pairs(y_true, y_pred):
    """One value for each example, of all examples."""
    distances = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), -1)
    return ops.mean(distances * y_true[:, :1], -1)


def softmax_of_rows(y_true, y_pred):
    errors = ops.mean(ops.square(y_true - y_pred), -1)
    return errors * ops.softmax(errors)


def softmax_along_rows(y_true, y_pred):
    errors = ops.square(y_true - y_pred)
    return ops.mean(errors * ops.softmax(errors, axis=0), -1)


def cox(y_true, y_pred):
    return tf.math.cumulative_logsumexp(y_pred[:, :1]) - y_pred[:, :1]


def largest_of_segment(y_true, y_pred):
    errors = ops.mean(ops.square(y_true - y_pred), -1)
    kinds = tf.cast(y_pred[:, 0] > 0, tf.int32)
    largest = tf.math.unsorted_segment_prod(errors, kinds, 2)
    return errors - tf.gather(largest, kinds)


ROWS_OF = {
    # The mask that a loss sets on what it returns.
    "ignore_class": (
        tagger(mask_zero=False, loss=ignoring("sum_over_batch_size")),
        words,
    ),
    "ignore_class_masked": (tagger(loss=ignoring("mean")), words),
    "ignore_class_weighted": (
        tagger(loss=ignoring("sum_over_batch_size")),
        weighted_words,
    ),
    "ignore_class_weighted_mean": (
        tagger(loss=ignoring("mean_with_sample_weight")),
        weighted_words,
    ),
    "ignore_class_sum": (tagger(loss=ignoring("sum")), words),
    # Functions that reduce the rows themselves.
    "function_sum": (
        dense(loss=lambda: lambda y, p: ops.sum(ops.square(y - p))),
        points,
    ),
    "function_mean": (
        dense(loss=lambda: lambda y, p: ops.mean(ops.square(y - p))),
        points,
    ),
    "function_mean_and_sum": (
        dense(
            loss=lambda: (
                lambda y, p: (
                    ops.mean(ops.square(y - p)) + 0.1 * ops.sum(ops.abs(y - p))
                )
            )
        ),
        points,
    ),
    "function_mean_of_each_column": (
        dense(loss=lambda: lambda y, p: ops.mean(ops.square(y - p), axis=0)),
        points,
    ),
    "dice_of_each": (dense(loss=lambda: keras.losses.Dice(axis=-1)), labels),
    # What layers add.
    "add_mean": (dense(adding(lambda x: ops.mean(x * x))), points),
    "add_sum": (dense(adding(lambda x: 0.1 * ops.sum(x * x))), points),
    "add_vector": (dense(adding(lambda x: ops.mean(x * x, axis=-1))), points),
    "add_constant": (dense(adding(lambda x: ops.ones(()) / 3.0)), points),
    "add_mean_and_sum": (
        dense(adding(lambda x: ops.mean(x * x) + 0.1 * ops.sum(x * x))),
        points,
    ),
    "add_sum_by_count": (
        dense(
            adding(
                lambda x: ops.sum(x * x) / ops.cast(ops.shape(x)[0], x.dtype)
            )
        ),
        points,
    ),
    "add_declared": (
        dense(
            adding(
                lambda x: (
                    mgpu_tf.mean_over_batch(x * x)
                    - 0.1 * mgpu_tf.sum_over_batch(x)
                )
            )
        ),
        points,
    ),
    "add_declared_weighted": (
        dense(
            adding(
                lambda x: mgpu_tf.mean_over_batch(
                    ops.mean(x * x, -1), weights=ops.abs(x[:, 0])
                )
            )
        ),
        points,
    ),
    "add_after_batch_normalization": (
        dense(synchronized, adding(lambda x: ops.mean(x**4))),
        points,
    ),
    "regularizer": (dense(regularized), points),
    # A `compute_loss` of one's own.
    "compute_twice": (
        dense(
            regularized,
            model=computing(lambda self, own, y, p: 2.0 * own()),
        ),
        weighted_points,
    ),
    "compute_and_sum": (
        dense(
            adding(lambda x: ops.sum(x * x)),
            model=computing(
                lambda self, own, y, p: own() + 0.1 * ops.sum(ops.square(p))
            ),
        ),
        points,
    ),
    "compute_by_loss_object": (
        dense(
            regularized,
            model=computing(
                lambda self, own, y, p: (
                    self.huber(y, p) + ops.sum(self.losses) + own() / 3.0
                ),
                huber=keras.losses.Huber,
            ),
        ),
        points,
    ),
    # On several replicas Keras divides what each object returns.
    "compute_by_scaled_loss_objects": (
        dense(
            model=computing(
                lambda self, own, y, p: (
                    0.3 * self.huber(y, p) + 0.7 * self.squares(y, p)
                ),
                huber=keras.losses.Huber,
                squares=keras.losses.MeanSquaredError,
            ),
        ),
        points,
    ),
    "function_of_loss_objects": (
        dense(
            loss=lambda: (
                lambda y, p: (
                    0.3 * keras.losses.Huber()(y, p)
                    + 0.7 * keras.losses.MeanSquaredError()(y, p)
                )
            )
        ),
        points,
    ),
    "add_scaled_loss_object": (
        dense(
            adding(lambda x: 0.1 * keras.losses.Huber()(ops.zeros_like(x), x)),
        ),
        points,
    ),
    "compute_without_keras": (
        dense(
            regularized,
            loss=None,
            model=computing(
                lambda self, own, y, p: ops.mean(
                    keras.losses.mean_absolute_error(y, p)
                )
            ),
        ),
        points,
    ),
    "compute_declared": (
        dense(
            model=computing(
                lambda self, own, y, p: mgpu_tf.mean_over_batch(
                    keras.losses.mean_squared_error(y, p), weights=y[:, 0]
                )
            )
        ),
        points,
    ),
    "metrics_in_compute_loss": (
        dense(
            regularized,
            model=computing(
                tracked,
                tracker=lambda: keras.metrics.Mean(name="total"),
                extra_tracker=lambda: keras.metrics.Mean(name="extra"),
                weighted_tracker=lambda: keras.metrics.Mean(name="weighted"),
            ),
        ),
        points,
    ),
    "metrics_in_call": (dense(InCall), points),
    # A `compute_metrics` of one's own, and results that are dicts.
    "own_metrics": (dense(model=scoring(own_mean), metrics=["mae"]), points),
    "f1_of_two_metrics": (
        dense(
            model=scoring(
                f1,
                precision=keras.metrics.Precision,
                recall=keras.metrics.Recall,
            )
        ),
        labels,
    ),
    "metric_read_before_its_update": (
        dense(model=scoring(read_before, extra=keras.metrics.Mean)),
        points,
    ),
    "dict_result": (
        dense(metrics=lambda: [TwoResults(dtype="float64")]),
        points,
    ),
    # What is not proven to add up is computed from the rows of all.
    "add_log": (dense(adding(lambda x: ops.log(ops.sum(x * x)))), points),
    "add_masked_mean": (
        dense(adding(lambda x: ops.sum(x * x) / ops.sum(ops.abs(x)))),
        points,
    ),
    "add_variance": (dense(adding(ops.var)), points),
    "compute_log": (
        dense(model=computing(lambda self, own, y, p: ops.log(own()))),
        points,
    ),
    "compute_pairs": (
        dense(
            model=computing(
                lambda self, own, y, p: ops.mean(
                    ops.matmul(p, ops.transpose(p))
                )
            )
        ),
        points,
    ),
    "log_of_the_largest": (
        dense(
            model=scoring(
                lambda self, results, y, p: results | {"own": ops.max(p)}
            )
        ),
        points,
    ),
    "softmax_of_rows": (dense(loss=lambda: softmax_of_rows), labels),
    "softmax_along_rows": (dense(loss=lambda: softmax_along_rows), labels),
    "cox": (dense(loss=lambda: cox), labels),
    "largest_of_segment": (dense(loss=lambda: largest_of_segment), labels),
    "dice": (dense(loss=keras.losses.Dice), labels),
    "tversky": (dense(loss=keras.losses.Tversky), labels),
    "pairs": (dense(loss=lambda: pairs), labels),
    # Statistics of inputs with a mask.
    "masked_batch_normalization": (
        tagger(synchronized, loss=crossentropy),
        words,
    ),
}

_references = {}


def reference(name):
    """What Keras gives, computed once."""
    if name not in _references:
        build, data = ROWS_OF[name]
        keras.utils.set_random_seed(0)
        with tf.device("CPU:0"):
            model = build()
            _references[name] = run(model, model, data)
    return _references[name]


def run(trains, model, data):
    data = data()
    options = {"batch_size": BATCH, "verbose": 0}
    history = trains.fit(**data, **options, epochs=2, shuffle=False)
    scores = trains.evaluate(**data, **options, return_dict=True)
    model = model() if callable(model) and trains is not model else model
    weights = [*model.get_weights(), *model.optimizer.variables]
    return [np.asarray(w) for w in weights], history.history, scores


QUICK = [
    "ignore_class",
    "compute_by_scaled_loss_objects",
    "add_after_batch_normalization",
    "pairs",
]
# Each way in which a loss or a metric reduces rows once; what differs by a term
# or by a function is in the matrix.
FULL = [
    "add_log",
    "compute_log",
    "dict_result",
    "ignore_class_weighted_mean",
    "function_mean_and_sum",
    "function_mean_of_each_column",
    "add_mean_and_sum",
    "add_declared_weighted",
    "regularizer",
    "compute_and_sum",
    "compute_declared",
    "metrics_in_compute_loss",
    "metrics_in_call",
    "f1_of_two_metrics",
    "metric_read_before_its_update",
    "add_masked_mean",
    "log_of_the_largest",
    "softmax_along_rows",
    "tversky",
    "masked_batch_normalization",
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", tiered(list(ROWS_OF), QUICK, FULL))
def test_same_as_keras(name, column, strategies, caplog):
    weights, history, scores = reference(name)
    build, data = ROWS_OF[name]
    trainer = mgpu_tf.Trainer(build, strategies[column])
    ours = run(trainer, lambda: trainer.model, data)
    for mine, theirs in zip(ours[0], weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)
    assert list(ours[1]) == list(history)
    for key, values in history.items():
        np.testing.assert_allclose(ours[1][key], values, rtol=1e-9)
    assert set(ours[2]) == set(scores)
    for key, value in scores.items():
        np.testing.assert_allclose(ours[2][key], value, rtol=1e-9)
    assert "not a sum over examples" not in caplog.text
