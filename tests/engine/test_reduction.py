import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.mesh import packs


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], [[0]]),
        ([4, 90, 3, 2, 5], [[4, 3, 2], [1], [0]]),
        ([10, 9], [[0], [1]]),
        ([1, 2, 50, 3], [[2], [3, 1, 0]]),
    ],
)
def test_packs(sizes, expected):
    assert packs(sizes, pack_bytes=10) == expected


def weights(strategy, gradient_dtype):
    import keras

    def build_model():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    random = np.random.default_rng(0)
    x = random.standard_normal((16, 3), np.float32)
    trainer = mgpu_tf.Trainer(
        build_model, strategy, gradient_dtype=gradient_dtype
    )
    trainer.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0)
    return np.concatenate([w.ravel() for w in trainer.model.get_weights()])


def sources_of(operation):
    """Returns all operations that one waits for."""
    found, queue = set(), [operation]
    while queue:
        one = queue.pop()
        before = [value.op for value in one.inputs] + one.control_inputs
        queue += [each for each in before if each not in found]
        found.update(before)
    return found


def test_a_step_reduces_large_gradients_alone_and_as_soon_as_they_are_there(
    strategies,
):
    """By the graph of a step on one machine, on each replica."""
    import keras
    import tensorflow as tf

    width, graphs = 512, []  # A kernel has 1 MiB, and so goes alone.

    class Noted(keras.layers.Dense):
        def call(self, inputs):
            graphs.append(tf.compat.v1.get_default_graph())
            return super().call(inputs)

    def build_model():
        layers = [Noted(width, name=f"layer_{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    trainer = mgpu_tf.Trainer(build_model, strategies["mirrored_x3"])
    x = np.ones((6, width), "float32")
    trainer.fit(x, x, batch_size=6, verbose=0)
    every = graphs[-1].get_operations()
    sums = [
        each
        for each in every
        if each.type == "AddN" and "reduce" in each.name.split("/")
    ]
    kernel, biases = 4 * width**2, 3 * 4 * width
    for replica in range(3):
        taken = [each.inputs[replica] for each in sums]
        sizes = [each.shape.num_elements() * each.dtype.size for each in taken]
        assert sizes == [kernel, kernel, kernel, biases]
        last, middle, first = (each.op for each in taken[:3])
        needed = sources_of(sums[0])
        assert last in needed
        assert not {middle, first} & needed
    # TensorFlow would keep a record of each that has run.
    assert not [each for each in every if each.type.startswith("Collective")]


def test_gradients_are_sent_as_asked(strategies):
    exact = weights(strategies["mirrored_x2"], None)
    alone = weights(strategies["one_device"], None)
    half = weights(strategies["mirrored_x2"], "bfloat16")
    np.testing.assert_allclose(exact, alone, rtol=1e-5)
    np.testing.assert_allclose(half, exact, rtol=0.02, atol=1e-3)
    assert np.abs(half - exact).max() > 1e-6


def test_unknown_gradient_dtype(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="gradient_dtype"):
        weights(strategies["one_device"], "bfloat61")


def test_gradients_of_several_types(strategies):
    import keras

    def build_model():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="float64"),
                keras.layers.Dense(4, dtype="float64"),
                keras.layers.Dense(2, dtype="float32"),
                keras.layers.Dense(2, dtype="float64"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x = np.random.default_rng(0).standard_normal((16, 3))
    found = []
    for name in ("one_device", "mirrored_x3"):
        trainer = mgpu_tf.Trainer(build_model, strategies[name])
        trainer.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0)
        found.append(trainer.model.get_weights())
    for alone, several in zip(*found, strict=True):
        assert alone.dtype == several.dtype
        np.testing.assert_allclose(several, alone, rtol=1e-5, atol=1e-7)
