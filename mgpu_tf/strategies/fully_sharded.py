"""Strategies that split weights and optimizer state over devices (FSDP, ZeRO).

    create_model_parallel_strategy(data=2, fsdp=2, num_virtual_devices=4)

Replicas compute on their own rows of a batch, as with MirroredStrategy. They
differ in what they store:

    shard         a device stores                            known as
    "weights"     a part of weights, gradients and slots     ZeRO-3, FSDP
    "gradients"   whole weights and a part of them, a part   ZeRO-2
                  of gradients that accumulate and slots
    "optimizer"   the same, with whole sums of gradients     ZeRO-1

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020. Zhao et al., "PyTorch FSDP: Experiences on Scaling
Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name
from mgpu_tf.mesh import MICRO_BATCHES, Mesh, Split, mesh_of
from mgpu_tf.names import PIPELINE_SCHEDULES, SHARDS, Devices
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.mirrored import MirroredStrategy
from mgpu_tf.strategies.pipeline import PipelineStrategy
from mgpu_tf.strategies.sharded_variable import ShardedVariable
from mgpu_tf.strategies.synchronous import cross_device_ops

# To gather smaller weights costs more time than their memory is worth.
SMALLEST_SPLIT = 1024


class FullyShardedStrategy(MirroredStrategy):
    """`MirroredStrategy` whose large weights are split over its devices.

    Args:
        devices: The names of the devices.
        mesh: Their axes.
        shard: What is split: `weights`, `gradients` or `optimizer`.
        cross_device_ops: How replicas sum what is not split.
        smallest_split: The elements of the smallest weight that is split.

    Attributes:
        mesh: The axes.
        shard: What is split.
        smallest_split: The elements of the smallest weight that is split.
    """

    def __init__(
        self,
        devices: list[str],
        mesh: Mesh,
        shard: str,
        cross_device_ops: tf.distribute.CrossDeviceOps | None,
        smallest_split: int = SMALLEST_SPLIT,
    ) -> None:
        self.mesh = mesh
        self.shard = shard
        self.smallest_split = smallest_split
        self._collective_key_base = next(self._groups)
        tf.distribute.Strategy.__init__(
            self, _ShardedExtended(self, devices, cross_device_ops)
        )


class _ShardedExtended(mirrored_strategy.MirroredExtended):
    """Makes large weights, and what optimizers keep for them, as parts."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        strategy = self._container_strategy()
        beside = kwargs.get("colocate_with")
        if not _may_be_split(kwargs, beside, strategy.shard):
            return super()._create_variable(next_creator, **kwargs)
        with tf.init_scope(), tf.device(self._devices[0]):
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
        shape = tuple(value.shape.as_list())
        if isinstance(beside, ShardedVariable):
            splits = shape == tuple(beside.shape)
        else:
            splits = (
                value.dtype.is_floating
                and math.prod(shape) >= strategy.smallest_split
                and Split(shape, strategy.mesh.fsdp).is_possible
            )
        if not splits:
            kwargs["initial_value"] = lambda: value
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        return self._split(next_creator, value, kwargs)

    def _split(
        self, next_creator: Any, value: tf.Tensor, kwargs: dict[str, Any]
    ) -> ShardedVariable:
        strategy = self._container_strategy()
        mesh = strategy.mesh
        split = Split(tuple(value.shape.as_list()), mesh.fsdp)
        flat = value if split.by_rows else tf.reshape(value, [-1])
        name = kwargs.get("name") or "Variable"

        def create(replica: int, initial: tf.Tensor, suffix: str) -> Any:
            # No tape watches them: gradients are of the whole weight.
            options = dict(
                kwargs, initial_value=lambda: initial, trainable=False
            )
            options["name"] = f"{name}{suffix}" if suffix else name
            with tf.init_scope(), tf.device(self._devices[replica]):
                return next_creator(**options)

        parts, whole = [], []
        keeps_whole = strategy.shard != "weights" and kwargs.get("trainable")
        for replica in range(mesh.size):
            first, after = split.bounds(mesh.fsdp_rank(replica))
            suffix = f"/replica_{replica}" if replica else ""
            # A slice of a tensor would keep all of it in memory.
            part = tf.raw_ops.DeepCopy(x=flat[first:after])
            parts.append(create(replica, part, suffix))
            if keeps_whole:
                whole.append(create(replica, value, f"/whole_{replica}"))
        return ShardedVariable(
            strategy,
            parts,
            kwargs.get("aggregation", tf.VariableAggregation.NONE),
            mesh=mesh,
            split=split,
            whole=whole,
        )


