"""Steps from outside that combine gradients: of tasks, of steps, of layers."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: tasks and gradients"


def adam(rate=0.02):
    return keras.optimizers.Adam(rate)


class Uncertain(layers.Layer):
    """Losses of two tasks weighted by what is learned (Kendall)."""

    def build(self, shape):
        self.logs = self.add_weight(shape=(2,), initializer="zeros")

    def call(self, inputs):
        y, found = inputs[:2], inputs[2:]
        loss = 0.0
        for i in range(2):
            error = ops.mean(ops.square(y[i] - found[i]))
            loss += ops.exp(-self.logs[i]) * error + self.logs[i]
        self.add_loss(loss)
        return ops.concatenate(found, axis=-1)


@row(GROUP)
def tasks_weighted_by_their_uncertainty(run):
    def build():
        x = keras.Input((4,), name="x")
        y = [keras.Input((1,), name=name) for name in ("one", "two")]
        hidden = layers.Dense(6, activation="tanh")(x)
        found = [layers.Dense(1)(hidden) for _ in y]
        model = keras.Model([x, *y], Uncertain()([*y, *found]))
        return models.compiled(model, None, adam())

    y = [outside.numbers(seed=s) for s in (2, 12)]
    outside.train(run, build, [outside.points(), *y])


class Tasks(keras.Model):
    """What combines the gradients of two tasks."""

    def __init__(self, combine):
        super().__init__()
        self.body = layers.Dense(6, activation="tanh")
        self.heads = [layers.Dense(1), layers.Dense(1)]
        self.combine = combine

    def call(self, x):
        x = self.body(x)
        return [head(x) for head in self.heads]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            found = self(x, training=True)
            losses = [
                ops.mean(ops.square(a - b))
                for a, b in zip(y, found, strict=True)
            ]
        shared = self.body.trainable_variables
        both = [tape.gradient(loss, shared) for loss in losses]
        gradients = self.combine(*both)
        own = [
            (g, v)
            for loss, head in zip(losses, self.heads, strict=True)
            for g, v in zip(
                tape.gradient(loss, head.trainable_variables),
                head.trainable_variables,
                strict=True,
            )
        ]
        pairs = [*zip(gradients, shared, strict=True), *own]
        self.optimizer.apply_gradients(pairs)
        return {"one": losses[0], "two": losses[1]}


def _dot(a, b):
    return sum(tf.reduce_sum(x * y) for x, y in zip(a, b, strict=True))


def surgery(one, two):
    """PCGrad: what conflicts with the other task is projected away."""

    def project(a, b):
        share = tf.minimum(_dot(a, b), 0.0) / (_dot(b, b) + 1e-8)
        return [x - share * y for x, y in zip(a, b, strict=True)]

    return [
        a + b for a, b in zip(project(one, two), project(two, one), strict=True)
    ]


def normalized(one, two):
    """Each task's gradient has the same length."""
    lengths = [tf.sqrt(_dot(g, g) + 1e-12) for g in (one, two)]
    return [
        a / lengths[0] + b / lengths[1] for a, b in zip(one, two, strict=True)
    ]


for _name, _combine in {
    "projects conflicting gradients": surgery,
    "makes gradients equally long": normalized,
}.items():

    def _program(run, combine=_combine):
        def build():
            return models.compiled(Tasks(combine), None, adam())

        y = outside.numbers(), outside.numbers(seed=12)
        outside.train(run, build, outside.points(), y)

    add(GROUP, f"a step of two tasks that {_name}", _program)


class Accumulating(keras.Model):
    """The popular pattern: sums of gradients, applied every second step."""

    def __init__(self, steps=2):
        super().__init__()
        self.network = mlp(1, 4)
        self.steps = steps
        self.done = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.network.trainable_variables
        ]

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        self.done.assign_add(1)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.network.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / self.steps)
        tf.cond(
            tf.equal(self.done % self.steps, 0),
            self.apply_sums,
            lambda: None,
        )
        return {"loss": loss}

    def apply_sums(self):
        weights = self.network.trainable_variables
        for weight, total in zip(weights, self.sums, strict=True):
            weight.assign_sub(0.1 * total)
            total.assign(tf.zeros_like(total))


class AccumulatingMasked(Accumulating):
    """The same without a condition, by a factor of zero or one."""

    def train_step(self, data):
        x, y = data
        self.done.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.network.trainable_variables
        gradients = tape.gradient(loss, weights)
        now = tf.cast(self.done % self.steps == 0, gradients[0].dtype)
        totals = [
            t + g / self.steps
            for t, g in zip(self.sums, gradients, strict=True)
        ]
        for kept, total in zip(self.sums, totals, strict=True):
            kept.assign((1.0 - now) * total)
        self.optimizer.apply([now * t for t in totals], weights)
        return {"loss": loss}


for _name, _make in {
    "by a condition": Accumulating,
    "by a factor": AccumulatingMasked,
}.items():

    def _program(run, make=_make):
        def build():
            return models.compiled(make(), "mse")

        outside.use(run, build, outside.points(), outside.numbers())

    add(GROUP, f"gradients accumulated in the step {_name}", _program)


