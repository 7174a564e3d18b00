"""What `compile` and `fit` take besides the data, and Keras's callbacks."""

import contextlib
import glob
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.core.util import event_pb2

from tests.conformance import models
from tests.conformance.harness import add, row
from tests.conformance.structures import two_outputs

GROUP = "Options of compile"


def _targets():
    return [models.numbers(), models.numbers(width=2, seed=12)]


def _compiled(name, excuses=(), **options):
    def program(run):
        build = models.dense(
            optimizer=lambda: keras.optimizers.Adam(0.05), **options
        )
        run.use(
            build,
            models.points(),
            models.numbers(),
            sample_weight=models.weights(),
        )

    add(GROUP, name, program, excuses=excuses)


_compiled("run_eagerly", run_eagerly=True, metrics=["mae"])
_compiled("steps_per_execution of 3", steps_per_execution=3, metrics=["mae"])
_compiled("steps_per_execution of 8", steps_per_execution=8, metrics=["mae"])
_compiled("jit_compile", jit_compile=True, metrics=["mae"])
_compiled("jit_compile auto", jit_compile="auto", metrics=["mae"])
_compiled("weighted_metrics", weighted_metrics=["mae", "mse"])
_compiled(
    "metrics and weighted_metrics", metrics=["mae"], weighted_metrics=["mae"]
)
_compiled("auto_scale_loss off", auto_scale_loss=False)
_compiled("loss_weights of one", loss_weights=[0.3])
_compiled("loss_weights a number", loss_weights=0.3)
_compiled("metrics in a list of lists", metrics=[["mae"]])


