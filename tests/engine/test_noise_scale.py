"""The noise scale of a linear model, whose gradients are known by hand."""

import itertools

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.engine.noise_scale import DECAY
from tests.tiers import tiered

FEATURES = 5
# Gradients are computed in float32.
ROUNDING = 1e-5


def data(rows):
    generator = np.random.default_rng(5)
    drawn = generator.normal(size=(rows, FEATURES + 1))
    x, noise = drawn[:, :-1], drawn[:, -1:]
    return x, x.sum(1, keepdims=True) + 1 + 2 * noise


def build(optimizer=None):
    def model():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        # The weights stay where they are.
        model.compile(optimizer() if optimizer else frozen()(), "mse")
        return model

    return model


def frozen(**options):
    return lambda: keras.optimizers.SGD(0.0, **options)


def of_rows(x, y):
    """The gradient of each row, `[rows, features + 1]`, at weights of zero."""
    return -2 * y * np.hstack([x, np.ones_like(y)])


def between(groups):
    """tr(S) and |G|^2 from the variance between groups of rows."""
    groups = [group for group in groups if len(group)]
    mean = np.concatenate(groups).mean(0)
    apart = sum(len(g) * np.sum((g.mean(0) - mean) ** 2) for g in groups)
    variance = apart / (len(groups) - 1)
    rows = sum(map(len, groups))
    return mean @ mean - variance / rows, variance, rows


def averaged(estimates):
    """The two averages after some steps, by the rows of each."""
    sums = np.zeros(3)
    for square, variance, rows in estimates:
        sums = DECAY * sums + (1 - DECAY) * rows * np.array(
            [square, variance, 1]
        )
    return sums[:2] / sums[2]


def run(strategy, rows, batch_size, model=None, **fit):
    trainer = mgpu_tf.Trainer(model or build(), strategy, noise_scale=True)
    x, y = data(rows)
    return trainer.fit(
        x, y, batch_size=batch_size, shuffle=False, verbose=0, **fit
    ).history


def split(rows, replicas):
    bounds = [len(rows) * r // replicas for r in range(replicas + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("column", ["mirrored_x3", "central_storage_x2"])
def test_uneven_batches_by_hand(column, strategies):
    """Batches of 7, then 2 rows for three replicas; NumPy has each step."""
    strategy = strategies[column]
    replicas = strategy.num_replicas_in_sync
    history = run(strategy, 16, 7, epochs=2)
    gradients = of_rows(*data(16))
    batches = [gradients[start : start + 7] for start in range(0, 16, 7)]
    steps = [between(split(batch, replicas)) for batch in batches] * 2
    for epoch, end in enumerate((3, 6)):
        square, variance = averaged(steps[:end])
        found = {name: history[name][epoch] for name in history}
        assert found["gradient_square"] == pytest.approx(square, rel=ROUNDING)
        assert found["gradient_variance"] == pytest.approx(
            variance, rel=ROUNDING
        )
        assert found["noise_scale"] == pytest.approx(
            variance / square, rel=1e-4
        )


def scaled():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=64.0
    )


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [scaled, frozen(loss_scale_factor=8.0)])
def test_scaling_of_the_loss_is_taken_out(optimizer, strategies):
    plain = run(strategies["mirrored_x3"], 16, 7)
    found = run(strategies["mirrored_x3"], 16, 7, build(optimizer))
    for name, (value,) in plain.items():
        assert found[name] == [pytest.approx(value, rel=ROUNDING)], name


def test_accumulation_on_one_device_is_several_replicas(strategies):
    """Three micro-batches of 4 rows are three replicas of a batch of 12."""
    many = run(strategies["mirrored_x3"], 24, 12)
    alone = run(
        strategies["one_device"],
        24,
        4,
        build(frozen(gradient_accumulation_steps=3)),
    )
    for name, (value,) in many.items():
        assert alone[name] == [pytest.approx(value, rel=ROUNDING)], name


def test_a_step_of_one_row_says_nothing(strategies):
    before, after = (run(strategies["mirrored_x3"], rows, 7) for rows in (7, 8))
    assert after["noise_scale"] == before["noise_scale"]
    (nothing,) = run(strategies["mirrored_x3"], 1, 7)["noise_scale"]
    assert np.isnan(nothing)


class Watch(keras.callbacks.Callback):
    """Collects the two estimates after each execution."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append((logs["gradient_square"], logs["gradient_variance"]))


@pytest.mark.parametrize(
    "column", tiered(["mirrored_x2", "mirrored_x4"], ["mirrored_x4"])
)
def test_agrees_with_the_gradients_of_all_rows(column, strategies):
    """1,024 batches of frozen weights, against each row's own gradient."""
    rows, batch = 16384, 64
    gradients = of_rows(*data(rows))
    mean = gradients.mean(0)
    variance = gradients.var(0, ddof=1).sum()
    watch = Watch()
    trainer = mgpu_tf.Trainer(
        build(),
        strategies[column],
        noise_scale=True,
        steps_per_execution=128,
    )
    x, y = data(rows)
    trainer.fit(x, y, batch_size=batch, epochs=4, verbose=0, callbacks=[watch])
    assert trainer.global_step == 1024
    square, found = np.mean(watch.found, axis=0)
    assert square == pytest.approx(mean @ mean, rel=0.2)
    assert found == pytest.approx(variance, rel=0.2)
    scale = variance / (mean @ mean)
    assert found / square == pytest.approx(scale, rel=0.2)


def test_noise_that_hides_the_gradient_is_infinite(strategies):
    """The same row with both signs: the mean is zero."""
    strategy = strategies["mirrored_x2"]
    trainer = mgpu_tf.Trainer(build(), strategy, noise_scale=True)
    x = np.ones((2, FEATURES))
    y = np.array([[1.0], [-1.0]])
    history = trainer.fit(x, y, batch_size=2, verbose=0).history
    assert history["noise_scale"] == [np.inf]


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, inputs):
        return self.layer(inputs)

    def train_step(self, data):
        return super().train_step(data)


def own_step():
    model = OwnStep()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("column", "model", "message"),
    [
        ("one_device", build(), "one replica, and no accumulation"),
        ("fsdp_x3", build(), "on a strategy that splits them"),
        ("mirrored_x3", own_step, "OwnStep, which has its own"),
    ],
)
def test_refused_by_name(column, model, message, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=message) as error:
        run(strategies[column], 8, 4, model)
    assert "noise_scale" in str(error.value)


def test_resumed_runs_go_on_with_the_averages(strategies, tmp_path):
    strategy = strategies["mirrored_x2"]
    whole = run(strategy, 24, 8, epochs=2)
    run(strategy, 24, 8, epochs=1, checkpoint_dir=str(tmp_path))
    resumed = run(strategy, 24, 8, epochs=2, checkpoint_dir=str(tmp_path))
    assert resumed["noise_scale"] == whole["noise_scale"]


def test_in_the_report_of_a_run():
    report = mgpu_tf.run(
        mgpu_tf.RunConfig(
            strategy="mirrored",
            num_virtual_devices=2,
            optimizer="sgd",
            epochs=1,
            steps_per_epoch=8,
            noise_scale=True,
        ),
        verbose=0,
    )
    (epoch,) = report.epochs
    noise = epoch.gradient_noise
    quotient = noise["gradient_variance"] / noise["gradient_square"]
    assert noise["noise_scale"] == pytest.approx(quotient)
    assert "noise_scale" not in epoch.metrics
    assert abs(report.suggested_batch_size - noise["noise_scale"]) <= 2
