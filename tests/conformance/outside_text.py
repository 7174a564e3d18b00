"""Text and speech from outside: masks, teacher forcing, paths, captions."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row
from tests.conformance.outside import LENGTH, WORDS, learn, mlp
from tests.conformance.outside_losses import masked_acc, masked_loss

GROUP = "Outside: text"


def adam(rate=0.02):
    return keras.optimizers.Adam(rate)


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Attention Is All You Need: up by steps, down by their root."""

    def __init__(self, width, warmup=4):
        super().__init__()
        self.width = ops.cast(width, "float64")
        self.warmup = warmup

    def __call__(self, step):
        step = ops.cast(step + 1, "float64")
        slope = step * self.warmup**-1.5
        return ops.rsqrt(self.width) * ops.minimum(ops.rsqrt(step), slope)


class Places(layers.Layer):
    """Word vectors with waves for their places; zeros are masked."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.embed = layers.Embedding(WORDS, width, mask_zero=True)
        at = np.arange(LENGTH)[:, None] / 10.0 ** np.arange(width)[None]
        self.waves = tf.constant(np.sin(at))

    def compute_mask(self, x, mask=None):
        return self.embed.compute_mask(x)

    def call(self, x):
        return self.embed(x) * self.width**0.5 + self.waves


class Translator(keras.Model):
    """TensorFlow's tutorial: attention, cross and causal, by implicit masks."""

    def __init__(self):
        super().__init__()
        self.source, self.target = Places(6), Places(6)
        self.attend = layers.MultiHeadAttention(2, 3)
        self.causal = layers.MultiHeadAttention(2, 3)
        self.cross = layers.MultiHeadAttention(2, 3)
        self.add = layers.Add()
        self.norm = [layers.LayerNormalization() for _ in range(3)]
        self.head = layers.Dense(WORDS)

    def call(self, inputs):
        context, x = inputs
        context = self.source(context)
        context = self.norm[0](
            self.add([context, self.attend(query=context, value=context)])
        )
        x = self.target(x)
        seen = self.causal(query=x, value=x, use_causal_mask=True)
        x = self.norm[1](self.add([x, seen]))
        x = self.norm[2](self.add([x, self.cross(query=x, value=context)]))
        logits = self.head(x)
        with contextlib.suppress(AttributeError):
            del logits._keras_mask
        return logits


# The gradient of a bias of keys is rounding, which this epsilon enlarges: with
# the rows of each batch in another order, Keras's own differs by 1.1e-9.
@row(GROUP, tolerance=1e-8)
def translation_with_a_masked_loss_and_metric(run):
    def build():
        optimizer = keras.optimizers.Adam(
            Warmup(6), beta_1=0.9, beta_2=0.98, epsilon=1e-9
        )
        return models.compiled(
            Translator(),
            masked_loss,
            optimizer,
            metrics=[masked_acc],
        )

    context, target = outside.words(), outside.words(16)
    data = outside.batches((context, target), outside.words(17))
    outside.on_batches(run, build, data)


