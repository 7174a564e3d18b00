"""Programs from outside: what metrics and losses read, and over which axes."""

import functools

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row
from tests.conformance.outside import mlp

GROUP = "Outside: metrics of others"


def falling():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    return keras.optimizers.Adam(schedule)


def rate_of(optimizer):
    """The rate of a schedule, as tutorials log it."""

    def rate(y, p):
        return optimizer.learning_rate

    return rate


def size_of(layer):
    def size(y, p):
        return ops.norm(layer.kernel) * ops.ones_like(y[:, 0])

    return size


class Distance(keras.metrics.Metric):
    """How far a weight has moved, and a mean error beside it."""

    def __init__(self, layer, name="distance"):
        super().__init__(name=name)
        self._layer = layer
        self.far = self.add_variable((), "zeros", name="far")
        self.error = self.add_variable((), "zeros", name="error")

    def update_state(self, y, p, sample_weight=None):
        self.far.assign(ops.norm(self._layer.kernel))
        self.error.assign_add(ops.sum(ops.abs(y - p)))

    def result(self):
        return {"far": self.far, "error": self.error}


def with_metrics(metrics_of, optimizer=falling, loss="mse"):
    def build():
        model, made = mlp(2), optimizer()
        metrics = metrics_of(model, made)
        return models.compiled(model, loss, made, metrics=metrics)

    return build


for name, metrics_of in {
    "the rate of a schedule as a metric": (
        lambda model, made: [rate_of(made), "mae"]
    ),
    "the size of a weight as a metric": (
        lambda model, made: [size_of(model.layers[-1])]
    ),
    "a metric of how far a weight has moved": (
        lambda model, made: [Distance(model.layers[-1])]
    ),
}.items():
    add(
        GROUP,
        name,
        lambda run, metrics_of=metrics_of: outside.use(
            run,
            with_metrics(metrics_of),
            outside.points(),
            outside.numbers(2),
        ),
    )


@row(GROUP)
def a_decorated_metric_that_was_evaluated_before(run):
    def build():
        optimizer = falling()
        metrics = [tf.function(rate_of(optimizer))]
        return models.compiled(mlp(2), "mse", optimizer, metrics=metrics)

    data = outside.points(), outside.numbers(2)
    trainer = run.trainer(build)
    trainer.evaluate(*data, batch_size=13, verbose=0)
    outside.train(run, None, *data, trainer=trainer)


class Looks(keras.Model):
    """Its `compute_metrics` adds what it looks at to those of Keras."""

    def __init__(self, look, outputs=2):
        super().__init__()
        self.look = look
        self.network = mlp(outputs)
        self.slow = self.add_weight(
            shape=(6, outputs), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return found | self.look(self, x, y_pred)


def moved(model, x, p):
    kernel = model.network.layers[-1].kernel
    model.slow.assign(0.9 * model.slow + 0.1 * kernel)
    return {"moved": ops.norm(kernel - model.slow)}


LOOKS = {
    "the largest output": lambda model, x, p: {"largest": ops.max(p)},
    "the rate and the number of the step": lambda model, x, p: {
        "rate": model.optimizer.learning_rate,
        "step": ops.cast(model.optimizer.iterations, p.dtype),
    },
    "outputs of the new weights": lambda model, x, p: {
        "change": ops.mean(ops.abs(model(x, training=False) - p))
    },
    "a slow copy of a weight": moved,
}


def looks(look):
    return models.compiled(Looks(look), "mse", falling(), metrics=["mae"])


for name, look in LOOKS.items():
    add(
        GROUP,
        f"compute_metrics of one's own: {name}",
        lambda run, look=look: outside.use(
            run,
            functools.partial(looks, look),
            outside.points(),
            outside.numbers(2),
        ),
    )


class TwoHeads(Looks):
    def __init__(self):
        super().__init__(LOOKS["the largest output"])
        self.other = layers.Dense(3)

    def call(self, x, training=False):
        return {"a": self.network(x), "b": self.other(x)}

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = keras.Model.compute_metrics(self, x, y, y_pred, sample_weight)
        return found | {"largest": ops.max(y_pred["b"])}


@row(GROUP)
def compute_metrics_of_ones_own_with_two_outputs(run):
    def build():
        losses = {"a": "mse", "b": "mae"}
        return models.compiled(TwoHeads(), losses, falling())

    y = {"a": outside.numbers(2), "b": outside.numbers(3)}
    outside.use(run, build, outside.points(), y)


class Listed(Looks):
    """It lists its metrics, without the mean of the loss."""

    def __init__(self):
        super().__init__(LOOKS["the largest output"])
        self.error = keras.metrics.Mean(name="error")

    @property
    def metrics(self):
        return [self.error]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(ops.abs(y - y_pred))
        return {"error": self.error.result(), "largest": ops.max(y_pred)}


@row(GROUP)
def metrics_of_ones_own_without_the_loss(run):
    def build():
        return models.compiled(Listed(), "mse", falling())

    outside.use(run, build, outside.points(), outside.numbers(2))


# Over the first axis rows are mixed.
FIRST = {
    "CosineSimilarity": lambda: keras.losses.CosineSimilarity(axis=0),
    "BinaryCrossentropy": (
        lambda: keras.losses.BinaryCrossentropy(from_logits=True, axis=0)
    ),
}
for name, make in FIRST.items():
    add(
        GROUP,
        f"{name} as a loss over the first axis",
        lambda run, make=make: outside.use(
            run,
            lambda: models.compiled(mlp(3), make(), falling()),
            outside.points(),
            keras.utils.to_categorical(outside.kinds(), 3),
        ),
    )

OVER_ROWS = {
    "CosineSimilarity": lambda: keras.metrics.CosineSimilarity(axis=0),
    "PearsonCorrelation": lambda: keras.metrics.PearsonCorrelation(axis=0),
    "ConcordanceCorrelation": (
        lambda: keras.metrics.ConcordanceCorrelation(axis=0)
    ),
    "OneHotIoU": lambda: keras.metrics.OneHotIoU(3, [0, 2], axis=0),
}
for name, make in OVER_ROWS.items():
    add(
        GROUP,
        f"{name} as a metric over the first axis",
        lambda run, make=make: outside.use(
            run,
            lambda: models.compiled(mlp(3), "mse", falling(), metrics=[make()]),
            outside.points(),
            keras.utils.to_categorical(outside.kinds(), 3),
        ),
    )


def towers():
    """Two towers whose product is one number for each row."""
    left, right = keras.Input((4,)), keras.Input((4,))
    one, two = layers.Dense(3)(left), layers.Dense(3)(right)
    model = keras.Model([left, right], ops.sum(one * two, axis=-1))
    metrics = ["mae", "mape", keras.metrics.RootMeanSquaredError()]
    return models.compiled(model, "mse", falling(), metrics=metrics)


@row(GROUP)
def outputs_of_one_axis(run):
    x = [outside.points(), outside.points(seed=8)]
    outside.use(run, towers, x, outside.numbers()[:, 0])


def drawn(seeds, like):
    return keras.random.normal(ops.shape(like), seed=seeds, dtype=like.dtype)


class Jitter(keras.losses.Loss):
    """A loss that keeps its own generator."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, y, p):
        return ops.mean(ops.square(y - p + 0.3 * drawn(self.seeds, p)), -1)


class Sampled(keras.metrics.Metric):
    """A metric that keeps its own generator."""

    def __init__(self, name="sampled"):
        super().__init__(name=name)
        self.seeds = keras.random.SeedGenerator(5)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y - p + drawn(self.seeds, p))))

    def result(self):
        return self.total


class Noise:
    def __init__(self):
        self.seeds = keras.random.SeedGenerator(7)

    def __call__(self, x):
        return x + 0.1 * drawn(self.seeds, x)


class Noisy(layers.Layer):
    """A helper of its author's keeps the generator."""

    def __init__(self):
        super().__init__()
        self.noise = Noise()

    def call(self, x, training=False):
        return self.noise(x) if training else x


@row(GROUP)
def generators_of_a_loss_a_metric_and_a_helper(run):
    def build():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5), Noisy(), layers.Dense(2)]
        )
        return models.compiled(model, Jitter(), falling(), metrics=[Sampled()])

    outside.use(run, build, outside.points(), outside.numbers(2))


