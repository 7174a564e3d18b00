"""Every metric of Keras, weighted and not, and metrics of one's own."""

import inspect

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.conformance import models
from tests.conformance.harness import add, row

GROUP = "Metrics"
# Not to be compiled as they are: bases, and one that wraps a function.
BASES = {"Metric", "MeanMetricWrapper"}


def _binary():
    return models.kinds()[:, None].clip(0, 1).astype(keras.config.floatx())


def _signs():
    return 2 * _binary() - 1


def _numbers():
    return np.abs(models.numbers(width=3)) + 0.1


# Targets, width, activation and loss that suit the metrics of a family.
FAMILIES = {
    "binary": (_binary, 1, "sigmoid", "binary_crossentropy"),
    "signs": (_signs, 1, "tanh", "hinge"),
    "one_hot": (models.one_hot, 3, "softmax", "categorical_crossentropy"),
    "sparse": (models.kinds, 3, "softmax", "sparse_categorical_crossentropy"),
    "numbers": (_numbers, 3, "softplus", "mse"),
}
SUITED = {
    "AUC": ("binary", {}),
    "BinaryAccuracy": ("binary", {}),
    "BinaryCrossentropy": ("binary", {}),
    "BinaryIoU": ("binary", {}),
    "CategoricalAccuracy": ("one_hot", {}),
    "CategoricalCrossentropy": ("one_hot", {}),
    "CategoricalHinge": ("one_hot", {}),
    "F1Score": ("one_hot", {}),
    "FBetaScore": ("one_hot", {"average": "macro"}),
    "FalseNegatives": ("binary", {}),
    "FalsePositives": ("binary", {}),
    "Hinge": ("signs", {}),
    "IoU": (
        "one_hot",
        {
            "num_classes": 3,
            "target_class_ids": [0, 2],
            "sparse_y_true": False,
            "sparse_y_pred": False,
        },
    ),
    "MeanIoU": (
        "sparse",
        {"num_classes": 3, "sparse_y_pred": False},
    ),
    "OneHotIoU": ("one_hot", {"num_classes": 3, "target_class_ids": [1]}),
    "OneHotMeanIoU": ("one_hot", {"num_classes": 3}),
    "Precision": ("binary", {}),
    "PrecisionAtRecall": ("binary", {"recall": 0.5}),
    "Recall": ("binary", {}),
    "RecallAtPrecision": ("binary", {"precision": 0.5}),
    "SensitivityAtSpecificity": ("binary", {"specificity": 0.5}),
    "SparseCategoricalAccuracy": ("sparse", {}),
    "SparseCategoricalCrossentropy": ("sparse", {}),
    "SparseTopKCategoricalAccuracy": ("sparse", {"k": 2}),
    "SpecificityAtSensitivity": ("binary", {"sensitivity": 0.5}),
    "SquaredHinge": ("signs", {}),
    "TopKCategoricalAccuracy": ("one_hot", {"k": 2}),
    "TrueNegatives": ("binary", {}),
    "TruePositives": ("binary", {}),
}
# TensorFlow's top-k takes no float64; the others compute in float32.
FLOAT32 = {"TopKCategoricalAccuracy", "SparseTopKCategoricalAccuracy"}
IN_FLOAT32 = 1e-6


def classes():
    """The metrics of Keras that can be compiled, by name."""
    return {
        name: found
        for name, found in vars(keras.metrics).items()
        if inspect.isclass(found)
        and issubclass(found, keras.metrics.Metric)
        and name not in BASES
    }


def _family(name, **compiled):
    """What builds a model for a family, and its targets."""
    targets, width, activation, loss = FAMILIES[name]
    build = models.dense(
        width=width, activation=activation, loss=loss, **compiled
    )
    return build, targets()


class Gauge(layers.Layer):
    """Keeps a metric of what goes through, which takes values alone."""

    def __init__(self, metric):
        super().__init__()
        self.gauge = metric(name="gauge")

    def call(self, inputs):
        self.gauge.update_state(inputs)
        return inputs


