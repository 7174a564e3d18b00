"""Programs from outside: what guides and model libraries show."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import Excuse, add, row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: guides and libraries"


def adam(rate=0.02, **options):
    return keras.optimizers.Adam(rate, **options)


def sparse(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def network(x, outputs=3):
    return layers.Dense(outputs)(layers.Dense(6, activation="tanh")(x))


class Gated(layers.Layer):
    """A gated convolution over time, causal, with a residual."""

    def __init__(self, width, dilation, **named):
        super().__init__(**named)
        self.both = layers.Conv1D(
            2 * width, 2, padding="causal", dilation_rate=dilation
        )
        self.out = layers.Dense(width)

    def build(self, shape):
        self.both.build(shape)
        self.out.build((*shape[:-1], shape[-1]))

    def call(self, x):
        value, gate = ops.split(self.both(x), 2, axis=-1)
        skip = self.out(value * ops.sigmoid(gate))
        return x + skip, skip


@row(GROUP)
def gated_causal_convolutions_with_skips(run):
    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        x = layers.Embedding(outside.WORDS, 6)(inputs)
        skips = []
        for dilation in (1, 2):
            x, skip = Gated(6, dilation)(x)
            skips.append(skip)
        x = layers.Add()(skips)
        model = keras.Model(inputs, layers.Dense(outside.WORDS)(x))
        return models.compiled(model, sparse(), adam(clipvalue=0.1))

    words = outside.words(padded=False)
    outside.use(run, build, words, np.roll(words, -1, axis=1))


class Leaky(layers.Layer):
    """A cell that keeps a count of its steps in state of its own."""

    def __init__(self, width, **named):
        super().__init__(**named)
        self.state_size = self.output_size = width
        self.inner = layers.Dense(width)

    def build(self, shape):
        self.inner.build((shape[0], shape[-1] + self.state_size))
        self.leak = self.add_weight(
            shape=(self.state_size,), initializer="zeros", name="leak"
        )

    def call(self, x, states):
        (old,) = states
        new = ops.tanh(self.inner(ops.concatenate([x, old], axis=-1)))
        leak = ops.sigmoid(self.leak)
        new = leak * old + (1.0 - leak) * new
        return new, [new]

    def get_initial_state(self, batch_size=None):
        return [ops.zeros((batch_size, self.state_size)) + 0.1]


@row(GROUP)
def a_cell_of_cells_with_a_mask(run):
    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        x = layers.Embedding(outside.WORDS, 4, mask_zero=True)(inputs)
        x = layers.RNN([Leaky(5), layers.GRUCell(4)], return_sequences=True)(x)
        x = layers.TimeDistributed(mlp(3, 4))(x)
        model = keras.Model(inputs, x)
        return models.compiled(
            model, sparse(), adam(), weighted_metrics=["acc"]
        )

    words = outside.words()
    kinds = models.random(8).integers(0, 3, size=words.shape)
    outside.use(run, build, words, kinds)


@row(GROUP)
def weights_of_each_time_and_class(run):
    def build():
        inputs = keras.Input((outside.LENGTH, 3))
        x = layers.LSTM(5, return_sequences=True, recurrent_dropout=0.2)(inputs)
        model = keras.Model(inputs, layers.Dense(3)(x))
        return models.compiled(
            model,
            sparse(),
            adam(),
            metrics=["acc"],
            weighted_metrics=[
                "acc",
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
            ],
        )

    x = outside.points(15).reshape(-1, outside.LENGTH, 3)
    kinds = models.random(8).integers(0, 3, size=x.shape[:2])
    weight = models.random(9).uniform(0.0, 2.0, size=x.shape[:2])
    weight[::4] = 0.0
    outside.use(run, build, x, kinds, sample_weight=weight)


class Inner(layers.Layer):
    """It adds losses two levels down, one by the batch and one by weights."""

    def __init__(self, **named):
        super().__init__(**named)
        self.dense = layers.Dense(5, kernel_regularizer="l2")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        made = self.dense(x)
        self.add_loss(0.1 * ops.mean(ops.square(made)))
        self.add_loss(0.01 * ops.sum(ops.abs(self.dense.kernel)))
        return made


class Outer(layers.Layer):
    def __init__(self, **named):
        super().__init__(**named)
        self.one, self.two = Inner(), Inner()

    def build(self, shape):
        self.one.build(shape)
        self.two.build((*shape[:-1], 5))

    def call(self, x):
        first = ops.tanh(self.one(x))
        second = self.two(first)
        self.add_loss(0.1 * ops.mean(ops.abs(first - second)))
        return second


@row(GROUP)
def losses_of_layers_in_layers(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Outer()(x)
        outputs = {"kind": layers.Dense(3, name="kind")(x), "size": x}
        model = keras.Model(inputs, outputs)
        return models.compiled(
            model,
            {"kind": sparse(), "size": None},
            adam(),
            metrics={
                "size": [
                    keras.metrics.MeanMetricWrapper(
                        lambda y, p: ops.mean(p, -1), name="mean"
                    )
                ]
            },
        )

    y = {"kind": outside.kinds(), "size": outside.numbers(5)}
    outside.use(run, build, outside.points(), y)


class Tied(keras.Model):
    """The table of words is read again for the logits, without a layer."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(outside.WORDS, 6)
        self.places = layers.Embedding(outside.LENGTH, 6)
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.1)
        self.wide = layers.Dense(12, activation="gelu")
        self.narrow = layers.Dense(6)

    def call(self, words, training=None):
        x = self.table(words) + self.places(ops.arange(words.shape[1]))
        x += self.attention(
            self.norm(x), x, use_causal_mask=True, training=training
        )
        x += self.narrow(self.wide(x))
        return ops.matmul(x, ops.transpose(self.table.embeddings))


