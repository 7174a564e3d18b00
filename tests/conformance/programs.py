"""Whole programs, most with steps of their own, as keras.io shows them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf
from tests.conformance import models
from tests.conformance.harness import add, row

GROUP = "Programs"


class Net(keras.Model):
    """Two layers; what the programs derive from."""

    def __init__(self, width=1):
        super().__init__()
        self.inner = layers.Dense(4, activation="tanh")
        self.outer = layers.Dense(width)

    def call(self, x, training=None):
        return self.outer(self.inner(x))


def _program(name, model, loss="mse", optimizer=None, **options):
    """Adds a row of a model class on points."""

    def program(run):
        def build():
            made = optimizer() if optimizer else models.sgd()
            return models.compiled(model(), loss, made, **options)

        run.use(build, models.points(), models.numbers())

    add(GROUP, name, program)


class WithComputeLoss(Net):
    """As in Keras's guide: `compute_loss` and the compiled metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class WithApply(WithComputeLoss):
    """The same by `optimizer.apply`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class WithAMean(Net):
    """A mean over the batch and a tracker of its own."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        loss = tf.reduce_mean(tf.square(y - self(x, training=False)))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class WithASum(WithAMean):
    """A sum over the batch, which replicas' sums add up to."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class WithWeights(Net):
    """It unpacks sample weights, as Keras's guide does."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, y_pred, sample_weight=weight)


class OnlySuper(Net):
    """It calls Keras's own step."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"twice": 2.0 * logs["loss"]}


class OwnTest(Net):
    """Only `test_step` is its own."""

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.compute_loss(y=y, y_pred=y_pred)
        return self.compute_metrics(x, y, y_pred, None)


class OwnPredict(Net):
    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return 2.0 * self(x, training=False)


class Adversarial(Net):
    """A step on perturbed inputs: a gradient inside of the step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        x = x + 0.1 * tf.sign(inner.gradient(loss, x))
        return super().train_step((x, y))


class Clipping(WithComputeLoss):
    """It clips by itself before it applies."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


_program("train_step with compute_loss", WithComputeLoss, metrics=["mae"])
_program(
    "train_step with compute_loss and Adam",
    WithComputeLoss,
    optimizer=lambda: keras.optimizers.Adam(0.05),
)
_program("train_step that returns the loss itself", WithApply)
_program("train_step with a mean of its own", WithAMean)
_program(
    "train_step with a mean and Adam",
    WithAMean,
    optimizer=lambda: keras.optimizers.Adam(0.05),
)
_program(
    "train_step with a sum of its own",
    WithASum,
    optimizer=lambda: models.sgd(0.01),
)
_program("train_step that calls Keras's", OnlySuper)
_program("train_step on perturbed inputs", Adversarial)
_program("train_step that clips by itself", Clipping)
_program("test_step of its own", OwnTest, metrics=["mae"])
_program("predict_step of its own", OwnPredict)
_program(
    "train_step with an optimizer that clips",
    WithComputeLoss,
    optimizer=lambda: models.sgd(clipnorm=0.05),
)


@row(GROUP)
def train_step_with_sample_weights(run):
    run.use(
        lambda: models.compiled(WithWeights(), weighted_metrics=["mae"]),
        models.points(),
        models.numbers(),
        sample_weight=models.weights(),
    )


@row(GROUP)
def train_step_on_even_batches(run):
    """Parts of one size on two replicas, not on three."""
    run.use(
        lambda: models.compiled(WithComputeLoss(), metrics=["mae"]),
        models.points(24),
        models.numbers(24),
    )


@row(GROUP)
def train_step_with_a_mean_on_even_batches(run):
    run.use(
        lambda: models.compiled(WithAMean()),
        models.points(24),
        models.numbers(24),
    )


class TwoOptimizers(Net):
    """An optimizer for each half of the network."""

    def __init__(self):
        super().__init__()
        self.first = keras.optimizers.SGD(0.1)
        self.second = keras.optimizers.Adam(0.05)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for part, optimizer in (
            (self.inner, self.first),
            (self.outer, self.second),
        ):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


_program("two optimizers in train_step", TwoOptimizers)


def _generator():
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(4, activation="tanh"),
            layers.Dense(models.FEATURES),
        ],
        name="generator",
    )


def _discriminator():
    return keras.Sequential(
        [
            keras.Input((models.FEATURES,)),
            layers.Dense(4, activation="tanh"),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class Gan(keras.Model):
    """keras.io's: no `call`, two optimizers, means of losses."""

    def __init__(self, draws=True):
        super().__init__()
        self.generator, self.discriminator = _generator(), _discriminator()
        self.draws = draws
        self.seeds = keras.random.SeedGenerator(7)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, data):
        if self.draws:
            real = data
            noise = keras.random.normal(
                (tf.shape(real)[0], 2),
                dtype=keras.config.floatx(),
                seed=self.seeds,
            )
        else:
            real, noise = data
        size = tf.shape(real)[0]
        made = self.generator(noise)
        both = tf.concat([made, real], axis=0)
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, weights), weights, strict=True)
        )
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros((size, 1)), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(
            zip(tape.gradient(g_loss, weights), weights, strict=True)
        )
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {
            "d_loss": self.d_tracker.result(),
            "g_loss": self.g_tracker.result(),
        }


