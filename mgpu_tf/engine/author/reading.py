"""Reading, from the graph of a step, how a value depends on the examples.

A loss that an author adds may be a mean over the rows of the batch, a sum, or
a constant, and each asks for another share of a replica. In a traced step the
value is a tensor of a graph that shows which it is:

    reader = Reader(rows=[x, y])
    reader.contribution(tf.reduce_mean(tf.square(x)), share)   a mean
    reader.contribution(tf.reduce_sum(x) + 0.1, share)         a sum, and once
    reader.contribution(tf.math.log(tf.reduce_sum(x)), share)  Unreadable

Every term has a degree: the power of the number of rows by which it grows. A
constant and a mean have 0, a sum and the number of rows have 1, a sum divided
by the number of rows 0 again. With the share `local` of `total` rows,

    contribution = term * (local / total) ** (1 - degree)

adds up over replicas to the term of the global batch. What cannot be read so,
such as a ratio of two sums or anything that mixes rows, is never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare

Terms = dict[int, tf.Tensor]

# State that all replicas share, and what is what its inputs are: calls, and
# the parts of a weight that replicas put together.
_NOT_RANDOM = {
    "Assert",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "AssignVariableOp",
    "Case",
    "CollectiveGatherV2",
    "If",
    "PartitionedCall",
    "PrintV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "StatefulPartitionedCall",
    "VarHandleOp",
    "While",
}

_UNARY = {
    "Cast": lambda part, op: tf.cast(part, op.outputs[0].dtype),
    "CheckNumerics": lambda part, op: part,
    "EnsureShape": lambda part, op: part,
    "ExpandDims": lambda part, op: tf.expand_dims(part, op.inputs[1]),
    "Identity": lambda part, op: part,
    "IdentityN": lambda part, op: part,
    "Neg": lambda part, op: -part,
    "PreventGradient": lambda part, op: part,
    "Reshape": lambda part, op: tf.reshape(part, op.inputs[1]),
    "Squeeze": lambda part, op: tf.reshape(part, tf.shape(op.outputs[0])),
    "StopGradient": lambda part, op: tf.stop_gradient(part),
}
# Where operands of another number of axes are aligned by their last.
_BROADCASTING = {
    "Add",
    "AddV2",
    "Div",
    "DivNoNan",
    "Equal",
    "FloorDiv",
    "FloorMod",
    "Greater",
    "GreaterEqual",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "Mul",
    "NotEqual",
    "Pow",
    "RealDiv",
    "SelectV2",
    "SquaredDifference",
    "Sub",
    "Xdivy",
    "Xlog1py",
    "Xlogy",
}
# What places in a sequence are made of.
_OF_SIZES = {
    *_BROADCASTING,
    "BroadcastTo",
    "Cast",
    "ConcatV2",
    "ExpandDims",
    "Identity",
    "Pack",
    "Range",
    "Reshape",
    "Squeeze",
    "Tile",
}
_SUMS = {"Add", "AddN", "AddV2", "Sub"}
_RATIOS = {"Div", "DivNoNan", "RealDiv"}
_REDUCTIONS = {"Sum": tf.reduce_sum, "Mean": tf.reduce_mean}
# Whatever they do over the first axis, they do it across examples.
_ACROSS = {
    "All",
    "Any",
    "ArgMax",
    "ArgMin",
    "Cumprod",
    "Cumsum",
    "CumulativeLogsumexp",
    "EuclideanNorm",
    "Max",
    "Mean",
    "Min",
    "Prod",
    "ReverseV2",
    "Sum",
}
_MIXING = {
    "DynamicPartition",
    "DynamicStitch",
    "GatherNd",
    "InTopK",
    "L2Loss",
    "MatrixDiagV3",
    "RandomShuffle",
    "Roll",
    "ScatterNd",
    "SegmentMax",
    "SegmentMaxV2",
    "SegmentMean",
    "SegmentMin",
    "SegmentMinV2",
    "SegmentProd",
    "SegmentProdV2",
    "SegmentSum",
    "SegmentSumV2",
    "SparseSegmentMean",
    "SparseSegmentSqrtN",
    "SparseSegmentSum",
    "TensorScatterAdd",
    "TensorScatterMax",
    "TensorScatterMin",
    "TensorScatterSub",
    "TensorScatterUpdate",
    "Unique",
    "UniqueV2",
    "UnsortedSegmentMax",
    "UnsortedSegmentMin",
    "UnsortedSegmentProd",
    "UnsortedSegmentSum",
    "Where",
}
# Over how many of the last axes an operation works.
_LAST_AXES = {
    "Cholesky": 2,
    "FFT": 1,
    "FFT2D": 2,
    "FFT3D": 3,
    "IFFT": 1,
    "IFFT2D": 2,
    "IFFT3D": 3,
    "IRFFT": 1,
    "IRFFT2D": 2,
    "IRFFT3D": 3,
    "LogMatrixDeterminant": 2,
    "LogSoftmax": 1,
    "MatrixDeterminant": 2,
    "MatrixInverse": 2,
    "MatrixSolve": 2,
    "MatrixTriangularSolve": 2,
    "Qr": 2,
    "RFFT": 1,
    "RFFT2D": 2,
    "RFFT3D": 3,
    "SelfAdjointEigV2": 2,
    "Softmax": 1,
    "Svd": 2,
    "TopKV2": 1,
}


class Unreadable(Exception):
    """A value can be read no further; the message says where."""

    def __init__(self, op: tf.Operation | None = None) -> None:
        super().__init__(
            "a value that is computed outside of a graph"
            if op is None
            else f"what {op.type} makes in {op.name!r}"
        )
        self.op = op


class Reader:
    """Reads values of one traced step on one replica.

    Args:
        rows: Tensors with one row for each example of the replica; random
            values that differ between replicas as well.
        declared: Contributions, which are not read further; the list may
            grow.
        as_given: What is taken for a value of each row although it was made
            of all of them, such as the statistics of a normalization.
        drawn: Whether what is drawn at random, or read from the data, counts
            as depending on the rows.
        means: What counts as a mean over the rows and is not read further;
            the list may grow.
        blocks: Whether rows that are put behind all others are rows of one
            example each, such as what a generator has made behind what is
            real. There are more rows than examples then.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        declared: list[tf.Tensor] | None = None,
        as_given: Iterable[tf.Tensor] = (),
        *,
        drawn: bool = True,
        means: list[tf.Tensor] | None = None,
        blocks: bool = False,
    ) -> None:
        rows = list(tf.nest.flatten(list(rows), expand_composites=True))
        self._rows = {id(t) for t in rows if tf.is_symbolic_tensor(t)}
        self._declared = [] if declared is None else declared
        self._drawn = drawn
        self._means = [] if means is None else means
        self._blocks = blocks
        # What is known to be made of one row each.
        self._unmixed = self._rows | {id(tensor) for tensor in as_given}
        # What has an id here must live as long.
        self._alive: list[Any] = [rows, list(as_given)]
        self._dependent: dict[tf.Operation, bool] = {}
        self._known_degrees: dict[int, int | None] = {}

    def depends(self, tensor: Any) -> bool:
        """Returns whether a value depends on the rows of the replica.

        Values drawn at random do. Calls of functions and loops depend on
        whatever goes into them.

        Args:
            tensor: A tensor of the step; what is known outside of a graph
                depends on nothing.
        """
        if not tf.is_symbolic_tensor(tensor):
            return False
        if id(tensor) in self._rows:
            return True
        known = self._dependent
        stack = [tensor.op]
        while stack:
            op = stack[-1]
            if op in known:
                stack.pop()
                continue
            sources = _sources(op)
            missing = [
                source.op
                for source in sources
                if id(source) not in self._rows and source.op not in known
            ]
            if missing:
                stack += missing
                continue
            known[op] = (self._drawn and _is_random(op)) or any(
                id(source) in self._rows or known[source.op]
                for source in sources
            )
            stack.pop()
        return known[tensor.op]

    def is_alike(self, tensor: Any) -> bool:
        """Returns whether a value is the same on all replicas.

        It may depend on the shape of the rows, but not on their number.

        Args:
            tensor: A tensor of the step.
        """
        stack = [tensor]
        while stack:
            value = stack.pop()
            if not self.depends(value) or self._degree(value) == 0:
                continue
            if id(value) in self._rows or value.op.type not in _OF_SIZES:
                return False
            stack += value.op.inputs
        return True

    def looks_up_alike(self, gradient: Any) -> bool:
        """Returns whether a gradient is of rows that no example asked for.

        Args:
            gradient: Of a weight; dense ones are not.
        """
        return isinstance(gradient, tf.IndexedSlices) and self.is_alike(
            gradient.indices
        )

    def declare(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value that counts from here on as a contribution."""
        value = tf.identity(value)
        self._declared.append(value)
        return value

    def take_mean(self, value: tf.Tensor) -> None:
        """Notes that a value is a mean over the rows, whatever made it."""
        self._means.append(value)

    def contribution(
        self,
        value: tf.Tensor,
        share: BatchShare,
        state: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns what the replica gives to a value of the global batch.

        Args:
            value: A value without an axis of rows.
            share: This replica's part of the global batch.
            state: What a variable held before a step that gives it `value`;
                it is the sum over replicas of what they hold, and stays.

        Returns:
            The contribution; its sum over replicas is the value that one
            device computes. Whether the replica has rows is not asked.

        Raises:
            Unreadable: The value is not a sum of such terms.
        """
        if not tf.is_symbolic_tensor(value):
            raise Unreadable()
        if self.has_rows(value):
            raise Unreadable(value.op)
        terms = self._terms(value, state)
        parts = [
            of_degree(degree, part, share) for degree, part in terms.items()
        ]
        return parts[0] if len(parts) == 1 else tf.add_n(parts)

    def is_by_example(self, values: tf.Tensor) -> bool:
        """Returns whether each row comes of its own example alone.

        Args:
            values: A tensor with an axis of rows, `[rows, ...]`.
        """
        return self.has_rows(values) and self._mixed_by(values) is None

    def _is_declared(self, value: Any) -> bool:
        return any(value is known for known in self._declared)

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether the first axis is that of the replica's rows.

        How many rows a replica has is not known in the graph, and the number
        of all else is.
        """
        rank = tensor.shape.rank
        return bool(rank) and tensor.shape[0] is None and self.depends(tensor)

    def _terms(self, value: tf.Tensor, state: Any = None) -> Terms:
        """Takes a value apart by degree.

        Raises:
            Unreadable: It cannot be.
        """
        if self._is_declared(value):
            return {1: value}
        # What was assigned before in the same step comes through a stop.
        while state is not None and _type(value) == "StopGradient":
            value = value.op.inputs[0]
        if state is not None and is_same(value, state):
            return {1: value}
        degree = self._degree(value)
        if degree is not None:
            if state is None or not self._takes(value, state):
                return {degree: value}
            if _type(value) not in _SUMS:
                raise Unreadable(value.op)
            return self._of_sum(value, state)
        op = value.op
        if self.is_by_example(value):
            return {0: value}
        if op.type == "L2Loss" and self.is_by_example(op.inputs[0]):
            return {1: value}
        if op.type == "MatMul" and self._sums_over_rows(op):
            return {1: value}
        if op.type not in _REDUCTIONS and self._loses_rows(op, value):
            raise Unreadable(op)
        if op.type in _UNARY:
            source = op.inputs[value.value_index]
            again = _UNARY[op.type]
            return _mapped(
                value,
                source,
                self._terms(source, state),
                lambda part: again(part, op),
            )
        if op.type in _SUMS:
            return self._of_sum(value, state)
        if op.type in ("Mul", *_RATIOS):
            return self._of_product(value, state)
        if op.type == "Pack":
            return self._of_pack(value, state)
        if op.type in _REDUCTIONS:
            return self._of_reduction(value, state)
        raise Unreadable(op)

    def _of_sum(self, value: tf.Tensor, state: Any) -> Terms:
        """Takes apart a sum of any length, without recursion into it."""
        parts: dict[int, list[tf.Tensor]] = {}
        as_it_is = True
        pending = [(value, False)]
        while pending:
            term, negative = pending.pop()
            inner = not self._is_declared(term) and _type(term) in _SUMS
            holds = state is not None and self._takes(term, state)
            if inner and (holds or self._degree(term) is None):
                sides = list(term.op.inputs)
                signs = [negative] * len(sides)
                if term.op.type == "Sub":
                    signs[1] = not negative
                pending += reversed(list(zip(sides, signs, strict=True)))
                continue
            for degree, part in self._terms(term, state).items():
                as_it_is &= part is term
                part = -part if negative else part
                parts.setdefault(degree, []).append(part)
        if len(parts) == 1 and as_it_is:
            return {next(iter(parts)): value}
        return {
            degree: _broadcast(_total(terms), value)
            for degree, terms in parts.items()
        }

    def _of_product(self, value: tf.Tensor, state: Any) -> Terms:
        """A product with, or a ratio to, a number of rows or a constant."""
        op = value.op
        scaled = keras_internals.before_scaling(op, None)
        if scaled is not None:
            return self._terms(scaled, state)
        left, right = op.inputs
        if op.type == "Mul" and self._degree(right) is None:
            left, right = right, left
        degree = self._degree(right)
        if degree is None:
            raise Unreadable(op)
        if state is not None and self._takes(right, state):
            raise Unreadable(op)
        if op.type == "Mul":
            terms = _mapped(
                value, left, self._terms(left, state), lambda part: part * right
            )
            return {d + degree: part for d, part in terms.items()}
        terms = _mapped(
            value,
            left,
            self._terms(left, state),
            lambda part: (
                tf.math.divide_no_nan(part, right)
                if op.type == "DivNoNan"
                else part / right
            ),
        )
        return {d - degree: part for d, part in terms.items()}

    def _of_pack(self, value: tf.Tensor, state: Any) -> Terms:
        each = [self._terms(term, state) for term in value.op.inputs]
        degrees = sorted({degree for terms in each for degree in terms})
        as_it_is = all(
            all(part is term for part in terms.values())
            for term, terms in zip(value.op.inputs, each, strict=True)
        )
        if len(degrees) == 1 and as_it_is:
            return {degrees[0]: value}
        axis = value.op.get_attr("axis")
        return {
            degree: tf.stack(
                [
                    terms.get(degree, tf.zeros_like(term))
                    for term, terms in zip(value.op.inputs, each, strict=True)
                ],
                axis,
            )
            for degree in degrees
        }

    def _of_reduction(self, value: tf.Tensor, state: Any) -> Terms:
        """A sum or a mean over the rows, or over other axes."""
        op = value.op
        source = op.inputs[0]
        axes = _axes(op)
        if axes is None:
            raise Unreadable(op)
        over_rows = 0 in axes and self.has_rows(source)
        added = 1 if over_rows and op.type == "Sum" else 0
        reduce, keep = _REDUCTIONS[op.type], op.get_attr("keep_dims")
        terms = _mapped(
            value,
            source,
            self._terms(source, state),
            lambda part: reduce(part, op.inputs[1], keep),
        )
        return {degree + added: part for degree, part in terms.items()}

    def _sums_over_rows(self, op: tf.Operation) -> bool:
        """Whether a product is the sum over rows of products of each row."""
        left, right = op.inputs
        if _type(left) == "Transpose":
            order = tf.get_static_value(left.op.inputs[1])
            turned = order is not None and list(order) == [1, 0]
            left = left.op.inputs[0]
        else:
            turned = False
        return (
            turned != op.get_attr("transpose_a")
            and not op.get_attr("transpose_b")
            and self.is_by_example(left)
            and self.is_by_example(right)
        )

    def _takes(self, value: tf.Tensor, state: tf.Tensor) -> bool:
        """Whether what depends on no row depends on a state."""
        stack, seen = [value], set()
        while stack:
            tensor = stack.pop()
            if id(tensor) in seen or not tf.is_symbolic_tensor(tensor):
                continue
            if is_same(tensor, state):
                return True
            seen.add(id(tensor))
            self._alive.append(tensor)
            stack += _sources(tensor.op)
        return False

    def _loses_rows(self, op: tf.Operation, value: tf.Tensor) -> bool:
        """Whether an operation makes something else of an axis of rows."""
        if not any(map(self.has_rows, op.inputs)):
            return False
        return not self.has_rows(value) or self._mixes(op)

    def _degree(self, value: tf.Tensor) -> int | None:
        """The degree of what is known without a value of any row.

        Constants and weights, and what is computed from how many rows there
        are.

        Returns:
            The degree, None where a value of a row takes part.
        """
        if any(value is mean for mean in self._means):
            return 0
        if not self.depends(value):
            return 0
        if id(value) not in self._known_degrees:
            self._alive.append(value)
            self._known_degrees[id(value)] = self._degree_of(value)
        return self._known_degrees[id(value)]

    def _degree_of(self, value: tf.Tensor) -> int | None:
        op = value.op
        if id(value) in self._rows:
            return None
        if op.type in ("Cast", "Identity", "Reshape", "Squeeze", "ExpandDims"):
            return self._degree(op.inputs[0])
        if op.type == "Size":
            return 1 if self.is_by_example(op.inputs[0]) else None
        if op.type in ("StridedSlice", "GatherV2"):
            element = self._degrees(value)
            return element[0] if element and value.shape.rank == 0 else None
        if op.type == "Prod":
            elements = self._degrees(op.inputs[0])
            return None if elements is None else sum(elements)
        if op.type in ("Mul", *_RATIOS):
            left, right = (self._degree(side) for side in op.inputs)
            if left is None or right is None:
                return None
            return left + right if op.type == "Mul" else left - right
        if op.type == "Maximum":
            left, right = op.inputs
            if _is_at_most_one(left):
                left, right = right, left
            return self._degree(left) if _is_at_most_one(right) else None
        return None

    def _degrees(
        self, sizes: tf.Tensor, strict: bool = True
    ) -> list[int] | None:
        """The degrees of the elements of a shape, or of a part of it.

        Args:
            sizes: A vector, or one element of one.
            strict: Whether to ask if it is a shape of rows that are not
                mixed.
        """
        op = sizes.op
        if not self.depends(sizes):
            length = sizes.shape.num_elements()
            return None if length is None else [0] * length
        if op.type == "ConcatV2":
            vectors = [self._degrees(t, strict) for t in op.inputs[:-1]]
            if None in vectors:
                return None
            return [degree for vector in vectors for degree in vector or ()]
        if op.type == "Shape":
            source = op.inputs[0]
            if source.shape.rank is None:
                return None
            first = 1 if self.has_rows(source) else 0
            if first and strict and not self.is_by_example(source):
                return None
            return [first, *[0] * (source.shape.rank - 1)]
        if op.type == "Pack":
            each = [self._degree_of_size(t, strict) for t in op.inputs]
            return None if None in each else each  # type: ignore[return-value]
        if op.type == "Cast":
            return self._degrees(op.inputs[0], strict)
        if op.type not in ("StridedSlice", "GatherV2"):
            return None
        places = _places(op)
        every = self._degrees(op.inputs[0], strict)
        if places is None or every is None:
            return None
        return [every[place] for place in places]

    def _degree_of_size(self, size: tf.Tensor, strict: bool) -> int | None:
        if strict or not self.depends(size):
            return self._degree(size)
        element = self._degrees(size, strict)
        return element[0] if element and len(element) == 1 else None

    def _mixed_by(self, tensor: tf.Tensor) -> tf.Operation | None:
        """The operation that mixes rows on the way to a tensor, if any."""
        stack, seen = [tensor], set()
        while stack:
            value = stack.pop()
            if id(value) in seen or id(value) in self._unmixed:
                continue
            seen.add(id(value))
            self._alive.append(value)
            op = value.op
            if not self.depends(value) or op.type in ("Shape", "Size"):
                continue
            if value.dtype.is_floating:
                degree = self._degree(value)
                if degree == 0:
                    continue
                if degree is not None:
                    return op
            if self._is_declared(value) or self._mixes(op):
                return op
            stack += _sources(op)
        self._unmixed |= seen
        return None

    def _mixes(self, op: tf.Operation) -> bool:
        """Whether an operation makes a row of several rows."""
        source = op.inputs[0] if op.inputs else None
        if op.type in _MIXING:
            return True
        if op.type in _BROADCASTING:
            ranks = {t.shape.rank for t in op.inputs if self.has_rows(t)}
            return len(ranks) > 1 or (
                len(ranks) == 1
                and any(map(self._has_rows_elsewhere, op.inputs))
            )
        if op.type in _LAST_AXES:
            (source, *_) = op.inputs
            rank = source.shape.rank
            if self.has_rows(source):
                return rank is None or rank <= _LAST_AXES[op.type]
            return self._has_rows_elsewhere(source)
        if source is None or not self.has_rows(source):
            return op.type in ("Pack", "ConcatV2") and self._stacks(op)
        if op.type in _ACROSS:
            axes = _axes(op)
            return axes is None or 0 in axes
        if op.type == "MatMul":
            by_rows = [self.depends(side) for side in op.inputs]
            return all(by_rows) or op.get_attr("transpose_a")
        if op.type == "Einsum":
            return all(map(self.depends, op.inputs)) and not _aligned(op)
        if op.type == "StridedSlice":
            return _cuts_rows(op)
        if op.type == "ExpandDims":
            return tf.get_static_value(op.inputs[1]) in (None, 0)
        if op.type == "GatherV2":
            axis = tf.get_static_value(op.inputs[2])
            return axis in (None, 0) and op.get_attr("batch_dims") == 0
        if op.type == "Reshape":
            sizes = self._degrees(op.inputs[1], strict=False)
            if sizes and sizes[0] == 1:
                return False
            return _joins_rows(source, op.outputs[0])
        return op.type in ("Pack", "ConcatV2") and self._stacks(op)

    def _has_rows_elsewhere(self, tensor: tf.Tensor) -> bool:
        """Whether rows may be on another axis than the first, as transposed.

        Such as pairs of rows have them, `x - tf.transpose(x)`.
        """
        return (
            None in (tensor.shape.as_list()[1:] if tensor.shape.rank else [])
            and not self.has_rows(tensor)
            and self.depends(tensor)
            and not self.is_alike(tensor)
        )

    def _stacks(self, op: tf.Operation) -> bool:
        """Whether rows are put before or behind rows."""
        if not any(map(self.has_rows, op.inputs)):
            return False
        if op.type == "Pack":
            return op.get_attr("axis") == 0
        if self._blocks and all(map(self.has_rows, op.inputs[:-1])):
            return False
        return tf.get_static_value(op.inputs[-1]) in (None, 0)


def _sources(op: tf.Operation) -> list[tf.Tensor]:
    """What an operation takes, a captured tensor of another graph included."""
    if op.type == "Placeholder":
        captures = getattr(op.graph, "captures", ())
        outer = {id(inner): captured for captured, inner in captures}
        captured = outer.get(id(op.outputs[0]))
        return [captured] if tf.is_symbolic_tensor(captured) else []
    return list(op.inputs)


def _is_random(op: tf.Operation) -> bool:
    """Whether a value may differ between replicas by itself."""
    return op.op_def.is_stateful and op.type not in _NOT_RANDOM


def is_same(value: tf.Tensor, state: tf.Tensor) -> bool:
    """Returns whether a value is what a variable held, also if read anew."""
    value, state = _without_identity(value), _without_identity(state)
    if value is state:
        return True
    reads = {_type(value), _type(state)} == {"ReadVariableOp"}
    return reads and value.op.inputs[0] is state.op.inputs[0]


def _without_identity(value: tf.Tensor) -> tf.Tensor:
    while _type(value) == "Identity":
        value = value.op.inputs[0]
    return value


def _type(tensor: Any) -> str | None:
    return tensor.op.type if tf.is_symbolic_tensor(tensor) else None


def of_degree(degree: int, part: tf.Tensor, share: BatchShare) -> tf.Tensor:
    """Returns what a replica gives to a value of the global batch.

    Args:
        degree: How the value grows with the rows, as above; 0 for a constant.
        part: What the replica has computed.
        share: This replica's part of the global batch.
    """
    if degree == 1:
        return part
    if not part.dtype.is_floating:
        if degree != 0:
            raise Unreadable(part.op)
        # An integer cannot be cut. The last replica always has a row.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.where(replica == share.replicas - 1, part, 0 * part)
    fraction = share.fraction(tf.float64)
    if degree > 1:
        fraction = tf.math.reciprocal_no_nan(fraction)
    return part * tf.cast(fraction ** abs(1 - degree), part.dtype)


def _mapped(
    value: tf.Tensor,
    source: tf.Tensor,
    terms: Terms,
    again: Callable[[tf.Tensor], tf.Tensor],
) -> Terms:
    """The terms of a linear function of a source with these terms.

    It is the value itself where the only term is the source as it is.
    """
    if any(part is source for part in terms.values()):
        return {next(iter(terms)): value}
    return {degree: again(part) for degree, part in terms.items()}


def _total(terms: list[tf.Tensor]) -> tf.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total


def _broadcast(part: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    if part.shape.rank == value.shape.rank:
        return part
    return tf.broadcast_to(part, tf.shape(value))


def _axes(op: tf.Operation) -> list[int] | None:
    """The axes that an operation goes over, None where they are not known."""
    if len(op.inputs) < 2:
        return None
    axes = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if axes is None or rank is None:
        return None
    return [int(axis) % max(rank, 1) for axis in axes.reshape([-1])]


def _is_at_most_one(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and value.size == 1 and float(value) <= 1


def _places(op: tf.Operation) -> list[int] | None:
    """Which elements of a vector are taken."""
    length = op.inputs[0].shape.num_elements()
    given = [tf.get_static_value(t) for t in op.inputs[1:]]
    if length is None or any(value is None for value in given):
        return None
    if op.type == "GatherV2":
        return [int(place) % length for place in given[0].reshape([-1])]
    begin, end, step = (int(value[0]) for value in given)
    if op.get_attr("shrink_axis_mask") & 1:
        return [begin % length]
    low = None if op.get_attr("begin_mask") & 1 else begin
    high = None if op.get_attr("end_mask") & 1 else end
    return list(range(length))[low:high:step]


def _cuts_rows(op: tf.Operation) -> bool:
    """Whether a slice takes some rows, or puts an axis before them."""
    masks = {
        name: op.get_attr(f"{name}_mask") & 1
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    if masks["ellipsis"]:
        return False
    if masks["new_axis"] or masks["shrink_axis"]:
        return True
    steps = tf.get_static_value(op.inputs[3])
    all_rows = masks["begin"] and masks["end"]
    return not all_rows or steps is None or steps[0] != 1


def _joins_rows(before: tf.Tensor, after: tf.Tensor) -> bool:
    """Whether an element of the first axis takes in more than it did."""
    if after.shape.rank in (None, 0) or after.shape[0] is not None:
        return True
    sizes = [t.shape[1:].num_elements() for t in (before, after)]
    if None in sizes:
        return False
    return math.gcd(*sizes) != sizes[1]


def _aligned(op: tf.Operation) -> bool:
    """Whether the first axis of each operand is that of the result."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    operands, result = equation.split("->")
    return all(term[:1] == result[:1] for term in operands.split(","))
