"""Losses and metrics from outside, written over the whole batch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.conformance import models, outside
from tests.conformance.harness import add, row
from tests.conformance.outside import LENGTH, WORDS

GROUP = "Outside: losses and metrics"


def language_model(loss, flat=False, **options):
    """What builds a model that predicts a word at each place."""

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6)(inputs)
        x = layers.Dense(6, activation="tanh")(x)
        x = layers.Dense(WORDS)(x)
        if flat:
            x = ops.reshape(x, (-1, WORDS))
        optimizer = keras.optimizers.Adam(0.02)
        model = keras.Model(inputs, x)
        return models.compiled(model, loss, optimizer, **options)

    return build


def _next_words():
    return outside.words(), outside.words(seed=15)


def flattened(y_true, y_pred):
    """Logits as `[tokens, words]`, as for PyTorch's cross entropy."""
    return keras.losses.sparse_categorical_crossentropy(
        tf.reshape(y_true, (-1,)),
        tf.reshape(y_pred, (-1, WORDS)),
        from_logits=True,
    )


@row(GROUP)
def tokens_flattened_in_the_loss(run):
    outside.use(run, language_model(flattened), *_next_words())


@row(GROUP)
def tokens_flattened_in_the_model(run):
    outside.use(run, language_model(flattened, flat=True), *_next_words())


@row(GROUP)
def tokens_flattened_with_weights(run):
    def loss(y_true, y_pred):
        labels = tf.reshape(y_true, (-1,))
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, tf.reshape(y_pred, (-1, WORDS)), from_logits=True
        )
        weight = tf.where(labels > 4, 2.0, 0.5)
        return tf.reduce_mean(losses * tf.cast(weight, losses.dtype))

    outside.use(run, language_model(loss), *_next_words())


def masked_loss(y_true, y_pred):
    """Of TensorFlow's tutorial on translation."""
    losses = keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )
    mask = tf.cast(y_true != 0, losses.dtype)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def masked_acc(y_true, y_pred):
    """The same tutorial's ratio of two sums."""
    found = tf.cast(tf.argmax(y_pred, axis=-1), y_true.dtype)
    match = tf.cast(found == y_true, tf.float32)
    mask = tf.cast(y_true != 0, tf.float32)
    return tf.reduce_sum(match * mask) / tf.reduce_sum(mask)


@row(GROUP)
def masked_loss_and_masked_accuracy(run):
    build = language_model(masked_loss, metrics=[masked_acc, masked_loss])
    outside.use(run, build, *_next_words())


@row(GROUP)
def masked_accuracy_alone(run):
    build = language_model(
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[masked_acc],
    )
    outside.use(run, build, *_next_words())


class ForCausalLM(keras.Model):
    """A model of transformers: labels are an input, the step takes the loss."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(WORDS, 6)
        self.mix = layers.GRU(6, return_sequences=True)
        self.head = layers.Dense(WORDS)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, inputs, training=False):
        return {"logits": self.head(self.mix(self.embed(inputs["input_ids"])))}

    def hf_compute_loss(self, labels, logits):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        labels, logits = labels[:, 1:], logits[:, :-1]
        unmasked = loss_fn(tf.nn.relu(labels), logits)
        mask = tf.cast(labels != -100, unmasked.dtype)
        total = tf.reduce_sum(unmasked * mask) / tf.reduce_sum(mask)
        return tf.reshape(total, (1,))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            logits = self(data, training=True)["logits"]
            loss = self.hf_compute_loss(data["labels"], logits)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        logits = self(data, training=False)["logits"]
        self.loss_tracker.update_state(
            self.hf_compute_loss(data["labels"], logits)
        )
        return {"loss": self.loss_tracker.result()}


@row(GROUP)
def a_causal_model_whose_labels_are_inputs(run):
    def build():
        return models.compiled(
            ForCausalLM(), None, keras.optimizers.AdamW(0.02)
        )

    ids = outside.words()
    labels = np.where(ids == 0, -100, ids)
    data = outside.batches({"input_ids": ids, "labels": labels})
    outside.on_batches(run, build, data, predict=False)


class Classifier(keras.Model):
    """Tokens with labels of -100, chosen by a boolean mask."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(WORDS, 6)
        self.head = layers.Dense(3)

    def call(self, inputs):
        return self.head(self.embed(inputs))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        active = tf.reshape(y, (-1,)) != -100
        logits = tf.boolean_mask(tf.reshape(y_pred, (-1, 3)), active)
        labels = tf.boolean_mask(tf.reshape(y, (-1,)), active)
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
        return tf.reduce_mean(losses)


