"""Floating-point operations against hand calculations."""

import pytest

from mgpu_tf.planner.operations.costs import (
    cost_of,
    step_operations,
    work_by_layer,
)
from mgpu_tf.planner.operations.graph import BATCH, Graph, Operation, Tensor
from tests.planner.graphs import dense_graph


def one(kind, taken, made, **attributes):
    tensors = [Tensor(shape) for shape in (*taken, *made)]
    count = len(taken)
    operation = Operation(
        kind,
        tuple(range(count)),
        tuple(range(count, count + len(made))),
        attributes=attributes,
    )
    graph = Graph("one", tensors, [operation], [], [], [], [])
    return cost_of(graph, operation, 10)


def test_a_product():
    cost = one("MatMul", [(BATCH, 3), (3, 5)], [(BATCH, 5)])
    assert cost.operations == 2 * 10 * 3 * 5
    assert cost.moved == 4 * (10 * 3 + 3 * 5 + 10 * 5)
    assert cost.is_product


def test_a_gradient_of_weights_sums_over_rows():
    shapes = [(BATCH, 3), (BATCH, 5)], [(3, 5)]
    cost = one("MatMul", *shapes, transpose_a=True)
    assert cost.operations == 2 * 10 * 3 * 5


def test_convolutions_and_their_gradients_cost_the_same():
    image, kernel, made = (BATCH, 8, 8, 3), (3, 3, 3, 16), (BATCH, 6, 6, 16)
    expected = 2 * 10 * 6 * 6 * 16 * 3 * 3 * 3
    sizes = (4,)
    for kind, taken, result in (
        ("Conv2D", [image, kernel], [made]),
        ("Conv2DBackpropInput", [sizes, kernel, made], [image]),
        ("Conv2DBackpropFilter", [image, sizes, made], [kernel]),
    ):
        assert one(kind, taken, result).operations == expected, kind


def test_an_einsum_multiplies_all_its_letters():
    cost = one(
        "Einsum",
        [(BATCH, 7, 2, 4), (BATCH, 9, 2, 4)],
        [(BATCH, 2, 7, 9)],
        equation="aecd,abcd->acbe",
    )
    assert cost.operations == 2 * 10 * 7 * 9 * 2 * 4


def test_names_are_free_and_elements_cost_one():
    assert one("Reshape", [(BATCH, 4)], [(BATCH, 2, 2)]).moved == 0
    cost = one("Relu", [(BATCH, 4)], [(BATCH, 4)])
    assert (cost.operations, cost.is_product) == (40, False)


def test_a_loop_costs_what_is_inside_as_often_as_it_runs():
    inside = Operation("MatMul", (0, 1), (2,), times=6)
    tensors = [Tensor((BATCH, 3)), Tensor((3, 5)), Tensor((BATCH, 5))]
    loop = Operation("While", (0,), (2,), attributes={"inside": [inside]})
    graph = Graph("loop", tensors, [loop], [], [], [], [])
    assert cost_of(graph, loop, 10).operations == 6 * 2 * 10 * 3 * 5


def test_a_backward_pass_is_two_forward_passes():
    graph = dense_graph((64, 64, 64))
    forward = sum(work_by_layer(graph, 10))
    assert forward == 2 * 2 * 10 * 64 * 64
    # The first layer has no gradient of its inputs.
    assert step_operations(graph, 10) == pytest.approx(2.5 * forward, rel=0.01)