def _gan(draws):
    def build():
        model = Gan(draws)
        model.compile(
            keras.optimizers.Adam(0.05),
            keras.optimizers.Adam(0.02),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    return build


@row(GROUP)
def gan_whose_noise_comes_with_the_data(run):
    noise = models.points(features=2, seed=31)
    run.fit(_gan(False), models.points(), noise)


@row(GROUP)
def gan_as_on_keras_io(run):
    run.fit(_gan(True), models.points())


class GradientPenalty(Gan):
    """WGAN-GP: a gradient with respect to inputs is part of the loss."""

    def train_step(self, data):
        real, noise = data
        with tf.GradientTape() as tape:
            made = self.generator(noise)
            middle = 0.5 * (made + real)
            with tf.GradientTape() as inner:
                inner.watch(middle)
                judged = self.discriminator(middle)
            slopes = inner.gradient(judged, middle)
            norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1))
            loss = (
                tf.reduce_mean(self.discriminator(made))
                - tf.reduce_mean(self.discriminator(real))
                + tf.reduce_mean(tf.square(norms - 1.0))
            )
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(loss, weights), weights)
        self.d_tracker.update_state(loss)
        return {"d_loss": self.d_tracker.result()}


@row(GROUP)
def gan_with_a_gradient_penalty(run):
    def build():
        model = GradientPenalty(False)
        model.compile(keras.optimizers.Adam(0.05), models.sgd(), None)
        return model

    noise = models.points(features=2, seed=31)
    run.fit(build, models.points(), noise)


class Sampling(layers.Layer):
    """Draws from a normal distribution."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(
            tf.shape(mean), dtype=mean.dtype, seed=self.seeds
        )
        return mean + tf.exp(0.5 * log_variance) * noise


class Vae(keras.Model):
    """keras.io's: sums over features, means over the batch, no `call`."""

    def __init__(self, draws=True):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.mean, self.log_variance = layers.Dense(2), layers.Dense(2)
        self.sampling = Sampling() if draws else None
        self.decoder = keras.Sequential(
            [layers.Dense(4, activation="tanh"), layers.Dense(4)]
        )
        self.trackers = [
            keras.metrics.Mean(name=name)
            for name in ("loss", "reconstruction", "kl")
        ]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            hidden = self.hidden(data)
            mean, log_variance = self.mean(hidden), self.log_variance(hidden)
            point = mean
            if self.sampling is not None:
                point = self.sampling([mean, log_variance])
            error = tf.square(data - self.decoder(point))
            reconstruction = tf.reduce_mean(tf.reduce_sum(error, axis=1))
            kl = -0.5 * (
                1 + log_variance - tf.square(mean) - tf.exp(log_variance)
            )
            kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        for tracker, value in zip(
            self.trackers, (total, reconstruction, kl), strict=True
        ):
            tracker.update_state(value)
        return {t.name: t.result() for t in self.trackers}


def _vae(draws):
    def build():
        model = Vae(draws)
        model.compile(keras.optimizers.Adam(0.05), jit_compile=False)
        return model

    return build


@row(GROUP)
def vae_with_a_train_step(run):
    run.fit(_vae(True), models.points())


@row(GROUP)
def vae_with_a_train_step_without_noise(run):
    run.fit(_vae(False), models.points())