class Captions(keras.Model):
    """keras.io's: several captions a picture, gradients of each summed."""

    def __init__(self):
        super().__init__()
        self.pictures = mlp(6, 4)
        self.embed = layers.Embedding(WORDS, 6)
        self.decode = layers.GRU(6, return_sequences=True)
        self.head = layers.Dense(WORDS, activation="softmax")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="accuracy")

    @property
    def metrics(self):
        return [self.loss_tracker, self.acc_tracker]

    def calculate_loss(self, y_true, y_pred, mask):
        loss = self.loss(y_true, y_pred)
        mask = tf.cast(mask, loss.dtype)
        return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)

    def calculate_accuracy(self, y_true, y_pred, mask):
        right = tf.equal(y_true, tf.argmax(y_pred, axis=2))
        right = tf.math.logical_and(mask, right)
        right = tf.cast(right, tf.float32)
        return tf.reduce_sum(right) / tf.reduce_sum(tf.cast(mask, tf.float32))

    def of_caption(self, picture, words, training):
        given, wanted = words[:, :-1], words[:, 1:]
        mask = tf.math.not_equal(wanted, 0)
        x = self.embed(given) + picture[:, None]
        made = self.head(self.decode(x, training=training))
        return (
            self.calculate_loss(wanted, made, mask),
            self.calculate_accuracy(wanted, made, mask),
        )

    def step(self, data, training):
        pictures, captions = data
        total, accuracy = 0.0, 0.0
        seen = self.pictures(pictures)
        for i in range(2):
            with tf.GradientTape() as tape:
                loss, right = self.of_caption(
                    seen if i else self.pictures(pictures),
                    captions[:, i],
                    training,
                )
                total, accuracy = total + loss, accuracy + right
            if training:
                weights = (
                    self.embed.trainable_variables
                    + self.decode.trainable_variables
                    + self.head.trainable_variables
                )
                if not i:
                    weights = weights + self.pictures.trainable_variables
                learn(self.optimizer, tape, loss, weights)
        self.loss_tracker.update_state(total)
        self.acc_tracker.update_state(accuracy / 2.0)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, data):
        return self.step(data, True)

    def test_step(self, data):
        return self.step(data, False)


def _captions():
    first, second = outside.words(), outside.words(18)
    both = np.stack([first, second], axis=1)
    # No batch without a word to find.
    both[:, :, 1] = np.maximum(both[:, :, 1], 1)
    return outside.points(), both


@row(GROUP)
def image_captioning(run):
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        model = models.compiled(Captions(), loss)
        model.pictures(np.zeros((1, 4)))
        model.head(model.decode(model.embed(np.zeros((1, LENGTH), "int32"))))
        model.optimizer.build(model.trainable_variables)
        return model

    data = outside.batches(*_captions())
    outside.on_batches(run, build, data, predict=False)


class MaskedWords(keras.Model):
    """keras.io's BERT: losses of the masked places by sample weights."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(WORDS, 6)
        self.attend = layers.MultiHeadAttention(2, 3)
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(WORDS, activation="softmax")
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(
            reduction=None
        )
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        x = self.embed(x)
        return self.head(self.norm(x + self.attend(x, x)))

    def train_step(self, inputs):
        if len(inputs) == 3:
            features, labels, sample_weight = inputs
        else:
            features, labels = inputs
            sample_weight = None
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(
                labels, predictions, sample_weight=sample_weight
            )
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": self.loss_tracker.result()}


@row(GROUP)
def masked_language_model(run):
    def build():
        return models.compiled(MaskedWords(), None, adam())

    ids = outside.words(padded=False)
    chosen = models.random(71).random(ids.shape) < 0.4
    data = np.where(chosen, 0, ids), ids, chosen.astype("float64")
    trainer = run.trainer(build)
    run.fit(None, outside.batches(*data), trainer=trainer)
    run.see("predict", trainer.predict(ids, batch_size=13, verbose=0))


class Attention(layers.Layer):
    """Bahdanau's."""

    def __init__(self, units):
        super().__init__()
        self.one, self.two = layers.Dense(units), layers.Dense(units)
        self.score = layers.Dense(1)

    def call(self, query, values):
        score = self.score(
            tf.nn.tanh(self.one(query[:, None]) + self.two(values))
        )
        weights = tf.nn.softmax(score, axis=1)
        return tf.reduce_sum(weights * values, axis=1)


