"""Workers that wait for each other in different places, ended by one line.

TensorFlow can only end such waiting for good, so a cluster has one such job.
It returns what the worker was told, and what it is told in a later call.
"""

import keras

import mgpu_tf
from tests.jobs.alike import BATCH, X, Y, me, model, told


class OnTheChief(keras.callbacks.Callback):
    """Does something in one hook, of the chief alone."""

    def __init__(self, hook, act):
        super().__init__()
        setattr(self, hook, self._once)
        self._act = act

    def _once(self, *_, **__):
        if me() == 0:
            self._act()


def during(strategy, hook, act, **options):
    trainer = mgpu_tf.Trainer(model, strategy)

    def fit():
        callback = OnTheChief(hook, lambda: act(trainer))
        trainer.fit(
            *(X, Y),
            batch_size=BATCH,
            epochs=3,
            verbose=0,
            callbacks=[callback],
            **options,
        )

    return {
        "told": told(fit),
        "later": told(lambda: mgpu_tf.Trainer(model, strategy)),
    }


def evaluate(trainer):
    trainer.evaluate(X, Y, verbose=0)


def evaluate_on_epoch_end(strategy, folder):
    return during(strategy, "on_epoch_end", evaluate)


def save_on_epoch_begin(strategy, folder):
    return during(
        strategy,
        "on_epoch_begin",
        lambda trainer: trainer.save(f"{folder}/model.keras"),
    )


def predict_on_test_end(strategy, folder):
    return during(
        strategy,
        "on_test_end",
        lambda trainer: trainer.predict(X, verbose=0),
        validation_data=(X, Y),
    )


def evaluate_of_the_model(strategy, folder):
    return during(
        strategy,
        "on_epoch_end",
        lambda trainer: trainer.model.evaluate(X, Y, verbose=0),
    )


def fit_on_train_batch_end(strategy, folder):
    return during(
        strategy,
        "on_train_batch_end",
        lambda trainer: trainer.fit(X, Y, verbose=0),
    )


def failure_of_one(strategy, folder):
    def fail(trainer):
        raise ArithmeticError("of the chief")

    return during(strategy, "on_epoch_end", fail)


CALLED = "ConfigurationError All workers must have the same call. Received: "
TOLD = {
    evaluate_on_epoch_end: CALLED + "evaluate of its own on worker 0, the next "
    "step of fit on worker 1. Call evaluate on every worker, in callbacks too.",
    save_on_epoch_begin: CALLED + "save of its own on worker 0, the next step "
    "of fit on worker 1. Call save on every worker, in callbacks too.",
    predict_on_test_end: CALLED + "predict of its own on worker 0",
    fit_on_train_batch_end: CALLED + "fit of its own on worker 0",
    evaluate_of_the_model: CALLED + "evaluate of its own on worker 0, the next "
    "step of fit on worker 1. Call evaluate on every worker, in callbacks too.",
    failure_of_one: "of the chief",
}
LATER = "WorkerError A cluster whose workers were parted by a failure cannot go"
JOBS = {job.__name__: job for job in TOLD}
