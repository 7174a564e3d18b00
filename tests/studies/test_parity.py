"""`check_parity` and `mgpu-tf parity` on models of one's own."""

import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import cli
from mgpu_tf.studies import causes, verdict
from mgpu_tf.studies import trajectory as trajectories
from tests import clusters
from tests.tiers import tiered


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(90, 6)).astype("float32")
    return x, generator.integers(0, 3, size=90)


def replica():
    """The number of this replica, 0 on one device: no layer should ask."""
    context = tf.distribute.get_replica_context()
    number = 0 if context is None else context.replica_id_in_sync_group
    return tf.cast(number, keras.config.floatx())


class OfReplica(keras.layers.Layer):
    """Each replica adds another number."""

    def call(self, inputs):
        return inputs + 0.1 * replica()


def build(*middle, optimizer="sgd"):
    def build_model():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", name="first"),
                *(make() for make in middle),
                keras.layers.Dense(3, name="last"),
            ],
            name="own",
        )
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    return build_model


@pytest.mark.parametrize("as_dataset", tiered([False, True], [True]))
def test_same(as_dataset, strategies):
    batches = data()
    if as_dataset:
        batches = tf.data.Dataset.from_tensor_slices(batches).batch(32)
    report = mgpu_tf.check_parity(
        build(),
        batches,
        ["mirrored", strategies["central_storage_x2"]],
        batch_size=32,
        steps=3,
    )
    assert report.same, report
    assert report.steps == 3
    assert [row.strategy for row in report.rows] == [
        "mirrored (2 replicas)",
        "central_storage (2 replicas)",
    ]
    assert all(row.difference < 1e-5 for row in report.rows)


def test_planted_error_is_named(strategies):
    report = mgpu_tf.check_parity(
        build(OfReplica), data(), [strategies["mirrored_x2"]], steps=4
    )
    assert not report.same
    [row] = report.rows
    assert row.mismatch.step == 1
    assert row.mismatch.variable == "own/first/kernel"
    assert row.mismatch.difference > row.mismatch.allowed
    assert "differs at step 1 in own/first/kernel" in str(report)


def test_gradient_of_zero_under_adam_is_noise(strategies):
    """A bias before BatchNormalization moves by rounding alone.

    In float32, where that is much more than any rounding of a single sum.
    """
    normalized = build(
        lambda: keras.layers.Dense(8, name="before", dtype="float32"),
        lambda: keras.layers.BatchNormalization(synchronized=True),
        optimizer="adam",
    )
    report = mgpu_tf.check_parity(
        normalized, data(), [strategies["mirrored_x2"]], steps=6
    )
    assert report.same, report
    assert report.rows[0].noise > 1e-5
    assert report.precision.startswith("float32")
    assert "own/before computes in float32" in report.precision


@pytest.mark.parametrize("synchronized", tiered([True, False], [True]))
def test_a_sign_of_rounding_is_noise(synchronized, strategies):
    """Lion takes the sign of a gradient that is zero but for rounding."""
    normalized = build(
        lambda: keras.layers.Dense(1, name="before"),
        lambda: keras.layers.BatchNormalization(
            synchronized=synchronized, name="norm"
        ),
        optimizer="lion",
    )
    report = mgpu_tf.check_parity(
        normalized,
        tuple(np.tile(each.T, 4).T for each in data()),
        [strategies["mirrored_x3"]],
        steps=12,
        batch_size=30,
    )
    assert report.precision == "float64"
    assert report.same is synchronized, report
    [row] = report.rows
    assert "own/before/bias" in row.adrift
    assert "own/before/kernel" not in row.adrift
    if synchronized:
        assert row.difference < 1e-9
        assert "same but for what rounding alone moves: " in str(report)


def convolution(dtype=None):
    def build_model():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Reshape((3, 2)),
                keras.layers.Conv1D(4, 2, activation="relu"),
                keras.layers.Flatten(dtype=dtype),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    return build_model