@row(GROUP)
def words_out_by_the_table_of_words_in(run):
    def build():
        model = Tied()
        model.build((None, outside.LENGTH))
        return models.compiled(
            model,
            sparse(ignore_class=0),
            adam(global_clipnorm=0.5, weight_decay=0.01),
            weighted_metrics=["acc"],
        )

    words = outside.words()
    outside.use(run, build, words, np.roll(words, -1, axis=1))


@row(GROUP)
def spectral_norms_around_layers(run):
    def build():
        x = inputs = keras.Input((6, 6, 3))
        x = layers.SpectralNormalization(layers.Conv2D(4, 3, strides=2))(x)
        x = layers.LeakyReLU()(x)
        x = layers.Flatten()(x)
        x = layers.SpectralNormalization(layers.Dense(1), power_iterations=2)(x)
        return models.compiled(keras.Model(inputs, x), "hinge", adam())

    y = np.sign(outside.numbers())
    outside.use(run, build, outside.images(), y)


class Central(keras.optimizers.RMSprop):
    """Gradients are centered, with a hyperparameter that is a variable."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.share = self.add_variable(
                (), initializer=keras.initializers.Constant(1.0), name="share"
            )

    def update_step(self, gradient, variable, learning_rate):
        if len(gradient.shape) > 1:
            axes = list(range(len(gradient.shape) - 1))
            share = ops.cast(self.share, gradient.dtype)
            gradient -= share * ops.mean(gradient, axis=axes, keepdims=True)
        super().update_step(gradient, variable, learning_rate)

    def finalize_variable_values(self, variables):
        super().finalize_variable_values(variables)
        self.share.assign(self.share * 0.9)


@row(GROUP)
def centered_gradients_by_a_variable(run):
    def build():
        x = inputs = keras.Input((4,))
        return models.compiled(
            keras.Model(inputs, network(x)), sparse(), Central(0.01)
        )

    outside.use(run, build, outside.points(), outside.kinds())


class Lookahead(keras.optimizers.Optimizer):
    """Slow weights of an inner optimizer's fast ones, every third step."""

    def __init__(self, rate=0.05, **named):
        super().__init__(rate, **named)
        self.inner = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.inner.build(variables)
        self.slow = []
        for variable in variables:
            slow = self.add_variable_from_reference(variable, "slow")
            slow.assign(variable)
            self.slow.append(slow)

    def update_step(self, gradient, variable, learning_rate):
        self.inner.update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        due = ops.equal((self.iterations + 1) % 3, 0)
        moved = slow + 0.5 * (variable - slow)
        self.assign(slow, ops.where(due, moved, slow))
        self.assign(variable, ops.where(due, moved, variable))


@row(GROUP)
def slow_weights_that_begin_at_the_weights(run):
    def build():
        x = inputs = keras.Input((4,))
        model = keras.Model(inputs, network(x))
        optimizer = Lookahead()
        optimizer.build(model.trainable_variables)
        return models.compiled(model, sparse(), optimizer)

    outside.use(run, build, outside.points(), outside.kinds())


