"""What a coordinator does in the test clusters: each case returns numbers."""

import functools
import gc
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)

import mgpu_tf
from mgpu_tf import datasets
from mgpu_tf.checkpoints import store
from mgpu_tf.datasets.random_access import Table
from mgpu_tf.engine.asynchronous.schedule import work
from mgpu_tf.errors import ConfigurationError
from tests.asynchronous import slots

ROWS, BATCH = 90, 16


def arrays(rows=ROWS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 6)).astype("float32")
    return x, generator.integers(0, 3, size=rows)


def model_of(optimizer, *layers, units=8, **options):
    """Returns a function that builds a classifier."""

    def build():
        model = keras.Sequential(
            [
                keras.layers.Dense(units, activation="tanh"),
                *(layer() for layer in layers),
                keras.layers.Dense(3, **options),
            ]
        )
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )
        return model

    return build


def adam_cosine():
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 30)
    return keras.optimizers.Adam(schedule)


def batches(x, y, size=BATCH):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def sharded(context):
    dataset = tf.data.Dataset.from_tensor_slices(arrays())
    dataset = dataset.shard(
        context.num_input_pipelines, context.input_pipeline_id
    )
    return dataset.batch(BATCH)


class Pairs:
    """The rows of `arrays` by their number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        x, y = arrays()
        return x[number], y[number]


def generator():
    x, y = arrays(96)
    for start in range(0, 96, BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


sgd = keras.optimizers.SGD
l2 = keras.regularizers.L2(1e-2)
# What equals one device on one worker: how to build, data, options of fit.
EQUAL = {
    "lars": (
        model_of(
            lambda: mgpu_tf.optimizers.LARS(
                1.0, trust_coefficient=0.05, weight_decay=0.01
            )
        ),
        arrays,
        {"batch_size": BATCH},
    ),
    "adam_cosine": (model_of(adam_cosine), arrays, {"batch_size": BATCH}),
    "clipped_momentum": (
        model_of(lambda: sgd(0.1, momentum=0.9, global_clipnorm=0.1)),
        arrays,
        {"batch_size": BATCH},
    ),
    "accumulation": (
        model_of(lambda: sgd(0.1, gradient_accumulation_steps=2)),
        lambda: arrays(96),
        {"batch_size": BATCH},
    ),
    "ema_overwrite": (
        model_of(
            lambda: keras.optimizers.AdamW(
                0.01, use_ema=True, ema_overwrite_frequency=3
            )
        ),
        arrays,
        {"batch_size": BATCH},
    ),
    "loss_scale_overflow": (
        model_of(
            lambda: keras.optimizers.LossScaleOptimizer(
                sgd(0.1), initial_scale=2.0**126, dynamic_growth_steps=4
            )
        ),
        arrays,
        {"batch_size": BATCH},
    ),
    "batch_norm": (
        model_of(lambda: sgd(0.1), keras.layers.BatchNormalization),
        arrays,
        {"batch_size": BATCH},
    ),
    "regularizer": (
        model_of(lambda: sgd(0.1), kernel_regularizer=l2),
        arrays,
        {"batch_size": BATCH},
    ),
    "class_weight": (
        model_of(lambda: sgd(0.1)),
        arrays,
        {"batch_size": BATCH, "class_weight": {0: 2.0, 1: 0.5}},
    ),
    "mixed_bfloat16": (
        model_of(lambda: sgd(0.1), dtype="mixed_bfloat16"),
        arrays,
        {"batch_size": BATCH},
    ),
    "steps_per_epoch": (
        model_of(lambda: sgd(0.1)),
        arrays,
        {"batch_size": BATCH, "steps_per_epoch": 4},
    ),
    "dataset": (
        model_of(lambda: sgd(0.1)),
        lambda: (batches(*arrays()),),
        {},
    ),
    # Rows of Python are sent by the coordinator, a table is on the workers.
    "random_access": (
        model_of(lambda: sgd(0.1)),
        lambda: (mgpu_tf.RandomAccess(Pairs()),),
        {"batch_size": BATCH},
    ),
    "random_access_of_a_table": (
        model_of(lambda: sgd(0.1)),
        lambda: (
            mgpu_tf.RandomAccess(
                Table(tuple(map(tf.constant, arrays())), ROWS),
                lambda x, y: (x + 1, y),
            ),
        ),
        {"batch_size": BATCH},
    ),
    "dataset_fn": (
        model_of(lambda: sgd(0.1)),
        lambda: (sharded,),
        {"steps_per_epoch": 6},
    ),
}


def equal(name, strategy):
    """Trains on the strategy and on one device; returns the differences."""
    build, data, options = EQUAL[name]
    results = []
    for each in (strategy, mgpu_tf.create_one_device_strategy("CPU:0")):
        trainer = mgpu_tf.Trainer(build, each)
        history = trainer.fit(*data(), epochs=3, verbose=0, **options)
        x, y = arrays()
        results.append(
            {
                "weights": trainer.model.get_weights(),
                "loss": history.history["loss"],
                "accuracy": history.history["accuracy"],
                "score": trainer.evaluate(x, y, batch_size=7, verbose=0),
                "score of dataset": trainer.evaluate(
                    batches(x, y, 7), verbose=0
                ),
                "outputs": trainer.predict(x, batch_size=7, verbose=0),
                "outputs of dataset": trainer.predict(
                    batches(x, y, 7), verbose=0
                ),
                "counts": [
                    trainer.global_step,
                    trainer.examples_seen,
                    int(trainer.model.optimizer.iterations.numpy()),
                ],
            }
        )
    return {
        what: largest(results[0][what], results[1][what]) for what in results[0]
    }


def rows_sent(strategy):
    """As if the arrays were too large to be copied to every worker."""
    held, work.HELD_BYTES = work.HELD_BYTES, 0
    try:
        return equal("random_access_of_a_table", strategy)
    finally:
        work.HELD_BYTES = held


def task_of_keras_hub(strategy):
    """Trains on raw text, which the coordinator preprocesses."""
    from tests.jobs import tasks

    texts, labels = tasks.texts(), tasks.labels()
    found = []
    for each in (strategy, mgpu_tf.create_one_device_strategy("CPU:0")):
        trainer = mgpu_tf.Trainer(tasks.classifier, each)
        trainer.fit(texts, labels, batch_size=8, epochs=2, verbose=0)
        found.append(
            [
                trainer.model.get_weights(),
                trainer.evaluate(texts, labels, batch_size=8, verbose=0),
                trainer.predict(texts, batch_size=8, verbose=0),
                trainer.examples_seen,
            ]
        )
    refused = ""
    try:
        trainer = mgpu_tf.Trainer(tasks.language_model, strategy)
        trainer.fit(texts, batch_size=8, verbose=0)
    except ConfigurationError as error:
        refused = str(error)
    return {"difference": largest(*found), "refused": refused}


def saved_in_accumulation(strategy):
    """Saves every 4 steps of a run whose updates take 3."""
    build = model_of(lambda: sgd(0.1, gradient_accumulation_steps=3))
    weights, saved = [], []
    for each in (strategy, mgpu_tf.create_one_device_strategy("CPU:0")):
        trainer = mgpu_tf.Trainer(build, each)
        with tempfile.TemporaryDirectory() as folder:
            trainer.fit(
                *arrays(96),
                batch_size=BATCH,
                epochs=2,
                verbose=0,
                checkpoint=mgpu_tf.SaveOptions(
                    folder, save_every_steps=4, keep_checkpoints=9
                ),
            )
            entries = store.entries(folder, thorough=False)
            saved.append(sorted(entry.step for entry in entries))
        weights.append(trainer.model.get_weights())
    return {"difference": largest(*weights), "saved": saved}


def keeps_the_best(strategy):
    """Keeps the best and some for good, and restores the best."""
    x, y = arrays(96)
    trainer = mgpu_tf.Trainer(model_of(lambda: sgd(0.5)), strategy)
    with tempfile.TemporaryDirectory() as folder:
        saving = mgpu_tf.SaveOptions(
            folder,
            save_every_steps=4,
            keep_checkpoints=1,
            keep_every_steps=5,
            monitor="val_loss",
        )
        history = trainer.fit(
            *(x, y, BATCH, 4),
            verbose=0,
            validation_data=(x, y),
            checkpoint=saving,
        )
        saved = [entry.step for entry in store.entries(folder)]
        step = trainer.restore(folder, "best", x, y)
        scores = trainer.evaluate(x, y, BATCH, 0, return_dict=True)
    losses = history.history["val_loss"]
    return {"saved": saved, "step": step, "losses": losses, **scores}


def largest(one, other):
    """Returns the largest difference of nested numbers."""
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float))))
        for a, b in pairs
    )


def digits_900(strategy, seeds=1):
    """Trains digits for 900 steps of 32 examples."""
    splits = datasets.load("digits")
    x, y = (array[: 44 * 32] for array in splits.train)
    found = []
    for seed in range(seeds):
        trainer = mgpu_tf.Trainer(digits_model, strategy, seed=seed)
        trainer.fit(
            x,
            y,
            batch_size=32,
            epochs=3,
            steps_per_epoch=300,
            verbose=0,
        )
        scores = trainer.evaluate(
            *splits.test, batch_size=64, verbose=0, return_dict=True
        )
        goodput = trainer.goodput
        found.append(
            {
                "compile": goodput.compile_seconds,
                "evaluate": goodput.evaluate_seconds,
                "global_step": trainer.global_step,
                "iterations": int(trainer.model.optimizer.iterations.numpy()),
                "examples_seen": trainer.examples_seen,
                "records": [r.examples for r in trainer.records],
                "accuracy": scores["accuracy"],
            }
        )
    return found


def digits_model():
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Flatten()(inputs)
    hidden = keras.layers.Dense(64, activation="gelu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
    )
    return model


def scores_of_1797(strategy):
    """Evaluates and predicts all digits, as one device does."""
    splits = datasets.load("digits")
    x = np.concatenate([splits.train[0], splits.test[0]])
    y = np.concatenate([splits.train[1], splits.test[1]])
    results = []
    for each in (strategy, mgpu_tf.create_one_device_strategy("CPU:0")):
        trainer = mgpu_tf.Trainer(digits_model, each)
        data = batches(x, y, 50)
        results.append(
            [
                trainer.evaluate(x, y, batch_size=50, verbose=0),
                trainer.evaluate(data, verbose=0),
                trainer.evaluate(data, steps=7, verbose=0),
                trainer.predict(x, batch_size=50, verbose=0),
                trainer.predict(data, verbose=0),
                trainer.predict(data, steps=7, verbose=0),
            ]
        )
    return {"rows": len(x), "difference": largest(*results)}


def task_of(device):
    """Returns the job and task of a device."""
    spec = tf.DeviceSpec.from_string(device)
    return f"/job:{spec.job}/task:{spec.task}"


def mean_model(layer=None):
    """A model whose loss is the mean of its targets, and learns nothing."""

    def build():
        inputs = keras.Input((1,))
        outputs = keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.0), loss=lambda y, p: y + 0 * p)
        return model

    return build


def each_example_once(strategy):
    """The loss of an epoch tells which examples were in it."""
    x = np.arange(101.0)[:, None]
    trainer = mgpu_tf.Trainer(mean_model(), strategy)
    history = trainer.fit(x, x, batch_size=4, epochs=4, verbose=0)
    trainer.evaluate(x, x, batch_size=4, verbose=0)
    of_generator = mgpu_tf.Trainer(mean_model(), strategy)
    parts = ((x[i : i + 5], x[i : i + 5]) for i in range(0, 100, 5))
    of_generator.fit(parts, steps_per_epoch=10, epochs=2, verbose=0)
    return {
        "losses": history.history["loss"],
        "expected": float(x.mean()),
        "examples": [record.examples for record in trainer.records],
        "iterations": int(trainer.model.optimizer.iterations.numpy()),
        "compile": trainer.goodput.compile_seconds,
        "evaluate": trainer.goodput.evaluate_seconds,
        "of generator": of_generator.model.history.history["loss"],
    }


def staleness(strategy):
    """Trains with the strategy's options on late gradients."""
    trainer = mgpu_tf.Trainer(model_of(lambda: sgd(0.1)), strategy)
    with tempfile.TemporaryDirectory() as folder:
        board = keras.callbacks.TensorBoard(folder)
        history = trainer.fit(
            *arrays(), batch_size=1, epochs=2, verbose=0, callbacks=[board]
        )
        histograms = histograms_in(os.path.join(folder, "train"))
    return history.history | {"histograms": histograms}


