"""Structures of arrays and tensors, as Keras's `fit` takes them.

    pack(x, y, sample_weight)   x, (x,), (x, y) or (x, y, sample_weight)
    tensors_of([a, b])          (a, b): tf.data would stack a list

A leaf has a row for each example, or it is None or a scalar. All replicas get
the same scalar.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas

SIZES_DIFFER = (
    "On several replicas the inputs, targets and weights of a batch must have "
    "the same number of rows. Received: a batch with different numbers of "
    "rows. Repeat or pad the shorter arrays, write a train_step of your own, "
    "or use the strategy one_device."
)


NO_BATCH = (
    "The data must have one batch or more. Received: no batch. Check the "
    "filters of the dataset, or that a generator is not used up."
)

NO_ROW = (
    "A batch must have one row or more. Received: a batch of the data without "
    "a row. Leave it out, as with dataset.filter."
)


def pack(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Returns arrays as one `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

    Args:
        x: Inputs: an array, or a list, tuple or dict of them, nested.
        y: Targets, or None.
        sample_weight: Weights; one array is for every target.

    Raises:
        ConfigurationError: The weights do not have the structure of the
            targets.
    """
    if tf.nest.is_nested(y) or isinstance(sample_weight, dict):
        sample_weight = _weights_for(y, sample_weight)
    return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)


def unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and weights of a batch, as Keras's steps do.

    Raises:
        ConfigurationError: A batch has another number of parts, which only a
            step of the author's can take.
    """
    parts = len(data) if isinstance(data, list | tuple) else 1
    if parts not in (1, 2, 3):
        raise ConfigurationError(
            "Keras's own steps take batches of x, (x, y) or (x, y, "
            f"sample_weight). Received: batches of {parts} parts. Put inputs "
            "into a tuple or a dict, or write train_step, test_step and "
            "predict_step for such batches."
        )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return x, y, sample_weight


def parts_of(data: Any) -> list[tuple[str, Any]]:
    """Returns the parts of a batch by name, whatever their number.

    A batch for a step of the author's may have more than three.
    """
    if isinstance(data, list | tuple) and len(data) not in (1, 2, 3):
        return [(f"part {n}", part) for n, part in enumerate(data, 1)]
    parts = keras.utils.unpack_x_y_sample_weight(data)
    return list(zip(("x", "y", "sample_weight"), parts, strict=True))


def tensors_of(data: Any) -> Any:
    """Converts as Keras does: lists to tuples, floats to `floatx`."""
    return tf.nest.map_structure(
        lambda leaf: to_tensor(leaf, keras.config.floatx()), _tuples(data)
    )


def batch_of(data: Any) -> Any:
    """Converts a batch that Python has made; floats keep their type."""
    return tf.nest.map_structure(to_tensor, _tuples(data))


def to_tensor(leaf: Any, floatx: str | None = None) -> Any:
    """Converts an array, a data frame, a series or a tensor.

    Args:
        leaf: The value to convert; None stays None.
        floatx: The type of the result for floats; by default their own type.

    Raises:
        ConfigurationError: The value has another type, or is sparse.
    """
    if leaf is None:
        return None
    if isinstance(leaf, tf.SparseTensor):
        raise ConfigurationError(SPARSE)
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor)):
        tensor = leaf
    else:
        tensor = _tensor_of_array(leaf)
    if floatx is not None and tensor.dtype.is_floating:
        tensor = tf.cast(tensor, floatx)
    return tensor


def has_rows(leaf: Any) -> bool:
    """Returns whether a leaf, a tensor or a spec, has a row per example."""
    return isinstance(leaf, tf.RaggedTensorSpec) or (
        hasattr(leaf, "shape") and leaf.shape.rank != 0
    )


def with_rows(data: Any) -> list[Any]:
    """Returns the leaves that have a row for each example."""
    return [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]


def part(data: Any, low: Any, high: Any) -> Any:
    """Returns a part of arrays: the rows from `low` to before `high`."""
    return _map_rows(lambda leaf: leaf[low:high], data)


def rows(data: Any, low: Any, high: Any) -> Any:
    """Returns a copy of the rows of a batch from `low` to before `high`.

    A batch that Python has made may lie in the memory of NumPy. Of that
    TensorFlow leaves whole tensors alone, and takes their slices for its own:
    operations would write into the arrays of the program.
    """
    return _map_rows(lambda leaf: _copied(leaf[low:high]), data)


def or_another(low: Any, high: Any, size: Any) -> tuple[Any, Any]:
    """Returns which rows a replica computes: its own, or another one.

    Layers, losses and metrics may end with an error, or with NaN, where they
    get no row. So a replica without one gets another row of the batch, and
    nothing of what it computes is used: its share is 0 rows.

    Args:
        low: The first row of the replica, integer or tensor.
        high: The row after the last.
        size: The end of the rows that there are.
    """
    if all(isinstance(bound, int) for bound in (low, high, size)):
        low = max(min(low, size - 1), 0)
        return low, max(high, low + 1)
    low = tf.maximum(tf.minimum(low, size - 1), 0)
    return low, tf.maximum(high, low + 1)


def rows_of_each(data: Any, local: LocalReplicas, replica: Any) -> Any:
    """Returns a replica's rows of arrays that have other numbers of rows.

    Args:
        data: The batch.
        local: The replicas.
        replica: One of them.
    """

    def own(leaf: Any) -> Any:
        low, high = local.rows_of(_rows_of(leaf), replica)
        return _copied(leaf[low:high])

    return _map_rows(own, data)


def gather(data: Any, chosen: Any) -> Any:
    """Returns the rows with these numbers."""
    return _map_rows(lambda leaf: tf.gather(leaf, chosen), data)


def batch_size(data: Any) -> tf.Tensor:
    """Returns the number of rows; a constant if the shape is known."""
    return _rows_of(_counted(data))


def check_sizes(data: Any, size: tf.Tensor) -> list[tf.Operation]:
    """Returns assertions that all leaves of a batch have `size` rows."""
    known = tf.get_static_value(size)
    checks = []
    counted = _counted(data)
    for leaf in with_rows(data):
        if leaf is counted:
            continue
        other = _rows_of(leaf)
        if known is None or tf.get_static_value(other) != known:
            checks.append(tf.debugging.assert_equal(other, size, SIZES_DIFFER))
    return [check for check in checks if check is not None]


def not_empty(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns global batches; one without a row is an error.

    It would be taken for the end of the data.
    """

    def checked(data: Any) -> Any:
        size = batch_size(data)
        check = tf.debugging.assert_positive(size, NO_ROW)
        with tf.control_dependencies([check]):
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf),
                data,
                expand_composites=True,
            )

    spec = dataset.element_spec
    counted = _counted(spec)
    if counted.shape.rank and counted.shape[0]:
        return dataset
    return dataset.map(whole(spec, checked))


