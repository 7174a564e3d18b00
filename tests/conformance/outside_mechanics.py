"""Programs from outside whose mechanics no other row has."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: mechanics of others"


def adam(rate=0.02, **options):
    return keras.optimizers.Adam(rate, **options)


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def normal(seeds, like):
    return keras.random.normal(ops.shape(like), dtype=like.dtype, seed=seeds)


class MomentumContrast(keras.Model):
    """MoCo: keys of a slow encoder on shuffled rows, a queue of negatives."""

    def __init__(self):
        super().__init__()
        self.query, self.key = mlp(3), mlp(3)
        self.key.set_weights(self.query.get_weights())
        self.key.trainable = False
        self.queue = self.add_weight(
            shape=(26, 3),
            initializer=keras.initializers.RandomNormal(seed=3),
            trainable=False,
            name="queue",
        )
        self.pointer = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.seeds = keras.random.SeedGenerator(5)
        self.hits = keras.metrics.Mean(name="hits")

    def call(self, x, training=False):
        return self.query(x, training=training)

    def train_step(self, x):
        size = ops.shape(x)[0]
        one = x + 0.1 * normal(self.seeds, x)
        two = x + 0.1 * normal(self.seeds, x)
        for slow, fast in zip(
            self.key.weights, self.query.weights, strict=True
        ):
            slow.assign(0.9 * slow + 0.1 * fast)
        order = keras.random.shuffle(ops.arange(size), seed=self.seeds)
        keys = self.key(ops.take(two, order, axis=0))
        keys = ops.normalize(ops.take(keys, ops.argsort(order), axis=0), -1)
        with tf.GradientTape() as tape:
            found = ops.normalize(self(one, training=True), -1)
            near = ops.sum(found * keys, axis=1, keepdims=True)
            far = ops.matmul(found, ops.transpose(self.queue))
            logits = ops.concatenate([near, far], axis=1) / 0.2
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    ops.zeros((size,), "int32"), logits, from_logits=True
                )
            )
        learn(self.optimizer, tape, loss, self.trainable_variables)
        places = (self.pointer + ops.arange(size)) % 26
        self.queue.assign(ops.scatter_update(self.queue, places[:, None], keys))
        self.pointer.assign((self.pointer + size) % 26)
        self.hits.update_state(ops.argmax(logits, axis=1) == 0)
        return {"loss": loss, "hits": self.hits.result()}


@row(GROUP)
def momentum_contrast_with_shuffled_keys(run):
    def build():
        return models.compiled(MomentumContrast(), None, adam())

    outside.train(run, build, outside.points())


class MixUp(keras.Model):
    """Rows are mixed with a shuffle of the batch by beta weights."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3)
        self.seeds = keras.random.SeedGenerator(2)

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        share = keras.random.beta(
            (ops.shape(x)[0], 1), 0.4, 0.4, dtype=x.dtype, seed=self.seeds
        )
        order = keras.random.shuffle(
            ops.arange(ops.shape(x)[0]), seed=self.seeds
        )
        x = share * x + (1.0 - share) * ops.take(x, order, axis=0)
        y = share * y + (1.0 - share) * ops.take(y, order, axis=0)
        return super().train_step((x, y, weight))


@row(GROUP)
def mix_up_before_the_step_of_keras(run):
    def build():
        model = MixUp()
        return models.compiled(
            model,
            "categorical_crossentropy",
            adam(),
            metrics=["acc"],
            weighted_metrics=["mae"],
        )

    y = keras.utils.to_categorical(outside.kinds(), 3).astype("float64")
    outside.train(
        run, build, outside.points(), y, sample_weight=outside.weights()
    )


class Virtual(keras.Model):
    """Virtual adversarial training: a power iteration by inner gradients."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3)
        self.seeds = keras.random.SeedGenerator(4)
        self.gap = keras.metrics.Mean(name="gap")

    def call(self, x, training=False):
        return self.network(x, training=training)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not training:
            return loss
        clean = ops.stop_gradient(ops.softmax(y_pred))
        direction = normal(self.seeds, x)
        for _ in range(2):
            direction = 1e-2 * ops.normalize(direction, axis=-1)
            with tf.GradientTape() as tape:
                tape.watch(direction)
                other = ops.log_softmax(self(x + direction))
                kl = -ops.sum(clean * other, axis=-1)
            direction = ops.stop_gradient(tape.gradient(kl, direction))
        moved = x + 0.5 * ops.normalize(direction, axis=-1)
        gap = -ops.sum(clean * ops.log_softmax(self(moved)), axis=-1)
        self.gap.update_state(gap)
        return loss + ops.mean(gap)


@row(GROUP)
def virtual_adversarial_training(run):
    def build():
        return models.compiled(Virtual(), sparse(), adam(), metrics=["acc"])

    outside.use(run, build, outside.points(), outside.kinds())


class Consolidation(keras.callbacks.Callback):
    """EWC: after the first task, squared gradients say what to hold."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            return
        model = self.model
        x, y = (tf.constant(part) for part in self.data)
        with tf.GradientTape() as tape:
            log = -ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, model.network(x), from_logits=True
                )
            )
        weights = model.network.trainable_variables
        gradients = tape.gradient(log, weights)
        for of, gradient, weight, anchor in zip(
            model.importance, gradients, weights, model.anchors, strict=True
        ):
            of.assign(gradient**2)
            anchor.assign(weight)


class Elastic(keras.Model):
    def __init__(self):
        super().__init__()
        self.network = mlp(3)

        def like(name):
            return [
                self.add_weight(
                    shape=w.shape,
                    initializer="zeros",
                    trainable=False,
                    name=name,
                )
                for w in self.network.trainable_variables
            ]

        self.importance, self.anchors = like("importance"), like("anchor")

    def call(self, x, training=False):
        return self.network(x, training=training)

    def compute_loss(self, *arguments, **named):
        loss = super().compute_loss(*arguments, **named)
        for of, weight, anchor in zip(
            self.importance,
            self.network.trainable_variables,
            self.anchors,
            strict=True,
        ):
            loss += 10.0 * ops.sum(of * (weight - anchor) ** 2)
        return loss


@row(GROUP)
def weights_held_by_their_importance(run):
    def build():
        return models.compiled(Elastic(), sparse(), adam())

    data = outside.points(), outside.kinds()
    outside.use(run, build, *data, callbacks=[Consolidation(data)])


class Averaging(keras.callbacks.Callback):
    """SWA: the average is in place for each evaluation."""

    def on_train_begin(self, logs=None):
        self.average, self.count = None, 0

    def on_epoch_end(self, epoch, logs=None):
        found = self.model.get_weights()
        self.count += 1
        if self.average is None:
            self.average = found
        self.average = [
            a + (w - a) / self.count
            for a, w in zip(self.average, found, strict=True)
        ]

    def on_test_begin(self, logs=None):
        if self.average is not None:
            self.kept = self.model.get_weights()
            self.model.set_weights(self.average)

    def on_test_end(self, logs=None):
        if self.average is not None:
            self.model.set_weights(self.kept)

    def on_train_end(self, logs=None):
        self.model.set_weights(self.average)


@row(GROUP)
def averages_swapped_in_for_each_evaluation(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dropout(0.3, seed=2),
                layers.Dense(3),
            ]
        )
        return models.compiled(model, sparse(), adam(), metrics=["acc"])

    data = outside.points(), outside.kinds()
    outside.use(
        run,
        build,
        *data,
        epochs=3,
        validation_data=data,
        callbacks=[Averaging()],
    )


