"""With shard="weights" a device has whole layers, never the whole model.

Read from the graph of a step. A gathered weight is held from its gather to the
last operation that takes it, and a gradient from the operation that makes it to
the last that cuts a part of it. Two are held at once unless the graph orders
all that take the one before what makes the other. The largest set of which no
two are ordered so is the most that any order of execution can hold.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.strategies.test_bytes_between_devices import body_of, device

WIDTH, LAYERS = 32, 8
# The layer that computes, and the next one, which is gathered meanwhile.
AT_ONCE = 2
PASSES_ON = ("Identity", "IdentityN", "Reshape")
# Their outputs are views of what they take.
VIEWS = ("Unpack", "StridedSlice")
# What a replica without rows has zeros for.
CHOOSES = ("If", "StatelessIf")


def build(dtype=None):
    model = keras.Sequential([keras.Input((WIDTH,))])
    for number in range(LAYERS):
        # The gradient of tanh takes what was computed again; that of a linear
        # layer's weight does not even take the weight.
        kind = "linear" if number % 2 else "tanh"
        layer = keras.layers.Dense(WIDTH, kind, use_bias=False, dtype=dtype)
        model.add(layer)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def after(op):
    """The operations that wait for one, directly."""
    waiting = [c for tensor in op.outputs for c in tensor.consumers()]
    return {*waiting, *op._control_outputs}


def closure(ops, step):
    """All operations that are reached from some, with them."""
    found, left = set(), list(ops)
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left.extend(step(op))
    return found


def before(op):
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def takers(tensor, run):
    """The operations of those that run that compute with a tensor's memory."""
    for op in set(tensor.consumers()) & run:
        if op.type in CHOOSES:
            for chosen in op.outputs:
                yield from takers(chosen, run)
            continue
        if op.type in VIEWS and op.inputs[0] is tensor:
            for view in op.outputs:
                yield from takers(view, run)
            continue
        if op.type not in PASSES_ON:
            yield op
            continue
        for place, taken in enumerate(op.inputs):
            if taken is tensor:
                yield from takers(op.outputs[place], run)


def gathers(op):
    """Whether an operation makes a whole weight of parts."""
    return op.type == "ConcatV2" and all(
        tensor.op.type in ("ReadVariableOp", "Identity", "Const", "Cast")
        for tensor in op.inputs
    )


def differentiates(op):
    """Whether an operation makes the gradient of a whole weight."""
    return op.type == "MatMul"


def copies(op):
    """Whether an operation makes what is as large as a layer, or larger."""
    if op.type == "MatMul":
        # Others make activations.
        return op.outputs[0].shape == (WIDTH, WIDTH)
    makes = ("ConcatV2", "CollectiveGatherV2", "CollectiveAllToAllV2")
    return op.type in makes


def layer_sized(shape):
    """Whether a shape may be that of a layer's weights, with zeros or none."""
    return shape.num_elements() is None or shape.num_elements() >= WIDTH**2


def made_by(kind, graph, is_whole=lambda shape: shape == (WIDTH, WIDTH)):
    """Operations of a device -> all that is ordered after their last use."""
    ends = [*graph.control_outputs, *(tensor.op for tensor in graph.outputs)]
    run = closure(ends, before)
    found = {}
    for op in run:
        if kind(op) and is_whole(op.outputs[0].shape) and not device(op):
            users = list(takers(op.outputs[0], run))
            assert users
            ordered = [closure(after(user), after) for user in users]
            found[op] = set.intersection(*ordered)
    return found


def most_at_once(held):
    """The size of the largest set of which no two are ordered (Dilworth)."""
    later = {
        one: [other for other in held if other in free and other is not one]
        for one, free in held.items()
    }
    pair = {}

    def matched(one, tried):
        for other in later[one]:
            if other not in tried:
                tried.add(other)
                if other not in pair or matched(pair[other], tried):
                    pair[other] = one
                    return True
        return False

    return len(held) - sum(matched(one, set()) for one in held)


def graph_of(build, **options):
    strategy = mgpu_tf.create_model_parallel_strategy(
        **{"num_virtual_devices": 2, **options}
    )
    trainer = mgpu_tf.Trainer(build, strategy)
    x = np.ones((18, WIDTH), "float32")
    trainer.fit(x, x, batch_size=9, verbose=0)
    return body_of(trainer)


@pytest.fixture(scope="module")
def graph():
    return graph_of(build)


def test_a_device_holds_two_layers_at_most(graph):
    weights = made_by(gathers, graph)
    # Once in the forward pass, and again in the backward pass.
    assert len(weights) == 2 * LAYERS
    assert most_at_once(weights) == AT_ONCE


def test_a_device_holds_gradients_of_two_layers_at_most(graph):
    gradients = made_by(differentiates, graph)
    assert len(gradients) == LAYERS
    assert most_at_once(gradients) == AT_ONCE


@pytest.mark.full
def test_weights_travel_in_the_type_that_layers_compute_in():
    found = graph_of(lambda: build("mixed_bfloat16"))
    weights = made_by(gathers, found)
    assert len(weights) == 2 * LAYERS
    assert {op.outputs[0].dtype for op in weights} == {tf.bfloat16}
    assert most_at_once(weights) == AT_ONCE


def test_copies_for_collectives_wait_for_their_turn():
    """Where devices do not divide the rows, what is sent is copied."""
    found = graph_of(build, num_virtual_devices=3, communication="ring")
    held = made_by(copies, found, layer_sized)
    packed = [op for op in held if op.outputs[0].shape == (WIDTH + 1, WIDTH)]
    received = [op for op in held if op.type.startswith("Collective")]
    assert len(packed) == LAYERS
    assert len(received) == 3 * LAYERS
    # Weights and gradients of two layers, or what these are copied from.
    assert most_at_once(held) == 2 * AT_ONCE
