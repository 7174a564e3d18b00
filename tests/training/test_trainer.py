import functools
import itertools
import logging
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.checkpoints.run_state import Position
from mgpu_tf.engine.step.base import Execution
from mgpu_tf.training.loops.loop import run_steps
from mgpu_tf.training.pace import Pace, Trial
from tests import clusters
from tests.jobs import compiled
from tests.tiers import tiered

SIZE = 45
COLUMNS = ["one_device", "mirrored_x2", "mirrored_x4", "central_storage_x2"]


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6)).astype("float32")
    return x, generator.integers(0, 3, size=SIZE)


def build():
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def dataset(batch_size=8):
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(batch_size)


def sharded(context):
    whole = tf.data.Dataset.from_tensor_slices(arrays())
    whole = whole.shard(context.num_input_pipelines, context.input_pipeline_id)
    return whole.batch(context.get_per_replica_batch_size(8))


KINDS = {
    "arrays": (lambda: arrays(), {"batch_size": 8, "shuffle": False}),
    "dataset": (lambda: (dataset(),), {}),
    "unknown_length": (lambda: (dataset().filter(lambda *_: True),), {}),
    "dataset_fn": (lambda: (sharded,), {}),
}


@pytest.mark.parametrize(
    ("kind", "column"),
    tiered(
        list(itertools.product(KINDS, COLUMNS)),
        [("arrays", "mirrored_x4"), ("unknown_length", "mirrored_x4")],
    ),
)
def test_each_example_once_whatever_the_data(kind, column, strategies):
    make, options = KINDS[kind]
    trainer = mgpu_tf.Trainer(build, strategies[column])
    history = trainer.fit(*make(), epochs=2, verbose=0, **options)
    assert trainer.examples_seen == 2 * SIZE
    assert [record.examples for record in trainer.records] == [SIZE, SIZE]
    if kind != "dataset_fn":
        assert trainer.global_step == 2 * 6
        expected = one_device_losses()
        np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-5)


@functools.cache
def one_device_losses():
    keras.utils.set_random_seed(0)
    with tf.device("CPU:0"):
        model = build()
        x, y = arrays()
        history = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
        )
    return history.history["loss"]


@pytest.mark.parametrize("column", tiered(COLUMNS, ["mirrored_x4"]))
def test_evaluate_and_predict(column, strategies):
    trainer = mgpu_tf.Trainer(build, strategies[column])
    x, y = arrays()
    predictions = trainer.predict(x, batch_size=7, verbose=0)
    assert predictions.shape == (SIZE, 3)
    with tf.device("CPU:0"):
        expected = trainer.model(x, training=False).numpy()
    np.testing.assert_allclose(predictions, expected, rtol=1e-4, atol=1e-6)
    from_dataset = trainer.predict(dataset(11), verbose=0)
    np.testing.assert_allclose(from_dataset, expected, rtol=1e-4, atol=1e-6)
    scores = trainer.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    hits = np.mean(predictions.argmax(-1) == y)
    assert scores["accuracy"] == pytest.approx(hits, rel=1e-6)
    assert trainer.evaluate(dataset(), verbose=0) == pytest.approx(
        [scores["loss"], scores["accuracy"]], rel=1e-5
    )


def test_steps_per_epoch_goes_on_where_it_stopped(strategies):
    """Three epochs of 4 steps are two passes of 6, in order."""
    x = np.arange(12.0)[:, None]
    trainer = mgpu_tf.Trainer(build_mean, strategies["mirrored_x2"])
    history = trainer.fit(
        x,
        x,
        batch_size=2,
        epochs=3,
        steps_per_epoch=4,
        shuffle=False,
        verbose=0,
    )
    assert trainer.global_step == 12
    rows = [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11, 0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]
    expected = [np.mean(part) for part in rows]
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-6)


def build_mean():
    """A model whose loss is the mean of its targets."""
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(
        keras.optimizers.SGD(0.0),
        lambda y, p: tf.reduce_mean(y + 0.0 * p, axis=-1),
    )
    return model


