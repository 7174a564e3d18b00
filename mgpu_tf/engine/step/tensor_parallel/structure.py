"""Which activations may stay split between layers.

A forward pass is traced once with whole weights. Its graph shows where the
outputs of a layer go. A split output stays split while every operation that
takes it treats the parts alike, up to a layer that sums over the split axis:

    column -> gelu -> dropout -> row            stays split
    query, key, value -> attention -> output    stays split, by heads
    column -> layer normalization               is gathered after the layer

What is not known to treat parts alike gets the whole activation. So a graph
with unknown operations costs communication, never right numbers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals, throwaway
from mgpu_tf.engine.step.building import BuildContext
from mgpu_tf.engine.step.tensor_parallel.linear import Linear

_log = logging.getLogger("mgpu_tf")

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
class Call:
    """A call of a layer in a traced forward pass.

    Attributes:
        layer: The layer.
        first: The first operation of the call.
        after: The operation after its last.
        inputs: What it was called with, the first argument.
        outputs: What it returned.
    """

    layer: keras.layers.Layer
    first: int
    after: int
    inputs: Any
    outputs: Any


@dataclasses.dataclass
class Pass:
    """A traced forward pass.

    Attributes:
        operations: The operations, in the order in which they were made.
        calls: The calls of layers of interest, by their first operation.
        returned: The tensors that the model returned.
        outputs: Their names.
        inside: Layers that were called inside of loops or branches, and those
            of whose outputs nothing is made that the model returns: TensorFlow
            may compute them anew, as `tf.vectorized_map` does.
    """

    operations: list[tf.Operation]
    calls: dict[int, Call]
    returned: list[tf.Tensor]
    outputs: set[str]
    inside: set[int]


def traced(
    model: keras.Model,
    example: Any,
    layers: list[keras.layers.Layer],
    unknown: Mapping[int, int] | None = None,
) -> list[Pass]:
    """Traces forward passes of training and of inference.

    Args:
        model: A built model.
        example: The specs of a batch.
        layers: The layers whose calls are noted.
        unknown: The axis, from the end, of the outputs of some layers whose
            length is unknown. Code that takes it from the shape does so in
            the graph then, where it is seen.
    """
    modes: tuple[bool | None, ...] = (None,)
    if keras_internals.takes_training(model):
        modes = (True, False)
    return [
        _traced(model, example, layers, mode, unknown or {}) for mode in modes
    ]


def _traced(
    model: keras.Model,
    example: Any,
    layers: list[keras.layers.Layer],
    training: bool | None,
    unknown: Mapping[int, int],
) -> Pass:
    calls: dict[int, Call] = {}
    inside: set[int] = set()
    here: list[Any] = []

    def note(
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if graph is not here[0]:
            inside.add(id(layer))
            return own(*args, **kwargs)
        # A layer may return what it was given: the copies have names.
        given = args[0] if args else next(iter(kwargs.values()), None)
        first = len(graph.get_operations())
        # What the activation does is read from the graph.
        with keras_internals.without(layer, "activation"):
            outputs = own(*args, **kwargs)
        if tf.is_tensor(outputs):
            given_mask, outputs = outputs, tf.identity(outputs)
            if id(layer) in unknown:
                shape = outputs.shape.as_list()
                shape[unknown[id(layer)]] = None
                outputs = tf.compat.v1.placeholder_with_default(outputs, shape)
            keras_internals.with_mask_of(outputs, given_mask)
        after = len(graph.get_operations())
        calls[first] = Call(layer, first, after, given, outputs)
        activation = getattr(layer, "activation", None)
        return outputs if activation is None else activation(outputs)

    def forward(batch: Any) -> Any:
        here.append(tf.compat.v1.get_default_graph())
        x, _, _ = structures.unpacked(batch)
        named = {} if training is None else {"training": training}
        strategy = model.distribute_strategy
        with BuildContext(strategy), keras.StatelessScope():
            return model(x, **named)

    with keras_internals.calls_replaced(layers, note):
        graph = throwaway.graph_of(forward, example)
    returned = graph.outputs
    outputs = {tensor.name for tensor in returned}
    used = _made_of(returned)
    inside |= {
        id(call.layer)
        for call in calls.values()
        if tf.is_tensor(call.outputs) and call.outputs.op.name not in used
    }
    return Pass(graph.get_operations(), calls, returned, outputs, inside)


def _made_of(tensors: list[tf.Tensor]) -> set[str]:
    """Returns the names of the operations that tensors are made of."""
    found, waiting = set[str](), [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [each.op for each in op.inputs]
    return found


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


class Whole(Exception):
    """An operation needs whole tensors."""


@dataclasses.dataclass
class Structure:
    """How layers are computed.

    Attributes:
        dims: The dimension along which the kernel of a layer is split.
        gathered: The layers whose outputs are gathered.
        arrives: The layers whose inputs arrive split.
        dropouts: The axis, from the end, along which the inputs of a dropout
            layer are split.
        dropout_sources: One of the layers whose outputs these are made of.
    """

    dims: dict[int, int]
    gathered: set[int]
    arrives: set[int]
    dropouts: dict[int, int]
    dropout_sources: dict[int, int]


def structure_of(
    passes: list[Pass],
    linear: dict[int, Linear],
    choose: Callable[[Linear, int | None], int | None],
    given: dict[int, int],
    separate: Callable[[int], Any] = lambda layer: None,
    gathered: Iterable[int] = (),
) -> Structure:
    """Finds what may stay split.

    Args:
        passes: From `traced`.
        linear: Layers by identity, with what their dimensions do.
        choose: Takes a layer without a given dimension, and the axis of its
            inputs that is split, if any; returns the dimension along which
            its kernel is split, or None.
        given: The dimensions of some layers, by identity.
        separate: Returns a value for a layer; outputs do not stay split
            between layers of different values.
        gathered: Layers whose outputs are gathered in any case.
    """
    gathered = set(gathered)
    sliced: set[int] = set()
    while True:
        search = _Search(linear, choose, given, gathered, sliced, separate)
        for one in passes:
            search.walk(one)
        again = search.needed - gathered
        mixed = search.arrives & search.whole_inputs - sliced
        if not again and not mixed:
            return Structure(
                search.dims,
                gathered,
                search.arrives,
                search.dropouts,
                search.dropout_sources,
            )
        gathered |= again
        sliced |= mixed


class _Search:
    """One walk over forward passes; it finds which layers must be gathered."""

    def __init__(
        self,
        linear: dict[int, Linear],
        choose: Callable[[Linear, int | None], int | None],
        given: dict[int, int],
        gathered: set[int],
        sliced: set[int],
        separate: Callable[[int], Any],
    ) -> None:
        self._linear = linear
        self._choose = choose
        self._gathered = gathered
        self._sliced = sliced
        self._separate = separate
        self.dims: dict[int, int] = dict(given)
        self._refused: set[int] = set()
        self.needed: set[int] = set()
        self.arrives: set[int] = set()
        self.whole_inputs: set[int] = set()
        self.dropouts: dict[int, int] = {}
        self.dropout_sources: dict[int, int] = {}
        self._dropped_whole: set[int] = set()
        self._lengths: dict[int, int | None] = {}
        self._split: dict[str, Halves] = {}

    def walk(self, one: Pass) -> None:
        self._split = {}
        place = 0
        while place < len(one.operations):
            call = one.calls.get(place)
            if call is not None and call.after > call.first:
                self._call(call)
                place = call.after
                continue
            self._operation(one.operations[place])
            place += 1
        for name in one.outputs & set(self._split):
            self._need(self._split[name])

    def _need(self, *found: Halves) -> None:
        for halves in found:
            self.needed |= halves.layers

    def _of(self, tensors: Iterable[Any]) -> list[Halves]:
        names = [t.name for t in tensors if tf.is_symbolic_tensor(t)]
        return [self._split[name] for name in names if name in self._split]

    # A layer of interest.

    def _call(self, call: Call) -> None:
        flat = tf.nest.flatten(call.inputs)
        found = self._of(flat)
        layer = id(call.layer)
        linear = self._linear.get(layer)
        single = tf.is_tensor(call.inputs) and tf.is_tensor(call.outputs)
        if linear is None:
            self._dropout(call, found, single)
        elif not single:
            self._need(*found)
        else:
            self._linear_call(call, linear, found)

    def _dropout(self, call: Call, found: list[Halves], single: bool) -> None:
        layer = id(call.layer)
        if not found:
            self._dropped_whole.add(layer)
            if layer in self.dropouts:
                self._need_all()
            return
        if not single:
            self._need(*found)
            return
        axis = found[0].axis - call.inputs.shape.rank
        known = self.dropouts.setdefault(layer, axis)
        length = call.inputs.shape[axis]
        alike = self._lengths.setdefault(layer, length) == length
        if known != axis or not alike or layer in self._dropped_whole:
            self._need(*found)
            return
        self.dropout_sources[layer] = min(found[0].layers)
        self._split[call.outputs.name] = found[0]

    def _need_all(self) -> None:
        for halves in self._split.values():
            self._need(halves)

    def _linear_call(
        self, call: Call, linear: Linear, found: list[Halves]
    ) -> None:
        layer = id(call.layer)
        axis = None
        if found:
            axis = found[0].axis - call.inputs.shape.rank
        if layer not in self.dims and layer not in self._refused:
            dim = self._choose(linear, axis)
            if dim is None:
                self._refused.add(layer)
            else:
                self.dims[layer] = dim
        dim = self.dims.get(layer)
        if dim is not None and linear.input_axis(dim) is not None:
            alike = {self._separate(each) for h in found for each in h.layers}
            fits = axis == linear.input_axis(dim) and alike <= {
                self._separate(layer)
            }
            if found and fits and layer not in self._sliced:
                self.arrives.add(layer)
            else:
                self._need(*found)
                self.whole_inputs.add(layer)
        else:
            self._need(*found)
        output_axis = None if dim is None else linear.output_axis(dim)
        if output_axis is None or layer in self._gathered:
            return
        self._split[call.outputs.name] = Halves(
            output_axis + call.outputs.shape.rank, frozenset([layer])
        )

    # Any other operation.

    def _operation(self, op: tf.Operation) -> None:
        found = self._of(op.inputs)
        if not found:
            return
        layers = frozenset().union(*(halves.layers for halves in found))
        held = [self._split.get(t.name) for t in op.inputs]
        try:
            if len({self._separate(layer) for layer in layers}) > 1:
                raise Whole
            shapes = any(h is not None and h.is_shape for h in held)
            axes = [None if h is None else h.axis for h in held]
            axes = _of_shape(op, axes) if shapes else _axes(op, axes)
        except Whole:
            _log.debug("layout: %s needs whole inputs", op.name)
            self._need(*found)
            return
        for tensor, axis in zip(op.outputs, axes, strict=True):
            if axis is not None:
                is_shape = op.type == "Shape" or (
                    shapes and op.type == "StridedSlice"
                )
                self._split[tensor.name] = Halves(axis, layers, is_shape)


def _axes(op: tf.Operation, held: list[int | None]) -> list[int | None]:
    """Returns along which axis each output is split.

    Args:
        op: An operation.
        held: The axis of each input, None of those that are whole.

    Raises:
        Whole: It cannot be computed from parts alone.
    """
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


def _of_shape(op: tf.Operation, held: list[Any]) -> list[int | None]:
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
