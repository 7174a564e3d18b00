"""From a function that builds a model to the graph of its training step.

    graph = trace(build_model)

The model is built inside of a graph of TensorFlow, where a variable is a name
and a shape: nothing is allocated, and a model of any size takes the memory of
its graph alone. Forward pass, loss and gradients are traced there with the
fused forms of the engine.

TensorFlow is imported when a model is traced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.graph import (
    BATCH,
    Graph,
    Layer,
    Operation,
    Tensor,
    Weight,
)

if TYPE_CHECKING:
    import keras

_LAYER = re.compile(r"planned_layer_(\d+)(?:_\d+)?/")
_INNER = re.compile(r"planned_inner_(\d+)(?:_\d+)?/")
_SPARSE_TABLES = ("ResourceGather", "GatherV2")
# What a loop whose length is not known is taken to run.
_UNKNOWN_LENGTH = 32


def trace(build_model: Callable[[], keras.Model], data: Any = None) -> Graph:
    """Traces the training step of a model, without memory for it.

    Args:
        build_model: Returns a compiled model.
        data: A batch `(x, y)` of arrays or specs with `shape` and `dtype`,
            any number of rows; needed where the model does not say what it
            takes. Default: from the model's inputs and its loss.

    Returns:
        The graph.

    Raises:
        ConfigurationError: The model is not compiled, or does not say what
            it takes.
    """
    from mgpu_tf.runtime import quiet_import

    quiet_import.import_tensorflow()
    import keras
    import tensorflow as tf

    with (
        tf.Graph().as_default(),
        # Within a scope, names may begin with "_", as some layers' do.
        tf.name_scope("planned"),
        tf.variable_creator_scope(_declared),
    ):
        model = build_model()
        if not isinstance(model, keras.Model) or not model.compiled:
            raise ConfigurationError(
                "A plan needs a function that returns a compiled keras.Model. "
                f"Received: {type(model).__name__}. Call model.compile in it."
            )
        return _Tracing(model, data).graph()


def _declared(_: Callable[..., Any], **options: Any) -> Any:
    """Returns a variable with a shape and a type, which nothing initializes.

    That takes two operations less than TensorFlow's own way.
    """
    import tensorflow as tf
    from tensorflow.python.ops import resource_variable_ops

    value = options["initial_value"]
    value = tf.convert_to_tensor(
        value() if callable(value) else value, options["dtype"]
    )
    return resource_variable_ops.UninitializedVariable(
        options["trainable"],
        name=options["name"],
        shape=value.shape,
        dtype=value.dtype,
    )


class _Tracing:
    """The trace of one model, inside of a graph of TensorFlow."""

    def __init__(self, model: keras.Model, data: Any) -> None:
        self._model = model
        self._data = data
        self._units: list[Any] = []
        self._again: dict[int, bool] = {}
        self._calls: list[int] = []
        self._inner: list[Layer] = []

    def graph(self) -> Graph:
        import tensorflow as tf

        from mgpu_tf.engine import keras_internals
        from mgpu_tf.engine.kernels import Kernels

        model = self._model
        x, y = self._batch()
        every_layer = [model, *keras_internals.layers_of(model)]
        if not all(layer.built for layer in every_layer):
            self._outputs(x)
        kernels = Kernels(model, tf.distribute.get_strategy(), "fused")
        self._units = keras_internals.outermost_layers(model)
        trained = model.trainable_variables
        values = [variable.value for variable in trained]
        here = tf.compat.v1.get_default_graph()
        before = len(here.get_operations())
        with (
            kernels.in_place(),
            keras_internals.calls_replaced(
                self._inner_layers(), self._call_inner
            ),
            keras_internals.calls_replaced(self._units, self._call),
            tf.GradientTape() as tape,
        ):
            y_pred = self._outputs(x)
            y = self._targets(y, y_pred)
            loss = keras_internals.compute_loss(model, x, y, y_pred, None, True)
        middle = len(here.get_operations())
        gradients = tape.gradient(loss, values)
        if not model.optimizer.built:
            model.optimizer.build(trained)
        every = here.get_operations()
        forward, backward = every[before:middle], every[middle:]
        return _Reading(
            self, forward, backward, loss, gradients, (x, y)
        ).graph()

    @property
    def model(self) -> keras.Model:
        """The model."""
        return self._model

    @property
    def units(self) -> list[Any]:
        """Its outermost layers."""
        return self._units

    @property
    def calls(self) -> list[int]:
        """The places of the layers among the units, in the order of calls."""
        return self._calls

    @property
    def inner(self) -> list[Layer]:
        """The calls of layers that a tensor axis may divide, in their order."""
        return self._inner

    def assigns(self, call: int) -> bool:
        """Whether a call of a layer has assigned other than states of seeds.

        What is computed again draws what it has drawn before.
        """
        return not self._again.get(call, True)

    def _call(
        self,
        layer: Any,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        import tensorflow as tf

        here = tf.compat.v1.get_default_graph()
        if _LAYER.search((here.get_name_scope() or "") + "/"):
            return own(*args, **kwargs)
        place = next(i for i, u in enumerate(self._units) if u is layer)
        number = len(self._calls)
        self._calls.append(place)
        before = here.version
        with tf.name_scope(f"planned_layer_{number}"):
            outputs = own(*args, **kwargs)
        seeds = self._seeds()
        self._again[number] = not any(
            operation.type.startswith("Assign")
            and operation.inputs[0].ref() not in seeds
            for operation in here.get_operations()[before:]
        )
        return outputs

    def _inner_layers(self) -> list[Any]:
        from mgpu_tf.engine import keras_internals

        return [
            layer
            for layer in keras_internals.layers_of(self._model)
            if type(layer).__name__ in splits.KINDS
        ]

    def _call_inner(
        self,
        layer: Any,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        import tensorflow as tf

        here = tf.compat.v1.get_default_graph()
        if _INNER.search((here.get_name_scope() or "") + "/"):
            return own(*args, **kwargs)
        number = len(self._inner)
        self._inner.append(Layer(layer.name, type(layer).__name__))
        with tf.name_scope(f"planned_inner_{number}"):
            return own(*args, **kwargs)

    def _seeds(self) -> set[Any]:
        """Returns states of generators, which layers may make when called."""
        from mgpu_tf.engine import keras_internals

        states = [
            state for _, state in keras_internals.random_layers(self._model)
        ]
        known = keras_internals.global_seed_state()
        states += [] if known is None else [known]
        return {state.value.handle.ref() for state in states}

    def _outputs(self, x: Any) -> Any:
        from mgpu_tf.engine import keras_internals

        training = {}
        if keras_internals.takes_training(self._model):
            training = {"training": True}
        try:
            return self._model(x, **training)
        except Exception as error:  # Layers may raise anything.
            sizes = [n for n in (s.shape[0] for s in self._specs()) if n]
            if not sizes:
                raise
            raise ConfigurationError(
                "A plan calls the model with another number of rows. Received: "
                f"{self._model.name!r}, with batch_size={sizes[0]}; its call "
                f"says: {' '.join(str(error).split()):.200}. Leave out "
                "batch_size and stateful=True for the plan, or plan with "
                "num_parameters."
            ) from error

    def _batch(self) -> tuple[Any, Any]:
        import tensorflow as tf

        if self._data is not None:
            x, y = self._data
            return (
                tf.nest.map_structure(_placeholder, x),
                tf.nest.map_structure(_placeholder, y),
            )
        specs = self._specs()
        if not specs:
            raise ConfigurationError(
                "A plan needs to know what the model takes. Received: "
                f"{type(self._model).__name__} without inputs. Pass "
                "data=(x, y), a batch of arrays."
            )
        every = [_placeholder(spec) for spec in specs]
        return every[0] if len(every) == 1 else every, None

    def _specs(self) -> list[Any]:
        """Returns the specs of inputs; none where the model has not said."""
        try:
            return self._model.inputs or []
        except (AttributeError, ValueError):
            return []

    def _targets(self, y: Any, y_pred: Any) -> Any:
        """Returns targets as the loss takes them, where none are given."""
        import tensorflow as tf

        if y is not None:
            return y
        losses = tf.nest.flatten(self._model.loss)
        outputs = tf.nest.flatten(y_pred)
        made = []
        for place, output in enumerate(outputs):
            loss = losses[place] if len(losses) == len(outputs) else losses[0]
            name = loss if isinstance(loss, str) else type(loss).__name__
            name = name + str(getattr(loss, "name", ""))
            if "sparse" in name.lower():
                shape, dtype = output.shape[:-1], tf.int32
            else:
                shape, dtype = output.shape, tf.float32
            made.append(tf.compat.v1.placeholder(dtype, shape))
        return tf.nest.pack_sequence_as(y_pred, made)


def _placeholder(value: Any) -> Any:
    import keras
    import tensorflow as tf

    shape = list(value.shape)
    if any(n is None for n in shape[1:]):
        raise ConfigurationError(
            "A plan needs the whole shape of an example. Received: "
            f"{tuple(shape)}. Give the model inputs of a known shape, or pass "
            "data=(x, y)."
        )
    dtype = value.dtype
    name = keras.backend.standardize_dtype(dtype)
    return tf.compat.v1.placeholder(name, [BATCH, *shape[1:]])


def _most_stages(model: keras.Model) -> int:
    from mgpu_tf.engine.synchronous.pipeline.split import most_stages

    try:
        return most_stages(model)
    except ConfigurationError:
        return 1


class _Reading:
    """Reads a graph of TensorFlow into one of the planner."""

    def __init__(
        self,
        tracing: _Tracing,
        forward: list[Any],
        backward: list[Any],
        loss: Any,
        gradients: list[Any],
        batch: tuple[Any, Any],
    ) -> None:
        self._tracing = tracing
        self._model = tracing.model
        self._forward = forward
        self._backward = backward
        self._loss = loss
        self._gradients = gradients
        self._batch = batch
        self._tensors: list[Tensor] = []
        self._numbers: dict[Any, int] = {}
        self._read: list[Operation] = []
        # The layers of what the passes have made, by tensor.
        self._places: list[dict[int, int]] = [{}, {}]

    def graph(self) -> Graph:
        """Returns the graph of what loss and gradients need."""
        import tensorflow as tf

        from mgpu_tf.engine import keras_internals

        weights = self._weights()
        flat = tf.nest.flatten(self._batch)
        inputs = [self._number(tensor) for tensor in flat]
        ends = [self._loss]
        for gradient in self._gradients:
            if isinstance(gradient, tf.IndexedSlices):
                ends += [gradient.values, gradient.indices]
            elif gradient is not None:
                ends.append(gradient)
        needed = _ancestors(ends)
        for backward, operations in enumerate((self._forward, self._backward)):
            for operation in operations:
                if operation in needed:
                    self._add(operation, backward=bool(backward))
        optimizer = self._model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        kept = keras_internals.kept_for_weights(inner)
        slots = self._slots(kept)
        of_weights = {id(variable) for _, variable in kept}
        metrics = [v for m in self._model.metrics for v in m.variables]
        others = [
            *(v for v in optimizer.variables if id(v) not in of_weights),
            *metrics,
        ]
        self._place_weights(weights)
        return Graph(
            name=self._model.name,
            tensors=self._tensors,
            operations=self._read,
            weights=weights,
            layers=self._layers(),
            inputs=inputs,
            slots=slots,
            other_bytes=sum(map(_variable_bytes, others)),
            averaged=bool(inner.use_ema),
            clips=bool(inner.global_clipnorm),
            optimizer=type(inner).__name__,
            loss=self._number(self._loss),
            inner=self._tracing.inner,
            stages=_most_stages(self._model),
        )

    def _layers(self) -> list[Layer]:
        import keras

        from mgpu_tf.engine import keras_internals

        found = []
        for number, place in enumerate(self._tracing.calls):
            layer = self._tracing.units[place]
            again = (
                bool(layer.trainable_variables)
                and not isinstance(layer, keras.layers.Embedding)
                and not keras_internals.exchanges_statistics(layer)
                and not self._tracing.assigns(number)
            )
            found.append(Layer(layer.name, type(layer).__name__, again))
        return found

    def _weights(self) -> list[Weight]:
        trained = {id(v): g for v, g in self._with_gradients()}
        found = []
        for variable in self._model.variables:
            if not hasattr(variable.value, "handle"):
                continue
            shape = tuple(variable.shape)
            size = _itemsize(variable.value.dtype)
            tensor = self._new(Tensor(shape, size))
            self._numbers[variable.value.handle.ref()] = tensor
            found.append(
                Weight(
                    variable.path,
                    shape,
                    size,
                    tensor,
                    trainable=id(variable) in trained,
                )
            )
        return found

    def _with_gradients(self) -> list[tuple[Any, Any]]:
        variables = self._model.trainable_variables
        return list(zip(variables, self._gradients, strict=True))

    def _place_weights(self, weights: list[Weight]) -> None:
        """Notes of each weight its layer and its gradient."""
        import tensorflow as tf

        first: dict[int, int] = {}
        inner: dict[int, int] = {}
        tables: set[int] = set()
        for operation in self._read:
            for tensor in operation.inputs:
                if operation.layer >= 0 and not operation.backward:
                    first.setdefault(tensor, operation.layer)
                if operation.inner >= 0 and not operation.backward:
                    inner.setdefault(tensor, operation.inner)
                if operation.kind in _SPARSE_TABLES:
                    tables.add(operation.inputs[0])
        gradients = dict(
            zip(
                [w.tensor for w in weights if w.trainable],
                [None] * len(weights),
                strict=False,
            )
        )
        paths = {v.path: g for v, g in self._with_gradients()}
        for place, weight in enumerate(weights):
            gradient = paths.get(weight.path)
            sparse = isinstance(gradient, tf.IndexedSlices)
            value = getattr(gradient, "values", None) if sparse else gradient
            gradients[weight.tensor] = value
            weights[place] = dataclasses.replace(
                weight,
                layer=first.get(weight.tensor, -1),
                inner=inner.get(weight.tensor, -1),
                gradient=None if value is None else self._number(value),
                sparse=sparse,
                table=weight.tensor in tables,
            )

    def _slots(self, kept: list[tuple[Any, Any]]) -> list[float]:
        found: dict[int, float] = {}
        for weight, variable in kept:
            size = _variable_bytes(variable) / math.prod(weight.shape or (1,))
            found[id(weight)] = found.get(id(weight), 0.0) + size
        trained = self._model.trainable_variables
        return [found.get(id(variable), 0.0) for variable in trained]

    def _new(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _number(self, tensor: Any) -> int:
        """Returns the number of a tensor of TensorFlow."""
        key = tensor.ref()
        if key not in self._numbers:
            self._numbers[key] = self._new(_sized(tensor))
        return self._numbers[key]

    def _add(self, operation: Any, *, backward: bool) -> None:
        kind = operation.type
        if kind in ("VarHandleOp", "Placeholder", "NoOp"):
            return
        if kind == "ReadVariableOp":
            handle = operation.inputs[0].ref()
            if handle in self._numbers:
                self._numbers[operation.outputs[0].ref()] = self._numbers[
                    handle
                ]
                return
        layer = _LAYER.search(operation.name)
        inner = _INNER.search(operation.name)
        inputs = [
            self._number(tensor)
            for tensor in operation.inputs
            if tensor.dtype.name != "resource" or tensor.ref() in self._numbers
        ]
        made = [self._number(tensor) for tensor in operation.outputs]
        place = int(layer[1]) if layer else -1
        if place < 0 and backward:
            place = self._place_by_inputs(inputs)
        self._places[backward].update(dict.fromkeys(made, place))
        if _has_body(operation):
            self._add_loop(operation, inputs, made, place, backward)
            return
        self._read.append(
            Operation(
                kind,
                tuple(inputs),
                tuple(made),
                place,
                backward,
                attributes=_attributes(operation),
                inner=int(inner[1]) if inner else -1,
            )
        )

    def _place_by_inputs(self, inputs: list[int]) -> int:
        """Returns the layer of a gradient whose name has none.

        It is that of the activations that it takes. Where it takes gradients
        alone, it belongs to the lower of their layers, which comes last.
        """
        forward, backward = self._places
        taken = [forward[t] for t in inputs if forward.get(t, -1) >= 0]
        if taken:
            return max(taken)
        later = [backward[t] for t in inputs if backward.get(t, -1) >= 0]
        return min(later, default=-1)

    @functools.cached_property
    def _library(self) -> dict[str, Any]:
        here = self._forward[0].graph
        functions = here.as_graph_def().library.function
        return {each.signature.name: each for each in functions}

    def _add_loop(
        self,
        operation: Any,
        inputs: list[int],
        made: list[int],
        place: int,
        backward: bool,
    ) -> None:
        """Adds an operation that calls a function, with what is inside.

        A loop holds for each of its lists as many elements as it runs, and
        beside them what one turn takes.
        """
        body, times = _body_of(operation, self._library)
        elements = _lists(body)
        for output, number in zip(operation.outputs, made, strict=True):
            if output.dtype.name == "variant":
                place_of = list(operation.outputs).index(output)
                each = elements.get(place_of, Tensor((0,)))
                self._tensors[number] = Tensor(
                    (times, *each.shape), each.itemsize, each.floating
                )
        inside: list[Operation] = []
        for each in body.get_operations():
            if each.type in ("Placeholder", "Const", "NoOp"):
                continue
            taken = tuple(self._number(t) for t in each.inputs)
            given = tuple(self._number(t) for t in each.outputs)
            inside.append(
                Operation(
                    each.type,
                    taken,
                    given,
                    place,
                    backward,
                    times,
                    _attributes(each),
                )
            )
        attributes = {"inside": inside}
        self._read.append(
            Operation(
                operation.type,
                tuple(inputs),
                tuple(made),
                place,
                backward,
                1,
                attributes,
            )
        )


def _ancestors(ends: list[Any]) -> set[Any]:
    found = set()
    waiting = [tensor.op for tensor in ends]
    while waiting:
        operation = waiting.pop()
        if operation in found:
            continue
        found.add(operation)
        waiting += [tensor.op for tensor in operation.inputs]
        waiting += operation.control_inputs
    return found


def _itemsize(dtype: Any) -> int:
    name = dtype.name
    return 0 if name in ("resource", "variant") else int(dtype.size or 0)


def _sized(tensor: Any) -> Tensor:
    shape = tensor.shape
    if shape.rank is None:
        return Tensor((0,), _itemsize(tensor.dtype), False)
    known = tuple(_UNKNOWN_LENGTH if n is None else n for n in shape)
    return Tensor(known, _itemsize(tensor.dtype), tensor.dtype.is_floating)


def _variable_bytes(variable: Any) -> int:
    size = math.prod(tuple(variable.shape)) if variable.shape else 1
    return int(size) * _itemsize(variable.value.dtype)


_NAMES = (
    "transpose_a",
    "transpose_b",
    "adj_x",
    "adj_y",
    "equation",
    "strides",
    "ksize",
    "data_format",
    "dilations",
)


def _attributes(operation: Any) -> dict[str, Any]:
    found = {}
    for name in _NAMES:
        if name in operation.node_def.attr:
            value = operation.get_attr(name)
            found[name] = value.decode() if isinstance(value, bytes) else value
    return found


def _has_body(operation: Any) -> bool:
    return operation.type in (
        "While",
        "StatelessWhile",
        "PartitionedCall",
        "StatefulPartitionedCall",
        "If",
        "StatelessIf",
    )


def _body_of(operation: Any, library: dict[str, Any]) -> tuple[Any, int]:
    """Returns the graph that an operation runs, and how often."""
    from tensorflow.python.framework import function_def_to_graph

    name = "f"
    for candidate in ("body", "then_branch"):
        if candidate in operation.node_def.attr:
            name = candidate
    definition = library[operation.get_attr(name).name]
    body = function_def_to_graph.function_def_to_graph(definition)
    return body, _times(operation)


def _times(operation: Any) -> int:
    """Returns how often a loop runs: as long as the longest list it takes."""
    if "body" not in operation.node_def.attr:
        return 1
    lengths = []
    for tensor in operation.inputs:
        source = tensor.op
        if source.type == "TensorListFromTensor":
            lengths.append(source.inputs[0].shape[0] or 0)
        if source.type == "TensorListReserve":
            lengths.append(_constant(source.inputs[1]))
        if source.type == "While":
            lengths.append(_times(source))
    return max(lengths, default=0) or _UNKNOWN_LENGTH


def _constant(tensor: Any) -> int:
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    return 0 if value is None else int(value)


def _lists(body: Any) -> dict[int, Tensor]:
    """Returns what a turn of a loop adds to its lists, by their place."""
    pushed = {}
    for operation in body.get_operations():
        if operation.type == "TensorListPushBack":
            pushed[operation.outputs[0].ref()] = operation.inputs[1]
        if operation.type == "TensorListSetItem":
            pushed[operation.outputs[0].ref()] = operation.inputs[2]
    found = {}
    for place, output in enumerate(body.outputs):
        source = output
        while source.op.type == "Identity":
            source = source.op.inputs[0]
        if source.ref() in pushed:
            found[place] = _sized(pushed[source.ref()])
    return found
