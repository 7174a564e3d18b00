"""Tables, rankings, series and equations from outside."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: tables and rankings"


def adam(rate=0.02):
    return keras.optimizers.Adam(rate)


class WideDeep(keras.Model):
    """Wide & deep: one optimizer for each half, one loss."""

    def __init__(self):
        super().__init__()
        self.wide = layers.Dense(1)
        self.deep = mlp(1, 4)

    def compile(self, wide, deep, **options):
        super().compile(optimizer=deep, **options)
        self.wide_optimizer = wide

    def call(self, inputs):
        crossed, x = inputs
        return ops.sigmoid(0.5 * (self.wide(crossed) + self.deep(x)))

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        of_wide, of_deep = (
            self.wide.trainable_variables,
            self.deep.trainable_variables,
        )
        wide, deep = tape.gradient(loss, (of_wide, of_deep))
        self.wide_optimizer.apply_gradients(zip(wide, of_wide, strict=True))
        self.optimizer.apply_gradients(zip(deep, of_deep, strict=True))
        return self.compute_metrics(x, y, y_pred, sample_weight)


@row(GROUP)
def wide_and_deep_with_two_optimizers(run):
    def build():
        model = WideDeep()
        model.compile(
            keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
            keras.optimizers.Adagrad(0.05),
            loss="binary_crossentropy",
            metrics=["accuracy"],
            jit_compile=False,
        )
        return model

    crossed = np.eye(8)[outside.kinds(8)]
    y = outside.kinds(2, seed=14).astype("float64")[:, None]
    outside.use(
        run,
        build,
        [crossed, outside.points()],
        y,
        sample_weight=outside.weights(),
    )


class Cross(layers.Layer):
    """DCN: features times a linear map of themselves."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1])
        self.inner.build(shape)

    def call(self, first, x):
        return first * self.inner(x) + x


@row(GROUP)
def crosses_and_factorization_of_features(run):
    """DCN beside a factorization machine, from looked up strings."""

    def build():
        lookup = layers.StringLookup(vocabulary=["a", "b", "c"])
        color = keras.Input((1,), dtype="string", name="color")
        numbers = keras.Input((4,), name="numbers")
        fields = layers.Embedding(4, 4)(lookup(color))
        both = ops.concatenate([fields, numbers[:, None]], axis=1)
        square = ops.square(ops.sum(both, axis=1))
        pairs = 0.5 * ops.sum(square - ops.sum(both**2, axis=1), axis=1)
        flat = layers.Flatten()(both)
        crossed = Cross()(flat, flat)
        crossed = Cross()(flat, crossed)
        out = layers.Dense(1)(crossed) + pairs[:, None]
        model = keras.Model({"color": color, "numbers": numbers}, out)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        return models.compiled(model, loss, adam(), metrics=["auc"])

    random = models.random(91)
    x = {
        "color": random.choice(["a", "b", "c", "z"], (outside.EXAMPLES, 1)),
        "numbers": outside.points(),
    }
    y = outside.kinds(2).astype("float64")[:, None]
    outside.on_batches(run, build, outside.batches(x, y))


