"""Learning without labels from outside: losses of a batch, queues, centres."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: contrast and self-training"


def adam(rate=0.02):
    return keras.optimizers.Adam(rate)


def views():
    """Two arrays, each row of one a view of the same row of the other."""
    x = outside.points()
    return x + 0.2 * outside.points(seed=8), x + 0.2 * outside.points(seed=9)


class Views(keras.Model):
    """A model whose loss is of two views of a batch.

    Its function takes the two projections.
    """

    def __init__(self, between, width=4):
        super().__init__()
        self.between = between
        self.encoder = mlp(width, 4)

    def train_step(self, data):
        one, two = data
        with tf.GradientTape() as tape:
            loss = self.between(self.encoder(one), self.encoder(two))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        one, two = data
        return {"loss": self.between(self.encoder(one), self.encoder(two))}


def nt_xent(one, two):
    """SimCLR's paper: each of both views against all others."""
    z = ops.normalize(ops.concatenate([one, two], axis=0), axis=1)
    size = ops.shape(one)[0]
    likeness = ops.matmul(z, ops.transpose(z)) / 0.5
    likeness = likeness - 1e9 * ops.eye(2 * size)
    partner = (ops.arange(2 * size) + size) % (2 * size)
    return ops.mean(
        ops.sparse_categorical_crossentropy(partner, likeness, from_logits=True)
    )


def barlow(one, two):
    """keras.io's Barlow Twins: features standardized over the batch."""
    size = ops.cast(ops.shape(one)[0], one.dtype)

    def standard(z):
        return (z - ops.mean(z, axis=0)) / (ops.std(z, axis=0) + 1e-3)

    cross = ops.matmul(ops.transpose(standard(one)), standard(two)) / size
    eye = ops.eye(4)
    on = ops.square(1.0 - cross) * eye
    return ops.sum(on + 5e-3 * ops.square(cross) * (1.0 - eye))


def vicreg(one, two):
    """Invariance, variance and covariance."""
    total = 25.0 * ops.mean(ops.square(one - two))
    size = ops.cast(ops.shape(one)[0], one.dtype)
    for z in (one, two):
        z = z - ops.mean(z, axis=0)
        spread = ops.sqrt(ops.var(z, axis=0) + 1e-4)
        total += 25.0 * ops.mean(ops.relu(1.0 - spread))
        covariance = ops.matmul(ops.transpose(z), z) / (size - 1.0)
        off = ops.sum(ops.square(covariance)) - ops.sum(
            ops.square(ops.diagonal(covariance))
        )
        total += off / 4.0
    return total


def swav(one, two):
    """Assignments balanced over the batch by Sinkhorn's iterations."""

    def codes(scores):
        q = ops.transpose(ops.exp(ops.stop_gradient(scores) / 0.5))
        q = q / ops.sum(q)
        for _ in range(3):
            q = q / ops.sum(q, axis=1, keepdims=True) / 4.0
            size = ops.cast(ops.shape(q)[1], q.dtype)
            q = q / ops.sum(q, axis=0, keepdims=True) / size
        return ops.transpose(q / ops.sum(q, axis=0, keepdims=True))

    def swapped(q, scores):
        log = ops.log_softmax(scores / 0.1, axis=1)
        return -ops.mean(ops.sum(q * log, axis=1))

    return 0.5 * (swapped(codes(one), two) + swapped(codes(two), one))


def invariant(one, two):
    """Mutual information of two views' clusters (IIC)."""
    one, two = ops.softmax(one), ops.softmax(two)
    joint = ops.matmul(ops.transpose(one), two)
    joint = (joint + ops.transpose(joint)) / 2.0
    joint = joint / ops.sum(joint)
    rows = ops.sum(joint, axis=1, keepdims=True)
    columns = ops.sum(joint, axis=0, keepdims=True)
    return -ops.sum(joint * (ops.log(joint) - ops.log(rows * columns)))


def clusters(one, two):
    """SCAN: consistency of neighbours, entropy of the batch's clusters."""
    one, two = ops.softmax(one), ops.softmax(two)
    likeness = ops.einsum("ij,ij->i", one, two)
    consistency = -ops.mean(ops.log(likeness + 1e-8))
    average = ops.mean(one, axis=0)
    return consistency + 2.0 * ops.sum(average * ops.log(average + 1e-8))