def _add(name, metric):
    family, options = SUITED.get(name, ("numbers", {}))

    def program(run):
        if name in ("Mean", "Sum"):
            # Of values alone: they are kept by a layer.
            build = models.dense(lambda: Gauge(metric))
            run.use(build, models.points(), models.numbers())
            return
        build, y = _family(
            family,
            metrics=lambda: [metric(name="plain", **options)],
            weighted_metrics=lambda: [metric(name="weighted", **options)],
        )
        run.use(build, models.points(), y, sample_weight=models.weights())

    floatx = "float32" if name in FLOAT32 else "float64"
    tolerance = IN_FLOAT32
    if floatx == "float32":
        tolerance = 1e-5
    add(GROUP, name, program, floatx=floatx, tolerance=tolerance)


for _name, _metric in sorted(classes().items()):
    _add(_name, _metric)

for _name, _options in {
    "AUC of several labels": {"multi_label": True, "num_labels": 3},
    "AUC of precision and recall": {"curve": "PR"},
    "AUC from logits": {"from_logits": True},
}.items():

    def _auc(run, options=_options):
        build, y = _family(
            "one_hot", metrics=lambda: [keras.metrics.AUC(**options)]
        )
        run.use(build, models.points(), y)

    add(GROUP, _name, _auc, tolerance=IN_FLOAT32)

for _name in ("accuracy", "mae", "crossentropy"):

    def _named(run, name=_name):
        build, y = _family("sparse", metrics=[name], weighted_metrics=[name])
        if name == "mae":
            build, y = _family("numbers", metrics=[name])
        run.use(build, models.points(), y, sample_weight=models.weights())

    add(GROUP, f"'{_name}' by name", _named, tolerance=IN_FLOAT32)


def _own(name, metric, **options):
    def program(run):
        build = models.dense(metrics=lambda: [metric()])
        run.use(build, models.points(), models.numbers())

    add(GROUP, f"of one's own: {name}", program, **options)


class Largest(keras.metrics.Metric):
    """The largest error; it starts at zero."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.reduce_max(tf.abs(y_true - y_pred))
        self.most.assign(tf.maximum(self.most, error))

    def result(self):
        return self.most


class LargestDeclared(Largest):
    """The same, its role declared to Keras's variable."""

    def __init__(self, name="largest_declared"):
        keras.metrics.Metric.__init__(self, name=name)
        self.most = self.add_weight(
            shape=(), initializer="zeros", name="most", aggregation="mean"
        )


class Smallest(keras.metrics.Metric):
    def __init__(self, name="smallest"):
        super().__init__(name=name)
        self.least = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(1e9),
            name="least",
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.reduce_min(tf.abs(y_true - y_pred))
        self.least.assign(tf.minimum(self.least, error))

    def result(self):
        return self.least


class SmallestReset(Smallest):
    """The same, and it knows where it begins."""

    def __init__(self, name="smallest_reset"):
        super().__init__(name=name)

    def reset_state(self):
        self.least.assign(1e9)


class Begun(keras.metrics.Metric):
    """A count, a sum and a minimum that begin at numbers of their own."""

    def __init__(self, name="begun", count=2):
        super().__init__(name=name)
        self.begin = count

        def made(value, dtype=None):
            start = keras.initializers.Constant(value)
            return self.add_weight(shape=(), initializer=start, dtype=dtype)

        self.count = made(count, "int64")
        self.total, self.least = made(0.5), made(0.2)

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.abs(y_true - y_pred)
        self.count.assign_add(tf.size(error, tf.int64))
        self.total.assign_add(tf.reduce_sum(error))
        self.least.assign(tf.minimum(self.least, tf.reduce_min(error) + 0.1))

    def result(self):
        mean = self.total / tf.cast(self.count, self.dtype)
        return {"mean": mean, "least": tf.convert_to_tensor(self.least)}

    def reset_state(self):
        self.count.assign(self.begin)
        self.total.assign(0.5)
        self.least.assign(0.2)