class Deep(layers.Layer):
    """A residual branch that is left out by rows, at a rate held in state."""

    def __init__(self, rate, **named):
        super().__init__(**named)
        self.first = rate
        self.inner = layers.Dense(4, activation="tanh")
        self.seeds = keras.random.SeedGenerator(int(rate * 100))

    def build(self, shape):
        self.rate = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(self.first),
            trainable=False,
            name="rate",
        )
        self.inner.build(shape)

    def call(self, x, training=None):
        made = self.inner(x)
        if not training:
            return x + (1.0 - self.rate) * made
        kept = keras.random.uniform(
            (ops.shape(x)[0], 1), dtype=x.dtype, seed=self.seeds
        )
        return x + ops.where(kept < self.rate, 0.0, made)


class Rates(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        for layer in self.model.layers:
            if isinstance(layer, Deep):
                layer.rate.assign(layer.rate * 0.9)


@row(GROUP)
def depth_left_out_at_rates_of_a_callback(run):
    def build():
        x = inputs = keras.Input((4,))
        for rate in (0.1, 0.3, 0.5):
            x = Deep(rate)(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", adam())

    outside.use(
        run, build, outside.points(), outside.numbers(), callbacks=[Rates()]
    )


class Kappa(keras.metrics.Metric):
    """Cohen's kappa of a matrix of confusion."""

    def __init__(self, classes=3, name="kappa", **named):
        super().__init__(name=name, **named)
        self.classes = classes
        self.matrix = self.add_variable(
            (classes, classes), "zeros", name="matrix"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = ops.argmax(y_pred, axis=-1)
        matrix = tf.math.confusion_matrix(
            ops.reshape(y_true, (-1,)),
            ops.reshape(found, (-1,)),
            self.classes,
            weights=sample_weight,
            dtype=self.dtype,
        )
        self.matrix.assign_add(matrix)

    def result(self):
        total = ops.sum(self.matrix)
        agreed = ops.sum(ops.diagonal(self.matrix)) / total
        chance = ops.sum(ops.sum(self.matrix, 0) * ops.sum(self.matrix, 1)) / (
            total * total
        )
        return (agreed - chance) / (1.0 - chance + 1e-7)


@row(GROUP)
def a_metric_of_a_confusion_matrix_with_weights(run):
    def build():
        x = inputs = keras.Input((4,))
        x = layers.Dense(6, activation="tanh")(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        return models.compiled(
            model,
            sparse(),
            adam(),
            metrics=[Kappa(name="plain")],
            weighted_metrics=[Kappa(name="weighted")],
        )

    outside.use(
        run,
        build,
        outside.points(),
        outside.kinds(),
        sample_weight=outside.weights(),
    )


@row(GROUP)
def dicts_with_weights_for_each_output(run):
    def build():
        one, two = keras.Input((4,), name="one"), keras.Input((4,), name="two")
        hidden = layers.Dense(6, activation="tanh")(
            layers.Concatenate()([one, two])
        )
        outputs = {
            "kind": layers.Dense(3, name="kind")(hidden),
            "size": layers.Dense(1, name="size")(hidden),
        }
        model = keras.Model({"one": one, "two": two}, outputs)
        return models.compiled(
            model,
            {"kind": sparse(), "size": "huber"},
            adam(),
            loss_weights={"kind": 0.7, "size": 2.0},
            metrics={"kind": "acc"},
            weighted_metrics={"size": ["mae", "mse"], "kind": "acc"},
        )

    x = {"one": outside.points(), "two": outside.points(seed=9)}
    y = {"kind": outside.kinds(), "size": outside.numbers()}
    weight = {"kind": outside.weights(), "size": outside.weights(seed=14)}
    outside.use(run, build, x, y, sample_weight=weight)


class ActNorm(layers.Layer):
    """Scale and shift that begin at the first batch's own statistics."""

    def build(self, shape):
        width = shape[-1]
        self.scale = self.add_weight(shape=(width,), initializer="ones")
        self.shift = self.add_weight(shape=(width,), initializer="zeros")
        self.ready = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="ready"
        )

    def call(self, x, training=None):
        if training:
            mean = ops.mean(x, axis=0)
            spread = ops.std(x, axis=0) + 1e-3
            first = self.ready < 0.5
            self.shift.assign(ops.where(first, -mean / spread, self.shift))
            self.scale.assign(ops.where(first, 1.0 / spread, self.scale))
            self.ready.assign(1.0)
        self.add_loss(-0.01 * ops.sum(ops.log(ops.abs(self.scale))))
        return x * self.scale + self.shift


@row(GROUP)
def weights_set_by_the_first_batch(run):
    def build():
        x = inputs = keras.Input((4,))
        x = layers.Dense(5)(x)
        x = ops.tanh(ActNorm()(x))
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", models.sgd(0.05))

    outside.use(run, build, outside.points(), outside.numbers())


class Energy(keras.Model):
    """An energy model: Langevin steps on a buffer of earlier samples."""

    def __init__(self):
        super().__init__()
        self.energy = mlp(1)
        self.buffer = self.add_weight(
            shape=(20, 4),
            initializer=keras.initializers.RandomNormal(seed=8),
            trainable=False,
            name="buffer",
        )
        self.seeds = keras.random.SeedGenerator(6)

    def call(self, x, training=False):
        return self.energy(x, training=training)

    def train_step(self, x):
        size = ops.shape(x)[0]
        places = keras.random.randint((size,), 0, 20, seed=self.seeds)
        made = ops.take(self.buffer, places, axis=0)
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(made)
                energy = ops.sum(self(made))
            slope = tape.gradient(energy, made)
            made = made - 0.1 * slope + 0.02 * normal(self.seeds, made)
        made = ops.stop_gradient(made)
        with tf.GradientTape() as tape:
            true, false = self(x, training=True), self(made, training=True)
            loss = ops.mean(true) - ops.mean(false)
            loss += 0.1 * ops.mean(true**2 + false**2)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        kept = tf.tensor_scatter_nd_max(
            self.buffer.value, places[:, None], made
        )
        self.buffer.assign(ops.clip(kept, -3.0, 3.0))
        return {"loss": loss, "energy": energy}


@row(GROUP)
def energies_with_a_buffer_of_samples(run):
    def build():
        return models.compiled(Energy(), None, adam(clipnorm=1.0))

    outside.train(run, build, outside.points())


class Groups(keras.Model):
    """Group DRO: weights of groups that grow with the loss of the group."""

    def __init__(self, by_step):
        super().__init__()
        self.network, self.by_step = mlp(3), by_step
        self.share = self.add_weight(
            shape=(4,),
            initializer=keras.initializers.Constant(0.25),
            trainable=False,
            name="share",
        )

    def call(self, inputs, training=False):
        return self.network(inputs["x"], training=training)

    def robust(self, x, y, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(
            y, y_pred, from_logits=True
        )
        hot = ops.one_hot(x["group"], 4, dtype=losses.dtype)
        each = ops.sum(hot * losses[:, None], 0) / (ops.sum(hot, 0) + 1e-3)
        share = self.share * ops.exp(0.2 * ops.stop_gradient(each))
        self.share.assign(share / ops.sum(share))
        return ops.sum(self.share * each)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if not training:
            return super().compute_loss(x, y, y_pred, sample_weight)
        return self.robust(x, y, y_pred)


@row(GROUP)
def groups_weighed_by_their_loss(run):
    def build():
        return models.compiled(Groups(False), sparse(), adam())

    x = {"x": outside.points(), "group": outside.kinds(4, seed=11)}
    outside.use(run, build, x, outside.kinds())


class Prior(keras.losses.Loss):
    """Logits adjusted by how often classes came so far."""

    def __init__(self):
        super().__init__(name="prior")
        self.counts = keras.Variable(
            [1.0, 1.0, 1.0], dtype="float64", trainable=False, name="counts"
        )

    def call(self, y_true, y_pred):
        y_true = ops.cast(ops.reshape(y_true, (-1,)), "int32")
        self.counts.assign_add(
            ops.cast(ops.bincount(y_true, minlength=3), "float64")
        )
        share = self.counts / ops.sum(self.counts)
        return keras.losses.sparse_categorical_crossentropy(
            y_true, y_pred + ops.log(share), from_logits=True
        )


@row(GROUP)
def logits_adjusted_by_counts_of_a_loss(run):
    def build():
        return models.compiled(mlp(3), Prior(), adam())

    outside.use(run, build, outside.points(), outside.kinds())


class TwoPasses(keras.Model):
    """R-Drop: two calls with other dropout, and how far they are apart."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            one, two = (self(x, training=True) for _ in range(2))
            loss = self.compute_loss(x, y, one) + self.compute_loss(x, y, two)
            p, q = ops.log_softmax(one), ops.log_softmax(two)
            loss += ops.mean(ops.sum((ops.exp(p) - ops.exp(q)) * (p - q), -1))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss} | self.compute_metrics(x, y, one, None)


@row(GROUP)
def two_passes_with_dropout_without_a_seed(run):
    def build():
        return models.compiled(TwoPasses(), sparse(), adam(), metrics=["acc"])

    outside.use(run, build, outside.points(), outside.kinds())


class Prototypes(keras.Model):
    """SwAV: codes by Sinkhorn over the batch; prototypes put on a sphere."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3)
        self.prototypes = layers.Dense(5, use_bias=False)
        self.seeds = keras.random.SeedGenerator(9)

    def call(self, x, training=False):
        return self.prototypes(
            ops.normalize(self.network(x, training=training), -1)
        )

    def codes(self, scores):
        codes = ops.transpose(ops.exp(scores / 0.5))
        codes /= ops.sum(codes)
        for _ in range(3):
            codes /= ops.sum(codes, axis=1, keepdims=True) * 5.0
            codes /= ops.sum(codes, axis=0, keepdims=True)
        return ops.stop_gradient(ops.transpose(codes))

    def train_step(self, x):
        kernel = self.prototypes.kernel
        kernel.assign(ops.normalize(kernel, axis=0))
        views = [x + 0.1 * normal(self.seeds, x) for _ in range(2)]
        with tf.GradientTape() as tape:
            one, two = (self(view, training=True) for view in views)
            loss = -ops.mean(
                ops.sum(self.codes(one) * ops.log_softmax(two / 0.3), -1)
                + ops.sum(self.codes(two) * ops.log_softmax(one / 0.3), -1)
            )
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def codes_balanced_over_the_batch(run):
    def build():
        model = Prototypes()
        model(ops.zeros((1, 4)))
        return models.compiled(model, None, adam())

    outside.train(run, build, outside.points())


class Scheduled(keras.Model):
    """Scheduled sampling: its own word in place of the true one, by chance."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(outside.WORDS, 4)
        self.cell = layers.GRUCell(5)
        self.head = layers.Dense(outside.WORDS)
        self.seeds = keras.random.SeedGenerator(7)
        self.share = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="share"
        )

    def call(self, words, training=False):
        size = ops.shape(words)[0]
        state = ops.zeros((size, 5))
        word = words[:, 0]
        made = []
        for place in range(outside.LENGTH - 1):
            out, [state] = self.cell(self.table(word), [state])
            logits = self.head(out)
            made.append(logits)
            word = words[:, place + 1]
            if training:
                own = ops.cast(ops.argmax(logits, -1), word.dtype)
                chance = keras.random.uniform((size,), seed=self.seeds)
                word = ops.where(
                    ops.cast(chance, self.share.dtype) < self.share, own, word
                )
        return ops.stack(made, axis=1)


class MoreOfItsOwn(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.share.assign_add(0.15)


@row(GROUP)
def words_of_its_own_more_and_more(run):
    def build():
        return models.compiled(Scheduled(), sparse(), adam())

    words = outside.words(padded=False)
    outside.use(run, build, words, words[:, 1:], callbacks=[MoreOfItsOwn()])


class Normalized(layers.Wrapper):
    """Weight normalization: a direction and a length in place of a kernel."""

    def build(self, shape):
        super().build(shape)
        kernel = self.layer.kernel
        self.length = self.add_weight(
            shape=(kernel.shape[-1],), initializer="ones", name="length"
        )

    def call(self, x):
        kernel = self.length * ops.normalize(self.layer.kernel, axis=0)
        return self.layer.activation(ops.matmul(x, kernel) + self.layer.bias)


@row(GROUP)
def kernels_of_a_direction_and_a_length(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Normalized(layers.Dense(6, activation="tanh"))(x)
        x = Normalized(layers.Dense(5, activation="tanh"))(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers())


class Balanced(keras.Model):
    """GradNorm: weights of tasks follow the norms of their gradients."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(6, activation="tanh")
        self.heads = [layers.Dense(1), layers.Dense(1)]
        self.weight = self.add_weight(
            shape=(2,), initializer="ones", trainable=False, name="weight"
        )
        self.first = self.add_weight(
            shape=(2,), initializer="zeros", trainable=False, name="first"
        )

    def call(self, x):
        x = self.body(x)
        return [head(x) for head in self.heads]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            weight = tf.convert_to_tensor(self.weight)
            outer.watch(weight)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(weight)
                found = self(x, training=True)
                losses = [
                    ops.mean((f - t) ** 2)
                    for f, t in zip(found, y, strict=True)
                ]
                parts = [weight[i] * losses[i] for i in range(2)]
                loss = parts[0] + parts[1]
            shared = self.body.kernel
            norms = ops.stack(
                [ops.norm(tape.gradient(part, shared)) for part in parts]
            )
            first = ops.where(self.first > 0, self.first, ops.stack(losses))
            pace = ops.stop_gradient(ops.stack(losses) / first)
            target = ops.mean(norms) * (pace / ops.mean(pace)) ** 0.5
            gap = ops.sum(ops.abs(norms - ops.stop_gradient(target)))
        slope = outer.gradient(gap, weight)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        moved = ops.maximum(weight - 0.05 * slope, 0.1)
        self.weight.assign(2.0 * moved / ops.sum(moved))
        self.first.assign(first)
        return {"loss": loss, "gap": gap}


@row(GROUP)
def tasks_balanced_by_norms_of_gradients(run):
    def build():
        return models.compiled(Balanced(), None, adam())

    y = [outside.numbers(seed=s) for s in (2, 12)]
    outside.train(run, build, outside.points(), y)


class Carried(layers.Layer):
    """A state of each place in the batch, carried from batch to batch."""

    def __init__(self, size, width, **named):
        super().__init__(**named)
        self.size, self.width = size, width
        self.cell = layers.GRUCell(width)

    def build(self, shape):
        self.cell.build((shape[0], shape[-1]))
        self.state = self.add_weight(
            shape=(self.size, self.width),
            initializer="zeros",
            trainable=False,
            name="state",
        )

    def call(self, x):
        state = ops.convert_to_tensor(self.state)[: ops.shape(x)[0]]
        for place in range(x.shape[1]):
            out, [state] = self.cell(x[:, place], [state])
        self.state.assign(ops.slice_update(self.state, (0, 0), state))
        return out


@row(GROUP)
def a_state_of_each_place_carried_over_batches(run):
    def build():
        inputs = keras.Input((3, 4))
        x = Carried(13, 5)(inputs)
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", adam())

    x = outside.points(12).reshape(-1, 3, 4)
    outside.train(run, build, x, outside.numbers())


@keras.saving.register_keras_serializable("outside")
class Cell(layers.Layer):
    """A cell of two states with dropout on its recurrence."""

    def __init__(self, width, **named):
        super().__init__(**named)
        self.width = width
        self.state_size = [width, width]
        self.output_size = width
        self.dropped = layers.Dropout(0.3, seed=3)

    def get_config(self):
        return super().get_config() | {"width": self.width}

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(shape[-1], 2 * self.width), initializer="glorot_uniform"
        )
        self.recurrent = self.add_weight(
            shape=(self.width, 2 * self.width), initializer="orthogonal"
        )

    def call(self, x, states, training=None):
        hidden, slow = states
        hidden = self.dropped(hidden, training=training)
        both = ops.matmul(x, self.kernel) + ops.matmul(hidden, self.recurrent)
        gate, new = ops.split(both, 2, axis=-1)
        gate = ops.sigmoid(gate)
        slow = gate * slow + (1.0 - gate) * ops.tanh(new)
        return ops.tanh(slow), [ops.tanh(slow), slow]


@row(GROUP)
def own_cells_both_ways_over_images_of_time(run):
    def build():
        inputs = keras.Input((3, 6, 6, 2))
        x = layers.TimeDistributed(layers.Conv2D(3, 3, activation="relu"))(
            inputs
        )
        x = layers.TimeDistributed(layers.GlobalMaxPooling2D())(x)
        x = layers.Bidirectional(
            layers.RNN(Cell(4), return_sequences=True),
            backward_layer=layers.RNN(
                Cell(4), return_sequences=True, go_backwards=True
            ),
            merge_mode="sum",
        )(x)
        x = layers.RNN(Cell(3))(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", adam())

    x = models.images(44, 6, 6).reshape(44, 6, 6, 3, 2).transpose(0, 3, 1, 2, 4)
    outside.use(run, build, x, outside.numbers())


class Branches(layers.Layer):
    """A cheap or a dear branch by the mean of the batch, by `ops.cond`."""

    def __init__(self, **named):
        super().__init__(**named)
        self.cheap, self.dear = layers.Dense(4), layers.Dense(4)
        self.taken = keras.metrics.Mean(name="taken")

    def build(self, shape):
        self.cheap.build(shape)
        self.dear.build(shape)

    def call(self, x):
        dear = ops.mean(x) > 0.0
        self.taken.update_state(ops.cast(dear, "float64"))
        return ops.cond(
            dear, lambda: ops.tanh(self.dear(x)), lambda: self.cheap(x)
        )


@row(GROUP)
def branches_by_the_mean_of_the_batch_with_a_metric(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Branches()(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers())


class Tied(keras.Model):
    """A language model with tied words; it draws words to predict."""

    def __init__(self):
        super().__init__()
        self.table = layers.ReversibleEmbedding(outside.WORDS, 6)
        self.attention = layers.MultiHeadAttention(2, 3)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, words, training=False):
        x = self.table(words)
        x = self.norm(x + self.attention(x, x, use_causal_mask=True))
        return self.table(x, reverse=True)

    def predict_step(self, data):
        words = data[0] if isinstance(data, tuple) else data
        kept = words[:, :2]

        def longer(step, made):
            logits = self(made)
            at = ops.take(logits, step + 1, axis=1)
            word = ops.cast(ops.argmax(at, -1), made.dtype)
            return step + 1, ops.slice_update(
                made, (0, step + 2), word[:, None]
            )

        made = ops.pad(kept, [[0, 0], [0, outside.LENGTH - 2]])
        _, made = ops.while_loop(
            lambda step, made: step < outside.LENGTH - 2, longer, (0, made)
        )
        return made


@row(GROUP)
def words_drawn_by_a_loop_to_predict(run):
    def build():
        return models.compiled(Tied(), sparse(), adam())

    words = outside.words(padded=False)
    outside.use(run, build, words[:, :-1], words[:, 1:])


class Ranked(keras.Model):
    """Its own evaluation: `evaluate` adds scores of all rows."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3)
        self.top = keras.metrics.Mean(name="top")

    def call(self, x, training=False):
        return self.network(x, training=training)

    def test_step(self, data):
        x, y = data
        views = [self(x + shift) for shift in (-0.1, 0.0, 0.1)]
        found = ops.mean(ops.stack([ops.softmax(v) for v in views]), 0)
        rank = ops.sum(
            found > ops.take_along_axis(found, y[:, None], axis=1), axis=-1
        )
        self.top.update_state(ops.cast(rank < 2, found.dtype))
        return {"top": self.top.result()}

    def reset_metrics(self):
        super().reset_metrics()
        self.top.reset_state()

    def get_metrics_result(self):
        found = super().get_metrics_result()
        return found | {"double": 2.0 * self.top.result()}


@row(GROUP)
def a_test_by_several_views(run):
    def build():
        return models.compiled(Ranked(), sparse(), adam(), metrics=["acc"])

    data = outside.points(), outside.kinds()
    outside.use(run, build, *data, validation_data=data)


class Confident(layers.Layer):
    """Attention whose entropy is a loss, with a mask of the words."""

    def __init__(self, **named):
        super().__init__(**named)
        self.supports_masking = True
        self.query = layers.Dense(1)

    def build(self, shape):
        self.query.build(shape)

    def call(self, x, mask=None):
        scores = self.query(x)[..., 0]
        if mask is not None:
            scores = ops.where(mask, scores, -1e9)
        chances = ops.softmax(scores)
        entropy = -ops.sum(chances * ops.log(chances + 1e-9), -1)
        self.add_loss(0.1 * ops.mean(entropy))
        return ops.sum(chances[..., None] * x, axis=1)

    def compute_mask(self, x, mask=None):
        return None


@row(GROUP)
def attention_to_words_whose_entropy_is_a_loss(run):
    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        x = layers.Embedding(outside.WORDS, 4, mask_zero=True)(inputs)
        x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
        x = Confident()(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        return models.compiled(model, sparse(), adam(), metrics=["acc"])

    outside.use(
        run,
        build,
        outside.words(),
        outside.kinds(),
        class_weight={0: 0.5, 1: 1.0, 2: 2.0},
    )


@row(GROUP)
def restarts_of_a_cosine_with_several_steps_in_one(run):
    def build():
        rate = keras.optimizers.schedules.CosineDecayRestarts(0.1, 3, 1.5)
        x = inputs = keras.Input((4,))
        x = layers.Dense(6, activation="tanh", kernel_constraint="max_norm")(x)
        x = layers.GaussianNoise(0.1)(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        optimizer = keras.optimizers.AdamW(
            rate, weight_decay=0.05, use_ema=True, ema_overwrite_frequency=2
        )
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return models.compiled(
            model, sparse(), optimizer, steps_per_execution=3
        )

    outside.use(run, build, outside.points(), outside.kinds())


class ByHand(keras.Model):
    """Gradients of three steps are gathered in variables by hand."""

    def __init__(self):
        super().__init__()
        self.network = mlp(1)
        self.sums = [
            self.add_weight(
                shape=w.shape, initializer="zeros", trainable=False, name="sum"
            )
            for w in self.network.trainable_variables
        ]
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.network.trainable_variables
        for of, gradient in zip(
            self.sums, tape.gradient(loss, weights), strict=True
        ):
            of.assign_add(gradient)
        self.count.assign_add(1)
        due = ops.cast(self.count % 3 == 0, "float64")
        for weight, of in zip(weights, self.sums, strict=True):
            weight.assign_sub(0.1 * due * of / 3.0)
            of.assign((1.0 - due) * of)
        return {"loss": loss}


@row(GROUP)
def gradients_gathered_by_hand_without_an_optimizer(run):
    def build():
        return models.compiled(ByHand(), "mse")

    outside.use(run, build, outside.points(), outside.numbers())


class Hutchinson(keras.Model):
    """AdaHessian: the curvature by a random vector and a second gradient."""

    def __init__(self):
        super().__init__()
        self.network = mlp(1)
        self.seeds = keras.random.SeedGenerator(12)
        self.curvature = [
            self.add_weight(
                shape=w.shape, initializer="ones", trainable=False, name="h"
            )
            for w in self.network.trainable_variables
        ]

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        weights = self.network.trainable_variables
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, weights)
            signs = [
                ops.sign(
                    keras.random.uniform(
                        w.shape, -1, 1, dtype=w.dtype, seed=self.seeds
                    )
                )
                for w in weights
            ]
            along = sum(
                ops.sum(g * s) for g, s in zip(gradients, signs, strict=True)
            )
        seconds = outer.gradient(along, weights)
        for of, second, sign in zip(
            self.curvature, seconds, signs, strict=True
        ):
            of.assign(0.9 * of + 0.1 * ops.abs(second * sign))
        self.optimizer.apply(
            [
                g / (ops.sqrt(of) + 0.1)
                for g, of in zip(gradients, self.curvature, strict=True)
            ],
            weights,
        )
        return {"loss": loss}


@row(GROUP)
def curvature_by_random_signs(run):
    def build():
        return models.compiled(Hutchinson(), "mse", models.sgd(0.05))

    outside.use(run, build, outside.points(), outside.numbers())


class Counting(layers.Layer):
    """A layer that holds metrics of its own inputs."""

    def __init__(self, **named):
        super().__init__(**named)
        self.norms = keras.metrics.Mean(name="norms")
        self.dead = keras.metrics.Mean(name="dead")
        self.inner = layers.Dense(6, activation="relu")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, training=None):
        made = self.inner(x)
        if training:
            self.norms.update_state(ops.norm(x, axis=-1))
            self.dead.update_state(ops.cast(ops.max(made, 0) <= 0, x.dtype))
        return made


@row(GROUP)
def metrics_that_a_layer_holds(run):
    def build():
        x = inputs = keras.Input((4,))
        x = Counting()(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        return models.compiled(model, "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers())


class Optimizer(keras.optimizers.Optimizer):
    """What optimizers from outside are made of here."""

    def __init__(self, rate=0.05, **named):
        super().__init__(rate, **named)


class Trust(Optimizer):
    """LAMB: a rate for each weight by the norms of it and of its step."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.first, self.second = self.add_optimizer_variables(
                variables, ["m", "v"]
            )

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        m, v = self.first[index], self.second[index]
        step = ops.cast(self.iterations + 1, variable.dtype)
        self.assign(m, 0.9 * m + 0.1 * gradient)
        self.assign(v, 0.99 * v + 0.01 * gradient**2)
        way = (m / (1 - 0.9**step)) / (ops.sqrt(v / (1 - 0.99**step)) + 1e-6)
        norm = ops.norm(variable)
        trust = ops.where(norm > 0, norm / (ops.norm(way) + 1e-6), 1.0)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * trust * way)


class Alias(Optimizer):
    """It reads a weight, writes it, and uses what it has read again."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            (self.moves,) = self.add_optimizer_variables(variables, ["move"])

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        rate = ops.cast(learning_rate, variable.dtype)
        before = ops.convert_to_tensor(variable)
        self.assign_sub(variable, rate * gradient)
        self.assign(self.moves[index], variable - before)
        self.assign(variable, variable + 0.5 * (variable - before))
        self.assign_add(variable, 0.1 * (before - variable))


class Neighbours(Optimizer):
    """Its step depends on the slots of the weight before, and on scalars."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            (self.norms,) = self.add_optimizer_variables(
                variables, ["norm"], initializer="zeros"
            )
            self.pace = self.add_variable((), name="pace", initializer="zeros")

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign(
            self.norms[index], 0.9 * self.norms[index] + ops.abs(gradient)
        )
        self.assign_add(
            self.pace, ops.cast(ops.mean(ops.abs(gradient)), self.pace.dtype)
        )
        before = ops.mean(self.norms[index - 1]) + 0.1
        own = ops.cast(1.0 + self.pace, variable.dtype)
        step = ops.cast(self.iterations + 1, variable.dtype)
        self.assign_sub(variable, rate * gradient / (before * own * step))


class Everything(Optimizer):
    """D-Adaptation: one scalar of all weights, in the place of a loop."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            (self.sums,) = self.add_optimizer_variables(variables, ["s"])
            self.scale = self.add_variable(
                (), name="d", initializer=keras.initializers.Constant(0.01)
            )

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        raise NotImplementedError

    def update_step(self, gradient, variable, learning_rate):
        raise NotImplementedError

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            self.build(variables)
        top, bottom = 0.0, 1e-6
        for gradient, of in zip(grads, self.sums, strict=True):
            top += ops.sum(of * gradient)
            of.assign(0.9 * of + self.scale * gradient)
            bottom += ops.sum(ops.abs(of))
        self.scale.assign(ops.maximum(self.scale, ops.abs(top) / bottom))
        for gradient, variable in zip(grads, variables, strict=True):
            variable.assign_sub(self.scale * gradient)
        self.iterations.assign_add(1)


class Centred(keras.optimizers.Adam):
    """Gradients are centred in an `apply` of its own, and accumulated."""

    def apply(self, grads, trainable_variables=None):
        grads = [
            g - ops.mean(g, axis=0, keepdims=True) if len(g.shape) > 1 else g
            for g in grads
        ]
        return super().apply(grads, trainable_variables)


class Factors(Optimizer):
    """Shampoo of one side: the square of each gradient's rows, a root."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.squares = [
                self.add_variable(
                    (v.shape[0], v.shape[0]) if len(v.shape) == 2 else (),
                    name=f"square_{i}",
                    dtype=v.dtype,
                    initializer="zeros",
                )
                for i, v in enumerate(variables)
            ]

    def update_step(self, gradient, variable, learning_rate):
        square = self.squares[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        if len(variable.shape) == 2:
            self.assign_add(
                square, ops.matmul(gradient, ops.transpose(gradient))
            )
            values, vectors = ops.eigh(
                square + 1e-2 * ops.eye(square.shape[0], dtype=square.dtype)
            )
            root = ops.matmul(vectors * values**-0.25, ops.transpose(vectors))
            gradient = ops.matmul(root, gradient)
        else:
            self.assign_add(square, ops.sum(gradient**2))
            gradient = gradient / (ops.sqrt(square) + 1e-2)
        self.assign_sub(variable, rate * gradient)


class Finalizes(keras.optimizers.Adam):
    """Averages at the end of each update, as optimizers of addons do."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.averages = [
                self.add_variable_from_reference(v, "average")
                for v in variables
            ]

    def finalize_variable_values(self, var_list):
        for variable, average in zip(
            self._trainable_variables, self.averages, strict=True
        ):
            average.assign(0.9 * average + 0.1 * variable)
            variable.assign(0.9 * variable + 0.1 * average)
        super().finalize_variable_values(var_list)


class Decays(keras.optimizers.SGD):
    """It takes decay from kernels alone."""

    def _apply_weight_decay(self, variables):
        for variable in variables:
            if len(variable.shape) > 1:
                variable.assign(variable * 0.97)


class Rounds(keras.optimizers.SGD):
    """It rounds what it subtracts."""

    def assign_sub(self, variable, value):
        super().assign_sub(variable, ops.round(value * 1e3) / 1e3)

    def assign_add(self, variable, value):
        super().assign_add(variable, ops.round(value * 1e3) / 1e3)


for _name, _optimizer in {
    "a rate by norms of the weight and its step": Trust,
    "a weight read before it is written twice": Alias,
    "slots of the weight before": Neighbours,
    "one scalar of all weights in its apply": Everything,
    "roots of squares of gradients": Factors,
    "centred gradients": Centred,
    "an average at the end of its update": lambda: Finalizes(0.02),
    "a decay of its own": lambda: Decays(0.05, weight_decay=0.1),
    "assignments of its own": lambda: Rounds(0.1, momentum=0.9),
    "a rate by norms, accumulated": lambda: Trust(
        gradient_accumulation_steps=2
    ),
    "centred gradients, accumulated": lambda: Centred(
        0.02, gradient_accumulation_steps=2
    ),
    "a weight read before it is written twice, clipped and averaged": (
        lambda: Alias(global_clipnorm=0.3, use_ema=True, weight_decay=0.01)
    ),
}.items():

    def _program(run, make=_optimizer):
        def build():
            x = inputs = keras.Input((4,))
            x = layers.Dense(6, activation="tanh")(x)
            model = keras.Model(inputs, layers.Dense(3)(x))
            return models.compiled(model, sparse(), make())

        outside.use(run, build, outside.points(), outside.kinds())

    add(GROUP, f"an optimizer with {_name}", _program)


class Block(layers.Layer):
    """A block that is computed again by `keras.remat` in its call."""

    def __init__(self, **named):
        super().__init__(**named)
        self.wide, self.narrow = layers.Dense(8), layers.Dense(6)
        self.again = keras.remat(self.inner)

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 8))

    def inner(self, x):
        return x + self.narrow(ops.gelu(self.wide(x)))

    def call(self, x):
        return self.again(x)


@row(GROUP)
def a_block_with_remat_in_its_call(run):
    def build():
        x = inputs = keras.Input((4,))
        x = layers.Dense(6, activation="tanh")(x)
        x = Block()(x)
        x = layers.Dense(3)(x)
        return models.compiled(keras.Model(inputs, x), sparse(), adam())

    outside.use(run, build, outside.points(), outside.kinds())


class Factor(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule with a factor that a callback lowers."""

    def __init__(self):
        self.factor = keras.Variable(1.0, trainable=False, name="factor")

    def __call__(self, step):
        done = ops.cast(step, self.factor.dtype)
        return 0.05 * self.factor / (1.0 + 0.1 * done)


class Strength(keras.regularizers.Regularizer):
    """A penalty that a callback raises."""

    def __init__(self):
        self.strength = keras.Variable(
            0.0, dtype=keras.config.floatx(), trainable=False, name="strength"
        )

    def __call__(self, x):
        return self.strength * ops.sum(ops.abs(x))


class Orthogonal(keras.constraints.Constraint):
    """It needs the whole weight, and counts how often it was used."""

    def __init__(self):
        self.count = keras.Variable(
            0.0, dtype=keras.config.floatx(), trainable=False, name="count"
        )

    def __call__(self, w):
        self.count.assign(self.count + 1.0)
        q, r = ops.qr(w)
        size = ops.mean(ops.abs(w)) / (1.0 + 0.01 * self.count)
        return 0.5 * w / ops.norm(w) + ops.matmul(q, r) * size


class Moves(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        factor = self.model.optimizer._learning_rate.factor
        factor.assign(factor * 0.9)
        strength = self.model.layers[1].kernel_regularizer.strength
        strength.assign(strength + 0.01)


class Descends(keras.callbacks.Callback):
    """A step of its own on all rows, and new slots, after each epoch."""

    def __init__(self, data, by_optimizer):
        super().__init__()
        self.data, self.by_optimizer = data, by_optimizer

    def on_epoch_end(self, epoch, logs=None):
        x, y = (tf.constant(part) for part in self.data)
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, self.model(x, training=True), from_logits=True
            )
            loss = ops.mean(losses)
        weights = self.model.trainable_variables
        gradients = tape.gradient(loss, weights)
        logs["of_all"] = float(loss)
        if self.by_optimizer:
            self.model.optimizer.apply(gradients, weights)
            return
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        for slot in self.model.optimizer.variables[2:]:
            slot.assign(ops.zeros_like(slot))


def by_numpy(y, y_pred):
    """A number of all rows, as other libraries compute it."""

    def score(y, y_pred):
        return np.float64(np.median(y_pred.max(-1)) + y.mean())

    found = tf.numpy_function(score, [y, y_pred], tf.float64)
    found.set_shape([])
    return found


def _held(optimizer, callbacks, **options):
    def program(run):
        def build():
            x = inputs = keras.Input((4,))
            x = layers.Dense(8, activation="tanh", **_made(options))(x)
            x = layers.Dropout(0.2, seed=1)(x)
            model = keras.Model(inputs, layers.Dense(3)(x))
            return models.compiled(
                model, sparse(), optimizer(), metrics=[by_numpy]
            )

        data = outside.points(), outside.kinds()
        outside.use(run, build, *data, callbacks=callbacks(data))

    return program


def _made(options):
    return {name: make() for name, make in options.items()}


add(
    GROUP,
    "variables of a schedule, a regularizer and a constraint",
    _held(
        lambda: adam(Factor()),
        lambda data: [Moves()],
        kernel_regularizer=Strength,
        kernel_constraint=Orthogonal,
    ),
)
add(
    GROUP,
    "a callback that descends on all rows",
    _held(adam, lambda data: [Descends(data, False)]),
)
add(
    GROUP,
    "a callback that applies gradients",
    _held(adam, lambda data: [Descends(data, True)]),
)


class Attacked(keras.Model):
    """Inputs are moved within a loop of TensorFlow, weights looked ahead."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3)

    def call(self, x, training=False):
        return self.network(x, training=training)

    @tf.function
    def train_step(self, data):
        x, y = data

        def moved(step, z):
            with tf.GradientTape() as tape:
                tape.watch(z)
                loss = self.compute_loss(x, y, self(z))
            slope = tf.sign(tape.gradient(loss, z))
            return step + 1, x + tf.clip_by_value(z + 0.05 * slope - x, -1, 1)

        _, z = tf.while_loop(lambda step, z: step < 3, moved, [0, x])
        weights = self.trainable_variables
        before = [tf.identity(weight) for weight in weights]
        for last in (False, True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(z, training=True))
            gradients = tape.gradient(loss, weights)
            norm = tf.linalg.global_norm(gradients)
            if norm > 0.5:
                gradients = [g * 0.5 / norm for g in gradients]
            if last:
                for weight, value in zip(weights, before, strict=True):
                    weight.assign(value)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "rate": self.optimizer.learning_rate}


@row(GROUP)
def extra_gradients_on_moved_inputs_in_a_decorated_step(run):
    def build():
        return models.compiled(Attacked(), sparse(), adam())

    outside.use(run, build, outside.points(), outside.kinds())


@row(GROUP)
def compiled_again_with_a_frozen_layer(run):
    def build():
        x = inputs = keras.Input((4,))
        x = layers.Dense(6, activation="tanh")(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        return models.compiled(model, sparse(), adam())

    data = outside.points(), outside.kinds()
    trainer = outside.train(run, build, *data)
    with run.scope():
        trainer.model.layers[1].trainable = False
        models.compiled(trainer.model, sparse(), keras.optimizers.RMSprop(0.01))
    outside.train(run, None, *data, trainer=trainer)


class Scaled(keras.Model):
    """Its `fit` looks at the data first."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3)
        self.scale = self.add_weight(
            shape=(4,), initializer="ones", trainable=False
        )

    def call(self, x):
        return self.network(x * self.scale)

    def fit(self, x=None, y=None, **options):
        self.scale.assign(1.0 / ops.std(ops.convert_to_tensor(x), axis=0))
        return super().fit(x, y, **options)


@row(GROUP)
def a_fit_of_its_own(run):
    def build():
        return models.compiled(Scaled(), sparse(), adam())

    outside.train(run, build, outside.points(), outside.kinds())


def noisy(seeds, mean):
    """Mean squares of what is disturbed by a generator of the model."""

    def loss(y, p):
        far = ops.square(y - p + 0.3 * normal(seeds, p))
        return ops.mean(far) if mean else ops.mean(far, axis=-1)

    return loss


class Disturbed(keras.metrics.Metric):
    """A mean over a random half of the outputs."""

    def __init__(self, seeds, name="disturbed"):
        super().__init__(name=name)
        self.seeds = seeds
        self.far = self.add_variable((), "zeros", name="far")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        kept = keras.random.uniform(ops.shape(p), seed=self.seeds) < 0.5
        kept = ops.cast(kept, p.dtype)
        self.far.assign_add(ops.sum(kept * ops.abs(y - p)))
        self.count.assign_add(ops.sum(kept))

    def result(self):
        return self.far / (self.count + 1e-6)


def disturbed(loss, metrics=False):
    def build():
        model = mlp(2)
        model.seeds = keras.random.SeedGenerator(7)
        model.compile(
            adam(),
            loss(model.seeds),
            metrics=[Disturbed(model.seeds)] if metrics else [],
            jit_compile=False,  # XLA draws other numbers.
        )
        return model

    return build


@row(GROUP)
def a_loss_of_each_row_that_draws_noise(run):
    build = disturbed(lambda seeds: noisy(seeds, False))
    outside.use(run, build, outside.points(), outside.numbers(2))


@row(GROUP)
def a_loss_of_the_batch_that_draws_noise(run):
    build = disturbed(lambda seeds: noisy(seeds, True))
    outside.use(run, build, outside.points(), outside.numbers(2))


@row(GROUP)
def a_metric_that_draws_a_mask(run):
    build = disturbed(lambda seeds: "mse", metrics=True)
    outside.use(run, build, outside.points(), outside.numbers(2))


@row(GROUP)
def a_loss_that_draws_unseeded_noise(run):
    def loss(y, p):
        noise = keras.random.normal(ops.shape(p), dtype=p.dtype)
        return ops.mean(ops.square(y - p + 0.3 * noise), axis=-1)

    def build():
        return models.compiled(mlp(2), loss, adam())

    outside.use(run, build, outside.points(), outside.numbers(2))


class Denoiser(keras.Model):
    """Its loss draws the times and the noise of a diffusion."""

    def __init__(self):
        super().__init__()
        self.network = mlp(4, inputs=5)
        self.seeds = keras.random.SeedGenerator(11)

    def call(self, x):
        times = 0.5 * ops.ones_like(x[:, :1])
        return self.network(ops.concatenate([x, times], axis=1))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        times = keras.random.uniform(
            (ops.shape(x)[0], 1), dtype=x.dtype, seed=self.seeds
        )
        noise = normal(self.seeds, x)
        mixed = ops.sqrt(1 - times) * x + ops.sqrt(times) * noise
        found = self.network(ops.concatenate([mixed, times], axis=1))
        return ops.mean(ops.square(found - noise))


@row(GROUP)
def a_compute_loss_that_draws_times_and_noise(run):
    def build():
        return models.compiled(Denoiser(), None, adam())

    x = outside.points()
    outside.use(run, build, x, x)


class NormalizedStep(keras.Model):
    """Its step normalizes over the batches of all replicas."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.BatchNormalization(momentum=0.8, synchronized=True),
                layers.Dense(1),
            ]
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def a_step_that_normalizes_a_batch_of_two_rows(run):
    def build():
        return models.compiled(NormalizedStep(), "mse", adam())

    short = outside.SHORT
    x, y = outside.points(examples=short), outside.numbers(examples=short)
    outside.train(run, build, x, y)


class WithWeight(keras.Model):
    """It returns a weight, and a mean over the batch, beside its outputs."""

    def __init__(self):
        super().__init__()
        self.network, self.last = mlp(4), layers.Dense(2)

    def call(self, x):
        hidden = self.network(x)
        return {
            "out": self.last(hidden),
            "kernel": self.last.kernel * 1.0,
            "mean": ops.mean(hidden, axis=0),
        }


def squares(y, p):
    return 0.1 * ops.sum(ops.square(p))


class Largest(keras.metrics.Metric):
    """A sum of the squares of what it is given, over the batches."""

    def __init__(self, name="squares"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sum(ops.square(p)))

    def result(self):
        return self.total


@row(GROUP)
def outputs_that_have_no_rows(run):
    def build():
        model = WithWeight()
        model.compile(
            adam(),
            {"out": "mse", "kernel": squares, "mean": squares},
            metrics={"kernel": [Largest()], "mean": [Largest()]},
        )
        return model

    y = {
        "out": outside.numbers(2),
        "kernel": outside.numbers(),
        "mean": outside.numbers(),
    }
    outside.use(run, build, outside.points(), y)


class Standardized(keras.Model):
    """Its predictions are compared with those of the batch."""

    def __init__(self):
        super().__init__()
        self.network = mlp(2)

    def call(self, x):
        return self.network(x)

    def predict_step(self, data):
        found = self(data, training=False)
        apart = (found - ops.mean(found, axis=0)) / ops.std(found, axis=0)
        return {"apart": apart, "order": ops.argsort(found[:, 0])}


@row(GROUP)
def predictions_compared_with_those_of_the_batch(run):
    def build():
        return models.compiled(Standardized(), "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers(2))


class Doubt(keras.Model):
    """Predictions with dropout, several times, and how far they differ."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dropout(0.3, seed=5),
                layers.Dense(2),
            ]
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def predict_step(self, data):
        several = ops.stack([self(data, training=True) for _ in range(3)])
        return ops.mean(several, axis=0), ops.std(several, axis=0)