def aligned(one, two):
    """Alignment, and uniformity by distances of all pairs."""
    one, two = ops.normalize(one, axis=1), ops.normalize(two, axis=1)
    alignment = ops.mean(ops.sum(ops.square(one - two), axis=1))
    gaps = one[:, None, :] - one[None, :, :]
    squares = ops.sum(ops.square(gaps), axis=-1)
    size = ops.cast(ops.shape(one)[0], one.dtype)
    others = ops.sum(ops.exp(-2.0 * squares)) - size
    return alignment + ops.log(others / (size * (size - 1.0)) + 1e-6)


for _name, _between in {
    "sim clr, all of both views": nt_xent,
    "barlow twins": barlow,
    "variance, invariance, covariance": vicreg,
    "assignments by sinkhorn": swav,
    "invariant information clustering": invariant,
    "clusters by neighbours and entropy": clusters,
    "alignment and uniformity": aligned,
}.items():

    def _program(run, between=_between):
        def build():
            return models.compiled(Views(between), None, adam())

        data = outside.batches(*views())
        outside.on_batches(run, build, data, predict=False)

    add(GROUP, _name, _program)


class SimSiam(keras.Model):
    """keras.io's: gradients stop at one side."""

    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = mlp(4, 4), mlp(4, 4)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def away(self, p, z):
        z = ops.stop_gradient(z)
        p, z = ops.normalize(p, axis=1), ops.normalize(z, axis=1)
        return -ops.mean(ops.sum(p * z, axis=1))

    def train_step(self, data):
        one, two = data
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(one), self.encoder(two)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            loss = self.away(p1, z2) / 2 + self.away(p2, z1) / 2
        learn(
            self.optimizer,
            tape,
            loss,
            self.encoder.trainable_variables
            + self.predictor.trainable_variables,
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@row(GROUP)
def sim_siam(run):
    def build():
        schedule = keras.optimizers.schedules.CosineDecay(0.05, 8)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.6)
        return models.compiled(SimSiam(), None, optimizer)

    run.fit(build, outside.batches(*views()))


class Byol(SimSiam):
    """A target network that follows, step by step."""

    def __init__(self):
        super().__init__()
        self.target = keras.models.clone_model(self.encoder)
        self.target.set_weights(self.encoder.get_weights())

    def train_step(self, data):
        one, two = data
        with tf.GradientTape() as tape:
            p1 = self.predictor(self.encoder(one))
            p2 = self.predictor(self.encoder(two))
            loss = self.away(p1, self.target(two))
            loss += self.away(p2, self.target(one))
        learn(
            self.optimizer,
            tape,
            loss,
            self.encoder.trainable_variables
            + self.predictor.trainable_variables,
        )
        for old, new in zip(
            self.target.variables, self.encoder.variables, strict=True
        ):
            old.assign(0.95 * old + 0.05 * new)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@row(GROUP)
def byol_with_a_target_network(run):
    def build():
        return models.compiled(Byol(), None, adam())

    run.fit(build, outside.batches(*views()))


class Dino(keras.Model):
    """A teacher whose outputs are centred by an average over batches."""

    def __init__(self):
        super().__init__()
        self.student = mlp(5, 4)
        self.teacher = keras.models.clone_model(self.student)
        self.centre = self.add_weight(
            shape=(1, 5), initializer="zeros", trainable=False, name="centre"
        )

    def train_step(self, data):
        one, two = data
        with tf.GradientTape() as tape:
            wanted = self.teacher(two)
            chances = ops.softmax((wanted - self.centre) / 0.2)
            log = ops.log_softmax(self.student(one) / 0.5)
            loss = ops.mean(-ops.sum(ops.stop_gradient(chances) * log, axis=-1))
        learn(self.optimizer, tape, loss, self.student.trainable_variables)
        for old, new in zip(
            self.teacher.variables, self.student.variables, strict=True
        ):
            old.assign(0.95 * old + 0.05 * new)
        average = ops.mean(wanted, axis=0, keepdims=True)
        self.centre.assign(0.9 * self.centre + 0.1 * average)
        return {"loss": loss}


