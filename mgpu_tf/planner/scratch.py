"""What operations need while they run, beside what they take and make.

A convolution copies its arguments into the layout that its kernel wants, a
product of matrices packs them, and an allocator hands out more than was asked
for. None of it is in a graph. Each kind of operation has one number: the bytes
of its scratch for each byte of what it takes and makes. The numbers are fitted
to measured peaks by `experiments/planner/memory.py`, which also tells how well
those fitted without a model predict that model.

This module does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping

# Types of operations by kind; what is in no row is "other".
_KINDS = {
    "Conv2D": "convolution",
    "Conv3D": "convolution",
    "Conv2DBackpropFilter": "convolution filter",
    "Conv3DBackpropFilterV2": "convolution filter",
    "Conv2DBackpropInput": "convolution input",
    "Conv3DBackpropInputV2": "convolution input",
    "DepthwiseConv2dNative": "depthwise",
    "DepthwiseConv2dNativeBackpropFilter": "depthwise",
    "DepthwiseConv2dNativeBackpropInput": "depthwise",
    "MatMul": "product",
    "BatchMatMulV2": "product",
    "BatchMatMulV3": "product",
    "Einsum": "einsum",
    "FusedBatchNormV3": "normalization",
    "FusedBatchNormGradV3": "normalization",
}

# Bytes of scratch for each byte of arguments and results. "concurrent" is the
# part of what the step holds for its passes that runs beside the walk.
FITTED: dict[str, float] = {
    "convolution": 0.0,
    "convolution filter": 0.0,
    "convolution input": 0.0,
    "depthwise": 0.0,
    "product": 0.0,
    "einsum": 0.0,
    "normalization": 0.0,
    "other": 0.0,
    "concurrent": 0.0,
}


def kind_of(operation: str) -> str:
    """Returns the kind of a type of operation."""
    return _KINDS.get(operation, "other")


def scratch_bytes(
    operation: str, touched: float, fitted: Mapping[str, float] = FITTED
) -> float:
    """Returns what an operation needs beside its arguments and results.

    Args:
        operation: Its type.
        touched: Bytes of its arguments and results.
        fitted: Bytes for each byte, by kind.
    """
    return fitted[kind_of(operation)] * touched
