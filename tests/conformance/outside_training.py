"""Training as others write it: preferences, flows, per-example state."""

import os
import tempfile

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row
from tests.conformance.outside import learn, mlp
from tests.conformance.outside_loops import built, loop, parts

GROUP = "Outside: training of others"


def adam(rate=0.02, **options):
    return keras.optimizers.Adam(rate, **options)


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Preference(keras.Model):
    """Direct preferences: two answers, a frozen reference, masked sums."""

    def __init__(self, network, reference):
        super().__init__()
        self.network, self.reference = network, reference
        reference.trainable = False
        self.margin = keras.metrics.Mean(name="margin")
        self.wins = keras.metrics.BinaryAccuracy(name="wins", threshold=0.0)

    def call(self, inputs, training=False):
        return {
            side: self.network(inputs[side], training=training)
            for side in ("chosen", "rejected")
        }

    def likelihood(self, words, logits):
        log = ops.log_softmax(logits[:, :-1], axis=-1)
        at = ops.take_along_axis(log, words[:, 1:, None], axis=-1)[..., 0]
        mask = ops.cast(words[:, 1:] != 0, at.dtype)
        return ops.sum(at * mask, axis=1)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        ratio = {}
        for side, logits in y_pred.items():
            before = self.reference(x[side])
            ratio[side] = self.likelihood(x[side], logits) - self.likelihood(
                x[side], before
            )
        margin = 0.5 * (ratio["chosen"] - ratio["rejected"])
        self.margin.update_state(margin)
        self.wins.update_state(ops.ones_like(margin), margin)
        return -ops.mean(ops.log_sigmoid(margin))


@row(GROUP)
def preferences_against_a_frozen_reference(run):
    def network():
        return keras.Sequential(
            [
                keras.Input((outside.LENGTH,), dtype="int32"),
                layers.Embedding(outside.WORDS, 4),
                layers.GRU(4, return_sequences=True),
                layers.Dense(outside.WORDS),
            ]
        )

    def build():
        policy, reference = network(), network()
        reference.set_weights(policy.get_weights())
        model = Preference(policy, reference)
        model.compile(adam(), jit_compile=False)
        return model

    data = {"chosen": outside.words(5), "rejected": outside.words(6)}
    outside.on_batches(run, build, outside.batches(data))


class Flow(keras.Model):
    """Flow matching: times and noise drawn in the step, labels dropped."""

    def __init__(self):
        super().__init__()
        self.field = mlp(4, 9, 6)
        self.seeds = keras.random.SeedGenerator(4)
        self.field_loss = keras.metrics.Mean(name="field_loss")

    def call(self, inputs, training=False):
        x, time, label = inputs
        return self.field(ops.concatenate([x, time, time**2, label], -1))

    def train_step(self, data):
        x, label = data
        size = ops.shape(x)[0]
        noise = keras.random.normal((size, 4), dtype=x.dtype, seed=self.seeds)
        time = keras.random.uniform((size, 1), dtype=x.dtype, seed=self.seeds)
        kept = keras.random.uniform((size, 1), dtype=x.dtype, seed=self.seeds)
        hot = ops.one_hot(label, 3, dtype=x.dtype) * ops.cast(
            kept > 0.2, x.dtype
        )
        with tf.GradientTape() as tape:
            between = time * x + (1.0 - time) * noise
            found = self((between, time, hot), training=True)
            loss = ops.mean((found - (x - noise)) ** 2)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.field_loss.update_state(loss, sample_weight=size)
        return {"field_loss": self.field_loss.result()}

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        hot = ops.one_hot(
            ops.zeros(ops.shape(x)[:1], "int32"), 3, dtype=x.dtype
        )
        for step in range(3):
            time = ops.ones_like(x[:, :1]) * step / 3.0
            x = x + self((x, time, hot)) / 3.0
        return x


