"""Runs that are broken off, and go on with the same bits or elsewhere."""

import keras
import numpy as np
import pytest

import mgpu_tf

# Two epochs of 50 examples in batches of 16.
STEPS = 2 * 4


def data(outputs, examples=50):
    """Six inputs, and three times the first of them as targets."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(examples, 6)).astype("float32")
    return x, x[:, :outputs] * 3


def fit(trainer, epochs=2, **options):
    return trainer.fit(
        *data(trainer.model.output_shape[-1]),
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **options,
    )


def state_of(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


class Stop(keras.callbacks.Callback):
    """Ends a `fit` in the middle, as a failure would."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._at:
            raise KeyboardInterrupt


def check_same_bits(build, strategy, folder):
    """A run that is broken off and resumed ends as one that is not."""

    def run(name, at=None):
        trainer = mgpu_tf.Trainer(build, strategy)
        saves = mgpu_tf.SaveOptions(str(folder / name), save_every_steps=1)
        fit(trainer, checkpoint=saves, callbacks=[Stop(at)])
        return trainer

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", at=2)
    resumed = run("broken")
    assert resumed.recovery.restarts == 1
    assert resumed.global_step == whole.global_step == STEPS
    for ours, theirs in zip(
        state_of(resumed.model), state_of(whole.model), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def check_elsewhere(build, first, then, folder):
    """The second epoch on another strategy, as if both had been there."""
    whole = mgpu_tf.Trainer(build, then)
    fit(whole)
    half = mgpu_tf.Trainer(build, first)
    fit(half, epochs=1, checkpoint_dir=str(folder))
    resumed = mgpu_tf.Trainer(build, then)
    fit(resumed, checkpoint_dir=str(folder))
    assert resumed.global_step == STEPS
    for ours, theirs in zip(
        state_of(resumed.model), state_of(whole.model), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
