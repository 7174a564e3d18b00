"""Programs from outside: what layouts that compute layers in parts must see.

Weights that a step lends or writes, lengths that code asks for, layers that a
loss calls once more, and what callbacks call of their model.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models
from tests.conformance.harness import add, row

GROUP = "Outside: layers in parts, models in callbacks"


def of(model, loss="mse", **options):
    return models.compiled(model, loss, keras.optimizers.Adam(0.02), **options)


def network(
    *middle, kind=keras.Model, loss="mse", width=6, metrics=lambda: None
):
    def build():
        x = inputs = keras.Input((models.FEATURES,))
        x = layers.Dense(width, activation="tanh")(x)
        for make in middle:
            x = make()(x)
        outputs = layers.Dense(1)(layers.Dense(width)(x))
        return of(kind(inputs, outputs), loss, metrics=metrics())

    return build


def used(run, build):
    run.use(build, models.points(), models.numbers())


class OtherForItsLength(layers.Layer):
    def call(self, x):
        return x * 2.0 if x.shape[-1] == 6 else x * 3.0


@row(GROUP)
def code_that_asks_for_a_length(run):
    used(run, network(OtherForItsLength))


@row(GROUP)
def a_function_that_asks_for_a_length(run):
    class Scales(layers.Layer):
        def call(self, x):
            scale = tf.function(
                lambda one: one * (2.0 if x.shape[-1] == 6 else 3.0)
            )
            return x * scale(tf.ones([], x.dtype))

    used(run, network(Scales))


@row(GROUP)
def code_that_divides_by_a_length(run):
    def normal(x):
        return x / float(x.shape[-1] or 6) ** 0.5

    used(run, network(lambda: layers.Lambda(normal)))


@row(GROUP)
def an_activation_that_asks_for_a_length(run):
    def act(x):
        return ops.tanh(x) * (1.0 if x.shape[-1] == 6 else 5.0)

    used(run, network(lambda: layers.Dense(6, activation=act)))


@row(GROUP)
def a_kernel_that_is_clipped_in_a_call(run):
    """As critics of a Wasserstein distance do."""

    class Clipped(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6)

        def call(self, x, training=False):
            if training:
                kernel = self.dense.kernel
                kernel.assign(ops.clip(kernel, -0.3, 0.3))
            return self.dense(x)

        def build(self, shape):
            self.dense.build(shape)

    used(run, network(Clipped))


@row(GROUP)
def spectral_normalization(run):
    used(run, network(lambda: layers.SpectralNormalization(layers.Dense(6))))


@row(GROUP)
def a_kernel_that_is_standardized(run):
    class Standardized(layers.Dense):
        @property
        def kernel(self):
            own = super().kernel
            return (own - ops.mean(own, 0)) / (ops.std(own, 0) + 1e-3)

    used(run, network(lambda: Standardized(6)))


@row(GROUP)
def weights_lent_to_a_layer(run):
    """As hyper networks and noisy weights do."""

    class Lends(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6)

        def build(self, shape):
            self.dense.build(shape)
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            lent = [self.scale * each for each in self.dense.variables]
            return self.dense.stateless_call(lent, [], 0.5 * x)[0]

    used(run, network(Lends))


class CallsAgain(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        again = self.layers[1](-x)
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(again**2)


class CallsItself(keras.Model):
    """As consistency losses do."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        other = self(0.9 * x, training=training)
        return ops.mean(ops.square(y - y_pred) + 0.1 * (other - y_pred) ** 2)


