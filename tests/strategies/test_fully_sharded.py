"""What replicas of a sharding strategy store, and how it reads elsewhere."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable
from tests.planner import counts
from tests.strategies.resuming import (
    check_elsewhere,
    check_same_bits,
    data,
    fit,
    state_of,
)
from tests.tiers import tiered

SPLITTING = ["fsdp_x3", "data_2_fsdp_2", "zero1_x2"]


@pytest.fixture(params=tiered(SPLITTING, ["fsdp_x3"]))
def strategy(request, strategies):
    return strategies[request.param]


def bytes_of(variables, replica):
    """The bytes that a replica stores of parts of variables."""
    return sum(
        part.shape.num_elements() * part.dtype.size
        for variable in variables
        for part in [variable.values[replica]]
    )


def model_and_optimizer(strategy, optimizer, width=24):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(width),
                keras.layers.Dense(width, use_bias=False),
            ]
        )
        optimizer.build(model.trainable_variables)
    return model


def split_of(variables):
    return [v.value for v in variables if isinstance(v.value, ShardedVariable)]


def test_each_device_stores_its_share(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
    model = model_and_optimizer(strategy, optimizer)
    weights = split_of(model.variables)
    slots = split_of(optimizer.variables)
    assert len(weights) == 3
    assert len(slots) == 6
    for variables in (weights, slots):
        total = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        for replica in range(strategy.num_replicas_in_sync):
            share = bytes_of(variables, replica) / total
            assert share == pytest.approx(1 / strategy.mesh.fsdp, rel=0.05)
    whole = strategy.shard != "weights"
    assert [variable.keeps_whole for variable in weights] == [whole] * 3
    assert not any(variable.keeps_whole for variable in slots)


def test_sums_of_gradients_are_split_but_for_the_optimizer_alone(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model_and_optimizer(strategy, optimizer)
    assert len(split_of(optimizer.variables)) == (
        0 if strategy.shard == "optimizer" else 3
    )


def test_small_weights_stay_whole():
    strategy = mgpu_tf.create_model_parallel_strategy(num_virtual_devices=2)
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
    model = model_and_optimizer(strategy, optimizer, width=64)
    # 12 x 64 elements stay, 64 x 64 are split.
    assert [v.shape for v in split_of(model.variables)] == [(64, 64)]


def test_outside_of_replicas_it_is_one_variable(strategy):
    with strategy.scope():
        variable = keras.Variable(np.arange(35.0).reshape(5, 7))
    assert isinstance(variable.value, ShardedVariable)
    assert variable.shape == (5, 7)
    np.testing.assert_array_equal(variable, np.arange(35.0).reshape(5, 7))
    # No strategy is entered here.
    variable.assign(np.ones((5, 7)))
    variable.assign_add(2 * np.ones((5, 7)))
    variable.assign_sub(np.arange(35.0).reshape(5, 7))
    expected = 3 - np.arange(35.0).reshape(5, 7)
    np.testing.assert_array_equal(variable.numpy(), expected)
    with strategy.scope():
        variable.assign(expected + 1)
    np.testing.assert_array_equal(variable.value.read_value(), expected + 1)


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_tapes_outside_of_replicas_have_whole_gradients(wrap, strategy):
    """As a callback takes them, and gradients of gradients."""
    value = np.arange(35.0).reshape(5, 7)
    with strategy.scope():
        variable = keras.Variable(value, dtype="float64")
        fixed = keras.Variable(value, dtype="float64", trainable=False)

    def gradients():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                cubes = tf.reduce_sum(variable**3 * fixed)
            first = inner.gradient(cubes, variable)
            squares = tf.reduce_sum(first**2)
        return first, *outer.gradient(squares, [variable, fixed])

    first, second, nothing = wrap(gradients)()
    np.testing.assert_allclose(first, 3.0 * value**3)
    np.testing.assert_allclose(second, 36.0 * value**5)
    assert nothing is None


def test_a_replica_reads_all_and_keeps_its_part(strategy):
    with strategy.scope():
        variable = keras.Variable(np.arange(35.0).reshape(5, 7))

    @tf.function
    def run():
        return strategy.run(lambda: tf.identity(variable.value))

    for value in strategy.experimental_local_results(run()):
        np.testing.assert_array_equal(value, np.arange(35.0).reshape(5, 7))

    @tf.function
    def halve():
        # Every replica reads before any writes.
        strategy.run(lambda: variable.assign(variable.value / 2))

    halve()
    np.testing.assert_array_equal(variable, np.arange(35.0).reshape(5, 7) / 2)


def test_an_update_writes_parts(strategy):
    with strategy.scope():
        variable = keras.Variable(np.zeros((5, 7)))
    seen = []

    def update(part):
        seen.append(part.shape.num_elements())
        return part.assign(tf.ones_like(part))

    strategy.extended.update(variable.value, update, group=False)
    assert sum(seen) == 35 * strategy.mesh.data
    np.testing.assert_array_equal(variable, np.ones((5, 7)))


def build():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return model


def test_a_saved_model_has_the_ordinary_layout(strategy, strategies, tmp_path):
    trainer = mgpu_tf.Trainer(build, strategy)
    fit(trainer)
    path = str(tmp_path / "model.keras")
    trainer.model.save(path)
    loaded = keras.models.load_model(path)
    for ours, theirs in zip(
        state_of(trainer.model), state_of(loaded), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    x, y = data(2)
    assert trainer.evaluate(x, y, verbose=0) == pytest.approx(
        loaded.evaluate(x, y, verbose=0), rel=1e-5
    )


@pytest.mark.parametrize("name", tiered(SPLITTING, [], ["fsdp_x3"]))
def test_resumed_bit_for_bit(name, strategies, tmp_path):
    check_same_bits(build, strategies[name], tmp_path)


@pytest.mark.parametrize(
    "onto",
    tiered(
        ["one_device", "mirrored_x3", *SPLITTING], ["mirrored_x3"], ["zero1_x2"]
    ),
)
def test_resumed_on_another_mesh(onto, strategies, tmp_path):
    first, then = strategies["data_2_fsdp_2"], strategies[onto]
    check_elsewhere(build, first, then, tmp_path)


def test_export_is_refused_by_name(strategies, tmp_path):
    trainer = mgpu_tf.Trainer(build, strategies["fsdp_x3"])
    fit(trainer)
    with pytest.raises(mgpu_tf.ConfigurationError, match="SavedModel") as error:
        trainer.model.export(str(tmp_path / "exported"), verbose=False)
    assert "\n" not in str(error.value)


def test_names():
    strategy = mgpu_tf.create_strategy(
        "fsdp", num_virtual_devices=4, shard="optimizer"
    )
    assert strategy.mesh.fsdp == 4
    assert strategy.shard == "optimizer"
    strategy = mgpu_tf.create_strategy(
        "model_parallel", num_virtual_devices=4, data_parallel=2
    )
    assert (strategy.mesh.data, strategy.mesh.fsdp) == (2, 2)


def test_mistakes_are_told():
    with pytest.raises(mgpu_tf.ConfigurationError, match="data=3 x fsdp=2"):
        mgpu_tf.create_strategy(
            "model_parallel",
            num_virtual_devices=4,
            data_parallel=3,
            fsdp_parallel=2,
        )
    with pytest.raises(mgpu_tf.ConfigurationError, match="shard"):
        mgpu_tf.create_model_parallel_strategy(shard="all")
    with pytest.raises(mgpu_tf.ConfigurationError, match="strategy=fsdp"):
        mgpu_tf.create_strategy(
            "mirrored", num_virtual_devices=2, fsdp_parallel=2
        )


def test_a_loop_of_ones_own(strategies):
    """It ends where the same steps by hand end, on rows of unequal shares."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(8, 3)), generator.normal(size=(8, 1))

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer}

    def step(objects, batch):
        model, optimizer = objects["model"], objects["optimizer"]
        with tf.GradientTape() as tape:
            pairs = model(batch[0]) - keras.ops.cast(batch[1], "float32")
            loss = keras.ops.mean(keras.ops.logsumexp(pairs, axis=0))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    alone = build()
    loop = mgpu_tf.Loop(build, strategies["fsdp_x3"])
    for _ in range(3):
        expected = step(alone, (tf.constant(x, "float32"), y))["loss"]
        found = loop.run(step, (x.astype("float32"), y))
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    kernel = loop.objects["model"].trainable_variables[0]
    assert isinstance(kernel.value, ShardedVariable)
    np.testing.assert_allclose(
        kernel.numpy(),
        alone["model"].trainable_variables[0].numpy(),
        rtol=1e-5,
        atol=1e-7,
    )


def test_parts_do_not_keep_the_whole_value_that_was_assigned(strategies):
    counts.needed()

    def held():
        gc.collect()
        return tf.config.experimental.get_memory_info("CPU:0")["current"]

    with strategies["fsdp_x3"].scope():
        weight = keras.Variable(np.zeros((3, 1 << 20), "float32"))
    before = held()
    weight.assign(keras.random.normal((3, 1 << 20), seed=1))
    assert held() - before < 1 << 20
    assert np.std(weight.numpy()) > 0.9


def test_gradients_applied_outside_of_a_step_are_refused(strategies):
    with strategies["fsdp_x3"].scope():
        optimizer = keras.optimizers.SGD(0.1)
    model = model_and_optimizer(strategies["fsdp_x3"], optimizer)
    weights = model.trainable_variables
    with pytest.raises(mgpu_tf.ConfigurationError, match="Outside of a step"):
        optimizer.apply([tf.ones_like(w.value) for w in weights], weights)
