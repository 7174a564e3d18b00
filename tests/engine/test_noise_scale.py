"""The noise scale of a linear model, whose gradients are known by hand.

Where weights are split, it is that of gradients that TensorFlow computes.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from mgpu_tf.engine.exchange.noise_scale import DECAY
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


def gradients_of(model, x, y):
    """The gradient of the mean loss of some rows, as one vector."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    found = tape.gradient(loss, model.trainable_variables)
    return np.concatenate(
        [tf.convert_to_tensor(g).numpy().ravel() for g in found]
    )


def by_tapes(model, x, y, batch_size, replicas, optimizer):
    """The averages after a pass, from the gradients of each replica's rows.

    Args:
        model: Trained here, by TensorFlow alone, on one device.
        x: Inputs.
        y: Targets.
        batch_size: The rows of a step.
        replicas: How many parts the rows of a step have.
        optimizer: Updates the weights.
    """
    steps = []
    for start in range(0, len(x), batch_size):
        rows = slice(start, start + batch_size)
        parts = zip(
            split(x[rows], replicas), split(y[rows], replicas), strict=True
        )
        parts = [part for part in parts if len(part[0])]
        counts = np.array([len(part) for part, _ in parts])
        own = [gradients_of(model, *part) for part in parts]
        whole = gradients_of(model, x[rows], y[rows])
        total = counts.sum()
        small = np.sum(counts / total * [g @ g for g in own])
        u, v = len(parts) / total, 1 / total
        big = whole @ whole
        steps.append(
            ((u * big - v * small) / (u - v), (small - big) / (u - v), total)
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return averaged(steps)


def plain():
    return [
        layers.Dense(8, "tanh"),
        layers.LayerNormalization(),
        layers.Dense(8, "tanh"),
        layers.Dense(1),
    ]


def used_twice():
    """A weight has two parts of a replica's gradient."""
    twice = layers.Dense(8, "tanh")
    return [layers.Dense(8, "tanh"), twice, twice, layers.Dense(1)]


class Ids(layers.Layer):
    def call(self, x):
        return ops.cast(ops.abs(x * 3), "int32")


def looked_up():
    """Rows of a table, and a dense gradient of the same table."""
    table = layers.ReversibleEmbedding(12, 8)
    return [
        Ids(),
        table,
        layers.Dense(8, "tanh"),
        lambda x: table(x, reverse=True),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1),
    ]


MODELS = {"plain": plain, "used_twice": used_twice, "looked_up": looked_up}
# As many data-parallel replicas as the reference has parts.
SPLIT = {
    "fsdp_x3": 3,
    "zero1_x2": 2,
    "data_2_fsdp_2": 4,
    "data_2_tensor_2": 2,
    "fsdp_2_tensor_2": 2,
    "data_2_pipeline_2": 2,
    "data_2_tensor_2_pipeline_2": 2,
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        [*itertools.product([*SPLIT, "mirrored_x3"], MODELS)],
        [("fsdp_x3", "used_twice")],
    ),
)
def test_split_weights_against_gradients_of_tensorflow(
    column, name, strategies
):
    """Batches of 7, then 2 rows, whose weights train."""
    x, y = data(16)

    def build():
        keras.utils.set_random_seed(0)
        outputs = inputs = keras.Input((FEATURES,))
        for layer in MODELS[name]():
            outputs = layer(outputs)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    replicas = SPLIT.get(column, 3)
    square, variance = by_tapes(
        build(), x, y, 7, replicas, keras.optimizers.SGD(0.05)
    )
    found = run(strategies[column], 16, 7, build)
    assert found["gradient_square"] == [pytest.approx(square, rel=1e-9)]
    assert found["gradient_variance"] == [pytest.approx(variance, rel=1e-9)]


@pytest.mark.full
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("column", "alike"),
    [
        ("fsdp_x3", "mirrored_x3"),
        ("data_2_tensor_2", "mirrored_x2"),
        ("data_2_pipeline_2", "mirrored_x2"),
        ("data_2_tensor_2_pipeline_2", "mirrored_x2"),
    ],
)
@pytest.mark.parametrize("how", ["accumulation", "step_parts"])
def test_split_weights_are_as_replicas_with_copies(
    column, alike, how, strategies
):
    if how == "step_parts" and "pipeline" in column:
        pytest.skip("a pipeline has micro-batches")

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((FEATURES,)), *used_twice()])
        optimizer = keras.optimizers.Adam(
            0.01,
            global_clipnorm=0.5,
            gradient_accumulation_steps=2 if how == "accumulation" else None,
        )
        model.compile(optimizer, "mse")
        return model

    options = {"step_parts": 2} if how == "step_parts" else {}
    x, y = data(20)

    def trained(name):
        trainer = mgpu_tf.Trainer(
            build, strategies[name], noise_scale=True, **options
        )
        fit = {"batch_size": 7, "shuffle": False, "verbose": 0}
        return trainer.fit(x, y, **fit).history

    expected, found = trained(alike), trained(column)
    for each in ("gradient_square", "gradient_variance", "loss"):
        assert found[each] == [pytest.approx(expected[each][0], rel=1e-9)]


def test_one_data_parallel_replica_accumulates(strategies):
    """Two micro-batches of 6 rows are two replicas of a batch of 12."""
    expected = run(strategies["mirrored_x2"], 24, 12)
    found = run(
        strategies["tensor_x3"],
        24,
        6,
        build(frozen(gradient_accumulation_steps=2)),
    )
    for name, (value,) in expected.items():
        assert found[name] == [pytest.approx(value, rel=ROUNDING)], name


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


def own_layers():
    model = keras.Sequential([keras.Input((FEATURES,)), *plain()])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("column", "model", "message"),
    [
        ("one_device", build(), "one replica, and no accumulation"),
        ("fsdp_x1", build(), "one replica, and no accumulation"),
        ("tensor_x3", build(), "one replica, and no accumulation"),
        ("pipeline_x2", own_layers, "one replica, and no accumulation"),
        ("mirrored_x3", own_step, "OwnStep, which has its own"),
    ],
)
def test_refused_by_name(column, model, message, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=message) as error:
        run(strategies[column], 8, 4, model)
    assert "noise_scale" in str(error.value)


def test_weights_that_see_the_rows_of_all_are_refused():
    strategy = mgpu_tf.create_model_parallel_strategy(
        data=2, num_virtual_devices=2, layout={".*kernel": ("batch", None)}
    )

    def wide():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(wide, strategy, noise_scale=True)
    with pytest.raises(mgpu_tf.ConfigurationError, match="rows of all"):
        trainer.fit(np.ones((4, 6)), np.ones((4, 1)), verbose=0)


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