@pytest.mark.parametrize("dtype", tiered([None, "float32"], []))
def test_fifty_steps_of_adam_are_the_same(dtype, strategies):
    report = mgpu_tf.check_parity(
        convolution(dtype),
        tuple(np.tile(each.T, 17).T for each in data()),
        [strategies["mirrored_x3"]],
        steps=50,
        batch_size=30,
    )
    assert report.steps == 50
    assert report.same, report
    assert report.causes == ()
    assert "cause:" not in str(report)
    assert report.precision.startswith(dtype or "float64")
    assert (report.rows[0].difference < 1e-9) is (dtype is None)
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"


class Slight(keras.layers.Layer):
    """Adds a hundred-thousandth of the mean of the replica's examples."""

    def call(self, inputs):
        return inputs + 1e-5 * replica()


def test_a_slight_fault_is_no_noise(strategies):
    report = mgpu_tf.check_parity(
        build(Slight, optimizer="adam"),
        data(),
        [strategies["mirrored_x3"]],
        steps=3,
    )
    assert not report.same, report
    [line] = report.causes
    assert line.startswith("cause: none of the known ones is in own.")
    assert "--steps=1" in line
    assert "Send" in line


@pytest.mark.full
def test_of_what_fails_in_float64(strategies):
    """A constant of another type, and a fault that float32 shows as well."""

    class Constant(keras.layers.Layer):
        def call(self, inputs):
            return inputs * tf.constant(2.0, tf.float32)

    fine, faulty = (
        mgpu_tf.check_parity(
            build(Constant, *more), data(), [strategies["mirrored_x3"]], steps=4
        )
        for more in ([], [keras.layers.BatchNormalization])
    )
    assert fine.same, fine
    assert not faulty.same, faulty
    for report in (fine, faulty):
        assert "(in float64 it fails: " in report.precision


def test_of_a_mixed_policy(strategies):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        report = mgpu_tf.check_parity(
            build(), data(), [strategies["mirrored_x3"]], steps=4
        )
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")
    assert report.same, report
    assert report.precision == (
        "bfloat16, where rounding may hide a small fault (the policy is "
        "mixed_bfloat16)"
    )


def test_weights_that_are_not_finite(strategies):
    x, y = data()
    x[40] = np.nan
    with pytest.raises(mgpu_tf.ConfigurationError, match="learning rate"):
        mgpu_tf.check_parity(build(), (x, y), [strategies["mirrored_x2"]])


class OwnStep(keras.Sequential):
    """Minimizes how far predictions are from their mean over the batch."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            y = self(x, training=True)
            loss = keras.ops.mean(keras.ops.var(y, axis=0))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"spread": loss}


class OwnLoss(keras.Sequential):
    """The same as a loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        spread = keras.ops.square(y_pred - keras.ops.mean(y_pred, axis=0))
        return mgpu_tf.mean_over_batch(keras.ops.sum(spread, axis=1))


def one_hot():
    x, y = data()
    return x, np.eye(3)[y]


def small(*first, kind=keras.Sequential, loss="mse"):
    def build_model():
        model = kind(
            [
                keras.Input((6,)),
                *(make() for make in first),
                keras.layers.Dense(3, activation="sigmoid", name="last"),
            ],
            name="own",
        )
        model.compile("adam", loss() if callable(loss) else loss)
        return model

    return build_model


def words():
    return [
        keras.layers.Embedding(9, 4, name="table"),
        keras.layers.Flatten(),
    ]


def normalization(**options):
    return keras.layers.BatchNormalization(name="norm", **options)