def spec_of(data: Any) -> Any:
    """Returns the specs of batches, with the batch size left open."""

    def spec(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.TypeSpec):
            return leaf
        return tf.type_spec_from_value(leaf)

    return specs_of_elements(tf.nest.map_structure(spec, data))


def specs_of_elements(spec: Any) -> Any:
    """Returns the specs of batches from those of a dataset's elements."""
    return tf.nest.map_structure(batch_free, spec)


def batch_free(spec: Any) -> Any:
    """Returns a spec with the batch size left open; None if not a tensor."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            [None, *spec.shape[1:]],
            spec.dtype,
            spec.ragged_rank,
            spec.row_splits_dtype,
        )
    if not isinstance(spec, tf.TensorSpec):
        return None
    if spec.shape.rank is None or spec.shape.rank == 0:
        return tf.TensorSpec(spec.shape, spec.dtype)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def empty(spec: Any) -> Any:
    """Returns a batch without rows.

    Other unknown lengths are 1, since a layer may fail on length 0.
    """
    return tf.nest.map_structure(lambda leaf: _filled(leaf, 0), spec)


def zeros(spec: Any) -> Any:
    """Returns a batch of one row, of zeros."""
    return tf.nest.map_structure(lambda leaf: _filled(leaf, 1), spec)


def whole(spec: Any, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Undoes tf.data's unpacking of a tuple into arguments.

    Args:
        spec: The spec of the elements of a dataset.
        function: Takes a whole element.

    Returns:
        A function for `Dataset.map`.
    """
    if type(spec) is tuple:
        return lambda *data: function(data)
    return function


def digest(data: Any) -> str:
    """Returns a short hash of nested tensors."""
    found = hashlib.sha256()
    for leaf in tf.nest.flatten(data, expand_composites=True):
        if leaf is None:
            continue
        array = np.asarray(leaf)
        found.update(
            b"\0".join(array.ravel())
            if array.dtype == object
            else array.tobytes()
        )
    return found.hexdigest()[:12]


def targets_digest(batch: Any) -> str:
    """Returns the hash of a batch's targets, or of a batch without targets."""
    has_targets = isinstance(batch, tuple) and len(batch) > 1
    return digest(batch[1:] if has_targets else batch)


