"""A bad batch is left out, and the run is that of the other batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.data.tf_data import order
from tests.tiers import tiered

ROWS, SIZE = 96, 8
STEPS = ROWS // SIZE
BAD = 6  # The index of the bad batch in the first epoch.


def numbers(bad=(BAD,), value=np.nan):
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    y = x[:, :1] + 0.1
    for batch in bad:
        x[SIZE * batch + 5] = value
    return x, y


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse")
    return model


def alone(order):
    """Returns what Keras makes of some batches, one after the other."""
    x, y = numbers()
    model = build()
    for batch in order:
        rows = slice(SIZE * batch, SIZE * (batch + 1))
        model.train_on_batch(x[rows], y[rows])
    return model


def fit(strategy, folder, data=None, epochs=1, every=4, **options):
    data = numbers() if data is None else data
    given = {"on_nan": "restore", "steps_per_execution": 3} | options
    trainer = mgpu_tf.Trainer(build, strategy, **given)
    arrays = {} if isinstance(data, tf.data.Dataset) else {"batch_size": SIZE}
    trainer.fit(
        *(data if arrays else (data,)),
        **arrays,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        checkpoint=mgpu_tf.SaveOptions(str(folder), save_every_steps=every),
    )
    return trainer


def same(trainer, model):
    assert trainer.model.optimizer.iterations.numpy() == (
        model.optimizer.iterations.numpy()
    )
    pairs = [
        *zip(trainer.model.weights, model.weights, strict=True),
        *zip(
            trainer.model.optimizer.variables,
            model.optimizer.variables,
            strict=True,
        ),
    ]
    for mine, theirs in pairs:
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(mine),
            keras.ops.convert_to_numpy(theirs),
            rtol=0,
            atol=1e-12,
            err_msg=theirs.path,
        )


@pytest.mark.parametrize(
    ("name", "every", "per_execution"),
    tiered(
        [
            ("mirrored_x3", 4, 3),
            ("one_device", 20, "auto"),
            ("one_device", 6, 1),
            ("fsdp_x3", 4, 3),
            ("central_storage_x2", 4, 3),
            ("data_2_pipeline_2", 4, 2),
            ("data_2_tensor_2", 4, 3),
        ],
        [("mirrored_x3", 4, 3)],
        [
            ("one_device", 20, "auto"),
            ("fsdp_x3", 4, 3),
            ("data_2_pipeline_2", 4, 2),
        ],
    ),
)
def test_the_weights_are_those_without_the_batch(
    name, every, per_execution, strategies, tmp_path, float64
):
    trainer = fit(
        strategies[name],
        tmp_path,
        every=every,
        steps_per_execution=per_execution,
    )
    same(trainer, alone([b for b in range(STEPS) if b != BAD]))
    assert trainer.global_step == STEPS - 1
    assert trainer.records[0].steps == STEPS - 1
    (batch,) = trainer.left_out
    assert (batch.epoch, batch.batch, batch.step) == (1, BAD + 1, BAD + 1)
    assert batch.loss == "nan"


def shuffled(bad_rows=(SIZE * BAD + 5,)):
    """Returns a dataset that comes in a new order in each iteration."""
    x, y = numbers(())
    for row in bad_rows:
        x[row] = np.nan
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.shuffle(ROWS, seed=4).batch(SIZE)


@pytest.mark.full
def test_a_shuffled_dataset_is_read_again_in_its_orders(
    strategies, tmp_path, float64
):
    # Both are made before a seed of the whole process is set.
    given, dataset = shuffled(), shuffled()
    # The bad row comes once in each epoch.
    trainer = fit(strategies["mirrored_x3"], tmp_path, given, epochs=2)
    model = build()
    for _ in range(2):
        for x, y in dataset:
            if np.isfinite(x).all():
                model.train_on_batch(x, y)
    same(trainer, model)
    assert [batch.epoch for batch in trainer.left_out] == [1, 2]


def test_a_dataset_anew_begins_as_in_a_new_process():
    dataset = shuffled(())

    def read(dataset):
        return [x.numpy().tolist() for x, _ in dataset]

    first, second = read(dataset), read(dataset)
    again = order.anew(dataset)
    assert first != second
    assert (read(again), read(again)) == (first, second)


class Seen(keras.callbacks.Callback):
    """Knows something from the beginning, and adds to it."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


