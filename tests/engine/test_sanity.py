"""Replicas that differ, and a loss that is not finite, are found and named."""

import itertools

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.engine.synchronous.replica_check import _odd
from tests.tiers import tiered

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = X[:, :1]
STEPS = 12


def build():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    return model


class Plant(keras.callbacks.Callback):
    """Changes one number on one replica at the beginning of an epoch."""

    def __init__(self, find, epoch=1, by=1e-6):
        super().__init__()
        self.find, self.epoch, self.by = find, epoch, by

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            copies = self.find(self.model).value.values
            value = copies[-1].numpy()
            value.flat[0] += self.by
            copies[-1].assign(value)


def fit(strategy, callbacks=(), x=X, every=5, **options):
    trainer = mgpu_tf.Trainer(
        build, strategy, check_replicas_every=every, **options
    )
    trainer.fit(
        *(x, Y),
        batch_size=8,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return trainer


@pytest.mark.full
def test_replicas_that_agree_go_on(strategies):
    checked = fit(strategies["mirrored_x3"])
    free = fit(strategies["mirrored_x3"], every=None)
    assert checked.global_step == 3 * STEPS
    for mine, theirs in zip(
        checked.model.get_weights(), free.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("find", "name"),
    [
        pytest.param(
            lambda model: model.layers[0].kernel,
            "dense.*/kernel",
            marks=pytest.mark.full,
            id="weight",
        ),
        pytest.param(
            lambda model: model.optimizer.variables[-1],
            "velocity|momentum",
            id="slot",
        ),
    ],
)
def test_a_planted_difference_is_named(find, name, strategies):
    with pytest.raises(
        mgpu_tf.DivergedError,
        match=f"others on replica 2 of worker 0 at step 15, in .*({name})",
    ):
        fit(strategies["mirrored_x3"], [Plant(find)])


@pytest.fixture(scope="module")
def parted(strategies):
    """Strategies whose devices hold parts, two of each."""
    split = mgpu_tf.create_model_parallel_strategy(
        data=2, fsdp=2, num_virtual_devices=4, smallest_split=4
    )
    return {**strategies, "data_2_shard_weights_2": split}


PARTED = {
    "data_2_shard_weights_2": 3,
    "data_2_fsdp_2": 3,
    "data_2_tensor_2": 3,
    "data_2_pipeline_2": 1,
}


@pytest.mark.parametrize(
    ("column", "what"),
    tiered(
        [*itertools.product(PARTED, ["weight", "slot"])],
        [("data_2_shard_weights_2", "weight")],
    ),
)
def test_a_difference_in_a_part_is_named(column, what, parted):
    """Of two devices with the same part the later is named, and no other."""

    def find(model):
        kernel = model.layers[0].kernel
        return {
            "weight": kernel,
            "slot": next(
                slot
                for slot in model.optimizer.variables
                if "kernel_momentum" in slot.path
            ),
        }[what]

    name = {"weight": "dense[_0-9]*/kernel", "slot": "[^ ]*kernel_momentum"}
    with pytest.raises(
        mgpu_tf.DivergedError,
        match=f"others on replica {PARTED[column]} of worker 0 at step 15, "
        f"in .*{name[what]}",
    ):
        fit(parted[column], [Plant(find)])


@pytest.mark.full
@pytest.mark.parametrize("column", [*PARTED, "zero1_x2", "data_3"])
def test_parts_that_agree_go_on(column, parted):
    assert fit(parted[column]).global_step == 3 * STEPS


class PlantInCopy(keras.callbacks.Callback):
    """Changes one number of a whole copy that is kept beside parts."""

    def on_train_batch_end(self, batch, logs=None):
        held = self.model.layers[0].kernel.value
        *_, (_, copy) = held.stored
        copy.assign_add(1e-6 * np.eye(*copy.shape, dtype="float32"))


def test_a_difference_in_a_whole_copy_is_named(strategies):
    with pytest.raises(
        mgpu_tf.DivergedError,
        match=r"others on replica 1 of worker 0 at step 5, in [^ ,]*kernel\.",
    ):
        fit(strategies["zero1_x2"], [PlantInCopy()])


@pytest.mark.full
def test_nobody_looks_unless_asked(strategies):
    plant = Plant(lambda model: model.layers[0].kernel)
    assert fit(strategies["mirrored_x3"], [plant], every=None).global_step


@pytest.mark.full
def test_one_replica_has_nothing_to_compare(strategies):
    assert fit(strategies["one_device"]).global_step == 3 * STEPS


@pytest.mark.parametrize(
    "column", ["central_storage_x2", "fsdp_x3", "tensor_x3", "pipeline_x2"]
)
def test_one_copy_of_each_weight_is_refused(column, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="has one copy"):
        fit(strategies[column])


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ([7, 7, 8], [2]),
        ([8, 7, 7], [0]),
        ([7, 7], []),
        ([7, 8], [1]),
        ([7, 8, 7, 9], [1, 3]),
    ],
)
def test_who_is_odd(sums, odd):
    assert _odd(sums) == odd


@pytest.mark.parametrize(
    ("name", "per_execution"),
    tiered(
        [
            (name, steps)
            for name in ("one_device", "mirrored_x3")
            for steps in (1, 5, "auto")
        ],
        [("mirrored_x3", 5)],
    ),
)
def test_the_step_of_a_bad_loss(name, per_execution, strategies):
    x = X.copy()
    x[8 * 7 + 5] = np.nan  # In batch 7, counted from 0.
    with pytest.raises(
        mgpu_tf.DivergedError, match="loss nan since step 8, first on worker 0"
    ):
        fit(
            strategies[name],
            x=x,
            on_nan="stop",
            steps_per_execution=per_execution,
        )


@pytest.mark.full
def test_a_bad_loss_goes_on_as_in_keras(strategies):
    x = X.copy()
    x[0] = np.inf
    assert fit(strategies["one_device"], x=x).global_step == 3 * STEPS