class Adaptive(keras.Model):
    """Gradients clipped by the lengths of their weights' columns (AGC)."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3, 4)

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        weights = self.trainable_variables
        clipped = []
        for gradient, weight in zip(
            tape.gradient(loss, weights), weights, strict=True
        ):
            limit = 0.05 * tf.maximum(tf.norm(weight, axis=0), 1e-3)
            length = tf.maximum(tf.norm(gradient, axis=0), 1e-6)
            clipped.append(gradient * tf.minimum(limit / length, 1.0))
        self.optimizer.apply_gradients(zip(clipped, weights, strict=True))
        return self.compute_metrics(x, y, y_pred)


@row(GROUP)
def gradients_clipped_by_columns(run):
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = models.sgd(0.5, momentum=0.9, nesterov=True)
        return models.compiled(
            Adaptive(), loss, optimizer, metrics=["accuracy"]
        )

    outside.use(run, build, outside.points(), outside.kinds())


class Meta(keras.Model):
    """MAML: each row is a task, adapted by a gradient and then tested."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(
            shape=(3, 1), initializer="random_normal", name="kernel"
        )
        self.bias = self.add_weight(
            shape=(1,), initializer="zeros", name="bias"
        )

    def train_step(self, data):
        (x, y), (test_x, test_y) = data
        with tf.GradientTape() as outer:
            size = tf.shape(x)[0]
            kernel = tf.repeat(self.kernel[None], size, axis=0)
            bias = tf.repeat(self.bias[None], size, axis=0)
            with tf.GradientTape() as inner:
                inner.watch([kernel, bias])
                found = tf.matmul(x, kernel)[..., 0] + bias
                loss = tf.reduce_sum(tf.reduce_mean((found - y) ** 2, axis=1))
            by_kernel, by_bias = inner.gradient(loss, [kernel, bias])
            kernel, bias = kernel - 0.1 * by_kernel, bias - 0.1 * by_bias
            found = tf.matmul(test_x, kernel)[..., 0] + bias
            meta = tf.reduce_mean((found - test_y) ** 2)
        learn(self.optimizer, outer, meta, self.trainable_variables)
        return {"loss": meta, "before": loss}


@row(GROUP)
def meta_learning_through_a_gradient(run):
    def build():
        return models.compiled(Meta(), None, adam())

    random = models.random(98)

    def task():
        x = random.normal(size=(outside.EXAMPLES, 4, 3))
        return x, x.sum(-1)

    data = tf.data.Dataset.zip((outside.batches(*task()),) * 2)
    run.fit(build, data)


class Reptile(keras.Model):
    """keras.io's: some steps from here, and then a part of the way."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3, 4)

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        weights = self.network.trainable_variables
        before = [tf.identity(w) for w in weights]
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            learn(self.optimizer, tape, loss, weights)
        for weight, old in zip(weights, before, strict=True):
            weight.assign(old + 0.5 * (weight - old))
        return {"loss": loss}


@row(GROUP)
def reptile_that_goes_a_part_of_the_way(run):
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(Reptile(), loss, models.sgd(0.2))

    outside.use(run, build, outside.points(), outside.kinds())


class Forward(layers.Layer):
    """keras.io's forward-forward: a layer that learns by itself."""

    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units)
        self.optimizer = keras.optimizers.Adam(0.03)

    def build(self, shape):
        self.dense.build(shape)
        self.optimizer.build(self.dense.trainable_variables)
        self.built = True

    def call(self, x):
        length = ops.norm(x, ord=2, axis=1, keepdims=True) + 1e-4
        return ops.relu(self.dense(x / length))

    def learn(self, positive, negative):
        with tf.GradientTape() as tape:
            good = tf.reduce_mean(tf.square(self(positive)), 1)
            bad = tf.reduce_mean(tf.square(self(negative)), 1)
            loss = tf.math.log(
                1.0 + tf.exp(tf.concat([0.3 - good, bad - 0.3], 0))
            )
            mean = tf.reduce_mean(loss)
        learn(self.optimizer, tape, mean, self.dense.trainable_variables)
        return self(positive), self(negative), mean


class ForwardForward(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = Forward(6), Forward(6)
        self.one.build((None, 4))
        self.two.build((None, 6))
        self.one_optimizer = self.one.optimizer
        self.two_optimizer = self.two.optimizer

    def train_step(self, data):
        positive, negative = data
        positive, negative, first = self.one.learn(positive, negative)
        positive = tf.stop_gradient(positive)
        negative = tf.stop_gradient(negative)
        _, _, second = self.two.learn(positive, negative)
        return {"loss": first + second}


@row(GROUP)
def layers_that_learn_by_themselves(run):
    def build():
        model = ForwardForward()
        model.compile(jit_compile=False)
        return model

    run.fit(build, outside.batches(outside.points(), outside.points(seed=8)))


class Ghost(keras.Model):
    """Keras's guide: own metrics, and a loss by an endpoint layer."""

    def __init__(self):
        super().__init__()
        self.network = mlp(1, 4)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, y_pred)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {
            "loss": self.loss_tracker.result(),
            "mae": self.mae_metric.result(),
        }


@row(GROUP)
def a_step_with_a_vector_of_losses(run):
    """Keras's guide of old: the gradient of a vector is that of its sum."""

    def build():
        return models.compiled(Ghost(), None, adam())

    outside.train(run, build, outside.points(), outside.numbers())
