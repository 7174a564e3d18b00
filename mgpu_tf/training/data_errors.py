"""Mistakes in data, from the errors of TensorFlow and Keras about them.

They come out of a traced function, many lines long; the line that a user
needs is one of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.engine.step.calls.whole_layers import AS_MANY_ROWS, ROWS_FOR_EACH
from mgpu_tf.errors import ConfigurationError

_LABEL = re.compile(
    r"label value of (-?\d+) which is outside the valid range of (\[.*?\))"
)
# What TensorFlow says where a batch is unlike the one that was traced.
_UNFIT = re.compile(
    r"(Matrix size-incompatible|Incompatible shapes|Dimension mismatch"
    r"|Input to reshape is a tensor|must be of equal dimensions)[^\n]*"
)
# How it begins where several replicas have found an error.
_ROOTS = re.compile(r"\d+ root error\(s\) found\.\s*\(0\)\s*(?:[A-Z_ ]+:)?")
_NODE = re.compile(r"\{\{[^}]*\}\}\s*")
# An error of this package in a function that a dataset calls.
_MESSAGE = re.compile(r"ConfigurationError: ([^\n]*)")
_ROWS = re.compile(
    rf"{re.escape(AS_MANY_ROWS)}[^\n]*?returns \d+\."
    rf"|{re.escape(ROWS_FOR_EACH)}[^\n]*?\."
)
# What TensorFlow says of a shape whose number of rows is None.
_NO_NUMBER = re.compile(
    r"Expected int(32|64), but got None"
    r"|Failed to convert elements of [(\[][^\n]*\bNone\b[^\n]* to Tensor"
)
# What TensorFlow says of two shapes in a trace.
_UNEQUAL = re.compile(
    r"Dimensions must be equal, but are[^\n]* with input shapes: (\[[^\n]*\])"
)
# What Keras says of targets and outputs in other lists or dicts.
_STRUCTURES = re.compile(
    r"y_true and y_pred have different structures\.\n.*\ny_pred: ([^\n]*)"
)
# What Keras says of a name in `compile`, which it looks up with the first data.
_UNKNOWN = re.compile(r"Could not interpret (metric|loss) identifier: ([^\n]*)")
# What it says of a key of `loss`, or where targets lack one of them.
_PATH = re.compile(r"The path: \('([^']*)',\) in the `loss` argument")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# What Keras says where data and model do not fit together.
_SHAPES = (
    "is incompatible with the layer",
    "incompatible shape",
    "must have rank",
    "must have the same shape",
    "must have the same rank",
    "Missing data for input",
    "Structure of inputs",
    "structure of `inputs`",
)


_NO_TARGETS = (
    "The loss needs targets. Received: data of inputs alone. Pass y, or "
    "batches of (x, y)."
)


@contextlib.contextmanager
def _any_number_of_rows() -> Iterator[None]:
    """Says in one line that a shape has no number of rows in a trace.

    Keras knows that number where all batches have as many.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        said = _NO_NUMBER.search(_ANSI.sub("", str(error)))
        if said is None:
            raise
        raise ConfigurationError(
            "Steps are traced once for batches of any number of rows, so "
            "x.shape[0] is None. Received: code that makes a tensor with None "
            f"in its shape ({said[0]}). Write keras.ops.shape(x)[0] in place "
            "of x.shape[0]."
        ) from error


