"""A process that trains for long: nothing grows with the calls."""

import gc
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.errors import ConfigurationError


def build():
    layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    return model


def graphs():
    gc.collect()
    return sum(isinstance(each, tf.Graph) for each in gc.get_objects())


def objects():
    gc.collect()
    return len(gc.get_objects())


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def calls(trainer):
    """One of each call whose data is another dataset each time."""
    x = np.ones((24, 4), "float32")
    y = x[:, :1]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    options = {"batch_size": 6, "verbose": 0}

    def all_calls():
        trainer.fit(x, y, validation_data=(x, y), **options)
        trainer.fit(x, y, epochs=2, steps_per_epoch=3, **options)
        trainer.fit(dataset, epochs=2, verbose=0)
        trainer.evaluate(x, y, **options)
        trainer.predict(x, **options)

    return all_calls


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["mirrored_x3", "one_device", "fsdp_x3", "data_2_pipeline_2"]
)
def test_calls_leave_nothing(name, strategies):
    call = calls(mgpu_tf.Trainer(build, strategies[name]))
    for _ in range(2):
        call()
    before, known = graphs(), objects()
    for _ in range(2):
        call()
    assert graphs() <= before  # Others may be collected late.
    # What each epoch is recorded in, and caches of TensorFlow.
    assert (objects() - known) / 2 < 100


@pytest.mark.matrix
def test_a_thousand_fits(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    x = np.ones((24, 4), "float32")

    def fits(count):
        for _ in range(count):
            trainer.fit(x, x[:, :1], batch_size=6, verbose=0)

    fits(100)
    known, before = graphs(), resident_bytes()  # Collected first.
    fits(1000)
    assert graphs() == known
    assert (resident_bytes() - before) / 1000 < 8192


def test_one_call_at_a_time(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    x = np.ones((8, 4), "float32")
    found = []

    class Other(keras.callbacks.Callback):
        """Calls the trainer, from this thread and from another one."""

        def on_epoch_end(self, epoch, logs=None):
            trainer.evaluate(x, x[:, :1], verbose=0)

            def call():
                try:
                    trainer.fit(x, x[:, :1], verbose=0)
                except ConfigurationError as error:
                    found.append(str(error))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    trainer.fit(x, x[:, :1], verbose=0, callbacks=[Other()])
    (message,) = found
    assert message.startswith("A trainer takes one call at a time")
    trainer.fit(x, x[:, :1], verbose=0)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**40, 1.5, True, "a", [1]])
def test_a_seed_that_is_none_changes_nothing(seed, strategies):
    keras.utils.set_random_seed(3)
    with pytest.raises(ConfigurationError, match="seed must be an integer"):
        mgpu_tf.Trainer(build, strategies["one_device"], seed=seed)
    one = mgpu_tf.Trainer(build, strategies["one_device"])
    other = mgpu_tf.Trainer(build, strategies["one_device"], seed=3)
    for a, b in zip(
        one.model.get_weights(), other.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("of", ["x", "y"])
def test_complex_numbers_are_refused(of, strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    x = np.ones((8, 4), "complex64" if of == "x" else "float32")
    y = np.ones((8, 1), "complex64" if of == "y" else "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    for data in ((x, y), (dataset,)):
        with pytest.raises(ConfigurationError, match=f"{of} of type complex64"):
            trainer.fit(*data, verbose=0)


def test_a_generator_whose_types_change(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])

    def batches():
        for number in range(4):
            kind = "int64" if number < 3 else "float32"
            yield np.ones((2, 4), "float32"), np.ones((2, 1), kind)

    with pytest.raises(ConfigurationError, match="float32 after int64"):
        trainer.fit(batches(), steps_per_epoch=4, verbose=0)


def test_an_epoch_of_which_all_is_left_out(strategies, tmp_path):
    trainer = mgpu_tf.Trainer(
        build,
        strategies["one_device"],
        on_nan="restore",
        max_loss=1e-9,
        max_restores=9,
    )
    x = np.ones((8, 4), "float32")
    with pytest.raises(mgpu_tf.DivergedError, match="2 batches are all left"):
        trainer.fit(
            x,
            100 * x[:, :1],
            batch_size=4,
            verbose=0,
            checkpoint_dir=str(tmp_path),
        )
