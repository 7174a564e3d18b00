"""Every private name of Keras that the engine relies on, in one place.

Keras's public interface has no way to build a compiled model's metrics before
the first step, to see one loss at a time, or to apply gradients that are
already reduced. `tests/engine/test_keras_internals.py` fails on the release of
Keras that moves one of the names used here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.losses import loss as keras_loss
from keras.src.utils.python_utils import is_default
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import (
    autograph_util,
    polymorphic_function,
)
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework import ops as tf_ops

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.layers import ShardedEmbedding
from mgpu_tf.optimizers.lazy_adam import LazyAdam
from mgpu_tf.strategies.registry import kind_of
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

# The lists in which optimizers keep one variable for each weight.
_SLOTS: dict[type, tuple[str, ...]] = {
    keras.optimizers.SGD: ("momentums",),
    keras.optimizers.Adam: ("_momentums", "_velocities", "_velocity_hats"),
    keras.optimizers.AdamW: ("_momentums", "_velocities", "_velocity_hats"),
    LazyAdam: ("_momentums", "_velocities", "_velocity_hats"),
    keras.optimizers.Adamax: ("_m", "_u"),
    keras.optimizers.Nadam: ("_momentums", "_velocities"),
    keras.optimizers.RMSprop: ("_velocities", "_momentums"),
    keras.optimizers.Adagrad: ("_accumulators",),
    keras.optimizers.Adadelta: (
        "_accumulated_grads",
        "_accumulated_delta_vars",
    ),
    keras.optimizers.Ftrl: ("_accumulators", "_linears"),
}


def build(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Creates the variables of a model, its metrics and its optimizer.

    Args:
        model: A compiled model.
        batch: `(x, y, sample_weight)` as tensors or specs with shape and
            dtype; nothing is computed from their values.
    """
    model._symbolic_build(data_batch=batch)


