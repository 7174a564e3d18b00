"""Every optimizer of Keras, on dense weights and on repeated indices."""

import inspect

import keras
from keras import layers

from tests.conformance import models
from tests.conformance.harness import Excuse, add, row

GROUP = "Optimizers"
WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
RATE = 0.05


def classes():
    """The optimizers of Keras that stand alone, by name."""
    return {
        name: found
        for name, found in vars(keras.optimizers).items()
        if inspect.isclass(found)
        and issubclass(found, keras.optimizers.Optimizer)
        and name not in WRAPPERS
    }


# Keras's graph loses what this optimizer's `build` assigns, the weights.
FROM_ZERO = (Excuse("", "`ScheduleFreeAdamW`", everywhere=True),)


def _add(name, make, excuses=()):
    def on_dense(run):
        build = models.dense(optimizer=make)
        run.fit(build, models.points(), models.numbers())

    def on_words(run):
        build = models.embedded(optimizer=make)
        run.fit(build, models.words(), models.numbers())

    add(GROUP, f"{name}, dense", on_dense, excuses=excuses)
    add(GROUP, f"{name}, repeated indices", on_words, excuses=excuses)


OPTIONS = {
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "SGD, Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "Adam, amsgrad": ("Adam", {"amsgrad": True}),
    "RMSprop, centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "Adam, clipnorm": ("Adam", {"clipnorm": 0.05}),
    "Adam, global_clipnorm": ("Adam", {"global_clipnorm": 0.1}),
    "Adam, clipvalue": ("Adam", {"clipvalue": 0.01}),
    "SGD, clipnorm": ("SGD", {"clipnorm": 0.05}),
    "SGD, global_clipnorm": ("SGD", {"global_clipnorm": 0.1}),
    "SGD, clipvalue": ("SGD", {"clipvalue": 0.01}),
    "Adam, weight decay": ("Adam", {"weight_decay": 0.1}),
    "Adam, EMA": ("Adam", {"use_ema": True, "ema_momentum": 0.7}),
    "Adam, EMA overwriting": (
        "Adam",
        {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3},
    ),
    "Adam, accumulation": ("Adam", {"gradient_accumulation_steps": 2}),
    "SGD, accumulation of 3": ("SGD", {"gradient_accumulation_steps": 3}),
    "Adam, accumulation and clipping": (
        "Adam",
        {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    ),
    "Adam, loss scale factor": ("Adam", {"loss_scale_factor": 64.0}),
}

for _name, _class in sorted(classes().items()):
    _add(
        _name,
        lambda make=_class: make(RATE),
        FROM_ZERO if _name == "ScheduleFreeAdamW" else (),
    )
for _name, (_class, _options) in OPTIONS.items():
    _add(
        _name,
        lambda make=_class, options=_options: getattr(keras.optimizers, make)(
            RATE, **options
        ),
    )
_add(
    "LossScaleOptimizer",
    lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(RATE), initial_scale=64.0, dynamic_growth_steps=3
    ),
)


def _several():
    first, second = keras.optimizers.SGD(RATE), keras.optimizers.Adam(RATE)
    return keras.optimizers.MultiOptimizer(
        lambda variable: first if "embeddings" in variable.path else second
    )


_add("MultiOptimizer", _several)
for _name, _schedule in {
    "CosineDecay": lambda: keras.optimizers.schedules.CosineDecay(0.1, 6),
    "ExponentialDecay": lambda: keras.optimizers.schedules.ExponentialDecay(
        0.1, 3, 0.5, staircase=True
    ),
    "PiecewiseConstantDecay": (
        lambda: keras.optimizers.schedules.PiecewiseConstantDecay(
            [3, 6], [0.1, 0.01, 0.001]
        )
    ),
}.items():

    def _scheduled(run, schedule=_schedule):
        build = models.dense(
            optimizer=lambda: keras.optimizers.Adam(schedule())
        )
        run.fit(build, models.points(), models.numbers())

    add(GROUP, f"Adam, {_name}", _scheduled)


@row(GROUP)
def schedule_free_from_its_weights(run):
    """Eagerly, Keras begins the momentum at the weights."""
    build = models.dense(
        optimizer=lambda: keras.optimizers.ScheduleFreeAdamW(RATE),
        run_eagerly=True,
    )
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def optimizer_by_name(run):
    build = models.dense(optimizer="rmsprop")
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def words_of_a_mean_with_adam(run):
    """Text as in keras.io's examples: embedded, averaged, classified."""
    build = models.embedded(
        layers.GlobalAveragePooling1D,
        optimizer=lambda: keras.optimizers.Adam(RATE),
        mask_zero=True,
    )
    run.fit(build, models.words(), models.numbers())


@row(GROUP)
def two_embeddings_shared(run):
    """One table, looked up twice in a step."""

    def build():
        first = keras.Input((5,), dtype="int32")
        second = keras.Input((5,), dtype="int32")
        table = layers.Embedding(models.WORDS, 3)
        hidden = layers.Concatenate()([table(first), table(second)])
        outputs = layers.Dense(1)(layers.Flatten()(hidden))
        model = keras.Model([first, second], outputs)
        return models.compiled(model, optimizer=keras.optimizers.Adam(RATE))

    x = [models.words(), models.words(seed=15)]
    run.fit(build, x, models.numbers())


@row(GROUP)
def embedding_tied_to_the_output(run):
    """A table that is looked up and multiplied: its gradient is dense."""

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.ReversibleEmbedding(models.WORDS, 3)

        def call(self, x):
            return self.table(self.table(x), reverse=True)

    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(Tied(), loss, keras.optimizers.Adam(RATE))

    run.fit(build, models.words(), models.words(seed=15))


@row(GROUP)
def embedding_with_a_regularizer(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(models.WORDS, 3, embeddings_regularizer="l2"),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        return models.compiled(model, optimizer=keras.optimizers.Adam(RATE))

    run.fit(build, models.words(), models.numbers())


@row(GROUP)
def embedding_with_a_constraint(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(
                    models.WORDS, 3, embeddings_constraint="unit_norm"
                ),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        return models.compiled(model, optimizer=keras.optimizers.Adam(RATE))

    run.fit(build, models.words(), models.numbers())


@row(GROUP)
def optimizer_made_outside_of_build_model(run):
    """One optimizer, made before; used by what is built now."""
    optimizer = keras.optimizers.Adam(RATE)

    def build():
        return models.dense(optimizer=lambda: optimizer)()

    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def constraint_after_ema_overwriting(run):
    build = models.dense(
        lambda: layers.Dense(4, kernel_constraint="unit_norm"),
        optimizer=lambda: keras.optimizers.SGD(
            0.2, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
        ),
    )
    run.fit(build, models.points(), models.numbers())


@row(GROUP)
def overflow_under_accumulation(run):
    """An infinite gradient of one example, in the middle of a sum."""
    x = models.points()
    x[11, 0] = 1e300

    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
            initial_scale=2.0**40,
        )
        return models.compiled(model, keras.losses.Huber(), optimizer)

    run.fit(build, x, models.numbers())


@row(GROUP)
def places_embedded_once_for_all_rows(run):
    """A lookup that no row decides, as the places of a transformer.

    One device looks each place up once a batch, n replicas n times.
    """

    class Places(layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(models.LENGTH, 3)

        def call(self, inputs):
            return inputs + self.table(keras.ops.arange(models.LENGTH))

    build = models.embedded(
        Places, layers.Flatten, optimizer=lambda: keras.optimizers.Adam(RATE)
    )
    run.fit(build, models.words(), models.numbers())
