"""Updates whose order does not matter: the sum of N of them is known.

The loss is linear in the weights, so every gradient is the same whatever the
weights are. Then the slots of an optimizer after N updates are those of one
device, whichever worker made which, unless an update was lost or was made on
top of half of another.
"""

import keras
import numpy as np

import mgpu_tf
from tests.parity import cases as parity

STEPS, BATCH = 240, 2


SHAPES = {"large": (120, 90), "wide": (8, 12), "short": (5,), "one": ()}


class Linear(keras.layers.Layer):
    """Returns the sum of its weights, each times its slope.

    Weights of several sizes: those that travel alone, and those in packs.
    """

    def __init__(self, constraint=None, **options):
        super().__init__(dtype="float64", **options)
        self.constraint = constraint

    def build(self, shape):
        generator = np.random.default_rng(0)
        self.slopes, self.held = [], []
        for name, shape in SHAPES.items():
            # Of sixteenths, so that their sums are exact.
            slope = generator.integers(3, 40, size=shape) / 16
            self.slopes.append(slope)
            self.held.append(
                self.add_weight(
                    shape=shape,
                    initializer="ones",
                    name=name,
                    constraint=self.constraint,
                )
            )

    def call(self, x):
        total = sum(
            keras.ops.sum(weight * slope)
            for weight, slope in zip(self.held, self.slopes, strict=True)
        )
        return 0 * x + total


class Rows(keras.layers.Layer):
    """Returns the sum of rows that are looked up, some of them repeatedly."""

    IDS = (3, 7, 3, 3, 20, 7)

    def __init__(self):
        super().__init__(dtype="float64")
        self.tables = [
            keras.layers.Embedding(
                rows, 8, embeddings_initializer="ones", dtype="float64"
            )
            for rows in (30, 1500)
        ]

    def call(self, x):
        total = sum(
            keras.ops.sum(
                table(np.array(self.IDS)) * np.arange(3.0, 51).reshape(6, 8)
            )
            for table in self.tables
        )
        return 0 * x + total / 16


def model_of(optimizer, layer=Linear):
    """Returns a function that builds the model with an optimizer."""

    def build():
        inputs = keras.Input((1,), dtype="float64")
        model = keras.Model(inputs, layer()(inputs))
        model.compile(optimizer(), loss=lambda y, p: p + 0 * y)
        return model

    return build


def of_two(one, other):
    """One optimizer for a weight, and another for the others."""
    return o.MultiOptimizer(lambda v: one if "wide" in v.path else other)


o = keras.optimizers
decay = o.schedules.PolynomialDecay(1e-2, STEPS, end_learning_rate=1e-4)
# How to make it, and whether the weights are independent of the order as
# well: not those where an update depends on its number.
OPTIMIZERS = {
    "sgd": (lambda: o.SGD(1e-3), True),
    "sgd_schedule": (lambda: o.SGD(decay), True),
    "sgd_decay": (lambda: o.SGD(1e-3, weight_decay=0.1), True),
    "momentum": (lambda: o.SGD(1e-3, momentum=0.99), True),
    "nesterov": (lambda: o.SGD(1e-3, momentum=0.99, nesterov=True), True),
    "clipped": (lambda: o.SGD(1e-3, momentum=0.99, global_clipnorm=1.0), True),
    "rmsprop": (lambda: o.RMSprop(1e-3), True),
    "rmsprop_all": (
        lambda: o.RMSprop(1e-3, momentum=0.99, centered=True),
        True,
    ),
    "adagrad": (lambda: o.Adagrad(1e-3), True),
    "adadelta": (lambda: o.Adadelta(1e-1), True),
    "ftrl": (lambda: o.Ftrl(1e-2, l1_regularization_strength=1e-3), True),
    "lion": (lambda: o.Lion(1e-3), True),
    "adam": (lambda: o.Adam(1e-3), False),
    "amsgrad": (lambda: o.Adam(1e-3, amsgrad=True), False),
    "adamw": (lambda: o.AdamW(1e-3, weight_decay=0.1), False),
    "adamax": (lambda: o.Adamax(1e-3), False),
    "nadam": (lambda: o.Nadam(1e-3), False),
    "lamb": (lambda: o.Lamb(1e-3), False),
    "adafactor": (lambda: o.Adafactor(1e-3), False),
    "muon": (lambda: o.Muon(1e-3, rms_rate=None), False),
    "schedule_free": (lambda: o.ScheduleFreeAdamW(1e-3), False),
    "ema": (
        lambda: o.SGD(1e-3, momentum=0.99, use_ema=True, ema_momentum=0.99),
        True,
    ),
    "multi": (
        lambda: of_two(o.SGD(1e-3, momentum=0.99), o.RMSprop(1e-3)),
        True,
    ),
    "accumulating": (
        lambda: o.SGD(1e-3, momentum=0.99, gradient_accumulation_steps=2),
        True,
    ),
    "scaled": (
        lambda: o.LossScaleOptimizer(
            o.SGD(1e-3, momentum=0.99),
            initial_scale=2.0,
            dynamic_growth_steps=STEPS // 8,
        ),
        True,
    ),
    "constraint": (
        lambda: o.SGD(1e-3, momentum=0.99),
        True,
        lambda: Linear(keras.constraints.NonNeg()),
    ),
    "rows_sgd": (lambda: o.SGD(1e-3), True, Rows),
    "rows_momentum": (lambda: o.SGD(1e-3, momentum=0.99), True, Rows),
    "rows_adagrad": (lambda: o.Adagrad(1e-3), True, Rows),
    "rows_rmsprop": (lambda: o.RMSprop(1e-3), True, Rows),
    "rows_adam": (lambda: o.Adam(1e-3), False, Rows),
    "rows_clipped": (
        lambda: o.SGD(1e-3, momentum=0.99, global_clipnorm=1.0),
        True,
        Rows,
    ),
}


