"""Programs from outside whose examples meet: pairs, experts, graphs, SAM."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row

GROUP = "Outside: examples that meet"


def tower(rows, width=4):
    return keras.Sequential([layers.Embedding(rows, 6), layers.Dense(width)])


class Retrieval(keras.Model):
    """TensorFlow Recommenders' two towers: a sum over the in-batch softmax."""

    def __init__(self, reduction="sum"):
        super().__init__()
        self.users, self.items = tower(10), tower(15)
        self.loss_fn = keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )
        self.tracker = keras.metrics.Mean(name="loss")
        self.top = keras.metrics.CategoricalAccuracy(name="top")

    @property
    def metrics(self):
        return [self.tracker, self.top]

    def call(self, features):
        return self.users(features["user"]), self.items(features["item"])

    def scored(self, features, training):
        users, items = self(features, training=training)
        scores = tf.matmul(users, items, transpose_b=True)
        return tf.eye(tf.shape(scores)[0], dtype=scores.dtype), scores

    def train_step(self, features):
        with tf.GradientTape() as tape:
            labels, scores = self.scored(features, True)
            loss = self.loss_fn(labels, scores)
            loss += sum(self.losses)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return self.report(loss, labels, scores)

    def test_step(self, features):
        labels, scores = self.scored(features, False)
        return self.report(self.loss_fn(labels, scores), labels, scores)

    def report(self, loss, labels, scores):
        self.tracker.update_state(loss)
        self.top.update_state(labels, scores)
        return {m.name: m.result() for m in self.metrics}


def _purchases():
    random = models.random(31)
    return outside.batches(
        {
            "user": random.integers(0, 10, outside.EXAMPLES),
            "item": random.integers(0, 15, outside.EXAMPLES),
        }
    )


@row(GROUP)
def two_towers_with_a_step(run):
    def build():
        return models.compiled(
            Retrieval(), None, keras.optimizers.Adagrad(0.05)
        )

    outside.on_batches(run, build, _purchases())


@row(GROUP)
def two_towers_with_a_step_and_a_mean(run):
    def build():
        return models.compiled(
            Retrieval("sum_over_batch_size"), None, models.sgd()
        )

    outside.on_batches(run, build, _purchases())


class RetrievalByLoss(keras.Model):
    """keras-rs's: the scores of all pairs in `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.users, self.items = tower(10), tower(15)

    def call(self, features):
        return {
            "query": self.users(features["user"]),
            "candidate": self.items(features["item"]),
        }

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        scores = ops.matmul(y_pred["query"], ops.transpose(y_pred["candidate"]))
        # Of one item twice in a batch the second is no negative.
        same = ops.equal(x["item"][:, None], x["item"][None, :])
        size = ops.shape(scores)[0]
        hidden = ops.logical_and(same, ops.eye(size) == 0)
        scores = ops.where(hidden, -1e9, scores)
        return super().compute_loss(
            x, ops.arange(size), scores, sample_weight, training
        )


@row(GROUP)
def two_towers_by_compute_loss(run):
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(
            RetrievalByLoss(), loss, keras.optimizers.Adagrad(0.05)
        )

    data = _purchases().map(lambda features: (features, features["item"]))
    outside.on_batches(run, build, data)


class Router(layers.Layer):
    """keras.io's Switch router: the loss balances experts over all tokens."""

    def __init__(self, experts, capacity=None):
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.route = layers.Dense(experts)

    def call(self, tokens):
        chances = ops.softmax(self.route(tokens), axis=-1)
        gate = ops.max(chances, axis=-1)
        chosen = ops.one_hot(
            ops.argmax(chances, axis=-1), self.experts, dtype=tokens.dtype
        )
        density = ops.mean(chosen, axis=0)
        proxy = ops.mean(chances, axis=0)
        self.add_loss(self.experts**2 * ops.mean(density * proxy))
        if self.capacity is not None:
            place = ops.cumsum(chosen, axis=0) * chosen
            kept = ops.cast(place <= self.capacity, tokens.dtype)
            chosen = chosen * kept
        return chosen * gate[:, None]


