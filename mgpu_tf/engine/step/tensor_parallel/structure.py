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
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals, throwaway
from mgpu_tf.engine.step.building import BuildContext
from mgpu_tf.engine.step.tensor_parallel.alike import (
    Cut,
    Halves,
    Whole,
    outputs_of,
)
from mgpu_tf.engine.step.tensor_parallel.linear import Linear

_log = logging.getLogger("mgpu_tf")


# Of a tensor in a call: the number or the name of the argument, and its number
# in that.
Place: TypeAlias = tuple[int | str, int]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer in a traced forward pass.

    Attributes:
        layer: The layer; or a `Gate`.
        first: The first operation of the call.
        after: The operation after its last.
        inputs: What it was called with, the first argument.
        outputs: What it returned.
        arguments: All that it was called with, by place.
        key: By what calls of the layer are known; see `call_key`.
    """

    layer: Any
    first: int
    after: int
    inputs: Any
    outputs: Any
    arguments: dict[Place, Any]
    key: int


@dataclasses.dataclass(frozen=True, eq=False)
class Gate:
    """A place through which a tensor passes into a layer, or out of it.

    Attributes:
        name: The name of the layer, which holds layers.
    """

    name: str


# By `call_key`, how arguments are cut that are whole again, by place, and
# outputs, as None.
Known: TypeAlias = Mapping[int, Mapping[Place | None, Cut]]
# The layer, the way in for its first argument, and the way out.
Gates: TypeAlias = Sequence[tuple[keras.layers.Layer, Gate, Gate]]


@dataclasses.dataclass
class Pass:
    """A traced forward pass.

    Attributes:
        operations: The operations, in the order in which they were made.
        calls: The calls of layers of interest, by their first operation.
        returned: The tensors that the model returned, their masks, and those
            that it wrote.
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
    opened: Collection[int] = (),
    gates: Gates = (),
    whole: Known = types.MappingProxyType({}),
) -> list[Pass]:
    """Traces forward passes of training and of inference.

    Args:
        model: A built model.
        example: The specs of a batch.
        layers: The layers whose calls are noted.
        unknown: The axis, from the end, of the outputs of some layers whose
            length is unknown. Code that takes it from the shape does so in
            the graph then, where it is seen.
        opened: Layers, by identity, whose own operations are of interest.
        gates: Gates of layers that hold layers; noted as calls.
        whole: What calls get and return whose length is known again.
    """
    modes: tuple[bool | None, ...] = (None,)
    if keras_internals.takes_training(model):
        modes = (True, False)
    return [
        _traced(
            *(model, example, layers, mode, unknown or {}, opened, gates),
            whole=whole,
        )
        for mode in modes
    ]