def _vae_by_add_loss(draws):
    class Divergence(layers.Layer):
        def call(self, inputs):
            mean, log_variance = inputs
            kl = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
            self.add_loss(-0.5 * tf.reduce_mean(kl))
            return inputs

    def build():
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        mean, log_variance = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        mean, log_variance = Divergence()([mean, log_variance])
        point = Sampling()([mean, log_variance]) if draws else mean
        outputs = layers.Dense(4)(point)
        model = keras.Model(inputs, outputs)
        return models.compiled(model, "mse", keras.optimizers.Adam(0.05))

    return build


@row(GROUP)
def vae_with_add_loss(run):
    run.use(_vae_by_add_loss(True), models.points(), models.points())


@row(GROUP)
def vae_with_add_loss_without_noise(run):
    run.use(_vae_by_add_loss(False), models.points(), models.points())


class Siamese(keras.Model):
    """keras.io's: three inputs, no target, the triplet's loss."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.Sequential(
            [layers.Dense(4, activation="tanh"), layers.Dense(2)]
        )
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, inputs):
        anchor, near, far = (self.embedding(x) for x in inputs)
        return (
            tf.reduce_sum(tf.square(anchor - near), -1),
            tf.reduce_sum(tf.square(anchor - far), -1),
        )

    def loss_of(self, data):
        near, far = self(data)
        return tf.maximum(near - far + 0.5, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.embedding.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.loss_of(data))
        return {"loss": self.tracker.result()}


class SiameseMean(Siamese):
    def loss_of(self, data):
        return tf.reduce_mean(super().loss_of(data))


def _triplets():
    triplet = tuple(models.points(seed=seed) for seed in (41, 42, 43))
    return tf.data.Dataset.from_tensor_slices(triplet).batch(8)


for _class in (Siamese, SiameseMean):

    def _siamese(run, model=_class):
        def build():
            made = model()
            made.compile(keras.optimizers.Adam(0.02), jit_compile=False)
            return made

        trainer = run.use(build, _triplets())
        scores = trainer.evaluate(_triplets(), verbose=0)
        run.see("scores", scores)

    _what = "a mean" if _class is SiameseMean else "a vector"
    add(GROUP, f"siamese network of triplets, {_what} of losses", _siamese)


@row(GROUP)
def contrastive_pairs_with_a_compiled_loss(run):
    """Two towers, a distance, a loss of one's own; a target for each pair."""

    def contrast(y, distance):
        far = tf.square(tf.maximum(1.0 - distance, 0.0))
        return tf.reduce_mean((1.0 - y) * tf.square(distance) + y * far)

    def build():
        first, second = keras.Input((4,)), keras.Input((4,))
        tower = layers.Dense(3, activation="tanh")
        gap = layers.Subtract()([tower(first), tower(second)])
        distance = layers.Lambda(
            lambda g: tf.sqrt(tf.reduce_sum(tf.square(g), 1, True) + 1e-7),
            output_shape=(1,),
        )(gap)
        return models.compiled(keras.Model([first, second], distance), contrast)

    x = [models.points(), models.points(seed=24)]
    y = (models.kinds() > 0).astype(keras.config.floatx())[:, None]
    run.use(build, x, y)


@row(GROUP)
def distillation_with_a_teacher(run):
    """`compute_loss` adds the distance to a frozen teacher."""

    class Distiller(keras.Model):
        def __init__(self):
            super().__init__()
            self.student = layers.Dense(1)
            self.teacher = layers.Dense(1)
            self.teacher.trainable = False

        def call(self, x, training=None):
            self.teacher(x)
            return self.student(x)

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            gap = keras.losses.mean_squared_error(self.teacher(x), y_pred)
            return 0.3 * loss + 0.7 * tf.reduce_mean(gap)

    def build():
        return models.compiled(Distiller())

    run.use(build, models.points(), models.numbers())


@row(GROUP)
def an_autoencoder(run):
    run.use(models.dense(width=4), models.points(), models.points())


