"""A run that resumes under another seed reads each example once an epoch."""

import logging

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.checkpoints import run_state

EXAMPLES, BATCH = 20, 4


def build():
    """Weight i counts how often the model was trained on example i."""
    model = keras.Sequential(
        [
            keras.Input((EXAMPLES,)),
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer=keras.initializers.Zeros()
            ),
        ]
    )
    model.compile(
        keras.optimizers.SGD(float(BATCH)), lambda y, prediction: -prediction
    )
    return model


def seeded():
    """As many scripts do, in the function that builds the model."""
    keras.utils.set_random_seed(3)
    return build()


class Interrupted(Exception):
    pass


def ends(after):
    """A callback without state, that raises after some steps; never for 0."""
    left = [after]

    def count(batch, logs):
        left[0] -= 1
        if not left[0]:
            raise Interrupted

    return keras.callbacks.LambdaCallback(on_train_batch_end=count)


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return EXAMPLES // BATCH

    def __getitem__(self, place):
        rows = slice(BATCH * place, BATCH * place + BATCH)
        return one_hot()[rows], np.zeros((BATCH, 1), "float32")


def one_hot():
    return np.eye(EXAMPLES, dtype="float32")


def arrays():
    return {"x": one_hot(), "y": np.zeros((EXAMPLES, 1), "float32")}


def by_number():
    zero = np.zeros(1, "float32")
    return {"x": mgpu_tf.RandomAccess([(row, zero) for row in one_hot()])}


KINDS = {
    "arrays": (arrays, {"batch_size": BATCH}),
    "batches": (arrays, {"batch_size": BATCH, "shuffle": "batch"}),
    "by number": (by_number, {"batch_size": BATCH, "shuffle": True}),
    "PyDataset": (lambda: {"x": Rows()}, {"shuffle": True}),
}


def fit(folder, kind="arrays", seed="auto", build=build, steps=0, **options):
    """How often each example was trained on."""
    data, given = KINDS[kind]
    trainer = mgpu_tf.Trainer(build, seed=seed)
    trainer.fit(
        **data(),
        **given | options,
        verbose=0,
        callbacks=[ends(steps)],
        checkpoint=mgpu_tf.SaveOptions(str(folder), save_every_steps=1),
    )
    return trainer.model.get_weights()[0].ravel()


def interrupted(*arguments, **options):
    with pytest.raises(Interrupted):
        fit(*arguments, steps=3, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed(kind, tmp_path, caplog):
    interrupted(tmp_path, kind, 1)
    with caplog.at_level(logging.WARNING):
        counts = fit(tmp_path, kind, 2)
    np.testing.assert_array_equal(counts, np.ones(EXAMPLES))
    assert "seed=1. Received: seed=2" in caplog.text


def test_no_shuffle_any_more(tmp_path, caplog):
    interrupted(tmp_path)
    with caplog.at_level(logging.WARNING):
        counts = fit(tmp_path, shuffle=False)
    np.testing.assert_array_equal(counts, np.ones(EXAMPLES))
    assert "shuffle=True. Received: shuffle=False" in caplog.text


def test_the_same_call_again_where_build_model_sets_a_seed(tmp_path, caplog):
    interrupted(tmp_path, build=seeded)
    with caplog.at_level(logging.WARNING):
        counts = fit(tmp_path, build=seeded)
    np.testing.assert_array_equal(counts, np.ones(EXAMPLES))
    assert "order of rows" not in caplog.text


def test_a_seed_of_build_model_is_not_that_of_the_next_trainer():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype("float32")

    def seeded():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    first, second = (
        mgpu_tf.Trainer(seeded).fit(x, x[:, :1], batch_size=BATCH, verbose=0)
        for _ in range(2)
    )
    assert first.history == second.history


def test_checkpoints_from_before_the_order_was_kept(tmp_path, monkeypatch):
    capture = run_state.RunState.capture

    def without_order(run):
        step, state, pieces = capture(run)
        assert state.pop("order") == {"shuffle": True, "seed": 1}
        return step, state, pieces

    with monkeypatch.context() as context:
        context.setattr(run_state.RunState, "capture", without_order)
        interrupted(tmp_path, seed=1)
    counts = fit(tmp_path, seed=1)
    np.testing.assert_array_equal(counts, np.ones(EXAMPLES))