@row(GROUP)
def dino_with_a_centre(run):
    def build():
        return models.compiled(Dino(), None, adam())

    run.fit(build, outside.batches(*views()))


class NnClr(keras.Model):
    """keras.io's: a queue of features, and the nearest neighbour in it."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(4, 4)
        self.queue = self.add_weight(
            shape=(20, 4),
            initializer=keras.initializers.RandomNormal(seed=3),
            trainable=False,
            name="queue",
        )
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.tracker = keras.metrics.Mean(name="c_loss")

    @property
    def metrics(self):
        return [self.accuracy, self.tracker]

    def neighbour(self, z):
        likeness = ops.matmul(z, ops.transpose(self.queue))
        found = ops.take(self.queue, ops.argmax(likeness, axis=1), axis=0)
        return z + ops.stop_gradient(found - z)

    def contrast(self, one, two):
        one, two = ops.normalize(one, axis=1), ops.normalize(two, axis=1)
        scores = [
            ops.matmul(self.neighbour(one), ops.transpose(two)) / 0.5,
            ops.matmul(two, ops.transpose(self.neighbour(one))) / 0.5,
            ops.matmul(self.neighbour(two), ops.transpose(one)) / 0.5,
            ops.matmul(one, ops.transpose(self.neighbour(two))) / 0.5,
        ]
        size = ops.shape(one)[0]
        labels = ops.arange(size)
        # Rows with one neighbour make equal columns in the other two: rounding
        # decides which is the largest, on one device too.
        self.accuracy.update_state(
            ops.concatenate([labels] * 2), ops.concatenate(scores[::2], axis=0)
        )
        loss = ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                ops.concatenate([labels] * 4),
                ops.concatenate(scores, axis=0),
                from_logits=True,
            )
        )
        self.queue.assign(
            ops.concatenate([one, self.queue[:-size]], axis=0)[:20]
        )
        return loss

    def train_step(self, data):
        one, two = data
        with tf.GradientTape() as tape:
            loss = self.contrast(self.encoder(one), self.encoder(two))
        learn(self.optimizer, tape, loss, self.encoder.trainable_weights)
        self.tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


@row(GROUP)
def nearest_neighbours_in_a_queue(run):
    def build():
        return models.compiled(NnClr(), None, adam())

    run.fit(build, outside.batches(*views()))


class DualEncoder(keras.Model):
    """keras.io's image search: soft targets by likeness within each kind."""

    def __init__(self, temperature=0.5):
        super().__init__()
        self.text, self.image = mlp(4, 4), mlp(4, 4)
        self.temperature = temperature
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, features, training=False):
        return self.text(features["caption"]), self.image(features["image"])

    def of_pairs(self, caption, image):
        logits = ops.matmul(caption, ops.transpose(image)) / self.temperature
        images = ops.matmul(image, ops.transpose(image))
        captions = ops.matmul(caption, ops.transpose(caption))
        targets = ops.softmax(
            (captions + images) / (2.0 * self.temperature), axis=-1
        )
        there = keras.losses.categorical_crossentropy(
            targets, logits, from_logits=True
        )
        back = keras.losses.categorical_crossentropy(
            ops.transpose(targets), ops.transpose(logits), from_logits=True
        )
        return (there + back) / 2.0

    def train_step(self, features):
        with tf.GradientTape() as tape:
            loss = self.of_pairs(*self(features, training=True))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, features):
        self.tracker.update_state(self.of_pairs(*self(features)))
        return {"loss": self.tracker.result()}


@row(GROUP)
def a_dual_encoder_of_images_and_captions(run):
    def build():
        return models.compiled(
            DualEncoder(), None, keras.optimizers.AdamW(0.02)
        )

    caption, image = views()
    data = outside.batches({"caption": caption, "image": image})
    outside.on_batches(run, build, data)