def slots(name, strategy):
    """Trains on the strategy and with Keras; returns what both end with."""
    optimizer, exact, *layer = OPTIMIZERS[name]
    build = model_of(optimizer, *layer)
    x = np.zeros((STEPS * BATCH, 1))
    reference = build()
    # Built in its first step ScheduleFreeAdamW would forget where it begins.
    reference.optimizer.build(reference.trainable_variables)
    reference.fit(x, x, batch_size=BATCH, epochs=1, verbose=0)
    trainer = mgpu_tf.Trainer(build, strategy)
    trainer.fit(x, x, batch_size=BATCH, epochs=1, verbose=0)
    found = {"exact": exact}
    for what, variables in (
        ("weights", lambda model: model.trainable_variables),
        ("slots", lambda model: model.optimizer.variables),
    ):
        found[what] = {
            f"{place} {expected.path}": relative(expected, held)
            for place, (expected, held) in enumerate(
                zip(
                    variables(reference),
                    variables(trainer.model),
                    strict=True,
                )
            )
        }
    return found


def relative(expected, held):
    """Returns the largest relative difference of two variables."""
    one, other = (np.asarray(v.numpy(), "float64") for v in (expected, held))
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(one), 1e-9)))


class Seen(keras.layers.Layer):
    """Counts its steps, and returns how many of its weights are negative.

    Each update makes them negative, and the constraint sets them to zero.
    """

    def build(self, shape):
        self.held = [
            self.add_weight(
                shape=shape,
                initializer="zeros",
                name=name,
                constraint=keras.constraints.NonNeg(),
            )
            for name, shape in SHAPES.items()
        ]
        self.count = self.add_weight(
            shape=(),
            dtype="int32",
            initializer="zeros",
            trainable=False,
            aggregation="sum",
            name="count",
        )

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1)
        signs = [
            keras.ops.sum(keras.ops.cast(weight < 0, "float32"))
            for weight in self.held
        ]
        pull = sum(keras.ops.sum(weight) for weight in self.held)
        zero = pull - keras.ops.stop_gradient(pull)
        return x + zero + sum(signs)


def half_made(strategy):
    """Workers read while others update and constrain."""

    def build():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, Seen()(inputs))
        model.compile(o.SGD(0.1), loss=lambda y, p: p + 0 * y)
        return model

    x = np.zeros((STEPS * BATCH, 1))
    trainer = mgpu_tf.Trainer(build, strategy)
    history = trainer.fit(x, x, batch_size=BATCH, epochs=3, verbose=0)
    layer = trainer.model.layers[-1]
    return {
        "negative": history.history["loss"],
        "least": min(float(np.min(v.numpy())) for v in layer.held),
        "count": int(layer.count.numpy()),
        "steps": 3 * STEPS,
    }


def statistics(strategy):
    """Moving statistics of a batch that is always the same."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.BatchNormalization(momentum=0.999),
                keras.layers.BatchNormalization(momentum=0.0),
                keras.layers.Dense(1),
            ]
        )
        model.compile(o.SGD(0.0), "mse")
        return model

    parity.set_floatx("float64")
    try:
        batch = np.random.default_rng(0).normal(2.0, 3.0, size=(BATCH, 3))
        x = np.tile(batch, (STEPS, 1))
        y = np.zeros((len(x), 1))
        reference = build()
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        reference.fit(x, y, **options)
        trainer = mgpu_tf.Trainer(build, strategy)
        trainer.fit(x, y, **options)
    finally:
        parity.set_floatx("float32")
    return {
        variable.path: relative(expected, variable)
        for expected, variable in zip(
            reference.non_trainable_variables,
            trainer.model.non_trainable_variables,
            strict=True,
        )
    }


TEXT = {
    "sgd": lambda: o.SGD(0.1),
    "momentum": lambda: o.SGD(0.1, momentum=0.9),
    "adam": lambda: o.Adam(0.05),
    "adamw": lambda: o.AdamW(0.05, weight_decay=0.1),
    "rmsprop": lambda: o.RMSprop(0.05),
    "adagrad": lambda: o.Adagrad(0.05),
    "lazy_adam": lambda: mgpu_tf.optimizers.LazyAdam(0.05),
    "clipnorm": lambda: o.Adam(0.05, clipnorm=0.05),
    "global_clipnorm": lambda: o.Adam(0.05, global_clipnorm=0.05),
}


def text(name, strategy):
    """Trains embeddings on one worker, and with Keras's own `fit`."""
    parity.set_floatx("float64")
    try:
        build = parity.text_model(TEXT[name])
        data = parity.text()
        options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        keras.utils.set_random_seed(0)
        reference = build()
        begin = reference.get_weights()
        reference.fit(**data, **options)
        trainer = mgpu_tf.Trainer(build, strategy)
        trainer.model.set_weights(begin)
        trainer.fit(**data, **options)
    finally:
        parity.set_floatx("float32")
    pairs = zip(
        [*reference.trainable_variables, *reference.optimizer.variables],
        [
            *trainer.model.trainable_variables,
            *trainer.model.optimizer.variables,
        ],
        strict=True,
    )
    return {
        "moved": max(
            float(np.max(np.abs(one - other)))
            for one, other in zip(begin, reference.get_weights(), strict=True)
        ),
        "difference": max(
            float(np.max(np.abs(one.numpy() - other.numpy())))
            for one, other in pairs
        ),
    }
