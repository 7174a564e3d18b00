"""How operations treat tensors of which each device has a part.

    outputs_of(op, held)    # {"add:0": Halves(axis=1, ...)}

What is not known to treat parts alike needs whole tensors. So a graph with
unknown operations costs communication, never right numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals

# Operations of one tensor, each element from that element alone.
_UNARY = frozenset(
    [
        "Abs",
        "Cast",
        "Cos",
        "Elu",
        "Erf",
        "Erfc",
        "Exp",
        "Expm1",
        "Identity",
        "IsFinite",
        "IsInf",
        "IsNan",
        "LeakyRelu",
        "Log",
        "Log1p",
        "LogicalNot",
        "Neg",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Rsqrt",
        "Selu",
        "Sigmoid",
        "Sign",
        "Sin",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Square",
        "StopGradient",
        "Tanh",
        "PlaceholderWithDefault",
        "PreventGradient",
        "Snapshot",
        "CheckNumerics",
        "ZerosLike",
        "OnesLike",
    ]
)
# Operations of several tensors that are broadcast to one shape.
_BROADCAST = frozenset(
    [
        "Add",
        "AddV2",
        "Div",
        "DivNoNan",
        "Equal",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "LogicalAnd",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mul",
        "MulNoNan",
        "NotEqual",
        "Pow",
        "RealDiv",
        "SelectV2",
        "SquaredDifference",
        "Sub",
        "Xdivy",
        "Xlogy",
    ]
)
_REDUCTIONS = frozenset(["All", "Any", "Max", "Mean", "Min", "Prod", "Sum"])
_POOLS = frozenset(
    ["AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D", "MaxPoolV2"]
)


@dataclasses.dataclass(frozen=True)
class Halves:
    """What is split of a tensor.

    Attributes:
        axis: The axis along which each device has a part.
        layers: The layers whose outputs it is made of, by identity.
        is_shape: Whether the tensor is the shape of one that is split so.
    """

    axis: int
    layers: frozenset[int]
    is_shape: bool = False


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a sequence is cut.

    Attributes:
        axis: The axis, from the end.
        length: Its whole length.
    """

    axis: int
    length: int


class Whole(Exception):
    """An operation needs whole tensors."""


def outputs_of(
    op: tf.Operation, held: list[Halves | None]
) -> dict[str, Halves]:
    """Returns what is split of the outputs of an operation, by their names.

    Args:
        op: An operation.
        held: What is split of each input, None of those that are whole.

    Raises:
        Whole: It cannot be computed from parts alone.
    """
    layers = frozenset[int]().union(*(h.layers for h in held if h is not None))
    of_shape = any(h is not None and h.is_shape for h in held)
    axes = [None if h is None else h.axis for h in held]
    axes = _axes_of_shape(op, axes) if of_shape else _axes(op, axes)
    is_shape = op.type == "Shape" or (of_shape and op.type == "StridedSlice")
    return {
        tensor.name: Halves(axis, layers, is_shape)
        for tensor, axis in zip(op.outputs, axes, strict=True)
        if axis is not None
    }


def _axes(op: tf.Operation, held: list[int | None]) -> list[int | None]:
    if any(tensor.shape.rank is None for tensor in op.inputs):
        raise Whole
    if op.type in _UNARY or op.type == "Shape":
        return [held[0]]
    if op.type == "IdentityN":
        if keras_internals.gradient_given(op) is not None:
            raise Whole  # What flows back may mix the parts.
        return held
    if op.type in _BROADCAST:
        return [_broadcast(op, held)]
    for kinds, rule in _RULES.items():
        if op.type in kinds:
            if any(axis is not None for axis in held[1:]) and rule not in (
                _einsum,
                _matmul,
                _joined,
                _divided,
            ):
                raise Whole
            return [rule(op, held)] * len(op.outputs)
    raise Whole


def _axes_of_shape(op: tf.Operation, held: list[Any]) -> list[int | None]:
    """Returns what is split where an input is the shape of a split tensor."""
    if op.type == "Fill":
        return [held[0]]
    if op.type != "StridedSlice" or any(a is not None for a in held[1:]):
        raise Whole
    masks = ("ellipsis_mask", "new_axis_mask")
    begin, end, step = (int(_constant(t)[0]) for t in op.inputs[1:])
    if any(op.get_attr(mask) for mask in masks) or step != 1:
        raise Whole
    length = op.inputs[0].shape[0]
    begin = 0 if op.get_attr("begin_mask") else begin % length
    if op.get_attr("shrink_axis_mask"):
        if begin == held[0]:
            raise Whole
        return [None]
    end = length if op.get_attr("end_mask") else min(end, length)
    if end < 0:
        end += length
    if begin <= held[0] < end:
        return [held[0] - begin]
    return [None]