class Clip(keras.Model):
    """CLIP: a temperature that learns, the loss in `call` by `add_loss`."""

    def __init__(self):
        super().__init__()
        self.text, self.image = mlp(4, 4), mlp(4, 4)
        self.scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(1.0), name="scale"
        )

    def call(self, inputs):
        image, caption = inputs
        image = ops.normalize(self.image(image), axis=1)
        caption = ops.normalize(self.text(caption), axis=1)
        logits = ops.exp(self.scale) * ops.matmul(image, ops.transpose(caption))
        labels = ops.arange(ops.shape(logits)[0])
        both = [
            ops.mean(
                ops.sparse_categorical_crossentropy(labels, x, from_logits=True)
            )
            for x in (logits, ops.transpose(logits))
        ]
        self.add_loss(0.5 * (both[0] + both[1]))
        return image


@row(GROUP)
def clip_by_add_loss_in_call(run):
    def build():
        return models.compiled(Clip(), None, adam())

    image, caption = views()
    data = outside.batches(image, caption).map(lambda a, b: ((a, b),))
    outside.on_batches(run, build, data)


class MetricLearning(keras.Model):
    """keras.io's: anchors against positives, classes as rows of a batch."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(4, 4)

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[:, 0], data[:, 1]
        with tf.GradientTape() as tape:
            one = self(anchors, training=True)
            two = self(positives, training=True)
            likeness = tf.einsum("ae,pe->ap", one, two) / 0.5
            labels = tf.range(tf.shape(likeness)[0])
            loss = self.compute_loss(y=labels, y_pred=likeness)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, likeness)
        return {m.name: m.result() for m in self.metrics}


@row(GROUP)
def metric_learning_of_anchors_and_positives(run):
    def build():
        return models.compiled(
            MetricLearning(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            adam(),
            metrics=["accuracy"],
        )

    one, two = views()
    data = ops.convert_to_numpy(ops.stack([one, two], axis=1))
    outside.train(run, build, data)


def semi_hard(labels, embeddings):
    """Triplets whose negative is the next beyond the positive."""
    labels = tf.reshape(labels, (-1, 1))
    squares = tf.reduce_sum(tf.square(embeddings), axis=1)
    apart = squares[:, None] + squares[None, :]
    apart -= 2.0 * tf.matmul(embeddings, embeddings, transpose_b=True)
    apart = tf.maximum(apart, 0.0)
    same = tf.equal(labels, tf.transpose(labels))
    size = tf.shape(labels)[0]
    positive = tf.logical_and(same, ~tf.eye(size, dtype=tf.bool))
    far = tf.reduce_max(apart)
    outside_ = tf.logical_and(
        ~same[:, None, :], apart[:, None, :] > apart[:, :, None]
    )
    nearest = tf.reduce_min(tf.where(outside_, apart[:, None, :], far), axis=2)
    farthest = tf.reduce_max(
        tf.where(same, tf.zeros_like(apart), apart), axis=1
    )
    negative = tf.where(
        tf.reduce_any(outside_, axis=2), nearest, farthest[:, None]
    )
    losses = tf.maximum(1.0 + apart - negative, 0.0)
    mask = tf.cast(positive, losses.dtype)
    return tf.math.divide_no_nan(
        tf.reduce_sum(losses * mask), tf.reduce_sum(mask)
    )


@row(GROUP)
def triplets_that_are_semi_hard(run):
    build = models.dense(width=3, loss=lambda: semi_hard, optimizer=adam)
    outside.use(run, build, outside.points(), outside.kinds())


class FixMatch(keras.Model):
    """Labels of one's own where sure, on twice as many rows."""

    def __init__(self, threshold=0.45):
        super().__init__()
        self.network, self.threshold = mlp(3, 4), threshold

    def train_step(self, data):
        (x, y), (weak, strong) = data
        with tf.GradientTape() as tape:
            logits = self.network(tf.concat([x, weak, strong], axis=0))
            size, more = tf.shape(x)[0], tf.shape(weak)[0]
            known, weakly, strongly = tf.split(logits, [size, more, more])
            guess = tf.stop_gradient(tf.nn.softmax(weakly))
            sure = tf.reduce_max(guess, axis=1) >= self.threshold
            mask = tf.cast(sure, logits.dtype)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, known)
            )
            unlabelled = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.argmax(guess, axis=1), strongly
            )
            loss += tf.reduce_mean(unlabelled * mask)
        learn(self.optimizer, tape, loss, self.network.trainable_variables)
        return {"loss": loss, "sure": tf.reduce_mean(mask)}