class Switch(layers.Layer):
    """Experts that a router sends tokens to."""

    def __init__(self, width=4, experts=3, capacity=None):
        super().__init__()
        self.router = Router(experts, capacity)
        self.experts = [
            layers.Dense(width, activation="tanh") for _ in range(experts)
        ]

    def call(self, x):
        tokens = ops.reshape(x, (-1, x.shape[-1]))
        shares = self.router(tokens)
        made = ops.stack([e(tokens) for e in self.experts], axis=1)
        out = ops.sum(made * shares[:, :, None], axis=1)
        return ops.reshape(out, (-1, x.shape[1], out.shape[-1]))


def _switch(capacity):
    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        x = layers.Embedding(outside.WORDS, 4)(inputs)
        x = x + Switch(capacity=capacity)(x)
        x = layers.LayerNormalization()(x)
        x = layers.GlobalAveragePooling1D()(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.02)
        return models.compiled(model, loss, optimizer, metrics=["accuracy"])

    return build


@row(GROUP)
def switch_whose_loss_balances_experts(run):
    outside.use(run, _switch(None), outside.words(), outside.kinds())


@row(GROUP)
def switch_with_a_capacity_of_experts(run):
    outside.use(run, _switch(10), outside.words(), outside.kinds())


class SimClr(keras.Model):
    """keras.io's semi-supervised one: unlabelled and fewer labelled rows."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((4,)), layers.Dense(6, activation="tanh")]
        )
        self.head = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        self.probe = keras.Sequential([keras.Input((6,)), layers.Dense(3)])

    def compile(self, contrastive, probe, **options):
        super().compile(**options)
        self.contrastive_optimizer, self.probe_optimizer = contrastive, probe
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )
        self.contrastive_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="c_acc"
        )
        self.probe_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="p_acc"
        )

    @property
    def metrics(self):
        return [
            self.contrastive_tracker,
            self.contrastive_accuracy,
            self.probe_tracker,
            self.probe_accuracy,
        ]

    def contrastive_loss(self, one, two):
        one = ops.normalize(one, axis=1)
        two = ops.normalize(two, axis=1)
        likeness = ops.matmul(one, ops.transpose(two)) / 0.1
        labels = ops.arange(ops.shape(one)[0])
        self.contrastive_accuracy.update_state(labels, likeness)
        self.contrastive_accuracy.update_state(labels, ops.transpose(likeness))
        there = keras.losses.sparse_categorical_crossentropy(
            labels, likeness, from_logits=True
        )
        back = keras.losses.sparse_categorical_crossentropy(
            labels, ops.transpose(likeness), from_logits=True
        )
        return (there + back) / 2

    def train_step(self, data):
        unlabelled, (labelled, labels) = data
        x = ops.concatenate((unlabelled, labelled), axis=0)
        one, two = x + 0.1 * ops.sin(7.0 * x), x - 0.1 * ops.cos(9.0 * x)
        with tf.GradientTape() as tape:
            loss = self.contrastive_loss(
                self.head(self.encoder(one)), self.head(self.encoder(two))
            )
        outside.learn(
            self.contrastive_optimizer,
            tape,
            loss,
            self.encoder.trainable_weights + self.head.trainable_weights,
        )
        self.contrastive_tracker.update_state(loss)
        features = self.encoder(labelled)
        with tf.GradientTape() as tape:
            logits = self.probe(features)
            loss = self.probe_loss(labels, logits)
        outside.learn(
            self.probe_optimizer, tape, loss, self.probe.trainable_weights
        )
        self.probe_tracker.update_state(loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, labels = data
        logits = self.probe(self.encoder(x), training=False)
        self.probe_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics[2:]}


@row(GROUP)
def simclr_with_fewer_labelled_rows(run):
    def build():
        model = SimClr()
        model.compile(
            keras.optimizers.Adam(0.02),
            keras.optimizers.Adam(0.05),
            jit_compile=False,
        )
        return model

    unlabelled = outside.batches(outside.points())
    labelled = (
        outside.points(seed=9, examples=18),
        outside.kinds(examples=18),
    )
    data = tf.data.Dataset.zip((unlabelled, outside.batches(*labelled, size=5)))
    tested = outside.batches(*labelled, size=8)
    outside.on_batches(
        run,
        build,
        data,
        evaluate=False,
        predict=False,
        validation_data=tested,
    )


class Sam(keras.Model):
    """keras.io's sharpness-aware step: its length is that of the gradients."""

    def __init__(self, network, rho=0.05):
        super().__init__()
        self.network, self.rho = network, rho

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.network(x))
        weights = self.network.trainable_variables
        gradients = tape.gradient(loss, weights)
        scale = self.rho / (self.norm(gradients) + 1e-12)
        moves = []
        for gradient, weight in zip(gradients, weights, strict=True):
            move = gradient * scale
            weight.assign_add(move)
            moves.append(move)
        with tf.GradientTape() as tape:
            y_pred = self.network(x)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.compute_metrics(x, y, y_pred)

    def norm(self, gradients):
        return tf.norm(tf.stack([tf.norm(g) for g in gradients]))