class BegunAtSums(Begun):
    """The same without what is no sum."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.abs(y_true - y_pred)
        self.count.assign_add(tf.size(error, tf.int64))
        self.total.assign_add(tf.reduce_sum(error))


class Last(keras.metrics.Metric):
    """The mean of the last batch: a value that is set, not added up."""

    def __init__(self, name="last"):
        super().__init__(name=name)
        self.value = self.add_weight(shape=(), initializer="zeros", name="v")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.reduce_mean(tf.abs(y_true - y_pred)))

    def result(self):
        return self.value


class Several(keras.metrics.Metric):
    """Its result is a dict."""

    def __init__(self, name="several"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="t")
        self.count = self.add_weight(shape=(), initializer="zeros", name="c")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))
        self.count.assign_add(tf.cast(tf.size(y_true), self.count.dtype))

    def result(self):
        return {"total": self.total, "mean": self.total / self.count}


class Batches(keras.metrics.Metric):
    """How many batches there were."""

    def __init__(self, name="batches"):
        super().__init__(name=name)
        self.count = self.add_weight(
            shape=(), initializer="zeros", name="count", dtype="int32"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1)

    def result(self):
        return self.count


class MeanOfBatches(keras.metrics.Mean):
    """A mean in which each batch counts once, as many people write it."""

    def __init__(self, name="mean_of_batches"):
        super().__init__(name=name)

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(tf.reduce_mean(tf.abs(y_true - y_pred)))


_own("a maximum", Largest)
_own("a maximum declared as a mean", LargestDeclared)
_own("a minimum", SmallestReset)
_own("a minimum that a reset sets to zero", Smallest)
_own("a count, a sum and a minimum that begin at numbers", Begun)
_own("sums that begin at numbers", BegunAtSums)
_own("the last batch", Last)
_own("a dict", Several)
_own("a count of batches", Batches)
_own("a mean of batches", MeanOfBatches)


@row(GROUP)
def of_all_rows_run_eagerly(run):
    def ratio(y_true, y_pred):
        return tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_pred**2)

    build = models.dense(
        loss=lambda: lambda y, p: tf.reduce_mean((y - p) ** 2) - ratio(y, p),
        metrics=lambda: [Begun(), Largest(), Last(), Several(), ratio],
        run_eagerly=True,
    )
    run.use(build, models.points(), models.numbers())


@row(GROUP)
def a_function_of_each_example(run):
    def nearness(y_true, y_pred):
        return tf.exp(-tf.abs(y_true - y_pred))

    build = models.dense(metrics=[nearness])
    run.use(build, models.points(), models.numbers())


@row(GROUP)
def a_function_that_returns_a_scalar(run):
    def nearness(y_true, y_pred):
        return tf.reduce_mean(tf.exp(-tf.abs(y_true - y_pred)))

    build = models.dense(metrics=[nearness])
    run.use(build, models.points(), models.numbers())


@row(GROUP)
def a_mean_that_wraps_a_function(run):
    def square(y_true, y_pred):
        return tf.square(y_true - y_pred)

    build = models.dense(
        metrics=lambda: [keras.metrics.MeanMetricWrapper(square)]
    )
    run.use(build, models.points(), models.numbers())


@row(GROUP)
def metrics_with_a_mask(run):
    build = models.per_word(metrics=["mae"], weighted_metrics=["mse"])
    y = models.points(29, 10).reshape(29, 5, 2)
    run.use(build, models.words(), y)


@row(GROUP)
def a_metric_of_the_model_itself(run):
    """An attribute, updated in `call`."""

    class Watched(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)
            self.size = keras.metrics.Mean(name="size")

        def call(self, x):
            out = self.dense(x)
            self.size.update_state(tf.abs(out))
            return out

    def build():
        return models.compiled(Watched())

    run.use(build, models.points(), models.numbers())


class OwnMetrics(keras.Model):
    """Its `compute_metrics` adds an entry of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.extra = keras.metrics.Mean(name="extra")

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.extra.update_state(tf.abs(y - y_pred))
        results["twice"] = 2 * self.extra.result()
        return results


class OnlyOwnMetrics(OwnMetrics):
    """Its `compute_metrics` returns nothing of Keras's."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.extra.update_state(tf.abs(y - y_pred))
        return {"own": self.extra.result()}


class StaleMetrics(OwnMetrics):
    """It updates a metric after the results were read, under their names."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        del results["twice"]
        return results


for _class in (OwnMetrics, OnlyOwnMetrics, StaleMetrics):

    def _computed(run, model=_class):
        def build():
            return models.compiled(model(), metrics=["mae"])

        run.use(build, models.points(), models.numbers())

    add(GROUP, f"compute_metrics of one's own, {_class.__name__}", _computed)
