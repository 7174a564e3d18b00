"""Programs from outside: what Keras finds by a tensor, by a class, by a name.

Masks and logits that belong to a tensor; layers of Keras's that hold others, or
are called with fewer axes; what authors write anew besides `call`.
"""

import inspect

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models
from tests.conformance.harness import add, row
from tests.conformance.outside_layouts import network, of, used

GROUP = "Outside: masks, logits, and what authors write anew"

# What the outputs of a model are, their number, a loss and its targets.
CROSSENTROPIES = {
    "a sigmoid": (
        "sigmoid",
        1,
        "binary_crossentropy",
        lambda: models.kinds()[:, None] % 2,
    ),
    "a softmax": ("softmax", 3, "categorical_crossentropy", models.one_hot),
    "a softmax of kinds": (
        "softmax",
        3,
        "sparse_categorical_crossentropy",
        models.kinds,
    ),
}


def far():
    """Inputs of which outputs are 0 or 1, to the last digit."""
    return 40 * models.points()


def deep(activation, units, loss, kind=keras.Model):
    """A model whose last layer is `activation`, a layer apart if callable."""

    def build():
        x = inputs = keras.Input((models.FEATURES,))
        for _ in range(2):
            x = layers.Dense(8)(x)
        if callable(activation):
            x = activation()(layers.Dense(units)(x))
        else:
            x = layers.Dense(units, activation=activation)(x)
        return of(kind(inputs, x), loss)

    return build


def middle_too(targets, outputs):
    """A loss that is not proven to be a mean over the rows."""
    loss = ops.mean(ops.binary_crossentropy(targets, outputs))
    return loss + 0.1 * ops.median(outputs)


