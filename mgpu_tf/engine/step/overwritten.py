"""Variables that Keras overwrites with their gradient, of float8 layers.

A float8 layer keeps the largest values of its inputs, of its kernel and of the
gradients of its outputs in the last steps, and scales of these (Micikevicius et
al., 2022). Keras gives them as gradients:

    history' = [largest value now, history shifted by one]
    scale'   = of the history of before

So no sum over replicas or parts of a batch is right, but the largest of them.
"""

from __future__ import annotations

import itertools
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.registry import kind_of
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas


def check(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    options: StepOptions,
    *,
    replicas: int,
) -> None:
    """Refuses what is no largest value of rows, and layouts without it.

    Args:
        model: A built model.
        strategy: Where it trains.
        options: How steps are made.
        replicas: How many there are.

    Raises:
        ConfigurationError: A gradient that overwrites a variable cannot be
            made that of the batch.
    """
    variables = list(
        filter(keras_internals.is_overwritten, model.trainable_variables)
    )
    mesh = getattr(strategy, "mesh", None)
    in_parts = replicas > 1 or options.step_parts > 1
    in_parts |= mesh is not None and mesh.pipeline > 1
    if not variables or not in_parts:
        return
    of_keras = keras_internals.variables_of_float8(model)
    for variable in variables:
        if id(variable) not in of_keras:
            raise ConfigurationError(
                "Of a batch in parts, variables that are overwritten with "
                "their gradient belong to float8 layers of Keras. Received: "
                f"{variable.path}, with overwrite_with_gradient=True. Use the "
                "strategy one_device, without step_parts."
            )
    if mesh is not None and (mesh.tensor > 1 or mesh.blocks > 1):
        raise ConfigurationError(
            "Layers in float8 train without 'tensor', and on pipelines whose "
            f"stages are in one process. Received: {variables[0].path} on "
            f"{mesh}. Use 'data' and 'fsdp', or mixed_bfloat16."
        )
    if kind_of(strategy).stored_once and replicas > 1:
        raise ConfigurationError(
            "'central_storage' keeps one copy of variables, which replicas do "
            f"not overwrite. Received: {variables[0].path}, of a layer in "
            "float8. Use 'mirrored'."
        )
    if options.noise_scale:
        raise ConfigurationError(
            "noise_scale measures gradients, and not what float8 layers give "
            f"in their place. Received: {variables[0].path}. Leave it out, or "
            "use mixed_bfloat16."
        )


def contributions(
    gradients: list[Any], variables: list[keras.Variable], replicas: int
) -> list[Any]:
    """Lets new values of variables count once in sums over replicas.

    On a replica.

    Args:
        gradients: This replica's.
        variables: That of each.
        replicas: How many there are.

    Returns:
        The gradients; in place of a new value the largest of all replicas on
        the first one, and zeros on the others.
    """
    over = list(map(keras_internals.is_overwritten, variables))
    if replicas == 1 or not any(over):
        return gradients
    context = tf.distribute.get_replica_context()
    here = tf.one_hot(
        context.replica_id_in_sync_group, replicas, True, False, dtype=tf.bool
    )
    newest = [
        tf.reshape(gradient, [-1])[0]
        for gradient in itertools.compress(gradients, over)
    ]
    every = sum_over_replicas(
        tf.where(here[:, tf.newaxis], tf.stack(newest), 0.0)
    )
    largest = iter(tf.unstack(tf.reduce_max(every, 0)))

    def contribution(gradient: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(gradient, [-1])
        value = tf.concat([next(largest)[tf.newaxis], flat[1:]], 0)
        value = tf.reshape(value, tf.shape(gradient))
        return tf.where(here[0], value, tf.zeros_like(value))

    return [
        contribution(gradient) if each else gradient
        for gradient, each in zip(gradients, over, strict=True)
    ]