@pytest.mark.full
def test_runs_repeat_and_callbacks_go_back(strategies, tmp_path):
    ends = []
    for run in ("one", "two"):
        seen = Seen()
        trainer = mgpu_tf.Trainer(
            build,
            strategies["mirrored_x3"],
            on_nan="restore",
            max_restores=4,
        )
        history = trainer.fit(
            *numbers((3, 7)),
            batch_size=SIZE,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[seen],
            checkpoint_dir=str(tmp_path / run),
        )
        assert seen.losses == history.history["loss"]
        assert len(seen.losses) == 2
        ends.append(
            [v.tobytes() for v in trainer.model.get_weights()] + seen.losses
        )
        assert trainer.recovery.restarts == 4
    assert ends[0] == ends[1]


@pytest.mark.full
def test_a_run_that_is_resumed_knows_what_it_has_left_out(strategies, tmp_path):
    strategy = strategies["one_device"]
    first = fit(strategy, tmp_path, epochs=1)
    then = fit(strategy, tmp_path, numbers((BAD,)), epochs=2)
    assert [b.epoch for b in first.left_out] == [1]
    assert [b.epoch for b in then.left_out] == [1, 2]
    with pytest.raises(mgpu_tf.DivergedError, match="At most 2 batches"):
        fit(strategy, tmp_path, numbers((BAD,)), epochs=3, max_restores=2)


@pytest.mark.full
def test_too_many_and_too_large(strategies, tmp_path):
    strategy = strategies["one_device"]
    with pytest.raises(
        mgpu_tf.DivergedError,
        match=r"At most 1 batches.*loss nan in step 5 \(epoch 1, batch 6\), "
        "after the batches of steps 3",
    ):
        fit(strategy, tmp_path / "a", numbers((2, 5)), max_restores=1)
    x, y = numbers(())
    y[SIZE * BAD] = 50.0
    trainer = fit(strategy, tmp_path / "b", (x, y), max_loss=20.0)
    assert [batch.batch for batch in trainer.left_out] == [BAD + 1]
    with pytest.raises(
        mgpu_tf.DivergedError, match=r"at most max_loss=20.*loss \d+.* step 7"
    ):
        fit(strategy, tmp_path / "c", (x, y), max_loss=20.0, on_nan="stop")


@pytest.mark.full
def test_a_finite_loss_whose_gradient_is_not(strategies, tmp_path, float64):
    """The batch that breaks the weights is left out, not the one after it."""
    x, y = numbers(())

    def loss(targets, outputs):
        # Finite everywhere; its gradient is not where the target is 9.
        far = keras.ops.where(targets == 9, outputs * 0, outputs * 0 + 1)
        return keras.ops.square(outputs - targets) + keras.ops.sqrt(far)

    def build_it():
        model = build()
        model.compile("sgd", loss)
        return model

    y[SIZE * BAD] = 9
    trainer = mgpu_tf.Trainer(
        build_it, strategies["mirrored_x3"], on_nan="restore"
    )
    trainer.fit(
        *(x, y),
        batch_size=SIZE,
        shuffle=False,
        verbose=0,
        checkpoint=mgpu_tf.SaveOptions(str(tmp_path), save_every_steps=1),
    )
    assert [batch.batch for batch in trainer.left_out] == [BAD + 1]
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())


def generator():
    x, y = numbers()
    for batch in range(STEPS):
        rows = slice(SIZE * batch, SIZE * (batch + 1))
        yield x[rows], y[rows]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint_dir": None}, "goes back to a checkpoint"),
        ({"data": generator}, "a generator, which can be read once"),
    ],
    ids=["folder", "generator"],
)
def test_what_cannot_go_back_is_refused(change, words, strategies, tmp_path):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"], on_nan="restore")
    data = (change["data"](),) if "data" in change else numbers()
    folder = change.get("checkpoint_dir", str(tmp_path))
    with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
        trainer.fit(*data, checkpoint_dir=folder, verbose=0)
    assert "\n" not in str(error.value)