@row(GROUP)
def predictions_with_dropout_several_times(run):
    def build():
        return models.compiled(Doubt(), "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers(2))


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda upstream: -0.3 * upstream


@tf.custom_gradient
def rounded(x):
    """A straight-through estimator."""
    return tf.round(4 * x) / 4, lambda upstream: upstream


class Adversary(layers.Layer):
    def call(self, x):
        return rounded(reversed_gradient(x))


@row(GROUP)
def gradients_reversed_and_straight_through(run):
    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(6, activation="tanh")(inputs)
        domain = layers.Dense(2, name="domain")(Adversary()(x))
        label = layers.Dense(3, name="label")(x)
        model = keras.Model(inputs, {"domain": domain, "label": label})
        return models.compiled(
            model, {"domain": "mse", "label": sparse()}, adam()
        )

    y = {"domain": outside.numbers(2), "label": outside.kinds()}
    outside.use(run, build, outside.points(), y)


class Deduplicated(layers.Layer):
    """Each of the words of a batch is looked up once, or all are compared."""

    def __init__(self, once):
        super().__init__()
        self.table = layers.Embedding(outside.WORDS, 4)
        self.once = once

    def build(self, shape):
        self.table.build(None)

    def call(self, words):
        flat = ops.reshape(words, (-1,))
        if self.once:
            words, places = tf.unique(flat)
            found = ops.take(self.table(words), places, axis=0)
        else:
            found = self.table(flat)
            found = found - tf.sort(found, axis=0)
        return ops.reshape(found, (-1, outside.LENGTH * 4))


for name, once in {"once": True, "and compared": False}.items():
    add(
        GROUP,
        f"words of the batch looked up {name}",
        lambda run, once=once: outside.use(
            run,
            lambda: models.compiled(
                keras.Sequential(
                    [
                        keras.Input((outside.LENGTH,), dtype="int32"),
                        Deduplicated(once),
                        layers.Dense(2),
                    ]
                ),
                "mse",
                adam(global_clipnorm=0.5),
            ),
            outside.words(),
            outside.numbers(2),
        ),
    )


class Contracted(keras.Model):
    """A contractive penalty, and a step of all Jacobians by the weights."""

    def __init__(self):
        super().__init__()
        self.network = mlp(2)

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = self.network(x, training=True)
            slopes = inner.batch_jacobian(p, x)
            loss = ops.mean(ops.square(p - y)) + 0.1 * ops.mean(slopes**2)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = ops.sum(ops.square(self.network(x) - y), axis=-1)
        found = tape.jacobian(each, self.trainable_variables)
        sizes = sum(
            ops.sum(ops.square(ops.reshape(each, (ops.shape(x)[0], -1))), -1)
            for each in found
        )
        return {"largest": ops.max(sizes)}


@row(GROUP)
def jacobians_of_a_step_of_ones_own(run):
    outside.use(
        run,
        lambda: models.compiled(Contracted(), "mse", adam()),
        outside.points(),
        outside.numbers(2),
    )


class Placed(layers.Layer):
    """It adds rows of the table of words, the same for all examples."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        return x + self.table(ops.arange(outside.LENGTH))


@row(GROUP)
def a_table_of_words_and_of_places(run):
    def build():
        words = keras.Input((outside.LENGTH,), dtype="int32")
        table = layers.Embedding(outside.WORDS, 4)
        hidden = layers.Flatten()(Placed(table)(table(words)))
        model = keras.Model(words, layers.Dense(2)(hidden))
        return models.compiled(model, "mse", adam(global_clipnorm=0.5))

    outside.use(run, build, outside.words(), outside.numbers(2))


class Chosen(keras.Model):
    """It returns those of the words that have odd numbers, ragged."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(outside.WORDS, 2)

    def call(self, words):
        return tf.ragged.boolean_mask(self.table(words), words % 2 > 0)


@row(GROUP)
def predictions_that_are_ragged(run):
    trainer = run.trainer(lambda: models.compiled(Chosen(), None, adam()))
    found = trainer.predict(outside.words(), batch_size=13, verbose=0)
    run.see("lengths", found.row_lengths())
    run.see("values", found.flat_values)


class Perturbed(keras.Model):
    """FreeLB: a second pass on words that have moved by their gradient."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(outside.WORDS, 4)
        self.body, self.head = layers.GRU(4), layers.Dense(2)

    def call(self, words, training=False):
        return self.head(self.body(self.table(words)))

    def train_step(self, data):
        words, y = data
        with tf.GradientTape() as tape:
            found = self.table(words)
            tape.watch(found)
            far = ops.mean(ops.square(self.head(self.body(found)) - y))
        slope = tape.gradient(far, found)
        size = ops.norm(slope, axis=(1, 2), keepdims=True)
        with tf.GradientTape() as tape:
            found = self.table(words) + 0.1 * slope / (size + 1e-6)
            far = ops.mean(ops.square(self.head(self.body(found)) - y))
        learn(self.optimizer, tape, far, self.trainable_variables)
        return {"loss": far}


@row(GROUP)
def noise_added_to_words_in_a_step(run):
    outside.train(
        run,
        lambda: models.compiled(Perturbed(), None, adam()),
        outside.words(),
        outside.numbers(2),
    )


class WithPlaces(layers.Layer):
    def __init__(self):
        super().__init__()
        self.places = layers.Embedding(outside.LENGTH, 4)

    def call(self, x):
        return x + self.places(ops.arange(outside.LENGTH))


@row(GROUP)
def words_and_places(run):
    def build():
        words = keras.Input((outside.LENGTH,), dtype="int32")
        hidden = WithPlaces()(layers.Embedding(outside.WORDS, 4)(words))
        model = keras.Model(words, layers.Dense(2)(layers.Flatten()(hidden)))
        return models.compiled(model, "mse", adam(global_clipnorm=0.5))

    outside.use(run, build, outside.words(), outside.numbers(2))


class ByLoop(Contracted):
    """The same where TensorFlow's loop is not vectorized."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = ops.sum(ops.square(self.network(x) - y), axis=-1)
        weights = self.trainable_variables
        slopes = tape.jacobian(each, weights, experimental_use_pfor=False)
        clipped = [
            ops.mean(ops.clip(slope, -0.3, 0.3), axis=0) for slope in slopes
        ]
        self.optimizer.apply(clipped, weights)
        return {"loss": ops.mean(each)}


@row(GROUP)
def jacobians_of_a_step_by_a_loop(run):
    outside.train(
        run,
        lambda: models.compiled(ByLoop(), "mse", adam()),
        outside.points(),
        outside.numbers(2),
    )


class Sloped(Contracted):
    """Outputs along a direction of the inputs are smooth."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs, slopes = self.along(x, ops.ones_like(x))
            loss = ops.mean(ops.square(outputs - y) + 0.1 * ops.square(slopes))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class SlopedForward(Sloped):
    def along(self, x, direction):
        with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
            outputs = self.network(x)
        return outputs, accumulator.jvp(outputs)


class SlopedTwice(Sloped):
    def along(self, x, direction):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self.network(x)
            v = ops.zeros_like(outputs)
            outer.watch(v)
            back = inner.gradient(outputs, x, v)
        return outputs, outer.gradient(back, v, direction)


def smooth(run, kind):
    outside.train(
        run,
        lambda: models.compiled(kind(), "mse", adam()),
        outside.points(),
        outside.numbers(2),
    )


@row(GROUP)
def slopes_along_a_direction_forward(run):
    smooth(run, SlopedForward)


@row(GROUP)
def slopes_along_a_direction_by_two_gradients(run):
    smooth(run, SlopedTwice)
