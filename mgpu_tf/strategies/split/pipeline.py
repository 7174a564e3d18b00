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

    create_model_parallel_strategy(tensor=2, pipeline=2, num_virtual_devices=4)

Replicas of the tensor axis have the same rows, and each device computes parts
of the layers of its stage.

    create_model_parallel_strategy(pipeline=4)      in 2 processes of 2 devices

    stages 0, 1    worker 0, CPU:0 -> CPU:1         a block of stages
    stages 2, 3    worker 1, CPU:0 -> CPU:1

TensorFlow's replica is what a process has of a pipeline: a block of stages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import MICRO_BATCHES, Mesh, Split
from mgpu_tf.strategies.replicas.collectives import Line
from mgpu_tf.strategies.replicas.mirrored import (
    MirroredStrategy,
    MultiWorkerExtended,
    MultiWorkerMirroredStrategy,
)
from mgpu_tf.strategies.replicas.topology import synchronous_topology
from mgpu_tf.strategies.split.fully_sharded import (
    SMALLEST_SPLIT,
    Splitting,
    SplittingStrategy,
)
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

_HOST = "/device:CPU:0"


class StagedStrategy(SplittingStrategy):
    """What strategies have whose replicas have a device for each stage.

    Attributes:
        mesh: The axes.
        micro_batches: Into how many parts the rows of a replica are cut.
        schedule: The order of work, `1f1b` or `gpipe`.
        begins: The names of the layers at which the second and further stages
            begin; None for stages by cost.
        line: Sends between stages of different processes; None where each
            replica is in one process.
    """

    micro_batches: int
    schedule: str
    begins: tuple[str, ...] | None
    line: Line | None = None
    _names: Sequence[str]
    _stage: int | None = None

    def _in_stages(
        self,
        mesh: Mesh,
        micro_batches: int,
        schedule: str,
        begins: tuple[str, ...] | None,
        smallest_split: int,
        layout: Any = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        self._split_over(
            *(mesh, "weights", smallest_split, layout, sequence_parallel)
        )
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.begins = begins

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
        rows = -(-global_batch_size // self.mesh.ranges)
        if self.micro_batches <= max(rows, MICRO_BATCHES * self.mesh.pipeline):
            return
        raise ConfigurationError(
            "micro_batches must be at most the rows of a replica. Received: "
            f"micro_batches={self.micro_batches} for {rows} rows, of a global "
            f"batch of {global_batch_size}. Use {rows} or fewer."
        )

    @property
    def block(self) -> int:
        """Returns which block of stages this process has."""
        return self.mesh.rank("blocks", self.first_replica)

    @property
    def stages_here(self) -> range:
        """Returns the stages that the replicas of this process have."""
        count = self.mesh.stages
        return range(self.block * count, (self.block + 1) * count)

    def devices_of(self, stage: int) -> Sequence[str]:
        """Returns the device of a stage on each replica of this process.

        Of one in another process, that of the first stage here.
        """
        here = self.stages_here
        place = stage - here.start if stage in here else 0
        return self._names[place :: len(here)]

    @property
    def stage_of_device(self) -> dict[str, int]:
        """Returns the stage that each device of this process computes."""
        here = self.stages_here
        return {
            name: here[place % len(here)]
            for place, name in enumerate(self._names)
        }

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

    def split_of(self, held: tf.Variable, stage: int) -> Split | None:
        """Returns how a variable is divided over the devices of replicas.

        Args:
            held: A variable of a layer.
            stage: Its stage.

        Returns:
            None for one that each replica stores whole.
        """
        shape = tuple(held.shape.as_list())
        split = Split(shape, self.mesh.fsdp)
        large = math.prod(shape) >= self.smallest_split and split.is_possible
        splits = self.mesh.fsdp > 1 and held.trainable and large
        splits = splits and held.dtype.is_floating
        if self.mesh.blocks == 1:
            return split if splits else None
        return self.within(shape, stage, self.mesh.fsdp if splits else 1)

    def within(self, shape: tuple[int, ...], stage: int, again: int) -> Split:
        """Returns the split by which one block of stages has all.

        Args:
            shape: Of a variable.
            stage: Its stage.
            again: Into how many parts it is divided in its stage.
        """
        return Split(
            shape,
            self.mesh.blocks,
            0 if shape else None,
            "blocks",
            again,
            owner=stage // self.mesh.stages,
        )

    @property
    def stage(self) -> int | None:
        """Returns the stage that variables are created for, if any."""
        return self._stage


class PipelineStrategy(StagedStrategy, MirroredStrategy):
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
            the fsdp or the tensor axis.
        layout: Which layers are computed in parts on the tensor axis; as for
            `FullyShardedStrategy`.
        sequence_parallel: As there.
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
        layout: Any = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        self._in_stages(
            *(mesh, micro_batches, schedule, begins, smallest_split, layout),
            sequence_parallel=sequence_parallel,
        )
        self._names = devices
        self._collective_key_base = next(self._groups)
        tf.distribute.Strategy.__init__(
            self,
            _PipelineExtended(
                self, devices[:: mesh.pipeline], cross_device_ops
            ),
        )
        self._group(beside=True)


class MultiWorkerPipelineStrategy(StagedStrategy, MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` whose replicas are in stages.

    A process has one block of neighbouring stages, or whole replicas. Its
    devices are in the order of the stages. Variables of a stage, and what
    optimizers keep for them, are in the processes that compute it, and nothing
    of them in others.

    Args:
        cluster: The cluster.
        options: How replicas communicate.
        num_local_devices: The devices of each worker.
        mesh: As for `PipelineStrategy`, over the devices of all workers.
        micro_batches: As for `PipelineStrategy`.
        schedule: As for `PipelineStrategy`.
        begins: As for `PipelineStrategy`.
        communication: `auto`, `ring` or `nccl`.
        smallest_split: As for `PipelineStrategy`.
        layout: As for `PipelineStrategy`.
        sequence_parallel: As for `PipelineStrategy`.
    """

    # A process may have several, over other meshes.
    _bases = itertools.count(start=100_500, step=1000)

    def __init__(
        self,
        cluster: ClusterConfig,
        options: tf.distribute.experimental.CommunicationOptions,
        num_local_devices: int,
        *,
        mesh: Mesh,
        micro_batches: int,
        schedule: str,
        begins: tuple[str, ...] | None,
        communication: str,
        smallest_split: int = SMALLEST_SPLIT,
        layout: Any = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        self._in_stages(
            *(mesh, micro_batches, schedule, begins, smallest_split, layout),
            sequence_parallel=sequence_parallel,
        )
        self._collective_key_base = next(self._bases)
        super().__init__(
            cluster,
            options,
            num_local_devices,
            kind=_MultiWorkerPipelineExtended,
        )
        self.is_apart = True
        self.first_replica = synchronous_topology(self).local.first
        self._names = self.extended.every_device
        if mesh.blocks > 1:
            self.line = Line(self, self._names, communication)
        self._group(communication)


class _Beside:
    """Stands for a variable that others are created beside."""

    def __init__(self, devices: list[str]) -> None:
        self._devices = devices


class _Staged(Splitting):
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


class _PipelineExtended(_Staged, mirrored_strategy.MirroredExtended):
    """Has the devices of this process."""


class _MultiWorkerPipelineExtended(_Staged, MultiWorkerExtended):
    """Has a replica for the devices of all stages of a process.

    Attributes:
        every_device: The devices of this process.
    """

    every_device: tuple[str, ...]

    def _initialize_local_devices(
        self, *arguments: Any
    ) -> tuple[tuple[str, ...], str]:
        devices, kind = super()._initialize_local_devices(*arguments)
        self.every_device = devices
        mesh = self._container_strategy().mesh
        return devices[:: mesh.stages], kind
