"""Small weights of a server cross together; here servers are virtual CPUs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine.asynchronous.servers.packed_variables import (
    MOST_BYTES,
    Packs,
)

SERVERS = ("CPU:1", "CPU:2")
SHAPES = [(20, 64), (64,), (64, 10), (10,)]


@pytest.fixture
def variables():
    """Four small ones on a server, one on another, and a large one."""
    generator = np.random.default_rng(0)
    made = []
    for server, shapes in zip(SERVERS, (SHAPES, [(3,)]), strict=True):
        with tf.device(server):
            made += [
                keras.Variable(generator.normal(size=shape), dtype="float32")
                for shape in shapes
            ]
    with tf.device(SERVERS[0]):
        made.append(keras.Variable(np.ones(MOST_BYTES // 4 + 1, np.float32)))
    return made


def place(operation):
    return tf.DeviceSpec.from_string(operation.device).device_index


def crossing(function):
    """The kinds of operations whose results go to another device."""
    graph = tf.function(function).get_concrete_function().graph
    operations = [o for o in graph.get_operations() if o.type != "Placeholder"]
    return [
        tensor.op.type
        for operation in operations
        for tensor in operation.inputs
        if tensor.op.type not in ("Placeholder", "Const", "ReadVariableOp")
        and place(tensor.op) != place(operation)
    ]


def test_values_are_those_of_the_variables(variables):
    found = Packs(variables).read()
    assert [id(v) for v, _ in found] == [id(v) for v in variables[:4]]
    for variable, value in found:
        np.testing.assert_array_equal(value, variable.numpy())


def test_weights_leave_their_server_as_one(variables):
    packs = Packs(variables)
    # The call that reads them in one piece, on their server.
    assert crossing(lambda: [value for _, value in packs.read()]) == [
        "StatefulPartitionedCall"
    ]


def sent(variables, gradients):
    """What is applied on the servers of the variables."""

    def apply():
        found = Packs(variables).sent(gradients(), variables)
        for variable, gradient in zip(variables, found, strict=True):
            with tf.device(variable.value.device):
                variable.value.assign_sub(tf.convert_to_tensor(gradient))

    return apply


def random(variables):
    """A gradient for each variable; that of the first but one is sparse."""
    generator = np.random.default_rng(1)
    gradients = [
        tf.constant(generator.normal(size=v.shape), tf.float32)
        for v in variables
    ]
    rows = tf.gather(gradients[1], [1, 0])
    shape = tf.shape(gradients[1])
    gradients[1] = tf.IndexedSlices(rows, tf.constant([1, 0]), shape)
    return [tf.identity(g) if g is not gradients[1] else g for g in gradients]


def test_each_gradient_reaches_its_variable(variables):
    expected = [
        variable.numpy() - tf.convert_to_tensor(gradient).numpy()
        for variable, gradient in zip(variables, random(variables), strict=True)
    ]
    tf.function(sent(variables, lambda: random(variables)))()
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6)


def test_dense_gradients_of_small_weights_leave_as_one(variables):
    kinds = crossing(sent(variables, lambda: random(variables)))
    assert kinds.count("ConcatV2") == 1
    # Those of the one that is alone and of the large one go by themselves.
    assert kinds.count("Identity") == 2


def test_gradients_of_some_variables(variables):
    chosen = [variables[place] for place in (1, 3, 5)]
    gradients = [i + tf.ones(v.shape) for i, v in enumerate(chosen)]
    found = Packs(variables).sent(gradients, chosen)
    for gradient, expected in zip(found, gradients, strict=True):
        np.testing.assert_array_equal(gradient, expected)


def test_one_alone_is_no_pack(variables):
    assert Packs(variables[4:]).read() == []
    gradients = [tf.ones(v.shape) for v in variables[4:]]
    found = Packs(variables).sent(gradients, variables[4:])
    assert all(a is b for a, b in zip(found, gradients, strict=True))
