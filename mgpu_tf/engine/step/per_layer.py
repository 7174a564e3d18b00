"""Forward and backward pass layer by layer: less memory for more computing.

    layers = LayerByLayer(model, parts)
    with layers.in_place():                  # around the steps of all replicas
        ...                                  # traces forward and backward

A layer keeps nothing between its forward and its backward pass but its inputs.
Where replicas store parts of its weights, these are whole only meanwhile:

    forward     gather the layer's weights -> outputs, and forget the rest
    backward    gather them again -> outputs once more -> gradients
                -> the sums of own parts of them, scattered at once

One collective gathers the weights of a layer, and one scatters its gradients.
They run in the order in which they are written here, layer n below n + 1:

    forward     gather 1, gather 2       while 1 computes, gather 3 while 2 does
    backward    gather n, gather n - 1   while n computes
                scatter n, gather n - 2  while n - 1 computes

so that a device holds whole weights of two layers at most, and whole gradients
of two. Copies that are sent are made when the exchange before has ended.
Vectors, such as biases, are little of a model and are gathered together once a
step.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Zhao et al.,
"PyTorch FSDP", VLDB 2023.

The layers are those that a model holds directly, models inside of it opened.
A layer that adds losses, assigns weights or exchanges values with other
replicas is computed once, as usual.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.author.step_scope import (
    Places,
    Replay,
    StepScope,
    is_read_inside,
)
from mgpu_tf.engine.exchange.noise_scale import square_of
from mgpu_tf.engine.random_rows import current_scope, entered_again
from mgpu_tf.engine.row_proof import Operations, recorded
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.trace_again import Attempts, TraceAgain, refusal_within
from mgpu_tf.strategies.replicas.own_gradient import own_gradient
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica

_log = logging.getLogger("mgpu_tf")

# What is gathered together and once is as much of a layer at most.
_TOGETHER = 1 / 4


class Parts(Protocol):
    """How weights are exchanged of which replicas store parts."""

    def gather(
        self,
        variables: list[keras.Variable],
        dtypes: list[tf.DType],
        after: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the whole values of weights in some types. On a replica.

        Own parts are read when the tensors `after` are known.
        """

    @property
    def scatter(
        self,
    ) -> (
        Callable[[list[tf.Tensor], list[keras.Variable]], list[tf.Tensor]]
        | None
    ):
        """Returns own parts of the sums of gradients. On a replica.

        None where gradients stay whole.
        """