class Balanced(keras.losses.BinaryCrossentropy):
    """Rows are weighed by how often their class is in the batch."""

    def __init__(self):
        super().__init__(from_logits=True)

    def call(self, y, p):
        each = ops.square(ops.sigmoid(p) - y)[:, 0]
        often = ops.mean(y)
        return each * ops.where(y[:, 0] > 0.5, 1 - often, often)


class Correlated(keras.losses.Huber):
    """It adds how outputs and targets differ from those of the batch."""

    def call(self, y, p):
        apart = (p - ops.mean(p, axis=0)) * (y - ops.mean(y, axis=0))
        return super().call(y, p) - 0.2 * ops.mean(apart, axis=-1)


@row(GROUP)
def a_class_of_keras_with_weights_of_the_batch(run):
    def build():
        return models.compiled(mlp(1), Balanced(), falling())

    y = (outside.numbers() > 0.4).astype("float64")
    outside.use(run, build, outside.points(), y)


@row(GROUP)
def a_class_of_keras_with_means_of_the_batch(run):
    def build():
        return models.compiled(mlp(2), Correlated(), falling())

    outside.use(run, build, outside.points(), outside.numbers(2))


def bag(attend):
    """The rows of a batch are those of one bag, which share attention."""

    def build():
        inputs = keras.Input((4,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        score = attend(ops.squeeze(layers.Dense(1)(hidden), axis=-1))
        output = layers.Dense(2)(hidden) * ops.expand_dims(score, -1)
        return models.compiled(keras.Model(inputs, output), "mse", falling())

    return build


for name, attend in {
    "Softmax": lambda score: layers.Softmax()(score),
    "an activation": lambda score: layers.Activation("softmax")(score),
    "UnitNormalization": lambda score: layers.UnitNormalization()(score),
}.items():
    add(
        GROUP,
        f"attention of rows by {name}",
        lambda run, attend=attend: outside.use(
            run, bag(attend), outside.points(), outside.numbers(2)
        ),
    )


class Annealed(layers.Layer):
    """Scales by what a metric has come to: a state that batches share."""

    def __init__(self, metric):
        super().__init__()
        self._read = (metric,)

    def call(self, x):
        return x * (1.0 + 0.1 * ops.cast(self._read[0].result(), x.dtype))


def annealed(metric_of):
    def build():
        metric = metric_of()
        inputs = keras.Input((models.FEATURES,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        outputs = layers.Dense(1)(Annealed(metric)(hidden))
        model = keras.Model(inputs, outputs)
        return models.compiled(model, "mse", models.sgd(), metrics=[metric])

    return build


@row(GROUP)
def a_layer_that_reads_a_metric(run):
    build = annealed(keras.metrics.MeanAbsoluteError)
    outside.use(run, build, outside.points(), outside.numbers())


@row(GROUP)
def a_layer_that_reads_a_metric_of_roots(run):
    build = annealed(keras.metrics.RootMeanSquaredError)
    outside.use(run, build, outside.points(), outside.numbers())