class AddsMiddle(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.median(y_pred)


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


for _name, (_activation, _units, _loss, _targets) in CROSSENTROPIES.items():
    for _how, _kind in {
        "": keras.Model,
        ", in a step of ones own": OwnStep,
        ", with a median": AddsMiddle,
    }.items():
        add(
            GROUP,
            f"{_name} that is certain{_how}",
            lambda run, given=(_activation, _units, _loss, _kind), y=_targets: (
                used_far(run, deep(*given), y())
            ),
        )


def used_far(run, build, targets):
    run.use(build, far(), targets.astype(keras.config.floatx()))


@row(GROUP)
def a_sigmoid_that_is_certain_in_a_loss_of_all_rows(run):
    used_far(run, deep("sigmoid", 1, middle_too), models.kinds()[:, None] % 2)


@row(GROUP)
def a_softmax_that_is_a_layer_of_its_own(run):
    build = deep(layers.Softmax, 3, "categorical_crossentropy")
    used_far(run, build, models.one_hot())


@row(GROUP)
def two_outputs_that_are_certain(run):
    def build():
        inputs = keras.Input((models.FEATURES,))
        x = layers.Dense(8)(inputs)
        early = layers.Dense(1, activation="sigmoid", name="early")(x)
        for _ in range(3):
            x = layers.Dense(8)(x)
        late = layers.Dense(3, activation="softmax", name="late")(x)
        model = keras.Model(inputs, {"early": early, "late": late})
        losses = {"early": middle_too, "late": "categorical_crossentropy"}
        return of(model, losses)

    early = models.kinds()[:, None] % 2
    targets = {
        "early": early.astype(keras.config.floatx()),
        "late": models.one_hot(),
    }
    run.use(build, far(), targets)


class Mixes(layers.Layer):
    """A layer that is not proven, around others."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        self.add_loss(0.1 * ops.sqrt(ops.mean(ops.square(x))))
        return x


@row(GROUP)
def a_layer_of_all_rows_that_ends_with_a_sigmoid(run):
    build = deep(
        lambda: Mixes(layers.Dense(1, activation="sigmoid")),
        4,
        "binary_crossentropy",
    )
    used_far(run, build, models.kinds()[:, None] % 2)


def reads(kind, *after):
    """A model of words with a mask."""

    def build():
        x = inputs = keras.Input((models.LENGTH,), dtype="int32")
        x = layers.Embedding(models.WORDS, 4, mask_zero=True)(x)
        for make in after:
            x = make()(x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        outputs = layers.Dense(models.WORDS)(x)
        return of(kind(inputs, outputs), loss)

    return build


@row(GROUP)
def masked_words_in_a_step_of_ones_own(run):
    run.use(reads(OwnStep), models.words(), models.words())


@row(GROUP)
def masked_words_through_a_layer_of_all_rows(run):
    build = reads(
        keras.Model,
        lambda: Mixes(layers.Dense(4)),
        lambda: layers.GRU(4, return_sequences=True),
    )
    run.use(build, models.words(), models.words())


@row(GROUP)
def masked_words_between_models_of_a_step(run):
    class Reads(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = keras.Sequential(
                [
                    keras.Input((models.LENGTH,), dtype="int32"),
                    layers.Embedding(models.WORDS, 4, mask_zero=True),
                    layers.Dense(4),
                ]
            )
            self.last = layers.GRU(2)

        def call(self, x):
            return self.last(self.body(x))

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self.last(self.body(x))))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    def build():
        model = Reads()
        model(models.words()[:2])
        return of(model, None)

    run.fit(build, models.words(), models.numbers())


# What Keras knows by its class, and mixes rows all the same.


class Itself(layers.Layer):
    """Calls a layer of two arguments with one input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner([x, x])


def centered(x):
    return x - ops.mean(x, axis=0, keepdims=True)


class OwnDense(layers.Dense):
    def call(self, x):
        return super().call(centered(x))


class AroundCall(layers.Dense):
    def __call__(self, *arguments, **named):
        return centered(super().__call__(*arguments, **named))


class ModelAroundCall(keras.Model):
    def __call__(self, *arguments, **named):
        return centered(super().__call__(*arguments, **named))


for _name, _make in {
    "attention between rows": lambda: Itself(layers.Attention()),
    "additive attention between rows": lambda: Itself(
        layers.AdditiveAttention()
    ),
    "a spectral norm around a layer that mixes": lambda: (
        layers.SpectralNormalization(OwnDense(4))
    ),
    "a spectral norm around an activation that mixes": lambda: (
        layers.SpectralNormalization(layers.Dense(4, activation=centered))
    ),
    "an activation that is a layer over the rows": lambda: layers.Dense(
        4, activation=layers.Softmax(axis=0)
    ),
    "an activation that is a lambda": lambda: layers.Dense(
        4, activation=layers.Lambda(centered)
    ),
    "an activation of keras ops that mixes": lambda: layers.Dense(
        4, activation=ops.flip
    ),
    "a layer with a call around its call": lambda: AroundCall(4),
}.items():
    add(GROUP, _name, lambda run, make=_make: used(run, network(make)))


@row(GROUP)
def a_functional_attention_between_rows(run):
    def build():
        inputs = keras.Input((models.FEATURES,))
        x = layers.Dense(4, activation="tanh")(inputs)
        return of(
            keras.Model(inputs, layers.Dense(1)(layers.Attention()([x, x])))
        )

    used(run, build)


@row(GROUP)
def images_without_channels(run):
    def build():
        inputs = keras.Input((6, 6))
        layer = layers.RandomContrast(0.5, value_range=(0, 1), seed=1)
        outputs = layers.Dense(1)(layers.Flatten()(layer(inputs)))
        return of(keras.Model(inputs, outputs))

    run.use(build, models.images()[..., 0], models.numbers())


@row(GROUP)
def a_model_with_a_call_around_its_call(run):
    used(run, network(kind=ModelAroundCall))


@row(GROUP)
def losses_that_a_model_lists_itself(run):
    class Lists(keras.Model):
        @property
        def losses(self):
            kernel = self.layers[-1].kernel
            return [*super().losses, 0.1 * ops.sum(ops.square(kernel))]

    used(run, network(kind=Lists))


@row(GROUP)
def rows_of_a_map_that_is_vectorized(run):
    class Maps(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            def of_row(row):
                made = self.dense(row[None])[0]
                return ops.mean(made, keepdims=True) + row[:1]

            return tf.vectorized_map(of_row, x)

    used(run, network(Maps))


@row(GROUP)
def branches_and_loops_that_read_weights(run):
    class Branches(keras.Model):
        def train_step(self, data):
            x, y = data
            first, last = self.layers[1], self.layers[-1]
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                outputs = self(x)
                loss = tf.cond(
                    ops.mean(y) > 0,
                    lambda: ops.mean(ops.square(outputs - y)),
                    lambda: ops.sum(ops.square(first.kernel)),
                )
                _, loss = tf.while_loop(
                    lambda i, _: i < 3,
                    lambda i, loss: (
                        i + 1,
                        loss + 0.1 * ops.sum(ops.square(first.kernel)),
                    ),
                    (0, loss),
                )
                loss += tf.switch_case(
                    tf.cast(self.optimizer.iterations % 3, tf.int32),
                    [
                        lambda: ops.sum(last.kernel**2),
                        lambda: ops.zeros((), outputs.dtype),
                        lambda: ops.mean(ops.square(self(2 * x))),
                    ],
                )
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    run.fit(
        network(kind=Branches, loss=None), models.points(), models.numbers()
    )


@row(GROUP)
def logs_of_a_step_that_no_metric_knows(run):
    """What it returns as the loss is no metric of the model."""

    class Returns(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x) - y))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

        def test_step(self, data):
            x, y = data[:2]
            return {"loss": ops.mean(ops.abs(self(x) - y))}

    found = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(logs["loss"])

        def on_test_batch_end(self, batch, logs=None):
            found.append(logs["loss"])

    x, y = models.points(), models.numbers()
    trainer = run.fit(
        network(kind=Returns), x, y, validation_data=(x, y), callbacks=[Notes()]
    )
    run.see("found", found)
    run.see("trained", trainer.train_on_batch(x[:8], y[:8]))
    run.see("tested", trainer.test_on_batch(x[:8], y[:8]))


