"""Programs that draw, stopped in the middle of an epoch and resumed."""

import os

import keras

import mgpu_tf
from mgpu_tf.reports.report import weights_sha256
from tests.conformance.draws import EPOCHS, PROGRAMS
from tests.parity import cases

# In the third epoch, with a checkpoint of the second.
STEPS = 12
STOPPED_AFTER = 10
SAVE_EVERY_STEPS = 5


class Stopped(Exception):
    """The run ends without a word to anybody, as when it is killed."""


def train(name, strategy, folder, after=None):
    """Returns the hash of all state, the losses, and the steps done here.

    None where it stopped.
    """
    build, data = PROGRAMS[name]
    done = []

    def count(batch, logs=None):
        # What a callback holds itself goes on in a resumed run.
        done.append(batch)
        if len(done) == after:
            raise Stopped

    cases.set_floatx("float64")
    try:
        trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
        history = trainer.fit(
            data(),
            epochs=EPOCHS,
            verbose=0,
            shuffle=False,
            callbacks=[
                keras.callbacks.LambdaCallback(on_train_batch_end=count)
            ],
            checkpoint=mgpu_tf.SaveOptions(
                str(folder), save_every_steps=SAVE_EVERY_STEPS
            ),
        ).history
    except Stopped:
        return None
    finally:
        cases.set_floatx("float32")
    state = [
        keras.ops.convert_to_numpy(variable)
        for variable in (
            *trainer.model.variables,
            *trainer.model.optimizer.variables,
        )
    ]
    return weights_sha256(state), history, len(done)


def stopped_and_resumed(name, strategy, folder):
    """Returns what three runs leave: whole, stopped, and resumed."""
    whole = train(name, strategy, os.path.join(folder, "whole"))
    broken = os.path.join(folder, "broken")
    stopped = train(name, strategy, broken, STOPPED_AFTER)
    return whole, stopped, train(name, strategy, broken)


def _job(name):
    return lambda strategy, folder: stopped_and_resumed(
        name, strategy, os.path.join(folder, name)
    )


JOBS = {name: _job(name) for name in PROGRAMS}
