"""Forward and backward pass layer by layer: less memory for more computing.

    layers = LayerByLayer(model, gather)
    with layers.in_place():                  # around the steps of all replicas
        ...                                  # traces forward and backward

A layer keeps nothing between its forward and its backward pass but its inputs:

    forward     gather the layer's weights -> outputs, and forget the rest
    backward    gather them again -> outputs once more -> gradients

Weights of the next layer are gathered while a layer computes. Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016; Zhao et al., "PyTorch
FSDP", VLDB 2023.

The layers are those that a model holds directly, models inside of it opened.
A layer that adds losses, assigns weights or exchanges values with other
replicas is computed once, as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.state import Writes
from mgpu_tf.engine.step_scope import Gather, StepScope
from mgpu_tf.strategies.own_gradient import own_gradient


class LayerByLayer:
    """Recomputes the layers of a model in the backward pass.

    Args:
        model: A built model.
        gather: Returns the whole value of a weight that is stored in parts,
            None for other variables. On a replica.
    """

    def __init__(self, model: keras.Model, gather: Gather) -> None:
        self._model = model
        self.gather = gather
        self._units = [
            layer
            for layer in keras_internals.outermost_layers(model)
            if layer.trainable_variables
        ]
        self._plain = {
            id(layer)
            for layer in self._units
            if isinstance(layer, keras.layers.Embedding)
            or keras_internals.exchanges_statistics(layer)
        }
        self._split = {
            id(variable)
            for variable in model.variables
            if keras_internals.is_split(variable)
        }
        # What a layer reads besides its own weights.
        self._others: dict[int, list[keras.Variable]] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the layers be computed so, while traced."""
        with keras_internals.calls_replaced(self._units, self._call):
            yield

    def sources(self) -> Writes:
        """Returns a tensor for each weight to take its gradient from.

        For a weight that is stored in parts the tensor only has its shape.
        On a replica.
        """
        return [
            (
                variable,
                tf.zeros(variable.shape, variable.dtype)
                if self._is_split(variable)
                else tf.convert_to_tensor(variable.value),
            )
            for variable in self._model.trainable_variables
        ]

    def given(self, sources: Writes) -> Writes:
        """Returns those of the sources that hold the value of a weight."""
        return [pair for pair in sources if not self._is_split(pair[0])]

    def _is_split(self, variable: keras.Variable) -> bool:
        return id(variable) in self._split

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
        inputs = tf.nest.flatten((args, kwargs))
        composite = any(
            isinstance(each, (tf.RaggedTensor, tf.SparseTensor))
            for each in inputs
        )
        if composite or id(layer) in self._plain:
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
                if id(variable) in scope.sources or self._is_split(variable)
            ]
            mark = scope.mark()
            scope.seen = {}
            outputs = _Pass(self, scope, own, args, kwargs, lent)()
            others = [
                variable
                for variable in scope.seen.values()
                if all(variable is not each for each in weights)
            ]
            if scope.has_added(mark):
                self._plain.add(id(layer))
                scope.reset(mark)
                return own(*args, **kwargs)
            if not others:
                for variable in lent:
                    if self._is_split(variable):
                        scope.state_mapping.pop(id(variable), None)
                return outputs
            # A weight of another layer has its gradient here as well.
            self._others.setdefault(id(layer), []).extend(others)
            scope.reset(mark)


