"""Where a process stands among the processes and replicas of a strategy.

    topology = topology_of(strategy)        # mgpu_tf.strategies.registry
    topology.num_workers, topology.worker_index, topology.is_chief
    topology.local.rows_of(size=64, replica=0)

Replica r of n takes a contiguous range of a global batch:

    rows [size * r // n, size * (r + 1) // n)

    size 5, n 4 -> rows 0 | 1 | 2 | 3 4     ranges differ by one row at most
    size 2, n 4 ->      - | 0 | - | 1       a range may be empty

With the shares of `balance`, the bounds are parts of their sum instead:

    size 9, shares 2, 1 -> rows 0 1 2 3 4 5 | 6 7 8
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from mgpu_tf.strategies.replicas.balance import Balance


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """Which of the replicas that step together this process holds.

    Attributes:
        first: The first replica that this process holds.
        count: How many replicas this process holds.
        total: How many replicas there are.
        bounds: Where the ranges of replicas begin and end, as parts of the
            last number, integers or a tensor; None for equal ranges.
        same_rows: How many neighbours of them get the same rows.
    """

    first: int
    count: int
    total: int
    bounds: tuple[int, ...] | tf.Tensor | None = None
    same_rows: int = 1

    @property
    def ranges(self) -> int:
        """Into how many ranges of rows a batch is cut."""
        return self.total // self.same_rows

    @property
    def num_processes(self) -> int:
        """How many processes hold the replicas."""
        return self.total // self.count

    @property
    def process(self) -> int:
        """This process among them, from 0."""
        return self.first // self.count

    @property
    def same_rows_here(self) -> int:
        """How many neighbours in this process get the same rows."""
        return min(self.same_rows, self.count)

    @property
    def is_first_of_rows(self) -> bool:
        """Whether no process before this one gets the same rows."""
        return self.first % self.same_rows == 0

    def rows_of(self, size: Any, replica: Any) -> tuple[Any, Any]:
        """Returns the rows of a global batch that belong to a replica.

        Example:
            >>> [LocalReplicas(0, 4, 4).rows_of(5, r) for r in range(4)]
            [(0, 1), (1, 2), (2, 3), (3, 5)]

        Args:
            size: Rows of the global batch, integer or tensor.
            replica: The local replica, integer or tensor.

        Returns:
            The first row, and the row after the last.
        """
        index = (self.first + replica) // self.same_rows
        if self.bounds is None:
            return (
                size * index // self.ranges,
                size * (index + 1) // self.ranges,
            )
        whole = self.bounds[-1]
        return (
            size * self._bound(index) // whole,
            size * self._bound(index + 1) // whole,
        )

    def _bound(self, index: Any) -> Any:
        if isinstance(self.bounds, tuple) and isinstance(index, int):
            return self.bounds[index]
        return tf.gather(tf.convert_to_tensor(self.bounds, tf.int64), index)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The processes and replicas of a strategy, and this process among them.

    Attributes:
        num_workers: Processes whose replicas compute gradients.
        worker_index: This process among them, from 0.
        local: The replicas that this process holds, of those that step
            together.
        data_parallel_degree: Into how many ranges the examples are cut.
        is_chief: Whether this process writes the files of a run.
    """

    num_workers: int
    worker_index: int
    local: LocalReplicas
    data_parallel_degree: int
    is_chief: bool

    def input_context(self) -> tf.distribute.InputContext:
        """Returns the place of this process's pipeline among all pipelines.

        Processes whose replicas get the same rows have the same pipeline.
        """
        step = max(self.local.count, self.local.same_rows)
        return tf.distribute.InputContext(
            num_input_pipelines=self.local.total // step,
            input_pipeline_id=self.local.first // step,
            num_replicas_in_sync=self.local.ranges,
        )


def balance_of(strategy: tf.distribute.Strategy) -> Balance:
    """Returns the shares of a strategy, which are equal by default."""
    return getattr(strategy, "balance", None) or Balance()


def synchronous_topology(strategy: tf.distribute.Strategy) -> Topology:
    """Returns the topology of a strategy whose replicas step together."""
    local = len(strategy.extended.worker_devices)
    total = strategy.num_replicas_in_sync
    workers = total // local
    index, is_chief = 0, True
    resolver = strategy.cluster_resolver
    if workers > 1 and resolver is not None:
        has_chief = "chief" in resolver.cluster_spec().as_dict()
        is_worker = resolver.task_type == "worker"
        index = resolver.task_id + (1 if has_chief and is_worker else 0)
        is_chief = index == 0
    return Topology(
        num_workers=workers,
        worker_index=index,
        local=LocalReplicas(
            index * local, local, total, balance_of(strategy).bounds(total)
        ),
        data_parallel_degree=total,
        is_chief=is_chief,
    )


def asynchronous_topology(strategy: tf.distribute.Strategy) -> Topology:
    """Returns the topology of a coordinator and its workers.

    The coordinator deals out the data as one pipeline; each worker computes
    with the replicas of its own devices.
    """
    replicas = strategy.num_replicas_in_sync
    workers = len(strategy.cluster.worker)
    return Topology(
        num_workers=workers,
        worker_index=0,
        local=LocalReplicas(0, replicas, replicas),
        data_parallel_degree=workers * replicas,
        is_chief=True,
    )
