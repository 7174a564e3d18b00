"""LARS and Keras's Lamb against the equations of their papers, in NumPy."""

import keras
import numpy as np
import pytest

from mgpu_tf import optimizers
from mgpu_tf.errors import ConfigurationError

STEPS = 5


def lars(weight, gradients, rates, *, momentum, nesterov, trust, decay, plain):
    """Algorithm 1 of arXiv 1708.03888."""
    velocity = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        decayed, local = gradient, 1.0
        if not plain:
            decayed = gradient + decay * weight
            size = np.linalg.norm(weight)
            local = trust * size
            local /= np.linalg.norm(gradient) + decay * size
        step = rate * local * decayed
        velocity = momentum * velocity + step
        weight = weight - (momentum * velocity + step if nesterov else velocity)
    return weight


def lamb(weight, gradients, rates, *, epsilon):
    """Algorithm 2 of arXiv 1904.00962, without weight decay."""
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    # Keras rounds the two to float32 where it takes their powers.
    first, second = float(np.float32(0.9)), float(np.float32(0.999))
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        ratio = mean / (1 - first**t)
        ratio /= np.sqrt(square / (1 - second**t)) + epsilon
        size = np.linalg.norm(weight) / np.linalg.norm(ratio)
        weight = weight - rate * size * ratio
    return weight


def walked(optimizer, dtype):
    """Start, gradients and end of two weights under an optimizer."""
    generator = np.random.default_rng(3)
    shapes = {"kernel": (4, 3), "bias": (3,)}
    start = {n: generator.normal(size=s) for n, s in shapes.items()}
    gradients = {
        n: [generator.normal(size=s) for _ in range(STEPS)]
        for n, s in shapes.items()
    }
    variables = [
        keras.Variable(value, dtype=dtype, name=name)
        for name, value in start.items()
    ]
    for step in range(STEPS):
        optimizer.apply(
            [
                keras.ops.convert_to_tensor(gradients[n][step], dtype)
                for n in shapes
            ],
            variables,
        )
    end = {v.name: np.array(v) for v in variables}
    return start, gradients, end


PRECISIONS = [("float64", 1e-12), ("float32", 1e-6)]


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_is_that_of_the_paper(dtype, limit, nesterov, momentum):
    schedule = keras.optimizers.schedules.PolynomialDecay(0.5, STEPS, 0.1)
    options = {"momentum": momentum, "nesterov": nesterov}
    optimizer = optimizers.LARS(
        schedule, trust_coefficient=0.1, weight_decay=0.02, **options
    )
    start, gradients, end = walked(optimizer, dtype)
    rates = [float(schedule(step)) for step in range(STEPS)]
    for name in start:
        expected = lars(
            start[name],
            gradients[name],
            rates,
            trust=0.1,
            decay=0.02,
            plain=name == "bias",
            **options,
        )
        assert np.abs(end[name] - expected).max() < limit


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_lamb_of_keras_is_that_of_the_paper(dtype, limit):
    optimizer = keras.optimizers.Lamb(0.05, epsilon=1e-6)
    start, gradients, end = walked(optimizer, dtype)
    rate = float(optimizer.learning_rate)
    for name in start:
        expected = lamb(
            start[name], gradients[name], [rate] * STEPS, epsilon=1e-6
        )
        assert np.abs(end[name] - expected).max() < limit


def test_a_weight_or_gradient_of_zero_moves_by_plain_sgd():
    optimizer = optimizers.LARS(0.5, momentum=0.0, weight_decay=0.1)
    zero, still = keras.Variable([0.0, 0.0]), keras.Variable([1.0, 2.0])
    optimizer.apply(
        [keras.ops.array([1.0, -2.0]), keras.ops.zeros(2)], [zero, still]
    )
    np.testing.assert_allclose(zero, [-0.5, 1.0])
    np.testing.assert_allclose(still, [0.95, 1.9], rtol=1e-6)


def test_epsilon_is_in_the_denominator():
    optimizer = optimizers.LARS(
        1.0, momentum=0.0, trust_coefficient=1.0, epsilon=5.0
    )
    weight = keras.Variable([3.0, 4.0])
    optimizer.apply([keras.ops.array([0.0, 5.0])], [weight])
    np.testing.assert_allclose(weight, [3.0, 1.5])


def test_rows_of_one_index_are_added_up():
    import tensorflow as tf

    rows = tf.IndexedSlices(
        tf.constant([[3.0], [-1.0]]), tf.constant([1, 1]), tf.constant([3, 1])
    )
    ends = []
    for gradient in (rows, tf.constant([[0.0], [2.0], [0.0]])):
        table = keras.Variable([[1.0], [2.0], [3.0]], name="embeddings")
        optimizers.LARS(1.0, trust_coefficient=0.1).apply([gradient], [table])
        ends.append(np.array(table))
    np.testing.assert_array_equal(*ends)


def model_of(optimizer):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="inner"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def test_saved_and_loaded_in_plain_keras(tmp_path):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = model_of(
        optimizers.LARS(
            0.5,
            nesterov=True,
            trust_coefficient=0.05,
            weight_decay=0.01,
            epsilon=1e-9,
            exclude=("gamma",),
        )
    )
    first, last = model.fit(x, y, epochs=8, verbose=0).history["loss"][::7]
    assert last < first
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.optimizer.exclude == ["gamma"]
    for each in (model, loaded):
        each.fit(x, y, verbose=0, shuffle=False)
    for own, other in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(own, other)


def test_exclusion_in_keras_words():
    optimizer = optimizers.LARS(
        1.0, momentum=0.0, trust_coefficient=0.5, weight_decay=0.5
    )
    optimizer.exclude_from_weight_decay(var_names=["inner"])
    model = model_of(optimizer)
    optimizer.build(model.trainable_variables)
    before = model.get_weights()
    optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_weights])
    assert optimizer.get_config()["exclude"] == ["inner"]
    kernel, bias, gamma = before[:3]
    # All of the layer, by its name, and nothing of the others.
    np.testing.assert_allclose(model.weights[0], kernel - 1, rtol=1e-6)
    np.testing.assert_allclose(model.weights[1], bias - 1, rtol=1e-6)
    ratio = 0.5 * np.linalg.norm(gamma)
    ratio /= np.sqrt(gamma.size) + 0.5 * np.linalg.norm(gamma)
    np.testing.assert_allclose(
        model.weights[2], gamma - ratio * (1 + 0.5 * gamma), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {"momentum": 1.0},
            "momentum must be a finite number of 0 or more and",
        ),
        ({"trust_coefficient": 0.0}, "must be a finite number above 0"),
        ({"epsilon": -1.0}, "must be a finite number of 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number of 0"),
        *(
            ({name: value}, f"{name} must be")
            for name in ("momentum", "epsilon", "trust_coefficient")
            for value in (None, "a", float("nan"), True, [0.1])
        ),
        ({"weight_decay": float("inf")}, "weight_decay must be"),
        ({"exclude": "bias"}, "exclude must be a list of names"),
        ({"exclude": [1]}, "exclude must be a list of names"),
    ],
)
def test_refused(options, rule):
    with pytest.raises(ConfigurationError, match=rule):
        optimizers.LARS(**options)
