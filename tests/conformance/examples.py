"""More programs, with the mechanics of the examples of keras.io."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models
from tests.conformance.harness import row

GROUP = "Programs"


def _network(width=1, features=models.FEATURES):
    return keras.Sequential(
        [
            keras.Input((features,)),
            layers.Dense(4, activation="tanh"),
            layers.Dense(width),
        ]
    )


def _pairs(*more):
    arrays = (models.points(), models.points(seed=8), *more)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)


def _step(optimizer, tape, loss, network):
    weights = network.trainable_variables
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


class Diffusion(keras.Model):
    """DDIM: an average of the network, by which it is tested."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = _network(4, 5)
        self.ema_network = keras.models.clone_model(self.network)
        self.tracker = keras.metrics.Mean(name="noise")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, network, data):
        x, noise, angle = data
        noisy = ops.cos(angle) * self.normalizer(x) + ops.sin(angle) * noise
        found = network(ops.concatenate([noisy, angle], axis=1))
        return self.loss(noise, found)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.network, data)
        _step(self.optimizer, tape, loss, self.network)
        for weight, average in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            average.assign(0.9 * average + 0.1 * weight)
        self.tracker.update_state(loss)
        return {"noise": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.loss_of(self.ema_network, data))
        return {"noise": self.tracker.result()}


@row(GROUP)
def diffusion_with_an_averaged_network(run):
    def build():
        model = Diffusion()
        model.normalizer.adapt(models.points())
        model.compile(
            keras.optimizers.AdamW(0.01, weight_decay=0.001),
            keras.losses.MeanAbsoluteError(),
        )
        return model

    angles = models.random(3).uniform(0.1, 1.2, size=(29, 1))
    run.fit(build, _pairs(angles), validation_data=_pairs(angles))


class Contrast(keras.Model):
    """MoCo: a momentum encoder, and keys of the batches before."""

    def __init__(self, queued):
        super().__init__()
        self.encoder, self.momentum = _network(3), _network(3)
        self.momentum.trainable = False
        self.queue = self.add_weight(
            shape=(20, 3), trainable=False, name="queue"
        )
        self.queued = queued

    def train_step(self, data):
        with tf.GradientTape() as tape:
            queries, keys = self.encoder(data[0]), self.momentum(data[1])
            near = ops.sum(queries * keys, axis=1, keepdims=True)
            far = ops.matmul(queries, ops.transpose(self.queue))
            logits = ops.concatenate([near, far], axis=1)
            loss = -ops.mean(ops.log_softmax(logits)[:, 0])
        _step(self.optimizer, tape, loss, self.encoder)
        for weight, average in zip(
            self.encoder.weights, self.momentum.weights, strict=True
        ):
            average.assign(0.9 * average + 0.1 * weight)
        if self.queued:
            self.queue.assign(ops.concatenate([keys, self.queue])[:20])
        return {"loss": loss}


def _contrast(queued):
    def build():
        model = Contrast(queued)
        model.compile(models.sgd())
        return model

    return build


@row(GROUP)
def momentum_encoder(run):
    run.fit(_contrast(False), _pairs())


@row(GROUP)
def momentum_encoder_with_a_queue(run):
    run.fit(_contrast(True), _pairs())


class Cycle(keras.Model):
    """CycleGAN: four networks, four optimizers, one tape."""

    def __init__(self):
        super().__init__()
        self.parts = [_network(4), _network(4), _network(), _network()]
        self.each = [
            keras.optimizers.Adam(0.02, beta_1=0.5) for _ in self.parts
        ]
        self.gap = keras.losses.MeanAbsoluteError()
        self.square = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        there, back, judge_x, judge_y = self.parts
        with tf.GradientTape(persistent=True) as tape:
            losses = []
            for real, other, go, come, judge in (
                (x, y, there, back, judge_y),
                (y, x, back, there, judge_x),
            ):
                judged = judge(go(real))
                losses.append(
                    self.square(ops.ones_like(judged), judged)
                    + 10.0 * self.gap(real, come(go(real)))
                    + 5.0 * self.gap(other, go(other))
                )
            for real, other, go, judge in (
                (x, y, back, judge_x),
                (y, x, there, judge_y),
            ):
                ones, zeros = judge(real), judge(go(other))
                losses.append(
                    0.5 * self.square(ops.ones_like(ones), ones)
                    + 0.5 * self.square(ops.zeros_like(zeros), zeros)
                )
        for optimizer, loss, part in zip(
            self.each, losses, self.parts, strict=True
        ):
            _step(optimizer, tape, loss, part)
        return {str(i): loss for i, loss in enumerate(losses)}


