"""Keras's LSTM with fewer operations in a step of its loop.

The inputs of all steps are multiplied by the kernel at once, and so are the
gradients of both kernels: a loop has only what depends on the step before. The
loops and the gradient are those of Hochreiter and Schmidhuber, "Long Short-Term
Memory" (1997), with the forget gate of Gers, Schmidhuber and Cummins, "Learning
to Forget" (2000):

    i, f, g, o = split(x @ kernel + h @ recurrent + bias)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g),  h = sigmoid(o) * tanh(c)

On GPUs Keras has cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_TYPES = ("float32", "float64")


def is_same(layer: keras.layers.Layer, replicas: int) -> bool:
    """Returns whether this form computes what a built layer does.

    Args:
        layer: Any layer.
        replicas: How many step together; each has its own rows.
    """
    del replicas
    if type(layer) is not keras.layers.LSTM or not layer.built:
        return False
    cell = layer.cell
    return (
        type(cell) is keras.layers.LSTMCell
        and "call" not in vars(cell)
        and cell.activation is keras.activations.tanh
        and cell.recurrent_activation is keras.activations.sigmoid
        and not (cell.dropout or cell.recurrent_dropout)
        and not (layer.stateful or layer.unroll)
        and layer.use_cudnn is not True
        and layer.compute_dtype == cell.compute_dtype
        and layer.compute_dtype in _TYPES
        and not tf.config.list_physical_devices("GPU")
    )


def call(
    layer: keras.layers.LSTM,
    own: Callable[..., Any],
    sequences: Any,
    initial_state: Any = None,
    mask: Any = None,
    training: bool = False,
) -> tuple[Any, bool]:
    """Calls a layer.

    Args:
        layer: A layer, of which `is_same` holds.
        own: Its own `call`.
        sequences: `[batch, steps, features]`.
        initial_state: The first h and c, `[batch, units]`; None for zeros.
        mask: As for its own; only without one this form is taken.
        training: As for its own.

    Returns:
        The outputs, and whether they are of this form.
    """
    fits = (
        mask is None
        and isinstance(sequences, tf.Tensor)
        and sequences.shape.rank == 3
        and sequences.dtype == layer.compute_dtype
    )
    if not fits:
        outputs = own(
            sequences,
            initial_state=initial_state,
            mask=mask,
            training=training,
        )
        return outputs, False
    if layer.go_backwards:
        sequences = tf.reverse(sequences, [1])
    cell, batch = layer.cell, tf.shape(sequences)[0]
    if initial_state is None:
        initial_state = layer.get_initial_state(batch)
    first = [
        tf.convert_to_tensor(tf.cast(state, sequences.dtype))
        for state in initial_state
    ]
    bias = tf.zeros([4 * cell.units], sequences.dtype)
    if cell.use_bias:
        bias = tf.convert_to_tensor(cell.bias)
    every, h, c = _steps(
        tf.transpose(sequences, [1, 0, 2]),
        *first,
        tf.convert_to_tensor(cell.kernel),
        tf.convert_to_tensor(cell.recurrent_kernel),
        bias,
    )
    output = tf.transpose(every, [1, 0, 2]) if layer.return_sequences else h
    return ((output, h, c) if layer.return_state else output), True


@tf.custom_gradient
def _steps(
    inputs: tf.Tensor,
    h: tf.Tensor,
    c: tf.Tensor,
    kernel: tf.Tensor,
    recurrent: tf.Tensor,
    bias: tf.Tensor,
) -> tuple[tuple[tf.Tensor, ...], Callable[..., Any]]:
    """Returns h of all steps, `[steps, batch, units]`, and the last h and c.

    Args:
        inputs: `[steps, batch, features]`.
        h: The first output, `[batch, units]`.
        c: The first state, `[batch, units]`.
        kernel: `[features, 4 * units]`.
        recurrent: `[units, 4 * units]`.
        bias: `[4 * units]`.
    """
    units = recurrent.shape[0]
    kept = _forward(_dense(inputs, kernel) + bias, h, c, recurrent)
    i, f, g, o, every_c, every_h = kept

    def gradient(
        of_every: tf.Tensor, of_h: tf.Tensor, of_c: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        before_c = tf.concat([c[None], every_c[:-1]], 0)
        before_h = tf.concat([h[None], every_h[:-1]], 0)
        tanh_c = tf.tanh(every_c)
        # What the gradients of c and h are multiplied by, for all steps.
        by_c = tf.concat(
            [g * i * (1 - i), before_c * f * (1 - f), i * (1 - g * g)], -1
        )
        by_h = tanh_c * o * (1 - o)
        into_c = o * (1 - tanh_c * tanh_c)
        of_gates, of_first_h, of_first_c = _backward(
            of_every, of_h, of_c, by_c, by_h, into_c, f, recurrent
        )
        rows = tf.reshape(of_gates, [-1, 4 * units])
        return (
            _dense(of_gates, kernel, transpose=True),
            of_first_h,
            of_first_c,
            tf.matmul(_flat(inputs), rows, transpose_a=True),
            tf.matmul(_flat(before_h), rows, transpose_a=True),
            tf.reduce_sum(rows, 0),
        )

    return (every_h, every_h[-1], every_c[-1]), gradient


def _forward(
    gates: tf.Tensor, h: tf.Tensor, c: tf.Tensor, recurrent: tf.Tensor
) -> list[tf.Tensor]:
    """Returns i, f, g, o, c and h of all steps."""
    length, units = tf.shape(gates)[0], recurrent.shape[0]
    arrays = [_array(gates.dtype, length, units) for _ in range(6)]

    def body(
        step: tf.Tensor, h: tf.Tensor, c: tf.Tensor, *arrays: tf.TensorArray
    ) -> tuple[Any, ...]:
        i, f, g, o = tf.split(gates[step] + tf.matmul(h, recurrent), 4, 1)
        i, f, g, o = tf.sigmoid(i), tf.sigmoid(f), tf.tanh(g), tf.sigmoid(o)
        c = f * c + i * g
        h = o * tf.tanh(c)
        written = [
            array.write(step, value)
            for array, value in zip(arrays, (i, f, g, o, c, h), strict=True)
        ]
        return step + 1, h, c, *written

    found = tf.while_loop(
        lambda step, *_: step < length,
        body,
        (tf.constant(0), h, c, *arrays),
        shape_invariants=_invariants(units, 6),
    )
    return [array.stack() for array in found[3:]]


def _backward(
    of_every: tf.Tensor,
    of_h: tf.Tensor,
    of_c: tf.Tensor,
    by_c: tf.Tensor,
    by_h: tf.Tensor,
    into_c: tf.Tensor,
    forget: tf.Tensor,
    recurrent: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns gradients of all gates, and of the first h and c."""
    length, units = tf.shape(by_h)[0], recurrent.shape[0]
    array = _array(by_h.dtype, length, 4 * units)

    def body(
        step: tf.Tensor, of_h: tf.Tensor, of_c: tf.Tensor, array: tf.TensorArray
    ) -> tuple[Any, ...]:
        of_h += of_every[step]
        of_c += of_h * into_c[step]
        of_gates = tf.concat(
            [tf.tile(of_c, [1, 3]) * by_c[step], of_h * by_h[step]], 1
        )
        return (
            step - 1,
            tf.matmul(of_gates, recurrent, transpose_b=True),
            of_c * forget[step],
            array.write(step, of_gates),
        )

    _, of_h, of_c, array = tf.while_loop(
        lambda step, *_: step >= 0,
        body,
        (length - 1, of_h, of_c, array),
        shape_invariants=_invariants(units, 1),
    )
    return array.stack(), of_h, of_c


def _array(dtype: tf.DType, length: tf.Tensor, width: int) -> tf.TensorArray:
    return tf.TensorArray(dtype, length, element_shape=[None, width])


def _invariants(units: int, arrays: int) -> tuple[tf.TensorShape, ...]:
    """Returns the shapes of a loop: the step, h, c, and arrays."""
    rows = tf.TensorShape([None, units])
    return tf.TensorShape([]), rows, rows, *[tf.TensorShape(None)] * arrays


def _dense(
    values: tf.Tensor, kernel: tf.Tensor, transpose: bool = False
) -> tf.Tensor:
    """Returns the product of each step's rows with a kernel."""
    product = tf.matmul(_flat(values), kernel, transpose_b=transpose)
    return tf.reshape(
        product, tf.concat([tf.shape(values)[:2], [product.shape[-1]]], 0)
    )


def _flat(values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(values, [-1, values.shape[-1]])
