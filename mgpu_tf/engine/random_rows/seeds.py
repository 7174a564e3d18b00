"""The seed by which TensorFlow's random functions come here.

TensorFlow's public `tf.experimental.dispatch_for_api` gives calls with a seed
of type `RowSeed` to the functions below, whoever makes the call: a layer of
Keras, a function of `keras.random` or the author.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mgpu_tf.engine.random_rows import draws
from mgpu_tf.engine.random_rows.scope import DrawnRows, RowScope, current_scope

_PHILOX = 1

# Elements of a draw that share a counter, by the size of their type.
_PER = {2: 4, 4: 4, 8: 2}

# Where numbers are rejected, the counter has room for that many tries.
_TRIES = 256


class RowSeed(tf.experimental.ExtensionType):
    """A seed of draws that have rows, or have none; the draw shows which.

    Attributes:
        value: The seed as TensorFlow takes it, int32 `[2]`.
    """

    value: tf.Tensor

    @property
    def dtype(self) -> str:
        """The type by which Keras knows a seed that is ready for use."""
        return "int32"

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of a seed."""
        return self.value.shape

    def __add__(self, number: Any) -> RowSeed:
        """Returns another seed, as `keras.random.beta` makes it."""
        return RowSeed(self.value + number)


def _as_tensor(
    seed: RowSeed, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> tf.Tensor:
    del as_ref
    return tf.convert_to_tensor(seed.value, dtype, name=name)


# What else is done with a seed goes on with its value.
tf.register_tensor_conversion_function(RowSeed, _as_tensor)


def seed_for_rows(seed: Any) -> Any:
    """Returns what a generator gives for the next draw.

    Args:
        seed: The seed that Keras's generator gives, int64 `[2]`.

    Returns:
        A `RowSeed` inside of `rows_of_global_draws`, and the seed elsewhere.
    """
    if current_scope() is None or isinstance(seed, RowSeed):
        return seed
    # As Keras makes seeds of TensorFlow of its own.
    value = tf.math.floormod(seed, tf.int32.max - 1)
    return RowSeed(tf.cast(value, tf.int32))


def _rows(shape: Any) -> tuple[RowScope, DrawnRows] | None:
    scope = current_scope()
    rows = None if scope is None else scope.rows_of(shape)
    return None if scope is None or rows is None else (scope, rows)


def _cut(found: tuple[RowScope, DrawnRows], draw: Any) -> tf.Tensor:
    scope, rows = found
    drawn = draws.by_cutting(
        lambda shape: scope.note(draw(shape)),
        rows.shape,
        rows.axis,
        (rows.first, rows.total),
    )
    return scope.take(drawn, rows)


def _counted(
    found: tuple[RowScope, DrawnRows],
    draw: draws.RawDraw,
    seed: tf.Tensor,
    dtype: tf.DType,
    stride: int = 1,
    *,
    alike_in_xla: bool = False,
) -> tf.Tensor:
    scope, rows = found

    def noted(shape: Any, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
        return scope.note(draw(shape, key, counter))

    if rows.axis or (scope.compiled and not alike_in_xla):
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        return _cut(found, lambda shape: draw(shape, key, counter))
    drawn = draws.by_counter(
        noted,
        rows.shape,
        seed,
        rows.row,
        scope.low,
        _PER[dtype.size],
        stride,
    )
    return scope.take(drawn, rows)


@tf.experimental.dispatch_for_api(
    tf.random.stateless_uniform, {"seed": RowSeed}
)
def _uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> tf.Tensor:
    dtype = tf.as_dtype(dtype)
    found = _rows(shape)
    if found is None:
        return tf.random.stateless_uniform(
            shape, seed.value, minval, maxval, dtype, name, alg
        )
    if dtype.is_integer and minval is None:
        return _counted(
            found,
            lambda shape, key, counter: (
                tf.raw_ops.StatelessRandomUniformFullIntV2(
                    shape=shape,
                    key=key,
                    counter=counter,
                    alg=_PHILOX,
                    dtype=dtype,
                )
            ),
            seed.value,
            dtype,
            alike_in_xla=True,
        )
    low = tf.convert_to_tensor(minval, dtype)
    high = tf.convert_to_tensor(1 if maxval is None else maxval, dtype)
    if dtype.is_integer:
        return _counted(
            found,
            lambda shape, key, counter: tf.raw_ops.StatelessRandomUniformIntV2(
                shape=shape,
                key=key,
                counter=counter,
                alg=_PHILOX,
                minval=low,
                maxval=high,
            ),
            seed.value,
            dtype,
            alike_in_xla=True,
        )
    drawn = _counted(
        found,
        lambda shape, key, counter: tf.raw_ops.StatelessRandomUniformV2(
            shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=dtype
        ),
        seed.value,
        dtype,
        alike_in_xla=True,
    )
    return drawn * (high - low) + low


@tf.experimental.dispatch_for_api(tf.random.stateless_normal, {"seed": RowSeed})
def _normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> tf.Tensor:
    if (found := _rows(shape)) is None:
        return tf.random.stateless_normal(
            shape, seed.value, mean, stddev, dtype, name, alg
        )
    operation = tf.raw_ops.StatelessRandomNormalV2
    return _scaled(found, operation, seed, mean, stddev, dtype)


@tf.experimental.dispatch_for_api(
    tf.random.stateless_truncated_normal, {"seed": RowSeed}
)
def _truncated_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> tf.Tensor:
    if (found := _rows(shape)) is None:
        return tf.random.stateless_truncated_normal(
            shape, seed.value, mean, stddev, dtype, name, alg
        )
    operation = tf.raw_ops.StatelessTruncatedNormalV2
    # A counter makes 4 numbers of 32 bits.
    tries = _TRIES * _PER[tf.as_dtype(dtype).size] // 4
    return _scaled(found, operation, seed, mean, stddev, dtype, tries)


def _scaled(
    found: Any,
    operation: Any,
    seed: Any,
    mean: Any,
    stddev: Any,
    dtype: Any,
    *tries: int,
) -> tf.Tensor:
    """Draws the rows here of a distribution with a mean and a deviation."""
    dtype = tf.as_dtype(dtype)
    drawn = _counted(
        found,
        lambda shape, key, counter: operation(
            shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=dtype
        ),
        seed.value,
        dtype,
        *tries,
    )
    stddev = tf.convert_to_tensor(stddev, dtype)
    return drawn * stddev + tf.convert_to_tensor(mean, dtype)


def _with_parameters(shape: Any, draw: Any, parameters: list[Any]) -> tf.Tensor:
    """Draws by parameters of which each row may have its own.

    Args:
        shape: The shape here.
        draw: Draws, given a shape and the parameters.
        parameters: They broadcast to the end of the shape.
    """
    found = _rows(shape)
    if found is None:
        return draw(shape, *parameters)
    _, rows = found
    bounds = rows.first, rows.total
    placed = [
        draws.in_place_of_rows(each, rows.shape, rows.axis, bounds)
        for each in parameters
    ]
    return _cut(found, lambda whole: draw(whole, *placed))


@tf.experimental.dispatch_for_api(tf.random.stateless_gamma, {"seed": RowSeed})
def _gamma(
    shape: Any,
    seed: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
) -> tf.Tensor:
    rates = [] if beta is None else [tf.convert_to_tensor(beta, dtype)]

    def draw(shape: Any, alpha: tf.Tensor, *rates: tf.Tensor) -> tf.Tensor:
        rate = rates[0] if rates else None
        return tf.random.stateless_gamma(
            shape, seed.value, alpha, rate, dtype, name
        )

    alpha = tf.convert_to_tensor(alpha, dtype)
    return _with_parameters(shape, draw, [alpha, *rates])


@tf.experimental.dispatch_for_api(
    tf.random.stateless_binomial, {"seed": RowSeed}
)
def _binomial(
    shape: Any,
    seed: Any,
    counts: Any,
    probs: Any,
    output_dtype: Any = tf.int32,
    name: Any = None,
) -> tf.Tensor:
    probs = tf.convert_to_tensor(probs, dtype_hint=tf.float32)
    counts = tf.convert_to_tensor(counts, dtype_hint=probs.dtype)
    return _with_parameters(
        shape,
        lambda shape, counts, probs: tf.random.stateless_binomial(
            shape, seed.value, counts, probs, output_dtype, name
        ),
        [counts, probs],
    )


@tf.experimental.dispatch_for_api(
    tf.random.stateless_poisson, {"seed": RowSeed}
)
def _poisson(
    shape: Any, seed: Any, lam: Any, dtype: Any = tf.int32, name: Any = None
) -> tf.Tensor:
    return _with_parameters(
        shape,
        lambda shape, lam: tf.random.stateless_poisson(
            shape, seed.value, lam, dtype, name
        ),
        [lam],
    )


@tf.experimental.dispatch_for_api(
    tf.random.stateless_categorical, {"seed": RowSeed}
)
def _categorical(
    logits: Any,
    num_samples: Any,
    seed: Any,
    dtype: Any = tf.int64,
    name: Any = None,
) -> tf.Tensor:
    logits = tf.convert_to_tensor(logits)
    found = _rows(tf.shape(logits))
    if found is None:
        return tf.random.stateless_categorical(
            logits, num_samples, seed.value, dtype, name
        )
    scope, rows = found
    bounds = rows.first, rows.total
    whole = draws.in_place_of_rows(logits, rows.shape, 0, bounds)
    drawn = scope.note(
        tf.random.stateless_categorical(
            whole, num_samples, seed.value, dtype, name
        )
    )
    return scope.take(drawn[rows.first : rows.first + rows.shape[0]], rows)