@contextlib.contextmanager
def explained(source: data_lib.Source) -> Iterator[None]:
    """Turns errors about the data into one line about it.

    Args:
        source: The data.

    Raises:
        ConfigurationError: The data does not fit the model.
    """
    try:
        with _any_number_of_rows():
            yield
    except ConfigurationError:
        raise
    except tf.errors.InvalidArgumentError as error:
        match = _MESSAGE.search(str(error))
        if match is not None:
            raise ConfigurationError(match[1]) from error
        for said in (data_lib.SIZES_DIFFER, data_lib.NO_ROW):
            if said in str(error):
                raise ConfigurationError(said) from error
        rows = _ROWS.search(str(error))
        if rows is not None:
            raise ConfigurationError(rows[0]) from error
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
            _check_files(source)
            unfit = _UNFIT.search(str(error))
            if unfit is None:
                raise
            raise ConfigurationError(
                "Every batch must fit the model. Received: "
                f"{_described(source.example())}; TensorFlow says of a batch: "
                f"{unfit[0].strip()}. A replica has some of the rows: code "
                "that needs their number takes keras.ops.shape(x)[0]."
            ) from error
        raise ConfigurationError(
            f"Labels must be in {found[2]}, one for each output of the model. "
            f"Received: the label {found[1]}. Check the labels, or give the "
            "model more outputs."
        ) from error
    except tf.errors.OutOfRangeError as error:
        if "IteratorGetNext" not in str(error):
            raise
        # Of a stream that workers read again and again.
        raise ConfigurationError(data_lib.NO_BATCH) from error
    except (tf.errors.DataLossError, tf.errors.NotFoundError) as error:
        _check_files(source)
        said = _cause(error)
        raise ConfigurationError(
            "The files of the data must be whole, and stay while they are "
            f"read. Received: {said:.300}. Write them again."
        ) from error
    except tf.errors.UnimplementedError as error:
        if "Cast string to" not in str(error):
            raise
        raise ConfigurationError(
            "The model must get numbers, or have layers that make numbers of "
            f"text. Received: {_described(source.example(), text=True)}. "
            "Convert the text first, or begin the model with TextVectorization "
            "or StringLookup."
        ) from error
    except TypeError as error:
        example = source.example()
        if not (_has_names(example) and "of type 'str'" in str(error)):
            raise
        raise ConfigurationError(_misnamed(example[1])) from error
    except KeyError as error:
        example, said = source.example(), str(error)
        if not (_has_names(example) and _is_of_keras(error)):
            raise
        weights, output = _weights(example), said.strip("'")
        if weights and output in example[1] and output not in weights:
            raise ConfigurationError(_unweighted(weights, said)) from error
        path, lacking = _PATH.search(said), f", none for the output {said}"
        if path is not None:
            if path[1] not in example[1]:
                raise  # A mistake in `loss`, of which Keras says one line.
            lacking = ""
        raise ConfigurationError(_misnamed(example[1], lacking)) from error
    except AttributeError as error:
        # What Keras's metrics say.
        if "'NoneType' object has no attribute 'shape'" not in str(error):
            raise
        if _has_targets(source.example()):
            raise
        raise ConfigurationError(_NO_TARGETS) from error
    except ValueError as error:
        text = _ANSI.sub("", str(error))
        example = source.example()
        if "None values not supported" in text and not _has_targets(example):
            raise ConfigurationError(_NO_TARGETS) from error
        unknown = _UNKNOWN.search(text)
        if unknown is not None:
            raise ConfigurationError(
                f"compile needs a {unknown[1]} of Keras by its name, or an "
                f"object or a function. Received: {unknown[2]!r}. Correct the "
                f"name, or pass the {unknown[1]} itself."
            ) from error
        structures = _STRUCTURES.search(text)
        if structures is not None:
            raise ConfigurationError(
                "Targets must have the structure of the model's outputs. "
                f"Received: {_described(example)}, for outputs "
                f"{structures[1]}. Pass a target for each output and no other."
            ) from error
        unequal = _UNEQUAL.search(text)
        if unequal is not None and _has_shape_of_targets(unequal[1], example):
            raise ConfigurationError(
                "Targets must fit the outputs of the model. Received: "
                f"{_described(example)}; the loss or a metric cannot compare "
                f"the shapes {unequal[1]}. Give y the shape of the outputs, "
                "or the model as many outputs as y has."
            ) from error
        if not any(phrase in text for phrase in _SHAPES):
            raise
        lines = [line for line in text.splitlines() if line.strip()]
        said = next(
            (li for li in lines if any(p in li for p in _SHAPES)), lines[0]
        )
        raise ConfigurationError(
            f"The data must fit the model. Received: {_described(example)}; "
            f"Keras says: {said.strip()}{_remedy(said)}"
        ) from error


def _cause(error: tf.errors.OpError) -> str:
    """Returns what TensorFlow says, of several errors the first one."""
    text = (error.message or "").strip()
    several = _ROOTS.match(text)
    if several is not None:
        text = text[several.end() :]
    return _NODE.sub("", text).partition("\n")[0].strip().rstrip(".")


def _remedy(said: str) -> str:
    """Returns what to do about some of what Keras says of shapes."""
    if "Arguments `target` and `output` must have the same rank" in said:
        return (
            ". Labels that are numbers go with sparse_categorical_crossentropy."
        )
    if "must have rank (ndim) `target.ndim - 1`" in said:
        return ". One-hot labels go with categorical_crossentropy."
    return ""


def _check_files(source: data_lib.Source) -> None:
    """Names a file that cannot be read, if there is one."""
    broken = source.broken()
    if broken:
        raise ConfigurationError(
            "The files of the data must be ones that TensorFlow can decode. "
            f"Received: {broken}. Remove the file, or write it again."
        )


def _has_targets(example: Any) -> bool:
    return isinstance(example, tuple) and len(example) > 1


def _has_names(example: Any) -> bool:
    return _has_targets(example) and isinstance(example[1], Mapping)


def _misnamed(targets: Mapping[str, Any], lacking: str = "") -> str:
    return (
        "Targets in a dict need a model that returns a dict with the same "
        f"keys. Received: targets {', '.join(map(repr, targets))}{lacking}. "
        "Name a target for each output, or pass the array of a single output "
        "alone."
    )


def _weights(example: Any) -> Mapping[str, Any]:
    """Returns weights by name, none where they are no dict."""
    found = example[2] if len(example) > 2 else None
    return found if isinstance(found, Mapping) else {}


def _unweighted(weights: Mapping[str, Any], output: str) -> str:
    return (
        "sample_weight in a dict needs the keys of the targets. Received: "
        f"sample_weight of {', '.join(map(repr, weights))}, none for the "
        f"output {output}. Give ones where every example counts alike."
    )


def _is_of_keras(error: Exception) -> bool:
    """Returns whether Keras has looked something up, and no one else."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = {} if trace is None else trace.tb_frame.f_globals
    return module.get("__name__", "").startswith("keras.")


def _has_shape_of_targets(shapes: str, example: Any) -> bool:
    """Returns whether one of the shapes, such as `[?,3]`, is of a target."""
    if not _has_targets(example):
        return False
    specs = [s for s in tf.nest.flatten(example[1]) if s.shape.rank]
    each = [["?" if n is None else str(n) for n in s.shape[1:]] for s in specs]
    return any(
        re.search(rf"[\[,]{re.escape(','.join(one))}\]", shapes)
        for one in each
        if one
    )


def _described(example: object, *, text: bool = False) -> str:
    """Returns the shapes of a batch, or where it holds text."""
    parts = example if isinstance(example, tuple) else (example,)
    words = []
    for name, part in zip(("x", "y"), parts, strict=False):
        specs = tf.nest.flatten(part)
        if text and not any(spec.dtype == tf.string for spec in specs):
            continue
        if text:
            words.append(f"text in {name}")
            continue
        shapes = tf.nest.map_structure(lambda spec: tuple(spec.shape), part)
        words.append(f"{name} of shape {shapes}")
    return ", ".join(words)