def test_infinite_dataset(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    trainer.fit(dataset().repeat(), epochs=2, steps_per_epoch=5, verbose=0)
    assert trainer.global_step == 10
    with pytest.raises(mgpu_tf.ConfigurationError, match="steps_per_epoch"):
        trainer.fit(dataset().repeat(), verbose=0)
    with pytest.raises(mgpu_tf.ConfigurationError, match="steps=N"):
        trainer.evaluate(dataset().repeat(), verbose=0)


def test_callbacks_and_validation(strategies):
    calls = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls.append(("batch", batch, sorted(logs)))

        def on_epoch_end(self, epoch, logs=None):
            calls.append(("epoch", epoch, sorted(logs)))

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    x, y = arrays()
    history = trainer.fit(
        x,
        y,
        batch_size=15,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[Recorder()],
    )
    names = ["accuracy", "loss"]
    epoch_names = [*names, "val_accuracy", "val_loss"]
    one_epoch = [("batch", i, names) for i in range(3)]
    assert calls == [
        *one_epoch,
        ("epoch", 0, epoch_names),
        *one_epoch,
        ("epoch", 1, epoch_names),
    ]
    assert sorted(history.history) == epoch_names


def test_early_stop_evaluates_all(strategies):
    """A stop in the middle of an epoch leaves the validation whole."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    x, y = arrays()
    history = trainer.fit(
        x,
        y,
        batch_size=5,
        epochs=3,
        verbose=0,
        validation_data=(x, y),
        callbacks=[Stop()],
    )
    assert trainer.global_step == 2
    expected = trainer.evaluate(x, y, verbose=0)
    assert history.history["val_loss"] == [pytest.approx(expected[0])]


@pytest.mark.parametrize("column", tiered(COLUMNS, ["mirrored_x4"], []))
def test_losses_of_outputs_add_up(column, strategies):
    """Keras weighs batches alike in them, so the batches are even here."""

    def build_two():
        inputs = keras.Input((6,))
        outputs = {
            name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"
        }
        model = keras.Model(inputs, outputs)
        losses = {"a": "mse", "b": "mae"}
        model.compile("sgd", losses, loss_weights={"a": 0.5, "b": 2.0})
        return model

    x, y = (array[:32] for array in arrays())
    targets = {"a": y.astype("float32"), "b": x[:, 0]}
    trainer = mgpu_tf.Trainer(build_two, strategies[column])
    trainer.fit(x, targets, batch_size=8, verbose=0)
    scores = trainer.evaluate(
        x, targets, batch_size=8, verbose=0, return_dict=True
    )
    parts = 0.5 * scores["a_loss"] + 2.0 * scores["b_loss"]
    assert scores["loss"] == pytest.approx(parts, rel=1e-6)
    outputs = trainer.predict(x, verbose=0)
    mse = np.mean((outputs["a"][:, 0] - targets["a"]) ** 2)
    assert scores["a_loss"] == pytest.approx(mse, rel=1e-5)


@pytest.mark.parametrize(
    "column", tiered(["mirrored_x2", "mirrored_x4"], ["mirrored_x4"])
)
def test_embedding_with_parts_of_changing_size(column, strategies):
    """The gradients of a table are sparse, of another length in each part."""

    def build_table():
        model = keras.Sequential(
            [keras.layers.Embedding(9, 4), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.1)
        model.compile(optimizer, "mse")
        return model

    words = np.random.default_rng(0).integers(0, 9, size=(37, 3))
    targets = words[..., None].astype("float32")
    weights = []
    for strategy in (strategies["one_device"], strategies[column]):
        trainer = mgpu_tf.Trainer(build_table, strategy, steps_per_execution=4)
        trainer.fit(words, targets, batch_size=15, epochs=2, verbose=0)
        weights.append(trainer.model.get_weights())
    for alone, ours in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-6)


def test_recompiled_model(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    x, y = arrays()
    trainer.fit(x, y, verbose=0)
    frozen = trainer.model.layers[0].get_weights()
    trainer.model.layers[0].trainable = False
    with trainer.strategy.scope():
        trainer.model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = trainer.fit(x, y, verbose=0)
    assert len(history.history["loss"]) == 1
    for before, after in zip(
        frozen, trainer.model.layers[0].get_weights(), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_progress_bar_is_keras_own(strategies, capsys):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    trainer.fit(*arrays(), epochs=2, verbose=2)
    output = capsys.readouterr().out
    assert "Epoch 1/2" in output
    assert "2/2" in output
    assert "accuracy" in output


def uncompiled():
    return keras.Sequential([keras.layers.Dense(1)])


def unreduced():
    model = uncompiled()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="none"))
    return model


BAD_MODELS = [
    (uncompiled, "must return a compiled model"),
    (lambda: None, "must return a compiled keras.Model"),
    (unreduced, "must be reduced"),
]


@pytest.mark.parametrize(("build_model", "rule"), BAD_MODELS)
def test_refused_models(build_model, rule, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule) as error:
        trainer = mgpu_tf.Trainer(build_model, strategies["mirrored_x2"])
        trainer.fit(np.zeros([4, 2]), np.zeros([4, 1]), verbose=0)
    assert "\n" not in str(error.value)


def test_refused_model_of_another_strategy(strategies):
    with strategies["one_device"].scope():
        model = build()
    with pytest.raises(mgpu_tf.ConfigurationError, match="strategy's scope"):
        mgpu_tf.Trainer(lambda: model, strategies["mirrored_x2"])


BAD_ARGUMENTS = [
    ({"epochs": 0}, "epochs must be"),
    ({"epochs": 2.0}, "epochs must be"),
    ({"initial_epoch": -1}, "initial_epoch must be"),
    ({"steps_per_epoch": 0}, "steps_per_epoch must be"),
    ({"batch_size": -1}, "batch_size must be"),
]


@pytest.mark.parametrize(("arguments", "rule"), BAD_ARGUMENTS)
def test_refused_arguments(arguments, rule, strategies):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule):
        trainer.fit(*arrays(), verbose=0, **arguments)


def test_predict_refuses_dataset_fn(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="order of rows"):
        trainer.predict(sharded, verbose=0)


def test_pace_follows_the_agreed_time():
    """Workers with different clocks ask for the same number of steps."""
    pace = Pace(None)
    asked = []

    def execute(steps):
        asked.append(steps)
        return Execution(steps, steps, {}, seconds=0.01 * (asked[-2:][0]))

    for _ in range(8):
        pace.time(execute, pace.steps)
    assert asked[:3] == [1, 1, 1]
    assert asked[-1] == 50
    assert all(b <= 8 * a for a, b in itertools.pairwise(asked))


def test_an_epoch_that_was_done_ends_once():
    seen = []
    run_steps(
        lambda steps: Execution(steps, steps, {}, seconds=0.0),
        7,
        Pace(3),
        Position(step=7),
        lambda step: seen.append(("begin", step)),
        lambda step, logs: seen.append(("end", step)),
        lambda: False,
    )
    assert not seen


@pytest.mark.parametrize("resumed", [0, 2])
def test_saves_move_no_callback(resumed):
    """With 3 steps to an execution, and a save after every second step."""
    at, seen = Position(step=resumed), []
    run_steps(
        lambda steps: Execution(steps, steps, {}, seconds=0.0),
        7,
        Pace(3),
        at,
        lambda step: seen.append(("begin", step)),
        lambda step, logs: seen.append(("end", step)),
        lambda: False,
        room=lambda wanted: min(wanted, 2 - at.step % 2),
        between=lambda: seen.append(("between", at.step)),
    )
    callbacks = [
        *(("begin", 0), ("end", 2), ("begin", 3), ("end", 5)),
        *(("begin", 6), ("end", 6)),
    ]
    called = [each for each in seen if each[0] != "between"]
    assert called == callbacks[1 if resumed else 0 :]
    saves = [step for name, step in seen if name == "between"]
    assert saves == [step for step in (2, 3, 4, 6) if step > resumed]


@pytest.mark.parametrize("fixed", [None, 3])
@pytest.mark.parametrize("faster", [False, True])
def test_trial_of_two_ways(faster, fixed):
    """Each execution tells what a step took in the one before it."""
    ways, taken = [False], [0.0]
    trial = Trial(ways.append)
    pace = Pace(fixed, trial)

    def execute(steps):
        compiles = ways[-1] and True not in ways[:-1]
        seconds = 0.8 if ways[-1] == faster else 1.0
        taken.append(steps * (90.0 if compiles else seconds))
        return Execution(steps, steps, {}, seconds=taken[-2])

    for _ in range(12):
        pace.time(execute, pace.steps)
    assert trial.over
    assert ways[-1] == faster
    assert ways.count(True) == 1 + Trial.ROUNDS + int(faster)


@pytest.mark.full
def test_jit_compile_by_trial(strategies, tmp_path):
    """In processes of their own: here operations may have to repeat."""
    expected = compiled.train(strategies["one_device"], None)
    assert expected["told"] == []
    workers = clusters.run_jobs(compiled, 2, str(tmp_path))["by_trial"]
    for found in workers:
        [line] = found["told"]
        assert line.startswith("jit_compile='auto': a step takes ")
        np.testing.assert_allclose(
            found["losses"], expected["losses"], rtol=1e-5
        )
    # They agree on it, since they were told the same times.
    assert workers[0] == workers[1]


def test_no_trial_where_bits_must_repeat(strategies, tmp_path, caplog):
    trainer = mgpu_tf.Trainer(
        build, strategies["one_device"], jit_compile="auto"
    )
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        trainer.fit(*arrays(), verbose=0, checkpoint_dir=str(tmp_path))
    assert "would not repeat" in caplog.text


def test_fixed_pace():
    assert [Pace(7).steps, Pace(1).steps] == [7, 1]
    with pytest.raises(mgpu_tf.ConfigurationError, match="1 or more"):
        mgpu_tf.Trainer(build, steps_per_execution=0)


def test_the_function_of_the_docs_gives_parts_of_global_batches(strategies):
    text = (pathlib.Path(clusters.ROOT) / "docs" / "data.md").read_text()
    example = re.search(r"```python\n(def data\(.*?)```", text, re.S)[1]
    x, y = (np.tile(part, (2, 1)[: part.ndim])[:64] for part in arrays())
    known = {"tf": tf, "x": x, "y": y}
    exec(example, known)
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    trainer.fit(known["data"], verbose=0)
    assert (trainer.global_step, trainer.examples_seen) == (1, len(x))


def test_the_seed_that_keras_was_given_is_taken(strategies):
    def kernel(given, **options):
        keras.utils.set_random_seed(given)
        trainer = mgpu_tf.Trainer(build, strategies["one_device"], **options)
        trainer.fit(*arrays(), verbose=0)
        return trainer.model.get_weights()[0]

    assert np.any(kernel(1) != kernel(2))
    np.testing.assert_array_equal(kernel(1), kernel(1))
    np.testing.assert_array_equal(kernel(1), kernel(2, seed=1))
    keras.utils.clear_session()
    with pytest.raises(mgpu_tf.ConfigurationError, match="seed must be"):
        mgpu_tf.Trainer(build, strategies["one_device"], seed="1")


def test_a_name_is_a_strategy():
    trainer = mgpu_tf.Trainer(build, "one_device")
    assert trainer.strategy.num_replicas_in_sync == 1


class WithItsOwn(keras.Sequential):
    """Methods of Keras that an author wrote anew."""

    def fit(self, *arguments, **options):
        return super().fit(*arguments, **options)

    def make_train_function(self, force=False):
        return super().make_train_function(force)


class Scored(keras.Sequential):
    def evaluate(self, *arguments, **options):
        return 2 * super().evaluate(*arguments, **options)

    def predict(self, *arguments, **options):
        return -super().predict(*arguments, **options)

    def train_on_batch(self, *arguments, **options):
        return super().train_on_batch(*arguments, **options)


class TrainsItsHead(keras.Sequential):
    """Says by itself what is trained."""

    @property
    def trainable_weights(self):
        return self.layers[-1].trainable_weights


class BuildsForItsHead(keras.Sequential):
    @property
    def trainable_variables(self):
        return self.layers[-1].trainable_variables


class StepsItself(TrainsItsHead):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def with_a_head(kind):
    def build():
        model = kind(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build


def head_data():
    x = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
    return x, x[:, :1]


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TrainsItsHead, "trainable_weights"),
        (BuildsForItsHead, "trainable_variables"),
    ],
)
def test_what_is_trained_is_not_written_anew(kind, name, method, strategies):
    trainer = mgpu_tf.Trainer(with_a_head(kind), strategies["mirrored_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match=f"wrote {name}"):
        getattr(trainer, method)(*head_data())


def test_a_frozen_layer_is_what_such_a_model_meant(strategies):
    """The remedy has the numbers of Keras with the model of the author's."""

    def frozen():
        model = with_a_head(keras.Sequential)()
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    trainer = mgpu_tf.Trainer(frozen, strategies["mirrored_x3"], seed=0)
    keras.utils.set_random_seed(0)
    model = with_a_head(TrainsItsHead)()
    before = model.layers[0].kernel.numpy()
    for each in (trainer, model):
        each.fit(*head_data(), batch_size=5, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before)
    ours = [w.numpy() for layer in trainer.model.layers for w in layer.weights]
    theirs = [w.numpy() for layer in model.layers for w in layer.weights]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_step_trains_what_its_author_says(strategies):
    """The step differentiates what its author names, and no other weight."""
    trainer = mgpu_tf.Trainer(
        with_a_head(StepsItself), strategies["mirrored_x3"], seed=0
    )
    keras.utils.set_random_seed(0)
    model = with_a_head(StepsItself)()
    for each in (trainer, model):
        each.fit(*head_data(), batch_size=5, shuffle=False, verbose=0)
    ours, theirs = trainer.model.get_weights(), model.get_weights()
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "call", "method"),
    [
        (WithItsOwn, lambda t, x, y: t.fit(x, y), "fit"),
        (Scored, lambda t, x, y: t.evaluate(x, y), "evaluate"),
        (
            Scored,
            lambda t, x, y: t.fit(x, y, validation_data=(x, y)),
            "evaluate",
        ),
        (Scored, lambda t, x, y: t.predict(x), "predict"),
        (Scored, lambda t, x, y: t.train_on_batch(x, y), "train_on_batch"),
    ],
)
def test_methods_that_a_trainer_calls_nowhere_are_refused(
    kind, call, method, strategies
):
    def build():
        model = kind([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    words = f"{kind.__name__}, whose author wrote {method}\\."
    with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
        call(trainer, *arrays())
    assert "\n" not in str(error.value)


class CountsRows(keras.layers.Layer):
    """Takes the number of rows from the shape, or as it should."""

    def __init__(self, rows_of):
        super().__init__()
        self.rows_of = rows_of

    def call(self, x):
        return x + keras.ops.zeros((self.rows_of(x), 1), x.dtype)


def counting_rows(rows_of, own_step):
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.count, self.dense = CountsRows(rows_of), keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x if own_step else self.count(x))

        if own_step:

            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean((self(self.count(x)) - y) ** 2)
                weights = self.trainable_weights
                self.optimizer.apply(tape.gradient(loss, weights), weights)
                return {"value": loss}

    def build():
        model = Subclassed()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("column", ["one_device", "mirrored_x3"])
def test_a_number_of_rows_that_is_none_is_named(column, own_step, strategies):
    """Keras knows it where all batches have as many rows."""
    data = tf.data.Dataset.from_tensor_slices(head_data())
    data = data.batch(5, drop_remainder=True)
    build = counting_rows(lambda x: x.shape[0], own_step)
    trainer = mgpu_tf.Trainer(build, strategies[column])
    with pytest.raises(mgpu_tf.ConfigurationError, match=r"x.shape\[0\] is"):
        trainer.fit(data, verbose=0)
    if own_step:
        with pytest.raises(mgpu_tf.ConfigurationError, match=r"ops\.shape"):
            trainer.train_on_batch(*head_data())
    build = counting_rows(lambda x: keras.ops.shape(x)[0], own_step)
    trainer = mgpu_tf.Trainer(build, strategies[column])
    history = trainer.fit(data, verbose=0).history
    assert history["value" if own_step else "loss"][0] > 0.0
