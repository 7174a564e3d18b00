"""The rows of the parity matrix, run by tests here and by worker processes.

A case trains a small model. `run_stock` does it with Keras's own `fit` on one
device, `run` with the `Trainer` on a strategy; both give the weights, the
losses, the scores and the predictions.

Most rows promise the numbers of one device ("same"). Where the feature itself
depends on which examples share a replica, or on rounding to few bits, a row
promises less: that all workers end with the same weights ("agree"), or that
the losses are close ("close").
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf
from tests import columns

BATCH_SIZE = 16
EPOCHS = 3
FEATURES = 6
CLASSES = 4

EVEN = 3 * BATCH_SIZE
UNEVEN = 3 * BATCH_SIZE + 7
EMPTY_REPLICA = 3 * BATCH_SIZE + 1

CROSS_ENTROPY = {
    "loss": lambda: keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    ),
    "metrics": ["accuracy"],
}


def set_floatx(name):
    """Sets the type of data, weights and computation."""
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        build: Makes the compiled model.
        data: Makes the arguments `x`, `y`, `sample_weight` of `fit`.
        fit: Other arguments of `fit`.
        steps_per_execution: Given to the `Trainer`.
        promise: "same", "close" or "agree".
        floatx: The type it is run in; "float32" where TensorFlow has no op
            for the other.
    """

    build: Callable[[], keras.Model]
    data: Callable[[], dict]
    fit: dict = dataclasses.field(default_factory=dict)
    steps_per_execution: int | str = "auto"
    promise: str = "same"
    floatx: str = "float64"


def classes(examples=UNEVEN):
    """Points and their classes."""
    generator = np.random.default_rng(7)
    x = generator.normal(size=(examples, FEATURES))
    y = generator.integers(0, CLASSES, size=examples)
    return {"x": x.astype(keras.config.floatx()), "y": y}


def weighted(examples=UNEVEN):
    generator = np.random.default_rng(8)
    weight = generator.uniform(0.1, 3.0, size=examples)
    return classes(examples) | {"sample_weight": weight}


def one_hot(examples=UNEVEN):
    data = classes(examples)
    return data | {"y": np.eye(CLASSES)[data["y"]]}


def binary(examples=UNEVEN):
    data = classes(examples)
    return data | {"y": (data["y"] > 1).astype(keras.config.floatx())[:, None]}


def named(examples=UNEVEN):
    """Two named inputs and two named targets."""
    data = classes(examples)
    x = {"left": data["x"][:, :2], "right": data["x"][:, 2:]}
    y = {"kind": data["y"], "size": data["x"].sum(1, keepdims=True)}
    return {"x": x, "y": y}


def sequences(examples=UNEVEN):
    """Words with padding, a target for each."""
    generator = np.random.default_rng(9)
    words = generator.integers(1, 9, size=(examples, 5))
    lengths = generator.integers(1, 6, size=(examples, 1))
    words = np.where(np.arange(5) < lengths, words, 0)
    y = generator.normal(size=(examples, 5, 2))
    return {"x": words, "y": y.astype(keras.config.floatx())}


def text(examples=UNEVEN):
    """Words, some of which come often, as words do."""
    generator = np.random.default_rng(11)
    x = {
        "words": generator.geometric(0.4, (examples, 6)).clip(1, 9) - 1,
        "tags": generator.integers(0, 9, (examples, 2)),
    }
    return {"x": x, "y": generator.integers(0, CLASSES, size=examples)}


def images(examples=UNEVEN):
    generator = np.random.default_rng(10)
    x = generator.uniform(size=(examples, 6, 6, 1))
    y = generator.integers(0, CLASSES, size=examples)
    return {"x": x.astype(keras.config.floatx()), "y": y}


def digits(examples=1797):
    """scikit-learn's digits, all of them, one-hot."""
    from sklearn.datasets import load_digits  # Half a second, for few rows.

    x, y = load_digits(return_X_y=True)
    x = (x[:examples] / 16.0).astype(keras.config.floatx())
    return {"x": x, "y": np.eye(10)[y[:examples]]}


def overflowing(examples=UNEVEN):
    """One example, in the middle, whose scaled gradient is infinite.

    It is infinite in the last rows of the first kernel alone: where weights are
    split, the first replica does not see it.
    """
    data = classes(examples)
    x, y = data["x"].copy(), data["x"].sum(1, keepdims=True)
    x[BATCH_SIZE + 3, -1] = 1e290
    return {"x": x, "y": y}