@row(GROUP)
def token_classification_by_a_boolean_mask(run):
    ids = outside.words()
    labels = np.where(ids == 0, -100, ids % 3)

    def build():
        return models.compiled(Classifier(), None)

    outside.use(run, build, ids, labels)


class RetinaNet(keras.Model):
    """keras-cv's: two heads, losses that are sums, weights over their sum."""

    def __init__(self):
        super().__init__()
        self.backbone = layers.Dense(6, activation="tanh")
        self.box = layers.Dense(5 * 4)
        self.kind = layers.Dense(5 * 3)

    def call(self, x):
        x = self.backbone(x)
        box = ops.reshape(self.box(x), (-1, 5, 4))
        kind = ops.reshape(self.kind(x), (-1, 5, 3))
        return {"box": box, "classification": kind}

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, **options
    ):
        kinds = y["classification"]
        positive = ops.cast(kinds > -1, y_pred["box"].dtype)
        normalizer = ops.sum(positive)
        chosen = ops.cast(kinds != -2, positive.dtype) / normalizer
        labels = ops.one_hot(kinds, 3, dtype=positive.dtype)
        return super().compute_loss(
            x=x,
            y={"box": y["box"], "classification": labels},
            y_pred=y_pred,
            sample_weight={
                "box": positive / normalizer,
                "classification": chosen,
            },
            **options,
        )


@row(GROUP)
def detection_whose_weights_are_divided_by_their_sum(run):
    def build():
        losses = {
            "box": keras.losses.Huber(reduction="sum"),
            "classification": keras.losses.BinaryFocalCrossentropy(
                from_logits=True, reduction="sum"
            ),
        }
        return models.compiled(RetinaNet(), losses, models.sgd(0.05))

    random = models.random(21)
    y = {
        "box": random.normal(size=(outside.EXAMPLES, 5, 4)),
        "classification": random.integers(-2, 3, (outside.EXAMPLES, 5)),
    }
    data = outside.batches(outside.points(), y)
    outside.on_batches(run, build, data)


@row(GROUP)
def weights_normalized_to_a_mean_of_one(run):
    """`sample_weight / mean(sample_weight)` in an own `compute_loss`."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = layers.Dense(4, activation="tanh")
            self.out = layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

        def compute_loss(
            self,
            x=None,
            y=None,
            y_pred=None,
            sample_weight=None,
            training=True,
        ):
            if sample_weight is not None:
                sample_weight = sample_weight / ops.mean(sample_weight)
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    outside.use(
        run,
        lambda: models.compiled(Net()),
        outside.points(),
        outside.numbers(),
        sample_weight=outside.weights(),
    )


def _in_batch(y_true, y_pred):
    """Each row's likeness to itself among all rows."""
    scores = tf.matmul(y_pred, y_true, transpose_b=True)
    labels = tf.range(tf.shape(scores)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
    )


def _by_while_loop(y_true, y_pred):
    """A row's rank loss against each other row, row by row."""
    size = tf.shape(y_pred)[0]

    def body(index, total):
        gaps = y_pred[index] - y_pred
        signs = tf.sign(y_true[index] - y_true)
        total += tf.reduce_sum(tf.nn.softplus(-signs * gaps))
        return index + 1, total

    _, total = tf.while_loop(
        lambda index, total: index < size,
        body,
        (0, tf.zeros((), y_pred.dtype)),
    )
    return total / tf.cast(size * size, y_pred.dtype)


def _by_scan(y_true, y_pred):
    """A smoothed series along the rows."""
    smooth = tf.scan(
        lambda before, value: 0.7 * before + 0.3 * value, y_pred - y_true
    )
    return tf.reduce_mean(tf.square(smooth))