class _Pass:
    """One call of a layer, in the forward pass and again in the backward.

    Args:
        layers: The layers of the model.
        scope: The scope of the step.
        own: The layer's own `call`.
        args: Its arguments.
        kwargs: Its arguments by name.
        lent: The weights that it reads.
    """

    def __init__(
        self,
        layers: LayerByLayer,
        scope: StepScope,
        own: Callable[..., Any],
        args: Any,
        kwargs: Any,
        lent: list[keras.Variable],
    ) -> None:
        self._layers = layers
        self._scope = scope
        self._own = own
        self._lent = lent
        self._structure = (args, kwargs)
        self._flat = tf.nest.flatten(self._structure)
        self._places = [
            place
            for place, value in enumerate(self._flat)
            if tf.is_tensor(value) and value.dtype.is_floating
        ]
        self._outputs: Any = None
        self._call_state = keras_internals.call_state()

    def __call__(self) -> Any:
        """Returns the outputs of the layer."""
        if not self._scope.trains:
            self._scope.lend(self._lent, self._weights(self._before()))
            return self._outputs_of(self._inputs())
        sources = [self._scope.sources[id(v)] for v in self._trained()]
        flat = own_gradient(self._forward)(*self._inputs(), *sources)
        flat = iter(flat if isinstance(flat, (list, tuple)) else [flat])
        outputs = [
            keras_internals.with_mask_of(next(flat), value)
            if tf.is_tensor(value)
            else value
            for value in tf.nest.flatten(self._outputs)
        ]
        return tf.nest.pack_sequence_as(self._outputs, outputs)

    def _trained(self) -> list[keras.Variable]:
        return [v for v in self._lent if id(v) in self._scope.sources]

    def _inputs(self) -> list[tf.Tensor]:
        return [self._flat[place] for place in self._places]

    def _before(self) -> list[tf.Tensor]:
        """Returns what is known once the layer before begins.

        The weights of this layer are gathered while that one computes.
        """
        before = _of_this_graph(self._scope.begun)
        self._scope.begun = [
            value for value in self._flat if tf.is_symbolic_tensor(value)
        ]
        return before

    def _weights(
        self,
        after: list[tf.Tensor],
        sources: dict[int, tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Returns the values of the weights, gathered when `after` is known."""
        sources = self._scope.sources if sources is None else sources
        with tf.control_dependencies(after):
            found = []
            for variable in self._lent:
                value = self._layers.gather(variable)
                source = sources.get(id(variable))
                if value is None:
                    value = source
                elif source is not None:
                    value = _linked(value, source)
                found.append(value)
        return found

    def _outputs_of(self, inputs: list[tf.Tensor]) -> Any:
        flat = list(self._flat)
        for place, value in zip(self._places, inputs, strict=True):
            flat[place] = keras_internals.with_mask_of(value, flat[place])
        args, kwargs = tf.nest.pack_sequence_as(self._structure, flat)
        return self._own(*args, **kwargs)

    def _forward(self, *operands: tf.Tensor) -> tuple[Any, Any]:
        count = len(self._places)
        before = dict(self._scope.state_mapping)
        weights = self._weights(self._before())
        self._scope.lend(self._lent, weights)
        self._outputs = self._outputs_of(list(operands[:count]))
        flat = [
            value
            for value in tf.nest.flatten(self._outputs)
            if tf.is_tensor(value)
        ]

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
        count = len(self._places)
        arrived = [value for value in upstream if value is not None]
        with tf.control_dependencies(arrived):
            again = [tf.identity(operand) for operand in operands]
        inputs, sources = again[:count], again[count:]
        trained = self._trained()
        # While the layer above has its gradients computed.
        after = _of_this_graph(self._scope.returned) or arrived
        self._scope.returned = arrived
        values = self._weights(
            after,
            {id(v): s for v, s in zip(trained, sources, strict=True)},
        )
        held = {id(v): w for v, w in zip(self._lent, values, strict=True)}
        replay = keras.StatelessScope()
        replay.state_mapping = {**before, **held}
        watched = [*inputs, *(held[id(v)] for v in trained)]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            with replay, self._call_state():
                outputs = self._outputs_of(inputs)
        flat = [v for v in tf.nest.flatten(outputs) if tf.is_tensor(v)]
        pairs = [
            (value, gradient)
            for value, gradient in zip(flat, upstream, strict=True)
            if value.dtype.is_floating and gradient is not None
        ]
        return tape.gradient(
            [value for value, _ in pairs],
            watched,
            output_gradients=[gradient for _, gradient in pairs],
        )


def _linked(value: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Returns a value whose gradient is that of another tensor."""

    @own_gradient
    def linked(source: tf.Tensor) -> Any:
        del source
        return value, lambda upstream: upstream

    return linked(source)


def _of_this_graph(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors that operations made here can wait for."""
    here = tf.compat.v1.get_default_graph()
    return [
        tensor
        for tensor in tensors
        if tf.is_symbolic_tensor(tensor) and tensor.graph is here
    ]


def _unique(variables: list[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