class Forced(keras.Model):
    """TensorFlow's older tutorial: a loop over time, each given the truth."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(WORDS, 6)
        self.encoder = layers.GRU(6, return_sequences=True, return_state=True)
        self.attention = Attention(4)
        self.cell = layers.GRU(6, return_state=True)
        self.head = layers.Dense(WORDS)
        self.loss_object = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )

    def loss_function(self, real, found):
        mask = tf.math.logical_not(tf.math.equal(real, 0))
        loss = self.loss_object(real, found)
        return tf.reduce_mean(loss * tf.cast(mask, dtype=loss.dtype))

    def train_step(self, data):
        source, target = data
        loss = 0.0
        with tf.GradientTape() as tape:
            values, hidden = self.encoder(self.embed(source))
            given = tf.expand_dims(target[:, 0], 1)
            for t in range(1, target.shape[1]):
                context = self.attention(hidden, values)
                x = tf.concat([context[:, None], self.embed(given)], axis=-1)
                out, hidden = self.cell(x, initial_state=hidden)
                loss += self.loss_function(target[:, t], self.head(out))
                given = tf.expand_dims(target[:, t], 1)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss / int(target.shape[1])}


@row(GROUP)
def teacher_forcing_by_a_loop_over_time(run):
    def build():
        return models.compiled(Forced(), None, adam())

    data = outside.words(), outside.words(19)
    run.fit(build, outside.batches(*data))


class NonPadding(keras.losses.Loss):
    """keras.io's named entities: the mean over what is no padding."""

    def call(self, y_true, y_pred):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(
            from_logits=False, reduction=None
        )
        loss = loss_fn(y_true, y_pred)
        mask = ops.cast(y_true > 0, loss.dtype)
        loss = loss * mask
        return ops.sum(loss) / ops.sum(mask)


@row(GROUP)
def named_entities_without_padding(run):
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6)(inputs)
        x = x + layers.MultiHeadAttention(2, 3)(x, x)
        x = layers.Dense(4, activation="softmax")(x)
        return models.compiled(keras.Model(inputs, x), NonPadding(), adam())

    ids = outside.words()
    outside.use(run, build, ids, np.where(ids == 0, 0, 1 + ids % 3))


@row(GROUP)
def spans_by_a_start_and_an_end(run):
    """keras.io's BERT on SQuAD: two heads over places."""

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6)(inputs)
        x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
        heads = [
            layers.Activation("softmax", name=name)(
                layers.Flatten()(layers.Dense(1, use_bias=False)(x))
            )
            for name in ("start", "end")
        ]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=False)
        model = keras.Model(inputs, heads)
        return models.compiled(
            model, [loss, loss], adam(), metrics=["accuracy", "accuracy"]
        )

    starts = outside.kinds(LENGTH)
    ends = np.maximum(starts, outside.kinds(LENGTH, seed=13))
    outside.use(run, build, outside.words(), [starts, ends])


@row(GROUP)
def sentences_by_a_cosine(run):
    """keras.io's sentence BERT: one encoder for both, a dot of unit rows."""

    def build():
        words = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6, mask_zero=True)(words)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.UnitNormalization(axis=1)(x)
        encoder = keras.Model(words, x)
        pair = [keras.Input((LENGTH,), dtype="int32") for _ in range(2)]
        likeness = layers.Dot(axes=1)([encoder(p) for p in pair])
        return models.compiled(
            keras.Model(pair, likeness), "mse", adam(), metrics=["mse"]
        )

    pair = [outside.words(), outside.words(20)]
    outside.use(run, build, pair, np.tanh(outside.numbers()))


class Electra(keras.Model):
    """A small generator replaces words, a discriminator tells which."""

    def __init__(self):
        super().__init__()
        self.generator = self.network(WORDS)
        self.discriminator = self.network(1)
        self.found = keras.metrics.BinaryAccuracy(threshold=0.0, name="found")

    def network(self, width):
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6)(inputs)
        x = layers.Conv1D(6, 3, padding="same", activation="gelu")(x)
        return keras.Model(inputs, layers.Dense(width)(x))

    def train_step(self, data):
        ids, masked = data
        given = tf.where(masked, tf.zeros_like(ids), ids)
        with tf.GradientTape() as tape:
            logits = self.generator(given, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits)
            g_loss = tf.reduce_mean(tf.boolean_mask(losses, masked))
            drawn = tf.argmax(tf.stop_gradient(logits), -1, ids.dtype)
            fake = tf.where(masked, drawn, ids)
            real = tf.cast(fake == ids, losses.dtype)
            judged = self.discriminator(fake, training=True)[..., 0]
            d_loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(real, judged)
            )
            loss = g_loss + 5.0 * d_loss
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.found.update_state(real, judged)
        return {"loss": loss, "found": self.found.result()}