def _by_numpy(y_true, y_pred):
    """Weights by the ranks of the targets in the batch."""

    def ranks(values):
        return np.argsort(np.argsort(values[:, 0])).astype(values.dtype)

    rank = tf.numpy_function(ranks, [y_true], y_true.dtype)
    rank = tf.ensure_shape(rank, (None,))
    size = tf.cast(tf.shape(y_true)[0], y_true.dtype)
    errors = tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
    return tf.reduce_mean((1.0 + rank / size) * errors)


def _by_map_fn(y_true, y_pred):
    """Each row's distance to the mean of all rows."""
    centre = tf.reduce_mean(y_pred, axis=0)
    return tf.map_fn(
        lambda pair: tf.reduce_sum(tf.square(pair[0] - pair[1] - centre)),
        (y_true, y_pred),
        fn_output_signature=y_pred.dtype,
    )


for _name, _loss in {
    "in a tf.function": tf.function(_in_batch),
    "in a tf.function, ranks": tf.function(_by_while_loop),
    "in a while_loop": _by_while_loop,
    "in a scan": _by_scan,
    "in a tf.function, a scan": tf.function(_by_scan),
    "by a numpy_function": _by_numpy,
    "in a map_fn": _by_map_fn,
}.items():

    def _program(run, loss=_loss):
        build = models.dense(width=2, loss=lambda: loss)
        outside.use(run, build, outside.points(), outside.numbers(2))

    add(GROUP, f"rows mixed by a loss {_name}", _program)


class Centred(layers.Layer):
    """Subtracts the mean of the batch, in a decorated function."""

    @tf.function
    def centre(self, x):
        return x - tf.reduce_mean(x, axis=0, keepdims=True)

    def call(self, x):
        return self.centre(x)


@row(GROUP)
def rows_mixed_by_a_layer_in_a_tf_function(run):
    build = models.dense(Centred)
    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def a_declared_sum_over_pairs(run):
    """Values by pairs of rows are not values by examples."""

    def loss(y_true, y_pred):
        gaps = y_pred - tf.transpose(y_pred)
        wanted = y_true - tf.transpose(y_true)
        values = tf.reduce_mean(tf.square(gaps - wanted), axis=1)
        return mgpu_tf.sum_over_batch(values)

    build = models.dense(loss=lambda: loss, optimizer=lambda: models.sgd(0.01))
    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def a_declared_mean_of_an_in_batch_softmax(run):
    def loss(y_true, y_pred):
        scores = tf.matmul(y_pred, y_true, transpose_b=True)
        labels = tf.range(tf.shape(scores)[0])
        return mgpu_tf.mean_over_batch(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        )

    build = models.dense(width=2, loss=lambda: loss)
    outside.use(run, build, outside.points(), outside.numbers(2))


@row(GROUP)
def a_declared_mean_of_standardized_rows(run):
    def loss(y_true, y_pred):
        mean, variance = tf.nn.moments(y_pred, axes=[0])
        rows = (y_pred - mean) / tf.sqrt(variance + 1e-3)
        return mgpu_tf.mean_over_batch(
            tf.reduce_sum(tf.square(rows - y_true), axis=1)
        )

    build = models.dense(width=2, loss=lambda: loss)
    outside.use(run, build, outside.points(), outside.numbers(2))


def correlation(y_true, y_pred):
    """Pearson's, over the batch."""
    a, b = y_true - ops.mean(y_true), y_pred - ops.mean(y_pred)
    bottom = ops.sqrt(ops.sum(ops.square(a)) * ops.sum(ops.square(b)))
    return ops.sum(a * b) / bottom


@row(GROUP)
def a_metric_of_a_correlation(run):
    build = models.dense(metrics=lambda: [correlation])
    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def a_loss_of_a_correlation(run):
    def loss(y_true, y_pred):
        return 1.0 - correlation(y_true, y_pred)

    build = models.dense(loss=lambda: loss)
    outside.use(run, build, outside.points(), outside.numbers())


class MovingAverage(keras.metrics.Metric):
    """An exponential average of the batches' errors."""

    def __init__(self, name="moving", **options):
        super().__init__(name=name, **options)
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.mean(ops.abs(y_true - y_pred))
        self.value.assign(0.9 * self.value + 0.1 * error)

    def result(self):
        return self.value


@row(GROUP)
def a_metric_that_is_a_moving_average(run):
    build = models.dense(metrics=lambda: [MovingAverage()])
    outside.use(run, build, outside.points(), outside.numbers())
