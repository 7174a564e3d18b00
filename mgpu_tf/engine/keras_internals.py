"""Every private name of Keras that the engine relies on, in one place.

Keras's public interface has no way to build a compiled model's metrics before
the first step, to see one loss at a time, or to apply gradients that are
already reduced. `tests/test_keras_internals.py` fails on the release of Keras
that moves one of the names used here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.utils.python_utils import is_default


def build(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Creates the variables of a model, its metrics and its optimizer.

    Args:
        model: A compiled model.
        batch: `(x, y, sample_weight)` as tensors or specs with shape and
            dtype; nothing is computed from their values.
    """
    model._symbolic_build(data_batch=batch)


def build_layers(model: keras.Model, x: Any) -> None:
    """Creates the variables of a model's layers, and nothing else.

    Args:
        model: A model.
        x: Inputs as tensors or specs with shape and dtype.
    """
    inputs = tf.nest.map_structure(
        lambda t: keras.KerasTensor(t.shape, t.dtype.name), x
    )
    keras.src.backend.compute_output_spec(model, inputs, training=False)


def takes_training(model: keras.Model) -> bool:
    """Returns whether the model's `call` has the argument `training`."""
    return model._call_has_training_arg


def compiled_loss(model: keras.Model) -> Any | None:
    """Returns Keras's container of the compiled losses, None without one."""
    return model._compile_loss


def compiled_state(model: keras.Model) -> tuple[int, ...]:
    """Returns a value that changes when the model is compiled again."""
    parts = (model.optimizer, model._compile_loss, model._compile_metrics)
    return tuple(id(part) for part in parts)


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
def compiled_loss_replaced(model: keras.Model, other: Any) -> Iterator[None]:
    """Lets a model use another container of losses while it is traced."""
    own = vars(model)["_compile_loss"]
    vars(model)["_compile_loss"] = other
    try:
        yield
    finally:
        vars(model)["_compile_loss"] = own


def with_losses_replaced(
    compile_loss: Any, replace: Callable[[keras.losses.Loss], Any]
) -> Any:
    """Returns a copy of the container with every loss replaced.

    The model's own container stays as it is.

    Args:
        compile_loss: A built container, from `compiled_loss`.
        replace: Takes a loss, returns what is called in its place.

    Returns:
        The copy; called as `copy(y, y_pred, sample_weight)` it returns the
        sum of the weighted losses, as the original does.
    """
    twin = shallow_copy(compile_loss)
    twin._flat_losses = [
        term._replace(loss=replace(term.loss))
        for term in compile_loss._flat_losses
    ]
    return twin


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


