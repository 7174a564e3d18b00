"""What each operation makes of rows: the list of what is proven."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.engine.row_proof.kinds import (
    ANY,
    FIXED,
    LARGEST,
    MEAN,
    NOTHING,
    ROWS,
    SMALLEST,
    SUM,
    UNPROVEN,
    Held,
    Kind,
    Rows,
    Sizes,
    Spread,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One element of the result comes of the elements at its place.
ELEMENTWISE = _words(
    """
    Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e
    BesselI1e BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil
    CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EluGrad
    Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater
    GreaterEqual Identity IdentityN Inv InvGrad IsFinite IsInf IsNan
    LeakyRelu LeakyReluGrad Less LessEqual Lgamma Log Log1p LogicalAnd
    LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NotEqual
    OnesLike Polygamma Pow PreventGradient RealDiv Reciprocal ReciprocalGrad
    Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select SelectV2
    Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad
    Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference
    StopGradient Sub Tan Tanh TanhGrad TruncateDiv Xdivy Xlog1py Xlogy
    ZerosLike Zeta
    """
)
# Linear in the argument with rows; what it is taken with must be fixed.
LINEAR = _words(
    """
    Cast CheckNumerics EnsureShape Identity IdentityN Neg PreventGradient
    StopGradient
    """
)
_REDUCTIONS = _words("All Any EuclideanNorm Max Mean Min Prod Sum")
# What is made over the rows themselves.
_OVER_ROWS = {"Max": LARGEST, "Mean": MEAN, "Min": SMALLEST, "Sum": SUM}
_LARGER_OF = {"Maximum": LARGEST, "Minimum": SMALLEST}
_ALIKE = (Held(alike=True), Held(alike=True, added=FIXED))
_ALONG = {"Cumsum": 1, "Cumprod": 1, "CumulativeLogsumexp": 1, "ReverseV2": 1}
# The last axes that an operation works over.
_LAST_AXES = {
    "Cholesky": 2,
    "LogSoftmax": 1,
    "MatrixBandPart": 2,
    "MatrixDeterminant": 2,
    "MatrixInverse": 2,
    "Softmax": 1,
    "TopKV2": 1,
}
# Images, `[rows, ...]`, and weights; rows are the first axis in all layouts.
_IMAGES = _words(
    """
    AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthToSpace
    DepthwiseConv2dNative ExtractImagePatches MaxPool MaxPool3D
    ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor
    SpaceToDepth
    """
)
# What keeps apart the parts of images that are spread over the first axis.
_OF_SPREAD = _words("Conv2D Conv3D DepthwiseConv2dNative ExpandDims Squeeze")
# Of ranks and lengths that are known.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "ConcatV2": lambda *values: np.concatenate(values[:-1], int(values[-1])),
    "Mul": np.multiply,
    "Pack": lambda *values: np.stack(values),
    "Prod": lambda values, axes: np.prod(values, axis=tuple(axes.flat)),
    "Range": np.arange,
    "Reshape": np.reshape,
    "Sub": np.subtract,
}
_DRAWS = ("StatelessRandom", "StatelessTruncated")


def _elementwise(op: tf.Operation, kinds: Sequence[Kind]) -> Kind:
    """The rows of all operands must lie at the same place from the end."""
    found: set[tuple[int, bool]] = set()
    block: Any = 1
    rank = op.outputs[0].shape.rank
    if rank is None:
        return UNPROVEN
    for tensor, kind in zip(op.inputs, kinds, strict=True):
        if isinstance(kind, Rows) and tensor.shape.rank is not None:
            # Blocks of one length: others would not fit together.
            found.add((tensor.shape.rank - kind.axis, kind.block == 1))
            block = kind.block
        elif kind != FIXED:
            return UNPROVEN
    if len(found) != 1:
        return UNPROVEN
    ((place, _),) = found
    for tensor, kind in zip(op.inputs, kinds, strict=True):
        # What is fixed must be the same for each row.
        if kind == FIXED and not _is_one(tensor, place):
            return UNPROVEN
    if op.type == "Select" and op.inputs[0].shape.rank != rank:
        return UNPROVEN
    return Rows(axis=rank - place, block=block)


def _is_one(tensor: tf.Tensor, place: int) -> bool:
    """Whether a tensor has one element, or no axis, at a place from the end."""
    rank = tensor.shape.rank
    return rank is not None and (rank < place or tensor.shape[-place] == 1)


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether a tensor is known to be a scalar zero, such as sums begin at."""
    value = tf.get_static_value(tensor)
    return value is not None and value.ndim == 0 and value == 0


