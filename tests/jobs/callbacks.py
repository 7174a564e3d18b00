"""Keras's callbacks on a cluster: what they decided and which files they left.

Paths hold the number of the worker, so that a file tells who wrote it.
"""

import glob
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.reports.report import weights_sha256

SIZE = 40


def numbers():
    generator = np.random.default_rng(5)
    x = generator.normal(size=(SIZE, 4)).astype("float32")
    return x, (x.sum(1, keepdims=True) + 0.1).astype("float32")


def build(**optimizer):
    def make():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(
                **{"learning_rate": 0.05, "momentum": 0.9} | optimizer
            ),
            "mse",
        )
        return model

    return make


def worker():
    cluster = mgpu_tf.ClusterConfig.from_environment()
    return 0 if cluster is None else cluster.worker_index


def fit(strategy, callbacks, epochs=5, **options):
    optimizer = options.pop("optimizer", {})
    trainer = mgpu_tf.Trainer(build(**optimizer), strategy)
    history = trainer.fit(
        *numbers(),
        batch_size=10,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
        **options,
    )
    return trainer, {
        "epochs": len(history.epoch),
        "loss": history.history["loss"],
        "weights": weights_sha256(trainer.model.get_weights()),
    }


def files(pattern):
    return sorted(os.path.basename(path) for path in glob.glob(pattern))


def early_stopping(strategy, folder):
    """Validated on other targets, so that the score gets worse."""
    x, y = numbers()
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    _, seen = fit(strategy, [stop], epochs=30, validation_data=(x, -y))
    return seen | {"stopped": stop.stopped_epoch, "best": stop.best_epoch}


def reduce_on_plateau(strategy, folder):
    x, y = numbers()
    reduce = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1)
    trainer, seen = fit(strategy, [reduce], validation_data=(x, -y))
    rate = float(trainer.model.optimizer.learning_rate.numpy())
    return seen | {"rate": rate}


def schedule(strategy, folder):
    change = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.05 / (1 + epoch)
    )
    trainer, seen = fit(strategy, [change])
    return seen | {"rate": float(trainer.model.optimizer.learning_rate.numpy())}


def model_checkpoint(strategy, folder):
    path = os.path.join(folder, f"last-{worker()}.keras")
    save = keras.callbacks.ModelCheckpoint(path)
    _, seen = fit(strategy, [save])
    if worker() == 0:
        saved = keras.models.load_model(path).get_weights()
        assert weights_sha256(saved) == seen["weights"]
    return seen


def backup_and_restore(strategy, folder):
    """Broken off after 2 epochs, a new trainer goes on with the third."""
    path = os.path.join(folder, f"backup-{strategy.num_replicas_in_sync}")

    def backup():
        return keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)

    _, first = fit(strategy, [backup()], epochs=2, shuffle=False)
    _, rest = fit(strategy, [backup()], epochs=4, shuffle=False)
    _, whole = fit(strategy, [], epochs=4, shuffle=False)
    np.testing.assert_allclose(
        first["loss"] + rest["loss"], whole["loss"], rtol=1e-6
    )
    return rest


def csv_logger(strategy, folder):
    path = os.path.join(folder, f"log-{worker()}.csv")
    _, seen = fit(strategy, [keras.callbacks.CSVLogger(path)])
    return seen


def tensorboard(strategy, folder):
    path = os.path.join(folder, f"board-{worker()}")
    board = keras.callbacks.TensorBoard(path, update_freq="epoch")
    _, seen = fit(strategy, [board])
    return seen


def terminate_on_nan(strategy, folder):
    _, seen = fit(
        strategy,
        [keras.callbacks.TerminateOnNaN()],
        epochs=200,
        optimizer={"learning_rate": 1e6},
    )
    assert not np.isfinite(seen["loss"][-1])
    return {"epochs": seen["epochs"]}


def of_lambda(strategy, folder):
    """A callback of lambdas, with a hook for each batch: 4 in an epoch."""
    calls = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: calls.append(f"epoch {epoch}"),
        on_train_batch_end=lambda batch, logs: calls.append(f"batch {batch}"),
    )
    _, seen = fit(strategy, [watch], epochs=2)
    return seen | {"calls": calls}


def swap_ema_weights(strategy, folder):
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    _, seen = fit(
        strategy, [swap], optimizer={"use_ema": True, "ema_momentum": 0.5}
    )
    return seen


class Own(keras.callbacks.Callback):
    """Of a user: ends the training early in an epoch, on worker 0 only."""

    def on_train_batch_end(self, batch, logs=None):
        if worker() == 0 and batch == 1:
            self.model.stop_training = True


def of_ones_own(strategy, folder):
    trainer, seen = fit(strategy, [Own()])
    return seen | {"steps": trainer.global_step}


class Applies(keras.callbacks.Callback):
    """Gives the optimizer gradients that are the same on all workers."""

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.trainable_variables
        ones = [tf.ones(weight.shape, weight.dtype) for weight in weights]
        self.model.optimizer.apply(ones, weights)


def applied_outside(strategy, folder):
    """The last micro-step of an accumulation is one outside of a step."""
    optimizer = {"gradient_accumulation_steps": 4}
    _, seen = fit(strategy, [Applies()], optimizer=optimizer)
    return seen


def on_the_chief_only(strategy, folder):
    """A script that gives its callback to one worker, as many do."""
    trainer, seen = fit(strategy, [Own()] if worker() == 0 else [])
    return seen | {"steps": trainer.global_step}


JOBS = {
    job.__name__: job
    for job in (
        early_stopping,
        reduce_on_plateau,
        schedule,
        model_checkpoint,
        backup_and_restore,
        csv_logger,
        tensorboard,
        terminate_on_nan,
        of_lambda,
        swap_ema_weights,
        of_ones_own,
        applied_outside,
        on_the_chief_only,
    )
}