@row(GROUP)
def four_networks_with_an_optimizer_each(run):
    def build():
        model = Cycle()
        model.compile()
        return model

    run.fit(build, _pairs())


class Critic(keras.Model):
    """Several steps of a critic, whose weights the step itself clips."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = _network(4), _network()
        self.first, self.second = (
            keras.optimizers.RMSprop(0.02) for _ in range(2)
        )

    def train_step(self, data):
        real, noise = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = ops.mean(self.critic(self.maker(noise)))
                gap = made - ops.mean(self.critic(real))
            _step(self.first, tape, gap, self.critic)
            for weight in self.critic.trainable_variables:
                weight.assign(ops.clip(weight, -0.3, 0.3))
        with tf.GradientTape() as tape:
            made = -ops.mean(self.critic(self.maker(noise)))
        _step(self.second, tape, made, self.maker)
        return {"gap": gap, "made": made}


@row(GROUP)
def critic_whose_weights_the_step_clips(run):
    def build():
        model = Critic()
        model.compile()
        return model

    run.fit(build, _pairs())


class Distiller(keras.Model):
    """Two objects of Keras's losses, each with its weight."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = _network(3), _network(3)
        self.teacher.trainable = False
        self.hard = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.soft = keras.losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        taught = ops.softmax(self.teacher(x) / 3.0)
        soft = self.soft(taught, ops.softmax(y_pred / 3.0))
        return 0.1 * self.hard(y, y_pred) + 0.9 * soft


@row(GROUP)
def distillation_by_objects_of_losses(run):
    def build():
        return models.compiled(Distiller(), None, metrics=["accuracy"])

    run.use(build, models.points(), models.kinds())