def sequential(*hidden, optimizer, **compile_arguments):
    """Returns what builds a network with `hidden` in its middle."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(
                    8,
                    activation="tanh",
                    kernel_regularizer=keras.regularizers.L2(0.01),
                ),
                *(make() for make in hidden),
                layers.Dense(CLASSES),
            ]
        )
        # Where there is a GPU Keras compiles by XLA, which draws other numbers.
        given = {"jit_compile": False} | CROSS_ENTROPY | compile_arguments
        arguments = {
            name: value() if callable(value) else value
            for name, value in given.items()
        }
        model.compile(optimizer(), **arguments)
        return model

    return build


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.2, **options)


def adam(**options):
    return lambda: keras.optimizers.Adam(0.02, **options)


def lars(**options):
    return lambda: mgpu_tf.optimizers.LARS(
        1.0, trust_coefficient=0.02, **options
    )


@keras.saving.register_keras_serializable("mgpu_tf_tests")
class MeanSquare(layers.Layer):
    """Adds the mean square over the batch to the loss: NaN for no example."""

    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
        return inputs


@keras.saving.register_keras_serializable("mgpu_tf_tests")
class Subclassed(keras.Model):
    """Not functional; built by its first call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8, activation="tanh")
        self.second = layers.Dense(CLASSES)

    def call(self, inputs):
        return self.second(self.first(inputs))


@keras.saving.register_keras_serializable("mgpu_tf_tests")
class OwnLoss(Subclassed):
    """Adds to Keras's loss a mean over examples of its own."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * tf.reduce_mean(tf.square(y_pred))


@keras.saving.register_keras_serializable("mgpu_tf_tests")
class OwnStep(Subclassed):
    """A `train_step` as Keras's guide writes one."""

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
                replicas = tf.distribute.get_strategy().num_replicas_in_sync
                size = tf.shape(x)[0]
                metric.update_state(loss * replicas, sample_weight=size)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def compiled(model_class, optimizer):
    def build():
        model = model_class()
        model.compile(
            optimizer(), CROSS_ENTROPY["loss"](), metrics=["accuracy"]
        )
        return model

    return build


def two_outputs():
    left, right = (
        keras.Input((2,), name="left"),
        keras.Input((4,), name="right"),
    )
    hidden = layers.Concatenate()([left, right])
    hidden = layers.Dense(8, activation="tanh")(hidden)
    kind = layers.Dense(CLASSES, name="kind")(hidden)
    size = layers.Dense(1, name="size")(hidden)
    model = keras.Model(
        {"left": left, "right": right}, {"kind": kind, "size": size}
    )
    model.compile(
        adam()(),
        loss={"kind": CROSS_ENTROPY["loss"](), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def masked(reduction="sum_over_batch_size"):
    def build():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(9, 6, mask_zero=True),
                layers.Dense(2),
            ]
        )
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(sgd()(), loss)
        return model

    return build


def text_model(optimizer):
    """Two lookups in one table, and one in a table that is masked."""

    def build():
        words = keras.Input((6,), dtype="int32", name="words")
        tags = keras.Input((2,), dtype="int32", name="tags")
        shared = layers.Embedding(9, 4)
        masked = layers.Embedding(9, 3, mask_zero=True)
        found = layers.Concatenate()(
            [
                layers.Flatten()(shared(words)),
                layers.Flatten()(shared(tags)),
                layers.GlobalAveragePooling1D()(masked(words)),
            ]
        )
        outputs = layers.Dense(CLASSES)(found)
        model = keras.Model({"words": words, "tags": tags}, outputs)
        model.compile(optimizer(), CROSS_ENTROPY["loss"]())
        return model

    return build


def convolution(*before):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                *(make() for make in before),
                layers.Conv2D(4, 3, activation="tanh"),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )
        model.compile(sgd()(), CROSS_ENTROPY["loss"](), metrics=["accuracy"])
        return model

    return build


def loss_scaled():
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1)])
    model.compile(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            initial_scale=2.0**100,
            dynamic_growth_steps=2,
        ),
        keras.losses.Huber(),
    )
    return model


def bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return sequential(optimizer=sgd())()
    finally:
        keras.config.set_dtype_policy(before)