def histograms_in(folder):
    """Returns for each histogram its epoch, least, greatest and count."""
    accumulator = EventAccumulator(folder, {"tensors": 0}).Reload()
    found = []
    for event in accumulator.Tensors("staleness"):
        left, right, count = tf.make_ndarray(event.tensor_proto).T
        filled = count > 0
        low, high = left[filled].min(), right[filled].max()
        found.append([event.step, low, high, count.sum()])
    return found


def masks(strategy):
    """The part of units that Dropout keeps, in each of many steps."""

    def build():
        inputs = keras.Input((4000,))
        outputs = keras.layers.Dropout(0.5)(inputs)
        outputs = keras.layers.Dense(
            1, kernel_initializer="ones", use_bias=False
        )(outputs)
        model = keras.Model(inputs, outputs)
        model.compile(sgd(0.0), loss=lambda y, p: p + 0 * y)
        return model

    class Losses(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.sums = [0.0]

        def on_train_batch_end(self, batch, logs=None):
            self.sums.append(logs["loss"] * (batch + 1))

    losses = Losses()
    trainer = mgpu_tf.Trainer(build, strategy)
    ones = np.ones((24, 4000), "float32")
    trainer.fit(
        ones,
        ones[:, :1],
        batch_size=1,
        epochs=1,
        callbacks=[losses],
        verbose=0,
    )
    return {"kept": [round(v) for v in np.diff(losses.sums)]}


def stopped_early(strategy):
    """A callback ends the training within an epoch."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 10:
                self.model.stop_training = True

    trainer = mgpu_tf.Trainer(model_of(lambda: sgd(0.1)), strategy)
    trainer.fit(
        *arrays(), batch_size=1, epochs=5, callbacks=[Stop()], verbose=0
    )
    return {
        "global_step": trainer.global_step,
        "iterations": int(trainer.model.optimizer.iterations.numpy()),
        "examples_seen": trainer.examples_seen,
        "record": trainer.records[0].steps,
        "epochs": len(trainer.records),
    }


class Halves(keras.callbacks.Callback):
    """Halves a kernel in a hook of one batch."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.halve)

    def halve(self, batch, logs=None):
        if batch == 2:
            kernel = self.model.trainable_variables[0]
            kernel.assign(kernel / 2)


class StopsAtBatch(keras.callbacks.Callback):
    """Ends the training after a batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 3


class Reads(keras.callbacks.Callback):
    """Keeps what the model is after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen += [
            int(self.model.optimizer.iterations),
            float(np.sum(self.model.trainable_variables[0].numpy())),
        ]


class Scores(keras.callbacks.Callback):
    """Evaluates and predicts in a hook."""

    def __init__(self, hook):
        super().__init__()
        self.seen = []
        setattr(self, hook, self.score)

    def score(self, number, logs=None):
        x, y = arrays(40)
        self.seen += [
            self.model.evaluate(x, y, verbose=0),
            self.model.predict(x[:5], verbose=0),
        ]


CALLBACKS = {
    "writes before a batch": lambda: Halves("on_train_batch_begin"),
    "writes after a batch": lambda: Halves("on_train_batch_end"),
    "stops": StopsAtBatch,
    "reads": Reads,
    "scores after an epoch": lambda: Scores("on_epoch_end"),
    "scores after a batch": lambda: Scores("on_train_batch_end"),
}


def classifier():
    """A classifier that has its weights."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(
        sgd(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Counted()],
    )
    return model


class Counted(keras.metrics.Metric):
    """Returns two numbers of one state, by name."""

    def __init__(self):
        super().__init__(name="counted")
        self.chosen = self.add_weight(
            shape=(3,), initializer="zeros", name="chosen"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        best = keras.ops.argmax(y_pred, -1)
        self.chosen.assign_add(
            keras.ops.sum(keras.ops.one_hot(best, 3, dtype="float32"), 0)
        )

    def result(self):
        return {
            "least": keras.ops.min(self.chosen),
            "most": keras.ops.max(self.chosen),
        }


def beside_keras(strategy, data, make=list, evaluated=None, **options):
    """Trains on the strategy and with Keras; returns the differences."""
    reference = classifier()
    trainer = mgpu_tf.Trainer(classifier, strategy)
    trainer.model.set_weights(reference.get_weights())
    found = []
    for each, model in ((trainer, trainer.model), (reference, reference)):
        callbacks = make()
        history = each.fit(
            *data(),
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
            validation_data=evaluated() if evaluated else None,
            **options,
        )
        logs = history.history
        found.append(
            {
                "weights": model.get_weights(),
                "counts": [int(model.optimizer.iterations)],
                "seen": [[0], *(getattr(c, "seen", 0) for c in callbacks)],
                "logs": [
                    logs[name]
                    for name in sorted(logs)
                    if not name.startswith("staleness_")
                ],
            }
        )
    return {what: largest(*(f[what] for f in found)) for what in found[0]}


def named_results(strategy):
    """A metric that returns several numbers by name, with validation."""
    return beside_keras(
        strategy, arrays, evaluated=arrays, batch_size=BATCH, epochs=2
    )


def callbacks_at_batches(strategy):
    """What callbacks do between two batches, against Keras."""
    return {
        name: beside_keras(
            strategy,
            arrays,
            lambda make=make: [make()],
            batch_size=BATCH,
            epochs=2,
        )
        for name, make in CALLBACKS.items()
    }


def methods_of_the_model(strategy):
    """The same for methods of the model itself, and for named results."""
    trainer = mgpu_tf.Trainer(classifier, strategy)
    model = trainer.model
    x, y = arrays()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    scores = model.evaluate(x, y, verbose=0, return_dict=True)
    outputs = list(model.predict(x, verbose=0).shape)
    refused = [message_of(lambda: model.train_on_batch(x, y))]
    del trainer
    gc.collect()
    refused.append(message_of(lambda: model.predict(x, verbose=0)))
    return {"scores": scores, "outputs": outputs, "refused": refused}


def message_of(call):
    """Returns what is said of a call that is refused."""
    try:
        call()
    except (ConfigurationError, tf.errors.OpError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def raised_at_batch(strategy):
    """A callback raises at a batch, and the trainer goes on after it."""

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 3:
                raise RuntimeError("mine")

    trainer = mgpu_tf.Trainer(classifier, strategy)
    options = {"batch_size": 2, "verbose": 0}
    raised = []
    for _ in range(3):
        try:
            trainer.fit(*arrays(), callbacks=[Raises()], **options)
        except RuntimeError as error:
            raised.append(str(error))
    iterations = trainer.model.optimizer.iterations
    trainer.evaluate(*arrays(), verbose=0)  # Nothing is under way after it.
    before = [int(iterations), trainer.global_step]
    trainer.fit(*arrays(), epochs=2, **options)
    return {
        "raised": raised,
        "before": before,
        "steps": trainer.global_step - before[1],
        "iterations": int(iterations) - before[0],
        "examples": [record.examples for record in trainer.records],
    }


def scores_of_one_batch(strategy):
    """Epochs of one step, each with an evaluation of one batch."""
    x, y = arrays()
    return beside_keras(
        strategy,
        arrays,
        evaluated=lambda: batches(x, y, 200),
        batch_size=200,
        epochs=4,
    )


def few_batches(strategy):
    """Data with fewer batches than there are workers."""
    found = {}
    x, y = arrays()
    one = functools.partial(batches, x, y, 200)
    for name, data, evaluated, options in (
        ("one", lambda: (one(),), None, {}),
        (
            "unknown",
            lambda: (one().filter(lambda *_: True).repeat(),),
            None,
            {"steps_per_epoch": 1},
        ),
        ("evaluated", lambda: (one(),), one, {}),
    ):
        found[name] = beside_keras(
            strategy, data, evaluated=evaluated, epochs=4, **options
        )
    # Of two batches some worker has none.
    trainer = mgpu_tf.Trainer(classifier, strategy)
    trainer.fit(batches(x, y, 50), epochs=3, verbose=0)
    found["steps of two"] = trainer.global_step

    def none(*_):
        return False

    def empty(context):
        return sharded(context).filter(none)

    for name, data in (
        ("none", batches(x, y).filter(none)),
        ("none, again and again", batches(x, y).filter(none).repeat()),
        ("function", empty),
    ):
        found[name] = message_of(
            lambda data=data: trainer.fit(data, steps_per_epoch=3, verbose=0)
        )
    trainer.fit(batches(x, y, 50), verbose=0)
    found["afterwards"] = trainer.global_step
    return found


def mistakes(strategy):
    """What is refused, and what an error on a worker says."""

    class Own(keras.Model):
        def train_step(self, data):
            return {}

    def own():
        inputs = keras.Input((6,))
        model = Own(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", "mse")
        return model

    accumulating = model_of(lambda: sgd(0.1, gradient_accumulation_steps=4))
    both = model_of(
        lambda: keras.optimizers.LossScaleOptimizer(
            sgd(0.1, gradient_accumulation_steps=2)
        )
    )
    plain = model_of(lambda: sgd(0.1))
    spectral = model_of(
        lambda: sgd(0.1),
        lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)),
    )
    unknown = batches(*arrays()).filter(lambda *_: True)
    found = {}
    for name, build, data, options in (
        ("own train_step", own, arrays(), {"batch_size": 8}),
        ("accumulation", accumulating, arrays(), {"batch_size": BATCH}),
        ("both", both, arrays(), {"batch_size": BATCH}),
        ("written weight", spectral, arrays(), {"batch_size": BATCH}),
        ("unknown length", plain, (unknown,), {}),
        (
            "label out of range",
            plain,
            (np.zeros((8, 6)), np.full(8, 99)),
            {"batch_size": 8},
        ),
    ):
        try:
            mgpu_tf.Trainer(build, strategy).fit(*data, verbose=0, **options)
            found[name] = "nothing"
        except (ConfigurationError, tf.errors.OpError) as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    for name, options in (
        ("restore", {"on_nan": "restore"}),
        ("max_loss", {"on_nan": "stop", "max_loss": 3.0}),
    ):
        try:
            mgpu_tf.Trainer(plain, strategy, **options)
            found[name] = "nothing"
        except ConfigurationError as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    # What came before does no harm.
    trainer = mgpu_tf.Trainer(plain, strategy)
    trainer.fit(*arrays(), batch_size=BATCH, verbose=0)
    found["afterwards"] = trainer.global_step
    model = trainer.model
    model.make_train_function(force=True)
    try:
        trainer.fit(*arrays(), batch_size=BATCH, verbose=0)
    except ConfigurationError as error:
        found["traced anew"] = str(error)
    with strategy.scope():
        model.compile(sgd(0.1), model.loss)
    trainer.fit(*arrays(), batch_size=BATCH, verbose=0)
    found["compiled"] = trainer.global_step
    return found


def sharded_embedding(strategy):
    """Rows on all servers: looked up, learned, saved and loaded as one."""
    table = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")

    def build(num_shards=None):
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                mgpu_tf.layers.ShardedEmbedding(
                    11,
                    4,
                    num_shards=num_shards,
                    embeddings_initializer="zeros",
                ),
            ]
        )
        model.compile(sgd(0.5), "mse")
        return model

    ids = np.array([[0, 1], [2, 3], [0, 10], [5, 0]])
    target = np.ones((4, 2, 4), "float32")
    tables = {}
    for name, each in (
        ("async", strategy),
        ("one", mgpu_tf.create_one_device_strategy("CPU:0")),
    ):
        trainer = mgpu_tf.Trainer(build, each)
        (layer,) = trainer.model.layers
        with each.scope():
            for index, shard in enumerate(layer.shards):
                shard.assign(table[index :: len(layer.shards)])
        outputs = trainer.predict(ids, batch_size=4, verbose=0)
        # One step, so that the order of workers does not matter.
        trainer.fit(ids, target, batch_size=4, epochs=1, verbose=0)
        tables[name] = layer.embeddings
        if name == "async":
            found = {
                "devices": [
                    task_of(shard.value.device) for shard in layer.shards
                ],
                "lookup": largest(outputs, table[ids]),
            }
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.keras")
                trainer.save(path)
                with tf.distribute.get_strategy().scope():
                    loaded = keras.models.load_model(path, compile=False)
                three = build(num_shards=3)
                three.load_weights(path)
    (one,), (other,) = loaded.layers, three.layers
    return found | {
        "learned": largest(tables["async"], tables["one"]),
        "moved": largest(tables["async"][[0, 1, 2, 3, 5, 10]], table[0]),
        "untouched": largest(tables["async"][4], table[4]),
        "shards": [len(one.shards), len(other.shards)],
        "loaded": max(
            largest(one.embeddings, tables["async"]),
            largest(other.embeddings, tables["async"]),
        ),
    }


CASES = {
    **{
        f"equal_{name}": (lambda strategy, name=name: equal(name, strategy))
        for name in EQUAL
    },
    "equal_rows_sent": rows_sent,
    **{
        f"slots_{name}": (
            lambda strategy, name=name: slots.slots(name, strategy)
        )
        for name in slots.OPTIMIZERS
    },
    **{
        f"text_{name}": (lambda strategy, name=name: slots.text(name, strategy))
        for name in slots.TEXT
    },
    "half_made": slots.half_made,
    "statistics": slots.statistics,
    "digits_900": digits_900,
    "digits_of_two_seeds": functools.partial(digits_900, seeds=2),
    "saved_in_accumulation": saved_in_accumulation,
    "keeps_the_best": keeps_the_best,
    "task_of_keras_hub": task_of_keras_hub,
    "scores_of_1797": scores_of_1797,
    "each_example_once": each_example_once,
    "sharded_embedding": sharded_embedding,
    "staleness": staleness,
    "masks": masks,
    "stopped_early": stopped_early,
    "named_results": named_results,
    "callbacks_at_batches": callbacks_at_batches,
    "methods_of_the_model": methods_of_the_model,
    "raised_at_batch": raised_at_batch,
    "scores_of_one_batch": scores_of_one_batch,
    "few_batches": few_batches,
    "mistakes": mistakes,
}