def _may_be_split(kwargs: dict[str, Any], beside: Any, shard: str) -> bool:
    """Whether a variable is a weight, or is kept for one that is split."""
    if isinstance(beside, ShardedVariable):
        sums = "gradient_accumulator" in (kwargs.get("name") or "")
        return not (sums and shard == "optimizer")
    return beside is None and bool(kwargs.get("trainable"))


def create_model_parallel_strategy(
    data: int | None = None,
    fsdp: int | None = None,
    *,
    shard: str = "weights",
    devices: Devices = None,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
    smallest_split: int = SMALLEST_SPLIT,
    pipeline: int = 1,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    stages: Sequence[str] | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy that splits weights over devices of one machine.

    Example:
        strategy = mgpu_tf.create_model_parallel_strategy(data=2, fsdp=4)
        strategy = mgpu_tf.create_model_parallel_strategy(data=2, pipeline=2)

    Args:
        data: How many copies of the weights there are. Default: what the
            other axes leave, or 1.
        fsdp: Over how many devices each copy is split. Default: what `data`
            leaves; 1 with `pipeline`.
        shard: `weights`, `gradients` or `optimizer`; see the table above.
        devices: As for `create_mirrored_strategy`.
        communication: As for `create_mirrored_strategy`.
        num_virtual_devices: Split the CPU into N devices.
        smallest_split: Weights with fewer elements stay whole on each device.
        pipeline: Into how many stages the layers of each copy are cut.
        micro_batches: With `pipeline`, into how many parts the rows of a
            replica are cut. Default: 4 for each stage.
        schedule: With `pipeline`, `1f1b` or `gpipe`.
        stages: With `pipeline`, the names of the layers at which the second
            and further stages begin. Default: stages of equal cost.

    Returns:
        A `tf.distribute.MirroredStrategy` whose large weights are split, or
        whose layers are.

    Raises:
        ConfigurationError: The axes do not multiply to the number of devices
            or do not go together, a name is unknown, or a device does not
            exist.
    """
    if shard not in SHARDS:
        raise ConfigurationError(unknown_name("shard", shard, SHARDS))
    if schedule not in PIPELINE_SCHEDULES:
        raise ConfigurationError(
            unknown_name("pipeline_schedule", schedule, PIPELINE_SCHEDULES)
        )
    check_integer("pipeline_parallel", pipeline, 1)
    if micro_batches is not None:
        check_integer("micro_batches", micro_batches, 1)
    begins = None if stages is None else tuple(stages)
    if begins is not None and len(begins) != pipeline - 1:
        raise ConfigurationError(
            "pipeline_stages names the first layer of each stage but the "
            f"first. Received: {len(begins)} names with "
            f"pipeline_parallel={pipeline}. Name {pipeline - 1}, or none."
        )
    if pipeline == 1 and micro_batches is not None:
        raise ConfigurationError(
            "micro_batches goes with pipeline_parallel. Received: "
            f"micro_batches={micro_batches} with pipeline_parallel=1. Leave "
            "it out, or accumulate with gradient_accumulation_steps."
        )
    names = devices_lib.select_local(devices, num_virtual_devices)
    mesh = mesh_of(len(names), data, fsdp, pipeline)
    if pipeline > 1:
        if shard != "weights":
            raise ConfigurationError(
                "shard goes with fsdp. Received: "
                f"shard={shard!r} with pipeline_parallel={pipeline}. Leave "
                "it out: each stage stores its own weights."
            )
        return PipelineStrategy(
            names,
            mesh,
            micro_batches or MICRO_BATCHES * pipeline,
            schedule,
            begins,
            cross_device_ops(communication, names[::pipeline]),
        )
    return FullyShardedStrategy(
        names,
        mesh,
        shard,
        cross_device_ops(communication, names),
        smallest_split,
    )
