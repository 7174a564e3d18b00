"""Fails on the release of Keras that moves what the engine relies on."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from mgpu_tf.engine import keras_internals


def build():
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]), None)


def test_build_creates_everything_without_data():
    model = build()
    keras_internals.build(model, SPEC)
    assert model.built
    assert model.optimizer.built
    assert len(model.optimizer.variables) == 6
    names = [v.name for m in model.metrics for v in m.variables]
    assert names.count("total") == 2
    assert keras_internals.loss_tracker(model).name == "loss"


def test_build_layers_leaves_the_rest():
    model = build()
    keras_internals.build_layers(model, tf.TensorSpec([None, 3]))
    assert model.built
    assert not model.optimizer.built


def test_compiled_state_changes_with_compile():
    model = build()
    before = keras_internals.compiled_state(model)
    assert keras_internals.compiled_state(model) == before
    model.compile("sgd", "mse")
    assert keras_internals.compiled_state(model) != before


def test_losses_are_replaced_in_a_copy():
    model = build()
    keras_internals.build(model, SPEC)
    container = keras_internals.compiled_loss(model)
    twin = keras_internals.with_losses_replaced(
        container, lambda loss: lambda y, p, w: tf.constant(42.0)
    )
    y = tf.zeros([1, 2])
    assert float(twin(y, y)) == 42.0
    assert float(container(y, y)) == 0.0


def test_optimizer_sums_last_and_through_one_method():
    """`_backend_update_step` reduces by `_all_reduce_sum_gradients`."""
    source = inspect.getsource(TFOptimizer._backend_update_step)
    assert "self._all_reduce_sum_gradients(grads_and_vars)" in source


@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.SGD,
        keras.optimizers.Nadam,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
)
def test_reduced_gradients_are_taken_as_they_are(make, strategies):
    """Applied on 2 replicas, a gradient of 1 counts once, not twice."""
    strategy = strategies["mirrored_x2"]

    def change(context):
        with strategy.scope():
            variable = keras.Variable(tf.zeros([3]))
            optimizer = make()
            optimizer.build([variable])

        @tf.function
        def step():
            def apply():
                optimizer.apply([tf.ones([3])], [variable])

            with context(optimizer):
                strategy.run(apply)

        step()
        return variable.numpy(), optimizer

    reduced, optimizer = change(keras_internals.engine_order)
    alone = keras.Variable(tf.zeros([3]))
    single = make()
    single.build([alone])
    single.apply([tf.ones([3])], [alone])
    np.testing.assert_allclose(reduced, alone.numpy(), rtol=1e-6)
    assert "_all_reduce_sum_gradients" not in vars(optimizer)
    assert "_backend_apply_gradients" not in vars(optimizer)


def test_mask_and_weights():
    values = tf.ones([2, 3])
    mask = tf.constant([[True, True, False], [True, False, False]])
    weights = tf.constant([[2.0], [1.0]])
    merged = keras_internals.merged_weights(values, weights, mask)
    np.testing.assert_array_equal(merged, [[2, 2, 0], [1, 0, 0]])
    assert keras_internals.merged_weights(values, None, None) is None
    embedded = keras.layers.Embedding(5, 2, mask_zero=True)
    masked = embedded(tf.constant([[1, 0]]))
    assert keras_internals.mask_of(masked) is not None
    assert keras_internals.mask_of(tf.zeros([2])) is None


def test_synchronized_statistics():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.BatchNormalization(),
        ]
    )
    found = keras_internals.synchronized_statistics(model)
    assert [id(v) for v in found] == [
        id(v) for v in model.layers[0].non_trainable_variables
    ]


class Silent(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


class Watching(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Silent, False),
        (Watching, True),
        (keras.callbacks.EarlyStopping, False),
        (keras.callbacks.TerminateOnNaN, False),
        (lambda: keras.callbacks.LambdaCallback(), False),
        (
            lambda: keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: None
            ),
            True,
        ),
    ],
)
def test_sees_every_batch(make, expected):
    assert keras_internals.sees_every_batch(make()) is expected


def test_global_seed_state():
    keras.utils.set_random_seed(3)
    keras_internals.global_seed_state(create=True)
    state = keras_internals.global_seed_state()
    before = state.numpy()
    drawn = float(keras.random.uniform([]))
    assert list(state.numpy()) != list(before)
    state.assign(before)
    assert float(keras.random.uniform([])) == drawn


def counting_ops(count):
    graph = tf.function(count).get_concrete_function().graph
    return {op.type for op in graph.get_operations()}


def test_steps_are_counted_by_one_operation():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build([keras.Variable(1.0)])
    counters = [part._iterations for part in keras_internals.parts(optimizer)]

    def count():
        for counter in counters:
            counter.assign_add(1)

    # Keras reads and writes; what comes between the two is lost.
    assert "AssignAddVariableOp" not in counting_ops(count)
    with keras_internals.counted_exactly(optimizer):
        ops = counting_ops(count)
    assert "AssignAddVariableOp" in ops
    assert "AssignVariableOp" not in ops
    assert "AssignAddVariableOp" not in counting_ops(count)


def test_apply_counts_with_the_counter(monkeypatch):
    """`apply` adds to the count by the method that is replaced."""
    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    with keras_internals.counted_exactly(optimizer):
        ops = counting_ops(lambda: optimizer.apply([tf.constant(1.0)]))
    assert "AssignAddVariableOp" in ops