def sees_every_batch(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a user's callback has something to do at each batch.

    Keras's own callbacks are made for several steps in one execution.
    """
    hooks = ["on_train_batch_begin", "on_train_batch_end"]
    if not isinstance(callback, keras.callbacks.LambdaCallback):
        if type(callback).__module__.startswith("keras."):
            return False
        hooks += ["on_batch_begin", "on_batch_end"]
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
        term.loss.reduction == "mean_with_sample_weight" for term in losses
    )


def layers_support_jit(model: keras.Model) -> bool:
    """Returns whether XLA can compile all layers of a model."""
    return all(layer.supports_jit for layer in layers_of(model))


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model, nested ones included."""
    return list(model._flatten_layers())


def mask_of(tensor: Any) -> Any | None:
    """Returns the mask that layers attached to a tensor, None without one."""
    return keras.src.backend.get_keras_mask(tensor)


def in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the value or the list that Keras's `evaluate` has."""
    return model._flatten_metrics_in_order(logs)


def overrides(model: keras.Model, method: str) -> bool:
    """Returns whether the author of a model wrote a method of Keras anew."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the compiled optimizer and those that are attributes."""
    found = [model.optimizer, *vars(model).values()]
    return list(
        {
            id(value): value
            for value in found
            if isinstance(value, keras.optimizers.Optimizer)
        }.values()
    )


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the states, `[seed, count]`, of the model's random layers."""
    return [
        generator.state
        for layer in layers_of(model)
        for generator in layer._seed_generators
    ]


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


def grow_scale(scaler: keras.optimizers.LossScaleOptimizer) -> None:
    """Counts a finite step; doubles the scale after so many in a row."""
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


def accumulators(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> list[keras.Variable]:
    """Returns where the optimizer accumulates, for each variable."""
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
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        tf.distribute.get_replica_context().merge_call(lambda _: update())
    else:
        update()


def overwrite(optimizer: keras.optimizers.Optimizer) -> None:
    """Writes the averages over the weights. Outside of replicas."""
    variables = optimizer._trainable_variables
    optimizer._overwrite_model_variables_with_average_value(variables)
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


@contextlib.contextmanager
def engine_order(
    optimizer: keras.optimizers.Optimizer,
    sent: Callable[[list[Any], list[Any]], list[Any]] | None = None,
) -> Iterator[None]:
    """Makes an optimizer clip, apply and average only, while traced.

    In a replica Keras's TensorFlow optimizer sums gradients over replicas as
    the last thing before the update, after clipping, and decides there about
    accumulation and about overwriting weights with averages. The engine does
    the first before and the others outside of replicas.

    Args:
        optimizer: An optimizer; those that it wraps included.
        sent: Takes clipped gradients and their variables; returns the
            gradients as they are to be applied.
    """

    def instructions(part: keras.optimizers.Optimizer) -> dict[str, Any]:
        def clip_apply_average(gradients: Any, variables: Any) -> None:
            gradients = part._clip_gradients(gradients)
            if sent is not None:
                gradients = sent(gradients, variables)
            part._apply_weight_decay(variables)
            part._backend_update_step(gradients, variables, part.learning_rate)
            if part.use_ema:
                update_averages(part)

        return {
            "_all_reduce_sum_gradients": lambda pairs: pairs,
            "_backend_apply_gradients": clip_apply_average,
        }

    with _replaced(parts(optimizer), instructions):
        yield


@contextlib.contextmanager
def counted_exactly(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[None]:
    """Makes an optimizer count its steps by one operation, while traced.

    Keras counts by `assign(self + 1)`, and a count of another worker that
    comes between the two is lost. The variable's own `assign_add` is one
    operation on the parameter server.

    Args:
        optimizer: An optimizer; those that it wraps included.
    """
    counters = [part._iterations for part in parts(optimizer)]

    def instructions(counter: Any) -> dict[str, Any]:
        return {"assign_add": lambda value: counter.value.assign_add(value)}

    with _replaced(counters, instructions):
        yield


@contextlib.contextmanager
def checked_order(
    optimizer: keras.optimizers.Optimizer,
    check: Callable[[keras.optimizers.Optimizer], None],
) -> Iterator[None]:
    """Calls a check before an optimizer applies in its own order.

    Args:
        optimizer: An optimizer; those that it wraps included.
        check: Takes the optimizer; raises where it must not apply.
    """

    def instructions(part: keras.optimizers.Optimizer) -> dict[str, Any]:
        # Loss scaling comes before anything else is decided.
        scales = isinstance(part, keras.optimizers.LossScaleOptimizer)
        name = "apply" if scales else "_backend_apply_gradients"
        keras_own = getattr(part, name)

        def apply(*arguments: Any, **named: Any) -> None:
            check(optimizer)
            keras_own(*arguments, **named)

        return {name: apply}

    with _replaced(parts(optimizer), instructions):
        yield


@contextlib.contextmanager
def _replaced(
    objects: Iterable[Any],
    instructions: Callable[[Any], dict[str, Any]],
) -> Iterator[None]:
    """Gives objects other methods for a while, then their own again."""
    own: list[tuple[Any, str, Any]] = []
    for part in list(objects):
        for name, method in instructions(part).items():
            own.append((part, name, vars(part).get(name)))
            object.__setattr__(part, name, method)
    try:
        yield
    finally:
        for part, name, before in reversed(own):
            if before is None:
                object.__delattr__(part, name)
            else:
                object.__setattr__(part, name, before)


def parts(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    """Yields an optimizer and those that it wraps."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield from parts(inner)
    for other in getattr(optimizer, "optimizers", ()):
        yield from parts(other)
