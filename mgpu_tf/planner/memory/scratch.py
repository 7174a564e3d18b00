"""What is in no graph: scratch of operations, and what an allocator wastes.

A convolution copies its arguments into the layout that its kernel wants; an
allocator hands out more than was asked for, and more so where the values that
variables begin with have left holes. One number stands for each kind: bytes
for each byte. They are fitted to measured peaks by
`experiments/planner/memory.py`, which also shows how well numbers that are
fitted without a model predict that model.

This module does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.operations.graph import Operation

_CONVOLUTIONS = (
    "Conv2D",
    "Conv2DBackpropFilter",
    "Conv2DBackpropInput",
    "Conv3D",
    "Conv3DBackpropFilterV2",
    "Conv3DBackpropInputV2",
)
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")

FITTED: dict[str, float] = {
    # Scratch, for each byte of arguments and results.
    "convolution": 0.5,
    "strided convolution": 0.0,
    "product": 0.0,
    "other": 0.0,
    # Waste of the allocator, for each byte that is there between steps,
    "stored one_device": 0.1,
    "stored mirrored": 0.0,
    "stored fsdp": 0.1,
    "stored model_parallel": 0.2,
    # and for each byte that comes and goes.
    "passes one_device": 0.0,
    "passes mirrored": 0.0,
    "passes fsdp": 0.05,
    "passes tensor": 0.2,
    "passes pipeline": 0.0,
}
# Kinds of memory that are there between steps.
STORED = ("parameters", "slots", "averages", "other")


def kind_of(operation: Operation) -> str:
    """Returns the kind of an operation, a key of `FITTED`."""
    if operation.kind in _PRODUCTS:
        return "product"
    if operation.kind not in _CONVOLUTIONS:
        return "other"
    strides = operation.attributes.get("strides", [1])
    return "convolution" if max(strides) == 1 else "strided convolution"


def wasted_bytes(
    by_kind: Mapping[str, float],
    layout: Layout,
    fitted: Mapping[str, float] = FITTED,
) -> float:
    """Returns what the allocator of a device hands out for nothing.

    Args:
        by_kind: What is asked for.
        layout: How it is laid out.
        fitted: Bytes for each byte, by kind.
    """
    name = layout.strategy
    passes = name
    if name == "model_parallel":
        passes = "pipeline" if layout.pipeline > 1 else "tensor"
    stored = sum(by_kind[kind] for kind in STORED)
    others = sum(by_kind.values()) - stored
    return (
        fitted.get(f"stored {name}", 0.0) * stored
        + fitted.get(f"passes {passes}", 0.0) * others
    )


def scratch_of(
    operation: Operation, fitted: Mapping[str, float] = FITTED
) -> float:
    """Returns what an operation needs beside its arguments and results.

    Args:
        operation: The operation.
        fitted: Bytes for each byte, by kind.

    Returns:
        Bytes for each byte of its arguments and results.
    """
    return fitted[kind_of(operation)]