class Block(layers.Layer):
    """A block of a transformer, no dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=dropout)
        self.first, self.second = (
            layers.LayerNormalization(epsilon=1e-6) for _ in range(2)
        )
        self.wide, self.narrow = (
            layers.Dense(6, activation="gelu"),
            layers.Dense(3),
        )
        self.supports_masking = True

    def call(self, x, training=None, mask=None):
        x = self.first(x + self.attention(x, x, training=training))
        return self.second(x + self.narrow(self.wide(x)))


def _transformer(dropout=0.0, **options):
    def build():
        inputs = keras.Input((5,), dtype="int32")
        places = tf.range(5)
        table = layers.Embedding(models.WORDS, 3, mask_zero=True)
        x = table(inputs) + layers.Embedding(5, 3)(places)
        x = Block(dropout)(x)
        x = layers.GlobalAveragePooling1D()(x)
        outputs = layers.Dense(3, activation="softmax")(x)
        return models.compiled(
            keras.Model(inputs, outputs),
            "sparse_categorical_crossentropy",
            keras.optimizers.AdamW(0.01, **options),
            metrics=["accuracy"],
        )

    return build


@row(GROUP)
def a_transformer_that_classifies_words(run):
    run.use(_transformer(), models.words(), models.kinds())


@row(GROUP)
def a_transformer_with_clipping(run):
    build = _transformer(global_clipnorm=0.1)
    run.use(build, models.words(), models.kinds())


@row(GROUP)
def a_transformer_with_dropout(run):
    run.use(_transformer(0.2), models.words(), models.kinds())


@row(GROUP)
def a_language_model(run):
    """The next word for each word, padding ignored by the loss."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(models.WORDS, 3),
                layers.GRU(4, return_sequences=True),
                layers.Dense(models.WORDS),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0
        )
        return models.compiled(model, loss, keras.optimizers.Adam(0.02))

    run.use(build, models.words(), np.roll(models.words(), -1, axis=1))


@row(GROUP)
def sequence_to_sequence(run):
    """Encoder and decoder with masks, teacher forcing."""

    def build():
        source = keras.Input((5,), dtype="int32")
        target = keras.Input((5,), dtype="int32")
        table = layers.Embedding(models.WORDS, 3, mask_zero=True)
        _, state = layers.GRU(4, return_state=True)(table(source))
        out = layers.GRU(4, return_sequences=True)(
            table(target), initial_state=state
        )
        out = layers.Dense(models.WORDS)(out)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(
            keras.Model([source, target], out),
            loss,
            keras.optimizers.RMSprop(0.01),
            weighted_metrics=["accuracy"],
        )

    x = [models.words(), models.words(seed=15)]
    run.use(build, x, np.roll(x[1], -1, axis=1))


@row(GROUP)
def matrix_factorization(run):
    """A recommender: embeddings of users and of items, a dot product."""

    def build():
        user, item = (keras.Input((1,), dtype="int32") for _ in range(2))
        users = layers.Flatten()(layers.Embedding(5, 3)(user))
        items = layers.Flatten()(layers.Embedding(6, 3)(item))
        out = layers.Dot(1)([users, items])
        return models.compiled(
            keras.Model([user, item], out), "mse", keras.optimizers.Adam(0.05)
        )

    generator = models.random(33)
    x = [
        generator.integers(0, 5, (29, 1)),
        generator.integers(0, 6, (29, 1)),
    ]
    run.use(build, x, models.numbers())


@row(GROUP)
def a_segmentation_of_images(run):
    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
        x = layers.BatchNormalization(synchronized=True)(x)
        x = layers.Conv2DTranspose(3, 3, padding="same")(x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(
            keras.Model(inputs, x), loss, metrics=["accuracy"]
        )

    y = models.random(9).integers(0, 3, size=(29, 6, 6, 1))
    run.use(build, models.images(), y)


@row(GROUP)
def fine_tuning_of_a_loaded_backbone(run):
    """A backbone with BatchNormalization, frozen and called in inference."""

    def build():
        backbone = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(3),
                layers.BatchNormalization(),
            ]
        )
        backbone.trainable = False
        inputs = keras.Input((4,))
        outputs = layers.Dense(1)(backbone(inputs, training=False))
        return models.compiled(keras.Model(inputs, outputs))

    run.use(build, models.points(), models.numbers())


@row(GROUP)
def right_after_a_refused_call(run):
    """A mistake, told in one line, and then the right call."""
    x, y = models.points(), models.numbers()
    trainer = run.trainer(models.dense())
    refused = (mgpu_tf.ConfigurationError, ValueError)
    try:
        trainer.fit(x, y[:5], batch_size=8, verbose=0)
    except refused:
        run.see("refused", 1)
    run.use(models.dense(), x, y)