def _traced(
    model: keras.Model,
    example: Any,
    layers: list[keras.layers.Layer],
    training: bool | None,
    unknown: Mapping[int, int],
    opened: Collection[int],
    gates: Gates,
    whole: Known,
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
        key = call_key(layer, args, kwargs)
        arguments = arguments_of(args, kwargs)
        args, kwargs = of_known_length(key, args, kwargs)
        # What the activation does is read from the graph.
        hidden = () if id(layer) in opened else ("activation",)
        activation = getattr(layer, "activation", None) if hidden else None
        with keras_internals.without(layer, *hidden):
            outputs = own(*args, **kwargs)
        if tf.is_tensor(outputs):
            outputs = copied(outputs, key)
        after = len(graph.get_operations())
        calls[first] = Call(
            *(layer, first, after, given, outputs, arguments, key)
        )
        return outputs if activation is None else activation(outputs)

    def copied(tensor: tf.Tensor, key: int) -> tf.Tensor:
        copy = tf.identity(tensor)
        cut = whole.get(key, {}).get(None)
        if cut is not None:
            copy = _of_length(copy, cut.axis, cut.length)
        elif key in unknown:
            copy = _of_length(copy, unknown[key], None)
        return keras_internals.with_mask_of(copy, tensor)

    def of_known_length(key: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = arguments_of(args, kwargs)
        return with_arguments(
            args,
            kwargs,
            {
                place: keras_internals.with_mask_of(
                    _of_length(given[place], cut.axis, cut.length), given[place]
                )
                for place, cut in whole.get(key, {}).items()
                if place is not None
            },
        )

    def passed(gate: Gate, tensor: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if graph is not here[0] or not tf.is_symbolic_tensor(tensor):
            inside.add(id(gate))
            return tensor
        first = len(graph.get_operations())
        (given,), _ = of_known_length(id(gate), (tensor,), {})
        copy = copied(given, id(gate))
        after = len(graph.get_operations())
        calls[first] = Call(
            *(gate, first, after, tensor, copy),
            arguments=arguments_of((tensor,), {}),
            key=id(gate),
        )
        return copy

    def note_gates(
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        way_in, way_out = ways[id(layer)]
        args = (
            tuple(map(functools.partial(passed, way_in), args[:1])) + args[1:]
        )
        return passed(way_out, own(*args, **kwargs))

    ways = {id(layer): each for layer, *each in gates}
    holders = [layer for layer, *_ in gates]

    def forward(batch: Any) -> Any:
        here.append(tf.compat.v1.get_default_graph())
        x, _, _ = structures.unpacked(batch)
        named = {} if training is None else {"training": training}
        strategy = model.distribute_strategy
        with BuildContext(strategy), keras.StatelessScope() as scope:
            outputs = model(x, **named)
        written = [v for v in scope.state_mapping.values() if tf.is_tensor(v)]
        tensors = filter(tf.is_tensor, tf.nest.flatten(outputs))
        masks = filter(tf.is_tensor, map(keras_internals.mask_of, tensors))
        return outputs, written, list(masks)

    with (
        keras_internals.calls_replaced(layers, note),
        keras_internals.calls_replaced(holders, note_gates),
    ):
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


def arguments_of(args: Any, kwargs: Any) -> dict[Place, Any]:
    """Returns all that a layer is called with, by place."""
    return {
        (name, number): leaf
        for name, given in [*enumerate(args), *kwargs.items()]
        for number, leaf in enumerate(tf.nest.flatten(given))
    }


def with_arguments(
    args: Any, kwargs: Any, others: Mapping[Place, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a layer is called with, with others at some places."""

    def changed(name: int | str, given: Any) -> Any:
        if not any(name == each for each, _ in others):
            return given
        flat = [
            others.get((name, number), leaf)
            for number, leaf in enumerate(tf.nest.flatten(given))
        ]
        return tf.nest.pack_sequence_as(given, flat)

    return (
        tuple(changed(number, given) for number, given in enumerate(args)),
        {name: changed(name, given) for name, given in kwargs.items()},
    )


def call_key(layer: Any, args: Any, kwargs: Any) -> int:
    """Returns by what the calls of a layer are known that are alike.

    An embedding that is called to make logits is another one.
    """
    given = (kwargs.get("reverse"), *args[1:2])
    reverses = isinstance(layer, keras.layers.ReversibleEmbedding) and any(
        each is True for each in given
    )
    return -id(layer) if reverses else id(layer)


def _of_length(value: tf.Tensor, axis: int, length: int | None) -> tf.Tensor:
    shape = value.shape.as_list()
    shape[axis] = length
    return tf.compat.v1.placeholder_with_default(value, shape)


def _made_of(tensors: list[tf.Tensor]) -> set[str]:
    """Returns the names of the operations that tensors are made of."""
    found, waiting = set[str](), [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [each.op for each in op.inputs]
    return found


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
        try:
            if len({self._separate(layer) for layer in layers}) > 1:
                raise Whole
            made = outputs_of(op, [self._split.get(t.name) for t in op.inputs])
        except Whole:
            _log.debug("layout: %s needs whole inputs", op.name)
            self._need(*found)
            return
        self._split |= made