@row(GROUP)
def fix_match_with_more_unlabelled_rows(run):
    def build():
        return models.compiled(FixMatch(), None, adam())

    labelled = outside.points(), outside.kinds()
    more = [outside.points(seed=s, examples=88) for s in (51, 52)]
    data = tf.data.Dataset.zip(
        (outside.batches(*labelled), outside.batches(*more, size=26))
    )
    run.fit(build, data)


class AdaMatch(keras.Model):
    """keras.io's: a threshold by the batch's own confidence, two domains."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3, 4)
        self.weight = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="step"
        )

    def train_step(self, data):
        source, labels, target = data
        with tf.GradientTape() as tape:
            size = tf.shape(source)[0]
            both = self.network(tf.concat([source, target], 0), training=True)
            alone = self.network(source, training=True)
            mixed = 0.7 * both[:size] + 0.3 * alone
            of_source = tf.nn.softmax(mixed)
            of_target = tf.nn.softmax(both[size:])
            ratio = tf.reduce_mean(of_source, 0) / tf.reduce_mean(of_target, 0)
            aligned, _ = tf.linalg.normalize(of_target * ratio, 1, axis=1)
            sure = tf.reduce_mean(tf.reduce_max(of_source, axis=-1))
            mask = tf.reduce_max(aligned, axis=-1) >= 0.9 * sure
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, mixed, from_logits=True
                )
            )
            guessed = keras.losses.sparse_categorical_crossentropy(
                tf.argmax(aligned, axis=1), both[size:], from_logits=True
            )
            guessed = tf.reduce_mean(guessed * tf.cast(mask, guessed.dtype))
            total = loss + self.weight * guessed
        learn(self.optimizer, tape, total, self.network.trainable_variables)
        self.weight.assign_add(0.1)
        return {"loss": total, "target": guessed}


@row(GROUP)
def ada_match_between_domains(run):
    def build():
        return models.compiled(AdaMatch(), None, adam())

    data = outside.points(), outside.kinds(), outside.points(seed=53)
    run.fit(build, outside.batches(*data))


class DeepClusters(keras.Model):
    """DEC: sharper targets by each cluster's share of the batch."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(2, 4)
        self.clusters = self.add_weight(
            shape=(3, 2),
            initializer=keras.initializers.RandomNormal(seed=5),
            name="clusters",
        )

    def call(self, x):
        z = self.encoder(x)
        squares = ops.sum(ops.square(z[:, None] - self.clusters), axis=2)
        q = 1.0 / (1.0 + squares)
        return q / ops.sum(q, axis=1, keepdims=True)

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            q = self(x, training=True)
            p = q**2 / ops.sum(q, axis=0)
            p = ops.stop_gradient(p / ops.sum(p, axis=1, keepdims=True))
            loss = ops.mean(keras.losses.kl_divergence(p, q))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def deep_embedded_clusters(run):
    def build():
        return models.compiled(DeepClusters(), None, adam())

    trainer = outside.train(run, build, outside.points())
    run.see("predict", trainer.predict(outside.points(), verbose=0))


class MeanTeacher(keras.Model):
    """Consistency with a teacher, that a schedule by steps brings in."""

    def __init__(self):
        super().__init__()
        self.student = mlp(3, 4)
        self.teacher = keras.models.clone_model(self.student)
        self.teacher.set_weights(self.student.get_weights())
        self.teacher.trainable = False

    def call(self, x):
        return self.teacher(x)

    def train_step(self, data):
        (one, two), y = data
        step = ops.cast(self.optimizer.iterations, "float64")
        ramp = ops.exp(-5.0 * ops.square(1.0 - ops.minimum(step / 6.0, 1.0)))
        with tf.GradientTape() as tape:
            known = y >= 0
            logits = self.student(one, training=True)
            loss = self.compute_loss(
                y=ops.maximum(y, 0), y_pred=logits, sample_weight=known
            )
            gap = ops.softmax(logits) - ops.softmax(self.teacher(two))
            loss += 3.0 * ramp * ops.mean(ops.square(gap))
        learn(self.optimizer, tape, loss, self.student.trainable_variables)
        for slow, fast in zip(
            self.teacher.weights, self.student.weights, strict=True
        ):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"loss": loss}