class Sharpness(keras.Model):
    """SAM: weights that a gradient of the rows perturbs."""

    def __init__(self):
        super().__init__()
        self.network = _network()

    def train_step(self, data):
        x, y = data
        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.network(x) - y))
        moves = [0.05 * g for g in tape.gradient(loss, weights)]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            there = ops.mean(ops.square(self.network(x) - y))
        gradients = tape.gradient(there, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@row(GROUP)
def weights_that_a_step_perturbs(run):
    def build():
        model = Sharpness()
        model.compile(models.sgd())
        return model

    run.fit(build, models.points(), models.numbers())


class Physics(keras.Model):
    """A loss of second derivatives of the network, and a weight in it."""

    def __init__(self):
        super().__init__()
        self.network = _network(features=2)
        self.rate = self.add_weight(shape=(), initializer="ones", name="rate")

    def call(self, x):
        return self.network(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                u = self.network(x)
            slope = inner.gradient(u, x)
            along = slope[:, :1]
        bend = outer.gradient(along, x)[:, :1]
        rest = slope[:, 1:] + u * along - self.rate * bend
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + ops.mean(ops.square(rest))


@row(GROUP)
def a_loss_of_second_derivatives(run):
    def build():
        return models.compiled(Physics(), "mse", keras.optimizers.Adam(0.02))

    run.fit(build, models.points(features=2), models.numbers())


class Graph(keras.Model):
    """Attention over a graph that the model holds; rows are its nodes."""

    def __init__(self):
        super().__init__()
        generator = models.random(7)
        self.features = tf.constant(generator.normal(size=(20, 4)))
        self.edges = tf.constant(generator.integers(0, 20, (60, 2)))
        self.kernel = self.add_weight(shape=(4, 3), name="kernel")
        self.attention = self.add_weight(shape=(6, 1), name="attention")
        self.outer = layers.Dense(models.CLASSES)

    def call(self, nodes):
        hidden = ops.matmul(self.features, self.kernel)
        pairs = ops.reshape(tf.gather(hidden, self.edges), (-1, 6))
        scores = ops.exp(ops.tanh(ops.matmul(pairs, self.attention)))
        total = tf.math.unsorted_segment_sum(scores, self.edges[:, 0], 20)
        sent = scores * tf.gather(hidden, self.edges[:, 1])
        sums = tf.math.unsorted_segment_sum(sent, self.edges[:, 0], 20)
        return self.outer(tf.gather(sums / (total + 1e-9), nodes))


@row(GROUP)
def attention_over_a_graph(run):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    nodes = models.random(8).integers(0, 20, models.EXAMPLES)
    run.use(
        lambda: models.compiled(Graph(), loss, metrics=["accuracy"]),
        nodes,
        models.kinds(),
    )


@row(GROUP)
def strings_that_the_model_looks_up(run):
    generator = models.random(9)
    data = {
        "color": generator.choice(["red", "green", "blue"], (29, 1)),
        "text": generator.choice(["a cat", "the cat sat", "a mat"], (29, 1)),
        "height": models.points(features=1),
    }

    def build():
        inputs = {
            name: keras.Input((1,), name=name, dtype=kind)
            for name, kind in (
                ("color", "string"),
                ("text", "string"),
                ("height", "float64"),
            )
        }
        colors = layers.StringLookup(output_mode="one_hot")
        colors.adapt(data["color"])
        texts = layers.TextVectorization(output_sequence_length=3)
        texts.adapt(data["text"][:, 0])
        heights = layers.Normalization()
        heights.adapt(data["height"])
        words = layers.Embedding(8, 3)(texts(inputs["text"]))
        x = layers.Concatenate()(
            [
                ops.cast(colors(inputs["color"]), "float64"),
                layers.Flatten()(
                    layers.Embedding(5, 2)(layers.Hashing(5)(inputs["color"]))
                ),
                layers.GlobalAveragePooling1D()(words),
                heights(inputs["height"]),
            ]
        )
        return models.compiled(keras.Model(inputs, layers.Dense(1)(x)))

    dataset = tf.data.Dataset.from_tensor_slices((data, models.numbers()))
    run.fit(build, dataset.batch(8), validation_data=dataset.batch(8))


class Kappa(keras.metrics.Metric):
    """Of a matrix of confusions."""

    def __init__(self):
        super().__init__(name="kappa")
        self.counts = self.add_variable((3, 3), "zeros", name="counts")

    def update_state(self, y, p, sample_weight=None):
        flat = tf.reshape(y, [-1])
        self.counts.assign_add(
            tf.math.confusion_matrix(
                flat, tf.argmax(p, -1), 3, sample_weight, self.counts.dtype
            )
        )

    def result(self):
        total = ops.sum(self.counts)
        rows, columns = ops.sum(self.counts, 0), ops.sum(self.counts, 1)
        chance = ops.sum(rows * columns) / total**2
        return (ops.trace(self.counts) / total - chance) / (1.0 - chance)


@row(GROUP)
def a_metric_of_confusions(run):
    run.use(
        models.dense(
            width=models.CLASSES,
            activation="softmax",
            loss="sparse_categorical_crossentropy",
            weighted_metrics=lambda: [Kappa()],
        ),
        models.points(),
        models.kinds(),
        sample_weight=models.weights(),
    )


class Centralized(keras.optimizers.Adam):
    """It changes gradients where Keras's step hands them over."""

    def apply_gradients(self, grads_and_vars):
        pairs = [
            (g - ops.mean(g, axis=0) if len(g.shape) > 1 else g, v)
            for g, v in grads_and_vars
        ]
        length = ops.sqrt(sum(ops.sum(ops.square(g)) for g, _ in pairs))
        return super().apply_gradients([(g / length, v) for g, v in pairs])


@row(GROUP)
def an_optimizer_with_its_own_apply_gradients(run):
    run.use(
        models.dense(optimizer=lambda: Centralized(0.02)),
        models.points(),
        models.numbers(),
    )


class Teacher(keras.callbacks.Callback):
    """It moves a teacher after each batch, and a factor with each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.factor.assign(1.0 / (epoch + 1))

    def on_train_batch_end(self, batch, logs=None):
        for weight, average in zip(
            self.model.student.weights, self.model.teacher.weights, strict=True
        ):
            average.assign(0.9 * average + 0.1 * weight)


class Taught(keras.Model):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = _network(3), _network(3)
        self.teacher.trainable = False
        self.factor = self.add_weight(shape=(), trainable=False)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            gap = self.student(data[0]) - self.teacher(data[1])
            loss = self.factor * ops.mean(ops.square(gap))
        _step(self.optimizer, tape, loss, self.student)
        return {"loss": loss}


@row(GROUP)
def a_teacher_that_a_callback_moves(run):
    def build():
        model = Taught()
        model.compile(models.sgd(momentum=0.9))
        return model

    run.fit(None, _pairs(), trainer=run.trainer(build), callbacks=[Teacher()])
