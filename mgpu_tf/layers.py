"""Layers whose weights are spread over parameter servers, or over devices.

    layers.ShardedEmbedding(1_000_000, 64)

In the scope of a parameter-server strategy, the rows of the table are spread
over the servers. In that of `create_model_parallel_strategy(data=4)`, they are
spread over the devices. Elsewhere the layer is an ordinary embedding.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import kind_of, spreading_rows


@keras.saving.register_keras_serializable(package="mgpu_tf")
class ShardedEmbedding(keras.layers.Layer):
    """An embedding whose rows are spread over servers or devices.

    With parameter servers, row i is in shard `i % num_shards`, so that ids of
    similar frequency are in different shards. Only the rows of a batch are sent
    to a worker, and their gradients are sent back as sparse gradients. An
    optimizer that clips makes the gradients dense first.

    On a mesh without `fsdp`, device r of n holds the rows from
    `input_dim * r // n` to `input_dim * (r + 1) // n`. They are spread over
    the axis `data`, or over `tensor` where there is one copy of the weights. A
    layout may name another axis. With `fsdp` the table is split as other
    weights are.

    The table is saved and loaded as one table, whatever the number of shards.
    With parameter servers the slots of an optimizer are saved for each shard,
    and cannot be loaded into another number of shards.

    Example:
        model = keras.Sequential(
            [mgpu_tf.layers.ShardedEmbedding(10_000, 16), ...]
        )

    Args:
        input_dim: Number of rows of the table. Ids are 0 to `input_dim - 1`.
        output_dim: Length of a row.
        embeddings_initializer: The initializer of the shards.
        num_shards: Number of shards with parameter servers. Default: one for
            each server. More than 1 elsewhere: each device holds all shards.
        **options: Arguments of `keras.layers.Layer`.

    Raises:
        ConfigurationError: A size is out of range.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        num_shards: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        sizes = {
            "input_dim": input_dim,
            "output_dim": output_dim,
            "num_shards": 1 if num_shards is None else num_shards,
        }
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{name} must be an integer of 1 or more. Received: "
                    f"{name}={value!r}."
                )
        self.input_dim, self.output_dim = input_dim, output_dim
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self.num_shards = num_shards
        self.shards: list[keras.Variable] = []

    def build(self, input_shape: Any = None) -> None:
        """Makes one weight for each shard."""
        del input_shape
        strategy = tf.distribute.get_strategy()
        servers = strategy.num_ps if kind_of(strategy).partitions else 1
        count = min(self.num_shards or servers, self.input_dim)
        spreading: Any = contextlib.nullcontext()
        if count == 1:
            spreading = spreading_rows(
                strategy, self.input_dim, self.output_dim
            )
        with spreading:
            self.shards = [
                self.add_weight(
                    shape=(len(range(index, self.input_dim, count)),)
                    + (self.output_dim,),
                    initializer=self.embeddings_initializer,
                    name=f"rows_{index}_of_{count}",
                )
                for index in range(count)
            ]
        self.built = True

    def call(self, inputs: Any) -> tf.Tensor:
        """Looks rows up.

        Args:
            inputs: Integer ids of any shape `[...]`.

        Returns:
            Their rows, `[..., output_dim]`.
        """
        ids = tf.cast(inputs, tf.int64)
        with tf.control_dependencies(
            [
                tf.debugging.assert_less(
                    ids,
                    tf.constant(self.input_dim, tf.int64),
                    "An id must be less than input_dim",
                )
            ]
        ):
            ids = tf.identity(ids)
        rows = tf.compat.v1.nn.embedding_lookup(
            [shard.value for shard in self.shards],
            ids,
            partition_strategy="mod",
        )
        return tf.cast(rows, self.compute_dtype)

    @property
    def embeddings(self) -> np.ndarray:
        """The whole table, `[input_dim, output_dim]`."""
        count = len(self.shards)
        table = np.empty(
            (self.input_dim, self.output_dim), self.shards[0].dtype
        )
        for index, shard in enumerate(self.shards):
            table[index::count] = shard.numpy()
        return table

    def save_own_variables(self, store: Any) -> None:
        """Saves the shards as one table."""
        store["embeddings"] = self.embeddings

    def load_own_variables(self, store: Any) -> None:
        """Loads one table into the shards."""
        table = np.asarray(store["embeddings"])
        for index, shard in enumerate(self.shards):
            shard.assign(table[index :: len(self.shards)])

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns the shape of the rows of ids of a shape."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        """Returns the shape and type of the rows of ids."""
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape), self.compute_dtype
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the number of shards where it was given."""
        return super().get_config() | {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "num_shards": self.num_shards,
        }