class LayerByLayer:
    """Recomputes the layers of a model in the backward pass.

    Args:
        model: A built model.
        parts: Gathers weights that are stored in parts, and scatters their
            gradients. None where all are stored whole.
        measures: Whether the squared norms of a replica's own gradients are
            taken before they are scattered.
        chosen: What is computed again, layers and models, none inside of
            another. Default: each layer. What stores its weights in parts is
            computed again in any case.
        tensor: Computes layers with parts of weights, where some are. They
            exchange what they exchange in the forward pass once more.

    Attributes:
        scatters: Whether gradients are scattered as soon as they are computed.
    """

    def __init__(
        self,
        model: keras.Model,
        parts: Parts | None = None,
        *,
        measures: bool = False,
        chosen: list[keras.layers.Layer] | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        self._model = model
        self._parts = parts
        self.measures = measures
        # Weights of which several layers, or calls, have a part of a
        # replica's gradient: it stays whole until it is added up.
        self._added_up: set[int] = set()
        # Of each replica, by the identity of the weight.
        self._squares: dict[int, dict[int, tf.Tensor]] = {}
        self.scatters = parts is not None and parts.scatter is not None
        split = [v for v in model.variables if keras_internals.is_split(v)]
        # Of which a replica computes with its part.
        self._in_parts = {id(v) for v in split if tensor is not None}
        split = [v for v in split if id(v) not in self._in_parts]
        gathers = self.scatters and bool(split)
        self._units = _units(model, chosen, gathers=gathers)
        self._attempts = Attempts()
        self._plain = {
            id(layer)
            for layer in self._units
            if isinstance(layer, keras.layers.Embedding)
            or keras_internals.exchanges_statistics(layer)
            or (tensor is not None and tensor.looks_up_in_parts(layer))
        }
        # Those that are gathered once a step, before all layers. What is
        # overwritten is no sum, which a backward pass would make of it.
        self._together = []
        if self.scatters:
            over = list(filter(keras_internals.is_overwritten, split))
            self._together = _unique([*over, *self._small(split)])
        once = {id(variable) for variable in self._together}
        self._split = {id(v) for v in split if id(v) not in once}
        # Weights that are read in their own type somewhere.
        self._full: set[int] = set()
        # What a layer reads besides its own weights.
        self._others: dict[int, list[keras.Variable]] = {}

    def compute_plainly(self, layer: keras.layers.Layer) -> bool:
        """Lets the layer that holds one be computed once in a step.

        Args:
            layer: One of the model's layers.

        Returns:
            Whether it was computed in another way before.
        """
        for unit in self._units:
            held = [unit, *keras_internals.inner_layers(unit)]
            if any(each is layer for each in held):
                known = id(unit) in self._plain
                self._plain.add(id(unit))
                return not known
        return False

    def compute_writers_plainly(
        self, written: dict[int, keras.Variable]
    ) -> None:
        """Lets layers be computed once in a step that write some state.

        Args:
            written: The state, by identity.
        """
        self._plain |= {
            id(unit)
            for unit in self._units
            if written.keys() & set(map(id, unit.variables))
        }

    def compute_once(self, layer: keras.layers.Layer, why: str) -> None:
        """Lets a layer be computed once in a step, which takes more memory."""
        if id(layer) not in self._plain:
            self._plain.add(id(layer))
            _log.info(
                "%s (%s) is not computed again in the backward pass, and keeps "
                "what it computes until then: %s",
                layer.name,
                type(layer).__name__,
                why,
            )

    def _handles(self) -> set[int]:
        """Returns the handles of variables that have no gradient here."""
        weights = set(map(id, self._model.trainable_variables))
        return keras_internals.handles_of(
            v for v in self._model.variables if id(v) not in weights
        )

    def _small(self, split: list[keras.Variable]) -> list[keras.Variable]:
        """Returns vectors that are together small beside a layer."""
        layer = max(
            (
                sum(math.prod(v.shape) for v in unit.variables)
                for unit in self._units
            ),
            default=0,
        )
        vectors = [
            variable
            for variable in split
            if variable.trainable and len(variable.shape) == 1
        ]
        vectors.sort(key=lambda variable: math.prod(variable.shape))
        sizes = itertools.accumulate(math.prod(v.shape) for v in vectors)
        return [
            variable
            for variable, total in zip(vectors, sizes, strict=True)
            if total <= layer * _TOGETHER
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the layers be computed so, while traced.

        Raises:
            TraceAgain: A layer is not a function of what it is called with.
                In another trace it is computed once.
        """
        with (
            self._attempts.left_behind(),
            keras_internals.calls_replaced(self._units, self._call),
        ):
            yield

    def note_difference(self, layer: keras.layers.Layer) -> None:
        """Notes that a layer is another function when it is called again."""
        self._attempts.give_up()
        self.compute_once(layer, "it is another function when called again")

    @contextlib.contextmanager
    def unscattered(self) -> Iterator[None]:
        """Leaves gradients as replicas compute them, in a block."""
        before, self.scatters = self.scatters, False
        try:
            yield
        finally:
            self.scatters = before

    def sources(self) -> list[tuple[keras.Variable, Any]]:
        """Returns what the gradient of each weight is taken from.

        For a weight that is stored in parts that is no value, but the places
        of its gradients. On a replica.
        """
        known = {id(v): value for v, value in self._gathered_once()}
        return [
            (
                variable,
                Places(tf.zeros([]), tf.zeros([]))
                if self.is_split(variable)
                else known[id(variable)]
                if id(variable) in known
                else tf.convert_to_tensor(variable.value),
            )
            for variable in self._model.trainable_variables
            if not self.is_in_parts(variable)
        ]

    def given(self, sources: list[tuple[keras.Variable, Any]]) -> Writes:
        """Returns the values of weights that no layer gathers. On a replica.

        Args:
            sources: Those of the step; none where it is not one of training.
        """
        if not sources:
            return self._gathered_once()
        return [
            (variable, source)
            for variable, source in sources
            if not isinstance(source, Places) and not self.is_in_parts(variable)
        ]

    def _gathered_once(self) -> Writes:
        if not self._together:
            return []
        values = self.gather(self._together)
        return list(zip(self._together, values, strict=True))

    def gather(
        self,
        variables: list[keras.Variable],
        dtypes: list[tf.DType] | None = None,
        after: list[tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Returns the whole values of weights, by one collective.

        Args:
            variables: The weights.
            dtypes: The type of each value. Default: those of the weights.
            after: What is known before they are read.
        """
        assert self._parts is not None
        return self._parts.gather(
            variables,
            dtypes or [_own_type(v) for v in variables],
            _of_this_graph(after or []),
        )

    def types(
        self, layer: keras.layers.Layer, variables: list[keras.Variable]
    ) -> list[tf.DType]:
        """Returns the types in which weights are sent to a layer.

        That is what the layer computes in, where it is smaller.
        """
        read = keras_internals.types_of_reads(layer) if self.scatters else {}
        found = []
        for variable in variables:
            own = _own_type(variable)
            cast = tf.as_dtype(read.get(id(variable), own))
            narrow = cast.is_floating and cast.size < own.size
            narrow = narrow and id(variable) not in self._full
            found.append(cast if narrow else own)
        return found

    def read(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the whole value of a weight that is read outside of layers.

        None for one that is stored whole. On a replica.
        """
        if not self.is_split(variable):
            return None
        self._gather_before([variable])
        return self.gather([variable])[0]

    def _gather_before(self, variables: Iterable[keras.Variable]) -> None:
        """Lets weights be gathered once, before branches and loops read them.

        Within these, replicas exchange nothing.

        Raises:
            TraceAgain: They will be, in another trace.
        """
        split = _unique(list(filter(self.is_split, variables)))
        if split and is_read_inside(split):
            self._together += split
            self._split -= set(map(id, split))
            raise TraceAgain

    def scattered(
        self,
        gradients: list[tf.Tensor],
        variables: list[keras.Variable],
        share: BatchShare,
    ) -> list[tf.Tensor]:
        """Returns own parts of the sums of gradients, by one collective.

        Args:
            gradients: This replica's, dense and whole.
            variables: The weight of each.
            share: What this replica has of the batch. Without a row of its
                own it counts as zeros.
        """
        assert self._parts is not None and self._parts.scatter is not None
        return self._parts.scatter(share.select_all(gradients), variables)

    def joined(
        self,
        gradients: list[Any],
        parts: list[Any],
        variables: list[keras.Variable],
        scope: StepScope,
    ) -> list[Any]:
        """Returns one gradient of each weight: of its part, where there is one.

        Args:
            gradients: This replica's of whole weights; None where there are
                none. Those of a weight that is also looked up, or read outside
                of layers, are scattered here.
            parts: Summed over replicas, of parts.
            variables: The weights.
            scope: The scope of the step.

        Raises:
            TraceAgain: Another trace adds up more before it scatters it.
        """
        if self.measures:
            self._note_squares(gradients, parts, variables, scope)
        both = [
            place
            for place, (whole, part) in enumerate(
                zip(gradients, parts, strict=True)
            )
            if whole is not None and part is not None
        ]
        found = [
            whole if part is None else part
            for whole, part in zip(gradients, parts, strict=True)
        ]
        for place in both:
            dense = tf.convert_to_tensor(gradients[place])
            (other,) = self.scattered([dense], [variables[place]], scope.share)
            found[place] = parts[place] + other
        return found

    def scatters_of(self, variable: keras.Variable) -> bool:
        """Whether a gradient of a weight is scattered where it is computed."""
        return self.scatters and id(variable) not in self._added_up

    def squares_here(self) -> dict[int, tf.Tensor]:
        """Returns the squared norms of what this replica has scattered."""
        return self._squares.pop(_replica(), {})

    def _note_squares(
        self,
        gradients: list[Any],
        parts: list[Any],
        variables: list[keras.Variable],
        scope: StepScope,
    ) -> None:
        """Keeps the squared norms of gradients that were scattered whole."""
        every = self.order_of(scope).squares
        several = {
            id(variable)
            for variable, whole, part in zip(
                variables, gradients, parts, strict=True
            )
            if part is not None
            and (whole is not None or len(every[id(variable)]) > 1)
        }
        if several:
            self._added_up |= several
            raise TraceAgain
        self._squares[_replica()] = {
            id(variable): every[id(variable)][0]
            for variable, part in zip(variables, parts, strict=True)
            if part is not None
        }

    def order_of(self, scope: StepScope) -> Order:
        """Returns the order of exchanges of a step."""
        if scope.order is None:
            scope.order = Order()
        return scope.order

    def is_split(self, variable: keras.Variable) -> bool:
        """Whether a weight is stored in parts, and gathered by its layers."""
        return id(variable) in self._split

    def is_in_parts(self, variable: keras.Variable) -> bool:
        """Whether a replica computes with its part of a weight."""
        return id(variable) in self._in_parts

    def _call(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        scope = keras_internals.stateless_scope()
        if not isinstance(scope, StepScope) or scope.busy:
            return own(*args, **kwargs)
        if not scope.is_here:
            self._gather_before(layer.variables)
            return own(*args, **kwargs)
        inputs = tf.nest.flatten((args, kwargs))
        composite = any(
            isinstance(each, (tf.RaggedTensor, tf.SparseTensor))
            for each in inputs
        )
        # No graph shows what a call does that runs eagerly.
        plain = composite or id(layer) in self._plain or tf.executing_eagerly()
        if plain:
            for variable in layer.variables:
                if self.is_split(variable):
                    # Before the call, which reads what is known then.
                    scope.get_current_value(variable)
            return own(*args, **kwargs)
        scope.busy = True
        try:
            return self._computed(scope, layer, own, args, kwargs)
        finally:
            scope.busy = False

    def _computed(
        self,
        scope: StepScope,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        masks = [keras_internals.mask_of(leaf) for leaf in leaves]

        def undo() -> None:
            if not keras_internals.is_of_library(layer):
                self._attempts.give_up()
            scope.reset(mark)
            del order.passes[calls:]
            for leaf, mask in zip(leaves, masks, strict=True):
                if mask is not None:
                    keras_internals.set_mask(leaf, mask)

        while True:
            weights = _unique(
                [
                    *layer.variables,
                    *self._others.get(id(layer), []),
                ]
            )
            lent = [
                variable
                for variable in weights
                if id(variable) in scope.sources or self.is_split(variable)
            ]
            for variable in self._others.get(id(layer), []):
                if self.is_in_parts(variable):
                    # All of it, joined before the layer reads it.
                    scope.get_current_value(variable)
            joined = self._joined(scope)
            mark, order = scope.mark(), self.order_of(scope)
            calls = len(order.passes)
            scope.seen, scope.narrow = {}, []
            call = _Pass(self, scope, layer, own, args, kwargs, lent)
            outputs = call()
            others = [
                variable
                for variable in scope.seen.values()
                if all(variable is not each for each in weights)
            ]
            late = self._joined(scope) - joined
            if scope.has_added(mark) or (late and not others):
                self._plain.add(id(layer))
                undo()
                return own(*args, **kwargs)
            if scope.narrow:
                # By another layer, which computes in a larger type.
                self._full.update(map(id, scope.narrow))
                undo()
                continue
            aside = None if others else call.aside(self._handles)
            if aside is not None:
                self.compute_once(layer, aside)
                undo()
                return own(*args, **kwargs)
            if not others:
                for variable in lent:
                    if self.is_split(variable):
                        scope.state_mapping.pop(id(variable), None)
                return outputs
            # A weight of another layer has its gradient here as well.
            self._others.setdefault(id(layer), []).extend(others)
            undo()

    def _joined(self, scope: StepScope) -> set[int]:
        """Returns the weights in parts of which a step has the whole."""
        return self._in_parts & scope.state_mapping.keys()


class _Pass:
    """One call of a layer, in the forward pass and again in the backward.

    Args:
        layers: The layers of the model.
        scope: The scope of the step.
        layer: The layer.
        own: Its own `call`.
        args: Its arguments.
        kwargs: Its arguments by name.
        lent: The weights that it reads.
    """

    def __init__(
        self,
        layers: LayerByLayer,
        scope: StepScope,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        args: Any,
        kwargs: Any,
        lent: list[keras.Variable],
    ) -> None:
        self._layers = layers
        self._scope = scope
        self._layer = layer
        self._own = own
        # Of what is read in parts, the part is no value of the weight.
        self._lent = [v for v in lent if not layers.is_in_parts(v)]
        self._parted = [v for v in lent if layers.is_in_parts(v)]
        lent = self._lent
        self._gathered = [v for v in lent if layers.is_split(v)]
        self._types = layers.types(layer, self._gathered)
        # Weights that are read more than once.
        self._often: set[int] = set()
        self._order = layers.order_of(scope)
        self._structure = (args, kwargs)
        self._flat = tf.nest.flatten(self._structure)
        self._places = [
            place
            for place, value in enumerate(self._flat)
            if tf.is_tensor(value) and _is_differentiable(value)
        ]
        # What Keras finds by a tensor is not lost on the way into a call.
        self._apart = [
            keras_internals.taken_apart(self._flat[place])
            for place in self._places
        ]
        # Layers may take them off in their call, as MultiHeadAttention does.
        self._masks = [
            keras_internals.mask_of(self._flat[place]) for place in self._places
        ]
        self._outputs: Any = None
        self._call_state = keras_internals.call_state()
        self._draws = current_scope()
        # What the layer makes in the forward pass, and of what.
        self._made: Operations | None = None
        self._given: list[tf.Tensor] = []
        self._state: dict[int, tf.Tensor] = {}

    def __call__(self) -> Any:
        """Returns the outputs of the layer."""
        if not self._scope.trains:
            self._scope.lend(self._lent, self._values(self._first_gathered()))
            return self._outputs_of(self._inputs())
        if self._gathered:
            self._order.passes.append(self)
        # Of a weight in parts, the part, and the whole where it was joined.
        held = self._scope.state_mapping
        self._whole = [v for v in self._parted if id(v) in held]
        sources = tf.nest.flatten(
            [
                [self._scope.sources[id(v)] for v in self._trained()],
                [self._scope.sources[id(v)] for v in self._parted],
                [held[id(v)] for v in self._whole],
            ]
        )
        flat = own_gradient(self._forward)(*self._inputs(), *sources)
        flat = iter(flat if isinstance(flat, (list, tuple)) else [flat])
        outputs = []
        for value in tf.nest.flatten(self._outputs):
            made = value
            if tf.is_tensor(value):
                parts, together = keras_internals.taken_apart(value)
                made = together([next(flat) for _ in parts])
                keras_internals.with_mask_of(made, value)
            outputs.append(made)
        return tf.nest.pack_sequence_as(self._outputs, outputs)

    def aside(self, handles: Callable[[], set[int]]) -> str | None:
        """Returns what the layer reads or does beside its arguments, if so.

        Args:
            handles: Returns those of variables that have no gradient.
        """
        if self._made is None:
            return None
        known = [*self._given, *self._state.values(), *self._masks]
        if self._made.take_others(known, handles):
            return "it reads a tensor that is no argument, weight or state"
        if self._made.act():
            return "it prints, calls Python, or draws or writes by itself"
        leaves = [*self._flat, *tf.nest.flatten(self._outputs)]
        if any(map(keras_internals.attributes_of_author, leaves)):
            return "its arguments or outputs have attributes"
        return None

    def _trained(self) -> list[keras.Variable]:
        return [v for v in self._lent if id(v) in self._scope.sources]

    def _inputs(self) -> list[tf.Tensor]:
        return [part for parts, _ in self._apart for part in parts]

    def gather(self, after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole weights of the layer.

        Args:
            after: What is known before the first of them is read.
        """
        if not self._gathered:
            return []
        return self._layers.gather(self._gathered, self._types, after)

    def _first_gathered(self) -> list[tf.Tensor]:
        """Gathers in the forward pass, once the layer before begins.

        So the weights of this layer come while that one computes.
        """
        before = self._order.begun
        self._order.begun = [
            value for value in self._flat if tf.is_symbolic_tensor(value)
        ]
        gathered = self.gather(before)
        # Where replicas are processes, no graph shows it.
        self._scope.take_alike(gathered)
        return gathered

    def _values(
        self,
        gathered: list[tf.Tensor],
        sources: dict[int, Any] | None = None,
    ) -> list[tf.Tensor]:
        """Returns the values of the weights that the layer reads.

        Args:
            gathered: Those that were gathered.
            sources: Where gradients of these go. Default: those of the step.
        """
        sources = self._scope.sources if sources is None else sources
        whole = {
            id(variable): value
            for variable, value in zip(self._gathered, gathered, strict=True)
        }
        found = []
        for variable in self._lent:
            source = sources.get(id(variable))
            value = whole.get(id(variable), source)
            if id(variable) in self._often and id(variable) in whole:
                # One device adds up its gradients in the weight's own type.
                value = tf.cast(value, _own_type(variable))
            if isinstance(source, Places):
                value = self._linked(value, variable, source)
            found.append(value)
        return found

    def _linked(
        self, value: tf.Tensor, variable: keras.Variable, source: Places
    ) -> tf.Tensor:
        """Returns a value whose gradient goes to the places of a weight."""

        @own_gradient
        def linked(*source: tf.Tensor) -> Any:
            del source
            return value, lambda up: self._placed([variable], [up])

        return linked(*source)

    def _placed(
        self, variables: list[keras.Variable], gradients: list[Any]
    ) -> list[Any]:
        """Returns gradients in the places of weights that are stored in parts.

        Args:
            variables: The weights.
            gradients: Of each, whole, as rows, or None.

        Returns:
            For each two: the own part of the sum, and what stays as it is.
        """
        dense = [
            isinstance(gradient, tf.Tensor)
            and self._layers.scatters_of(variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        parts: list[tf.Tensor] = []
        if any(dense):
            sent = list(itertools.compress(gradients, dense))
            owners = list(itertools.compress(variables, dense))
            with tf.control_dependencies(self._order.exchanged()):
                sent = list(map(tf.identity, sent))
            parts = self._layers.scattered(sent, owners, self._scope.share)
            squares: list[tf.Tensor] = []
            if self._layers.measures:
                squares = list(map(square_of, sent))
                for variable, square in zip(owners, squares, strict=True):
                    self._order.squares[id(variable)].append(square)
            self._order.scattered.append([*parts, *squares])
        remaining = iter(parts)
        return [
            value
            for gradient, variable, each in zip(
                gradients, variables, dense, strict=True
            )
            for value in (
                (next(remaining), None)
                if each
                else (None, _in_own_type(gradient, variable))
            )
        ]

    def _outputs_of(self, inputs: list[tf.Tensor]) -> Any:
        flat, remaining = list(self._flat), iter(inputs)
        for place, (parts, together), mask in zip(
            self._places, self._apart, self._masks, strict=True
        ):
            value = together([next(remaining) for _ in parts])
            flat[place] = keras_internals.with_mask(value, mask)
        args, kwargs = tf.nest.pack_sequence_as(self._structure, flat)
        return self._own(*args, **kwargs)

    def _computed_again(self, inputs: list[tf.Tensor]) -> Any:
        """Calls the layer once more, which leaves its attributes as they are.

        Raises:
            TraceAgain: It cannot be called twice.
        """
        held = [self._layer, *keras_internals.inner_layers(self._layer)]
        put_back = keras_internals.snapshot(held)
        try:
            return self._outputs_of(inputs)
        except Exception as error:
            if refusal_within(error) is None:
                self._layers.compute_once(self._layer, f"{error}")
                raise TraceAgain from error
            raise
        finally:
            put_back()

    def _forward(self, *operands: tf.Tensor) -> tuple[Any, Any]:
        count = len(self._inputs())
        before = dict(self._scope.state_mapping)
        values = self._values(self._first_gathered())
        self._scope.lend(self._lent, values)
        self._scope.reads.clear()
        self._state = before
        self._given = [*operands, *values]
        with recorded() as self._made:
            self._outputs = self._outputs_of(list(operands[:count]))
        self._often = {key for key, n in self._scope.reads.items() if n > 1}
        flat = _parts_of(self._outputs)

        def backward(*upstream: tf.Tensor) -> list[Any]:
            return self._backward(operands, before, upstream)

        return flat, backward

    def _backward(
        self,
        operands: tuple[tf.Tensor, ...],
        before: dict[int, tf.Tensor],
        upstream: tuple[tf.Tensor, ...],
    ) -> list[Any]:
        """Computes the outputs once more, and the gradients of operands."""
        count = len(self._inputs())
        arrived = [value for value in upstream if value is not None]
        order = self._order
        gathered = order.take(self)
        if gathered is None:
            gathered = self.gather(arrived)
        # While this layer computes.
        order.gather_before(self, [*arrived, *gathered])
        with tf.control_dependencies([*arrived, *order.scattered_before()]):
            again = [tf.identity(operand) for operand in operands]
        trained = self._trained()
        rest = len(again) - len(self._parted) - len(self._whole)
        in_parts = again[rest:]
        sources = dict(
            zip(
                map(id, trained),
                tf.nest.pack_sequence_as(
                    [self._scope.sources[id(v)] for v in trained],
                    again[count:rest],
                ),
                strict=True,
            )
        )
        values = self._values(gathered, sources)
        held = {id(v): w for v, w in zip(self._lent, values, strict=True)}
        joined = dict(
            zip(
                map(id, self._whole),
                in_parts[len(self._parted) :],
                strict=True,
            )
        )
        parts = dict(zip(map(id, self._parted), in_parts, strict=False))
        replay = Replay({**before, **held, **joined}, parts)
        inputs = again[:count]
        watched = [*inputs, *(held[id(v)] for v in trained), *in_parts]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            with (
                replay,
                self._call_state(),
                entered_again(self._draws),
                recorded() as made,
            ):
                outputs = self._computed_again(inputs)
        flat = _parts_of(outputs)
        assert self._made is not None
        given = zip(self._given, [*again, *values], strict=True)
        if not self._made.are_same(made, _parts_of(self._outputs), flat, given):
            self._layers.note_difference(self._layer)
        pairs = [
            (value, gradient)
            for value, gradient in zip(flat, upstream, strict=True)
            if _is_differentiable(value) and gradient is not None
        ]
        found = tape.gradient(
            [value for value, _ in pairs],
            watched,
            output_gradients=[gradient for _, gradient in pairs],
        )
        after = count + len(trained)
        of_weights = dict(
            zip(map(id, trained), found[count:after], strict=True)
        )
        divided = [v for v in trained if self._layers.is_split(v)]
        placed = iter(
            self._placed(divided, [of_weights[id(v)] for v in divided])
        )
        return [
            *found[:count],
            *(
                value
                for variable in trained
                for value in (
                    [next(placed), next(placed)]
                    if self._layers.is_split(variable)
                    else [of_weights[id(variable)]]
                )
            ),
            *found[after:],
        ]


@dataclasses.dataclass
class Order:
    """In which order a step of a replica exchanges weights and gradients.

    Attributes:
        begun: What the last layer in the forward pass was called with.
        passes: The calls of layers that gather, in the order of the forward
            pass.
        ahead: The weights that were gathered for calls whose turn comes.
        scattered: The parts of the gradients of each layer, and the squares.
        squares: The squared norms of what this replica has scattered, by the
            identity of the weight.
    """

    begun: list[tf.Tensor] = dataclasses.field(default_factory=list)
    passes: list[_Pass] = dataclasses.field(default_factory=list)
    ahead: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    scattered: list[list[tf.Tensor]] = dataclasses.field(default_factory=list)
    squares: dict[int, list[tf.Tensor]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def take(self, one: _Pass) -> list[tf.Tensor] | None:
        """Returns the weights that were gathered for a call, if they were."""
        found = self.ahead.pop(id(one), None)
        if found is None or len(_of_this_graph(found)) < len(found):
            return None
        return found

    def gather_before(self, one: _Pass, after: list[tf.Tensor]) -> None:
        """Gathers the weights of the call before one, as far as is known.

        They come when the layer above has its gradients scattered: then two
        layers are whole, this one and the one before.

        Args:
            one: The call that computes its gradients now.
            after: What it begins with, and its weights.
        """
        place = next(
            (n for n, each in enumerate(self.passes) if each is one), 0
        )
        if not place or id(self.passes[place - 1]) in self.ahead:
            return
        before = self.passes[place - 1]
        last = self.scattered[-1] if self.scattered else []
        self.ahead[id(before)] = before.gather([*after, *last])

    def exchanged(self) -> list[tf.Tensor]:
        """Returns what is known before a layer's gradients are packed.

        That is what was exchanged last: a copy of gradients that waited for
        its turn would be one layer more.
        """
        last = self.scattered[-1] if self.scattered else []
        ahead = itertools.chain.from_iterable(self.ahead.values())
        return _of_this_graph([*last, *ahead])

    def scattered_before(self) -> list[tf.Tensor]:
        """Returns what is known before a layer may compute its gradients."""
        return _of_this_graph(self.scattered[-2]) if self.scattered[1:] else []


def _of_this_graph(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors that operations made here can wait for."""
    here = tf.compat.v1.get_default_graph()
    return [
        tensor
        for tensor in tensors
        if tf.is_symbolic_tensor(tensor) and tensor.graph is here
    ]


def _units(
    model: keras.Model,
    chosen: list[keras.layers.Layer] | None,
    *,
    gathers: bool,
) -> list[keras.layers.Layer]:
    """Returns what is computed again, each by itself.

    Args:
        model: The model.
        chosen: As for `LayerByLayer`.
        gathers: Whether layers gather their weights.
    """
    every = [
        layer
        for layer in keras_internals.outermost_layers(model)
        if layer.trainable_variables
    ]
    if chosen is None:
        return every
    if not gathers:
        return chosen
    within = _all_inside(every)
    outer = [layer for layer in chosen if id(layer) not in within]
    within = _all_inside(outer) | set(map(id, outer))
    return [*outer, *(layer for layer in every if id(layer) not in within)]


def _all_inside(layers: list[keras.layers.Layer]) -> set[int]:
    return {
        id(inner)
        for layer in layers
        for inner in keras_internals.inner_layers(layer)
    }


def _is_differentiable(value: tf.Tensor) -> bool:
    return value.dtype.is_floating or value.dtype.is_complex


def _own_type(variable: keras.Variable) -> tf.DType:
    """Returns the type of a weight, whatever it is cast to where it is read."""
    return tf.as_dtype(keras_internals.stored(variable).dtype)


def _parts_of(outputs: Any) -> list[tf.Tensor]:
    """Returns the tensors that outputs of a layer are handed on as."""
    return [
        part
        for value in tf.nest.flatten(outputs)
        if tf.is_tensor(value)
        for part in keras_internals.taken_apart(value)[0]
    ]


def _in_own_type(gradient: Any, variable: keras.Variable) -> Any:
    """Returns a gradient that is added to others of the same weight."""
    if not isinstance(gradient, tf.Tensor):
        return gradient
    return tf.cast(gradient, _own_type(variable))


def _replica() -> int:
    """Returns the number of this replica."""
    return this_replica(where_all_are_one=0)


def _unique(variables: list[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