def _broadcast(op: tf.Operation, held: list[Any]) -> int:
    rank = op.outputs[0].shape.rank
    from_end = {
        axis - tensor.shape.rank
        for tensor, axis in zip(op.inputs, held, strict=True)
        if axis is not None
    }
    if len(from_end) != 1:
        raise Whole
    axis = from_end.pop()
    for tensor, own in zip(op.inputs, held, strict=True):
        reaches = tensor.shape.rank >= -axis
        if own is None and reaches and tensor.shape[axis] != 1:
            raise Whole
    return rank + axis


def _constant(tensor: Any) -> Any:
    value = tf.get_static_value(tensor)
    if value is None:
        raise Whole
    return value


def _softmax(op: tf.Operation, held: list[Any]) -> int:
    if held[0] == op.inputs[0].shape.rank - 1:
        raise Whole
    return held[0]


def _transpose(op: tf.Operation, held: list[Any]) -> int:
    return list(_constant(op.inputs[1])).index(held[0])


def _expanded(op: tf.Operation, held: list[Any]) -> int:
    rank = op.inputs[0].shape.rank
    place = int(_constant(op.inputs[1])) % (rank + 1)
    return held[0] + (place <= held[0])


def _sliced(op: tf.Operation, held: list[Any]) -> int:
    """A slice that takes all of the split axis."""
    if op.get_attr("ellipsis_mask"):
        raise Whole
    begin, strides = _constant(op.inputs[1]), _constant(op.inputs[3])
    axis = made = 0
    for place in range(len(begin)):
        bit = 1 << place
        if op.get_attr("new_axis_mask") & bit:
            made += 1
            continue
        if axis == held[0]:
            whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & bit
            if not whole or strides[place] != 1:
                raise Whole
            return made
        axis += 1
        made += not op.get_attr("shrink_axis_mask") & bit
    return made + held[0] - axis


def _joined(op: tf.Operation, held: list[Any]) -> int:
    """Tensors joined along another axis, all of them split alike."""
    *tensors, last = held
    axis = int(_constant(op.inputs[-1])) % op.inputs[0].shape.rank
    if last is not None or len(set(tensors)) != 1 or tensors[0] == axis:
        raise Whole
    return tensors[0]


def _divided(op: tf.Operation, held: list[Any]) -> int:
    """A tensor cut along another axis."""
    axis = int(_constant(op.inputs[0])) % op.inputs[1].shape.rank
    if held[1] == axis:
        raise Whole
    return held[1]


def _reduced(op: tf.Operation, held: list[Any]) -> int:
    rank = op.inputs[0].shape.rank
    axes = {int(a) % rank for a in _constant(op.inputs[1]).reshape(-1)}
    if held[0] in axes:
        raise Whole
    if op.get_attr("keep_dims"):
        return held[0]
    return held[0] - sum(axis < held[0] for axis in axes)


def _pooled(op: tf.Operation, held: list[Any]) -> int:
    form = op.get_attr("data_format").decode()
    if held[0] != form.index("C"):
        raise Whole
    return held[0]


def _matmul(op: tf.Operation, held: list[Any]) -> int:
    rank = op.outputs[0].shape.rank
    same_rank = {tensor.shape.rank for tensor in op.inputs} == {rank}
    if not same_rank or held[0] != held[1] or held[0] >= rank - 2:
        raise Whole
    return held[0]


def _einsum(op: tf.Operation, held: list[Any]) -> int:
    given, wanted = op.get_attr("equation").decode().split("->")
    terms = given.split(",")
    if "." in given:
        raise Whole
    labels = {
        term[axis]
        for term, axis in zip(terms, held, strict=True)
        if axis is not None
    }
    if len(labels) != 1:
        raise Whole
    label = labels.pop()
    for term, axis in zip(terms, held, strict=True):
        if (label in term and axis is None) or term.count(label) > 1:
            raise Whole
    if label not in wanted:
        raise Whole
    return wanted.index(label)


_RULES: dict[frozenset[str], Callable[..., int]] = {
    frozenset(["Softmax", "LogSoftmax"]): _softmax,
    frozenset(["Transpose"]): _transpose,
    frozenset(["StridedSlice"]): _sliced,
    frozenset(["ConcatV2"]): _joined,
    frozenset(["Split"]): _divided,
    frozenset(["ExpandDims"]): _expanded,
    frozenset(["Einsum"]): _einsum,
    frozenset(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"]): _matmul,
    _REDUCTIONS: _reduced,
    _POOLS: _pooled,
}