class Distiller(keras.Model):
    """A student with a teacher of averaged weights, of two temperatures."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(3), mlp(3)
        self.teacher.set_weights(self.student.get_weights())
        self.teacher.trainable = False
        self.centre = self.add_weight(
            shape=(3,), initializer="zeros", trainable=False, name="centre"
        )
        self.track = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.track]

    def call(self, x, training=None):
        return self.student(x, training=training)

    def train_step(self, data):
        x, _ = keras.utils.unpack_x_y_sample_weight(data)[:2]
        views = [x * 1.1, x - 0.1]
        targets = [self.teacher(view) for view in views]
        with tf.GradientTape() as tape:
            outs = [self.student(view, training=True) for view in views]
            loss = 0.0
            for i, target in enumerate(targets):
                soft = ops.softmax((target - self.centre) / 0.3)
                loss -= ops.mean(
                    ops.sum(soft * ops.log_softmax(outs[1 - i]), -1)
                )
        learn(self.optimizer, tape, loss, self.student.trainable_variables)
        for slow, fast in zip(
            self.teacher.weights, self.student.weights, strict=True
        ):
            slow.assign(slow * 0.95 + fast * 0.05)
        mean = ops.mean(ops.concatenate(targets), axis=0)
        self.centre.assign(self.centre * 0.9 + mean * 0.1)
        self.track.update_state(loss)
        return {m.name: m.result() for m in self.metrics} | {
            "lr": self.optimizer.learning_rate
        }

    def test_step(self, data):
        x, y = data
        losses = keras.losses.sparse_categorical_crossentropy(
            y, self.teacher(x), from_logits=True
        )
        self.track.update_state(losses)
        return {"loss": self.track.result()}


@row(GROUP)
def a_teacher_of_averaged_weights_with_a_centre(run):
    def build():
        model = Distiller()
        return models.compiled(model, sparse(), adam())

    data = outside.points(), outside.kinds()
    outside.use(run, build, *data, validation_data=data)


@row(GROUP)
def averages_swapped_by_keras(run):
    def build():
        x = inputs = keras.Input((4,))
        return models.compiled(
            keras.Model(inputs, network(x)),
            sparse(),
            adam(use_ema=True, ema_momentum=0.9),
            metrics=["acc"],
        )

    data = outside.points(), outside.kinds()
    outside.use(
        run,
        build,
        *data,
        validation_data=data,
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )


@row(GROUP)
def averages_swapped_for_evaluation_by_keras(run):
    def build():
        x = inputs = keras.Input((4,))
        return models.compiled(
            keras.Model(inputs, network(x)),
            sparse(),
            adam(use_ema=True, ema_momentum=0.9),
            metrics=["acc"],
        )

    data = outside.points(), outside.kinds()
    outside.use(
        run,
        build,
        *data,
        validation_data=data,
        callbacks=[keras.callbacks.SwapEMAWeights()],
    )


@row(GROUP)
def a_scaled_loss_with_growth(run):
    def build():
        x = inputs = keras.Input((4,))
        optimizer = keras.optimizers.LossScaleOptimizer(
            adam(clipnorm=0.5), initial_scale=8.0, dynamic_growth_steps=3
        )
        return models.compiled(
            keras.Model(inputs, network(x)), sparse(), optimizer
        )

    outside.use(run, build, outside.points(), outside.kinds())


class Thaws(keras.callbacks.Callback):
    """It sets the rate at each batch, and thaws and compiles at an epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = float(rate) * 0.9

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = float(self.model.optimizer.learning_rate)


@row(GROUP)
def frozen_then_fine_tuned(run):
    def build():
        base = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(5, activation="tanh"),
            ]
        )
        base.trainable = False
        inputs = keras.Input((4,))
        x = base(inputs, training=False)
        model = keras.Model(inputs, layers.Dense(3)(x))
        return models.compiled(model, sparse(), adam(), metrics=["acc"])

    data = outside.points(), outside.kinds()
    trainer = outside.train(run, build, *data, callbacks=[Thaws()])
    with run.scope():
        trainer.model.layers[1].trainable = True
        models.compiled(trainer.model, sparse(), adam(0.001), metrics=["acc"])
    run.look(trainer)
    outside.train(run, None, *data, trainer=trainer, callbacks=[Thaws()])