def float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return sequential(optimizer=sgd())()
    finally:
        keras.config.set_dtype_policy(before)


def muon():
    return keras.optimizers.Muon(0.02, adam_lr_ratio=0.5)


def two_optimizers():
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.02)
    return keras.optimizers.MultiOptimizer(
        lambda variable: first if len(variable.shape) > 1 else second
    )


def schedule():
    rate = keras.optimizers.schedules.CosineDecay(0.2, 10)
    return keras.optimizers.Adam(rate)


def _dropout():
    return layers.Dropout(0.5, seed=1)


def _flip():
    return layers.RandomFlip(seed=1)


CASES = {
    # Optimizers.
    "sgd": Case(sequential(optimizer=sgd()), classes),
    "momentum": Case(sequential(optimizer=sgd(momentum=0.9)), classes),
    "nesterov": Case(
        sequential(optimizer=sgd(momentum=0.9, nesterov=True)), classes
    ),
    "adam": Case(sequential(optimizer=adam()), classes),
    "adamw": Case(
        sequential(optimizer=lambda: keras.optimizers.AdamW(0.02)), classes
    ),
    "nadam": Case(
        sequential(optimizer=lambda: keras.optimizers.Nadam(0.02)), classes
    ),
    "lamb": Case(
        sequential(optimizer=lambda: keras.optimizers.Lamb(0.02)), classes
    ),
    "lars": Case(sequential(optimizer=lars(weight_decay=0.01)), weighted),
    "lars_nesterov": Case(
        sequential(optimizer=lars(nesterov=True, global_clipnorm=0.5)), classes
    ),
    "lion": Case(
        sequential(optimizer=lambda: keras.optimizers.Lion(0.01)), classes
    ),
    "muon": Case(sequential(optimizer=muon), classes),
    "schedule": Case(sequential(optimizer=schedule), classes),
    # What Keras does between the gradient and the update.
    "accumulation_2": Case(
        sequential(optimizer=adam(gradient_accumulation_steps=2)), classes
    ),
    "accumulation_3_uneven": Case(
        sequential(optimizer=sgd(momentum=0.9, gradient_accumulation_steps=3)),
        classes,
    ),
    "accumulation_clipped": Case(
        sequential(
            # Keras constrains weights between updates, too.
            lambda: layers.Dense(8, kernel_constraint="non_neg"),
            optimizer=sgd(gradient_accumulation_steps=2, global_clipnorm=0.1),
        ),
        classes,
    ),
    "ema": Case(sequential(optimizer=adam(use_ema=True)), classes),
    "ema_overwrite": Case(
        sequential(
            optimizer=adam(
                use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
            )
        ),
        classes,
    ),
    "ema_accumulation": Case(
        sequential(
            optimizer=adam(
                use_ema=True,
                ema_momentum=0.7,
                ema_overwrite_frequency=2,
                gradient_accumulation_steps=2,
            )
        ),
        classes,
    ),
    "loss_scale_overflow": Case(loss_scaled, overflowing),
    "loss_scale_factor": Case(
        sequential(optimizer=sgd(loss_scale_factor=1024.0, clipnorm=0.1)),
        classes,
    ),
    "constraint": Case(
        sequential(
            lambda: layers.Dense(8, kernel_constraint="max_norm"),
            optimizer=sgd(),
        ),
        classes,
    ),
    "mixed_bfloat16": Case(
        bfloat16, classes, promise="close", floatx="float32"
    ),
    "mixed_float16": Case(float16, classes, promise="close", floatx="float32"),
    # Layers with state.
    "batch_norm_synchronized": Case(
        sequential(
            lambda: layers.BatchNormalization(synchronized=True),
            optimizer=sgd(),
        ),
        classes,
    ),
    "batch_norm_synchronized_empty": Case(
        sequential(
            lambda: layers.BatchNormalization(synchronized=True),
            optimizer=sgd(),
        ),
        lambda: classes(EMPTY_REPLICA),
    ),
    "batch_norm": Case(
        sequential(layers.BatchNormalization, optimizer=sgd()),
        classes,
        promise="agree",
    ),
    "dropout": Case(sequential(_dropout, optimizer=sgd()), classes),
    "augmentation": Case(convolution(_flip), images),
    # Embeddings: a row for each lookup, as Keras's optimizers see them.
    **{
        f"embedding_{name}": Case(text_model(optimizer), text)
        for name, optimizer in {
            "adam": lambda: keras.optimizers.Adam(0.05),
            "rmsprop": lambda: keras.optimizers.RMSprop(0.05, momentum=0.9),
            "adagrad": lambda: keras.optimizers.Adagrad(0.1),
            "lazy_adam": lambda: mgpu_tf.optimizers.LazyAdam(0.05),
            "clipnorm": adam(clipnorm=0.01),
            "global_clipnorm": adam(global_clipnorm=0.1),
            "accumulation": adam(gradient_accumulation_steps=2),
            "scaled": lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.RMSprop(0.05), initial_scale=1024.0
            ),
        }.items()
    },
    # Losses and their denominators.
    "activity_regularizer": Case(
        sequential(
            lambda: layers.ActivityRegularization(l2=0.01), optimizer=sgd()
        ),
        classes,
    ),
    "add_loss_empty_replica": Case(
        sequential(MeanSquare, optimizer=sgd()),
        lambda: classes(EMPTY_REPLICA),
    ),
    "sample_weight": Case(sequential(optimizer=sgd()), weighted),
    "weighted_mean": Case(
        sequential(
            optimizer=sgd(),
            loss=lambda: keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            weighted_metrics=["accuracy"],
        ),
        weighted,
    ),
    "class_weight": Case(
        sequential(optimizer=sgd()),
        classes,
        fit={"class_weight": {0: 0.2, 1: 3.0, 2: 1.0, 3: 0.5}},
    ),
    "sum": Case(
        sequential(
            optimizer=lambda: keras.optimizers.SGD(0.01),
            loss=lambda: keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="sum"
            ),
        ),
        classes,
    ),
    "mask": Case(masked(), sequences),
    "mask_weighted_mean": Case(masked("mean_with_sample_weight"), sequences),
    "own_compute_loss": Case(compiled(OwnLoss, sgd()), classes),
    # Metrics.
    "auc": Case(
        lambda: _binary_model(),
        binary,
    ),
    "topk": Case(
        sequential(
            optimizer=sgd(),
            loss=lambda: keras.losses.CategoricalCrossentropy(from_logits=True),
            metrics=lambda: [keras.metrics.TopKCategoricalAccuracy(k=2)],
            weighted_metrics=["accuracy"],
        ),
        one_hot,
        floatx="float32",
    ),
    "f1": Case(lambda: _f1_model(), one_hot),
    "scores_of_1797": Case(lambda: _digits_model(), digits),
    # Shapes of models and steps.
    "dict_inputs_two_outputs": Case(two_outputs, named),
    "subclassed": Case(compiled(Subclassed, adam()), classes),
    "own_train_step": Case(compiled(OwnStep, adam()), lambda: classes(EVEN)),
    "own_train_step_clipped": Case(
        compiled(OwnStep, sgd(clipnorm=0.05)), lambda: classes(EVEN)
    ),
    "convolution": Case(convolution(), images),
    "jit_compile": Case(
        sequential(optimizer=adam(), jit_compile=True), classes
    ),
    "jit_compile_communicating": Case(
        sequential(
            lambda: layers.BatchNormalization(synchronized=True),
            optimizer=sgd(),
            jit_compile=True,
        ),
        classes,
    ),
    "steps_per_execution_1": Case(
        sequential(optimizer=adam()), classes, steps_per_execution=1
    ),
    "steps_per_execution_8": Case(
        sequential(optimizer=adam(), steps_per_execution=8), classes
    ),
    # Last batches.
    "even": Case(sequential(optimizer=adam()), lambda: classes(EVEN)),
}
# The outer optimizer's own count has no EMA, clipping or accumulation.
CASES["two_optimizers"] = Case(sequential(optimizer=two_optimizers), classes)
# Each bites: the gradients of the first steps are larger.
for _name, _options in {
    "sgd": sgd,
    "momentum": lambda **clip: sgd(momentum=0.9, **clip),
    "adam": adam,
}.items():
    for _clip in (
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.01},
    ):
        CASES[f"{_name}_{next(iter(_clip))}"] = Case(
            sequential(optimizer=_options(**_clip)), classes
        )