@row(GROUP)
def run_eagerly_is_eager(run):
    """A model whose `call` needs values runs only eagerly."""

    class Looks(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            scale = 1.0 if float(tf.reduce_sum(x)) > 1e9 else 0.5
            return scale * self.dense(x)

    def build():
        return models.compiled(Looks(), run_eagerly=True)

    run.use(build, models.points(), models.numbers())


@row(GROUP)
def functions_run_eagerly(run):
    """As people debug: every tf.function runs eagerly."""
    tf.config.run_functions_eagerly(True)
    try:
        run.fit(models.dense(), models.points(), models.numbers())
    finally:
        tf.config.run_functions_eagerly(False)


@row(GROUP)
def numpy_in_a_loss_with_run_eagerly(run):
    def loss(y, prediction):
        assert isinstance(y.numpy(), np.ndarray)
        return tf.square(y - prediction)

    build = models.dense(loss=lambda: loss, run_eagerly=True)
    run.fit(build, models.points(), models.numbers())


for _name, _weights in {
    "a list": [1.0, 0.3],
    "a list with a zero": [1.0, 0.0],
}.items():

    def _weighed(run, weights=_weights):
        build = two_outputs(
            loss=["mse", "mse"],
            loss_weights=weights,
            metrics=[["mae"], ["mse"]],
        )
        run.fit(build, models.points(), _targets())

    add(GROUP, f"loss_weights {_name}", _weighed)


@row(GROUP)
def losses_in_a_dict_with_weights(run):
    build = two_outputs(
        dict,
        loss={"one": "mae", "two": keras.losses.Huber()},
        loss_weights={"one": 0.2, "two": 2.0},
        metrics={"one": ["mae"], "two": ["mse", "mae"]},
    )
    y = dict(zip(("one", "two"), _targets(), strict=True))
    run.fit(build, models.points(), y)


@row(GROUP)
def one_loss_of_two_outputs_is_none(run):
    build = two_outputs(dict, loss={"one": "mse", "two": None})
    y = dict(zip(("one", "two"), _targets(), strict=True))
    run.fit(build, models.points(), y)


@row(GROUP)
def losses_in_a_list(run):
    build = two_outputs(loss=["mse", "mae"])
    run.fit(build, models.points(), _targets())


def _compiling_again(name, change, scoped):
    """A model trained, changed, compiled with another optimizer, trained."""

    def program(run):
        x, y = models.points(), models.numbers()
        trainer = run.trainer(models.dense())
        trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        change(trainer.model)
        with run.scope() if scoped else contextlib.nullcontext():
            optimizer = keras.optimizers.Adam(0.05)
            models.compiled(trainer.model, "mae", optimizer, metrics=["mse"])
        run.use(None, x, y, trainer=trainer)

    where = "in the scope" if scoped else "outside of the scope"
    add(GROUP, f"{name} {where}", program)


def _freeze(model):
    model.layers[0].trainable = False


for _scoped in (True, False):
    _compiling_again("compiled again", lambda model: None, _scoped)
    _compiling_again("frozen and compiled again", _freeze, _scoped)


@row(GROUP)
def weights_set_between_fits(run):
    x, y = models.points(), models.numbers()
    trainer = run.trainer(models.dense())
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    halved = [w * 0.5 for w in trainer.model.get_weights()]
    trainer.model.set_weights(halved)
    run.use(None, x, y, trainer=trainer)


@row(GROUP)
def learning_rate_set_between_fits(run):
    x, y = models.points(), models.numbers()
    trainer = run.trainer(models.dense())
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    trainer.model.optimizer.learning_rate = 0.01
    run.fit(None, x, y, trainer=trainer)


@row(GROUP)
def evaluated_and_predicted_before_training(run):
    x, y = models.points(), models.numbers()
    trainer = run.trainer(models.dense(metrics=["mae"]))
    run.see("before", trainer.evaluate(x, y, batch_size=8, verbose=0))
    run.see("first", trainer.predict(x, batch_size=8, verbose=0))
    run.fit(None, x, y, trainer=trainer)


@row(GROUP)
def saved_and_loaded(run):
    x, y = models.points(), models.numbers()

    def build():
        return models.dense(optimizer=lambda: keras.optimizers.Adam(0.05))()

    first = build()
    first.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        first.save(path)
        run.fit(lambda: keras.models.load_model(path), x, y)


# Callbacks.

CALLBACKS = "Callbacks of Keras"


def _watching(name, make, group=CALLBACKS, excuses=(), **options):
    """Adds a row whose callbacks may look at a folder of their own."""

    def program(run):
        with tempfile.TemporaryDirectory() as folder:
            data = models.points(13, seed=7), models.numbers(13, seed=8)
            callbacks = make(folder)
            run.fit(
                models.dense(metrics=["mae"]),
                models.points(),
                models.numbers(),
                callbacks=callbacks,
                validation_data=data,
                **({"epochs": 4} | options),
            )
            _see_files(run, folder)

    add(group, name, program, excuses=excuses)


def _see_files(run, folder):
    """What callbacks wrote: names, numbers in CSV, weights, steps of events."""
    for path in sorted(glob.glob(os.path.join(folder, "**"), recursive=True)):
        if path.endswith(".csv"):
            with open(path) as file:
                lines = [line.split(",") for line in file.read().split()]
            run.see("csv head", lines[0])
            run.see("csv", np.array(lines[1:], dtype="float64"))
        if path.endswith(".json"):
            with open(path) as file:
                run.see(os.path.basename(path), file.read())
        if ".tfevents." in path:
            records = tf.data.TFRecordDataset(path).as_numpy_iterator()
            events = map(event_pb2.Event.FromString, records)
            run.see(
                f"events of {os.path.basename(os.path.dirname(path))}",
                [
                    f"{value.tag} at {event.step}"
                    for event in events
                    for value in event.summary.value
                ],
            )
        if path.endswith(".keras"):
            name = os.path.basename(path)
            saved = keras.models.load_model(path)
            run.see(f"file {name}", saved.get_weights())


@row(CALLBACKS)
def the_order_of_hooks_of_epochs(run):
    called = []

    class Ordered(keras.callbacks.Callback):
        pass

    def note(name):
        def hook(self, *arguments):
            at = [a for a in arguments if isinstance(a, int)]
            called.append(f"{name} {at}")

        return hook

    for name in (
        "on_train_begin",
        "on_train_end",
        "on_epoch_begin",
        "on_epoch_end",
        "on_test_begin",
        "on_test_end",
        "on_predict_begin",
        "on_predict_end",
    ):
        setattr(Ordered, name, note(name))
    data = models.points(13, seed=7), models.numbers(13, seed=8)
    run.use(
        models.dense(),
        models.points(),
        models.numbers(),
        callbacks=[Ordered()],
        validation_data=data,
    )
    run.see("called", called)


@row(CALLBACKS)
def the_order_of_hooks_of_batches(run):
    called, losses = [], []

    class Ordered(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            called.append(f"begin {batch}")

        def on_train_batch_end(self, batch, logs=None):
            called.append(f"end {batch}")
            losses.append(float(logs["loss"]))

        def on_test_batch_end(self, batch, logs=None):
            called.append(f"tested {batch}")

        def on_predict_batch_end(self, batch, logs=None):
            called.append(f"predicted {batch} {sorted(logs)}")

    data = models.points(13, seed=7), models.numbers(13, seed=8)
    run.use(
        models.dense(),
        models.points(),
        models.numbers(),
        callbacks=[Ordered()],
        validation_data=data,
    )
    run.see("called", called)
    run.see("losses", losses)


_watching(
    "EarlyStopping",
    lambda folder: [
        keras.callbacks.EarlyStopping(
            patience=0, min_delta=0.5, restore_best_weights=True
        )
    ],
)
_watching(
    "ReduceLROnPlateau",
    lambda folder: [
        keras.callbacks.ReduceLROnPlateau(
            patience=1, min_delta=1.0, factor=0.5, monitor="loss"
        )
    ],
)
_watching(
    "LearningRateScheduler",
    lambda folder: [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    ],
)
_watching(
    "CSVLogger",
    lambda folder: [keras.callbacks.CSVLogger(os.path.join(folder, "l.csv"))],
)
_watching(
    "ModelCheckpoint",
    lambda folder: [
        keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "at-{epoch}.keras")
        )
    ],
)
_watching(
    "ModelCheckpoint, the best",
    lambda folder: [
        keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "best.keras"), save_best_only=True
        )
    ],
)
_watching(
    "TensorBoard",
    lambda folder: [keras.callbacks.TensorBoard(folder, histogram_freq=1)],
)
_watching(
    "BackupAndRestore",
    lambda folder: [
        keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
    ],
)
_watching(
    "ModelCheckpoint, by batches",
    lambda folder: [
        keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "{epoch}-{batch}.keras"), save_freq=2
        )
    ],
)
_watching(
    "TensorBoard, by batches",
    lambda folder: [keras.callbacks.TensorBoard(folder, update_freq=2)],
)
_watching(
    "BackupAndRestore, by batches",
    lambda folder: [
        keras.callbacks.BackupAndRestore(
            os.path.join(folder, "backup"),
            save_freq=3,
            delete_checkpoint=False,
        )
    ],
)
_watching(
    "SwapEMAWeights",
    lambda folder: [keras.callbacks.SwapEMAWeights()],
)
_watching("TerminateOnNaN", lambda folder: [keras.callbacks.TerminateOnNaN()])
_watching("History", lambda folder: [keras.callbacks.History()])
_watching(
    "CallbackList",
    lambda folder: keras.callbacks.CallbackList(
        [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))]
    ),
)
_watching(
    "LambdaCallback",
    lambda folder: [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    ],
)
_watching(
    "ProgbarLogger", lambda folder: [keras.callbacks.ProgbarLogger()], epochs=1
)