@row(GROUP)
def electra_with_replaced_words(run):
    def build():
        return models.compiled(Electra(), None, adam())

    ids = outside.words(padded=False)
    masked = models.random(72).random(ids.shape) < 0.4
    run.fit(build, outside.batches(ids, masked))


class Speech(keras.Model):
    """keras.io's speech model: one-hot targets, smoothed, masked by weights."""

    def __init__(self):
        super().__init__()
        self.listen = layers.Conv1D(6, 3, 2, padding="same", activation="relu")
        self.embed = layers.Embedding(WORDS, 6)
        self.attend = layers.MultiHeadAttention(2, 3)
        self.head = layers.Dense(WORDS)
        self.loss_metric = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_metric]

    def call(self, inputs):
        source, target = inputs
        heard = self.listen(ops.sin(source))
        return self.head(self.attend(self.embed(target), heard))

    def loss_of(self, batch):
        source, target = batch["source"], batch["target"]
        given, wanted = target[:, :-1], target[:, 1:]
        made = self([source, given])
        one_hot = ops.one_hot(wanted, WORDS)
        mask = ops.logical_not(ops.equal(wanted, 0))
        return self.compute_loss(None, one_hot, made, sample_weight=mask)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss_of(batch)
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}

    def test_step(self, batch):
        self.loss_metric.update_state(self.loss_of(batch))
        return {"loss": self.loss_metric.result()}


@row(GROUP)
def speech_with_smoothed_targets_and_a_mask(run):
    def build():
        loss = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        )
        return models.compiled(Speech(), loss, adam())

    source = models.random(73).normal(size=(outside.EXAMPLES, 8, 3))
    data = outside.batches({"source": source, "target": outside.words()})
    outside.on_batches(run, build, data, predict=False)


class WordVectors(keras.Model):
    """TensorFlow's word2vec: a target against one true and other words."""

    def __init__(self):
        super().__init__()
        self.target = layers.Embedding(WORDS, 4, name="target")
        self.context = layers.Embedding(WORDS, 4, name="context")

    def call(self, pair):
        target, context = pair
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        return tf.einsum(
            "be,bce->bc", self.target(target), self.context(context)
        )


@row(GROUP)
def word_vectors_by_negative_words(run):
    def build():
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        return models.compiled(
            WordVectors(), loss, adam(), metrics=["accuracy"]
        )

    words = outside.words(padded=False)
    labels = np.eye(4)[np.zeros(outside.EXAMPLES, int)]
    data = outside.batches((words[:, :1], words[:, 1:]), labels)
    outside.on_batches(run, build, data)


class Perplexity(keras.metrics.Metric):
    """keras-hub's: the exponent of a mean over what is not masked."""

    def __init__(self, mask_token_id=None, name="perplexity", **options):
        super().__init__(name=name, **options)
        self.mask_token_id = mask_token_id
        self.cross = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )
        self.total = self.add_weight(shape=(), initializer="zeros")
        self.count = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        size = ops.cast(ops.shape(y_true)[0], self.dtype)
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, self.dtype)
        if self.mask_token_id is not None:
            mask = ops.cast(
                ops.logical_not(ops.equal(y_true, self.mask_token_id)),
                self.dtype,
            )
            sample_weight = (
                mask
                if sample_weight is None
                else ops.multiply(mask, sample_weight)
            )
        loss = self.cross(y_true, y_pred, sample_weight=sample_weight)
        if sample_weight is None:
            self.count.assign_add(size * ops.shape(y_true)[1])
        else:
            self.count.assign_add(ops.sum(sample_weight))
        self.total.assign_add(loss)

    def result(self):
        mean = ops.where(ops.equal(self.count, 0), 0.0, self.total / self.count)
        return ops.exp(mean)


