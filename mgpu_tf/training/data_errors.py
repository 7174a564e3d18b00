"""Mistakes in data, from the errors of TensorFlow and Keras about them.

They come out of a traced function, many lines long; the line that a user
needs is one of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.errors import ConfigurationError

_LABEL = re.compile(
    r"label value of (-?\d+) which is outside the valid range of (\[.*?\))"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# What Keras says where data and model do not fit together.
_SHAPES = (
    "is incompatible with the layer",
    "incompatible shape",
    "must have rank",
    "must have the same shape",
    "must have the same rank",
    "Structure of inputs",
    "structure of `inputs`",
)


@contextlib.contextmanager
def explained(source: data_lib.Source) -> Iterator[None]:
    """Turns errors about the data into one line about it.

    Args:
        source: The data.

    Raises:
        ConfigurationError: The data does not fit the model.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except tf.errors.InvalidArgumentError as error:
        if data_lib.SIZES_DIFFER in str(error):
            raise ConfigurationError(data_lib.SIZES_DIFFER) from error
        if isinstance(source, data_lib.PreprocessedSource) and (
            "must feed a value for placeholder" in str(error)
        ):
            raise ConfigurationError(
                "On 'parameter_server' a task cannot preprocess with tables, "
                "which are then on the servers. Received: a task whose "
                "preprocessor looks words up in one. Preprocess the data "
                "first, and set preprocessor=None in build_model."
            ) from error
        found = _LABEL.search(str(error))
        if found is None:
            raise
        raise ConfigurationError(
            f"Labels must be in {found[2]}, one for each output of the model. "
            f"Received: the label {found[1]}. Check the labels, or give the "
            "model more outputs."
        ) from error
    except ValueError as error:
        text = _ANSI.sub("", str(error))
        example = source.example()
        if "None values not supported" in text and not _has_targets(example):
            raise ConfigurationError(
                "The loss needs targets. Received: data of inputs alone. Pass "
                "y, or batches of (x, y)."
            ) from error
        if not any(phrase in text for phrase in _SHAPES):
            raise
        lines = [line for line in text.splitlines() if line.strip()]
        said = next(
            (li for li in lines if any(p in li for p in _SHAPES)), lines[0]
        )
        raise ConfigurationError(
            f"The data must fit the model. Received: {_described(example)}; "
            f"Keras says: {said.strip()}"
        ) from error


def _has_targets(example: object) -> bool:
    return isinstance(example, tuple) and len(example) > 1


def _described(example: object) -> str:
    parts = example if isinstance(example, tuple) else (example,)
    shapes = tf.nest.map_structure(
        lambda spec: tuple(spec.shape), list(parts[:2])
    )
    names = ("x", "y")[: len(shapes)]
    return ", ".join(
        f"{name} of shape {shape}"
        for name, shape in zip(names, shapes, strict=True)
    )