for _extra in range(1, 6):
    CASES[f"last_batch_of_{_extra}"] = Case(
        sequential(optimizer=sgd(momentum=0.9)),
        lambda extra=_extra: classes(2 * BATCH_SIZE + extra),
    )


def _binary_model():
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [keras.metrics.AUC(), keras.metrics.Precision(), "accuracy"]
    model.compile(sgd()(), "binary_crossentropy", metrics=metrics)
    return model


def _f1_model():
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    metrics = [
        keras.metrics.F1Score(average="macro"),
        keras.metrics.MeanIoU(
            CLASSES, sparse_y_true=False, sparse_y_pred=False
        ),
    ]
    model.compile(sgd()(), "categorical_crossentropy", metrics=metrics)
    return model


def _digits_model():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, activation="tanh"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    metrics = [
        keras.metrics.AUC(),
        keras.metrics.F1Score(average="macro"),
        "accuracy",
    ]
    model.compile(sgd()(), "categorical_crossentropy", metrics=metrics)
    return model


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run ended with; the optimizer's state is among the weights."""

    weights: list
    losses: list
    evaluation: list
    predictions: list

    def largest_difference(self, other):
        """The largest difference of any weight."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    def loss_difference(self, other):
        """The largest relative difference of any epoch's loss."""
        ours, theirs = np.array(self.losses), np.array(other.losses)
        return float(np.abs(ours / theirs - 1).max())

    def score_difference(self, other):
        """The largest relative difference of loss, metric or prediction."""
        largest = 0.0
        for ours, theirs in [
            (self.evaluation, other.evaluation),
            *zip(self.predictions, other.predictions, strict=True),
        ]:
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            if ours.shape != theirs.shape:
                return np.inf
            scale = np.maximum(np.abs(theirs), 1.0)
            largest = max(largest, float((np.abs(ours - theirs) / scale).max()))
        return largest

    def save(self, path):
        np.savez(
            path,
            losses=self.losses,
            evaluation=self.evaluation,
            **{f"weight_{i}": w for i, w in enumerate(self.weights)},
            **{f"output_{i}": p for i, p in enumerate(self.predictions)},
        )

    @classmethod
    def load(cls, path):
        with np.load(path) as file:

            def every(kind):
                count = sum(name.startswith(kind) for name in file.files)
                return [file[f"{kind}_{i}"] for i in range(count)]

            return cls(
                every("weight"),
                file["losses"].tolist(),
                file["evaluation"].tolist(),
                every("output"),
            )


