"""The arrays of a run are gone with it, and wait for no garbage collector."""

import contextlib
import gc
import weakref

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf import data
from mgpu_tf.data.feed import distribute
from mgpu_tf.data.sources.batches import MappedSource


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("continuous", [False, True])
def test_datasets_keep_no_array(continuous, mapped, shuffle, strategies):
    with without_collector():
        x = np.arange(24.0, dtype="float32").reshape(12, 2)
        own = source = data.ArraySource((x, None), 4, shuffle=shuffle, seed=1)
        if mapped:
            source = MappedSource(source, lambda batch: batch)
        kept = [weakref.ref(array) for array in own.leaves]
        iterator = iter(
            distribute(
                source, strategies["one_device"], continuous=continuous, start=1
            )
        )
        rows = [next(iterator)[0][0].numpy() for _ in range(2)]
        expected = [own.leaves[0].numpy()[4:8], own.leaves[0].numpy()[8:]]
        if not shuffle:
            np.testing.assert_array_equal(rows, expected)
        del own, source, iterator
        assert [array() for array in kept] == [None]


def test_a_run_keeps_no_array(strategies):
    def build():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    x = np.arange(24.0, dtype="float32").reshape(12, 2)
    kept = []
    own = data.ArraySource.__init__

    def noted(self, *arguments, **named):
        own(self, *arguments, **named)
        kept.extend(weakref.ref(array) for array in self.leaves)

    with pytest.MonkeyPatch.context() as patch, without_collector():
        patch.setattr(data.ArraySource, "__init__", noted)
        for _ in range(2):
            trainer.fit(x, x[:, 0], batch_size=4, epochs=2, verbose=0)
        found = [array() is None for array in kept]
    assert found == 4 * [True]
