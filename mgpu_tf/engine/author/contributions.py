"""Contributions: the parts of replicas in a value of the global batch.

On every replica, a step computes values from the rows of the replica. A
contribution is a value that can be added up: its sum over replicas is the value
that one device computes on the global batch.

    def train_step(self, data):                      on 3 rows of 8
        x, y = data
        with tf.GradientTape() as tape:
            square = tf.square(self(x) - y)                      # [3, 1]
            loss = mgpu_tf.mean_over_batch(square)   sum of 3 / 8
        ...

If it is not proven what a loss is over the rows, its author declares it by
`mean_over_batch` or `sum_over_batch`. On one replica, and outside of a step,
these are the plain mean and the plain sum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine.row_proof import FIXED, SUM, note
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

_DIVIDED_LOSS = "a loss that is divided by the sum of masks or of weights"


@dataclasses.dataclass(frozen=True)
class BatchShare:
    """The share of a replica in the global batch.

    Attributes:
        local: Number of examples of this replica, an int64 scalar; may be 0.
        total: Number of examples of the global batch, an int64 scalar, at
            least 1.
        replicas: Number of replicas; those with the same rows are one.
        same_rows: How many replicas have the same rows.
        low: The first of its rows in the global batch, an int64 scalar; None
            where it is not known, and random numbers are the replica's own.
    """

    local: tf.Tensor
    total: tf.Tensor
    replicas: int
    same_rows: int = 1
    low: tf.Tensor | None = None

    @property
    def places(self) -> list[tf.Tensor]:
        """The tensors of the share, which differ between replicas."""
        return [
            number
            for number in (self.local, self.total, self.low)
            if number is not None
        ]

    def with_places(self, places: Sequence[tf.Tensor]) -> BatchShare:
        """Returns the share with other tensors, such as a function's own."""
        names = ("local", "total", "low")
        given = dict(zip(names, places, strict=False))
        return dataclasses.replace(self, **given)

    def fraction(self, dtype: tf.DType) -> tf.Tensor:
        """Returns local / total."""
        return tf.cast(self.local, dtype) / tf.cast(self.total, dtype)

    def select(self, held: Any, empty: Any) -> Any:
        """Returns `held`, or `empty` if the replica has no example.

        The value is selected, not multiplied by zero, so that NaN from an
        empty batch is dropped.
        """
        if self.replicas == 1 or self._surely_holds():
            return held
        if isinstance(held, tf.IndexedSlices):
            values = tf.where(
                self.local > 0, held.values, tf.zeros_like(held.values)
            )
            return tf.IndexedSlices(values, held.indices, held.dense_shape)
        return tf.where(self.local > 0, held, tf.cast(empty, held.dtype))

    def select_all(self, held: list[Any]) -> list[Any]:
        """Returns tensors, or zeros if the replica has no example.

        As `select`, but without a copy of the tensors.
        """
        if self.replicas == 1 or self._surely_holds():
            return held
        return tf.cond(
            self.local > 0,
            lambda: [_identity(value) for value in held],
            lambda: [_zeros_like(value, self.local) for value in held],
        )

    def _surely_holds(self) -> bool:
        return bool(tf.get_static_value(self.local))

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a value over all replicas, without gradient."""
        if self.replicas == 1:
            return value
        total = self.summed(tf.stop_gradient(value), _DIVIDED_LOSS)
        if self.same_rows == 1:
            return total
        return total / tf.cast(self.same_rows, total.dtype)

    def summed(self, value: tf.Tensor, needed_by: str) -> tf.Tensor:
        """Returns the sum of a value over all replicas, with its gradient.

        A replica without an example adds nothing. All sums of a step that an
        author's values need are this one, so that parts of a batch that come
        one after another can refuse it.

        Args:
            value: A tensor of the same shape on each replica.
            needed_by: What needs the sum, for a message.
        """
        del needed_by
        return sum_over_replicas(self.select(value, 0))


def _identity(value: Any) -> Any:
    return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _zeros_like(value: Any, none: tf.Tensor) -> Any:
    """Returns zeros of the shape of a value.

    Args:
        value: A tensor, or rows.
        none: A number that is 0 in the step. TensorFlow keeps zeros of a shape
            that it knows with the graph, for each device.
    """
    if isinstance(value, tf.IndexedSlices):
        zeros = _zeros_like(value.values, none)
        return tf.IndexedSlices(zeros, value.indices, value.dense_shape)
    return tf.broadcast_to(tf.cast(none, value.dtype), tf.shape(value))


@dataclasses.dataclass
class _Current(threading.local):
    """The current step of this thread; each replica has its own thread."""

    share: BatchShare | None = None
    exchange: Any = None


_current = _Current()


@contextlib.contextmanager
def sharing(
    share: BatchShare | None, *, exchange: Any = None
) -> Iterator[None]:
    """Sets the current share while the code of a model's author runs.

    Args:
        share: The share of this replica in the global batch; None where the
            code has the rows of all replicas.
        exchange: What gives replicas the rows of all.
    """
    before = _current.share, _current.exchange
    _current.share, _current.exchange = share, exchange
    try:
        yield
    finally:
        _current.share, _current.exchange = before


def current_share() -> BatchShare | None:
    """Returns the share that `sharing` has set; None outside of it."""
    return _current.share


def current_exchange() -> Any:
    """Returns what gives replicas the rows of all; None where nothing does."""
    return _current.exchange


def mean_over_batch(values: Any, weights: Any = None) -> tf.Tensor:
    """Returns this replica's contribution to the mean over the global batch.

    In a step on several replicas, the contributions add up to the mean that one
    device computes over the whole batch, however the batch is split. Elsewhere
    the function returns the mean.

    Example:
        In a layer, or in an overridden `compute_loss`:

            self.add_loss(mgpu_tf.mean_over_batch(tf.square(outputs)))

        The mean of losses that are not masked out:

            mgpu_tf.mean_over_batch(losses, weights=mask)

    Args:
        values: One row for each example of this replica, `[rows, ...]`.
        weights: The weight of each value, `[rows]` or with further axes of
            `values`. The mean is the sum of the weighted values divided by the
            sum of the weights. No gradient flows into the weights. Default:
            equal weights.

    Returns:
        A scalar of the type of `values`.

    Raises:
        ConfigurationError: The values have no axis of rows.
    """
    values = _by_rows(values, "mean_over_batch")
    share = _current.share
    if weights is not None:
        weights = tf.stop_gradient(_aligned(weights, values))
        total = tf.reduce_sum(weights)
        if share is not None:
            total = share.sum_over_replicas(total)
            note(total, FIXED)
        return _part(
            tf.math.divide_no_nan(tf.reduce_sum(values * weights), total)
        )
    if share is None or share.replicas == 1:
        return _part(tf.reduce_mean(values))
    per_row = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)
    count = tf.cast(share.total, values.dtype) * per_row
    return _part(tf.reduce_sum(values) / count)


def sum_over_batch(values: Any) -> tf.Tensor:
    """Returns this replica's contribution to the sum over the global batch.

    Args:
        values: One row for each example of this replica, `[rows, ...]`.

    Returns:
        A scalar of the type of `values`.

    Raises:
        ConfigurationError: The values have no axis of rows.
    """
    return _part(tf.reduce_sum(_by_rows(values, "sum_over_batch")))


def batch_mean(values: Any) -> tf.Tensor:
    """Returns the mean over the global batch, the same on all replicas.

    For layers and losses that need a statistic of the whole batch. The mean is
    differentiable: what each replica makes of it counts. Inside of a layer it
    keeps rows apart, where `keras.ops.mean(x, axis=0)` does not.

    Example:
        The balancing loss of a Switch transformer, for `[batch, experts]`:

            share = mgpu_tf.batch_mean(one_hot_of_chosen)
            weight = mgpu_tf.batch_mean(probabilities)
            self.add_loss(experts * keras.ops.sum(share * weight))

    Args:
        values: One row for each example, `[rows, ...]`.

    Returns:
        A tensor `[...]`.

    Raises:
        ConfigurationError: The values have no axis of rows, or a layer of a
            pipeline or with `step_parts` takes the mean: rows go through it
            before others are there.

    References:
        Fedus et al., "Switch Transformers", JMLR 2022, equation 4.
    """
    values = _by_rows(values, "batch_mean")
    share = _current.share
    if share is None or share.replicas == 1:
        return tf.reduce_mean(values, 0)
    total = tf.reduce_sum(values[: share.local], 0)
    with _apart():
        summed = share.summed(total, "mgpu_tf.batch_mean")
    rows = share.same_rows * tf.cast(share.total, summed.dtype)
    return note(summed / rows, FIXED)


def gather_batch(values: Any) -> tf.Tensor:
    """Returns the rows of the global batch, the same on all replicas.

    For layers and losses over pairs of examples. What flows back to a row is
    the sum over replicas. Elsewhere than in a step on several replicas the
    function returns its argument.

    Args:
        values: One row for each example, `[rows, ...]`.

    Returns:
        A tensor `[rows of the global batch, ...]`.

    Raises:
        ConfigurationError: The values have no axis of rows, or replicas never
            have the rows of all, as in a pipeline.
    """
    values = _by_rows(values, "gather_batch")
    share, exchange = _current.share, _current.exchange
    if share is None or share.replicas == 1:
        return values
    if exchange is None:
        raise ConfigurationError(
            "gather_batch goes with steps that have the rows of a batch at "
            "once. Received: a pipeline, step_parts, or workers that do not "
            "step together. Use 'mirrored' or 'fsdp' without step_parts."
        )
    cut = exchange.cut(share.local)
    return note(exchange.joined(values[: share.local], cut), FIXED)


def _apart() -> contextlib.AbstractContextManager[None]:
    exchange = _current.exchange
    return contextlib.nullcontext() if exchange is None else exchange.apart()


def _part(value: tf.Tensor) -> tf.Tensor:
    """Notes a contribution of this replica for proofs, and returns it."""
    share = _current.share
    if share is None:
        return value
    return note(tf.identity(share.select(value, 0)), SUM)


def _by_rows(values: Any, function: str) -> tf.Tensor:
    values = as_float(values)
    if values.shape.rank == 0:
        raise ConfigurationError(
            f"{function} takes one row for each example. Received: a scalar. "
            "Give it the values before they are reduced."
        )
    share = _current.share
    if share is None or share.replicas == 1:
        return values
    rows = tf.shape(values, out_type=tf.int64)[0]
    # A call that needs a row gets one where the replica has none.
    check = tf.debugging.assert_equal(
        tf.maximum(rows, 1),
        tf.maximum(share.local, 1),
        f"{function} takes one row for each example of the replica; what it "
        "received has another number of rows.",
    )
    with tf.control_dependencies([check]):
        return tf.identity(values)


def _aligned(weights: Any, values: tf.Tensor) -> tf.Tensor:
    """Returns weights in the shape of the values."""
    weights = tf.cast(weights, values.dtype)
    while weights.shape.rank < values.shape.rank:
        weights = weights[..., tf.newaxis]
    return tf.broadcast_to(weights, tf.shape(values))


def as_float(value: Any) -> tf.Tensor:
    """Returns a tensor of a floating type, as Keras converts losses."""
    value = tf.convert_to_tensor(value)
    if value.dtype.is_floating:
        return value
    return tf.cast(value, keras.config.floatx())