class Still(keras.layers.Layer):
    """Could draw, and does not."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(0)

    def call(self, inputs):
        return inputs


CAUSES = {
    "normalization": (
        small(normalization),
        {},
        ["(own/norm)", "mgpu_tf.synchronize_batch_normalization(model)"],
    ),
    "embedding": (
        small(*[lambda part=part: words()[part] for part in (0, 1)]),
        {"embedding_gradients": "summed"},
        ["(own/table)", "Adam", "embedding_gradients='keras'"],
    ),
}


@pytest.mark.parametrize("name", tiered(list(CAUSES), ["normalization"]))
def test_a_cause_is_named(name, strategies):
    build_model, options, parts = CAUSES[name]
    x, y = one_hot()
    if name == "embedding":
        x = np.abs(x * 3).astype(int).clip(0, 8)
    report = mgpu_tf.check_parity(
        build_model, (x, y), [strategies["mirrored_x3"]], steps=3, **options
    )
    assert report.precision == "float64"
    assert not report.same, report
    [line] = report.causes
    assert "\n" not in line
    assert str(report).splitlines()[-1] == line
    assert line.startswith("cause: ")
    for part in [*parts, "Remedy: "]:
        assert part in line


@pytest.mark.full
def test_layers_that_draw_are_no_cause(strategies):
    """Replicas draw their rows of what one device draws."""
    build_model = small(
        lambda: keras.layers.Dropout(0.5, name="drop"),
        Still,
        lambda: keras.layers.GaussianNoise(0.5, seed=3, name="noise"),
    )
    report = mgpu_tf.check_parity(
        build_model, one_hot(), [strategies["mirrored_x3"]], steps=3
    )
    assert report.same, report
    assert not report.causes


class Noisy(OwnStep):
    """Draws in its step."""

    def call(self, inputs, training=False):
        if training:
            inputs += keras.random.normal(keras.ops.shape(inputs))
        return super().call(inputs)


def test_draws_outside_of_layers_are_those_of_one_device(strategies):
    report = mgpu_tf.check_parity(
        small(kind=Noisy), one_hot(), [strategies["mirrored_x3"]], steps=2
    )
    assert report.same, report


def sequence_model(*layers):
    model = keras.Sequential([keras.Input((6,)), *layers], name="own")
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("layers", "gradients", "parts"),
    [
        ([normalization(synchronized=True)], "keras", ["none of the known"]),
        ([normalization(trainable=False)], "keras", ["none of the known"]),
        (words(), "keras", ["none of the known"]),
        ([normalization(), *words()], "summed", ["norm", "table"]),
        (
            [keras.layers.Dense(1, dtype="mixed_float16")],
            "keras",
            ["float16"],
        ),
    ],
)
def test_causes_of_a_model(layers, gradients, parts):
    lines = causes.causes_in(
        sequence_model(*layers), embedding_gradients=gradients
    )
    assert len(lines) == len(parts)
    for line, part in zip(lines, parts, strict=True):
        assert part in line


def test_rows_are_the_same_to_plain_descent():
    model = sequence_model(*words())
    model.compile("sgd", "mse")
    [line] = causes.causes_in(model, embedding_gradients="summed")
    assert "none of the known" in line
    model.compile(keras.optimizers.SGD(clipnorm=1.0), "mse")
    [line] = causes.causes_in(model, embedding_gradients="summed")
    assert "SGD makes another step" in line


def test_many_layers_are_counted():
    [line] = causes.causes_in(
        sequence_model(), drew=[f"d{n}" for n in range(8)]
    )
    assert "(d0, d1, d2, d3, d4 and 3 more)" in line


def trajectory(*values, losses=None, initial=0.0):
    weights = [[np.array([value], np.float32)] for value in values]
    start = [np.array([initial], np.float32)]
    return trajectories.Trajectory(
        ["w"], start, weights, losses or [1.0] * len(values), [True]
    )


@pytest.mark.parametrize(
    ("ours", "same"),
    [
        ((1.0, 2.0), True),
        ((1.0, 2.04), True),
        ((1.0, 2.06), False),
        ((1.0, np.nan), False),
        ((1.01, 2.0), False),
    ],
)
def test_judged_by_the_noise_so_far(ours, same):
    """Where the nudged run began does not count."""
    reference = trajectory(1.0, 2.0)
    nudged = trajectory(1.5, 2.51, initial=0.5)
    row = verdict.compare("x", trajectory(*ours), reference, [nudged])
    assert (row.mismatch is None) is same
    if not same:
        assert row.mismatch.step == (1 if ours[0] != 1.0 else 2)


def test_the_reported_loss_is_judged():
    reference = trajectory(1.0, 2.0, losses=[3.0, 2.0])
    row = verdict.compare(
        "x",
        trajectory(1.0, 2.0, losses=[3.0, 2.001]),
        reference,
        [reference],
    )
    assert row.mismatch.step == 2
    assert row.mismatch.variable == "the reported loss"
    assert row.loss_difference == pytest.approx(0.0005)


def test_a_step_less_is_no_parity():
    reference = trajectory(1.0, 2.0)
    with pytest.raises(ValueError, match="longer"):
        verdict.compare(
            "x", trajectory(1.0, losses=[1.0] * 2), reference, [reference]
        )


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"data": np.zeros([3, 2])}, r"arrays \(x, y\)"),
        ({"data": data(), "steps": 0}, "steps must be"),
        ({"data": data(), "strategies": ["miror"]}, "Did you mean"),
    ],
)
def test_refused(arguments, rule, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule):
        mgpu_tf.check_parity(build(), **arguments)


MODULE = """
import keras, numpy as np, tensorflow as tf