@row(GROUP)
def sharpness_aware_minimization(run):
    def build():
        network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.02)
        return models.compiled(
            Sam(network), loss, optimizer, metrics=["accuracy"]
        )

    outside.use(run, build, outside.points(), outside.kinds())


def molecules(size=outside.BATCH):
    """Batches of molecules, each of 2 to 6 atoms, as one graph each batch.

    Atoms `[atoms, 3]`, pairs of bound atoms `[bonds, 2]`, the molecule of each
    atom `[atoms]`, and a target for each molecule.
    """
    random = models.random(41)
    counts = random.integers(2, 7, outside.EXAMPLES)
    atoms = [random.normal(size=(count, 3)) for count in counts]
    bonds = [
        np.array([(i, j) for i in range(n) for j in range(n) if i - j == 1])
        for n in counts
    ]
    y = np.array([[a[:, 0].sum()] for a in atoms])

    def make():
        for first in range(0, outside.EXAMPLES, size):
            chosen = range(first, min(first + size, outside.EXAMPLES))
            start = np.cumsum([0, *(counts[i] for i in chosen)])
            pairs = [bonds[i] + s for i, s in zip(chosen, start, strict=False)]
            owner = np.repeat(np.arange(len(chosen)), counts[list(chosen)])
            yield (
                (
                    np.concatenate([atoms[i] for i in chosen]),
                    np.concatenate(pairs),
                    owner,
                ),
                y[list(chosen)],
            )

    signature = (
        (
            tf.TensorSpec((None, 3), tf.float64),
            tf.TensorSpec((None, 2), tf.int64),
            tf.TensorSpec((None,), tf.int64),
        ),
        tf.TensorSpec((None, 1), tf.float64),
    )
    data = tf.data.Dataset.from_generator(make, output_signature=signature)
    steps = -(-outside.EXAMPLES // size)
    return data.apply(tf.data.experimental.assert_cardinality(steps))


class MessagePassing(layers.Layer):
    """Messages along bonds, summed at atoms."""

    def __init__(self, width, steps=2):
        super().__init__()
        self.width, self.steps = width, steps
        self.message = layers.Dense(width)
        self.cell = layers.GRUCell(width)

    def build(self, shapes):
        self.message.build((None, 2 * self.width))
        self.cell.build((None, self.width))
        self.built = True

    def call(self, inputs):
        atoms, pairs = inputs
        for _ in range(self.steps):
            ends = tf.gather(atoms, pairs)
            both = tf.reshape(ends, (-1, 2 * self.width))
            sent = self.message(both)
            found = tf.math.unsorted_segment_sum(
                sent, pairs[:, 0], tf.shape(atoms)[0]
            )
            atoms, _ = self.cell(found, [atoms])
        return atoms


class Readout(layers.Layer):
    """The mean of the atoms of each molecule."""

    def call(self, inputs):
        atoms, owner = inputs
        return tf.math.segment_mean(atoms, owner)


@row(GROUP)
def molecules_with_other_numbers_of_atoms(run):
    """keras.io's MPNN: inputs of three lengths, none that of the targets."""

    def build():
        atoms = keras.Input((3,))
        pairs = keras.Input((2,), dtype="int64")
        owner = keras.Input((), dtype="int64")
        x = layers.Dense(4, activation="tanh")(atoms)
        x = MessagePassing(4)([x, pairs])
        x = Readout()([x, owner])
        x = layers.Dense(6, activation="tanh")(x)
        model = keras.Model([atoms, pairs, owner], layers.Dense(1)(x))
        return models.compiled(
            model, "mse", keras.optimizers.Adam(0.02), metrics=["mae"]
        )

    outside.on_batches(run, build, molecules())


class SupCon(keras.losses.Loss):
    """keras.io's: `__call__` itself is written, over all pairs of a batch."""

    def __init__(self, temperature=0.5, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, features, sample_weight=None):
        features = ops.normalize(features, axis=1)
        logits = ops.matmul(features, ops.transpose(features))
        return self.pairs(ops.squeeze(labels, 1), logits / self.temperature)

    def pairs(self, labels, logits):
        same = ops.equal(labels[:, None], labels[None, :])
        wanted = ops.cast(same, logits.dtype)
        wanted = wanted / ops.sum(wanted, axis=1, keepdims=True)
        losses = ops.categorical_crossentropy(wanted, logits, from_logits=True)
        return ops.mean(losses)


@row(GROUP)
def supervised_contrastive_learning(run):
    """The encoder is trained by pairs, and then a classifier upon it."""

    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(6, activation="tanh")(inputs)
        model = keras.Model(inputs, layers.Dense(4, activation="tanh")(x))
        return models.compiled(model, SupCon(), keras.optimizers.Adam(0.02))

    outside.use(run, build, outside.points(), outside.kinds()[:, None])


class Centres(layers.Layer):
    """Centre loss: centres of classes that move to the features."""

    def __init__(self, classes=3, rate=0.5):
        super().__init__()
        self.classes, self.rate = classes, rate

    def build(self, shapes):
        self.centres = self.add_weight(
            shape=(self.classes, shapes[0][-1]),
            initializer=keras.initializers.RandomUniform(seed=4),
            trainable=False,
            name="centres",
        )

    def call(self, inputs, training=False):
        features, labels = inputs
        labels = ops.reshape(labels, (-1,))
        gaps = ops.take(self.centres, labels, axis=0) - features
        if training:
            rows = ops.segment_sum(gaps, labels, num_segments=self.classes)
            count = ops.segment_sum(
                ops.ones_like(labels), labels, num_segments=self.classes
            )
            count = ops.cast(count, rows.dtype)[:, None]
            self.centres.assign_sub(self.rate * rows / (1.0 + count))
        self.add_loss(0.1 * ops.mean(ops.sum(ops.square(gaps), axis=1)))
        return features


@row(GROUP)
def centre_loss_by_a_layer(run):
    def build():
        x = keras.Input((4,), name="x")
        label = keras.Input((), dtype="int32", name="label")
        features = layers.Dense(4, activation="tanh")(x)
        features = Centres()([features, label])
        model = keras.Model([x, label], layers.Dense(3)(features))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(model, loss)

    labels = outside.kinds()
    outside.use(run, build, [outside.points(), labels], labels)


class WithCentres(keras.Model):
    """The same in a step: each class's centre moves by its rows' mean."""

    def __init__(self, classes=3):
        super().__init__()
        self.classes = classes
        self.features = layers.Dense(4, activation="tanh")
        self.out = layers.Dense(classes)
        self.centres = self.add_weight(
            shape=(classes, 4),
            initializer="zeros",
            trainable=False,
            name="centres",
        )

    def call(self, x):
        return self.out(self.features(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            features = self.features(x)
            loss = self.compute_loss(y=y, y_pred=self.out(features))
            gaps = features - tf.gather(self.centres, y)
            loss += 0.1 * tf.reduce_mean(tf.reduce_sum(gaps**2, axis=1))
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        rows = tf.math.unsorted_segment_sum(gaps, y, self.classes)
        count = tf.math.unsorted_segment_sum(tf.ones_like(y), y, self.classes)
        count = tf.cast(count, rows.dtype)[:, None]
        self.centres.assign_add(0.5 * rows / (1.0 + count))
        return {"loss": loss}


@row(GROUP)
def centre_loss_by_a_step(run):
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(WithCentres(), loss)

    outside.use(run, build, outside.points(), outside.kinds())
