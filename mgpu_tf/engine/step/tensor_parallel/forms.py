"""How a layer computes with parts of its weights.

    columns      inputs -> some outputs             -> gathered, if they must be
    rows         a part of inputs -> a part of all  -> summed, bias, activation
    experts      a part of inputs -> some outputs   -> gathered, if they must be
    vocabulary   ids -> the rows of its own ids     -> summed

Devices of the tensor axis have the same inputs. Where weights are split over
the devices that have other rows of the batch, a layer needs the rows of all.
They are gathered before it, and each device gets its own rows of the outputs. A
device that computes with a part of the inputs alone, such as the tokens of its
experts, is sent that part of the rows of all, and no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import current_share
from mgpu_tf.engine.random_rows import entered_again
from mgpu_tf.engine.row_proof import axis_of_rows, note_same
from mgpu_tf.engine.step.tensor_parallel.alike import Cut
from mgpu_tf.engine.step.tensor_parallel.linear import Linear
from mgpu_tf.errors import ConfigurationError
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
        cut: How outputs that are summed or gathered are left as parts of a
            sequence.
    """

    linear: Linear
    dim: int
    groups: Groups
    gathers: bool
    arrives: bool
    own_rows: bool
    by_rows: bool
    cut: Cut | None = None

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
        rows = self._axis_of_rows(inputs)
        axis = self.linear.input_axis(self.dim)
        if self.own_rows and not self.arrives:
            inputs = self._rows_of_all(inputs, rows, axis)
        elif axis is not None and not self.arrives:
            inputs = self.groups.own_part(inputs, axis)
        kernel = self.linear.kernel
        if self.by_rows:
            return self._looked_up(part(kernel), inputs, rows)
        with lent([(kernel, part(kernel))]):
            if self.dim == self.linear.rows:
                return self._rows_of_table(own, inputs, rows, *args, **kwargs)
            if axis is not None and self.arrives:
                length = kernel.shape[self.dim] // self.groups.size
                inputs = of_length(inputs, axis, length)
            layer = self.linear.layer
            with keras_internals.without(
                layer, "bias", "use_bias", "activation"
            ):
                outputs = own(inputs, *args, **kwargs)
        rows = self.linear.axis_of_outputs(rows) or 0
        if self.linear.sums(self.dim):
            return self._summed(outputs, rows, whole)
        return self._columns(outputs, rows, part, whole)

    def _axis_of_rows(self, inputs: tf.Tensor) -> int:
        """Returns which axis of the inputs is that of the batch, from 0 on.

        Raises:
            ConfigurationError: It is not proven, and the first is that of the
                experts; or rows are added up.
        """
        if not self.own_rows:
            return 0
        found = axis_of_rows(inputs)
        rows = 0 if found is None else found
        divided = self.linear.input_axis(self.dim)
        is_divided = divided is not None and divided % inputs.shape.rank == rows
        if is_divided or self.linear.axis_of_outputs(rows) is None:
            raise _no_rows(inputs, self.linear.layer)
        return rows

    def _rows_of_all(
        self, inputs: tf.Tensor, axis: int, divided: int | None
    ) -> tf.Tensor:
        """Returns the rows of all devices, in the order of the batch.

        Args:
            inputs: The inputs.
            axis: Their axis of rows.
            divided: The axis of which each device takes a part.
        """
        rows = tf.shape(inputs)[axis]
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
            "A layer whose weights a layout splits over 'batch' takes one row "
            "for each example.",
        )
        with tf.control_dependencies([check]):
            inputs = tf.identity(inputs)
        if divided is None:
            every = self.groups.all_gather(inputs, axis, total)
        else:
            every = self.groups.all_to_all(inputs, divided, axis, total)
        # As rows of one batch, of which each device gets its own back.
        return note_same(every, inputs)

    def _columns(
        self, outputs: tf.Tensor, rows: int, part: Read, whole: Read
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
        length = self.linear.kernel.shape[self.dim]
        if self.cut is not None:
            outputs = self._part_of_sequence(outputs, axis, length, self.cut)
        elif self.gathers:
            outputs = self._whole(outputs, axis, length, rows)
        else:
            # As in the trace that has shown what may stay split: code would
            # read the length of a part, where one device has that of all.
            outputs = of_length(outputs, axis, None)
        return self._activated(outputs)

    def _whole(
        self, outputs: tf.Tensor, axis: int, length: int, rows: int
    ) -> tf.Tensor:
        if self.own_rows:
            every = self.groups.all_to_all(outputs, rows, axis, length)
        else:
            every = self.groups.all_gather(outputs, axis, length)
        return note_same(of_length(every, axis, length), outputs)

    def _part_of_sequence(
        self, outputs: tf.Tensor, axis: int, length: int, cut: Cut
    ) -> tf.Tensor:
        check_length(outputs, cut)
        part = self.groups.all_to_all(outputs, cut.axis, axis, length)
        part = of_length(of_length(part, axis, length), cut.axis, None)
        return note_same(part, outputs)

    def _has_part(self, bias: keras.Variable, dim: int | None) -> bool:
        """Whether this replica stores the part of the bias that it needs."""
        if not keras_internals.is_split(bias):
            return False
        mine = keras_internals.stored(bias).split
        other = keras_internals.stored(self.linear.kernel).split
        return mine.dim == dim and mine.over == other.over

    def _summed(self, outputs: tf.Tensor, rows: int, whole: Read) -> tf.Tensor:
        outputs = self._sum(outputs, rows)
        if self.linear.bias is not None:
            outputs = self._with_bias(outputs, whole(self.linear.bias))
        return self._activated(outputs)

    def _sum(self, outputs: tf.Tensor, rows: int) -> tf.Tensor:
        if self.cut is not None:
            check_length(outputs, self.cut)
            part = self.groups.reduce_scatter(outputs, self.cut.axis)
            return note_same(of_length(part, self.cut.axis, None), outputs)
        if self.own_rows:
            total = self.groups.reduce_scatter(outputs, rows)
        else:
            total = self.groups.all_reduce(outputs)
        return note_same(total, outputs)

    def _with_bias(self, outputs: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        bias = tf.cast(bias, outputs.dtype)
        if getattr(self.linear.layer, "data_format", "") == "channels_first":
            bias = tf.reshape(bias, [-1] + [1] * (outputs.shape.rank - 2))
        return outputs + bias

    def _activated(self, outputs: tf.Tensor) -> tf.Tensor:
        activation = getattr(self.linear.layer, "activation", None)
        return outputs if activation is None else activation(outputs)

    def _looked_up(
        self, table: tf.Variable, inputs: tf.Tensor, rows: int
    ) -> tf.Tensor:
        """Returns the rows of ids, of which this replica stores some.

        Args:
            table: The rows that it stores.
            inputs: The ids, `[...]`.
            rows: Their axis of rows of the batch.
        """
        ids, low, high = self._checked(inputs)
        mine = (ids >= low) & (ids < high)
        found = tf.gather(table, tf.boolean_mask(ids - low, mine))
        found = tf.cast(found, self.linear.layer.compute_dtype)
        shape = [*tf.unstack(tf.shape(ids)), table.shape[1]]
        outputs = tf.scatter_nd(
            tf.where(mine), found, tf.cast(tf.stack(shape), tf.int64)
        )
        outputs = tf.ensure_shape(outputs, [*ids.shape, table.shape[1]])
        return self._sum(note_same(outputs, ids), rows)

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
        rows: int,
        *args: Any,
        **kwargs: Any,
    ) -> tf.Tensor:
        length = self.linear.kernel.shape[0]
        if self.linear.is_reversible and (
            kwargs.get("reverse") or (args and args[0])
        ):
            outputs = own(inputs, *args, **kwargs)
            if self.linear.is_tied:
                return self._whole(outputs, -1, length, rows)
            if self.own_rows:
                own_rows = self.groups.own_part(outputs, rows)
                outputs = note_same(own_rows, outputs)
            return outputs
        ids, low, high = self._checked(inputs)
        mine = (ids >= low) & (ids < high)
        outputs = own(tf.where(mine, ids - low, 0), *args, **kwargs)
        outputs = tf.where(mine[..., tf.newaxis], outputs, 0)
        outputs = self._sum(outputs, rows)
        if self.linear.is_reversible:
            # It sets a mask itself, of other words than it has got here.
            mask = keras_internals.mask_of_table(self.linear.layer, inputs)
            keras_internals.set_mask(outputs, mask)
        return outputs


def _no_rows(inputs: tf.Tensor, layer: keras.layers.Layer) -> Exception:
    return ConfigurationError(
        "A layer whose weights a layout splits over 'batch', and one between "
        "such layers, takes one row for each example, on an axis that follows "
        f"from the graph. Received: {layer.name}, whose inputs of shape "
        f"{inputs.shape} are not made of single rows, or which adds rows up. "
        "Name 'model' in place of 'batch' in the layout."
    )


class OtherLength(Exception):
    """A sequence has another length than the one that is planned."""


def check_length(value: tf.Tensor, cut: Cut) -> None:
    """Looks whether a tensor is one that is cut so.

    Raises:
        OtherLength: It is not.
    """
    if value.shape[cut.axis] != cut.length:
        raise OtherLength(f"{value.shape[cut.axis]} for {cut.length}")


def of_length(value: tf.Tensor, axis: int, length: int | None) -> tf.Tensor:
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
    own_rows: bool,
    layer: keras.layers.Layer,
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
        own_rows: Whether these have their own rows of the batch, of which all
            are here.
        layer: The layer.
        own: The layer's own `call`.
        inputs: Its first argument.
        *args: The others.
        **kwargs: Those by name.
    """
    shape = tf.unstack(tf.shape(inputs))
    shape[axis] = length
    with contextlib.ExitStack() as stack:
        if own_rows:
            rows, share = axis_of_rows(inputs), current_share()
            if rows is None:
                raise _no_rows(inputs, layer)
            every = shape[rows]
            if share is not None:
                shape[rows] = tf.cast(share.total, every.dtype)
            stack.enter_context(entered_again(None))
        factors = own(tf.ones(tf.stack(shape), inputs.dtype), *args, **kwargs)
    if own_rows:
        # Where a device has no row, another one's is in its place.
        places = tf.range(every) * shape[rows] // every
        factors = tf.gather(factors, places, axis=rows)
    static = inputs.shape.as_list()
    static[axis] = length
    factors = tf.ensure_shape(factors, static)
    # The factors depend on no number of the inputs.
    outputs = note_same(inputs * groups.own_part(factors, axis), inputs)
    return of_length(outputs, axis, None)
