"""Adam for large embeddings: only the rows of a batch are updated.

    model.compile(LazyAdam(0.001), "mse")

Needs nothing of this package: it works in Keras's own `fit` too.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError


@keras.saving.register_keras_serializable("mgpu_tf")
class LazyAdam(keras.optimizers.Adam):
    """Adam that leaves rows of embeddings alone that were not looked up.

    In every step Keras's Adam decays both moments of all rows, and moves all
    rows by what is left of them. The cost of a step is that of the table.
    Here a step reads and writes the rows that were looked up. These are other
    numbers than Adam's.

    The rows of an index that was looked up several times are added up first.
    For each row w that was looked up, with the sum g, step number t, rates
    b1, b2 and learning rate r:

        m = m + (1 - b1) (g - m)
        v = v + (1 - b2) (g^2 - v)
        w = w - r sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon)

    The step number t is that of the optimizer, not of the row. Weights with a
    dense gradient are updated as in Keras's Adam. So is an embedding that is
    also used as a matrix, since its gradient is dense.

    Weight decay, `use_ema`, constraints and regularizers act on whole tables
    in every step, as in Keras.

    Example:
        >>> optimizer = LazyAdam(0.001, clipnorm=1.0)

    Args:
        *args: As for `keras.optimizers.Adam`.
        **options: As for `keras.optimizers.Adam`, without those by which
            Keras makes gradients dense: `gradient_accumulation_steps` and
            `global_clipnorm`.

    Raises:
        ConfigurationError: One of these was given.

    References:
        D. P. Kingma, J. Ba: Adam: A Method for Stochastic Optimization, 2014,
        arXiv 1412.6980. PyTorch's `SparseAdam` has the same formula.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, remedy in (
            ("gradient_accumulation_steps", "a larger batch"),
            ("global_clipnorm", "clipnorm or clipvalue"),
        ):
            value = getattr(self, name)
            if value is not None:
                raise ConfigurationError(
                    f"LazyAdam updates the rows of a batch, and {name} makes "
                    f"gradients dense. Received: {name}={value}. Use {remedy}, "
                    "or Adam."
                )

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates one weight."""
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        dtype = variable.dtype
        rows = summed_rows(gradient)
        of_batch = tf.cast(rows.values, dtype)
        place = self._get_variable_index(variable)
        momentum, moment = self._rows(self._momentums[place], rows.indices)
        velocity, square = self._rows(self._velocities[place], rows.indices)
        moment += (of_batch - moment) * (1 - self.beta_1)
        square += (tf.square(of_batch) - square) * (1 - self.beta_2)
        self._write(momentum, moment, rows.indices)
        self._write(velocity, square, rows.indices)
        if self.amsgrad:
            largest, held = self._rows(self._velocity_hats[place], rows.indices)
            square = tf.maximum(held, square)
            self._write(largest, square, rows.indices)
        # Keras takes its betas through float32.
        step = tf.cast(self.iterations + 1, dtype)
        first = keras.ops.cast(self.beta_1, dtype) ** step
        second = keras.ops.cast(self.beta_2, dtype) ** step
        rate = tf.cast(learning_rate, dtype) * tf.sqrt(1 - second) / (1 - first)
        moved = moment * rate / (tf.sqrt(square) + self.epsilon)
        self.assign_sub(variable, tf.IndexedSlices(moved, rows.indices))

    def _rows(
        self, slot: keras.Variable, indices: tf.Tensor
    ) -> tuple[tf.Variable, tf.Tensor]:
        """Returns a variable of TensorFlow, and some of its rows."""
        held = slot.value
        rows = tf.raw_ops.ResourceGather(
            resource=held.handle, indices=indices, dtype=held.dtype
        )
        return held, rows

    def _write(
        self, slot: tf.Variable, rows: tf.Tensor, indices: tf.Tensor
    ) -> None:
        self.assign(slot, tf.IndexedSlices(rows, indices))


def summed_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns a gradient with one row for each index: the sum of its rows.

    Args:
        slices: A row for each time that an index was looked up.
    """
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(
        slices.values, places, tf.shape(indices)[0]
    )
    return tf.IndexedSlices(values, indices, slices.dense_shape)