def load():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(90, 6)).astype("float32")
    return x, generator.integers(0, 3, size=90)

class OfReplica(keras.layers.Layer):
    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        number = 0 if context is None else context.replica_id_in_sync_group
        return inputs + 0.1 * tf.cast(number, inputs.dtype)

def model(*middle):
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh", name="first"), *middle,
         keras.layers.Dense(3)], name="own")
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def good():
    return model()

def planted():
    return model(OfReplica())
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    return str(tmp_path)


def command(folder, *arguments):
    return clusters.mgpu_tf(
        "parity", "--dataset=mine:load", "--steps=3", *arguments, cwd=folder
    )


@pytest.mark.full
def test_command_line(folder):
    good = command(folder, "--model=mine:good")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "mirrored (2 replicas)" in good.stdout
    assert "same" in good.stdout
    planted = command(folder, "--model=mine:planted", "--num_workers=2")
    assert planted.returncode == 1, planted.stdout + planted.stderr
    assert "2 workers" in planted.stdout
    assert "differs at step 1 in own/first/kernel" in planted.stdout
    assert planted.stdout.count("cause: none of the known") == 1


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        (
            ["--dataset=mine:load", "--model=mine:goood"],
            ["Did you mean 'good'"],
        ),
        (
            ["--dataset=mine:load", "--model=absent:good"],
            ["model must name", "module that can be imported"],
        ),
        (
            ["--dataset=absent.inner:load", "--model=mine:good"],
            ["dataset must name", "module that can be imported"],
        ),
        (
            ["--dataset=mine:", "--model=mine:good"],
            ["dataset must be package."],
        ),
        (["--model=mine:good"], ["needs --dataset", "--dataset=mine:load"]),
        (["--model=mine:good", "--dataset="], ["needs --dataset"]),
        (
            ["--dataset=mine:load"],
            ["your own --model", "no --model", "--model=mine:build"],
        ),
        (
            ["--dataset=mine:load", "--model=mlp"],
            ["your own --model", "Received: --dataset=mine:load", "=mlp"],
        ),
        (["--model="], ["your own --model"]),
        (["--model=mlpp"], ["Unknown model", "Did you mean 'mlp'"]),
        (["--data=mine:load"], ["'--data'", "Did you mean '--dataset'"]),
        (["--dataset"], ["--dataset"]),
    ],
)
def test_command_line_refuses_in_one_line(
    folder, flags, rules, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert cli.main(["parity", *flags]) == cli.USAGE_ERROR
    told = capsys.readouterr().err
    for rule in rules:
        assert rule in told
    assert told.count("\n") == 1
    assert "Traceback" not in told