@row(CALLBACKS)
def terminate_on_nan_that_comes(run):
    x = models.points()
    x[20] = np.inf
    run.fit(
        models.dense(),
        x,
        models.numbers(),
        callbacks=[keras.callbacks.TerminateOnNaN()],
        epochs=4,
    )


@row(CALLBACKS)
def swap_ema_weights(run):
    data = models.points(13, seed=7), models.numbers(13, seed=8)
    run.fit(
        models.dense(
            optimizer=lambda: keras.optimizers.Adam(
                0.05, use_ema=True, ema_momentum=0.7
            )
        ),
        models.points(),
        models.numbers(),
        validation_data=data,
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )


@row(CALLBACKS)
def stop_training_in_a_batch(run):
    """A callback that stops in the middle of an epoch."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.stop_training = True

    run.fit(
        models.dense(), models.points(), models.numbers(), callbacks=[Stops()]
    )


@row(CALLBACKS)
def a_callback_that_sets_the_rate_in_each_batch(run):
    class Warms(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.01 * (batch + 1)

    run.fit(
        models.dense(), models.points(), models.numbers(), callbacks=[Warms()]
    )


@row(CALLBACKS)
def a_callback_that_writes_weights(run):
    class Clips(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for weight in self.model.trainable_variables:
                weight.assign(tf.clip_by_value(weight, -0.3, 0.3))

    run.fit(
        models.dense(), models.points(), models.numbers(), callbacks=[Clips()]
    )


@row(CALLBACKS)
def a_callback_that_adds_to_the_logs(run):
    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["rate"] = float(
                keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
            )

    run.fit(
        models.dense(), models.points(), models.numbers(), callbacks=[Adds()]
    )


@row(CALLBACKS)
def a_callback_that_evaluates(run):
    """As people do: `self.model.evaluate` at the end of epochs."""
    scores = []

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            scores.append(
                self.model.evaluate(
                    models.points(13, seed=7),
                    models.numbers(13, seed=8),
                    batch_size=5,
                    verbose=0,
                )
            )

    run.fit(
        models.dense(),
        models.points(),
        models.numbers(),
        callbacks=[Evaluates()],
    )
    run.see("scores", scores)


@row(CALLBACKS)
def a_callback_that_predicts(run):
    found = []

    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            x = models.points(13, seed=7)
            found.append(self.model.predict(x, batch_size=5, verbose=0))

    run.fit(
        models.dense(),
        models.points(),
        models.numbers(),
        callbacks=[Predicts()],
    )
    run.see("found", found)


@row(CALLBACKS)
def a_callback_that_calls_the_model(run):
    found = []

    class Calls(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found.append(self.model(models.points(3), training=False))

    run.fit(
        models.dense(), models.points(), models.numbers(), callbacks=[Calls()]
    )
    run.see("found", found)
