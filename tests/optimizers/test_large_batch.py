"""The parts of the recipe, and that a run of flags is the same by hand."""

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf import datasets, models, optimizers
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.optimizers.large_batch import create_loss, create_schedule


@pytest.mark.parametrize(
    ("rule", "rate"), [("linear", 3.2), ("sqrt", 0.1 * 32**0.5), ("none", 0.1)]
)
def test_learning_rate_of_another_batch(rule, rate):
    found = optimizers.scale_learning_rate(0.1, 256, 8192, rule)
    assert found == pytest.approx(rate)
    back = optimizers.scale_learning_rate(found, 8192, 256, rule)
    assert back == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (0.1, 256, 0),
            "batch must be a finite number above 0. Received: batch=0",
        ),
        ((float("nan"), 1, 1), "base must be a finite number above 0"),
        ((0.1, 1, 2, "lienar"), "Did you mean 'linear'"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        optimizers.scale_learning_rate(*arguments)


def rates(schedule, steps):
    return [float(schedule(step)) for step in range(steps)]


def test_gradual_warm_up_then_constant():
    schedule = create_schedule(0.8, start=0.1, steps=20, warmup_steps=7)
    expected = [0.1 + 0.7 * step / 7 for step in range(7)] + [0.8] * 13
    np.testing.assert_allclose(rates(schedule, 20), expected, rtol=1e-6)


def test_gradual_warm_up_then_cosine():
    schedule = create_schedule(
        0.8, start=0.0, steps=12, warmup_steps=4, decay="cosine"
    )
    falling = 0.4 * (1 + np.cos(np.pi * np.arange(8) / 8))
    expected = [0.0, 0.2, 0.4, 0.6, *falling]
    np.testing.assert_allclose(rates(schedule, 12), expected, atol=1e-6)


def test_without_options_nothing_changes():
    recipe = optimizers.large_batch_recipe(4096, optimizer="adam")
    own = optimizers.create_optimizer("adam")
    given, expected = recipe.optimizer.get_config(), own.get_config()
    # Keras numbers optimizers of one kind.
    assert given.pop("name").startswith("adam")
    expected.pop("name")
    assert given == expected
    assert type(recipe.loss) is keras.losses.SparseCategoricalCrossentropy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_epochs": 2.0}, "need steps_per_epoch"),
        ({"learning_rate_decay": "cosine"}, "need steps_per_epoch"),
        (
            {"warmup_epochs": 2.0, "steps_per_epoch": 10, "epochs": 2},
            "20 steps of warm-up in 20 steps",
        ),
        ({"label_smoothing": 1.0}, "below 1. Received: label_smoothing=1.0"),
        ({"learning_rate_decay": "cosin"}, "Did you mean 'cosine'"),
        ({"optimizer": "sdg"}, "Did you mean 'sgd'"),
    ],
)
def test_recipe_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        optimizers.large_batch_recipe(64, **options)


def test_no_weight_decay_on_biases_and_normalizations():
    recipe = optimizers.large_batch_recipe(
        64, optimizer="sgd", learning_rate=1.0, weight_decay=0.5
    )
    model = models.create_model("resnet/8", (8, 8, 1), 3)
    recipe.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    recipe.optimizer.apply(
        [keras.ops.zeros(v.shape) for v in model.trainable_variables]
    )
    shrunk = set()
    for variable, value in zip(model.weights, before, strict=True):
        kept = variable.name in ("bias", "gamma", "beta")
        moving = variable.name.startswith("moving")
        factor = 1.0 if kept or moving else 0.5
        np.testing.assert_allclose(variable, factor * value, rtol=1e-6)
        shrunk.add((variable.name, factor))
    assert {("kernel", 0.5), ("gamma", 1.0), ("bias", 1.0)} <= shrunk


def test_smoothed_labels_are_those_of_keras():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(7, 4)).astype("float32")
    labels = generator.integers(0, 4, size=7)
    expected = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.2
    )(np.eye(4)[labels], logits)
    loss = create_loss(0.2)
    for shaped in (labels, labels[:, None]):
        assert float(loss(shaped, logits)) == pytest.approx(float(expected))
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert float(again(labels, logits)) == float(loss(labels, logits))


FLAGS = {
    "optimizer": "momentum",
    "learning_rate": 0.02,
    "base_batch": 64,
    "learning_rate_rule": "sqrt",
    "learning_rate_decay": "cosine",
    "warmup_epochs": 0.5,
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
}


@pytest.mark.full
def test_flags_are_the_recipe_of_keras():
    """A run on three replicas against Keras's own parts on one device."""
    report = mgpu_tf.run(
        mgpu_tf.RunConfig(
            strategy="mirrored",
            num_virtual_devices=3,
            global_batch_size=500,
            epochs=2,
            seed=3,
            **FLAGS,
        ),
        verbose=0,
    )
    digits = datasets.load("digits", seed=3)
    (x, y), steps = digits.train, 3

    def build():
        model = models.create_model("mlp", digits.input_shape, 10)
        schedule = keras.optimizers.schedules.CosineDecay(
            0.02,
            2 * steps - 2,
            warmup_target=0.02 * (500 / 64) ** 0.5,
            warmup_steps=2,
        )
        optimizer = keras.optimizers.SGD(
            schedule, momentum=0.9, nesterov=True, weight_decay=0.01
        )
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.compile(
            optimizer,
            keras.losses.CategoricalCrossentropy(
                from_logits=True, label_smoothing=0.1
            ),
        )
        return model

    assert (len(y) + 499) // 500 == steps
    trainer = mgpu_tf.Trainer(build, "one_device", seed=3)
    history = trainer.fit(
        x, np.eye(10)[y], batch_size=500, epochs=2, verbose=0
    ).history["loss"]
    found = [epoch.loss for epoch in report.epochs]
    np.testing.assert_allclose(found, history, rtol=1e-5)


def compiled_model():
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    return model


def test_a_compiled_model_does_not_take_the_options():
    config = mgpu_tf.RunConfig(
        strategy="one_device",
        model=f"{__name__}:compiled_model",
        weight_decay=0.1,
    )
    with pytest.raises(
        ConfigurationError, match=r"weight_decay=0\.1 with a co"
    ):
        mgpu_tf.run(config)