@row(GROUP)
def flow_matching_that_predicts_by_steps(run):
    def build():
        optimizer = adam(0.01, use_ema=True, ema_overwrite_frequency=3)
        return models.compiled(Flow(), None, optimizer)

    data = outside.points(), outside.kinds()
    trainer = outside.train(run, build, *data)
    run.see("predict", trainer.predict(data[0], batch_size=13, verbose=0))


class Uncertain(keras.Model):
    """Predictions with dropout on, several times, their mean and spread."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dropout(0.4, seed=7),
                layers.Dense(1),
            ]
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        made = ops.stack([self(x, training=True) for _ in range(3)])
        return {"mean": ops.mean(made, 0), "spread": ops.std(made, 0)}


@row(GROUP)
def predictions_with_dropout_on(run):
    def build():
        return models.compiled(Uncertain(), "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers())


class Memory(keras.Model):
    """Labels that are noisy: a moving prediction of each example is kept."""

    def __init__(self, by_loss):
        super().__init__()
        self.network, self.by_loss = mlp(3), by_loss
        self.kept = self.add_weight(
            shape=(outside.EXAMPLES, 3),
            initializer=keras.initializers.Constant(1 / 3),
            trainable=False,
            name="kept",
        )

    def call(self, inputs):
        return self.network(inputs["x"])

    def regularized(self, index, logits, y):
        chances = ops.softmax(logits)
        old = ops.take(self.kept, index, axis=0)
        new = 0.7 * old + 0.3 * ops.stop_gradient(chances)
        self.kept.assign(ops.scatter_update(self.kept, index[:, None], new))
        log = ops.log(1.0 - ops.sum(new * chances, axis=1) + 1e-4)
        loss = keras.losses.sparse_categorical_crossentropy(
            y, logits, from_logits=True
        )
        return ops.mean(loss + 0.5 * log)


class MemoryByStep(Memory):
    def train_step(self, data):
        inputs, y = data
        with tf.GradientTape() as tape:
            logits = self(inputs, training=True)
            loss = self.regularized(inputs["index"], logits, y)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class MemoryByLoss(Memory):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if not training:
            return super().compute_loss(x, y, y_pred, sample_weight)
        return self.regularized(x["index"], y_pred, y)


def _memory(run, kind):
    def build():
        return models.compiled(kind(False), sparse(), adam())

    data = {"x": outside.points(), "index": tf.range(outside.EXAMPLES).numpy()}
    outside.use(run, build, data, outside.kinds())


@row(GROUP)
def a_moving_prediction_of_each_example_by_a_step(run):
    _memory(run, MemoryByStep)


@row(GROUP)
def a_moving_prediction_of_each_example_by_compute_loss(run):
    _memory(run, MemoryByLoss)


class Stateless(keras.Model):
    """A teacher by `stateless_call` of averaged weights."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(5, activation="tanh"),
                layers.Dropout(0.2, seed=3),
                layers.Dense(2),
            ]
        )
        self.average = [
            self.add_weight(
                shape=w.shape, initializer="zeros", trainable=False, name="avg"
            )
            for w in self.network.trainable_variables
        ]

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        frozen = self.network.non_trainable_variables
        wanted, _ = self.network.stateless_call(self.average, frozen, x)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x, y, found)
            loss += 0.3 * ops.mean((found - wanted) ** 2)
        weights = self.network.trainable_variables
        learn(self.optimizer, tape, loss, weights)
        for average, weight in zip(self.average, weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"loss": loss} | self.compute_metrics(x, y, found, None)


@row(GROUP)
def a_teacher_by_a_stateless_call(run):
    def build():
        model = Stateless()
        return models.compiled(model, "mse", adam(), metrics=["mae"])

    outside.use(run, build, outside.points(), outside.numbers(2))