@row(GROUP)
def single_batches_with_a_reset(run):
    def build():
        x = inputs = keras.Input((4,))
        return models.compiled(
            keras.Model(inputs, network(x)), sparse(), adam(), metrics=["acc"]
        )

    trainer = run.trainer(build)
    x, y, weight = outside.points(), outside.kinds(), outside.weights()
    for step, size in enumerate((13, 1, 2, 7, 13)):
        logs = trainer.train_on_batch(
            x[:size], y[:size], sample_weight=weight[:size], return_dict=True
        )
        run.see(f"train {step}", sorted(logs.values()))
        if step == 2:
            trainer.model.reset_metrics()
            logs = trainer.test_on_batch(x[:2], y[:2], return_dict=True)
            run.see("test", sorted(logs.values()))
    logs = trainer.train_on_batch(
        x[:5], y[:5], class_weight={0: 1.0, 1: 3.0, 2: 0.5}, return_dict=True
    )
    run.see("by class", sorted(logs.values()))
    run.see("predict", trainer.predict_on_batch(x[:1]))
    run.look(trainer)


@row(GROUP)
def saved_and_loaded_in_the_middle(run):
    def build():
        x = inputs = keras.Input((4,))
        return models.compiled(
            keras.Model(inputs, network(x)), sparse(), adam(), metrics=["acc"]
        )

    data = outside.points(), outside.kinds()
    trainer = outside.train(run, build, *data)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        (trainer if run.strategy else trainer.model).save(path)

        def load():
            return keras.models.load_model(path)

        again = run.trainer(load)
        outside.train(run, None, *data, trainer=again)
        weights = os.path.join(folder, "model.weights.h5")
        (again if run.strategy else again.model).save_weights(weights)
        trainer.model.load_weights(weights)
    run.look(trainer)
    outside.use(run, None, *data, trainer=trainer)


# Keras makes adapters in float32.
@row(GROUP, tolerance=1e-5)
def adapters_of_low_rank(run):
    def build():
        base = keras.Sequential(
            [
                keras.Input((outside.LENGTH,), dtype="int32"),
                layers.Embedding(outside.WORDS, 6),
                layers.Dense(8, activation="tanh"),
                layers.EinsumDense("abc,cd->abd", output_shape=(None, 6)),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )
        for layer in base.layers[:3]:
            layer.enable_lora(2)
        return models.compiled(base, sparse(), adam())

    outside.use(run, build, outside.words(), outside.kinds())


class Distance(layers.Layer):
    def call(self, inputs):
        one, two = inputs
        gap = ops.sum(ops.square(one - two), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(gap, keras.config.epsilon()))


def contrastive(margin=1.0):
    def loss(y, distance):
        near = (1.0 - y) * ops.square(distance)
        far = y * ops.square(ops.maximum(margin - distance, 0.0))
        return ops.mean(near + far)

    return loss


@row(GROUP)
def twins_with_normalization_between(run):
    def build():
        inner = keras.Input((6, 6, 2))
        x = layers.BatchNormalization(synchronized=True)(inner)
        x = layers.Conv2D(3, 3, activation="tanh")(x)
        x = layers.AveragePooling2D(2)(x)
        x = layers.BatchNormalization(synchronized=True)(layers.Flatten()(x))
        tower = keras.Model(inner, layers.Dense(4, activation="tanh")(x))
        one, two = keras.Input((6, 6, 2)), keras.Input((6, 6, 2))
        x = Distance()([tower(one), tower(two)])
        x = layers.BatchNormalization(synchronized=True)(x)
        x = layers.Dense(1, activation="sigmoid")(x)
        return models.compiled(
            keras.Model([one, two], x), contrastive(), adam(), metrics=["acc"]
        )

    x = [outside.images(channels=2), outside.images(channels=2, seed=16)]
    y = outside.kinds(2).astype("float64")[:, None]
    outside.use(run, build, x, y)


class Shared(keras.Model):
    """The body of words is in the maker and in the judge."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(6, activation="tanh")
        self.maker, self.judge = layers.Dense(4), layers.Dense(1)
        self.seeds = keras.random.SeedGenerator(4)

    def compile(self, **options):
        super().compile(optimizer=None, jit_compile=False)
        self.of_maker, self.of_judge = adam(0.02), adam(0.01)

    def call(self, x):
        return self.judge(self.body(x))

    def train_step(self, x):
        size = ops.shape(x)[0]
        noise = keras.random.normal((size, 4), dtype=x.dtype, seed=self.seeds)
        both = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))])
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(self.body(noise))
            found = self(ops.concatenate([x, made]))
            judged = ops.mean(
                keras.losses.binary_crossentropy(both, found, from_logits=True)
            )
            fooled = ops.mean(
                keras.losses.binary_crossentropy(
                    ops.ones((size, 1)), self(made), from_logits=True
                )
            )
        judges = self.body.trainable_weights + self.judge.trainable_weights
        makers = self.body.trainable_weights + self.maker.trainable_weights
        of_judge, of_maker = (
            tape.gradient(judged, judges),
            tape.gradient(fooled, makers),
        )
        self.of_judge.apply(of_judge, judges)
        self.of_maker.apply(of_maker, makers)
        return {"judged": judged, "fooled": fooled}


@row(GROUP)
def a_body_of_a_maker_and_a_judge(run):
    def build():
        model = Shared()
        model.maker.build((None, 6))
        model(ops.zeros((1, 4)))
        model.compile()
        return model

    outside.train(run, build, outside.points())


class Loops(layers.Layer):
    """Loops of `keras.ops` over time, with weights read inside of them."""

    def __init__(self, kind, **named):
        super().__init__(**named)
        self.kind = kind

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(shape[-1], shape[-1]), initializer="orthogonal"
        )

    def step(self, state, x):
        return ops.tanh(ops.matmul(state, self.kernel) + x)

    def call(self, x):
        time = x.shape[1]
        state = ops.zeros_like(x[:, 0])
        if self.kind == "scan":

            def step(state, x):
                state = self.step(state, x)
                return state, state

            state, _ = ops.scan(step, state, ops.transpose(x, (1, 0, 2)))
        elif self.kind == "fori":
            state = ops.fori_loop(
                0,
                time,
                lambda i, s: self.step(s, ops.take(x, i, axis=1)),
                state,
            )
        else:
            _, state = ops.while_loop(
                lambda i, s: i < time,
                lambda i, s: (i + 1, self.step(s, ops.take(x, i, axis=1))),
                (0, state),
                maximum_iterations=time,
            )
        return state


for _kind in ("scan", "fori", "while"):

    def _loops(run, kind=_kind):
        def build():
            inputs = keras.Input((outside.LENGTH, 3))
            x = Loops(kind)(layers.Dense(4)(inputs))
            model = keras.Model(inputs, layers.Dense(1)(x))
            return models.compiled(model, "mse", adam())

        x = outside.points(15).reshape(-1, outside.LENGTH, 3)
        outside.use(run, build, x, outside.numbers())

    add(GROUP, f"a recurrence by ops.{_kind}", _loops)


class Maps(layers.Layer):
    """Each row by itself through `vectorized_map`, with a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(shape[-1], shape[-1]), initializer="glorot_uniform"
        )

    def call(self, x):
        def one(row):
            return ops.matmul(self.kernel, ops.softmax(row)) * ops.max(row)

        return ops.vectorized_map(one, x)