def _linear(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """Sums and means over the rows, of which linear functions are the same."""
    moving = {kind for kind in kinds if kind != FIXED}
    if op.type in ("Add", "AddV2", "AddN", "Sub"):
        if moving == {MEAN}:
            return MEAN  # A constant is its own mean.
        fixed = [
            tensor
            for tensor, kind in zip(op.inputs, kinds, strict=True)
            if kind == FIXED
        ]
        whole = moving == {SUM} and all(map(_is_zero, fixed))
        return SUM if whole else UNPROVEN
    if len(moving) == 2 and op.type in ("RealDiv", "DivNoNan"):
        top, bottom = kinds
        counted = isinstance(bottom, Sizes) and bottom.scalar
        return MEAN if top == SUM and counted else UNPROVEN
    if len(moving) != 1:
        return UNPROVEN
    (kind,) = moving
    if op.type in LINEAR and op.outputs[0].dtype.is_floating:
        return kind
    once = kinds.count(kind) == 1
    if once and op.type in ("BatchMatMulV2", "MatMul", "Mul"):
        return kind
    if once and op.type in ("RealDiv", "Div", "DivNoNan") and kinds[0] == kind:
        return kind
    if op.type == "Pack":
        # A constant is its own mean, and not its own sum.
        return kind if kind == MEAN or FIXED not in kinds else UNPROVEN
    if op.type in (
        *("ExpandDims", "Mean", "Reshape", "Squeeze"),
        *("StridedSlice", "Sum"),
    ):
        whole = all(each == kind for each in kinds)
        return kind if whole or kinds[0] == kind != kinds[-1] else UNPROVEN
    return UNPROVEN


def _extreme(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """The largest or the smallest of the rows, moved but not changed."""
    again = op.type in _OVER_ROWS and _OVER_ROWS[op.type] == kinds[0]
    moved = op.type in ("Identity", "StopGradient", "Squeeze", "Reshape")
    others = set(kinds[1:]) <= {FIXED}
    return kinds[0] if (again or moved) and others else UNPROVEN


def _added(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """What a variable holds after something was added to it."""
    if op.type in ("Identity", "StopGradient", "Cast"):
        same = op.inputs[0].dtype == op.outputs[0].dtype
        return kinds[0] if same else UNPROVEN
    if op.type in _LARGER_OF and len(kinds) == 2:
        extreme = _LARGER_OF[op.type]
        held, other = kinds if isinstance(kinds[0], Held) else kinds[::-1]
        assert isinstance(held, Held)
        if other == extreme and held.added in (NOTHING, extreme):
            return dataclasses.replace(held, added=extreme)
        return UNPROVEN
    if op.type not in ("Add", "AddV2", "Sub") or len(kinds) != 2:
        return UNPROVEN
    left, right = kinds
    if isinstance(right, Held) and op.type != "Sub":
        left, right = right, left
    if isinstance(right, Sizes) and right.scalar:
        right = SUM  # Each row counts.
    if not isinstance(left, Held) or right not in (FIXED, SUM, MEAN):
        return UNPROVEN
    if left.added in (NOTHING, right):
        return dataclasses.replace(left, added=right)
    # A constant is its own mean. It counts once, and a sum for each replica.
    if {left.added, right} == {FIXED, MEAN}:
        return dataclasses.replace(left, added=MEAN)
    return UNPROVEN


def _shape(op: tf.Operation, kind: Kind) -> Kind:
    tensor = op.inputs[0]
    if not isinstance(kind, Rows) or kind.listed or tensor.shape.rank is None:
        return UNPROVEN
    lengths = [ANY if each is None else each for each in tensor.shape]
    lengths[kind.axis] = ROWS if kind.block == 1 else (ROWS, kind.block)
    if op.type == "Shape":
        return Sizes(lengths=tuple(lengths))
    return Sizes(lengths=((ROWS, ANY),), scalar=True)


def _sizes(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """Parts and joins of shapes, and what is made in such a shape."""
    found = _lengths_of(op, kinds)
    if isinstance(found, Sizes) and not any(map(_of_rows, found.lengths)):
        return FIXED
    return found


def _of_rows(length: Any) -> bool:
    return length == ROWS or isinstance(length, tuple)


def _lengths_of(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind = kinds[0]
    if op.type in ("Pack", "ConcatV2"):
        found: list[Any] = []
        joined = zip(op.inputs, kinds, strict=True)
        for tensor, each in list(joined)[: len(kinds) - (op.type != "Pack")]:
            lengths = _lengths(tensor, each)
            if lengths is None:
                return UNPROVEN
            found += lengths
        return Sizes(lengths=tuple(found))
    if not isinstance(kind, Sizes):
        return UNPROVEN
    if op.type in ("Cast", "Identity", "StopGradient"):
        return kind
    if op.type in ("Reshape", "Squeeze", "ExpandDims"):
        if len(kind.lengths) != 1 or op.outputs[0].shape.rank not in (0, 1):
            return UNPROVEN
        return dataclasses.replace(kind, scalar=op.outputs[0].shape.rank == 0)
    if op.type == "Prod" and kinds[1] == FIXED and not kind.scalar:
        # As many times the number of rows as there are others.
        rows = [length for length in kind.lengths if _of_rows(length)]
        counted = len(rows) == 1 and op.outputs[0].shape.rank == 0
        return (
            Sizes(lengths=((ROWS, ANY),), scalar=True) if counted else UNPROVEN
        )
    if op.type in ("StridedSlice", "GatherV2", "Slice"):
        if kinds[1:] != [FIXED] * len(kinds[1:]):
            return UNPROVEN
        return _taken(op, kind)
    # A draw of such a shape has rows as well.
    made = op.type == "Fill" or op.type.startswith(_DRAWS)
    if made and set(kinds[1:]) <= {FIXED}:
        return _filled(kind)
    return UNPROVEN


def _lengths(tensor: tf.Tensor, kind: Kind) -> list[Any] | None:
    if isinstance(kind, Sizes):
        return list(kind.lengths)
    if kind != FIXED or tensor.shape.num_elements() is None:
        return None
    value = _static(tensor)
    if value is not None:
        return [int(each) for each in value.reshape([-1])]
    if tf.is_symbolic_tensor(tensor) and tensor.op.type == "Pack":
        each = map(_static, tensor.op.inputs)
        return [ANY if value is None else int(value) for value in each]
    return [ANY] * int(tensor.shape.num_elements())


def _taken(op: tf.Operation, kind: Sizes) -> Kind:
    """Some elements of a shape."""
    known = [_static(tensor) for tensor in op.inputs[1:]]
    given = [value for value in known if value is not None]
    if len(given) != len(known) or kind.scalar:
        return UNPROVEN
    lengths = kind.lengths
    if op.type == "GatherV2":
        places = [int(place) for place in given[0].reshape([-1])]
        chosen = tuple(lengths[place] for place in places)
        return Sizes(lengths=chosen, scalar=op.outputs[0].shape.rank == 0)
    if op.type == "Slice":
        begin, size = (int(value[0]) for value in given)
        end = None if size < 0 else begin + size
        return Sizes(lengths=tuple(lengths[begin:end]))
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "shrink_axis", "ellipsis", "new_axis")
    }
    begin, end, step = (int(value[0]) for value in given)
    if masks["ellipsis"] or masks["new_axis"] or len(given[0]) != 1:
        return UNPROVEN
    if masks["shrink_axis"]:
        return Sizes(lengths=(lengths[begin],), scalar=True)
    low = None if masks["begin"] else begin
    high = None if masks["end"] else end
    return Sizes(lengths=tuple(lengths[low:high:step]))


def _filled(kind: Sizes) -> Kind:
    """A tensor of a shape that is the same everywhere."""
    if kind.scalar:
        return UNPROVEN
    axes = [i for i, length in enumerate(kind.lengths) if length == ROWS]
    others = [length for length in kind.lengths if length != ROWS]
    plain = all(length == ANY or isinstance(length, int) for length in others)
    return Rows(axis=axes[0]) if len(axes) == 1 and plain else UNPROVEN


def _static(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a tensor that the graph knows, else None."""
    value = tf.get_static_value(tensor)
    if value is not None or not tf.is_symbolic_tensor(tensor):
        return value
    compute = _ARITHMETIC.get(tensor.op.type)
    if compute is None:
        return _static_length(tensor.op)
    given = [_static(each) for each in tensor.op.inputs]
    if any(each is None for each in given):
        return None
    return np.asarray(compute(*given))


def _static_length(op: tf.Operation) -> np.ndarray | None:
    """Returns lengths of axes that were asked of a shape, else None."""
    if op.type == "GatherV2" and op.inputs[0].op.type == "Shape":
        shape, places = op.inputs[0].op.inputs[0].shape, _static(op.inputs[1])
        if places is None or not shape.rank:
            return None
        found = [shape[int(place)] for place in places.flat]
        return None if None in found else np.asarray(found)
    asked = op.inputs[0].op if op.type == "StridedSlice" else op
    if asked.type != "Shape" or asked is op:
        return None
    shape, place = asked.inputs[0].shape, _static(op.inputs[1])
    if op.get_attr("shrink_axis_mask") != 1 or place is None or not shape.rank:
        return None
    length = shape[int(place[0])]
    return None if length is None else np.asarray(length)


def _axes(op: tf.Operation, place: int = 1) -> list[int] | None:
    """The axes that an operation goes over, None where they are not known."""
    axes = _static(op.inputs[place])
    rank = op.inputs[0].shape.rank
    if axes is None or rank is None:
        return None
    return [int(axis) % max(rank, 1) for axis in axes.reshape([-1])]


def _reduction(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, axes = kinds[0], _axes(op)
    if not isinstance(kind, Rows) or axes is None:
        return UNPROVEN
    if kind.axis in axes:
        # A mean of integers is cut off.
        exact = op.type != "Mean" or not op.outputs[0].dtype.is_integer
        return _OVER_ROWS.get(op.type, UNPROVEN) if exact else UNPROVEN
    if op.get_attr("keep_dims"):
        return kind
    before = sum(axis < kind.axis for axis in axes)
    return dataclasses.replace(kind, axis=kind.axis - before)


def _position(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """The place of the largest or smallest element along an axis."""
    kind, axes = kinds[0], _axes(op)
    if not isinstance(kind, Rows) or axes is None or kind.axis in axes:
        return UNPROVEN
    before = sum(axis < kind.axis for axis in axes)
    return dataclasses.replace(kind, axis=kind.axis - before)


def _along(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, axes = kinds[0], _axes(op)
    if not isinstance(kind, Rows) or axes is None or kind.axis in axes:
        return UNPROVEN
    return kind


def _rolled(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, axes = kinds[0], _axes(op, 2)
    if not isinstance(kind, Rows) or axes is None or kind.axis in axes:
        return UNPROVEN
    return kind if set(kinds[1:]) == {FIXED} else UNPROVEN


def _last_axes(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, rank = kinds[0], op.inputs[0].shape.rank
    if not isinstance(kind, Rows) or kinds[1:] != [FIXED] * len(kinds[1:]):
        return UNPROVEN
    inside = rank is None or kind.axis >= rank - _LAST_AXES[op.type]
    return UNPROVEN if inside else kind


def _reshape(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """The rows stay in order, and no element takes in two of them."""
    kind, sizes = kinds
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if not isinstance(kind, Rows) or before.rank is None or after.rank is None:
        return UNPROVEN
    if sizes != FIXED and not isinstance(sizes, Sizes):
        return UNPROVEN
    lengths = _lengths(op.inputs[1], sizes)
    if lengths is None or kind.axis:
        return _kept_axes(kind, before, after, lengths)
    known = [n if isinstance(n, int) and n >= 0 else None for n in lengths]
    after = after.merge_with(known)
    inner = [each.num_elements() for each in (before[1:], after[1:])]
    if None not in inner and after.rank and after[0] is None:
        old, new = inner
        if new and old % new == 0:
            return _blocks(kind, old // new)
        if isinstance(kind.block, int) and new == old * kind.block:
            return dataclasses.replace(kind, block=1)
    if lengths and lengths[0] == ROWS and not any(map(_of_rows, lengths[1:])):
        return dataclasses.replace(kind, block=1)
    if lengths and lengths[0] == -1 and kind.block == 1 and _is_divided(op):
        return kind
    leading = bool(lengths) and _of_rows_or_open(lengths[0])
    if leading and _is_known(after[1:]) and after[1:] == before[-1:]:
        # Leading axes become one; the last stays.
        if before.rank == 2:
            return kind
        middle = before[1:-1].num_elements()
        return _blocks(kind, middle if middle else (str(before[1:-1]),))
    if lengths == [-1] and before.rank == 2 and kind.block == 1:
        return _blocks(kind, before[1] if before[1] else ("(None,)",))
    return UNPROVEN


def _is_divided(op: tf.Operation) -> bool:
    """Whether a row has as many elements before a reshape as behind it.

    Lengths that are not known are asked of the shape of what is reshaped.
    """
    source, shape = op.inputs
    if shape.op.type != "Pack":
        return False
    before, after = 1, 1
    axes: list[int] = []
    for axis in range(1, source.shape.rank):
        if source.shape[axis] is None:
            axes.append(axis)
        else:
            before *= source.shape[axis]
    for length in shape.op.inputs[1:]:
        value, axis = _static(length), _asked_axis(length, source)
        if value is not None:
            after *= int(value)
        elif axis in axes:
            axes.remove(axis)
        else:
            return False
    return before == after and not axes


def _asked_axis(length: tf.Tensor, source: tf.Tensor) -> int:
    """Returns of which axis of a tensor something is the length; -1: none."""
    op = length.op
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return -1
    place = _static(op.inputs[1])
    if op.get_attr("shrink_axis_mask") != 1 or place is None:
        return -1
    return int(place[0]) if op.inputs[0].op.inputs[0] is source else -1


def _of_rows_or_open(length: Any) -> bool:
    """Whether an axis has as many elements as rows and what others leave."""
    return length == -1 or isinstance(length, tuple)


def _is_known(shape: tf.TensorShape) -> bool:
    """Whether shapes that are equal are so in a step as well."""
    return bool(shape.is_fully_defined())


def _blocks(kind: Rows, joined: Any) -> Kind:
    if joined == 1:
        return kind
    if kind.block != 1:
        if isinstance(kind.block, int) and isinstance(joined, int):
            return dataclasses.replace(kind, block=kind.block * joined)
        return UNPROVEN
    return dataclasses.replace(kind, block=joined)


def _kept_axes(
    kind: Rows, before: Any, after: Any, lengths: list[Any] | None
) -> Kind:
    """A reshape behind the axis of the rows, those before it unchanged."""
    if lengths is None or len(lengths) <= kind.axis or kind.block != 1:
        return UNPROVEN
    leading = all(
        before[axis] is not None and before[axis] == after[axis]
        for axis in range(kind.axis)
    )
    others = [*lengths[: kind.axis], *lengths[kind.axis + 1 :]]
    rows = lengths[kind.axis] == ROWS and not any(map(_of_rows, others))
    return kind if leading and rows else UNPROVEN


def _transpose(op: tf.Operation, kinds: list[Kind]) -> Kind:
    order = _static(op.inputs[1])
    kind = kinds[0]
    if order is None or not isinstance(kind, Rows):
        return UNPROVEN
    return dataclasses.replace(
        kind, axis=[int(o) for o in order].index(kind.axis)
    )


def _expand(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, axis = kinds[0], _static(op.inputs[1])
    rank = op.outputs[0].shape.rank
    if axis is None or rank is None or not isinstance(kind, Rows):
        return UNPROVEN
    place = int(axis.reshape([-1])[0]) % rank
    return dataclasses.replace(kind, axis=kind.axis + (place <= kind.axis))


def _squeeze(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, rank = kinds[0], op.inputs[0].shape.rank
    axes = [axis % rank for axis in op.get_attr("squeeze_dims")] if rank else []
    if not axes or not isinstance(kind, Rows) or kind.axis in axes:
        return UNPROVEN
    before = sum(axis < kind.axis for axis in axes)
    return dataclasses.replace(kind, axis=kind.axis - before)


def _slice_strided(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """All rows are taken, from the first, whatever is taken of other axes."""
    kind, rank = kinds[0], op.inputs[0].shape.rank
    steps = _static(op.inputs[3])
    if not isinstance(kind, Rows) or rank is None or steps is None:
        return UNPROVEN
    if any(k != FIXED and not isinstance(k, Sizes) for k in kinds[1:]):
        return UNPROVEN
    mask = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "shrink_axis", "ellipsis", "new_axis")
    }
    given = len(steps)
    for name, tensor, each in zip(
        ("begin", "end"), op.inputs[1:3], kinds[1:3], strict=True
    ):
        # As many elements as there are rows: others on one device.
        lengths = _lengths(tensor, each)
        if lengths is None or any(
            _of_rows(length) and not mask[name] & 1 << index
            for index, length in enumerate(lengths)
        ):
            return UNPROVEN
    axis = place = 0
    fresh = bin(mask["new_axis"]).count("1")
    for index in range(given):
        bit = 1 << index
        if mask["ellipsis"] & bit:
            skipped = rank - (given - 1 - fresh)
            if axis <= kind.axis < axis + skipped:
                place += kind.axis - axis
                return dataclasses.replace(kind, axis=place)
            axis, place = axis + skipped, place + skipped
        elif mask["new_axis"] & bit:
            place += 1
        else:
            if axis == kind.axis:
                whole = mask["begin"] & bit and mask["end"] & bit
                if not whole or mask["shrink_axis"] & bit or steps[index] != 1:
                    return UNPROVEN
                return dataclasses.replace(kind, axis=place)
            axis += 1
            place += 0 if mask["shrink_axis"] & bit else 1
    return dataclasses.replace(kind, axis=place + kind.axis - axis)


def _slice(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind = kinds[0]
    begin, size = (_static(tensor) for tensor in op.inputs[1:3])
    if begin is None or size is None or not isinstance(kind, Rows):
        return UNPROVEN
    whole = begin[kind.axis] == 0 and size[kind.axis] == -1
    return kind if whole else UNPROVEN


def _concat(op: tf.Operation, kinds: list[Kind]) -> Kind:
    axis = _static(op.inputs[-1])
    rank = op.outputs[0].shape.rank
    if axis is None or rank is None or len(set(kinds[:-1])) != 1:
        return UNPROVEN
    kind = kinds[0]
    if not isinstance(kind, Rows) or int(axis) % rank == kind.axis:
        return UNPROVEN
    return kind


def _pack(op: tf.Operation, kinds: list[Kind]) -> Kind:
    rank = op.outputs[0].shape.rank
    if rank is None or len(set(kinds)) != 1 or not isinstance(kinds[0], Rows):
        return UNPROVEN
    place = op.get_attr("axis") % rank
    kind = kinds[0]
    return dataclasses.replace(kind, axis=kind.axis + (place <= kind.axis))


def _unpack(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, rank = kinds[0], op.inputs[0].shape.rank
    if rank is None or not isinstance(kind, Rows):
        return UNPROVEN
    place = op.get_attr("axis") % rank
    if place == kind.axis:
        return UNPROVEN
    return dataclasses.replace(kind, axis=kind.axis - (place < kind.axis))


def _split(op: tf.Operation, kinds: list[Kind]) -> Kind:
    value, place = (1, 0) if op.type == "Split" else (0, 2)
    kind, axis = kinds[value], _static(op.inputs[place])
    rank = op.inputs[value].shape.rank
    if axis is None or rank is None or not isinstance(kind, Rows):
        return UNPROVEN
    return UNPROVEN if int(axis) % rank == kind.axis else kind


def _gather(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """Rows look something up, or something is taken of each row."""
    axis = _static(op.inputs[2])
    batch = op.get_attr("batch_dims")
    table, places = kinds[:2]
    rank = op.inputs[0].shape.rank
    if axis is None or rank is None:
        return UNPROVEN
    axis = int(axis) % rank
    if table == FIXED and isinstance(places, Rows) and batch == 0:
        return dataclasses.replace(places, axis=places.axis + axis)
    if not isinstance(table, Rows) or table.axis == axis:
        return UNPROVEN
    if isinstance(places, Rows):
        same = places == table and table.axis < batch
        return table if same else UNPROVEN
    if places != FIXED or batch:
        return UNPROVEN
    of_places = op.inputs[1].shape.rank
    if of_places is None:
        return UNPROVEN
    moved = of_places - 1 if axis < table.axis else 0
    return dataclasses.replace(table, axis=table.axis + moved)


def _lookup(op: tf.Operation, kinds: list[Kind]) -> Kind:
    places = kinds[1]
    fits = isinstance(places, Rows) and op.get_attr("batch_dims") == 0
    return places if fits else UNPROVEN


def _matmul(op: tf.Operation, kinds: list[Kind]) -> Kind:
    left, right = kinds
    turned = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    # The gradient of a weight: products of the same rows are added up.
    if kinds == [Rows(axis=1 - turned[0]), Rows(axis=int(turned[1]))]:
        return SUM if op.outputs[0].dtype.is_floating else UNPROVEN
    plain = isinstance(left, Rows) and right == FIXED
    if turned[0] or not plain or left.axis:  # type: ignore
        return UNPROVEN
    return left


def _batch_matmul(op: tf.Operation, kinds: list[Kind]) -> Kind:
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return UNPROVEN
    rank = max(ranks)
    found = set()
    for tensor, kind, size in zip(op.inputs, kinds, ranks, strict=True):
        if kind == FIXED:
            continue
        if not isinstance(kind, Rows) or kind.block != 1:
            return UNPROVEN
        turned = op.get_attr("adj_x" if tensor is op.inputs[0] else "adj_y")
        first = tensor is op.inputs[0] and not turned
        limit = size - 1 if first else size - 2
        if kind.axis >= limit:
            return UNPROVEN
        found.add(kind.axis + rank - size)
    if len(found) != 1:
        return UNPROVEN
    (axis,) = found
    for tensor, kind, size in zip(op.inputs, kinds, ranks, strict=True):
        own = axis - rank + size
        if kind == FIXED and 0 <= own < size - 2 and tensor.shape[own] != 1:
            return UNPROVEN
    return Rows(axis=axis)


def _einsum(op: tf.Operation, kinds: list[Kind]) -> Kind:
    equation = op.get_attr("equation").decode().replace(" ", "")
    operands, result = equation.split("->")
    terms, longest = [], 0
    for term, tensor in zip(operands.split(","), op.inputs, strict=True):
        if tensor.shape.rank is None:
            return UNPROVEN
        count = tensor.shape.rank - len(term.replace("...", ""))
        longest = max(longest, count)
        terms.append(term.replace("...", _ellipsis(count)))
    result = result.replace("...", _ellipsis(longest))
    labels = set()
    for term, kind in zip(terms, kinds, strict=True):
        if isinstance(kind, Rows):
            labels.add((term[kind.axis], kind.block))
        elif kind != FIXED:
            return UNPROVEN
    if len(labels) != 1:
        return UNPROVEN
    ((label, block),) = labels
    fixed = [
        term for term, kind in zip(terms, kinds, strict=True) if kind == FIXED
    ]
    if any(label in term for term in fixed) or result.count(label) != 1:
        return UNPROVEN
    if any(term.count(label) > 1 for term in terms):
        return UNPROVEN
    return Rows(axis=result.index(label), block=block)


def _ellipsis(count: int) -> str:
    """Labels of the axes of an ellipsis; the last axes of operands meet."""
    return "9876543210"[10 - count :]


def _image(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind = kinds[0]
    first = isinstance(kind, Rows) and not kind.axis
    return kind if first and set(kinds[1:]) <= {FIXED} else UNPROVEN


def _into_parts(op: tf.Operation, kinds: list[Kind]) -> Kind:
    block = _block_of(op, kinds)
    return Spread(block=block) if kinds[0] == Rows() and block else UNPROVEN


def _of_spread(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """What is made of images in parts, until they are put together again."""
    spread, *others = kinds
    if not isinstance(spread, Spread) or set(others) - {FIXED}:
        return UNPROVEN
    if op.type == "BatchToSpaceND":
        return Rows() if _block_of(op, kinds) == spread.block else UNPROVEN
    if op.type not in _OF_SPREAD:
        return UNPROVEN
    found = _RULES[op.type](op, [Rows(), *others])
    return spread if found == Rows() else UNPROVEN


def _block_of(op: tf.Operation, kinds: list[Kind]) -> tuple[int, ...] | None:
    """Returns into how many parts images are divided, if that is known."""
    block = _static(op.inputs[1])
    if block is None or set(kinds[1:]) != {FIXED}:
        return None
    return tuple(int(parts) for parts in block)


def _transposed(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """A transposed convolution, which is the gradient of one by its images."""
    size, weights, images = kinds
    lengths = _lengths(op.inputs[0], size)
    if lengths is None or lengths[0] != ROWS or any(map(_of_rows, lengths[1:])):
        return UNPROVEN
    first = isinstance(images, Rows) and not images.axis
    fits = first and weights == FIXED and images.block == 1  # type: ignore
    return images if fits else UNPROVEN


def _normalized(op: tf.Operation, kinds: list[Kind]) -> Kind | list[Kind]:
    """A batch normalization by given statistics, and not by the batch's."""
    if op.get_attr("is_training") or not isinstance(kinds[0], Rows):
        return UNPROVEN
    if set(kinds[1:]) != {FIXED} or kinds[0].axis:
        return UNPROVEN
    return [kinds[0], *[UNPROVEN] * (len(op.outputs) - 1)]


def _ensured(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """The same, if no number of rows is asked for: a replica has fewer."""
    kind = kinds[0]
    if not isinstance(kind, Rows):
        return UNPROVEN
    shape = tf.TensorShape(op.get_attr("shape"))
    known = shape.rank is not None and shape[kind.axis] is not None
    return UNPROVEN if known else kind


def _bitcast(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """The same bits as numbers of another type of the same size."""
    same = op.inputs[0].dtype.size == op.outputs[0].dtype.size
    return kinds[0] if same else UNPROVEN


def _one_hot(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, rank = kinds[0], op.outputs[0].shape.rank
    if not isinstance(kind, Rows) or set(kinds[1:]) != {FIXED} or rank is None:
        return UNPROVEN
    place = op.get_attr("axis") % rank
    return dataclasses.replace(kind, axis=kind.axis + (place <= kind.axis))


def _pad(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, paddings = kinds[0], _static(op.inputs[1])
    if paddings is None or not isinstance(kind, Rows):
        return UNPROVEN
    return UNPROVEN if paddings[kind.axis].any() else kind


def _tile(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """Rows are repeated along other axes, or what is fixed for each row."""
    kind, times = kinds
    lengths = _lengths(op.inputs[1], times)
    if lengths is None:
        return UNPROVEN
    axes = [i for i, length in enumerate(lengths) if _of_rows(length)]
    if isinstance(kind, Rows):
        return kind if lengths[kind.axis] == 1 and not axes else UNPROVEN
    if kind != FIXED or len(axes) != 1 or lengths[axes[0]] != ROWS:
        return UNPROVEN
    if op.inputs[0].shape[axes[0]] != 1:
        return UNPROVEN
    return Rows(axis=axes[0])


def _broadcast(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, sizes = kinds
    lengths = _lengths(op.inputs[1], sizes)
    rank = op.inputs[0].shape.rank
    if lengths is None or rank is None:
        return UNPROVEN
    axes = [i for i, length in enumerate(lengths) if _of_rows(length)]
    if len(axes) != 1 or lengths[axes[0]] != ROWS:
        return UNPROVEN
    place = len(lengths) - axes[0]
    if isinstance(kind, Rows):
        fits = kind.block == 1 and rank - kind.axis == place
        return Rows(axis=axes[0]) if fits else UNPROVEN
    fits = kind == FIXED and _is_one(op.inputs[0], place)
    return Rows(axis=axes[0]) if fits else UNPROVEN


def _labelled(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """A loss of logits and labels, of which each row has its own."""
    same = len(set(kinds)) == 1 and isinstance(kinds[0], Rows)
    return kinds[0] if same and not kinds[0].axis else UNPROVEN  # type: ignore


def _diagonal(op: tf.Operation, kinds: list[Kind]) -> Kind:
    kind, rank = kinds[0], op.inputs[0].shape.rank
    if not isinstance(kind, Rows) or rank is None:
        return UNPROVEN
    plain = (rank == 2 and kind.axis == 0) or kind.axis < rank - 2
    plain &= set(kinds[1:]) <= {FIXED}
    return kind if plain and op.type == "MatrixDiagV3" else UNPROVEN


def _of_list(op: tf.Operation, kinds: list[Kind]) -> Kind:
    """Lists of tensors, as a `TensorArray` is one."""
    kind = kinds[0]
    if not isinstance(kind, Rows) or not kind.listed:
        return UNPROVEN
    if op.type == "TensorListGetItem" and kinds[1] == FIXED:
        return dataclasses.replace(kind, listed=False)
    if op.type == "TensorListStack":
        return dataclasses.replace(kind, listed=False, axis=kind.axis + 1)
    if op.type == "TensorListSetItem" and kinds[1] == FIXED:
        item = kinds[2]
        same = item == dataclasses.replace(kind, listed=False)
        return kind if same else UNPROVEN
    if op.type in ("Identity", "StopGradient"):
        return kind
    return UNPROVEN


def _into_list(op: tf.Operation, kinds: list[Kind]) -> Kind:
    if op.type == "TensorListFromTensor":
        kind = kinds[0]
        if not isinstance(kind, Rows) or kind.axis == 0:
            return UNPROVEN
        return dataclasses.replace(kind, listed=True, axis=kind.axis - 1)
    held, place, item = kinds[:3]
    if held != FIXED or place != FIXED or not isinstance(item, Rows):
        return UNPROVEN
    return dataclasses.replace(item, listed=True)


_Rule = Callable[[tf.Operation, list[Kind]], Any]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_LAST_AXES, _last_axes),
    **dict.fromkeys(_IMAGES, _image),
    "ArgMax": _position,
    "ArgMin": _position,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "Bitcast": _bitcast,
    "BatchToSpaceND": _of_spread,
    "BroadcastTo": _broadcast,
    "ConcatV2": _concat,
    "Conv2DBackpropInput": _transposed,
    "Conv3DBackpropInputV2": _transposed,
    "Einsum": _einsum,
    "EnsureShape": _ensured,
    "ExpandDims": _expand,
    "FusedBatchNormV3": _normalized,
    "GatherV2": _gather,
    "MatMul": _matmul,
    "MatrixDiagV3": _diagonal,
    "MirrorPad": _pad,
    "OneHot": _one_hot,
    "Pack": _pack,
    "Pad": _pad,
    "PadV2": _pad,
    "Reshape": _reshape,
    "ResourceGather": _lookup,
    "Roll": _rolled,
    "Slice": _slice,
    "SoftmaxCrossEntropyWithLogits": _labelled,
    "SpaceToBatchND": _into_parts,
    "SparseSoftmaxCrossEntropyWithLogits": _labelled,
    "Split": _split,
    "SplitV": _split,
    "Squeeze": _squeeze,
    "StridedSlice": _slice_strided,
    "TensorListFromTensor": _into_list,
    "TensorListSetItem": _into_list,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
}


# What else is given a number of rows depends on it.
_TAKES_SIZE_FIRST = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_TAKES_SIZES = (
    *("BroadcastTo", "Reshape", "StridedSlice", "Tile"),
    *_TAKES_SIZE_FIRST,
)


def as_fixed(kind: Kind) -> Kind:
    """Returns `FIXED` for what all replicas hold, else the kind."""
    return FIXED if kind in _ALIKE else kind


def by_rule(op: tf.Operation, kinds: list[Kind]) -> Kind | list[Kind]:
    """Returns what an operation makes of what is known of its inputs.

    Args:
        op: An operation that calls no function.
        kinds: What its inputs are.
    """
    if any(isinstance(kind, Rows) and kind.listed for kind in kinds):
        return _of_list(op, kinds)
    if any(isinstance(kind, Spread) for kind in kinds):
        return _of_spread(op, kinds)
    if any(isinstance(kind, Held) for kind in kinds):
        found = _added(op, kinds)
        # What all replicas hold is fixed, unless they have added to it.
        plain = list(map(as_fixed, kinds))
        if found != UNPROVEN or plain == kinds:
            return found
        if all(kind == FIXED for kind in plain):
            return FIXED
        return by_rule(op, plain)
    if any(kind in (LARGEST, SMALLEST) for kind in kinds):
        return _extreme(op, kinds)
    if any(kind in (SUM, MEAN) for kind in kinds):
        return _linear(op, kinds)
    if op.type in ("Shape", "Size"):
        return _shape(op, kinds[0])
    if (isinstance(kinds[0], Sizes) and op.type not in _TAKES_SIZE_FIRST) or (
        op.type in ("Pack", "ConcatV2")
        and not any(isinstance(kind, Rows) for kind in kinds)
    ):
        return _sizes(op, kinds)
    sized = any(isinstance(kind, Sizes) for kind in kinds)
    if sized and op.type not in _TAKES_SIZES:
        return UNPROVEN
    rule = _RULES.get(op.type)
    if rule is not None:
        return rule(op, kinds)
    if op.type in ELEMENTWISE:
        return _elementwise(op, kinds)
    return UNPROVEN


def proven_operations() -> list[str]:
    """Returns the types of the operations that have a rule."""
    return sorted({*ELEMENTWISE, *_RULES})