class ReadsKernels(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        own = super().compute_loss(x, y, y_pred, sample_weight)
        kernels = [self.layers[1].kernel, self.layers[2].kernel]
        return own + 0.1 * ops.sum(ops.abs(ops.matmul(*kernels)))


class LendsItself(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        smaller = [0.5 * weight for weight in self.trainable_variables]
        fixed = self.non_trainable_variables
        other, _ = self.stateless_call(smaller, fixed, x)
        return ops.mean(ops.square(y - y_pred) + 0.1 * ops.square(other))


@row(GROUP)
def a_loss_that_calls_a_layer_again(run):
    used(run, network(kind=CallsAgain, loss=None))


@row(GROUP)
def a_loss_that_calls_the_model_again(run):
    used(run, network(kind=CallsItself, loss=None))


@row(GROUP)
def a_loss_that_reads_kernels(run):
    used(run, network(kind=ReadsKernels))


@row(GROUP)
def a_loss_that_lends_weights_to_the_model(run):
    used(run, network(kind=LendsItself, loss=None))


@row(GROUP)
def hidden_rows_kept_for_a_loss(run):
    class Keeps(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(6, "tanh"), layers.Dense(1)

        def call(self, x):
            self.hidden = self.first(x)
            return self.last(self.hidden)

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            penalty = ops.mean(self.hidden**2)
            return ops.mean(ops.square(y - y_pred)) + 0.1 * penalty

        def build(self, shape):
            self.first.build(shape)
            self.last.build((None, 6))

    used(run, lambda: of(Keeps(), None))


@row(GROUP)
def a_tensor_that_is_returned_twice(run):
    def pairs(y, p):
        return ops.mean(ops.square(y - ops.transpose(p)))

    def build():
        inputs = keras.Input((models.FEATURES,))
        x = layers.Dense(6, activation="tanh")(inputs)
        outputs = layers.Dense(1)(x)
        return of(
            keras.Model(inputs, [outputs, outputs]),
            [pairs, "mse"],
            loss_weights=[1.0, 0.5],
        )

    y = models.numbers()
    run.use(build, models.points(), [y, 2 * y])


@row(GROUP)
def as_many_columns_as_rows(run):
    """Places and copies whose number is that of the rows."""

    def taken(y, p):
        wide = p * ops.cast(ops.arange(1, 41), p.dtype)
        return ops.mean(ops.square(y - wide[:, : ops.shape(p)[0]]), axis=1)

    def repeated(y, p):
        copies = ops.tile(p[:, None], [1, ops.shape(p)[0], 1])
        return ops.sum(copies, axis=(1, 2)) * 0.01

    used(run, network(loss=taken, metrics=lambda: [repeated]))


@row(GROUP)
def a_constant_and_a_sum_in_one_update(run):
    class Mixed(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="mixed")
            self.total = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y, p, sample_weight=None):
            self.total.assign(self.total + 1.0 + ops.sum(ops.abs(y - p)))

        def result(self):
            return self.total + 0.0

    class Counts(layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(
                shape=(), initializer="zeros", trainable=False
            )

        def call(self, x, training=False):
            if training:
                self.seen.assign(self.seen - 1.0 + ops.sum(ops.exp(x)))
            return x

    used(run, network(Counts, metrics=lambda: [Mixed()]))


@row(GROUP)
def a_metric_that_halves_itself_in_a_reset(run):
    class Halved(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="halved")
            self.total = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y, p, sample_weight=None):
            self.total.assign_add(ops.sum(ops.abs(y - p)))

        def result(self):
            return self.total + 0.0

        def reset_state(self):
            self.total.assign(0.5 * self.total)

    x, y = models.points(), models.numbers()
    run.fit(network(metrics=lambda: [Halved()]), x, y, epochs=3)

    class Own(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return logs | {"again": logs["halved"]}

    build = network(metrics=lambda: [Halved()], kind=Own)
    trainer = run.trainer(build)
    history = trainer.fit(
        x, y, epochs=3, batch_size=5, verbose=0, shuffle=False
    ).history
    run.see("own", [history["halved"], history["again"]])


@row(GROUP)
def weights_that_no_loss_reaches(run):
    """Weight decay does not move them: Keras has no gradient of them."""

    def build():
        x = inputs = keras.Input((models.FEATURES,))
        x = layers.Dense(4, activation="tanh")(x)
        behind = ops.stop_gradient(layers.Dense(1, name="behind")(x))
        outputs = {
            "read": layers.Dense(1, name="read")(x) + behind,
            "left": layers.Dense(1, name="left")(x),
        }
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.1)
        losses = {"read": "mse", "left": None}
        return models.compiled(keras.Model(inputs, outputs), losses, optimizer)

    y = models.numbers()
    run.fit(build, models.points(), {"read": y, "left": y})


@row(GROUP)
def rows_that_are_broadcast_against_rows(run):
    """A sequence is returned by mistake; Keras says nothing."""

    def build():
        inputs = keras.Input((5, 3))
        outputs = layers.Dense(1)(
            layers.SimpleRNN(4, return_sequences=True)(inputs)
        )
        return of(keras.Model(inputs, outputs), metrics=["mae"])

    x = models.random(1).normal(size=(models.EXAMPLES, 5, 3))
    run.fit(build, x, models.numbers()[:, 0])


class Noisy(layers.Layer):
    """Takes a number beside its rows, and one by an attribute."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.shift = 0.0

    def call(self, x, scale=1.0):
        return self.dense(x * scale) + self.shift

    def build(self, shape):
        self.dense.build(shape)


@row(GROUP)
def numbers_that_a_step_gives_to_its_layers(run):
    """A learned temperature, a learned shift, and weights of a copy."""

    class Learns(keras.Model):
        def __init__(self):
            super().__init__()
            self.noisy = Noisy()
            self.noisy.build((None, models.FEATURES))
            self.scale = self.add_weight(shape=(), initializer="ones")
            self.move = self.add_weight(shape=(), initializer="zeros")
            self.built = True

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                self.noisy.shift = ops.tanh(self.move)
                loss = ops.mean(
                    ops.square(y - self.noisy(x, ops.exp(self.scale)))
                )
                self.noisy.shift = 0.0
                lent = [
                    0.9 * each.value for each in self.noisy.trainable_variables
                ]
                other, _ = self.noisy.stateless_call(lent, [], x)
                loss += ops.mean(ops.square(y - other))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    run.fit(lambda: of(Learns(), None), models.points(), models.numbers())


@row(GROUP)
def a_variable_of_tensorflow_that_a_step_moves(run):
    """Directly, and read by a function that was traced before."""

    class Scales(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)
            self.scale = tf.Variable(1.0, dtype=tf.float64, trainable=False)
            self.move = tf.Variable(0.5, dtype=tf.float64, trainable=False)
            self.moved = tf.function(lambda x: x + tf.tanh(self.move) * x)

        def call(self, x):
            return self.moved(self.dense(x)) * self.scale

    class Moves(keras.Model):
        def __init__(self):
            super().__init__()
            self.scales = Scales()
            self.scales.dense.build((None, models.FEATURES))
            self.scales.built = self.built = True

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            others = [self.scales.scale, self.scales.move]
            with tf.GradientTape() as tape:
                tape.watch(others)
                loss = ops.mean(ops.square(y - self.scales(x)))
            gradients = tape.gradient(loss, [*weights, *others])
            self.optimizer.apply(gradients[: len(weights)], weights)
            for variable, gradient in zip(
                others, gradients[len(weights) :], strict=True
            ):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss}

    trainer = run.trainer(lambda: of(Moves(), None))
    run.fit(None, models.points(), models.numbers(), trainer=trainer)
    found = trainer.model.scales
    run.see("others", [found.scale.numpy(), found.move.numpy()])


@row(GROUP)
def a_metric_of_a_layer_that_predicts(run):
    class Watches(layers.Layer):
        def __init__(self):
            super().__init__()
            self.size = keras.metrics.Sum(name="size")

        def call(self, x):
            self.size.update_state(ops.abs(x))
            return x

    sizes = []

    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.predict(
                models.points(13, seed=7), batch_size=5, verbose=0
            )
            sizes.append(self.model.layers[2].size.result())

    run.fit(
        network(Watches),
        models.points(),
        models.numbers(),
        callbacks=[Predicts()],
    )
    run.see("sizes", sizes)


@row(GROUP)
def draws_of_float64_that_are_cut_off(run):
    class Draws(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(5)

        def call(self, x, training=False):
            if not training:
                return x
            return x + keras.random.truncated_normal(
                ops.shape(x), dtype=x.dtype, seed=self.seed
            )

    used(run, network(Draws))


@row(GROUP)
def a_loss_that_reads_a_metric_of_all_rows(run):
    """A scale that is the largest error so far, in all steps."""

    class Most(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="most")
            self.value = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, errors, sample_weight=None):
            largest = ops.sqrt(ops.max(errors) + ops.mean(errors))
            self.value.assign(ops.maximum(self.value, largest))

        def result(self):
            return self.value + 0.0

    class Scales(keras.Model):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs)
            self.most = Most()

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            errors = ops.square(y - y_pred)
            self.most.update_state(errors)
            return ops.mean(errors) / (1.0 + self.most.result())

    x, y = models.points(), models.numbers()
    run.fit(network(kind=Scales, loss=None), x, y, epochs=2)


class Centered(layers.Layer):
    """Each row of its outputs comes of all rows."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


def root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


for _name, _call in {
    "evaluates": lambda m, x, y: m.evaluate(x, y, batch_size=5, verbose=0),
    "predicts": lambda m, x, y: m.predict(x, batch_size=5, verbose=0),
    "trains on a batch": lambda m, x, y: m.train_on_batch(x, y),
    "tests a batch": lambda m, x, y: m.test_on_batch(x, y),
    "predicts a batch": lambda m, x, y: m.predict_on_batch(x),
}.items():

    def _called(run, call=_call):
        found = []
        x, y = models.points(13, seed=7), models.numbers(13, seed=8)

        class Calls(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                found.append(call(self.model, x, y))

        run.fit(
            network(Centered, loss=root, metrics=lambda: [root]),
            models.points(),
            models.numbers(),
            callbacks=[Calls()],
        )
        run.see("found", found)

    add(GROUP, f"a callback that {_name}, rows that are mixed", _called)
