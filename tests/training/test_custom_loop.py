"""Loops of one's own: two models, a gradient penalty, checkpoints, the docs."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.checkpoints import store
from mgpu_tf.checkpoints.recovery import Owner
from tests import clusters
from tests.engine import test_overridden_step
from tests.engine.test_overridden_step import arrays, network
from tests.jobs import own_steps
from tests.tiers import tiered
from tests.training import test_on_batch

pytestmark = pytest.mark.usefixtures("float64")

ops = keras.ops
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "custom_training.md"


def build():
    g, d = network(5, 1), network(1, 1)
    g_optimizer = keras.optimizers.Adam(0.01)
    d_optimizer = keras.optimizers.RMSprop(0.01, global_clipnorm=0.1)
    g_optimizer.build(g.trainable_variables)
    d_optimizer.build(d.trainable_variables)
    return {
        "g": g,
        "d": d,
        "g_optimizer": g_optimizer,
        "d_optimizer": d_optimizer,
        "error": keras.metrics.MeanSquaredError(name="error"),
    }


def d_step(objects, batch):
    x, y = batch
    d = objects["d"]
    with tf.GradientTape() as tape:
        fake = objects["g"](x)
        with tf.GradientTape() as inner:
            between = (fake + y) / 2
            inner.watch(between)
            judged = d(between)
        slope = ops.sqrt(ops.sum(inner.gradient(judged, between) ** 2, -1))
        loss = ops.mean(d(fake)) - ops.mean(d(y))
        loss += 10 * ops.mean((slope - 1) ** 2)
    variables = d.trainable_variables
    objects["d_optimizer"].apply(tape.gradient(loss, variables), variables)
    return {"d": loss}


def g_step(objects, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        fake = objects["g"](x)
        loss = -ops.mean(objects["d"](fake))
    variables = objects["g"].trainable_variables
    objects["g_optimizer"].apply_gradients(
        zip(tape.gradient(loss, variables), variables, strict=True)
    )
    objects["error"].update_state(y, fake)
    return {"g": loss, "error": objects["error"].result()}


def values(objects):
    names = ("g", "d", "g_optimizer", "d_optimizer")
    return [v.numpy() for name in names for v in objects[name].variables]


def batches():
    x, y = arrays()
    return [(x[a : a + 8], y[a : a + 8]) for a in (0, 8, 15, 3, 17)]


@pytest.mark.parametrize(
    ("column", "kind"),
    tiered(
        [
            ("mirrored_x3", "memory"),
            ("mirrored_x3", "disk"),
            ("one_device", "disk"),
        ],
        [],
        [("mirrored_x3", "memory")],
    ),
)
def test_a_loop_is_that_of_one_device(column, kind, strategies, tmp_path):
    """One that goes on from a checkpoint has the bits of the one that saved."""
    folder = str(tmp_path) if kind == "disk" else f"memory:/{tmp_path}"
    keras.utils.set_random_seed(0)
    objects, resumed = build(), None
    loop = mgpu_tf.Loop(build, strategies[column])
    for number, batch in enumerate(batches()):
        if number == 3:
            loop.save(folder, number=number)
            resumed = mgpu_tf.Loop(build, strategies[column], seed=5)
            assert resumed.restore(folder) == {"number": number}
        tensors = tuple(map(tf.constant, batch))
        for step in (d_step, g_step):
            ref = step(objects, tensors)
            own = loop.run(step, batch)
            assert list(own) == list(ref)
            for name, value in ref.items():
                np.testing.assert_allclose(own[name], value, rtol=1e-9)
            if resumed is not None:
                resumed.run(step, batch)
    assert loop.global_step == resumed.global_step == 10
    for ref, own, other in zip(
        *map(values, (objects, loop.objects, resumed.objects)), strict=True
    ):
        np.testing.assert_allclose(own, ref, atol=1e-12)
        np.testing.assert_array_equal(other, own)


def test_what_is_not_built_is_refused(strategies):
    def unbuilt():
        return build() | {"late": keras.optimizers.SGD(name="late")}

    with pytest.raises(mgpu_tf.ConfigurationError, match="'late', not built"):
        mgpu_tf.Loop(unbuilt, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="list"):
        mgpu_tf.Loop(lambda: [1], strategies["mirrored_x2"])


def test_a_folder_without_checkpoints(strategies, tmp_path):
    loop = mgpu_tf.Loop(build, strategies["one_device"])
    assert loop.restore(str(tmp_path)) is None


def test_the_code_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gan, loop = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    names: dict[str, object] = {}
    exec(gan, names)
    model = names["Gan"](network(3, 5), network(5, 1))
    model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
    model.fit(*arrays((3, 5)), verbose=0)
    exec(loop, {})
    assert "loss" in capsys.readouterr().out


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("two_workers"))
    return clusters.run_jobs(own_steps, 2, folder)


@pytest.mark.full
def test_two_workers(observed):
    model, history = test_overridden_step.by_keras(
        test_overridden_step.build_gan, arrays((3, 5))
    )
    for found in observed["gan"]:
        for name, values_ in history.items():
            np.testing.assert_allclose(
                found["history"][name], values_, rtol=1e-9
            )
        for ref, own in zip(model.get_weights(), found["weights"], strict=True):
            np.testing.assert_allclose(own, ref, atol=1e-12)
    keras.utils.set_random_seed(0)
    model = test_on_batch.build()
    x, y = arrays()
    scores = [model.train_on_batch(x[:n], y[:n]) for n in (8, 7)]
    keras.utils.set_random_seed(0)
    alone = own_steps.hinge_model(own_steps.SumOfHinges)
    rows, labels = own_steps.hinge_data()
    alone.fit(rows, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for found in observed["sum_over_rows"]:
        for ref, own in zip(alone.get_weights(), found, strict=True):
            np.testing.assert_allclose(own, ref, atol=1e-12)
    for found in observed["on_batch"]:
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-9)
        np.testing.assert_allclose(
            found["predicted"], model.predict_on_batch(x[:7]), atol=1e-12
        )
    keras.utils.set_random_seed(0)
    objects = build()
    for batch in batches():
        tensors = tuple(map(tf.constant, batch))
        d_step(objects, tensors)
        g_step(objects, tensors)
    for found in observed["loop"]:
        for ref, own in zip(values(objects), found["values"], strict=True):
            np.testing.assert_allclose(own, ref, atol=1e-12)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_two_workers_predict(observed):
    keras.utils.set_random_seed(0)
    model = own_steps.flat_model()
    losses, predictions = own_steps.flat_outputs(model)
    for own_losses, own in observed["rows_of_tokens"]:
        np.testing.assert_allclose(own_losses, losses, rtol=1e-9)
        np.testing.assert_allclose(own, predictions, atol=1e-12)
    model.quantize("int8")
    after = model.predict(own_steps.sentences(), verbose=0)
    assert np.abs(after - predictions).max() > 1e-6
    for own in observed["quantized"]:
        np.testing.assert_allclose(own, after, atol=1e-9)
    keras.utils.set_random_seed(0)
    kept, values_ = own_steps.predicted_kinds(
        own_steps.hinge_model(own_steps.ManyKinds)
    )
    assert kept
    for own in observed["kinds"]:
        assert own == [kept, values_]


def test_a_loop_loses_nothing_without_being_asked(strategies, tmp_path):
    folder = str(tmp_path / "loop")
    loop = mgpu_tf.Loop(build, strategies["one_device"])
    loop.save(folder, epoch=1)
    assert loop.restore(folder) == {"epoch": 1}
    (path,) = store.paths(folder).values()
    (pathlib.Path(path) / "manifest.json").write_text("{}")
    with pytest.raises(mgpu_tf.ConfigurationError, match="all of them damaged"):
        loop.restore(folder)
    assert loop.restore(folder, restart_from_nothing=True) is None
    # A later owner ends the saving of this one, and nothing is deleted.
    owner = Owner(folder)
    owner.take()
    loop.global_step = 7
    with pytest.raises(mgpu_tf.ConfigurationError, match="began last"):
        loop.save(folder)
    assert list(store.paths(folder)) == [0]


def test_a_fit_does_not_go_on_from_a_loop(strategies, tmp_path):
    mgpu_tf.Loop(build, strategies["one_device"]).save(str(tmp_path))

    def model():
        model = network(5, 1)
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(model, strategies["one_device"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="what a fit has"):
        trainer.fit(*arrays(), verbose=0, checkpoint_dir=str(tmp_path))