def check_batched(spec: Any) -> None:
    """Refuses elements of a dataset that are sparse or not batched."""
    leaves = tf.nest.flatten(spec)
    if any(isinstance(leaf, tf.SparseTensorSpec) for leaf in leaves):
        raise ConfigurationError(SPARSE)
    parts = spec if type(spec) is tuple else (spec,)
    targets = tf.nest.flatten(parts[1:2])
    if (
        not parts
        or not with_rows(parts[0])
        or not all(has_rows(t) for t in targets if hasattr(t, "shape"))
    ):
        raise ConfigurationError(
            "A dataset must be batched: `dataset.batch(global_batch_size)`. "
            f"Received: elements {spec}."
        )


SPARSE = (
    "Data must be dense or ragged. Received: a SparseTensor. Convert it, such "
    "as with tf.sparse.to_dense."
)


def _tuples(data: Any) -> Any:
    return keras.tree.lists_to_tuples(data)


def _weights_for(y: Any, sample_weight: Any) -> Any:
    """Returns weights in the structure of the targets, by Keras's rule."""
    if sample_weight is None:
        return None
    if tf.nest.is_nested(sample_weight):
        try:
            tf.nest.assert_same_structure(_tuples(y), _tuples(sample_weight))
        except (TypeError, ValueError):
            raise ConfigurationError(
                "sample_weight must be one array, or have the structure of "
                f"y. Received: {_outline(sample_weight)} for {_outline(y)}. "
                "Pass a weight for each target."
            ) from None
        return sample_weight
    if isinstance(y, (list, tuple)) and len(tf.nest.flatten(y)) == 1:
        raise ConfigurationError(
            "Weighted examples of one target need the target itself, since "
            "Keras stacks the weights of a list. Received: a list of one "
            "target beside sample_weight. Pass y[0]."
        )
    shape = np.shape(sample_weight)
    if len(shape) > 1 and shape[1:] != (1,):
        raise ConfigurationError(
            "One sample_weight for several targets must have a number for "
            f"each example. Received: the shape {tuple(shape)}. Pass a weight "
            "for each target, in the structure of y."
        )
    return tf.nest.map_structure(lambda _: sample_weight, y)


def _outline(data: Any) -> Any:
    return tf.nest.map_structure(lambda _: "*", data)


def _tensor_of_array(leaf: Any) -> tf.Tensor:
    if not hasattr(leaf, "__array__"):
        raise ConfigurationError(
            "Data must be arrays, tensors or data frames, in lists, tuples "
            f"or dicts. Received: {type(leaf).__name__}. Convert it, such as "
            "with np.asarray; batches come from a generator or a "
            "keras.utils.PyDataset."
        )
    array = np.asarray(leaf)
    if hasattr(leaf, "iloc") and array.ndim == 1:
        # A series of pandas is a column.
        array = array[:, None]
    try:
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(array)
    except (TypeError, ValueError) as error:
        remedy = (
            'x.astype("float32"), np.stack(x) of rows that are arrays, or '
            "tf.ragged.constant(x) where they differ in length"
        )
        if array.dtype.kind in "mM":
            remedy = 'x.astype("int64") counts units of time'
        raise ConfigurationError(
            "Arrays must hold numbers, booleans or strings. Received: an "
            f"array of {array.dtype} that TensorFlow does not take: "
            f"{str(error).rstrip('.')}. Convert it: {remedy}."
        ) from None


def _counted(data: Any) -> Any:
    """Returns the leaf whose rows are the examples: a target, if any.

    An input may be the same for all examples.
    """
    has_targets = isinstance(data, tuple) and len(data) > 1
    leaves = with_rows(data[1]) if has_targets else []
    return (leaves or with_rows(data))[0]


def _map_rows(function: Callable[[Any], Any], data: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: function(leaf) if has_rows(leaf) else leaf, data
    )


def _copied(leaf: Any) -> Any:
    """Returns the same rows, in memory of their own."""
    return tf.gather(leaf, tf.range(_rows_of(leaf)))


def _rows_of(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return tf.constant(leaf.shape[0], tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _filled(spec: Any, size: int) -> Any:
    if spec is None:
        return None
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        flat = [size, *(length or 1 for length in inner)]
        values = _zeros(flat, spec.dtype)
        splits = tf.range(size + 1, dtype=spec.row_splits_dtype)
        return tf.RaggedTensor.from_nested_row_splits(
            values, [splits] * spec.ragged_rank
        )
    if not has_rows(spec):
        return _zeros([], spec.dtype)
    rest = spec.shape[1:] if spec.shape.rank is not None else []
    return _zeros([size, *(length or 1 for length in rest)], spec.dtype)


def _zeros(shape: list[int], dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, dtype)