class StyleGan(keras.Model):
    """R1 on real rows by a persistent tape, spectral norms, an average."""

    def __init__(self):
        super().__init__()
        self.generator, self.average = mlp(4, 3), mlp(4, 3)
        self.average.set_weights(self.generator.get_weights())
        self.discriminator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.SpectralNormalization(layers.Dense(5)),
                layers.BatchNormalization(synchronized=True),
                layers.LeakyReLU(),
                layers.Dense(1),
            ]
        )
        self.seeds = keras.random.SeedGenerator(8)
        self.d_metric = keras.metrics.Mean(name="d")
        self.g_metric = keras.metrics.Mean(name="g")

    def compile(self, d_optimizer, g_optimizer):
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real):
        latent = keras.random.normal(
            (ops.shape(real)[0], 3), dtype=real.dtype, seed=self.seeds
        )
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(latent, training=True)
            with tf.GradientTape() as inner:
                inner.watch(real)
                true = self.discriminator(real, training=True)
            slope = inner.gradient(true, real)
            false = self.discriminator(fake, training=True)
            d_loss = ops.mean(ops.softplus(false) + ops.softplus(-true))
            d_loss += ops.mean(ops.sum(slope**2, axis=1))
            g_loss = ops.mean(ops.softplus(-false))
        learn(
            self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights
        )
        learn(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        for old, new in zip(
            self.average.weights, self.generator.weights, strict=True
        ):
            old.assign(0.9 * old + 0.1 * new)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


@row(GROUP)
def gan_with_r1_and_spectral_norms(run):
    def build():
        model = StyleGan()
        model.compile(adam(0.02, beta_1=0.0), adam(0.01, beta_1=0.5))
        return model

    data = outside.batches(outside.points())
    outside.on_batches(run, build, data, evaluate=False, predict=False)


@row(GROUP)
def policies_of_groups(run):
    """GRPO: advantages within groups of answers, clipped, a penalty by KL."""

    def build():
        policy, reference = mlp(3), mlp(3)
        reference.set_weights(policy.get_weights())
        return {
            "policy": policy,
            "reference": reference,
            "optimizer": built(
                keras.optimizers.AdamW(0.02, global_clipnorm=0.5), policy
            ),
        }

    def update(of, batch):
        state, action, reward = batch
        groups = tf.reshape(reward, [-1, 4])
        mean = tf.reduce_mean(groups, 1, keepdims=True)
        spread = tf.math.reduce_std(groups, 1, keepdims=True)
        advantage = tf.reshape((groups - mean) / (spread + 1e-4), [-1])
        with tf.GradientTape() as tape:
            log = ops.log_softmax(of["policy"](state))
            before = ops.log_softmax(of["reference"](state))
            chosen = tf.gather(log, action, batch_dims=1)
            ratio = ops.exp(chosen - ops.stop_gradient(chosen))
            gap = tf.gather(before, action, batch_dims=1) - chosen
            kl = ops.exp(gap) - gap - 1.0
            loss = -ops.mean(ratio * advantage - 0.1 * kl)
        learn(of["optimizer"], tape, loss, of["policy"].trainable_variables)
        return {"loss": loss, "kl": ops.mean(kl)}

    data = outside.points(), outside.kinds(), outside.numbers()[:, 0]
    loop(run, build, (update, parts(*data, size=12)))


class Centralized(keras.optimizers.RMSprop):
    """keras.io's: gradients are centred before they are applied."""

    def apply(self, grads, trainable_variables=None):
        centred = [
            g - ops.mean(g, axis=tuple(range(len(g.shape) - 1)), keepdims=True)
            if len(g.shape) > 1
            else g
            for g in grads
        ]
        super().apply(centred, trainable_variables)


@row(GROUP)
def gradients_centred_by_the_optimizer(run):
    def build():
        return models.compiled(
            mlp(3), sparse(), Centralized(0.01, clipnorm=0.5), metrics=["acc"]
        )

    outside.use(run, build, outside.points(), outside.kinds())


class Wrapping(keras.optimizers.Optimizer):
    """An optimizer around another one, with slots of its own."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.1)
        self.inner = inner

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.inner.build(variables)
            self.slow = self.add_optimizer_variables(variables, "slow")

    def follow(self, before, slow, variable):
        """Every third step goes half of the way from the slow weights."""
        slow_now = ops.where(self.iterations == 0, before, slow)
        now = (self.iterations + 1) % 3 == 0
        moved = slow_now + 0.5 * (variable - slow_now)
        slow.assign(ops.where(now, moved, slow_now))
        variable.assign(ops.where(now, moved, variable))


class Lookahead(Wrapping):
    """Weight by weight, by the inner `update_step`."""

    def update_step(self, gradient, variable, learning_rate):
        before = ops.copy(variable)
        self.inner.update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        self.follow(before, slow, variable)


class LookaheadAfter(Wrapping):
    """All weights at once, after the inner `apply`."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        before = [ops.copy(v) for v in trainable_variables]
        self.inner.apply(grads, trainable_variables)
        for each in zip(before, self.slow, trainable_variables, strict=True):
            self.follow(*each)
        self._iterations.assign_add(1)


@row(GROUP)
def slow_weights_around_an_optimizer(run):
    def build():
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return models.compiled(mlp(1), "mse", Lookahead(inner))

    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def slow_weights_after_an_optimizer(run):
    def build():
        inner = keras.optimizers.Adam(0.05, clipnorm=0.3)
        return models.compiled(mlp(1), "mse", LookaheadAfter(inner))

    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def muon_with_layers_left_to_adam(run):
    """Averages, decay with exclusions, accumulation and clipping at once."""

    def build():
        optimizer = keras.optimizers.Muon(
            0.02,
            exclude_layers=["table", "head"],
            weight_decay=0.01,
            use_ema=True,
            ema_overwrite_frequency=2,
            gradient_accumulation_steps=2,
            clipnorm=1.0,
        )
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
        model = keras.Sequential(
            [
                keras.Input((outside.LENGTH,), dtype="int32"),
                layers.Embedding(outside.WORDS, 4, name="table"),
                layers.LayerNormalization(),
                layers.Dense(5, activation="gelu"),
                layers.Flatten(),
                layers.Dense(3, name="head"),
            ]
        )
        return models.compiled(model, sparse(), optimizer)

    outside.use(run, build, outside.words(), outside.kinds())


class F1(keras.metrics.Metric):
    """A ratio of the results of two metrics of Keras, weighted."""

    def __init__(self, name="f1"):
        super().__init__(name=name)
        self.precision = keras.metrics.Precision()
        self.recall = keras.metrics.Recall()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.precision.update_state(y_true, y_pred, sample_weight)
        self.recall.update_state(y_true, y_pred, sample_weight)

    def result(self):
        p, r = self.precision.result(), self.recall.result()
        return 2 * p * r / (p + r + keras.config.epsilon())

    def reset_state(self):
        self.precision.reset_state()
        self.recall.reset_state()


@row(GROUP, tolerance=1e-6)
def a_metric_of_two_metrics(run):
    def build():
        return models.compiled(
            mlp(1, activation="sigmoid"),
            "binary_crossentropy",
            adam(),
            metrics=[F1()],
            weighted_metrics=[F1("weighted_f1")],
        )

    y = outside.kinds(2)[:, None].astype("float64")
    outside.use(
        run,
        build,
        outside.points(),
        y,
        sample_weight=outside.weights(),
    )


class Balanced(keras.callbacks.Callback):
    """A rate found per batch, weights put back, a stage by the loss."""

    def on_train_begin(self, logs=None):
        self.start = self.model.get_weights()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        rate = self.model.optimizer.learning_rate
        rate.assign(float(rate) * 1.1)
        if len(self.losses) == 3:
            self.model.set_weights(self.start)

    def on_epoch_end(self, epoch, logs=None):
        for variable in self.model.optimizer.variables:
            if "momentum" in variable.path:
                variable.assign(ops.zeros_like(variable))


@row(GROUP)
def a_finder_of_rates_that_puts_weights_back(run):
    callback = Balanced()

    def build():
        return models.compiled(mlp(1), "mse", models.sgd(0.02, momentum=0.9))

    outside.train(
        run, build, outside.points(), outside.numbers(), callbacks=[callback]
    )
    run.see("losses", callback.losses)


@keras.saving.register_keras_serializable("outside")
class Gate(layers.Layer):
    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.count.assign_add(ops.mean(x))
        return ops.sigmoid(ops.matmul(x, self.kernel)) * x

    def get_config(self):
        return super().get_config() | {"units": self.units}


@row(GROUP)
def a_model_that_goes_on_from_a_file(run):
    """`load_model` with an optimizer that has steps already."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.keras")
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), Gate(4), layers.Dense(1)])
        models.compiled(model, "mse", adam(), metrics=["mae"])
        with tf.device("CPU:0"):
            model.fit(outside.points(), outside.numbers(), verbose=0)
        model.save(file)

        def build():
            return keras.models.load_model(file)

        outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def masked_targets_with_classes_and_weights(run):
    """A mask of Keras, weights of time steps and a named loss of an output."""

    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        x = layers.Embedding(outside.WORDS, 4, mask_zero=True)(inputs)
        x = layers.LSTM(4, return_sequences=True)(x)
        tags = layers.Dense(3, name="tags")(x)
        kind = layers.Dense(1, activation="sigmoid", name="kind")(
            layers.GlobalMaxPooling1D()(layers.Dense(4)(x))
        )
        return models.compiled(
            keras.Model(inputs, [tags, kind]),
            [sparse(), keras.losses.BinaryFocalCrossentropy()],
            keras.optimizers.Lion(0.01, weight_decay=0.1),
            loss_weights=[0.7, 0.3],
            metrics=[["accuracy"], ["accuracy", keras.metrics.AUC(name="a")]],
            weighted_metrics=[["accuracy"], []],
        )

    x = outside.words()
    y = [x % 3, outside.kinds(2)[:, None].astype("float64")]
    weight = [
        models.random(8).uniform(0.1, 2.0, x.shape),
        outside.weights(),
    ]
    outside.use(run, build, x, y, sample_weight=weight)


class Curriculum(keras.callbacks.Callback):
    """Layers thaw and a weight of a loss rises, epoch by epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.share.assign(0.5 * epoch)


class Auxiliary(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(5, activation="tanh"), layers.Dense(1)
        self.early = layers.Dense(1)
        self.share = keras.Variable(0.0, trainable=False, name="share")

    def call(self, x, training=False):
        x = self.one(x)
        if training:
            self.add_loss(self.share * ops.mean(self.early(x) ** 2))
        return self.two(x)


@row(GROUP)
def a_curriculum_with_several_steps_in_one(run):
    def build():
        return models.compiled(
            Auxiliary(), "huber", adam(), steps_per_execution=3
        )

    outside.use(
        run,
        build,
        outside.points(),
        outside.numbers(),
        callbacks=[Curriculum()],
        epochs=3,
    )


class Bayesian(layers.Layer):
    """Weights drawn in each call; the divergence of their spread is added."""

    def __init__(self, units):
        super().__init__()
        self.units = units
        self.seeds = keras.random.SeedGenerator(6)

    def build(self, shape):
        options = {"shape": (shape[-1], self.units)}
        self.mean = self.add_weight(name="mean", **options)
        self.spread = self.add_weight(
            name="spread",
            initializer=keras.initializers.Constant(-2.0),
            **options,
        )

    def call(self, x, training=False):
        spread = ops.softplus(self.spread)
        kernel = ops.convert_to_tensor(self.mean)
        if training:
            noise = keras.random.normal(
                kernel.shape, dtype=x.dtype, seed=self.seeds
            )
            kernel = kernel + spread * noise
        kl = spread**2 + kernel**2 - 1.0 - 2.0 * ops.log(spread)
        self.add_loss(0.5 * ops.sum(kl) / outside.EXAMPLES)
        return ops.matmul(x, kernel)


@row(GROUP)
def weights_drawn_in_each_call(run):
    def build():
        model = keras.Sequential(
            [keras.Input((4,)), Bayesian(5), layers.ReLU(), Bayesian(1)]
        )
        return models.compiled(model, "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers())


class Manual(keras.Model):
    """Lightning's manual steps: closures, a schedule by hand, logs by name."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(3), mlp(4, 3)
        self.rates = keras.optimizers.schedules.CosineDecay(0.05, 8)
        self.logged = {
            name: keras.metrics.Mean(name=name) for name in ("recon", "norm")
        }

    def call(self, x, training=False):
        return self.decoder(self.encoder(x))

    def log(self, **values):
        for name, value in values.items():
            self.logged[name].update_state(value)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, x, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.2, norm)
        self.optimizer.learning_rate.assign(
            self.rates(self.optimizer.iterations)
        )
        self.optimizer.apply(gradients, self.trainable_variables)
        self.log(recon=loss, norm=norm)
        return {name: m.result() for name, m in self.logged.items()}

    def test_step(self, x):
        self.log(recon=self.compute_loss(x, x, self(x)))
        return {"recon": self.logged["recon"].result()}


@row(GROUP)
def manual_steps_with_a_schedule_by_hand(run):
    def build():
        return models.compiled(Manual(), "mse", models.sgd(momentum=0.9))

    outside.on_batches(run, build, outside.batches(outside.points()))


@row(GROUP)
def padded_graphs_with_edges_in_the_data(run):
    """Batches of graphs: adjacency, masks, attention over neighbours."""

    class GraphAttention(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units, use_bias=False)
            self.left, self.right = layers.Dense(1), layers.Dense(1)

        def call(self, x, edges):
            x = self.dense(x)
            scores = self.left(x) + ops.transpose(self.right(x), (0, 2, 1))
            scores = ops.where(edges > 0, ops.leaky_relu(scores), -1e9)
            return ops.elu(ops.matmul(ops.softmax(scores), x))

    def build():
        nodes = keras.Input((5, 4))
        edges = keras.Input((5, 5))
        mask = keras.Input((5,), dtype="bool")
        x = GraphAttention(4)(nodes, edges)
        x = GraphAttention(3)(x, edges)
        x = layers.GlobalAveragePooling1D()(x, mask=mask)
        return models.compiled(
            keras.Model([nodes, edges, mask], layers.Dense(3)(x)),
            sparse(),
            adam(),
            metrics=["accuracy"],
        )

    random = models.random(12)
    size = outside.EXAMPLES
    x = [
        random.normal(size=(size, 5, 4)),
        random.integers(0, 2, (size, 5, 5)).astype("float64"),
        random.integers(0, 2, (size, 5)).astype(bool),
    ]
    outside.use(run, build, x, outside.kinds())


@row(GROUP)
def xla_and_a_custom_loss_class(run):
    """`jit_compile=True`, a `Loss` subclass with state-free weights."""

    class Quantile(keras.losses.Loss):
        def call(self, y, found):
            gap = y - found
            at = ops.convert_to_tensor([0.1, 0.5, 0.9], gap.dtype)
            return ops.mean(ops.maximum(at * gap, (at - 1.0) * gap), axis=-1)

    def build():
        return models.compiled(
            mlp(3), Quantile(), keras.optimizers.Nadam(0.02), jit_compile=True
        )

    outside.use(
        run,
        build,
        outside.points(),
        outside.numbers(),
        sample_weight=outside.weights(),
    )
