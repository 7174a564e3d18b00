"""Draws of TensorFlow's own random operations, the same on all replicas.

What an author draws outside of calls, such as the noise of a generator, is
drawn by each replica for the global batch. `tf.random.normal` and its relatives
take their seeds from the graph, another one for each operation. Here the
operations of all replicas get the same seeds, in the order in which a replica
made them.
"""

from __future__ import annotations

import os

import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.author_scope import graph_here
from mgpu_tf.engine.random_rows import draws_by_own_state, warn_of_own_state
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

# A prime, so that operations get seeds that are far apart.
_STRIDE = 1_000_003
# What a `tf.random.Generator` reads its state by.
_GENERATORS = ("RngReadAndSkip", "RngSkip")


class SameDraws:
    """Gives random operations of replicas the same seeds.

    Args:
        strategy: A strategy whose replicas step together. All processes make
            this together, outside of replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        def on_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            first = context.replica_id_in_sync_group == 0
            # GPUs of several processes do not add up 32-bit integers.
            mine = tf.where(first, tf.constant(number, tf.int64), 0)
            return sum_over_replicas(mine)

        number = int.from_bytes(os.urandom(3), "little")
        # TensorFlow warns of functions that are traced by each call of them.
        numbers = tf.function(
            lambda: strategy.run(on_replica), autograph=False
        ).get_concrete_function()()
        self._number = int(strategy.experimental_local_results(numbers)[0])

    def begin(self) -> tf.Operation | None:
        """Returns where the operations of a replica begin, for `end`."""
        return None if graph_here() is None else tf.no_op()

    def end(self, begin: tf.Operation | None) -> None:
        """Gives seeds to the random operations of this replica.

        Args:
            begin: From `begin`.

        Raises:
            ConfigurationError: The step draws where seeds cannot be given.
        """
        graph = graph_here()
        if graph is None or begin is None:
            return
        base = self._number if graph.seed is None else graph.seed
        place, operations = 0, graph.get_operations()
        for op in operations[operations.index(begin) :]:
            if op.device != begin.device:
                continue
            if op.type in _GENERATORS:
                raise ConfigurationError(
                    "On several replicas a step of your own draws by "
                    "keras.random with a keras.random.SeedGenerator, by "
                    "tf.random.stateless_*, or by functions such as "
                    "tf.random.normal. Received: a tf.random.Generator, in "
                    f"{op.name!r}. Use keras.random.SeedGenerator."
                )
            if not draws_by_own_state(op):
                continue
            warn_of_own_state(op)
            place += 1
            keras_internals.set_integer(op, "seed", base % (2**31 - 1) or 1)
            keras_internals.set_integer(op, "seed2", place * _STRIDE)
