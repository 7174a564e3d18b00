"""Every loss of Keras with every reduction, weights and masks."""

import inspect

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.conformance import models
from tests.conformance.harness import add, row

GROUP = "Losses"
# "mean" is another name of the first.
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


def _binary():
    return models.one_hot()


def _signs():
    return 2 * models.one_hot() - 1


def _positive():
    return np.abs(models.numbers(width=models.CLASSES))


def _numbers():
    return models.numbers(width=models.CLASSES)


def _labels():
    """Sequences of labels, one shorter than the predictions."""
    return models.random(8).integers(1, models.CLASSES, size=(29, 2))


def _of_length_one(x):
    """What Circle is defined for; otherwise it grows to 1e95 in two epochs."""
    return keras.ops.normalize(x, axis=-1)


# The targets and the activation that suit a loss, numbers and none else.
SUITED = {
    "BinaryCrossentropy": (_binary, "sigmoid"),
    "BinaryFocalCrossentropy": (_binary, "sigmoid"),
    "CategoricalCrossentropy": (models.one_hot, "softmax"),
    "CategoricalFocalCrossentropy": (models.one_hot, "softmax"),
    "CategoricalGeneralizedCrossEntropy": (models.kinds, "softmax"),
    "CategoricalHinge": (models.one_hot, None),
    "Circle": (models.kinds, _of_length_one),
    "Dice": (_binary, "sigmoid"),
    "Hinge": (_signs, None),
    "KLDivergence": (models.one_hot, "softmax"),
    "MeanSquaredLogarithmicError": (_positive, "softplus"),
    "Poisson": (_positive, "softplus"),
    "SparseCategoricalCrossentropy": (models.kinds, "softmax"),
    "SquaredHinge": (_signs, None),
    "Tversky": (_binary, "sigmoid"),
    "CTC": (_labels, None),
}
OVER_THE_BATCH = {"Circle", "Dice", "Tversky"}


def classes():
    """The losses of Keras, by name."""
    return {
        name: found
        for name, found in vars(keras.losses).items()
        if inspect.isclass(found)
        and issubclass(found, keras.losses.Loss)
        and found is not keras.losses.Loss
    }


