"""Strategies whose replicas are pipelines: each stage of layers has a device.

    create_model_parallel_strategy(data=2, pipeline=2, num_virtual_devices=4)

    replica 0    CPU:0 -> CPU:1
    replica 1    CPU:2 -> CPU:3

A weight is stored where its stage computes, once for each replica, and what
optimizers keep for it lies beside it. Until an engine has cut a model into
stages, its weights are in the memory of the host.

    create_model_parallel_strategy(fsdp=2, pipeline=2, num_virtual_devices=4)

Replicas of the fsdp axis share one copy of the weights: of a large weight, each
of the devices that compute its stage stores a part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import MICRO_BATCHES, Mesh, Split
from mgpu_tf.strategies.fully_sharded import (
    SMALLEST_SPLIT,
    Splitting,
    SplittingStrategy,
)
from mgpu_tf.strategies.mirrored import MirroredStrategy
from mgpu_tf.strategies.sharded_variable import ShardedVariable

_HOST = "/device:CPU:0"


class PipelineStrategy(SplittingStrategy, MirroredStrategy):
    """`MirroredStrategy` whose replicas have a device for each stage.

    Args:
        devices: The names of the devices, those of a replica in a row.
        mesh: Their axes.
        micro_batches: Into how many parts the rows of a replica are cut.
        schedule: `1f1b` or `gpipe`.
        begins: The names of the layers at which the second and further
            stages begin; None for stages by cost.
        cross_device_ops: How replicas sum what no stage has to itself.
        smallest_split: The elements of the smallest weight that is split over
            the fsdp axis.

    Attributes:
        mesh: The axes.
        micro_batches: Into how many parts the rows of a replica are cut.
        schedule: The order of work.
        begins: The names of layers at which stages begin, if any.
    """

    def __init__(
        self,
        devices: list[str],
        mesh: Mesh,
        micro_batches: int,
        schedule: str,
        begins: tuple[str, ...] | None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None,
        smallest_split: int = SMALLEST_SPLIT,
    ) -> None:
        self._split_over(mesh, "weights", smallest_split)
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.begins = begins
        self._stage: int | None = None
        self._names = devices
        self._collective_key_base = next(self._groups)
        tf.distribute.Strategy.__init__(
            self,
            _PipelineExtended(
                self, devices[:: mesh.pipeline], cross_device_ops
            ),
        )
        self._group(beside=True)

    @property
    def splits_later(self) -> bool:
        """Whether weights are split when a model is cut: all are."""
        return True

    @property
    def _table_axis(self) -> None:
        """A `ShardedEmbedding` is stored as other tables are."""
        return

    def check_micro_batches(self, global_batch_size: int) -> None:
        """Refuses more micro-batches than a replica has rows.

        Each is a part of the graph, also without rows.

        Args:
            global_batch_size: Rows of a step, over all replicas.

        Raises:
            ConfigurationError: There are more, and more than by default.
        """
        rows = -(-global_batch_size // self.mesh.replicas)
        if self.micro_batches <= max(rows, MICRO_BATCHES * self.mesh.pipeline):
            return
        raise ConfigurationError(
            "micro_batches must be at most the rows of a replica. Received: "
            f"micro_batches={self.micro_batches} for {rows} rows, of a global "
            f"batch of {global_batch_size}. Use {rows} or fewer."
        )

    def devices_of(self, stage: int) -> list[str]:
        """Returns the device of a stage on each replica."""
        return self._names[stage :: self.mesh.pipeline]

    @property
    def stage_of_device(self) -> dict[str, int]:
        """Returns the stage that each device computes."""
        count = self.mesh.pipeline
        return {name: place % count for place, name in enumerate(self._names)}

    @contextlib.contextmanager
    def placing(self, stage: int, split: Split | None = None) -> Iterator[None]:
        """Creates variables on the devices of a stage.

        Args:
            stage: The stage.
            split: How they are divided over these; None for whole ones.
        """
        self._stage, self.splitting = stage, split
        try:
            yield
        finally:
            self._stage = self.splitting = None

    def split_of(self, held: tf.Variable) -> Split | None:
        """Returns how a weight is divided over the devices of its stage.

        Args:
            held: A variable of a layer.

        Returns:
            None for one that each replica stores whole.
        """
        shape = tuple(held.shape.as_list())
        split = Split(shape, self.mesh.fsdp)
        large = math.prod(shape) >= self.smallest_split and split.is_possible
        splits = self.mesh.fsdp > 1 and held.trainable and large
        return split if splits and held.dtype.is_floating else None

    @property
    def stage(self) -> int | None:
        """Returns the stage that variables are created for, if any."""
        return self._stage


class _Beside:
    """Stands for a variable that others are created beside."""

    def __init__(self, devices: list[str]) -> None:
        self._devices = devices


class _PipelineExtended(Splitting, mirrored_strategy.MirroredExtended):
    """Creates variables on the devices of a stage."""

    def _devices_of_parts(self, beside: Any) -> list[str]:
        if isinstance(beside, ShardedVariable):
            return [part.device for part in beside.values]
        strategy = self._container_strategy()
        return strategy.devices_of(strategy.stage)

    def _not_split(self, next_creator: Any, kwargs: dict[str, Any]) -> Any:
        strategy = self._container_strategy()
        if kwargs.get("colocate_with") is None:
            if strategy.stage is not None:
                devices = strategy.devices_of(strategy.stage)
                kwargs["colocate_with"] = _Beside(devices)
            elif kwargs.get("trainable"):
                replicas = strategy.num_replicas_in_sync
                kwargs["colocate_with"] = _Beside([_HOST] * replicas)
        return super()._not_split(next_creator, kwargs)