@row(GROUP)
def a_generator_of_text_with_perplexity(run):
    """keras.io's GPT with keras-hub: reversible words, weights for places."""

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        embed = layers.Embedding(WORDS, 6, mask_zero=True)
        places = layers.Embedding(LENGTH, 6)(ops.arange(LENGTH))
        x = embed(inputs) + places
        x = x + layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization(epsilon=1e-5)(x)
        x = layers.Dense(WORDS)(x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(
            keras.Model(inputs, x),
            loss,
            adam(),
            weighted_metrics=[Perplexity(mask_token_id=0), "accuracy"],
        )

    words = outside.words(length=LENGTH + 1)
    x, y = words[:, :-1], words[:, 1:]
    weight = (y != 0).astype("float64")
    outside.use(run, build, x, y, sample_weight=weight)


class RandomField(keras.Model):
    """A linear-chain CRF: transitions learn, paths are summed by a scan."""

    def __init__(self, tags=3):
        super().__init__()
        self.tags = tags
        self.embed, self.score = layers.Embedding(WORDS, 6), layers.Dense(tags)
        self.moves = self.add_weight(
            shape=(tags, tags), initializer="zeros", name="moves"
        )

    def call(self, x):
        return self.score(self.embed(x))

    def likelihood(self, x, tags):
        scores = self(x, training=True)
        one_hot = tf.one_hot(tags, self.tags, dtype=scores.dtype)
        path = tf.reduce_sum(scores * one_hot, axis=[1, 2])
        pairs = tf.stack([tags[:, :-1], tags[:, 1:]], axis=-1)
        path += tf.reduce_sum(tf.gather_nd(self.moves, pairs), axis=1)
        steps = tf.transpose(scores, [1, 0, 2])

        def forward(before, now):
            return now + tf.reduce_logsumexp(
                before[:, :, None] + self.moves[None], axis=1
            )

        alpha = tf.scan(forward, steps[1:], initializer=steps[0])
        return path - tf.reduce_logsumexp(alpha[-1], axis=1)

    def train_step(self, data):
        x, tags = data
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.likelihood(x, tags))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": -tf.reduce_mean(self.likelihood(*data))}


@row(GROUP)
def a_conditional_random_field(run):
    def build():
        return models.compiled(RandomField(), None, adam())

    ids = outside.words(padded=False)
    outside.use(run, build, ids, ids % 3)


@row(GROUP)
def sequences_with_a_mask_that_a_layer_makes(run):
    """A `Masking` of vectors, two recurrent layers, a loss by step."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((LENGTH, 2)),
                layers.Masking(0.0),
                layers.LSTM(4, return_sequences=True),
                layers.TimeDistributed(layers.Dense(2)),
            ]
        )
        loss = keras.losses.Huber()
        return models.compiled(
            model, loss, adam(), weighted_metrics=["mae", "mse"]
        )

    x = models.random(74).normal(size=(outside.EXAMPLES, LENGTH, 2))
    x *= (outside.words() > 0)[..., None]
    outside.use(run, build, x, np.cumsum(x, axis=1))


class HardPairs(keras.losses.Loss):
    """A bootstrapped loss: the hardest half of all tokens of the batch."""

    def call(self, y_true, y_pred):
        losses = ops.sparse_categorical_crossentropy(
            y_true, y_pred, from_logits=True
        )
        losses = ops.reshape(losses, (-1,))
        count = tf.shape(losses)[0] // 2
        hardest, _ = tf.math.top_k(losses, count)
        return tf.reduce_mean(hardest)


@row(GROUP)
def the_hardest_tokens_of_a_batch(run):
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6)(inputs)
        x = layers.Dense(WORDS)(ops.tanh(x))
        return models.compiled(keras.Model(inputs, x), HardPairs(), adam())

    outside.use(run, build, outside.words(), outside.words(21))