@row(GROUP)
def each_row_by_a_vectorized_map(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Maps()(layers.Dense(5)(x))
        return models.compiled(
            keras.Model(inputs, layers.Dense(1)(x)), "mse", adam()
        )

    outside.use(run, build, outside.points(), outside.numbers())


@ops.custom_gradient
def reversed_gradient(x):
    def backward(*args, upstream=None):
        (upstream,) = args if upstream is None else (upstream,)
        return -0.3 * upstream

    return x * 1.0, backward


class Reversed(layers.Layer):
    def call(self, x):
        return reversed_gradient(x)


@row(GROUP)
def domains_by_reversed_gradients(run):
    def build():
        x = inputs = keras.Input((4,))
        body = layers.Dense(6, activation="tanh")(x)
        kind = layers.Dense(3, name="kind")(body)
        domain = layers.Dense(1, name="domain")(
            layers.Dense(4, activation="tanh")(Reversed()(body))
        )
        return models.compiled(
            keras.Model(inputs, [kind, domain]),
            [sparse(), keras.losses.BinaryCrossentropy(from_logits=True)],
            adam(),
            loss_weights=[1.0, 0.5],
            metrics=[["acc"], ["acc"]],
        )

    y = [outside.kinds(), outside.kinds(2, seed=15).astype("float64")[:, None]]
    weight = [outside.weights(), outside.weights(seed=19)]
    outside.use(run, build, outside.points(), y, sample_weight=weight)


class Graph(layers.Layer):
    """Messages along edges of each graph in a batch, by a segment sum."""

    def build(self, shape):
        self.inner = layers.Dense(5, activation="tanh")
        self.inner.build((None, None, shape[0][-1]))

    def call(self, inputs):
        nodes, edges = inputs
        size, count = ops.shape(nodes)[0], nodes.shape[1]
        made = self.inner(nodes)
        flat = ops.reshape(made, (-1, 5))
        first = ops.arange(size)[:, None] * count
        edges = ops.cast(edges, first.dtype)
        source = ops.reshape(edges[..., 0] + first, (-1,))
        target = ops.reshape(edges[..., 1] + first, (-1,))
        sent = ops.segment_sum(
            ops.take(flat, source, axis=0), target, num_segments=size * count
        )
        return made + ops.reshape(sent, (-1, count, 5))


@row(GROUP)
def messages_in_graphs_by_segment_sums(run):
    def build():
        nodes, edges = keras.Input((4, 3)), keras.Input((5, 2), dtype="int32")
        x = Graph()([nodes, edges])
        x = layers.GlobalAveragePooling1D()(x)
        return models.compiled(
            keras.Model([nodes, edges], layers.Dense(1)(x)), "mse", adam()
        )

    x = outside.points(12).reshape(-1, 4, 3)
    edges = models.random(7).integers(0, 4, size=(outside.EXAMPLES, 5, 2))
    outside.use(run, build, [x, edges], outside.numbers())


class Checked(keras.Model):
    """Its step checks numbers, and writes summaries of them."""

    def __init__(self, folder):
        super().__init__()
        self.network = mlp(3)
        self.folder = folder
        self.writer = tf.summary.create_file_writer(folder)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            loss = tf.debugging.check_numerics(loss, "the loss")
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        norm = tf.linalg.global_norm(gradients)
        self.norm.update_state(norm)
        with self.writer.as_default(
            tf.cast(self.optimizer.iterations, tf.int64)
        ):
            tf.summary.scalar("norm", tf.cast(norm, tf.float32))
        return {"loss": loss, "norm": self.norm.result()}


@row(GROUP)
def a_step_with_checks_and_summaries(run):
    with tempfile.TemporaryDirectory() as folder:

        def build():
            return models.compiled(Checked(folder), sparse(), adam())

        trainer = outside.train(run, build, outside.points(), outside.kinds())
        trainer.model.writer.close()
        found = []
        for name in sorted(os.listdir(folder)):
            for event in tf.compat.v1.train.summary_iterator(
                os.path.join(folder, name)
            ):
                found += [
                    (event.step, float(tf.make_ndarray(value.tensor)))
                    for value in event.summary.value
                ]
        run.see(
            "summaries",
            np.array(sorted(found), "float32").astype("float64").round(4),
        )


def last_of(run, rows):
    def build():
        x = inputs = keras.Input((4,))
        model = keras.Model(inputs, network(x))
        return models.compiled(
            model,
            sparse(),
            models.sgd(momentum=0.9, global_clipnorm=0.5),
            metrics=["acc"],
            weighted_metrics=["acc"],
        )

    n = 12 + rows
    data = (
        tf.data.Dataset.from_tensor_slices(
            (
                outside.points(examples=n),
                outside.kinds()[:n],
                outside.weights()[:n],
            )
        )
        .filter(lambda *_: True)
        .batch(6)
    )
    trainer = run.trainer(build)
    run.see_history(
        trainer.fit(data, epochs=2, verbose=0, validation_data=data)
    )
    run.see("evaluate", trainer.evaluate(data, verbose=0))
    run.see("predict", trainer.predict(data, verbose=0))
    for index, variable in enumerate(trainer.model.trainable_variables):
        run.see(f"weight {index}", variable)


for _rows in (1, 2):
    add(
        GROUP,
        f"a dataset of unknown length, {_rows} at its end",
        lambda run, rows=_rows: last_of(run, rows),
    )


@row(GROUP, floatx="float32", tolerance=1e-5)
def strings_and_numbers_into_one_model(run):
    def build():
        text = keras.Input((1,), dtype="string", name="text")
        city = keras.Input((1,), dtype="string", name="city")
        code = keras.Input((1,), dtype="int64", name="code")
        flag = keras.Input((1,), dtype="bool", name="flag")
        vector = layers.TextVectorization(
            vocabulary=["one", "two", "three"], output_sequence_length=4
        )
        found = layers.StringLookup(
            vocabulary=["a", "b"], output_mode="one_hot"
        )
        hashed = layers.Hashing(5, output_mode="one_hot")
        words = layers.Embedding(8, 3, mask_zero=True)(vector(text))
        words = layers.GRU(4)(words)
        x = layers.Concatenate()(
            [
                words,
                found(city),
                hashed(code),
                layers.Lambda(lambda f: ops.cast(f, "float32"))(flag),
            ]
        )
        model = keras.Model([text, city, code, flag], network(x))
        return models.compiled(model, sparse(), models.sgd())

    pick = models.random(3)
    x = {
        "text": pick.choice(["one two", "three", "two two four", ""], (44, 1)),
        "city": pick.choice(["a", "b", "c"], (44, 1)),
        "code": pick.integers(0, 99, (44, 1)),
        "flag": pick.integers(0, 2, (44, 1)).astype(bool),
    }
    x = {k: tf.constant(v) for k, v in x.items()}
    outside.on_batches(run, build, outside.batches(x, outside.kinds()))


@row(GROUP)
def sparse_rows_into_a_dense_layer(run):
    def build():
        inputs = keras.Input((7,), sparse=True)
        x = layers.Dense(6, activation="tanh")(inputs)
        return models.compiled(
            keras.Model(inputs, layers.Dense(3)(x)), sparse(), adam()
        )

    x = outside.points(7)
    x[np.abs(x) < 0.8] = 0.0
    data = outside.batches(tf.sparse.from_dense(x), outside.kinds())
    outside.on_batches(run, build, data)


class Rates(keras.metrics.Metric):
    """A smallest number and sums that begin at numbers of their own."""

    def __init__(self, name="rates", **named):
        super().__init__(name=name, **named)
        start = keras.initializers.Constant
        self.low = self.add_variable((), start(9.0), name="low")
        self.total = self.add_variable((3,), start([0.5, 0, 0]), name="total")
        self.count = self.add_variable((), start(2), "int64", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        chance = ops.softmax(ops.cast(y_pred, self.dtype))
        self.low.assign(ops.minimum(self.low, ops.min(chance)))
        self.total.assign_add(ops.sum(chance, axis=0))
        self.count.assign_add(ops.cast(ops.shape(y_pred)[0], "int64"))

    def result(self):
        share = self.total / ops.cast(ops.maximum(self.count, 1), self.dtype)
        return {
            "low": 1.0 * self.low,
            "first": share[0],
            "second": share[1],
        }

    def reset_state(self):
        self.low.assign(9.0)
        self.total.assign([0.5, 0.0, 0.0])
        self.count.assign(2)


@row(GROUP)
def a_metric_of_several_numbers_with_its_own_reset(run):
    def build():
        x = inputs = keras.Input((4,))
        return models.compiled(
            keras.Model(inputs, network(x)), sparse(), adam(), metrics=[Rates()]
        )

    data = outside.points(), outside.kinds()
    outside.use(run, build, *data, validation_data=data)


class Penalized(keras.Model):
    """A WGAN's critic with a penalty of inner gradients, five to one."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential(
            [
                keras.Input((2,)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(4),
            ]
        )
        self.critic = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6),
                layers.LayerNormalization(),
                layers.LeakyReLU(),
                layers.Dropout(0.2, seed=3),
                layers.Dense(1),
            ]
        )
        self.seeds = keras.random.SeedGenerator(8)

    def compile(self, maker, critic):
        super().compile(jit_compile=False)
        self.of_maker, self.of_critic = maker, critic

    def call(self, noise):
        return self.maker(noise)

    def penalty(self, real, made):
        share = keras.random.uniform(
            (ops.shape(real)[0], 1), dtype=real.dtype, seed=self.seeds
        )
        mixed = share * real + (1.0 - share) * made
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            found = self.critic(mixed, training=True)
        slope = tape.gradient(found, [mixed])[0]
        return ops.mean((ops.sqrt(ops.sum(slope**2, -1) + 1e-12) - 1.0) ** 2)

    def train_step(self, real):
        size = ops.shape(real)[0]
        for _ in range(2):
            noise = keras.random.normal(
                (size, 2), dtype=real.dtype, seed=self.seeds
            )
            with tf.GradientTape() as tape:
                made = self.maker(noise, training=True)
                cost = ops.mean(self.critic(made, training=True)) - ops.mean(
                    self.critic(real, training=True)
                )
                cost += 10.0 * self.penalty(real, made)
            learn(self.of_critic, tape, cost, self.critic.trainable_variables)
        noise = keras.random.normal(
            (size, 2), dtype=real.dtype, seed=self.seeds
        )
        with tf.GradientTape() as tape:
            loss = -ops.mean(
                self.critic(self.maker(noise, training=True), training=True)
            )
        learn(self.of_maker, tape, loss, self.maker.trainable_variables)
        return {"critic": cost, "maker": loss}


@row(GROUP)
def a_critic_with_dropout_and_a_penalty(run):
    def build():
        model = Penalized()
        model.compile(
            adam(0.01, beta_1=0.5), adam(0.01, beta_1=0.5, beta_2=0.9)
        )
        return model

    outside.train(run, build, outside.points())


class Old(layers.Layer):
    """It holds `value` of its state, and reads it after it was assigned."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x, training=None):
        before = self.seen.value
        if training:
            self.seen.assign_add(1.0)
        return x * (1.0 + 0.1 * ops.convert_to_tensor(before))


@row(GROUP, excuses=(Excuse("", "`old` keeps the value from before"),))
def a_value_held_over_an_assignment(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Old()(layers.Dense(6)(x))
        return models.compiled(
            keras.Model(inputs, network(x)), sparse(), adam()
        )

    outside.use(run, build, outside.points(), outside.kinds())


@row(GROUP)
def a_sequential_that_grows(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(3),
            ]
        )
        return models.compiled(model, sparse(), adam())

    data = outside.points(), outside.kinds()
    trainer = outside.train(run, build, *data)
    with run.scope():
        trainer.model.pop()
        trainer.model.add(
            layers.Dense(5, activation="tanh", kernel_initializer="identity")
        )
        trainer.model.add(layers.Dense(3, kernel_initializer="ones"))
        models.compiled(trainer.model, sparse(), adam())
    outside.use(run, None, *data, trainer=trainer)


class Experts(layers.Layer):
    """Rows go to their best expert; a loss balances the experts."""

    def __init__(self, experts=3, width=6, **named):
        super().__init__(**named)
        self.router = layers.Dense(experts)
        self.count, self.width = experts, width

    def build(self, shape):
        self.router.build(shape)
        self.kernel = self.add_weight(
            shape=(self.count, shape[-1], self.width),
            initializer="glorot_uniform",
            name="kernel",
        )

    def call(self, x):
        chance = ops.softmax(self.router(x))
        weight, index = ops.top_k(chance, 1)
        hot = ops.one_hot(index[:, 0], self.count, dtype=x.dtype)
        share = ops.mean(hot, axis=0)
        self.add_loss(
            0.1 * self.count * ops.sum(share * ops.mean(chance, axis=0))
        )
        return weight * ops.einsum("be,bi,eio->bo", hot, x, self.kernel)


@row(GROUP)
def experts_with_a_loss_of_balance(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Experts()(layers.Dense(5, activation="tanh")(x))
        return models.compiled(
            keras.Model(inputs, layers.Dense(3)(x)), sparse(), adam()
        )

    outside.use(run, build, outside.points(), outside.kinds())


class Quantizer(layers.Layer):
    """A codebook that follows averages of what is assigned to its codes."""

    def __init__(self, codes=5, **named):
        super().__init__(**named)
        self.codes = codes

    def build(self, shape):
        width = shape[-1]
        self.book = self.add_weight(
            shape=(self.codes, width),
            initializer=keras.initializers.RandomNormal(seed=4),
            trainable=False,
            name="book",
        )
        self.sizes = self.add_weight(
            shape=(self.codes,),
            initializer="ones",
            trainable=False,
            name="sizes",
        )
        self.sums = self.add_weight(
            shape=(self.codes, width),
            initializer=keras.initializers.RandomNormal(seed=4),
            trainable=False,
            name="sums",
        )

    def call(self, x, training=None):
        gaps = ops.sum(ops.square(x[:, None] - self.book), axis=-1)
        hot = ops.one_hot(ops.argmin(gaps, axis=-1), self.codes, dtype=x.dtype)
        found = ops.matmul(hot, self.book)
        if training:
            self.sizes.assign(0.9 * self.sizes + 0.1 * ops.sum(hot, axis=0))
            self.sums.assign(
                0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(hot), x)
            )
            self.book.assign(self.sums / (self.sizes[:, None] + 1e-3))
        self.add_loss(0.25 * ops.mean(ops.square(x - ops.stop_gradient(found))))
        return x + ops.stop_gradient(found - x)


@row(GROUP)
def a_codebook_of_moving_sums(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Quantizer()(layers.Dense(3)(x))
        return models.compiled(
            keras.Model(inputs, network(x, 4)), "mse", adam()
        )

    outside.use(run, build, outside.points(), outside.points())
