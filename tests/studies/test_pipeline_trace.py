"""A trace is true: against the data, gradients by hand, and the optimizer."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.reports.pipeline_trace import COLUMNS, ROWS, share_of
from mgpu_tf.studies.pipeline_trace import trace_pipeline
from tests import clusters

EXAMPLES, BATCH, RATE = 250, 100, 0.1
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


def data():
    generator = np.random.default_rng(4)
    x = generator.normal(size=(EXAMPLES, 7)).astype("float32")
    return x, generator.integers(0, 3, EXAMPLES)


RECEIVED = []


class Recording(keras.optimizers.SGD):
    """SGD that keeps what it is given, where that can be seen."""

    def apply(self, grads, trainable_variables=None):
        if tf.executing_eagerly():
            RECEIVED.append(
                {
                    variable.path: np.array(gradient)
                    for gradient, variable in zip(
                        grads, trainable_variables, strict=True
                    )
                }
            )
        return super().apply(grads, trainable_variables)


def build(optimizer=lambda: Recording(RATE)):
    def model():
        model = keras.Sequential(
            [
                keras.Input((7,)),
                keras.layers.Dense(8, activation="tanh", name="inner"),
                keras.layers.Dense(3, name="outer"),
            ],
            name="net",
        )
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    return model


def part(array):
    """What is shown of an array."""
    array = np.asarray(array)
    if array.ndim < 2:
        return array[:COLUMNS]
    return array.reshape(len(array), -1)[:ROWS, :COLUMNS]


def of_rows(model, x, y):
    """The gradients of the mean loss over some rows, by path."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
        )
    gradients = tape.gradient(loss, [v.value for v in model.trainable_weights])
    paths = [v.path for v in model.trainable_weights]
    return dict(zip(paths, map(np.array, gradients), strict=True))


def scaled():
    return keras.optimizers.LossScaleOptimizer(
        Recording(RATE), initial_scale=16.0
    )


