"""Why a model may train to other numbers on several replicas.

    for line in causes_in(model, drew):
        print(line)                        # cause: ..., with the remedy

Each cause is one that docs/guarantees.md knows. That a model has it does not
prove that nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from mgpu_tf._version import __version__
from mgpu_tf.engine import keras_internals
from mgpu_tf.layers import ShardedEmbedding

PREFIX = "cause: "

_NAMED = 5


def causes_in(
    model: keras.Model,
    drew: Sequence[str] = (),
    embedding_gradients: str = "keras",
) -> list[str]:
    """Returns what is known to give a model other numbers on replicas.

    Args:
        model: A model that has been trained.
        drew: What drew random numbers while it was; see `Trajectory`.
        embedding_gradients: What the `Trainer` on several replicas was given.

    Returns:
        A line for each cause, with its remedy; never none.
    """
    found = [
        *_normalization(model),
        *_random(drew),
        *_embeddings(model, embedding_gradients),
        *_few_bits(model),
    ]
    return [PREFIX + line for line in found or [_unknown(model)]]


def _normalization(model: keras.Model) -> Iterator[str]:
    layers = [
        _path(layer)
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not layer.synchronized
        and layer.trainable  # A frozen one takes no statistics of a batch.
    ]
    if layers:
        yield (
            f"BatchNormalization that is not synchronized ({_list(layers)}): "
            "each replica normalizes by its own rows. Remedy: "
            "mgpu_tf.synchronize_batch_normalization(model) in build_model."
        )


def _random(drew: Sequence[str]) -> Iterator[str]:
    if drew:
        yield (
            f"random layers ({_list(drew)}): replicas draw the numbers of "
            "one device but for those that a warning names. Remedy: compare "
            "with their rate set to 0."
        )


def _embeddings(model: keras.Model, gradients: str) -> Iterator[str]:
    tables = [
        _path(layer)
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, keras.layers.Embedding | ShardedEmbedding)
        and layer.trainable
    ]
    if gradients != "summed" or not tables:
        return
    for optimizer in keras_internals.optimizers_of(model):
        if _adds_rows(optimizer):
            continue
        yield (
            "embedding_gradients='summed' adds up the rows of an index that "
            f"comes twice ({_list(tables)}), and {type(optimizer).__name__} "
            "makes another step of their sum than of the rows one by one, as "
            "Keras hands them over. Remedy: compare with "
            "embedding_gradients='keras'."
        )


def _adds_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a sum of rows is to an optimizer what the rows are."""
    clips = (
        optimizer.clipnorm,
        optimizer.global_clipnorm,
        optimizer.clipvalue,
    )
    return type(optimizer) is keras.optimizers.SGD and clips == (None,) * 3


def _few_bits(model: keras.Model) -> Iterator[str]:
    dtypes = {
        layer.compute_dtype for layer in keras_internals.layers_of(model)
    } & {"float16", "bfloat16"}
    if dtypes:
        yield (
            f"computation in {_list(sorted(dtypes))}: each replica rounds its "
            "part of a gradient to few bits. Remedy: compare with the policy "
            "float32, and train with it."
        )


def _unknown(model: keras.Model) -> str:
    return (
        f"none of the known ones is in {model.name}. Try --steps=1, then "
        "leave out layer after layer until it is the same; look for a layer "
        "that mixes the examples of a batch. Send what is left of the model, "
        f"this table and: mgpu_tf {__version__}, tensorflow {tf.__version__}, "
        f"keras {keras.__version__}."
    )


def _path(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name


def _list(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMED
    text = ", ".join(names[:_NAMED])
    return text if more <= 0 else f"{text} and {more} more"