def build_eagerly(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Creates the same by running the model on a batch, without a graph.

    Args:
        model: A compiled model, whose code may need values.
        batch: `(x, y, sample_weight)` as tensors.
    """
    x, y, sample_weight = batch
    training = {"training": False} if takes_training(model) else {}
    with keras.StatelessScope(collect_losses=True) as called:
        y_pred = model(x, **training)
    # A regularizer asks the scope for the value of its variable.
    values = [(v, v.value) for v in model.trainable_variables]
    with keras.StatelessScope(values, collect_losses=True) as scope:
        scope.losses += called.losses
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        model._compute_loss(x, y, y_pred, sample_weight, False)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def is_built(model: keras.Model) -> bool:
    """Returns whether a `train_step` will find all variables made.

    The model itself may never be called by it.
    """
    parts = [layer for layer in layers_of(model) if layer is not model]
    # The default of `compile` may be there and have no part in the step.
    own = [o for o in optimizers_of(model) if o is not model.optimizer]
    parts += own or [model.optimizer]
    return compiled_parts_are_built(model) and all(p.built for p in parts)


def compiled_parts_are_built(model: keras.Model) -> bool:
    """Returns whether compiled losses and metrics have seen outputs."""
    parts = model._compile_metrics, model._compile_loss
    return all(part.built for part in parts if part is not None)


def reset_metrics(model: keras.Model, *, as_made: bool) -> None:
    """Resets the metrics of a model, as `fit` does before an epoch.

    Args:
        model: A compiled model.
        as_made: Whether compiled metrics keep the values that they were made
            with: Keras makes them after its first reset.
    """
    compiled = model._compile_metrics
    if compiled is None or not (as_made and compiled.built):
        model.reset_metrics()
        return
    compiled.built = False
    try:
        model.reset_metrics()
    finally:
        compiled.built = True


def build_layers(model: keras.Model, x: Any) -> None:
    """Creates the variables of a model's layers, and nothing else.

    Args:
        model: A model.
        x: Inputs as tensors or specs with shape and dtype.
    """
    keras.src.backend.compute_output_spec(model, _symbolic(x), training=False)


def build_in_training(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Creates what a model and its `compute_loss` make in training only.

    Args:
        model: A compiled model.
        batch: `(x, y, sample_weight)` as tensors or specs.
    """
    spec = keras.src.backend.compute_output_spec
    x, y, sample_weight = _symbolic(batch)
    y_pred = spec(model, x, training=True)
    if has_own_loss(model):
        spec(model._compute_loss, x, y, y_pred, sample_weight, training=True)


def has_own_code(model: keras.Model) -> bool:
    """Returns whether a layer or the loss of a model is not Keras's own."""
    return has_own_loss(model) or not all(map(is_keras_own, layers_of(model)))


def _symbolic(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda t: (
            None if t is None else keras.KerasTensor(t.shape, t.dtype.name)
        ),
        batch,
    )


# Optimizers, each with the weights that it was applied to.
Applied = Sequence[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]


@contextlib.contextmanager
def not_applied(
    optimizers: list[keras.optimizers.Optimizer],
) -> Iterator[Applied]:
    """Lets optimizers apply nothing, nor make their variables.

    In a scope a variable is not made at once, and then not beside its weight.

    Args:
        optimizers: Some optimizers.

    Yields:
        Those that would have been applied, each with its weights.
    """
    applied: list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = []

    def instructions(
        optimizer: keras.optimizers.Optimizer,
    ) -> dict[str, Any]:
        def note_only(gradients: Any, variables: Any = None) -> None:
            del gradients
            if variables is not None:
                applied.append((optimizer, list(variables)))

        # Keras's own hands pairs on; another one may be caught here.
        by_pairs = functools.partial(type(optimizer).apply_gradients, optimizer)
        return {"apply": note_only, "apply_gradients": by_pairs}

    with _replaced(optimizers, instructions):
        yield applied


def takes_training(model: keras.Model) -> bool:
    """Returns whether the model's `call` has the argument `training`."""
    return model._call_has_training_arg


def compiled_loss(model: keras.Model) -> Any | None:
    """Returns Keras's container of the compiled losses, None without one."""
    return model._compile_loss


def losses_of(model: keras.Model) -> list[Any]:
    """Returns the compiled losses, once they are built."""
    container = model._compile_loss
    if container is None or not container.built:
        return []
    return [term.loss for term in container._flat_losses]


def compiled_state(model: keras.Model) -> tuple[Any, ...]:
    """Returns a value that changes when a model is compiled or quantized.

    It changes too when `run_eagerly` is set to another value.
    """
    parts = (model.optimizer, model._compile_loss, model._compile_metrics)
    quantized = (
        (id(layer), layer.quantization_mode)
        for layer in layers_of(model)
        if layer.quantization_mode is not None
    )
    return (runs_eagerly(model), *(id(part) for part in parts), *quantized)


def loop_functions(model: keras.Model) -> tuple[Any, ...]:
    """Returns what Keras's own `fit`, `evaluate` and `predict` would call.

    They are others once an author has asked for a new trace, as by
    `make_train_function(force=True)`, or has set one of them to None.
    """
    for name in ("train", "test", "predict"):
        if getattr(model, f"{name}_function") is None:
            getattr(keras.Model, f"make_{name}_function")(model)
    return model.train_function, model.test_function, model.predict_function


def trace_anew(model: keras.Model) -> None:
    """Asks for a new trace, as an author does."""
    model.train_function = model.test_function = model.predict_function = None


def finalize_adapted(model: keras.Model) -> bool:
    """Lets layers compute with what their variables hold, as Keras's load does.

    `Normalization` keeps its mean and variance as tensors beside them.

    Args:
        model: Whose variables were written to.

    Returns:
        Whether a layer computes with other numbers than before.
    """
    changed = False
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            before = layer.mean, layer.variance
            layer.finalize_state()
            pairs = zip(before, (layer.mean, layer.variance), strict=True)
            changed |= not all(bool(tf.reduce_all(a == b)) for a, b in pairs)
    return changed


def runs_eagerly(model: keras.Model) -> bool:
    """Returns whether the steps of a model run without a graph."""
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def quantizes_in(model: keras.Model, scope: Callable[[], Any]) -> None:
    """Lets a model be quantized in the scope of a strategy, wherever it is.

    Args:
        model: The model, which makes new variables when it is quantized.
        scope: Returns the scope.
    """
    own = model.quantize

    @functools.wraps(own)
    def quantize(*arguments: Any, **named: Any) -> Any:
        with scope():
            return own(*arguments, **named)

    object.__setattr__(model, "quantize", quantize)


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Returns the mean that Keras reports as "loss"."""
    return model._loss_tracker


def shallow_copy(loss: Any) -> Any:
    """Copies a loss; `copy.copy` would save and reload it as a file."""
    twin = object.__new__(type(loss))
    twin.__dict__.update(loss.__dict__)
    return twin


def compute_loss(model: keras.Model, *arguments: Any) -> tf.Tensor:
    """Calls `compute_loss(x, y, y_pred, sample_weight[, training])`."""
    return model._compute_loss(*arguments)


@contextlib.contextmanager
def losses_replaced(
    model: keras.Model,
    container: Any,
    added: Callable[[tf.Tensor], tf.Tensor],
) -> Iterator[None]:
    """Lets Keras's `compute_loss` use other parts while it is traced.

    Args:
        model: A compiled model.
        container: In place of the container of the compiled losses.
        added: Takes a loss that a layer added, or a regularizer's; returns
            what is added up.
    """
    parts = {"_compile_loss": container, "_aggregate_additional_loss": added}
    own = {name: vars(model)[name] for name in parts if name in vars(model)}
    vars(model).update(parts)
    try:
        yield
    finally:
        for name in parts:
            del vars(model)[name]
        vars(model).update(own)


def with_losses_replaced(
    compile_loss: Any | None, replace: Callable[[keras.losses.Loss], Any]
) -> Any | None:
    """Returns a copy of the container with every loss replaced.

    The model's own container stays as it is.

    Args:
        compile_loss: A container, from `compiled_loss`.
        replace: Takes a loss, returns what is called in its place.

    Returns:
        The copy; called as `copy(y, y_pred, sample_weight)` it returns the
        sum of the weighted losses, as the original does. None where there is
        none, or none that was built: nothing has used it.
    """
    if compile_loss is None or not compile_loss.built:
        return None
    twin = shallow_copy(compile_loss)
    twin._flat_losses = [
        term._replace(loss=replace(term.loss))
        for term in compile_loss._flat_losses
    ]
    return twin


def unreduced(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the losses as Keras reduces them, and as its `call` has them.

    Args:
        loss: A loss with any reduction.
        y_true: Targets.
        y_pred: Outputs.
        sample_weight: Weights or None.

    Returns:
        The losses times weights and masks, and the losses alone.
    """
    twin = shallow_copy(loss)
    twin.reduction = "none"
    raw: list[tf.Tensor] = []

    def call(*arguments: Any) -> tf.Tensor:
        raw.append(loss.call(*arguments))
        return raw[0]

    twin.call = call
    return twin(y_true, y_pred, sample_weight), raw[0]


def is_known_by_example(loss: keras.losses.Loss) -> bool:
    """Returns whether a loss is Keras's own, of one example at a time.

    Those that give one value for each example are, but for `Circle`; how
    some of them look at labels hides it. Over the first axis they are not.
    """
    function = getattr(loss, "fn", type(loss))
    return (
        is_keras_own(loss)
        and is_unpatched(loss, "call", "__call__")
        and function.__module__.startswith("keras.")
        and not isinstance(
            loss, keras.losses.Circle | keras.losses.Dice | keras.losses.Tversky
        )
        and _is_of_last_axes(loss)
    )


def _is_of_last_axes(part: keras.losses.Loss | keras.metrics.Metric) -> bool:
    """Returns whether an axis that a loss or metric was given is not of rows.

    A negative one may be the first, but for the last.
    """
    named = vars(part).get("_fn_kwargs") or part.get_config()
    axes = keras.tree.flatten(named.get("axis"))
    return all(axis is None or axis == -1 or axis >= 1 for axis in axes)


def calls_loss(loss: keras.losses.Loss) -> bool:
    """Returns whether Keras reduces what the `call` of a loss returns."""
    return type(loss).__call__ is keras.losses.Loss.__call__


def mask_of_loss(y_pred: Any, losses: tf.Tensor) -> Any | None:
    """Returns the mask that Keras reduces losses by, None without one.

    Args:
        y_pred: Outputs, which layers may have given a mask.
        losses: From the `call` of a loss, which may have set one as well.
    """
    given, own = mask_of(y_pred), mask_of(losses)
    if given is None or own is None:
        return own if given is None else given
    return given & own


def merged_weights(
    values: tf.Tensor,
    sample_weight: Any,
    mask: Any,
) -> tf.Tensor | None:
    """Returns the product of sample weights and mask as Keras aligns them.

    Args:
        values: The losses before reduction.
        sample_weight: As the user gave them, or None.
        mask: As the layers made it, or None.

    Returns:
        The weights, of the rank of `values` where Keras can make it so;
        None where there is neither.
    """
    if sample_weight is not None:
        sample_weight = tf.cast(sample_weight, values.dtype)
    weights = keras_loss.apply_mask(
        sample_weight, mask, dtype=values.dtype, reduction="sum"
    )
    if weights is None:
        return None
    _, weights = keras_loss.squeeze_or_expand_to_same_rank(values, weights)
    return weights


def synchronized_statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns the moving statistics that layers compute over all replicas."""
    return [
        variable
        for layer in layers_of(model)
        if getattr(layer, "synchronized", False)
        for variable in layer.non_trainable_variables
    ]


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns the moving statistics of Keras's own normalization."""
    return [
        variable
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer._non_trainable_variables
    ]


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights that were made to be trained, and are not."""
    trained = {id(variable) for variable in model.trainable_variables}
    return [
        variable
        for layer in layers_of(model)
        for variable in layer._trainable_variables
        if id(variable) not in trained
    ]


def single_metrics(
    metrics: Iterable[keras.metrics.Metric],
) -> Iterator[keras.metrics.Metric]:
    """Yields metrics, those of a container of compiled ones each."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if inner is None:
            yield metric
        else:
            yield from single_metrics(inner)


def is_keras_own(part: Any) -> bool:
    """Returns whether a loss, metric or layer is one of Keras's own classes."""
    return type(part).__module__.startswith("keras.")


@contextlib.contextmanager
def moments_replaced(
    model: keras.Model, take: Callable[..., Any]
) -> Iterator[None]:
    """Lets normalizations take their statistics in another way.

    Args:
        model: A model; while a step of it is traced.
        take: Called with a layer, its own method, the inputs and their mask;
            returns mean and variance.
    """

    def instructions(layer: Any) -> dict[str, Any]:
        own = layer._moments
        return {"_moments": lambda inputs, mask: take(layer, own, inputs, mask)}

    layers = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    with _replaced(layers, instructions):
        yield


@contextlib.contextmanager
def calls_replaced(
    layers: list[keras.layers.Layer], call: Callable[..., Any]
) -> Iterator[None]:
    """Lets layers be called in another way, while traced.

    Args:
        layers: The layers.
        call: Called with a layer, its own `call`, and the arguments. Of a
            layer that an author quantizes in another way than Keras, that is
            the `quantized_call`. Those of Keras's keep rows apart.
    """

    def instructions(layer: Any) -> dict[str, Any]:
        name = "quantized_call" if _is_quantized_by_author(layer) else "call"
        return {name: functools.partial(call, layer, getattr(layer, name))}

    with _replaced(layers, instructions):
        yield


def _is_quantized_by_author(layer: keras.layers.Layer) -> bool:
    if getattr(layer, "quantization_mode", None) is None:
        return False
    quantizer = getattr(layer, "inputs_quantizer", None)
    own = quantizer is None or is_keras_own(quantizer)
    return not (own and is_of_library(layer))


@contextlib.contextmanager
def regularizers_replaced(
    layers: list[keras.layers.Layer],
    regularize: Callable[[keras.layers.Layer, tf.Tensor], None],
) -> Iterator[None]:
    """Lets layers regularize their outputs in another way, while traced.

    Args:
        layers: The layers, each with an `activity_regularizer`.
        regularize: Called with a layer and an output, after the layer's
            `call`. It adds to the loss what Keras would have added.
    """

    def instructions(layer: Any) -> dict[str, Any]:
        own, added = layer.add_loss, []

        def regularizer(output: tf.Tensor) -> tf.Tensor:
            regularize(layer, output)
            added.append(output)
            return tf.zeros([], output.dtype)

        def add_loss(loss: Any) -> None:
            # What Keras adds of a regularizer has been added by then.
            if added:
                added.pop()
            else:
                own(loss)

        return {"activity_regularizer": regularizer, "add_loss": add_loss}

    with _replaced(layers, instructions):
        yield


def regularization_of(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Returns a layer that adds to the loss what another adds of its outputs.

    Keras takes the value of an `activity_regularizer` after `call`, divided
    by the number of rows. This layer returns what it is called with, has the
    regularizer of the other, and its losses are the other's.

    Args:
        layer: With an `activity_regularizer`.
    """
    made = keras.layers.Identity(
        activity_regularizer=layer.activity_regularizer,
        autocast=False,
        name=f"activity_regularizer_of_{layer.name}",
    )
    # Keras would set a copy.
    object.__setattr__(made, "_loss_ids", layer._loss_ids)
    return made


@contextlib.contextmanager
def activations_replaced(
    layers: list[keras.layers.Layer], activate: Callable[..., Any]
) -> Iterator[None]:
    """Lets layers that have an `activation` compute it in another way.

    Args:
        layers: The layers.
        activate: Called with a layer and the inputs of its activation.
    """

    def instructions(layer: Any) -> dict[str, Any]:
        return {"activation": functools.partial(activate, layer)}

    with _replaced(layers, instructions):
        yield


@contextlib.contextmanager
def updates_replaced(
    optimizers: list[keras.optimizers.Optimizer],
    update: Callable[..., None],
    renew: Callable[[], None],
) -> Iterator[None]:
    """Lets optimizers update a weight in another way, while traced.

    Args:
        optimizers: Optimizers that wrap no others.
        update: Called with an optimizer, its own `update_step`, a gradient,
            TensorFlow's variable and the learning rate.
        renew: Called before the weights of an update, and after them, so
            that what they share is held no longer.
    """

    def instructions(part: Any) -> dict[str, Any]:
        every = part._distributed_tf_update_step

        def update_all(*arguments: Any) -> None:
            renew()
            every(*arguments)
            renew()

        return {
            "update_step": functools.partial(update, part, part.update_step),
            "_distributed_tf_update_step": update_all,
        }

    with _replaced(optimizers, instructions):
        yield


def is_overwritten(variable: keras.Variable) -> bool:
    """Returns whether an optimizer overwrites a variable with its gradient."""
    return getattr(variable, "overwrite_with_gradient", False)


def variables_of_float8(model: keras.Model) -> set[int]:
    """Returns the ids of what Keras's layers overwrite in float8."""
    return {
        id(variable)
        for layer in layers_of(model)
        if getattr(layer, "quantization_mode", None) == "float8"
        and is_keras_own(layer)
        for variable in layer._trainable_variables
        if is_overwritten(variable)
    }


def replaced_by_author(part: Any, methods: Iterable[str]) -> str | None:
    """Returns the first method that an author replaced on an object, or None.

    What `catch_from_now_on` has replaced is not the author's.
    """
    for method in methods:
        found = vars(part).get(method)
        if found is not None and getattr(found, "__module__", None) != __name__:
            return method
    return None


def is_unpatched(part: Any, *methods: str) -> bool:
    """Returns whether methods of an object of Keras's are its class's own.

    What the engine has replaced for the time of a trace is not the author's.
    """
    return not any(
        method in vars(part)
        and _BEFORE.get((id(part), method), (method,))[0] is not None
        for method in methods
    )


def slots(
    optimizer: keras.optimizers.Optimizer, variable: tf.Variable
) -> list[tf.Variable]:
    """Returns what an optimizer keeps for a weight.

    Args:
        optimizer: One of the classes in `_SLOTS`.
        variable: A weight, as an update has it.

    Returns:
        TensorFlow's variables in the order of `_SLOTS`, those that the
        optimizer keeps as it is set.
    """
    place = optimizer._get_variable_index(variable)
    kept = [getattr(optimizer, name, []) for name in _SLOTS[type(optimizer)]]
    return [every[place].value for every in kept if every]


def moments_of_lamb(
    optimizer: keras.optimizers.Lamb, variable: tf.Variable
) -> tuple[keras.Variable, keras.Variable]:
    """Returns the mean and the mean square that Lamb keeps for a weight.

    Args:
        optimizer: A Lamb.
        variable: A weight, as an update has it.
    """
    place = optimizer._get_variable_index(variable)
    return optimizer._momentums[place], optimizer._velocities[place]


def product_of_momentums(
    optimizer: keras.optimizers.Nadam,
) -> keras.Variable:
    """Returns the product of the momentums of all updates of Nadam."""
    return optimizer._u_product


def call_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what a call of a layer takes from the calls around it.

    That is the type that weights are cast to, and arguments such as
    `training` that inner layers inherit.

    Returns:
        A function that makes a context with the same state.
    """
    state = keras.src.backend.common.global_state
    names = ("autocast_scope", "current_call_ctx")
    now = {name: copy.copy(state.get_global_attribute(name)) for name in names}

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        before = {name: state.get_global_attribute(name) for name in names}
        for name, value in now.items():
            state.set_global_attribute(name, copy.copy(value))
        try:
            yield
        finally:
            for name, value in before.items():
                state.set_global_attribute(name, value)

    return restored


def stateless_scope() -> keras.StatelessScope | None:
    """Returns the scope that variables are read in, None outside of one."""
    return keras.src.backend.common.stateless_scope.get_stateless_scope()


def outermost_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that a model holds, models inside of it opened."""
    found: dict[int, keras.layers.Layer] = {}
    for layer in model._layers:
        inner = (
            outermost_layers(layer)
            if isinstance(layer, keras.Model)
            else [layer]
        )
        for each in inner:
            found[id(each)] = each
    return list(found.values())


Key = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer or operation in the graph of a model.

    Attributes:
        layer: The layer or operation.
        names: Its name, and those of the models inside of which it is first.
        inputs: The keys of the tensors that it takes.
        outputs: The keys of the tensors that it makes.
        specs: The symbolic tensors that it takes, and those that it makes.
        run: Computes a list of tensors of a list of tensors. Takes
            `training` as well.
    """

    layer: Any
    names: list[str]
    inputs: list[Key]
    outputs: list[Key]
    specs: tuple[list[Any], list[Any]]
    run: Callable[[list[Any], bool], list[Any]]

    @property
    def variables(self) -> list[keras.Variable]:
        """Returns what the layer keeps."""
        return list(getattr(self.layer, "variables", []))


def graph_of(
    model: keras.Model,
) -> tuple[list[Call], list[Key], list[Key]] | None:
    """Returns the calls of a functional model in an order that they can run.

    Models inside of it are opened. A model's inputs get their types in a
    call of their own.

    Args:
        model: A built model.

    Returns:
        The calls, the keys of the model's inputs and of its outputs; None
        where the model has no graph.
    """
    graph = _function_of(model)
    if graph is None:
        return None
    calls: list[Call] = []
    given: list[Key] = [(-1, i) for i in range(len(graph.inputs))]
    outputs = _walk(graph, given, (), calls)
    return calls, given, outputs


def structured(model: keras.Model, outputs: list[Any]) -> Any:
    """Returns the outputs of `graph_of` as the model returns them."""
    graph = _function_of(model)
    packed = keras.tree.pack_sequence_as(graph._outputs_struct, outputs)
    single = isinstance(packed, list | tuple) and len(packed) == 1
    return packed[0] if single else packed


def flat_inputs(model: keras.Model, x: Any) -> list[Any]:
    """Returns the inputs of a functional model in order, of their types."""
    return list(_function_of(model)._standardize_inputs(x))


def has_graph(model: keras.Model) -> bool:
    """Returns whether a model is functional or Sequential, or will be."""
    functional = keras.src.models.functional.Functional
    if isinstance(model, keras.Sequential):
        return type(model).call is keras.Sequential.call
    return isinstance(model, functional) and (
        type(model).call is functional.call
    )


def _function_of(model: keras.Model) -> Any:
    """Returns the functional model behind one, None where there is none."""
    if not has_graph(model):
        return None
    if isinstance(model, keras.Sequential):
        return getattr(model, "_functional", None)
    return model


def _walk(
    graph: Any, given: list[Key], path: Key, calls: list[Call]
) -> list[Key]:
    """Appends the calls of a graph; returns the keys of its outputs."""
    keys = {id(t): key for t, key in zip(graph.inputs, given, strict=True)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.is_input or not node.operation:
                continue
            inputs = [keys[id(t)] for t in node.input_tensors]
            here = (*path, len(calls))
            inner = _opened(node)
            if inner is None:
                made = [(*here, i) for i in range(len(node.outputs))]
                calls.append(_call_of(node, inputs, made))
            else:
                typed = [(*here, i) for i in range(len(inputs))]
                first = len(calls)
                calls.append(_typing_of(inner, node, inputs, typed))
                made = _walk(inner, typed, here, calls)
                calls[first].names.append(node.operation.name)
            for tensor, key in zip(node.outputs, made, strict=True):
                keys[id(tensor)] = key
    return [keys[id(tensor)] for tensor in graph.outputs]


def _opened(node: Any) -> Any:
    """Returns the graph of a model that a node calls, if that is all."""
    model = node.operation
    if not isinstance(model, keras.Model) or model.activity_regularizer:
        return None
    arguments = node.arguments
    # Of a mapping of inputs the mask is a mapping as well.
    if len(arguments.args) != 1 or any(
        value is not None for value in keras.tree.flatten(arguments.kwargs)
    ):
        return None
    graph = _function_of(model)
    if graph is None:
        return None
    [given], taken = arguments.args, graph._inputs_struct
    if isinstance(given, dict) and (
        not isinstance(taken, dict) or set(given) != set(taken)
    ):
        return None
    return graph


def _call_of(node: Any, inputs: list[Key], made: list[Key]) -> Call:
    operation = node.operation

    def run(values: list[Any], training: bool) -> list[Any]:
        filled = {
            id(t): value
            for t, value in zip(node.input_tensors, values, strict=True)
        }
        args, kwargs = node.arguments.fill_in(filled)
        if "training" in getattr(operation, "_call_context_args", ()):
            kwargs = {**kwargs, "training": training}
        return keras.tree.flatten(operation(*args, **kwargs))

    specs = (list(node.input_tensors), list(node.outputs))
    return Call(operation, [operation.name], inputs, made, specs, run)


def _typing_of(
    graph: Any, node: Any, inputs: list[Key], made: list[Key]
) -> Call:
    def run(values: list[Any], training: bool) -> list[Any]:
        del training
        return graph._standardize_inputs(
            keras.tree.pack_sequence_as(graph._inputs_struct, values)
        )

    specs = (list(node.input_tensors), list(graph.inputs))
    return Call(None, [], inputs, made, specs, run)


def store_again(variable: keras.Variable) -> None:
    """Makes TensorFlow's variable behind one anew, with its value.

    It is made where the strategy makes variables now.
    """
    before = variable._value
    variable._initialize(tf.constant(before.numpy()))
    _known_as(variable._value, before)


def kept_for_weights(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns what a built optimizer keeps for weights, with each weight."""
    found = []
    weights = getattr(optimizer, "_trainable_variables", [])
    for part in vars(optimizer).values():
        if isinstance(part, list) and len(part) == len(weights):
            found += [
                (weight, kept)
                for weight, kept in zip(weights, part, strict=True)
                if isinstance(kept, keras.Variable) and kept is not weight
            ]
    return found


def variables_of(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Returns the weights that a built optimizer updates."""
    return list(optimizer._trainable_variables)


def exchanges_statistics(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer takes statistics over all replicas."""
    return any(
        getattr(each, "synchronized", False)
        for each in layer._flatten_layers()
        if isinstance(each, keras.layers.BatchNormalization)
    )


def types_of_reads(layer: keras.layers.Layer) -> dict[int, str]:
    """Returns the type that each weight is cast to where its layer reads it.

    Args:
        layer: A layer; those inside of it have types of their own.

    Returns:
        The names of types by the identity of the weights.
    """
    return {
        id(variable): each.compute_dtype
        for each in layer._flatten_layers()
        for variable in each._trainable_variables
        if variable._autocast
    }


# The layers whose outputs are linear in a kernel, then activated.
_LINEAR = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Embedding,
    keras.layers.ReversibleEmbedding,
    ShardedEmbedding,
)
# Layers that only multiply their inputs by a drawn mask.
_MULTIPLYING = (keras.layers.Dropout, keras.layers.GaussianDropout)


_DESCRIBING = (
    *("__init__", "__module__", "__doc__", "__qualname__", "__firstlineno__"),
    *("__dict__", "__weakref__", "__static_attributes__", "__annotations__"),
    *("build", "get_config", "from_config", "compute_output_shape"),
    *("compute_output_spec", "get_build_config", "build_from_config"),
)


def linear_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the built layers that are computed as one of Keras's `_LINEAR`.

    Not those whose kernel is quantized, or made of several weights.
    """
    return [
        layer
        for layer in layers_of(model)
        if any(
            isinstance(layer, kind) and not _differs(type(layer), kind)
            for kind in _LINEAR
        )
        and layer.built
        and not (isinstance(layer, ShardedEmbedding) and layer.shards[1:])
        and is_unpatched(layer, "call")
        and not getattr(layer, "lora_enabled", False)
        and getattr(layer, "quantization_mode", None) is None
    ]


def _differs(own: type, kind: type) -> bool:
    """Whether a class computes otherwise than one that it is derived from.

    What it has besides methods that make it and describe it may change that.
    """
    lines = own.__mro__[: own.__mro__.index(kind)]
    return any(
        hasattr(kind, name) and name not in _DESCRIBING
        for line in lines
        for name in vars(line)
    )


def kernel_of(layer: keras.layers.Layer) -> keras.Variable:
    """Returns the kernel of one of `linear_layers`, an embedding's table."""
    if isinstance(layer, ShardedEmbedding):
        return layer.shards[0]
    if isinstance(layer, keras.layers.Embedding):
        return layer._embeddings
    return layer._kernel


def looks_up_alone(layer: keras.layers.Layer) -> bool:
    """Returns whether one of `linear_layers` does nothing but look rows up."""
    return isinstance(
        layer, keras.layers.Embedding | ShardedEmbedding
    ) and not isinstance(layer, keras.layers.ReversibleEmbedding)


def is_plain_table(layer: keras.layers.Embedding) -> bool:
    """Returns whether an embedding's rows are those of its one weight."""
    return bool(
        layer.built
        and not layer.lora_enabled
        and layer.quantization_mode is None
    )


def dropout_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that multiply their inputs by what they draw."""
    return [
        layer
        for layer in layers_of(model)
        if any(type(layer).call is kind.call for kind in _MULTIPLYING)
        and isinstance(layer, _MULTIPLYING)
    ]


@contextlib.contextmanager
def without(layer: keras.layers.Layer, *names: str) -> Iterator[None]:
    """Lets attributes of a layer be None or False, while traced."""
    held = {
        name: vars(layer)[name]
        for name in names
        if vars(layer).get(name) is not None
    }
    nothing = {name: False if held[name] is True else None for name in held}
    with _replaced([layer], lambda _: nothing):
        yield


def function_around(error: BaseException) -> Any:
    """Returns the innermost `tf.function` whose Python raised an error."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
    while frame is not None:
        function = frame.f_locals.get("self")
        called = frame.f_code.co_name == "__call__"
        if called and isinstance(function, polymorphic_function.Function):
            return function
        frame = frame.f_back
    return None


def by_autograph(function: Any) -> Callable[..., Any]:
    """Returns the Python of a `tf.function`, converted as TensorFlow does."""
    python = function._python_function
    if not function._autograph:
        return python
    converted = autograph_util.py_func_from_autograph(
        python, function._experimental_autograph_options
    )

    def call(*arguments: Any, **named: Any) -> Any:
        # A step is traced without AutoGraph.
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
            return converted(*arguments, **named)

    return call


@contextlib.contextmanager
def python_replaced(forms: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Gives each `tf.function` another Python function."""
    with contextlib.ExitStack() as stack:
        for function, python in forms:
            own = function._python_function
            stack.callback(setattr, function, "_python_function", own)
            function._python_function = python
        yield


def written_in(graph: Any) -> set[int]:
    """Returns the ids of the handles that a graph may write to.

    Also within its functions, branches and loops.
    """
    return {
        id(handle)
        for op in graph.get_operations()
        for handle in auto_control_deps_utils.get_read_write_resource_inputs(
            op
        )[1]
    }


@contextlib.contextmanager
def inputs_unchecked(layers: list[keras.layers.Layer]) -> Iterator[None]:
    """Lets layers take inputs of other shapes, while traced."""
    checked = [layer for layer in layers if layer._input_spec is not None]
    with _replaced(checked, lambda _: {"_input_spec": None}):
        yield


def store_as(variable: keras.Variable, held: tf.Variable) -> None:
    """Gives a variable of Keras another of TensorFlow behind it."""
    before, variable._value = variable._value, held
    _known_as(held, before)


def _known_as(held: tf.Variable, before: tf.Variable) -> None:
    """Lets optimizers know a variable by what they knew another by.

    Keras's keep such names: what is left out of weight decay, and the places
    of slots. An author's may, too.
    """
    getattr(held, "_primary", held)._unique_id = before._unique_id


def stored(variable: keras.Variable) -> tf.Variable:
    """Returns TensorFlow's variable behind one, whatever scope is open."""
    return variable._value


def make_readable(variables: Iterable[keras.Variable]) -> None:
    """Lets `float(optimizer.learning_rate)` work on replicas, as on one device.

    TensorFlow's variables can be read so, but not its copies of a variable.

    Args:
        variables: Of which the scalars are made readable.
    """
    for variable in variables:
        held = stored(variable)
        if not variable.ndim and not hasattr(type(held), "__float__"):
            kind: Any = type(held)
            held.__class__ = _readable(kind)


@functools.cache
def _readable(kind: type) -> type:
    """Returns a class of variables that Python can read as numbers."""
    return type(
        kind.__name__,
        (kind,),
        {
            "__float__": lambda self: float(self.numpy()),
            "__int__": lambda self: int(self.numpy()),
            "__module__": kind.__module__,
        },
    )


def write_here(variable: keras.Variable, value: Any) -> None:
    """Assigns a value to a variable, whatever scope is open."""
    variable._direct_assign(value)


def is_split(variable: keras.Variable) -> bool:
    """Returns whether replicas store parts of a variable."""
    return isinstance(stored(variable), ShardedVariable)


def is_spread(variable: keras.Variable) -> bool:
    """Returns whether a replica computes with its part of a variable alone.

    Weights that are split over the fsdp axis are gathered instead.
    """
    return is_split(variable) and stored(variable).split.over != "fsdp"


def as_one_call(run: Callable[[], Any], *, training: bool) -> None:
    """Runs layers as a model's call would: inner layers inherit `training`.

    Args:
        run: Calls the layers.
        training: Whether this is a step of training.
    """

    class Caller(keras.layers.Layer):
        def call(self, nothing: Any, training: bool = False) -> Any:
            run()
            return nothing

    caller = Caller(autocast=False)
    caller.built = True
    caller(tf.zeros([]), training=training)


def with_mask_of(tensor: Any, source: Any) -> Any:
    """Returns a tensor, with the mask of another where that has one."""
    return with_mask(tensor, mask_of(source) if tf.is_tensor(source) else None)


def with_mask(tensor: Any, mask: Any | None) -> Any:
    """Returns a tensor, with a mask where there is one."""
    if mask is not None:
        keras.src.backend.set_keras_mask(tensor, mask)
    return tensor


_LIBRARIES = ("keras", "keras_hub")
_NOT_OF_AUTHORS = (
    *_LIBRARIES,
    *("builtins", "functools", "mgpu_tf", "ml_dtypes", "numpy", "tensorflow"),
)
# What Keras and TensorFlow, by `tf.zeros`, set on tensors.
_NOT_SET_BY_AUTHORS = ("_keras_logits", "_keras_mask", "_is_zeros_tensor")
# The operations whose inputs Keras's crossentropies take for logits.
_OF_LOGITS = {"Sigmoid": tf.sigmoid, "Softmax": tf.nn.softmax}


def taken_apart(
    tensor: tf.Tensor,
) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tf.Tensor]]:
    """Returns what a tensor is moved as, and what makes it of that again.

    Keras computes crossentropies of the logits of a sigmoid or a softmax, which
    have a gradient where probabilities have none any more. It finds them beside
    the probabilities, or by the operation. So logits are moved, and the
    activation is computed again.
    """
    logits = getattr(tensor, "_keras_logits", None)
    activation, given = None, logits
    # A softmax of one axis is over the rows, which are moved.
    if tf.is_symbolic_tensor(tensor) and (tensor.shape.rank or 0) > 1:
        activation = _OF_LOGITS.get(tensor.op.type)
        given = next(iter(tensor.op.inputs), None)
    if activation is not None and (logits is None or logits is given):
        # A pipeline keeps the function, and not the graph of the tensor.
        beside = logits is not None

        def activated(moved: Sequence[tf.Tensor]) -> tf.Tensor:
            outputs = activation(moved[0])
            if beside:
                outputs._keras_logits = moved[0]
            return outputs

        return [given], activated
    if logits is None:
        return [tensor], lambda moved: moved[0]

    def with_logits(moved: Sequence[tf.Tensor]) -> tf.Tensor:
        outputs = tf.identity(moved[0])
        outputs._keras_logits = moved[1]
        return outputs

    return [tensor, logits], with_logits


def carried(
    tensor: tf.Tensor, move: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns a tensor that was moved, with its mask and its logits.

    Args:
        tensor: What a layer may have made.
        move: Moves a tensor, such as to other replicas.

    Raises:
        ConfigurationError: The author has set something on it.
    """
    names = attributes_of_author(tensor)
    if names:
        raise ConfigurationError(
            "Tensors that move between replicas have no attributes of your "
            f"own. Received: the attribute {names[0]!r} of a tensor of shape "
            f"{tensor.shape}. Return what it holds as another output."
        )
    parts, together = taken_apart(tensor)
    moved = together(list(map(move, parts)))
    mask = mask_of(tensor)
    return moved if mask is None else with_mask(moved, move(mask))


def set_mask(tensor: tf.Tensor, mask: Any) -> None:
    """Gives a tensor a mask, or none."""
    if mask is not None:
        keras.src.backend.set_keras_mask(tensor, mask)


def mask_of_table(
    layer: keras.layers.ReversibleEmbedding, words: tf.Tensor
) -> tf.Tensor | None:
    """Returns the mask that a tied embedding gives what it looks up.

    It does so in its `call`; its own `compute_mask` returns None.
    """
    own = keras.layers.ReversibleEmbedding
    return super(own, layer).compute_mask(words)


def kept_shares(model: keras.Model) -> dict[int, float]:
    """Returns by identity how much of a moving statistic a step keeps."""
    own = keras.layers.BatchNormalization
    return {
        id(variable): layer.momentum
        for layer in layers_of(model)
        if isinstance(layer, own) and type(layer).call is own.call
        for variable in (layer.moving_mean, layer.moving_variance)
    }


def sees_every_batch(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a user's callback has something to do at each batch.

    Keras's own callbacks are made for several steps in one execution, but for
    those that count the batches: `save_freq` of some, `update_freq` of others.
    """
    hooks = ["on_train_batch_begin", "on_train_batch_end"]
    if not isinstance(callback, keras.callbacks.LambdaCallback):
        hooks += ["on_batch_begin", "on_batch_end"]
        own = vars(callback).keys().isdisjoint(hooks)
        if own and type(callback).__module__.startswith("keras."):
            counts = ("save_freq", "update_freq")
            of_each = [getattr(callback, name, "epoch") for name in counts]
            return any(isinstance(every, int) and every for every in of_each)
    return not all(is_default(getattr(callback, hook)) for hook in hooks)


def take_restored_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that `BackupAndRestore` has restored, once."""
    epoch = model._initial_epoch
    model._initial_epoch = None
    return epoch


def communicates(model: keras.Model) -> bool:
    """Returns whether replicas exchange values in a forward pass.

    Statistics over all replicas do, and losses whose denominator is known
    only when weights or masks are summed.
    """
    if synchronized_statistics(model):
        return True
    if any(getattr(layer, "mask_zero", False) for layer in layers_of(model)):
        return True
    if any(
        isinstance(layer, keras.layers.Masking) for layer in layers_of(model)
    ):
        return True
    container = compiled_loss(model)
    losses = [] if container is None else container._flat_losses
    return any(
        term.loss.reduction == "mean_with_sample_weight"
        or _masks_itself(term.loss)
        for term in losses
    )


def _masks_itself(loss: keras.losses.Loss) -> bool:
    """Returns whether a loss of Keras sets a mask on what it returns."""
    if isinstance(loss, keras.losses.Circle):
        return True
    return getattr(loss, "_fn_kwargs", {}).get("ignore_class") is not None


_AUGMENTATION = "keras.src.layers.preprocessing.image_preprocessing"
_OF_KEYS = (
    keras.layers.CategoryEncoding,
    keras.layers.HashedCrossing,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
)


def is_by_row(layer: keras.layers.Layer) -> bool:
    """Returns whether it is known that a layer keeps rows apart.

    That is so for the few of Keras's whose operations do not prove it: strings
    and tables, images that are moved, and a normalization by the statistics of
    the batch, which are those of a replica, or are exchanged. See
    `have_features` for what they are called with. Any other layer is proven by
    its operations, or is computed of all rows, and so is one of these whose
    `call` was replaced.
    """
    kind = type(layer)
    if not is_unpatched(layer, "call"):
        return False
    if kind is keras.layers.TextVectorization:
        return _is_text_by_row(layer.get_config())
    if kind is keras.layers.BatchNormalization:
        return layer.axis == -1 or layer.axis >= 1
    if kind.__module__.startswith(_AUGMENTATION):
        return kind not in (keras.layers.CutMix, keras.layers.MixUp)
    # Though replicas may send each other what they look up in a table.
    return kind in _OF_KEYS or kind is ShardedEmbedding


def _is_text_by_row(config: dict[str, Any]) -> bool:
    """Returns whether texts become rows of a length that they do not set."""
    own = any(map(callable, (config["standardize"], config["split"])))
    longest = config["output_mode"] == "int" and (
        config["output_sequence_length"] is None
    )
    return not (own or longest or config["ragged"])


def own_loss_instead(
    layer: keras.layers.Layer, before: tf.Tensor, loss: tf.Tensor
) -> None:
    """Counts a value among the losses of those that have added another.

    Args:
        layer: It has added the other, or a layer inside of it has.
        before: A loss in a scope.
        loss: What takes its place there.
    """
    for each in (layer, *inner_layers(layer)):
        if id(before) in each._loss_ids:
            each._loss_ids.add(id(loss))


def loss_ids(layer: keras.layers.Layer) -> set[int]:
    """Returns by what a layer knows the losses that it has added."""
    return layer._loss_ids


def inner_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layers inside of a layer, at all depths."""
    return [part for part in layer._flatten_layers() if part is not layer]


def float_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns all variables of a model that gradients can be taken of."""
    weights = [v for layer in layers_of(model) for v in layer.variables]
    return list(
        {
            id(weight): weight
            for weight in weights
            if keras.backend.is_float_dtype(weight.dtype)
        }.values()
    )


def layers_support_jit(model: keras.Model) -> bool:
    """Returns whether XLA can compile all layers of a model."""
    return all(layer.supports_jit for layer in layers_of(model))


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model, nested ones included."""
    return list(model._flatten_layers())


def functions_of(
    layers: list[keras.layers.Layer],
) -> list[keras.Operation]:
    """Returns the functions of `keras.ops` that functional models call."""
    found = {
        id(each): each
        for layer in layers
        if isinstance(layer, keras.src.models.Functional)
        for each in layer.operations
        if not isinstance(each, keras.layers.Layer)
    }
    return list(found.values())


def have_features(layer: keras.layers.Layer, rows: Iterable[Any]) -> bool:
    """Returns whether rows have the axes that a layer works on.

    A layer that `is_by_row` mixes rows where there is no other axis: one number
    for each row is normalized or counted over the rows, three axes are taken
    for one image, and a list of keys for one tensor.

    Args:
        layer: The layer.
        rows: Its inputs that have rows.
    """
    ranks = [row.shape.rank or 0 for row in rows]
    if type(layer).__module__.startswith(_AUGMENTATION):
        return max(ranks, default=4) > 3
    counts = getattr(layer, "output_mode", "int") not in ("int", "one_hot")
    normalizes = isinstance(layer, keras.layers.BatchNormalization)
    joins = isinstance(layer, _OF_KEYS) and len(ranks) > 1
    if joins and not isinstance(layer, keras.layers.HashedCrossing):
        return False
    return min(ranks, default=2) > (counts or normalizes)


def is_graph_of_layers(layer: keras.layers.Layer) -> bool:
    """Returns whether the call of a model is that of its layers, no more."""
    own = keras.src.models.Functional.call, keras.Sequential.call
    return (
        isinstance(layer, keras.Model)
        and type(layer).call in own
        and is_unpatched(layer, "call")
        and not any(map(wrote_around_call, layer.layers))
    )


def wrote_around_call(layer: keras.layers.Layer) -> bool:
    """Returns whether neither Keras nor keras-hub wrote a `__call__`."""
    library = type(layer).__call__.__module__.partition(".")[0]
    return library not in _LIBRARIES


def is_of_library(layer: keras.layers.Layer) -> bool:
    """Returns whether Keras or keras-hub wrote a layer, and all inside it.

    Args:
        layer: A layer, or a function of `keras.ops` in a functional model.
    """
    inner = [layer]
    if isinstance(layer, keras.layers.Layer):
        inner = list(layer._flatten_layers())
    return all(
        type(each).__module__.partition(".")[0] in _LIBRARIES for each in inner
    )


def attributes_of_author(tensor: Any) -> list[str]:
    """Returns the names of what an author has set on a tensor of a graph."""
    if not tf.is_symbolic_tensor(tensor):
        return []
    return [name for name in vars(tensor) if name not in _NOT_SET_BY_AUTHORS]


def objects_of(layers: list[keras.layers.Layer]) -> list[Any]:
    """Returns the objects of the author's that layers have as attributes."""
    found = {
        id(value): value
        for layer in layers
        for value in vars(layer).values()
        if not isinstance(value, type | types.FunctionType | types.ModuleType)
        and hasattr(value, "__dict__")
        and type(value).__module__.partition(".")[0] not in _NOT_OF_AUTHORS
    }
    return list(found.values())


def tensors_left_in(layer: keras.layers.Layer) -> set[int]:
    """Returns the ids of tensors of a graph in attributes, inner ones too.

    Those of a layer, and of the objects that it has. A layer of Keras's own
    leaves none.
    """
    layers = [
        each
        for each in layer._flatten_layers()
        if not type(each).__module__.startswith("keras.src.layers")
    ]
    left = [
        value
        for each in (*layers, *objects_of(layers))
        for value in vars(each).values()
    ]
    found = set()
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
        elif tf.is_symbolic_tensor(value):
            found.add(id(value))
    return found


def snapshot(
    layers: list[keras.layers.Layer], objects: Iterable[Any] = ()
) -> Callable[[], None]:
    """Returns what puts back attributes as they are now.

    Args:
        layers: The layers that have them.
        objects: Other objects that have some.
    """
    attributes = [
        (vars(each), dict(vars(each))) for each in (*layers, *objects)
    ]
    losses = [(ids, set(ids)) for ids in map(loss_ids, layers)]

    def put_back() -> None:
        for ids, known in losses:
            ids.clear()
            ids |= known
        for now, before in attributes:
            same = all(now.get(name) is before[name] for name in before)
            if not same or len(now) != len(before):
                now.clear()
                now.update(before)

    return put_back


def mask_of(tensor: Any) -> Any | None:
    """Returns the mask that layers attached to a tensor, None without one."""
    return keras.src.backend.get_keras_mask(tensor)


def in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the value or the list that Keras's `evaluate` has."""
    return model._flatten_metrics_in_order(logs)


def overrides(model: keras.Model, method: str) -> bool:
    """Returns whether the author of a model wrote a method of Keras anew."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def delegate_calls(
    model: keras.Model,
    names: Sequence[str],
    owner: weakref.ref[Any],
    refusal: Callable[[str], str] | None = None,
) -> None:
    """Delegates methods of a model to another object, while that lives.

    Args:
        model: The model, not its class.
        names: The methods.
        owner: Whose methods of these names are called.
        refusal: Returns what is said of a method where the owner is gone; by
            default the model's own is called.
    """

    def delegated(name: str) -> Callable[..., Any]:
        own = getattr(type(model), name)

        @functools.wraps(own)
        def method(*arguments: Any, **named: Any) -> Any:
            found = owner()
            if found is None:
                if refusal is not None:
                    raise ConfigurationError(refusal(name))
                return own(made(), *arguments, **named)
            return getattr(found, name)(*arguments, **named)

        return method

    made = weakref.ref(model)
    for name in names:
        object.__setattr__(model, name, delegated(name))


def has_own_loss(model: keras.Model) -> bool:
    """Returns whether its author wrote what a step minimizes.

    `compute_loss`, or the `losses` that Keras's adds to it.
    """
    return overrides(model, "compute_loss") or overrides(model, "losses")


def wrote(model: keras.Model, method: str) -> bool:
    """Returns whether neither Keras nor keras-hub wrote a method of a model."""
    library = getattr(type(model), method).__module__.partition(".")[0]
    return overrides(model, method) and library not in _LIBRARIES


def handles_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether its author wrote what sees gradients before updates."""
    return applies_itself(optimizer) or _wrote(optimizer, "_clip_gradients")


def applies_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether its author wrote what a step calls."""
    return _wrote(optimizer, "apply") or _wrote(optimizer, "apply_gradients")


def writes_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether its author wrote how updates are added to weights."""
    methods = ("assign", "assign_add", "assign_sub")
    return any(_wrote(optimizer, method) for method in methods)


def _wrote(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    module = getattr(type(optimizer), method).__module__
    return not module.startswith("keras.")


def is_within_own_gradient() -> bool:
    """Returns whether `tf.custom_gradient` calls its function now.

    It gives a gradient to the variables that are read there, and to no other
    tensor. Whoever looks for variables keeps what is shown here.
    """
    with tf.init_scope():
        shown = types.SimpleNamespace(handle=tf.constant(0))
    before = sys.getrefcount(shown)
    pywrap_tfe.TFE_Py_VariableWatcherVariableAccessed(shown)
    return sys.getrefcount(shown) > before


def gradient_given(op: tf.Operation) -> Callable[..., Any] | None:
    """Returns the gradient that an author gave an operation of a graph.

    Args:
        op: An operation, such as `tf.custom_gradient` makes.

    Returns:
        A function of the operation and of what flows back to its outputs; None
        where TensorFlow, Keras or this package gave it.
    """
    attributes = op.node_def.attr
    if "_gradient_op_type" not in attributes:
        return None
    name = attributes["_gradient_op_type"].s.decode()
    if not name.startswith("CustomGradient-"):
        return None
    function = tf_ops.get_gradient_function(op)
    by_tape = _closed_over(function)["tape_grad_fn"]
    author = _closed_over(by_tape)["grad_fn"].__module__ or ""
    known = author.startswith(("tensorflow.", "keras.", "mgpu_tf."))
    return None if known else function


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def is_within_compiled_convolution() -> bool:
    """Returns whether Keras computes a convolution by a function of XLA now.

    It makes a function for each such call.
    """
    conv = tf_nn.conv.__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in conv.co_consts:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is not None and caller.f_code is not conv


def learning_rates(model: keras.Model) -> list[float]:
    """Returns the learning rates of the optimizers that a model holds."""
    rates = [
        # One that is made of others has none.
        getattr(part, "learning_rate", None)
        for optimizer in optimizers_of(model)
        for part in parts(optimizer)
    ]
    return [
        float(keras.ops.convert_to_numpy(rate))
        for rate in rates
        if rate is not None
    ]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that a model or a layer of it holds.

    The compiled one is the first; lists and dicts of them are looked into.
    """
    found: dict[int, keras.optimizers.Optimizer] = {}

    def look(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found[id(value)] = value
        elif isinstance(value, dict):
            for part in value.values():
                look(part)
        elif isinstance(value, list | tuple):
            for part in value:
                look(part)

    look(model.optimizer)
    for layer in layers_of(model):
        for name, value in vars(layer).items():
            # Keras's own lists of layers and variables start like this.
            if not name.startswith("_") or name == "_optimizer":
                look(value)
    return list(found.values())


def row_states(model: keras.Model) -> list[keras.Variable]:
    """Returns what stateful layers keep for each row of a batch.

    Keras does not count it among a model's variables.
    """
    return [
        state
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
        for state in keras.tree.flatten(layer.states)
        if state is not None
    ]


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics of a model, and those that it does not list.

    A model whose author wrote the property `metrics` anew may hold others.
    """
    held = [metric for layer in layers_of(model) for metric in layer._metrics]
    every = {id(metric): metric for metric in [*model.metrics, *held]}
    return list(every.values())


def parts_of(variables: Iterable[keras.Variable]) -> set[int]:
    """Returns the ids of TensorFlow's variables behind those of Keras.

    Behind one there is a variable on each replica.
    """
    return {id(part) for part in _parts(variables)}


def handles_of(variables: Iterable[keras.Variable]) -> set[int]:
    """Returns the ids of the handles of what `parts_of` is about."""
    return {id(part.handle) for part in _parts(variables)}


def _parts(variables: Iterable[keras.Variable]) -> Iterator[Any]:
    strategy = tf.distribute.get_strategy()
    for variable in variables:
        yield from strategy.experimental_local_results(stored(variable))


def random_layers(
    model: keras.Model,
) -> list[tuple[keras.layers.Layer, keras.Variable]]:
    """Returns the layers that may draw, with their states `[seed, count]`."""
    return [
        (layer, generator.state)
        for layer in layers_of(model)
        for generator in layer._seed_generators
    ]


def tracked_generators(model: keras.Model) -> list[Any]:
    """Returns the generators of random seeds that layers of a model have."""
    return [g for layer in layers_of(model) for g in layer._seed_generators]


@contextlib.contextmanager
def seeds_replaced(
    generators: Iterable[Any], seed_of: Callable[[Any], Any]
) -> Iterator[None]:
    """Lets generators give other seeds, from the state that they have.

    Args:
        generators: Generators, while a step is traced; None among them is
            left out.
        seed_of: Called with the seed of a draw; returns what is given.
    """

    def instructions(generator: Any) -> dict[str, Any]:
        own = generator.next
        return {"next": lambda ordered=True: seed_of(own(ordered=ordered))}

    unique = {id(each): each for each in generators if each is not None}
    with _replaced(unique.values(), instructions):
        yield


def global_seed_of(strategy: tf.distribute.Strategy) -> Any:
    """Returns the state of the generator of unseeded draws, if there is one.

    A generator that was made outside of the strategy, whose state replicas
    cannot write, is replaced by one that goes on from there.
    """
    generator = global_seed_generator()
    if generator is None:
        return None
    state = generator.state
    if not strategy.extended.variable_created_in_scope(state.value):
        with strategy.scope():
            inside = keras.random.SeedGenerator(0)
            inside.state.assign(state.numpy())
        lend_global_seed(inside)
        state = inside.state
    return state


def global_seed_state(*, create: bool = False) -> Any:
    """Returns the state of the generator behind `keras.random` and no seed.

    Args:
        create: Whether to make the generator where nothing has used it yet.

    Returns:
        The state, None where there is no generator.
    """
    seeds = keras.src.random.seed_generator
    known = keras.src.backend.common.global_state.get_global_attribute(
        seeds.GLOBAL_SEED_GENERATOR
    )
    if known is None and not create:
        return None
    return seeds.global_seed_generator().state


def given_seed() -> int | None:
    """Returns what `keras.utils.set_random_seed` was given last, if any."""
    return keras.src.utils.rng_utils.get_random_seed()


def give_seed(seed: int) -> None:
    """Sets what `given_seed` returns, and no generator.

    Args:
        seed: As for `keras.utils.set_random_seed`.
    """
    keras.src.backend.common.global_state.set_global_attribute(
        keras.src.utils.rng_utils.GLOBAL_RANDOM_SEED, seed
    )


def global_seed_generator() -> Any:
    """Returns the generator behind `keras.random` and no seed, if any."""
    seeds = keras.src.random.seed_generator
    return keras.src.backend.common.global_state.get_global_attribute(
        seeds.GLOBAL_SEED_GENERATOR
    )


def lend_global_seed(generator: Any) -> None:
    """Gives this thread the generator of another one.

    A replica is a thread, where Keras would make one of its own.
    """
    seeds = keras.src.random.seed_generator
    keras.src.backend.common.global_state.set_global_attribute(
        seeds.GLOBAL_SEED_GENERATOR, generator
    )


def grow_scale(scaler: keras.optimizers.LossScaleOptimizer) -> None:
    """Counts a finite step; doubles the scale after some in a row."""
    due = tf.equal(scaler.step_counter + 1, scaler.dynamic_growth_steps)
    factor = tf.where(due, 2.0, 1.0)
    scaler.dynamic_scale.assign(scaler.dynamic_scale * factor)
    scaler.step_counter.assign(
        tf.where(due, 0 * scaler.step_counter, scaler.step_counter + 1)
    )


def shrink_scale(scaler: keras.optimizers.LossScaleOptimizer) -> None:
    """Halves the scale after a step that was not finite."""
    scaler.step_counter.assign(0)
    scaler.dynamic_scale.assign(scaler.dynamic_scale * 0.5)


def micro_steps(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Returns how many gradients the optimizer was given."""
    return tf.convert_to_tensor(optimizer._iterations.value)


def count_micro_step(optimizer: keras.optimizers.Optimizer) -> None:
    """Counts a gradient that was accumulated only. Outside of replicas."""
    optimizer._iterations.assign_add(1)


def strategy_of(
    optimizer: keras.optimizers.Optimizer,
) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def accumulators(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable] | None = None,
) -> list[keras.Variable]:
    """Returns where the optimizer accumulates, for each variable.

    Args:
        optimizer: An optimizer that accumulates.
        variables: Some of what it is for; all by default, none where it is
            not built.
    """
    if variables is None:
        return list(getattr(optimizer, "_accumulated_gradients", []))
    return [
        optimizer._accumulated_gradients[optimizer._get_variable_index(v)]
        for v in variables
    ]


def update_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Moves the averages of the weights on. On a replica."""

    def update() -> None:
        optimizer._update_model_variables_moving_average(
            optimizer._trainable_variables
        )

    strategy = tf.distribute.get_strategy()
    if kind_of(strategy).splits:
        turns.merged(_update_parts_of_averages, [optimizer])
    elif kind_of(strategy).stored_once:
        turns.merged(lambda _: update())
    else:
        update()


def _update_parts_of_averages(
    strategy: tf.distribute.Strategy, optimizer: keras.optimizers.Optimizer
) -> None:
    """Moves averages of split weights on, each replica its parts."""
    begun = tf.not_equal(optimizer.iterations, 0)
    for variable, average in zip(
        optimizer._trainable_variables,
        optimizer._model_variables_moving_average,
        strict=True,
    ):
        if average is None:
            continue
        momentum = tf.cast(begun, average.dtype) * optimizer.ema_momentum

        def move(part: Any, weight: Any, share: tf.Tensor = momentum) -> None:
            part.assign(share * part + (1 - share) * weight)

        strategy.extended.update(
            average.value, move, args=(variable.value,), group=False
        )


def overwrite(optimizer: keras.optimizers.Optimizer) -> None:
    """Writes the averages over the weights. Outside of replicas."""
    variables = optimizer._trainable_variables
    optimizer._overwrite_model_variables_with_average_value(variables)
    constrain(variables)


def constrain(variables: Iterable[keras.Variable]) -> None:
    """Applies the constraints of weights. Outside of replicas."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


@contextlib.contextmanager
def engine_order(
    optimizer: keras.optimizers.Optimizer,
    sent: Callable[[Any, list[Any], list[Any]], list[Any]] | None = None,
    clipped: Callable[[Any, list[Any], list[Any]], list[Any]] | None = None,
    moved: Callable[[Any, list[Any], list[Any]], bool] | None = None,
    done: Callable[[list[Any]], None] | None = None,
    overwrite: Callable[[keras.Variable, Any], None] | None = None,
) -> Iterator[None]:
    """Makes an optimizer clip, apply and average only, while traced.

    In a replica Keras's TensorFlow optimizer sums gradients over replicas as
    the last thing before the update, after clipping, and decides there about
    accumulation and about overwriting weights with averages. The engine does
    the first before and the others outside of replicas.

    Args:
        optimizer: An optimizer; those that it wraps included.
        sent: Takes an optimizer, clipped gradients and their variables;
            returns the gradients that it applies.
        clipped: Clips by norms in place of Keras. Takes an optimizer,
            gradients and their variables.
        moved: Updates in place of Keras, as `clipped`; whether it has done so.
        done: Takes the variables that were updated.
        overwrite: Writes a gradient over its variable, where Keras does so,
            in place of the variable's `assign`.
    """

    def overwritten(gradients: Any, variables: Any) -> tuple[Any, Any]:
        left: list[tuple[Any, Any]] = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if not is_overwritten(variable):
                left.append((gradient, variable))
            elif overwrite is None:
                variable.assign(gradient)
            else:
                overwrite(variable, gradient)
        return [gradient for gradient, _ in left], [v for _, v in left]

    def instructions(part: keras.optimizers.Optimizer) -> dict[str, Any]:
        def clip_apply_average(gradients: Any, variables: Any) -> None:
            by_norm = part.clipnorm or part.global_clipnorm
            if clipped is None or not by_norm:
                gradients = part._clip_gradients(gradients)
            else:
                gradients = clipped(part, gradients, variables)
            if sent is not None:
                gradients = sent(part, gradients, variables)
            part._apply_weight_decay(variables)
            if moved is None or not moved(part, gradients, variables):
                update_by_steps(part, gradients, variables)
            if part.use_ema:
                update_averages(part)
            if done is not None:
                done(variables)

        return {
            "_all_reduce_sum_gradients": lambda pairs: pairs,
            "_backend_apply_gradients": clip_apply_average,
            "_overwrite_variables_directly_with_gradients": overwritten,
        }

    with _replaced(parts(optimizer), instructions):
        yield


def update_by_steps(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Any],
    variables: list[keras.Variable],
) -> None:
    """Calls an optimizer's `update_step` for each variable."""
    optimizer._backend_update_step(
        gradients, variables, optimizer.learning_rate
    )


def _counted_exactly(counter: Any) -> dict[str, Any]:
    """Counts by one operation of the variable's own.

    Keras counts by `assign(self + 1)`, and a count of another worker that
    comes between the two is lost on the parameter server.
    """
    return {"assign_add": lambda value: counter.value.assign_add(value)}


@contextlib.contextmanager
def applied_by(
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[[keras.optimizers.Optimizer, list[Any], list[Any]], None],
) -> Iterator[None]:
    """Hands clipped gradients to another than the optimizer, while traced.

    Args:
        optimizer: An optimizer; those that it wraps included.
        apply: Takes the optimizer that was to apply them, the gradients and
            their variables; counts the update, and constrains the weights.
    """
    wrappers = [p for p in parts(optimizer) if hasattr(p, "optimizers")]
    appliers = [p for p in parts(optimizer) if not hasattr(p, "optimizers")]

    def instructions(part: keras.optimizers.Optimizer) -> dict[str, Any]:
        def clip_and_hand_over(gradients: Any, variables: Any) -> None:
            apply(part, part._clip_gradients(gradients), variables)

        return {"_backend_apply_gradients": clip_and_hand_over}

    def uncounted(counter: Any) -> dict[str, Any]:
        return {"assign_add": lambda value: None}

    constrained = [v for v in optimizer._trainable_variables if v.constraint]
    with (
        _replaced([part._iterations for part in wrappers], _counted_exactly),
        _replaced([part._iterations for part in appliers], uncounted),
        _replaced(appliers, instructions),
        _replaced(constrained, lambda _: {"_constraint": None}),
    ):
        yield


def counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns where an optimizer counts the gradients it was given."""
    return optimizer._iterations


def own_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Returns what an optimizer keeps for all weights together.

    That is its attributes; what belongs to one weight is in a list.
    """
    held = vars(optimizer).values()
    return [value for value in held if isinstance(value, keras.Variable)]


def count_update(
    optimizer: keras.optimizers.Optimizer,
    steps: int,
    elsewhere: list[tuple[keras.Variable, tf.Tensor]],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Counts an update, and does what an optimizer does once for each.

    Args:
        optimizer: An optimizer that wraps no other.
        steps: Gradients in an update.
        elsewhere: Values for those of `own_variables` that are only read.

    Returns:
        What `own_variables` are for this update, and its learning rate.
    """
    held = optimizer._iterations
    number = tf.convert_to_tensor(held.value) + (steps - 1)
    held.value.assign_add(steps)
    strategy = tf.distribute.get_strategy()
    once = {"_distributed_tf_update_step": lambda *_: None}
    with (
        with_values([(held, number), *elsewhere]),
        _replaced([optimizer], lambda _: once),
    ):
        # Keras's method needs the context of a replica.
        with tf.distribute.ReplicaContext(strategy, 0):
            optimizer._backend_update_step([], [], None)
        values = [
            tf.convert_to_tensor(v.value) for v in own_variables(optimizer)
        ]
        rate = tf.convert_to_tensor(optimizer.learning_rate)
    return values, rate


def update_weights(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Any],
    variables: list[keras.Variable],
    values: list[tf.Tensor],
    rate: tf.Tensor,
) -> None:
    """Makes the update of some weights and what the optimizer has for them.

    Args:
        optimizer: An optimizer that wraps no other.
        gradients: One for each variable, clipped.
        variables: Some of its variables.
        values: From `count_update`.
        rate: From `count_update`.
    """
    strategy = tf.distribute.get_strategy()
    with _for_this_update(optimizer, values, rate):
        with tf.distribute.ReplicaContext(strategy, 0):
            optimizer._apply_weight_decay(variables)
        pairs = [
            (gradient, variable.value)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        rate = optimizer.learning_rate
        optimizer._distributed_tf_update_step(strategy, pairs, rate)


def written_in_steps(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights that an update writes more than once.

    Weight decay, averages and constraints are writes of their own. Not tables
    of which only rows are looked up, as they would be read as a whole.
    """
    several = any(
        part.weight_decay or part.use_ema for part in parts(model.optimizer)
    )
    looked_up = {
        id(weight)
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Embedding | ShardedEmbedding)
        for weight in layer.weights
    }
    return [
        variable
        for variable in model.trainable_variables
        if (several or variable.constraint is not None)
        and id(variable) not in looked_up
    ]


def average_weights(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    values: list[tf.Tensor],
    overwrite: tf.Tensor,
) -> None:
    """Moves the averages of some weights on.

    Args:
        optimizer: An optimizer that wraps no other.
        variables: Some of its variables.
        values: From `count_update`.
        overwrite: Whether the averages are written over the weights.
    """
    if not optimizer.use_ema:
        return
    averages = [
        optimizer._model_variables_moving_average[
            optimizer._get_variable_index(variable)
        ]
        for variable in variables
    ]
    some = {"_model_variables_moving_average": averages}
    with (
        _for_this_update(optimizer, values, None),
        _replaced([optimizer], lambda _: some),
    ):
        optimizer._update_model_variables_moving_average(variables)
    if not optimizer.ema_overwrite_frequency:
        return
    for variable, average in zip(variables, averages, strict=True):
        if average is not None:
            held = variable.value
            held.assign(tf.where(overwrite, average.value, held))


@contextlib.contextmanager
def _for_this_update(
    optimizer: keras.optimizers.Optimizer,
    values: list[tf.Tensor],
    rate: tf.Tensor | None,
) -> Iterator[None]:
    """Gives what an optimizer keeps for all weights values for a while."""
    pairs = zip(own_variables(optimizer), values, strict=True)
    given = {}
    if not isinstance(optimizer._learning_rate, keras.Variable):
        given = {"_get_current_learning_rate": lambda: rate}
    with with_values(list(pairs)), _replaced([optimizer], lambda _: given):
        yield


@contextlib.contextmanager
def with_values(
    pairs: list[tuple[keras.Variable, Any]],
) -> Iterator[None]:
    """Lets variables be tensors, or what is like a variable, for a while."""
    given = {id(variable): value for variable, value in pairs}
    with _replaced(
        [variable for variable, _ in pairs],
        lambda variable: {"_value": given[id(variable)]},
    ):
        yield


@contextlib.contextmanager
def built_beside(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[None]:
    """Lets an optimizer create what belongs to a weight beside it.

    What belongs to no weight goes beside the optimizer's counter. Keras does
    so for most of it; the factors of Adafactor and the product of Nadam would
    be on any server.

    Args:
        optimizer: An optimizer; those that it wraps included.
    """

    def instructions(part: keras.optimizers.Optimizer) -> dict[str, Any]:
        own = part.build

        def build(variables: list[keras.Variable]) -> None:
            announced = _Announcing(variables, part._iterations)

            def create(next_creator: Any, **options: Any) -> Any:
                if "colocate_with" not in options:
                    options["colocate_with"] = announced.current.value
                return next_creator(**options)

            with tf.variable_creator_scope(create):
                own(announced)

        return {"build": build}

    with _replaced(parts(optimizer), instructions):
        yield


class _Announcing(list):
    """A list that knows which of its items a loop is at."""

    def __init__(self, items: Iterable[Any], otherwise: Any) -> None:
        super().__init__(items)
        self._otherwise = self.current = otherwise

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.current = item
            yield item
        self.current = self._otherwise


@contextlib.contextmanager
def caught_by(
    optimizers: Iterable[keras.optimizers.Optimizer],
    apply: Callable[
        [keras.optimizers.Optimizer, list[Any], list[keras.Variable], bool],
        None,
    ],
) -> Iterator[None]:
    """Lets another function apply the gradients that optimizers are given.

    Args:
        optimizers: Whose `apply` and `apply_gradients` are caught.
        apply: Takes the optimizer, the gradients, their variables, and
            whether `apply_gradients` was called.
    """
    with _replaced(optimizers, lambda each: _catching(each, apply)):
        yield


def catch_from_now_on(
    optimizers: Iterable[keras.optimizers.Optimizer],
    apply: Callable[
        [keras.optimizers.Optimizer, list[Any], list[keras.Variable], bool],
        None,
    ],
) -> None:
    """As `caught_by`, for as long as the optimizers live."""

    def method(name: str) -> Callable[..., Any]:
        return lambda optimizer, *args, **kwargs: _catching(optimizer, apply)[
            name
        ](*args, **kwargs)

    for optimizer in optimizers:
        for name in ("apply", "apply_gradients"):
            # Bound: a copy of the optimizer has its own.
            bound = types.MethodType(method(name), optimizer)
            object.__setattr__(optimizer, name, bound)


def _catching(
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[
        [keras.optimizers.Optimizer, list[Any], list[keras.Variable], bool],
        None,
    ],
) -> dict[str, Any]:
    def caught(grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        apply(optimizer, list(grads), list(trainable_variables), False)

    def caught_pairs(grads_and_vars: Any) -> keras.Variable:
        gradients, variables = zip(*grads_and_vars, strict=True)
        apply(optimizer, list(gradients), list(variables), True)
        return optimizer._iterations

    return {"apply": caught, "apply_gradients": caught_pairs}


@contextlib.contextmanager
def applying_itself(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Undoes `caught_by` for an optimizer, inside of it."""
    with _replaced(
        [optimizer],
        lambda part: {
            name: functools.partial(getattr(type(part), name), part)
            for name in ("apply", "apply_gradients")
        },
    ):
        yield


@contextlib.contextmanager
def metric_updates_replaced(
    metrics: Iterable[keras.metrics.Metric], update: Callable[..., Any]
) -> Iterator[None]:
    """Lets metrics be updated in another way, while traced.

    Args:
        metrics: The metrics.
        update: Called with a metric, its own `update_state`, and the arguments.
    """

    def instructions(metric: keras.metrics.Metric) -> dict[str, Any]:
        own = metric.update_state
        return {"update_state": functools.partial(update, metric, own)}

    with _replaced(metrics, instructions):
        yield


def adds_up(
    metric: keras.metrics.Metric,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
) -> bool:
    """Returns whether a metric is one of Keras's, with a function of Keras's.

    What these hold are sums over examples, but where the function takes the
    first axis: a mean over the last one is over rows where there is no other.

    Args:
        metric: The metric.
        arguments: Those of its `update_state`.
        named: Those by name.
    """
    own = is_keras_own(metric) and is_unpatched(
        metric, "update_state", "result", "reset_state"
    )
    if not own or not _is_of_last_axes(metric):
        return False
    function = getattr(metric, "_fn", None)
    if function is None:
        return True
    targets = arguments[0] if arguments else named["y_true"]
    outputs = arguments[1] if len(arguments) > 1 else named["y_pred"]
    ranks = [leaf.shape.rank for leaf in keras.tree.flatten(outputs)]
    own = function.__module__.startswith("keras.")
    own = own and are_aligned(targets, outputs)
    return own and all(rank is not None and rank > 1 for rank in ranks)


def are_aligned(one: Any, other: Any) -> bool:
    """Returns whether Keras puts the rows of two tensors side by side.

    It makes the ranks alike where they differ by one. Otherwise TensorFlow
    broadcasts from the last axis, rows against other rows.
    """
    if not (tf.is_tensor(one) and tf.is_tensor(other)):
        return True  # Structures, which a loss of the author's takes.
    ranks = [each.shape.rank for each in (one, other)]
    return None not in ranks and abs(ranks[0] - ranks[1]) <= 1


# What objects had in place of the methods that are replaced now, oldest first.
_BEFORE: dict[tuple[int, str], list[Any]] = {}


@contextlib.contextmanager
def _replaced(
    objects: Iterable[Any],
    instructions: Callable[[Any], dict[str, Any]],
) -> Iterator[None]:
    """Gives objects other methods for a while, then their own again."""
    own: list[tuple[Any, str, Any]] = []
    try:
        for part in list(objects):
            for name, method in instructions(part).items():
                before = vars(part).get(name)
                own.append((part, name, before))
                _BEFORE.setdefault((id(part), name), []).append(before)
                object.__setattr__(part, name, method)
        yield
    finally:
        for part, name, before in reversed(own):
            _BEFORE[id(part), name].pop()
            if not _BEFORE[id(part), name]:
                del _BEFORE[id(part), name]
            if before is None:
                object.__delattr__(part, name)
            else:
                object.__setattr__(part, name, before)


def parts(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and those that it wraps, each once."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    left = [optimizer]
    while left:
        part = left.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        held = [*vars(part).values(), *getattr(part, "optimizers", ())]
        inner = [o for o in held if isinstance(o, keras.optimizers.Optimizer)]
        left += reversed(inner)
    return list(found.values())


def state_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of an optimizer and of those that it wraps.

    Keras lists no attribute of an optimizer that is built within loss scaling.
    """
    every: list[keras.Variable] = []
    for part in parts(optimizer):
        held = vars(part).values()
        every += part.variables
        every += [v for v in held if isinstance(v, keras.Variable)]
    return list({id(variable): variable for variable in every}.values())


def body_of_function(graph: Any, name: str) -> Any | None:
    """Returns the graph of a function that TensorFlow calls by its name.

    Args:
        graph: A graph that may know the function.
        name: Its name.

    Returns:
        The graph, None where the function is not known here.
    """
    try:
        return getattr(graph._get_function(name), "graph", None)
    except (AttributeError, KeyError):
        return None


def set_integer(op: tf.Operation, name: str, value: int) -> None:
    """Sets an integer attribute of an operation that is being traced."""
    op._set_attr(name, attr_value_pb2.AttrValue(i=value))