def factor():
    return Recording(RATE, loss_scale_factor=4.0)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("column", "optimizer"),
    [
        ("mirrored_x3", lambda: Recording(RATE)),
        ("fsdp_x3", lambda: Recording(RATE)),
        pytest.param("mirrored_x3", scaled, marks=full),
        pytest.param("mirrored_x3", factor, marks=full),
        pytest.param("one_device", lambda: Recording(RATE), marks=full),
        pytest.param("central_storage_x2", lambda: Recording(RATE), marks=full),
        pytest.param("data_2_fsdp_2", lambda: Recording(RATE), marks=full),
    ],
)
def test_a_step_is_what_it_says(column, optimizer, strategies):
    strategy = strategies[column]
    x, y = data()
    trainer = mgpu_tf.Trainer(build(optimizer), strategy, seed=2)
    RECEIVED.clear()
    step = trainer.trace(x, y, BATCH)
    start = trainer.model.get_weights()
    with strategies["one_device"].scope():
        alone = build()()
        alone.set_weights(start)
    _check_data(step, x, y, strategy.num_replicas_in_sync)
    _check_gradients(step, alone, x, y)
    _check_losses(step, alone, x, y, column)
    _check_received(step, column, 4.0 if optimizer is factor else 1.0)
    # Everything was put back, so that `fit` does the same step.
    first = trainer.fit(
        x, y, batch_size=BATCH, steps_per_epoch=1, verbose=0
    ).history
    assert first["loss"][0] == pytest.approx(step.logs["loss"], rel=1e-5)
    for weight, value in zip(
        step.weights, trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(weight.after.values, part(value), **ROUNDING)


def _check_data(step, x, y, replicas):
    [batch] = step.batches
    assert len(set(batch.rows)) == BATCH
    inputs, targets = batch.data
    np.testing.assert_array_equal(inputs.values, part(x[batch.rows]))
    np.testing.assert_array_equal(targets.values, part(y[batch.rows]))
    assert inputs.shape == [BATCH, 7]
    assert len(step.shares) == replicas
    assert step.shares[0].first == 0
    for share, after in zip(step.shares, [*step.shares[1:], None], strict=True):
        rows = batch.rows[share.first : share.after]
        assert share.after == (BATCH if after is None else after.first)
        assert share.weight == len(rows) / BATCH
        np.testing.assert_array_equal(share.data[0].values, part(x[rows]))
        np.testing.assert_array_equal(share.data[1].values, part(y[rows]))
        assert share.data[0].shape == [len(rows), 7]


def _check_gradients(step, alone, x, y):
    """The gradient of each device, computed again from its rows alone."""
    [batch] = step.batches
    for share in step.shares:
        rows = batch.rows[share.first : share.after]
        expected = of_rows(alone, x[rows], y[rows])
        assert {each.name for each in share.gradients} == set(expected)
        for each in share.gradients:
            np.testing.assert_allclose(
                each.values, part(expected[each.name]), **ROUNDING
            )


def _check_losses(step, alone, x, y, column):
    """The loss of each device, as Keras evaluates its rows alone."""
    [batch] = step.batches
    for share in step.shares:
        if column == "central_storage_x2":  # One sum is for all replicas.
            assert share.loss is None
            continue
        rows = batch.rows[share.first : share.after]
        loss, _ = alone.evaluate(x[rows], y[rows], batch_size=BATCH, verbose=0)
        assert share.loss == pytest.approx(loss, rel=1e-5)


def _check_received(step, column, factor):
    """The mean of what is printed is what arrives in `Optimizer.apply`."""
    seen = [each / factor for given in RECEIVED for each in given.values()]
    split = "fsdp" in column
    for each in step.received:
        # Where weights are split, its own `apply` gets whole gradients.
        count = each.shape[0]
        assert any(
            list(rows.shape) == each.shape
            and np.allclose(part(rows), each.values, **ROUNDING)
            for value in seen
            for start in range(len(value) - count + 1)
            for rows in [value[start : start + count]]
        )
        sums = sum(
            share.weight * np.array(gradient.values)
            for share in step.shares
            for gradient in share.gradients
            if gradient.name == each.name
        )
        first = each.device == step.received[0].device
        if split and not first:
            continue  # Another part than the one that is printed.
        values = np.array(each.values)
        np.testing.assert_allclose(values, sums[: len(values)], **ROUNDING)
    for weight in step.weights:
        [gradient, *_] = [
            each for each in step.received if each.name == weight.name
        ]
        shown = np.array(gradient.values)
        before = np.array(weight.before.values)[: len(shown)]
        after = np.array(weight.after.values)[: len(shown)]
        np.testing.assert_allclose(after, before - RATE * shown, **ROUNDING)


def own_step():
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Own([keras.Input((7,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            build(lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)),
            "Received: gradient_accumulation_steps=2",
        ),
        (own_step, "Received: Own, which has its own"),
    ],
)
def test_refused_by_name(model, message, strategies):
    trainer = mgpu_tf.Trainer(model, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match=message):
        trainer.trace(*data(), BATCH)


def test_the_pipeline(strategies):
    """Epochs are those of `fit`; a prediction is that of each device."""
    x, y = data()
    batches = {"x": x, "y": y, "batch_size": BATCH}

    def trainer():
        return mgpu_tf.Trainer(build(), strategies["mirrored_x3"], seed=2)

    first, second = trainer(), trainer()
    trace = trace_pipeline(
        first,
        batches,
        {"x": x[:50], "y": y[:50], "batch_size": BATCH},
        num_examples=EXAMPLES,
        batch_size=BATCH,
        epochs=2,
    )
    history = second.fit(**batches, epochs=2, verbose=0).history
    assert [e.logs["loss"] for e in trace.epochs] == history["loss"]
    outputs = second.predict(x[:50], verbose=0)
    prediction = trace.prediction
    [combined] = prediction.combined
    np.testing.assert_allclose(combined.values, part(outputs), **ROUNDING)
    assert combined.shape == [50, 3]
    for share in prediction.shares:
        rows = slice(share.first, share.after)
        np.testing.assert_array_equal(share.data[0].values, part(x[:50][rows]))
        np.testing.assert_allclose(
            share.outputs[0].values, part(outputs[rows]), **ROUNDING
        )
    assert [s.after - s.first for s in prediction.shares] == [16, 17, 17]
    told = json.loads(trace.json())
    assert [share_of(s) for s in told["step"]["shares"]] == trace.step.shares
    assert trace.aggregation == (
        "Sum over devices, by their part of the rows: 0.33 x device 0 + "
        "0.33 x device 1 + 0.34 x device 2."
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Runs the command; returns what was printed, the JSON and the page."""
    folder = tmp_path_factory.mktemp("trace")

    def run(*arguments):
        done = clusters.mgpu_tf(
            "trace",
            *arguments,
            "--epochs=1",
            f"--json={folder}/trace.json",
            f"--html={folder}/trace.html",
            env={"COLUMNS": "120"},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        trace = json.loads((folder / "trace.json").read_text())
        return done.stdout, trace, (folder / "trace.html").read_text()

    return run


# Arguments, where devices compute, where weights lie, and rows of a device.
RUNS = {
    "one device": (["--strategy=one_device"], ["CPU:0"], ["CPU:0"], 100),
    "two devices": ([], ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1"], 50),
    "split weights": (
        ["--strategy=fsdp"],
        ["CPU:0", "CPU:1"],
        ["CPU:0", "CPU:1"],
        50,
    ),
    "two workers": (
        ["--num_workers=2"],
        ["worker/replica:0/task:0", "worker/replica:0/task:1"],
        ["worker/replica:0/task:0", "worker/replica:0/task:1"],
        50,
    ),
    "parameter servers": (
        ["--num_workers=2", "--num_ps=1"],
        ["worker/replica:0/task"],
        ["ps/replica:0/task:0"],
        100,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_the_command(name, told):
    arguments, computing, lying, rows = RUNS[name]
    printed, trace, page = told(*arguments)
    step = trace["step"]
    devices = [share["device"] for share in step["shares"]]
    for expected in computing:
        assert any(expected in device for device in devices)
    lies = [d for weight in step["weights"] for d in weight["devices"]]
    for expected in lying:
        assert any(expected in device for device in lies)
    for share in step["shares"]:
        assert share["after"] - share["first"] == rows
        assert share["data"][0]["shape"] == [rows, 20]
    losses = [share["loss"] for share in step["shares"]]
    assert np.mean(losses) == pytest.approx(step["logs"]["loss"], rel=1e-5)
    profile = trace["profile"]
    if name == "parameter servers":
        assert profile is None
    else:
        assert len(profile["devices"]) == len(step["shares"])
        for one in profile["devices"]:
            assert one["computing"] > 0.0
            # One device has nobody to send to.
            alone = len(profile["devices"]) == 1
            assert (one["sent_bytes"] == 0.0) == alone
        assert "The time of each device" in page
    assert trace["num_examples"] == 8000
    assert trace["prediction"]["combined"][0]["shape"] == [100, 10]
    for stage in (
        "Data loading",
        "Distribution to the devices",
        "Training on each device",
        "Gradient aggregation",
        "Epochs",
        "Prediction",
    ):
        assert stage in printed
        assert stage in page
    assert f", loss {losses[0]:.4g}" in " ".join(printed.split())
    assert "Loss of each device" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json=/nowhere/at/all.json"], "json must be a file in a folder"),
        (["--checkpoint_dir=a"], "A trace does not save. Received: --check"),
        (["--output_dir=a"], "Received: --output_dir"),
        (["x"], "trace takes flags only"),
    ],
)
def test_mistakes_in_one_line(arguments, message, capsys):
    from mgpu_tf import cli

    assert cli.main(["trace", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
