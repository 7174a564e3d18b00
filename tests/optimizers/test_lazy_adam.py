"""LazyAdam against its formula in NumPy, and against Keras's Adam."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.optimizers import LazyAdam

ROWS, WIDTH, STEPS = 7, 3, 6


def by_hand(table, batches, *, rate, epsilon, amsgrad):
    """PyTorch's SparseAdam: rows of an index are summed, others stay."""
    table = table.copy()
    m, v, largest = (np.zeros_like(table) for _ in range(3))
    # Keras rounds the two to float32 where it takes their powers.
    first, second = float(np.float32(0.9)), float(np.float32(0.999))
    for t, (indices, values) in enumerate(batches, 1):
        summed = np.zeros_like(table)
        np.add.at(summed, indices, values)
        rows = np.unique(indices)
        g = summed[rows]
        m[rows] += (1 - 0.9) * (g - m[rows])
        v[rows] += (1 - 0.999) * (g**2 - v[rows])
        largest[rows] = np.maximum(largest[rows], v[rows])
        below = np.sqrt(largest[rows] if amsgrad else v[rows]) + epsilon
        step = rate * np.sqrt(1 - second**t) / (1 - first**t)
        table[rows] -= step * m[rows] / below
    return table, m, v


def batches_of(rng, kind):
    for _ in range(STEPS):
        indices = rng.permutation(ROWS)
        if kind == "some":
            indices = rng.integers(0, ROWS - 2, size=4)
            indices[-1] = indices[0]
        if kind == "none":
            indices = indices[:0]
        yield indices, rng.normal(size=(len(indices), WIDTH))


def walked(optimizer, table, batches, dtype):
    variable = keras.Variable(table, dtype=dtype, name="embeddings")
    dense = keras.Variable([1.0, 2.0], dtype=dtype, name="dense")
    for indices, values in batches:
        rows = tf.IndexedSlices(
            tf.constant(values, dtype),
            tf.constant(indices),
            tf.constant(table.shape),
        )
        optimizer.apply([rows, tf.ones(2, dtype)], [variable, dense])
    slots = [v.numpy() for v in optimizer.variables if v.shape == table.shape]
    return variable.numpy(), slots, dense.numpy()


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-5)]
)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", ["some", "none"])
def test_the_formula(dtype, limit, amsgrad, kind):
    rng = np.random.default_rng(5)
    table = rng.normal(size=(ROWS, WIDTH)).astype(dtype)
    batches = list(batches_of(rng, kind))
    optimizer = LazyAdam(0.05, epsilon=1e-6, amsgrad=amsgrad)
    found, slots, _ = walked(optimizer, table, batches, dtype)
    wanted, m, v = by_hand(
        np.float64(table), batches, rate=0.05, epsilon=1e-6, amsgrad=amsgrad
    )
    np.testing.assert_allclose(found, wanted, atol=limit)
    np.testing.assert_allclose(slots[0], m, atol=limit)
    np.testing.assert_allclose(slots[1], v, atol=limit)
    # Rows that were never looked up keep their bits.
    np.testing.assert_array_equal(found[-2:], table[-2:])


def test_it_is_adam_where_each_row_is_looked_up_once():
    rng = np.random.default_rng(6)
    table = rng.normal(size=(ROWS, WIDTH))
    batches = list(batches_of(rng, "all"))
    lazy, lazy_slots, lazy_dense = walked(
        LazyAdam(0.05), table, batches, "float64"
    )
    adam, adam_slots, adam_dense = walked(
        keras.optimizers.Adam(0.05), table, batches, "float64"
    )
    np.testing.assert_allclose(lazy, adam, atol=1e-15)
    np.testing.assert_allclose(lazy_slots, adam_slots, atol=1e-15)
    np.testing.assert_array_equal(lazy_dense, adam_dense)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"global_clipnorm": 1.0}]
)
def test_what_makes_gradients_dense_is_refused(options):
    [name] = options
    with pytest.raises(ConfigurationError, match=f"{name} makes") as error:
        LazyAdam(0.1, **options)
    assert "\n" not in str(error.value)


def test_saved_and_loaded_in_plain_keras(tmp_path):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).integers(0, 9, (32, 4))
    y = x.mean(1, keepdims=True)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 3),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(LazyAdam(0.05, beta_1=0.8, clipnorm=1.0), "mse")
    first, last = model.fit(x, y, epochs=8, verbose=0).history["loss"][::7]
    assert last < first
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for each in (model, loaded):
        each.fit(x, y, verbose=0, shuffle=False)
    for own, other in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(own, other)