@row(GROUP)
def a_mean_teacher_with_few_labels(run):
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(MeanTeacher(), loss, adam())

    labels = outside.kinds()
    labels[::3] = -1
    data = tf.data.Dataset.zip(
        (outside.batches(*views()), outside.batches(labels))
    )
    run.fit(build, data)


class Masked(keras.Model):
    """keras.io's MAE: visible patches are encoded, hidden ones found."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Dense(6)
        self.places = layers.Embedding(9, 6)
        self.encoder = layers.Dense(6, activation="gelu")
        self.attend = layers.MultiHeadAttention(2, 3)
        self.decoder = layers.Dense(4)
        self.token = self.add_weight(
            shape=(1, 6), initializer="random_normal", name="token"
        )

    def losses_of(self, data):
        pictures, order = data
        patches = tf.image.extract_patches(
            pictures, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
        )
        patches = tf.reshape(patches, (-1, 9, 4))
        hidden, seen = order[:, :6], order[:, 6:]
        embedded = self.embed(patches) + self.places(tf.range(9))
        visible = tf.gather(embedded, seen, axis=1, batch_dims=1)
        visible = self.encoder(visible)
        visible = visible + self.attend(visible, visible)
        unknown = tf.repeat(self.token[None], tf.shape(pictures)[0], axis=0)
        unknown = tf.repeat(unknown, 6, axis=1) + self.places(hidden)
        both = tf.concat([visible, unknown], axis=1)
        made = self.decoder(both + self.attend(both, both))[:, 3:]
        wanted = tf.gather(patches, hidden, axis=1, batch_dims=1)
        loss = self.compute_loss(y=wanted, y_pred=made)
        return loss, wanted, made

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss, wanted, made = self.losses_of(data)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return self.compute_metrics(data, wanted, made, None)

    def test_step(self, data):
        _, wanted, made = self.losses_of(data)
        return self.compute_metrics(data, wanted, made, None)


@row(GROUP)
def masked_autoencoder(run):
    def build():
        return models.compiled(Masked(), "mse", adam(), metrics=["mae"])

    order = models.random(55).random((outside.EXAMPLES, 9)).argsort(axis=1)
    data = outside.batches(outside.images(channels=1), order)
    outside.on_batches(run, build, data, predict=False)


class Jepa(keras.Model):
    """A predictor of a slow network's features at masked places."""

    def __init__(self):
        super().__init__()
        self.context, self.predictor = self.by_place(3), self.by_place(4)
        self.target = keras.models.clone_model(self.context)
        self.target.set_weights(self.context.get_weights())

    def by_place(self, width):
        return keras.Sequential(
            [
                keras.Input((5, width)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(4),
            ]
        )

    def train_step(self, data):
        x, mask = data
        with tf.GradientTape() as tape:
            seen = self.context(ops.where(mask[..., None], 0.0, x))
            wanted = ops.stop_gradient(self.target(x))
            error = ops.mean(ops.abs(self.predictor(seen) - wanted), axis=-1)
            chosen = ops.cast(mask, error.dtype)
            loss = ops.sum(error * chosen) / ops.maximum(ops.sum(chosen), 1.0)
        learn(
            self.optimizer,
            tape,
            loss,
            self.context.trainable_variables
            + self.predictor.trainable_variables,
        )
        rate = 0.9 + 0.01 * ops.cast(self.optimizer.iterations, "float64")
        for slow, fast in zip(
            self.target.variables, self.context.variables, strict=True
        ):
            slow.assign(rate * slow + (1.0 - rate) * fast)
        return {"loss": loss}


@row(GROUP)
def joint_embedding_with_a_masked_mean(run):
    def build():
        return models.compiled(Jepa(), None, adam())

    x = models.random(56).normal(size=(outside.EXAMPLES, 5, 3))
    mask = models.random(57).random((outside.EXAMPLES, 5)) > 0.6
    run.fit(build, outside.batches(x, mask))