@row(GROUP)
def an_optimizer_of_some_of_the_weights(run):
    class Some(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            first = self.layers[1].trainable_variables
            last = self.layers[-1].trainable_variables
            with tf.GradientTape(persistent=True) as tape:
                loss = ops.mean(ops.square(self(x) - y))
            for weight, gradient in zip(
                first, tape.gradient(loss, first), strict=True
            ):
                weight.assign_sub(0.1 * gradient)
            self.optimizer.apply(tape.gradient(loss, last), last)
            return {"error": loss}

    def build():
        model = network(kind=Some, loss=None)()
        model.compile(
            keras.optimizers.SGD(
                0.05,
                use_ema=True,
                ema_momentum=0.5,
                ema_overwrite_frequency=2,
            )
        )
        return model

    trainer = run.trainer(build)
    x, y = models.points(), models.numbers()
    for step in range(4):
        run.see(f"loss {step}", trainer.train_on_batch(x[:8], y[:8]))
    run.look(trainer)


@row(GROUP)
def an_optimizer_that_subtracts_itself(run):
    class Centers(keras.optimizers.SGD):
        def assign_sub(self, variable, value):
            super().assign_sub(variable, value - 0.5 * ops.mean(value))

    def build():
        model = network()()
        model.compile(Centers(0.05), "mse")
        return model

    used(run, build)


def without_mean(call):
    """Returns a call of a model or layer, without the mean of the rows."""

    def without(*arguments, **named):
        outputs = call(*arguments, **named)
        return outputs - ops.mean(outputs, axis=0)

    # Keras gives a layer the arguments that its call names.
    without.__signature__ = inspect.signature(call)
    return without


@row(GROUP)
def methods_that_objects_of_keras_were_given(run):
    def build():
        hidden = layers.Dense(6, "tanh")
        hidden.call = without_mean(hidden.call)
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(2)(hidden(inputs)))
        model.call = without_mean(model.call)
        loss = keras.losses.MeanSquaredError()
        loss.call = lambda y, p: (
            ops.square(ops.mean(p * p - y)) * ops.ones_like(p[:, 0])
        )
        metric = keras.metrics.MeanAbsoluteError(name="error")
        own = metric.update_state
        metric.update_state = lambda y, p, sample_weight=None: own(
            y - ops.mean(y, axis=0), p - ops.max(p)
        )
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=[metric])
        return model

    x = models.points()
    trainer = run.fit(build, x, models.points()[:, :2])
    run.see("predicted", trainer.predict(x, batch_size=8, verbose=0))


@row(GROUP)
def a_normalization_whose_call_was_replaced(run):
    def build():
        frozen = layers.BatchNormalization(trainable=False)
        frozen.call = without_mean(frozen.call)
        return network(lambda: frozen)()

    used(run, build)


@row(GROUP)
def an_optimizer_whose_method_was_replaced(run):
    def build():
        model = network()()
        optimizer = keras.optimizers.SGD(0.05)
        own = optimizer.apply
        optimizer.apply = lambda gradients, weights=None: own(
            [each - ops.mean(each) for each in gradients], weights
        )
        model.compile(optimizer, "mse")
        return model

    used(run, build)


class Keeps(layers.Layer):
    """Leaves a tensor in an attribute."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")

    def call(self, x):
        self.kept = ops.tanh(ops.matmul(x, self.kernel))
        return x


class Reads(Keeps):
    """Adds the tensor that another layer has left."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def call(self, x):
        return ops.matmul(x, self.kernel) + self.other.kept


@row(GROUP)
def a_tensor_that_a_layer_leaves_for_the_next(run):
    def build():
        inputs = keras.Input((4,))
        keeps = Keeps()
        made = Reads(keeps)(keeps(inputs))
        model = keras.Model(inputs, layers.Dense(2)(made))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    run.fit(build, models.points(), models.points()[:, :2])
    run.fit(
        build,
        models.points(),
        models.points()[:, :2],
        trainer=run.trainer(build, recompute="layers"),
    )