class Tree(keras.Model):
    """keras.io's neural decision tree: chances of leaves along its levels."""

    def __init__(self, depth=3, classes=3):
        super().__init__()
        self.depth, self.leaves = depth, 2**depth
        mask = np.eye(4)[models.random(92).choice(4, 3, replace=False)]
        self.used = ops.convert_to_tensor(mask)
        self.pi = self.add_weight(
            shape=(self.leaves, classes), initializer="random_normal", name="pi"
        )
        self.decide = layers.Dense(self.leaves, activation="sigmoid")

    def call(self, x):
        size = ops.shape(x)[0]
        x = ops.matmul(x, ops.transpose(self.used))
        decisions = ops.expand_dims(self.decide(x), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        mu = ops.ones([size, 1, 1])
        begin, end = 1, 2
        for level in range(self.depth):
            mu = ops.reshape(mu, [size, -1, 1])
            mu = ops.tile(mu, (1, 1, 2))
            mu = mu * decisions[:, begin:end, :]
            begin, end = end, end + 2 ** (level + 1)
        mu = ops.reshape(mu, [size, self.leaves])
        return ops.matmul(mu, ops.softmax(self.pi))


@row(GROUP)
def a_neural_decision_tree(run):
    def build():
        return models.compiled(
            Tree(),
            "sparse_categorical_crossentropy",
            adam(),
            metrics=["accuracy"],
        )

    outside.use(run, build, outside.points(), outside.kinds())


class Gated(layers.Layer):
    """keras.io's gated residual network."""

    def __init__(self, units):
        super().__init__()
        self.one = layers.Dense(units, activation="elu")
        self.two = layers.Dense(units)
        self.gate = layers.Dense(units, activation="sigmoid")
        self.value = layers.Dense(units)
        self.norm = layers.LayerNormalization()
        self.project = layers.Dense(units)

    def call(self, x):
        y = self.two(self.one(x))
        y = self.value(y) * self.gate(y)
        return self.norm(self.project(x) + y)


@row(GROUP)
def variables_selected_by_gates(run):
    """keras.io's GRN and VSN, over a dict of features with weights."""

    def build():
        inputs = {name: keras.Input((1,), name=name) for name in "abcd"}
        seen = [Gated(4)(layers.Dense(4)(x)) for x in inputs.values()]
        weights = Gated(4)(layers.concatenate(list(inputs.values())))
        weights = ops.expand_dims(ops.softmax(weights), axis=-1)
        chosen = ops.sum(weights * ops.stack(seen, axis=1), axis=1)
        out = layers.Dense(1, activation="sigmoid")(chosen)
        return models.compiled(
            keras.Model(inputs, out),
            keras.losses.BinaryCrossentropy(),
            adam(),
            metrics=[keras.metrics.BinaryAccuracy(name="accuracy")],
        )

    x = dict(zip("abcd", np.split(outside.points(), 4, axis=1), strict=True))
    y = outside.kinds(2).astype("float64")[:, None]
    data = outside.batches(x, y, outside.weights())
    outside.on_batches(run, build, data)


def by_group(y_true, y_pred):
    """A listwise softmax in groups: a query's documents are rows."""
    group = tf.cast(y_true[:, 0], tf.int32)
    gain, scores = y_true[:, 1], y_pred[:, 0]
    largest = tf.stop_gradient(tf.math.unsorted_segment_max(scores, group, 5))
    shifted = tf.exp(scores - tf.gather(largest, group))
    total = tf.math.unsorted_segment_sum(shifted, group, 5)
    log = tf.math.log(shifted / tf.gather(total, group))
    return -tf.reduce_sum(gain * log) / tf.reduce_sum(gain)


def pairwise(y_true, y_pred):
    """A hinge of all pairs of rows whose order is known."""
    gain, scores = y_true[:, 1], y_pred[:, 0]
    better = ops.cast(gain[:, None] > gain[None, :], scores.dtype)
    hinge = ops.relu(1.0 - (scores[:, None] - scores[None, :]))
    return ops.sum(better * hinge) / ops.maximum(ops.sum(better), 1.0)


def _ranked():
    gain = models.random(93).uniform(size=outside.EXAMPLES)
    return np.stack([outside.kinds(5), gain], axis=1)


@row(GROUP)
def ranking_by_queries_of_the_batch(run):
    build = models.dense(loss=lambda: by_group, optimizer=adam)
    outside.use(run, build, outside.points(), _ranked())


@row(GROUP)
def ranking_by_pairs_of_the_batch(run):
    build = models.dense(loss=lambda: pairwise, optimizer=adam)
    outside.use(run, build, outside.points(), _ranked())


@row(GROUP)
def ranking_of_lists_in_rows(run):
    """keras-rs's: a list of documents a row, a softmax along it."""

    def listwise(y_true, y_pred):
        log = ops.log_softmax(y_pred, axis=1)
        return -ops.sum(y_true * log, axis=1)

    def build():
        inputs = keras.Input((5, 3))
        x = layers.Dense(6, activation="tanh")(inputs)
        x = ops.squeeze(layers.Dense(1)(x), axis=-1)
        return models.compiled(keras.Model(inputs, x), listwise, adam())

    random = models.random(94)
    x = random.normal(size=(outside.EXAMPLES, 5, 3))
    outside.use(run, build, x, random.uniform(size=(outside.EXAMPLES, 5)))


def cox(y_true, y_pred):
    """The partial likelihood of survival, rows sorted by their times."""
    order = tf.argsort(y_true[:, 0], direction="DESCENDING")
    event = tf.gather(y_true[:, 1], order)
    risk = tf.gather(y_pred[:, 0], order)
    total = tf.math.cumulative_logsumexp(risk)
    return -tf.math.divide_no_nan(
        tf.reduce_sum((risk - total) * event), tf.reduce_sum(event)
    )


class Concordance(keras.metrics.Metric):
    """The share of pairs in order, of the pairs of each batch."""

    def __init__(self, name="concordance", **options):
        super().__init__(name=name, **options)
        self.right = self.add_weight(shape=(), initializer="zeros")
        self.pairs = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        sooner = y_true[:, None, 0] < y_true[None, :, 0]
        known = ops.cast(sooner, "float64") * y_true[:, 1:2]
        higher = y_pred[:, None, 0] > y_pred[None, :, 0]
        self.right.assign_add(ops.sum(known * ops.cast(higher, "float64")))
        self.pairs.assign_add(ops.sum(known))

    def result(self):
        return self.right / self.pairs


@row(GROUP)
def survival_by_a_partial_likelihood(run):
    build = models.dense(
        loss=lambda: cox, optimizer=adam, metrics=lambda: [Concordance()]
    )
    time = models.random(95).uniform(size=outside.EXAMPLES)
    event = (outside.kinds(2) > 0).astype("float64")
    outside.use(run, build, outside.points(), np.stack([time, event], axis=1))


class Fair(keras.Model):
    """A penalty on the gap between the mean scores of two groups."""

    def __init__(self):
        super().__init__()
        self.network = mlp(1, 4, activation="sigmoid")

    def call(self, x):
        return self.network(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        group = x[:, 0] > 0
        one = tf.reduce_mean(tf.boolean_mask(y_pred[:, 0], group))
        two = tf.reduce_mean(tf.boolean_mask(y_pred[:, 0], ~group))
        return loss + 2.0 * tf.abs(one - two)


@row(GROUP)
def a_penalty_on_the_gap_between_groups(run):
    def build():
        return models.compiled(
            Fair(), "binary_crossentropy", adam(), metrics=["accuracy"]
        )

    y = outside.kinds(2).astype("float64")[:, None]
    outside.use(run, build, outside.points(), y)


@row(GROUP)
def a_mixture_of_densities(run):
    """Means, spreads and shares; a likelihood by logsumexp; layers' chances."""

    def likelihood(y_true, y_pred):
        share, mean, spread = ops.split(y_pred, 3, axis=1)
        log = -0.5 * ops.square((y_true - mean) / ops.exp(spread)) - spread
        return -ops.logsumexp(ops.log_softmax(share) + log, axis=1)

    build = models.dense(width=9, loss=lambda: likelihood, optimizer=adam)
    outside.use(run, build, outside.points(), outside.numbers())


class Balance(keras.Model):
    """Physics: equations inside and values at a border of fewer rows."""

    def __init__(self):
        super().__init__()
        self.network = mlp(1, 2)

    def train_step(self, data):
        inside, (border, value) = data
        with tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as second:
                second.watch(inside)
                with tf.GradientTape() as first:
                    first.watch(inside)
                    u = self.network(inside)
                slopes = first.gradient(u, inside)
                by_x, by_t = slopes[:, :1], slopes[:, 1:]
            curve = second.gradient(by_x, inside)[:, :1]
            residual = tf.reduce_mean(tf.square(by_t + u * by_x - 0.1 * curve))
            gap = tf.reduce_mean(tf.square(self.network(border) - value))
            loss = residual + gap
        learn(self.optimizer, tape, loss, self.network.trainable_variables)
        return {"loss": loss, "residual": residual, "border": gap}


@row(GROUP)
def physics_with_fewer_rows_at_the_border(run):
    def build():
        return models.compiled(Balance(), None, adam())

    border = outside.points(2, 97, 18), outside.numbers(examples=18)
    data = tf.data.Dataset.zip(
        (outside.batches(outside.points(2)), outside.batches(*border, size=5))
    )
    run.fit(build, data)


class Ode(layers.Layer):
    """Runge and Kutta's steps of a small network."""

    def __init__(self, width, steps=4):
        super().__init__()
        self.steps = steps
        self.slope = layers.Dense(width, activation="tanh")

    def call(self, x):
        step = 1.0 / self.steps

        def body(i, y):
            a = self.slope(y)
            b = self.slope(y + 0.5 * step * a)
            c = self.slope(y + 0.5 * step * b)
            d = self.slope(y + step * c)
            return i + 1, y + step / 6.0 * (a + 2.0 * b + 2.0 * c + d)

        if not self.slope.built:
            self.slope.build(x.shape)
        _, x = tf.while_loop(lambda i, y: i < self.steps, body, (0, x))
        return x


@row(GROUP)
def a_differential_equation_as_a_layer(run):
    build = models.dense(lambda: Ode(4))
    outside.use(run, build, outside.points(), outside.numbers())


class PopArt(keras.Model):
    """Targets are standardized by moments that each batch moves."""

    def __init__(self):
        super().__init__()
        self.network = mlp(1, 4)
        options = {"shape": (), "trainable": False}
        self.mean = self.add_weight(initializer="zeros", name="mu", **options)
        self.square = self.add_weight(initializer="ones", name="nu", **options)

    def call(self, x):
        spread = ops.sqrt(self.square - self.mean**2 + 1e-3)
        return self.network(x) * spread + self.mean

    def train_step(self, data):
        x, y = data
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(y))
        self.square.assign(0.9 * self.square + 0.1 * ops.mean(y**2))
        spread = ops.sqrt(self.square - self.mean**2 + 1e-3)
        with tf.GradientTape() as tape:
            found = self.network(x)
            loss = ops.mean(ops.square(found - (y - self.mean) / spread))
        learn(self.optimizer, tape, loss, self.network.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def targets_standardized_as_they_come(run):
    def build():
        return models.compiled(PopArt(), "mse", adam())

    outside.use(run, build, outside.points(), 3.0 + 2.0 * outside.numbers())


class Personal(keras.Model):
    """BPR: each row's item against the next row's."""

    def __init__(self):
        super().__init__()
        self.users, self.items = layers.Embedding(10, 4), layers.Embedding(8, 4)

    def call(self, pair):
        user, item = pair
        return ops.sum(self.users(user) * self.items(item), axis=-1)

    def train_step(self, data):
        user, item = data
        with tf.GradientTape() as tape:
            right = self((user, item))
            wrong = self((user, tf.roll(item, 1, axis=0)))
            loss = -tf.reduce_mean(tf.math.log_sigmoid(right - wrong))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def ranking_against_the_next_row(run):
    def build():
        return models.compiled(Personal(), None, adam())

    data = outside.kinds(10), outside.kinds(8, seed=13)
    run.fit(build, outside.batches(*data))


@row(GROUP)
def a_moment_of_the_batch_as_a_penalty(run):
    """A functional model with an `ops` penalty over rows, by `add_loss`."""

    class Decorrelate(layers.Layer):
        def call(self, x):
            x = x - ops.mean(x, axis=0, keepdims=True)
            size = ops.cast(ops.shape(x)[0], x.dtype)
            covariance = ops.matmul(ops.transpose(x), x) / size
            off = covariance - ops.diag(ops.diagonal(covariance))
            self.add_loss(0.1 * ops.sum(ops.square(off)))
            return x

    build = models.dense(Decorrelate)
    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def a_last_batch_smaller_than_the_replicas(run):
    """A functional model and its own loss of the batch on 2 rows."""

    def loss(y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred)) / ops.sum(ops.abs(y_true))

    build = models.dense(loss=lambda: loss, optimizer=adam, metrics=["mae"])
    outside.use(
        run,
        build,
        outside.points(examples=outside.SHORT),
        outside.numbers(examples=outside.SHORT),
    )


@row(GROUP, tolerance=1e-5)
def lora_on_a_dense_network(run):
    """Keras's guide to LoRA: only small matrices learn, in float32."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(3),
            ]
        )
        for layer in model.layers:
            layer.enable_lora(2)
        return models.compiled(model, "mse", keras.optimizers.AdamW(0.02))

    outside.use(run, build, outside.points(), outside.numbers(3))
