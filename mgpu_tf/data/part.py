"""Which rows of a global batch belong to which replica.

Replica r of n takes a contiguous part:

    rows [size * r // n, size * (r + 1) // n)

    size 5, n 4 -> rows 0 | 1 | 2 | 3 4     parts differ by one row at most
    size 2, n 4 ->      - | 0 | - | 1       a part may be empty
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from mgpu_tf.strategy import local_replica_count


@dataclasses.dataclass(frozen=True)
class Part:
    """Which replicas of how many a pipeline feeds.

    Attributes:
        first: The first replica that this process holds.
        local: How many replicas this process holds.
        total: How many replicas there are.
    """

    first: int
    local: int
    total: int

    def bounds(self, size: Any, replica: Any) -> tuple[Any, Any]:
        """Returns the rows of a global batch that belong to a replica.

        Example:
            >>> [Part(0, 4, 4).bounds(5, r) for r in range(4)]
            [(0, 1), (1, 2), (2, 3), (3, 5)]

        Args:
            size: Rows of the global batch, integer or tensor.
            replica: The local replica, integer or tensor.

        Returns:
            The first row, and the row after the last.
        """
        index = self.first + replica
        return size * index // self.total, size * (index + 1) // self.total


def input_context(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.InputContext:
    """Returns the place of this process's pipeline among all pipelines."""
    part = part_of(strategy)
    return tf.distribute.InputContext(
        num_input_pipelines=part.total // part.local,
        input_pipeline_id=part.first // part.local,
        num_replicas_in_sync=part.total,
    )


def part_of(strategy: tf.distribute.Strategy) -> Part:
    """Returns which replicas of the strategy this process feeds."""
    local = local_replica_count(strategy)
    total = strategy.num_replicas_in_sync
    index = 0
    if local != total:
        resolver = strategy.cluster_resolver
        has_chief = "chief" in resolver.cluster_spec().as_dict()
        is_worker = resolver.task_type == "worker"
        index = resolver.task_id + (1 if has_chief and is_worker else 0)
    return Part(first=index * local, local=local, total=total)
