"""How a layer computes with parts of its weights.

    columns      inputs -> some outputs             -> gathered, if they must be
    rows         a part of inputs -> a part of all  -> summed, bias, activation
    experts      a part of inputs -> some outputs   -> gathered, if they must be
    vocabulary   ids -> the rows of its own ids     -> summed

Devices of the tensor axis have the same inputs. Where weights are split over
the data axis, each has its own rows of the batch: the rows of all are gathered
before, and each gets its own rows of the outputs after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import current_share
from mgpu_tf.engine.row_proof import note_same
from mgpu_tf.engine.step.tensor_parallel.linear import Linear
from mgpu_tf.strategies.replicas.collectives import Groups

Read = Callable[[keras.Variable], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a layer is computed.

    Attributes:
        linear: The layer.
        dim: The dimension along which its kernel is split.
        groups: The devices that have the parts.
        gathers: Whether its outputs are made whole.
        arrives: Whether its inputs are parts already.
        own_rows: Whether devices have their own rows of the batch.
        by_rows: Whether its kernel is a table that is only looked up. Then
            rows are read where they are stored, and the gradient has those
            of the ids that were looked up, and no others.
    """

    linear: Linear
    dim: int
    groups: Groups
    gathers: bool
    arrives: bool
    own_rows: bool
    by_rows: bool

    @property
    def leaves_split(self) -> bool:
        """Whether each device has a part of the outputs."""
        axis = self.linear.output_axis(self.dim)
        return axis is not None and not self.gathers

    def __call__(
        self,
        part: Callable[[keras.Variable], Any],
        whole: Read,
        lent: Callable[[list[Any]], Any],
        own: Callable[..., Any],
        inputs: tf.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tf.Tensor:
        """Returns the outputs. On a replica.

        Args:
            part: Returns the part of a weight that this replica stores, of
                a table that is read by rows as a variable of TensorFlow.
            whole: Returns a weight that is not split, or all of its parts.
            lent: Makes a context in which weights have other values.
            own: The layer's own `call`.
            inputs: Its first argument.
            *args: The others.
            **kwargs: Those by name.
        """
        if self.own_rows and not self.arrives:
            inputs = self._rows_of_all(inputs)
        kernel = self.linear.kernel
        if self.by_rows:
            return self._looked_up(part(kernel), inputs)
        with lent([(kernel, part(kernel))]):
            if self.dim == self.linear.rows:
                return self._rows_of_table(own, inputs, *args, **kwargs)
            axis = self.linear.input_axis(self.dim)
            if axis is not None and self.arrives:
                length = kernel.shape[self.dim] // self.groups.size
                inputs = _of_length(inputs, axis, length)
            elif axis is not None:
                inputs = self.groups.own_part(inputs, axis)
            layer = self.linear.layer
            with keras_internals.without(
                layer, "bias", "use_bias", "activation"
            ):
                outputs = own(inputs, *args, **kwargs)
        if self.linear.sums(self.dim):
            return self._summed(outputs, whole)
        return self._columns(outputs, part, whole)

    def _rows_of_all(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all devices, in the order of the batch."""
        rows = tf.shape(inputs)[0]
        share = current_share()
        if share is None:
            total = self.groups.all_reduce(rows)
        else:
            total = tf.cast(share.total, rows.dtype)
        rank, size = self.groups.rank(), self.groups.size
        # A device without a row computes another example's.
        total = tf.maximum(total, size)
        expected = total * (rank + 1) // size - total * rank // size
        check = tf.debugging.assert_equal(
            rows,
            expected,
            "A layer whose weights are split over the data axis takes one row "
            "for each example.",
        )
        with tf.control_dependencies([check]):
            inputs = tf.identity(inputs)
        # As rows of one batch, of which each device gets its own back.
        return note_same(self.groups.all_gather(inputs, 0, total), inputs)

    def _columns(
        self, outputs: tf.Tensor, part: Read, whole: Read
    ) -> tf.Tensor:
        axis = self.linear.output_axis(self.dim) or 0
        bias = self.linear.bias
        if bias is not None:
            dim = self.linear.bias_dim(self.dim)
            if self._has_part(bias, dim):
                value = part(bias)
            else:
                value = whole(bias)
                if dim is not None:
                    value = self.groups.own_part(value, dim)
            outputs = self._with_bias(outputs, value)
        if self.gathers:
            length = self.linear.kernel.shape[self.dim]
            outputs = self._whole(outputs, axis, length)
        else:
            # As in the trace that has shown what may stay split: code would
            # read the length of a part, where one device has that of all.
            outputs = _of_length(outputs, axis, None)
        return self._activated(outputs)

    def _whole(self, outputs: tf.Tensor, axis: int, length: int) -> tf.Tensor:
        every = self.groups.all_gather(outputs, axis, length)
        every = _of_length(every, axis, length)
        if self.own_rows:
            every = self.groups.own_part(every)
        return note_same(every, outputs)

    def _has_part(self, bias: keras.Variable, dim: int | None) -> bool:
        """Whether this replica stores the part of the bias that it needs."""
        if not keras_internals.is_split(bias):
            return False
        mine = keras_internals.stored(bias).split
        other = keras_internals.stored(self.linear.kernel).split
        return mine.dim == dim and mine.over == other.over

    def _summed(self, outputs: tf.Tensor, whole: Read) -> tf.Tensor:
        outputs = self._sum(outputs)
        if self.linear.bias is not None:
            outputs = self._with_bias(outputs, whole(self.linear.bias))
        return self._activated(outputs)

    def _sum(self, outputs: tf.Tensor) -> tf.Tensor:
        over = self.groups
        exchange = over.reduce_scatter if self.own_rows else over.all_reduce
        return note_same(exchange(outputs), outputs)

    def _with_bias(self, outputs: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        bias = tf.cast(bias, outputs.dtype)
        if getattr(self.linear.layer, "data_format", "") == "channels_first":
            bias = tf.reshape(bias, [-1] + [1] * (outputs.shape.rank - 2))
        return outputs + bias

    def _activated(self, outputs: tf.Tensor) -> tf.Tensor:
        activation = getattr(self.linear.layer, "activation", None)
        return outputs if activation is None else activation(outputs)

    def _looked_up(self, table: tf.Variable, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the rows of ids, of which this replica stores some.

        Args:
            table: The rows that it stores.
            inputs: The ids, `[...]`.
        """
        ids, low, high = self._checked(inputs)
        mine = (ids >= low) & (ids < high)
        rows = tf.gather(table, tf.boolean_mask(ids - low, mine))
        rows = tf.cast(rows, self.linear.layer.compute_dtype)
        shape = [*tf.unstack(tf.shape(ids)), table.shape[1]]
        outputs = tf.scatter_nd(
            tf.where(mine), rows, tf.cast(tf.stack(shape), tf.int64)
        )
        outputs = tf.ensure_shape(outputs, [*ids.shape, table.shape[1]])
        return self._sum(note_same(outputs, ids))

    def _checked(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
        """Returns ids of the whole table, and the bounds of this part.

        An id that no part has would be a row of zeros.
        """
        length = self.linear.kernel.shape[0]
        rank, size = self.groups.rank(), self.groups.size
        bounds = length * rank // size, length * (rank + 1) // size
        ids = inputs
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int32)
        if not self.linear.is_spread:
            ids = tf.where(ids < 0, ids + length, ids)
        checks = [
            tf.debugging.assert_non_negative(ids, "An id must not be negative"),
            tf.debugging.assert_less(
                *(ids, tf.constant(length, ids.dtype)),
                "An id must be less than input_dim",
            ),
        ]
        with tf.control_dependencies(checks):
            return tf.identity(ids), *bounds

    def _rows_of_table(
        self,
        own: Callable[..., Any],
        inputs: tf.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tf.Tensor:
        length = self.linear.kernel.shape[0]
        if self.linear.is_reversible and (
            kwargs.get("reverse") or (args and args[0])
        ):
            outputs = own(inputs, *args, **kwargs)
            if self.linear.is_tied:
                return self._whole(outputs, -1, length)
            if self.own_rows:
                outputs = note_same(self.groups.own_part(outputs), outputs)
            return outputs
        ids, low, high = self._checked(inputs)
        mine = (ids >= low) & (ids < high)
        outputs = own(tf.where(mine, ids - low, 0), *args, **kwargs)
        outputs = tf.where(mine[..., tf.newaxis], outputs, 0)
        outputs = self._sum(outputs)
        if self.linear.is_reversible:
            # It sets a mask itself, of other words than it has got here.
            mask = self.linear.layer.compute_mask(inputs)
            keras_internals.set_mask(outputs, mask)
        return outputs


def _of_length(value: tf.Tensor, axis: int, length: int | None) -> tf.Tensor:
    """Returns a tensor whose graph knows another length of an axis."""
    if not tf.is_symbolic_tensor(value):
        return value
    shape = value.shape.as_list()
    shape[axis] = length
    if length is None:
        return tf.compat.v1.placeholder_with_default(value, shape)
    return tf.ensure_shape(value, shape)


def dropped(
    axis: int,
    length: int,
    groups: Groups,
    own: Callable[..., Any],
    inputs: tf.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tf.Tensor:
    """Returns the outputs of a dropout layer whose inputs are parts.

    All devices draw what the layer draws for the whole inputs, and each takes
    its part of it. So the numbers are those of whole inputs.

    Args:
        axis: The axis along which inputs are split, from the end.
        length: Its whole length.
        groups: The devices that have the parts.
        own: The layer's own `call`.
        inputs: Its first argument.
        *args: The others.
        **kwargs: Those by name.
    """
    shape = tf.unstack(tf.shape(inputs))
    shape[axis] = length
    factors = own(tf.ones(tf.stack(shape), inputs.dtype), *args, **kwargs)
    static = inputs.shape.as_list()
    static[axis] = length
    factors = tf.ensure_shape(factors, static)
    # The factors depend on no number of the inputs.
    return note_same(inputs * groups.own_part(factors, axis), inputs)