def _for_ctc(loss):
    """A prediction for each of four steps."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((models.FEATURES, 1)),
                layers.Dense(4, activation="tanh"),
                layers.Dense(models.CLASSES),
            ]
        )
        return models.compiled(model, loss())

    return build


def _add(name, loss, reduction):
    targets, activation = SUITED.get(name, (_numbers, None))

    def make():
        return loss(reduction=reduction)

    def program(run):
        x, build = models.points(), _for_ctc(make)
        if name != "CTC":
            build = models.dense(
                width=models.CLASSES, activation=activation, loss=make
            )
        else:
            x = x[..., None]
        run.fit(
            build,
            x,
            targets(),
            sample_weight=models.weights(),
        )

    # TensorFlow computes CTC in float32.
    tolerance = 1e-6 if name == "CTC" else 1e-9
    add(
        GROUP,
        f"{name} {reduction}, weighted",
        program,
        tolerance=tolerance,
    )


def _add_masked(name, loss):
    targets, activation = SUITED.get(name, (_numbers, None))

    def program(run):
        y = targets()
        if y.ndim > 1:
            y = np.repeat(y[:, None], models.LENGTH, axis=1)
        else:
            y = np.repeat(y[:, None], models.LENGTH, axis=1)[..., None]
        build = models.per_word(
            lambda: layers.Dense(4, activation=activation),
            width=models.CLASSES,
            loss=loss,
        )
        run.fit(build, models.words(), y)

    if name not in OVER_THE_BATCH | {"CTC"}:
        add(GROUP, f"{name}, masked", program)


for _name, _loss in sorted(classes().items()):
    for _reduction in REDUCTIONS:
        _add(_name, _loss, _reduction)
    _add_masked(_name, _loss)
_add("Huber", keras.losses.Huber, "mean")


@row(GROUP)
def loss_by_name(run):
    build = models.dense(loss="mae")
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def loss_a_function_of_each_example(run):
    def loss(y, prediction):
        return tf.reduce_mean(tf.square(y - prediction), axis=-1)

    build = models.dense(loss=lambda: loss)
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def loss_a_function_that_returns_a_mean(run):
    def loss(y, prediction):
        return tf.reduce_mean(tf.square(y - prediction))

    build = models.dense(loss=lambda: loss)
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def loss_a_function_that_returns_a_sum(run):
    def loss(y, prediction):
        return tf.reduce_sum(tf.square(y - prediction))

    build = models.dense(loss=lambda: loss, optimizer=lambda: models.sgd(0.01))
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def loss_a_function_of_a_correlation(run):
    """Not a sum over examples: it needs the whole batch."""

    def loss(y, prediction):
        y, prediction = (
            y - tf.reduce_mean(y),
            prediction - tf.reduce_mean(prediction),
        )
        return -tf.reduce_sum(y * prediction) / (
            tf.norm(y) * tf.norm(prediction)
        )

    build = models.dense(loss=lambda: loss)
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def loss_contrastive_within_the_batch(run):
    """Each example against all others of the batch."""

    def loss(y, prediction):
        near = tf.matmul(prediction, prediction, transpose_b=True)
        same = tf.cast(tf.equal(y, tf.transpose(y)), near.dtype)
        return tf.reduce_mean(tf.nn.log_softmax(near) * -same, axis=-1)

    build = models.dense(loss=lambda: loss, width=3)
    y = models.kinds()[:, None].astype("float64")
    run.fit(build, models.points(), y)


class PerExample(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_sum(tf.abs(y_true - y_pred), axis=-1)


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_mean(tf.abs(y_true - y_pred))


class MeanInCall(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred))


for _class in (PerExample, OwnCall, MeanInCall):

    def _own(run, loss=_class):
        build = models.dense(loss=loss)
        run.fit(build, models.points(), models.numbers())

    add(GROUP, f"a loss of one's own, {_class.__name__}", _own)


def _ignoring(reduction, weighted):
    def program(run):
        def loss():
            return keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, ignore_class=0, reduction=reduction
            )

        build = models.dense(width=models.CLASSES, loss=loss)
        weight = {"sample_weight": models.weights()} if weighted else {}
        run.fit(build, models.points(), models.kinds(), **weight)

    return program


for _reduction in REDUCTIONS:
    for _weighted in (False, True):
        _end = ", weighted" if _weighted else ""
        add(
            GROUP,
            f"ignore_class, {_reduction}{_end}",
            _ignoring(_reduction, _weighted),
        )


@row(GROUP)
def ignore_class_for_each_pixel(run):
    """As in segmentation: a class for each place, some ignored."""

    def build():
        model = keras.Sequential(
            [keras.Input((6, 6, 3)), layers.Conv2D(models.CLASSES, 1)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=1
        )
        return models.compiled(model, loss, metrics=["accuracy"])

    y = models.random(9).integers(0, models.CLASSES, size=(29, 6, 6))
    run.fit(build, models.images(), y)


@row(GROUP)
def ignore_class_and_a_mask(run):
    def loss():
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0
        )

    build = models.per_word(width=models.CLASSES, loss=loss)
    y = models.random(9).integers(0, models.CLASSES, size=(29, 5))
    run.fit(build, models.words(), y)


@row(GROUP)
def weights_for_each_step_of_a_sequence(run):
    build = models.per_word()
    weight = models.random(9).uniform(0.1, 2, size=(29, 5))
    run.fit(
        build,
        models.words(padded=False),
        models.points(29, 10).reshape(29, 5, 2),
        sample_weight=weight,
    )


@row(GROUP)
def weights_and_a_mask(run):
    build = models.per_word(weighted_metrics=["mae"])
    weight = models.random(9).uniform(0.1, 2, size=(29, 5))
    y = models.points(29, 10).reshape(29, 5, 2)
    run.fit(build, models.words(), y, sample_weight=weight)


@row(GROUP)
def a_batch_whose_weights_are_zero(run):
    weight = models.weights()
    weight[8:16] = 0.0
    build = models.dense(
        loss=lambda: keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        )
    )
    run.fit(build, models.points(), models.numbers(), sample_weight=weight)


@row(GROUP)
def a_replica_whose_examples_are_masked_out(run):
    words = models.words()
    words[:4] = 0
    y = models.points(29, 10).reshape(29, 5, 2)
    run.fit(models.per_word(), words, y)


def _added(function, name):
    class Adds(layers.Layer):
        def call(self, inputs):
            self.add_loss(function(inputs))
            return inputs

    def program(run):
        build = models.dense(Adds, optimizer=lambda: models.sgd(0.02))
        run.fit(build, models.points(), models.numbers())

    add(GROUP, f"add_loss of {name}", program)


_added(lambda x: 0.1 * tf.reduce_mean(tf.square(x)), "a mean over the batch")
_added(lambda x: 0.1 * tf.reduce_sum(tf.square(x)), "a sum over the batch")
_added(lambda x: 0.1 * tf.reduce_mean(tf.square(x), axis=-1), "a vector")
_added(lambda x: tf.constant(0.5, x.dtype), "a constant")
_added(lambda x: tf.reduce_max(tf.square(x)), "a maximum over the batch")


@row(GROUP)
def add_loss_without_a_compiled_loss(run):
    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(2, activation="tanh")
            self.outer = layers.Dense(models.FEATURES)

        def call(self, x):
            out = self.outer(self.inner(x))
            self.add_loss(tf.reduce_mean(tf.square(out - x)))
            return out

    def build():
        return models.compiled(Autoencoder(), None)

    run.fit(build, models.points())


@row(GROUP)
def regularizers_of_every_kind(run):
    def middle():
        return layers.Dense(
            4,
            kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
            bias_regularizer="l2",
            activity_regularizer=keras.regularizers.L2(0.03),
        )

    run.fit(models.dense(middle), models.points(), models.numbers())


@row(GROUP, floatx="float32", tolerance=1e-5)
def regularizer_orthogonal(run):
    def middle():
        return layers.Dense(
            4,
            kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1),
        )

    run.fit(models.dense(middle), models.points(), models.numbers())


def _computing(name, compute):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(4, activation="tanh")
            self.outer = layers.Dense(1)
            self.gauge = keras.metrics.Mean(name="gauge")

        def call(self, x):
            return self.outer(self.inner(x))

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            def supers():
                return super(Own, self).compute_loss(
                    x, y, y_pred, sample_weight, training
                )

            return compute(self, x, y, y_pred, supers)

    def program(run):
        def build():
            return models.compiled(Own(), optimizer=models.sgd(0.02))

        run.fit(build, models.points(), models.numbers())

    add(GROUP, f"compute_loss that {name}", program)


def _gauged(self, x, y, y_pred, supers):
    self.gauge.update_state(tf.abs(y - y_pred))
    return supers()


_computing("returns Keras's", lambda self, x, y, p, supers: supers())
_computing("doubles Keras's", lambda self, x, y, p, supers: 2.0 * supers())
_computing(
    "adds a mean", lambda self, x, y, p, s: s() + tf.reduce_mean(tf.square(p))
)
_computing(
    "adds a sum", lambda self, x, y, p, s: s() + tf.reduce_sum(tf.square(p))
)
_computing(
    "returns a mean", lambda self, x, y, p, s: tf.reduce_mean(tf.square(y - p))
)
_computing(
    "returns a sum", lambda self, x, y, p, s: tf.reduce_sum(tf.square(y - p))
)
_computing("updates a metric", _gauged)