def run_stock(case):
    """Trains with `keras.Model.fit` on one device."""
    keras.utils.set_random_seed(0)
    with tf.device(columns.ONE):
        return _run(case, case.build(), lambda model: model)


def run(case, strategy):
    """Trains with the `Trainer` on a strategy."""
    trainer = mgpu_tf.Trainer(
        case.build, strategy, steps_per_execution=case.steps_per_execution
    )
    result = _run(case, trainer, lambda trainer: trainer.model)
    examples = len(tf.nest.flatten(case.data())[0])
    assert trainer.examples_seen == EPOCHS * examples
    return result


def run_permuted(case, one_device):
    """The noise: one device, the examples permuted within each batch."""
    generator = np.random.default_rng(1)
    data = case.data()
    size = len(tf.nest.flatten(data)[0])
    order = np.concatenate(
        [
            start + generator.permutation(min(BATCH_SIZE, size - start))
            for start in range(0, size, BATCH_SIZE)
        ]
    )
    data = tf.nest.map_structure(lambda array: array[order], data)
    return run(dataclasses.replace(case, data=lambda: data), one_device)


def _run(case, trains, model_of):
    data = case.data()
    history = trains.fit(
        **data,
        **case.fit,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    evaluation = trains.evaluate(**data, batch_size=BATCH_SIZE, verbose=0)
    predictions = trains.predict(data["x"], batch_size=BATCH_SIZE, verbose=0)
    model = model_of(trains)
    # Sums in the middle of an accumulation are each replica's own.
    optimizer = [
        variable.numpy()
        for variable in model.optimizer.variables
        if "gradient_accumulator" not in variable.name
    ]
    return Result(
        [np.asarray(w, np.float64) for w in [*model.get_weights(), *optimizer]],
        history.history["loss"],
        np.atleast_1d(evaluation).tolist(),
        [np.asarray(p, np.float64) for p in tf.nest.flatten(predictions)],
    )
