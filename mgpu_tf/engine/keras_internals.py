"""Every private name of Keras that the engine relies on, in one place.

Keras's public interface has no way to build a compiled model's metrics before
the first step, to see one loss at a time, or to apply gradients that are
already reduced. `tests/test_keras_internals.py` fails on the release of Keras
that moves one of the names used here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
        for layer in model._flatten_layers()
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


def mask_of(tensor: Any) -> Any | None:
    """Returns the mask that layers attached to a tensor, None without one."""
    return keras.src.backend.get_keras_mask(tensor)


@contextlib.contextmanager
def gradients_already_reduced(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[None]:
    """Makes the optimizer take gradients as they are while a step is traced.

    In a replica Keras's TensorFlow optimizer sums gradients over replicas as
    the last thing before the update, after clipping. The engine sums them
    first, so inside this context the sum hands its input back.

    Args:
        optimizer: The model's optimizer; optimizers that it wraps included.
    """
    parts = list(_parts(optimizer))
    for part in parts:
        part._all_reduce_sum_gradients = _hand_back
    try:
        yield
    finally:
        for part in parts:
            del part._all_reduce_sum_gradients


def _hand_back(grads_and_vars: Any) -> Any:
    return grads_and_vars


def _parts(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield from _parts(inner)
    for other in getattr(optimizer, "optimizers", ()):
        yield from _parts(other)
