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

import dataclasses
import math
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.mesh import Mesh, Split, mesh_of
from mgpu_tf.names import SHARDS, Devices
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.layout import Layout
from mgpu_tf.strategies.mirrored import MirroredStrategy
from mgpu_tf.strategies.sharded_variable import ShardedVariable, part_of
from mgpu_tf.strategies.synchronous import cross_device_ops
from mgpu_tf.strategies.topology import Topology, synchronous_topology

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
        layout: Which layers are computed in parts on the tensor axis: `auto`,
            or patterns of paths. The engine splits their weights when the
            model is built.

    Attributes:
        mesh: The axes.
        layout: As above.
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
        layout: Any = "auto",
    ) -> None:
        self.mesh = mesh
        self.layout = Layout(layout)
        self.shard = shard
        self.smallest_split = smallest_split
        self._collective_key_base = next(self._groups)
        self.splitting: Split | None = None
        tf.distribute.Strategy.__init__(
            self, _ShardedExtended(self, devices, cross_device_ops)
        )

    @property
    def splits_later(self) -> bool:
        """Whether weights are split when the structure of a model is known."""
        return self.mesh.tensor > 1 or not self.layout.is_auto


class _ShardedExtended(mirrored_strategy.MirroredExtended):
    """Makes large weights, and what optimizers keep for them, as parts."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        strategy = self._container_strategy()
        beside = kwargs.get("colocate_with")
        if strategy.splitting is not None:
            value = kwargs["initial_value"]
            split = strategy.splitting
            return self._split(next_creator, value, kwargs, split)
        if strategy.mesh.fsdp == 1 and beside is None and strategy.splits_later:
            return super()._create_variable(next_creator, **kwargs)
        if not _may_be_split(kwargs, beside, strategy.shard):
            return super()._create_variable(next_creator, **kwargs)
        with tf.init_scope(), tf.device(self._devices[0]):
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
        shape = tuple(value.shape.as_list())
        split = Split(shape, strategy.mesh.fsdp)
        if isinstance(beside, ShardedVariable):
            split = beside.split
            splits = shape == tuple(beside.shape)
        else:
            splits = (
                value.dtype.is_floating
                and math.prod(shape) >= strategy.smallest_split
                and split.is_possible
            )
        if not splits:
            kwargs["initial_value"] = lambda: value
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        return self._split(next_creator, value, kwargs, split)

    def _split(
        self,
        next_creator: Any,
        value: tf.Tensor,
        kwargs: dict[str, Any],
        split: Split,
    ) -> ShardedVariable:
        strategy = self._container_strategy()
        mesh = strategy.mesh
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
            part = part_of(value, split, mesh.rank(split.over, replica))
            suffix = f"/replica_{replica}" if replica else ""
            # A slice of a tensor would keep all of it in memory.
            part = tf.raw_ops.DeepCopy(x=part)
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


def split_over(
    strategy: FullyShardedStrategy, held: tf.Variable, split: Split
) -> ShardedVariable:
    """Returns a variable with the value of another, stored in parts.

    Args:
        strategy: The strategy of the other.
        held: A variable that each device stores whole.
        split: How it is divided.
    """
    strategy.splitting = split
    try:
        with tf.init_scope(), strategy.scope():
            return tf.Variable(
                tf.convert_to_tensor(held),
                trainable=held.trainable,
                dtype=held.dtype,
                name=held.name.partition(":")[0],
                aggregation=held.aggregation,
            )
    finally:
        strategy.splitting = None


def sharded_topology(strategy: FullyShardedStrategy) -> Topology:
    """Returns the topology: devices of the tensor axis have the same rows."""
    topology = synchronous_topology(strategy)
    local = dataclasses.replace(topology.local, same_rows=strategy.mesh.tensor)
    return dataclasses.replace(
        topology, local=local, data_parallel_degree=local.ranges
    )


def create_model_parallel_strategy(
    data: int | None = None,
    fsdp: int | None = None,
    tensor: int | None = None,
    *,
    layout: Any = "auto",
    shard: str = "weights",
    devices: Devices = None,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
    smallest_split: int = SMALLEST_SPLIT,
) -> tf.distribute.Strategy:
    """Creates a strategy that splits weights over devices of one machine.

    Example:
        strategy = mgpu_tf.create_model_parallel_strategy(data=2, fsdp=4)

    Args:
        data: How many copies of the weights there are. Default: what `fsdp`
            and `tensor` leave, or 1.
        fsdp: Over how many devices each copy is split. Default: what `data`
            leaves; 1 with `tensor`.
        tensor: Over how many devices the computing of layers is split.
            Default: 1.
        layout: Which layers these are. `auto`: attention, the layers after it,
            embeddings and other dense layers, as the structure of the model
            tells. Or a mapping from patterns of the paths of weights to a
            tuple, as `keras.distribution.LayoutMap`: "model" at the dimension
            that is split over the tensor axis, "batch" over the data axis.
        shard: `weights`, `gradients` or `optimizer`; see the table above.
        devices: As for `create_mirrored_strategy`.
        communication: As for `create_mirrored_strategy`.
        num_virtual_devices: Split the CPU into N devices.
        smallest_split: Weights with fewer elements stay whole on each device.

    Returns:
        A `tf.distribute.MirroredStrategy` whose large weights are split.

    Raises:
        ConfigurationError: The axes do not multiply to the number of devices,
            a name is unknown, or a device does not exist.
    """
    if shard not in SHARDS:
        raise ConfigurationError(unknown_name("shard", shard, SHARDS))
    names = devices_lib.select_local(devices, num_virtual_devices)
    if layout != "auto" and fsdp is None:
        fsdp = 1
    mesh = mesh_of(len(names), data, fsdp, tensor)
    strategy = FullyShardedStrategy(
        names,
        mesh,
        shard,
        cross_device_ops(communication, names),
        smallest_split,
        layout,
    )
    if mesh.fsdp > 1 and strategy.splits_later:
        raise ConfigurationError(
            "A layout goes with the tensor and the data axis. Received: "
            f"layout={layout!r} with fsdp={mesh.fsdp}. Leave one of them out."
        )
    if strategy.splits_later and shard != "weights":
        raise ConfigurationError(
            "What layers compute in parts is stored in parts. Received: "
            f"tensor={mesh.tensor} with shard={shard!r}. Leave shard out."
        )
    return strategy
