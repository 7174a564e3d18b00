"""Graphs of steps by hand, without TensorFlow."""

import itertools

from mgpu_tf.planner.operations.graph import (
    BATCH,
    Graph,
    Layer,
    Operation,
    Tensor,
    Weight,
)


def dense_graph(widths=(4, 8, 2), slots=8.0, kind="Dense"):
    """A chain of products: forward, a loss, and the gradients."""
    tensors, operations, weights = [], [], []

    def tensor(*shape):
        tensors.append(Tensor(shape))
        return len(tensors) - 1

    inputs = taken = tensor(BATCH, widths[0])
    values = [taken]
    layers = []
    for place, (width, units) in enumerate(itertools.pairwise(widths)):
        kernel = tensor(width, units)
        taken = values[-1]
        made = tensor(BATCH, units)
        operations.append(
            Operation("MatMul", (taken, kernel), (made,), place, inner=place)
        )
        weights.append(
            Weight(
                f"{place}/kernel",
                (width, units),
                4,
                kernel,
                layer=place,
                inner=place,
            )
        )
        values.append(made)
        layers.append(Layer(f"dense_{place}", kind))
    loss = tensor()
    operations.append(Operation("Sum", (values[-1],), (loss,)))
    upstream = tensor(BATCH, widths[-1])
    operations.append(Operation("Fill", (loss,), (upstream,), backward=True))
    for place in reversed(range(len(layers))):
        weight = weights[place]
        gradient = tensor(*weight.shape)
        operations.append(
            Operation(
                "MatMul",
                (values[place], upstream),
                (gradient,),
                place,
                backward=True,
                inner=place,
                attributes={"transpose_a": True},
            )
        )
        weights[place] = Weight(
            weight.path,
            weight.shape,
            4,
            weight.tensor,
            layer=place,
            inner=place,
            gradient=gradient,
        )
        if place:
            below = tensor(BATCH, weight.shape[0])
            operations.append(
                Operation(
                    "MatMul",
                    (upstream, weight.tensor),
                    (below,),
                    place,
                    backward=True,
                    inner=place,
                    attributes={"transpose_b": True},
                )
            )
            upstream = below
    return Graph(
        "chain",
        tensors,
        operations,
        weights,
        layers,
        [inputs],
        [slots] * len(weights),
        loss=loss,
        inner=layers,
    )
