"""Strategies that split weights and optimizer state over devices (FSDP, ZeRO).

Replicas compute on their own rows of a batch, as with MirroredStrategy; those
of a tensor axis on the same rows. They differ in what they store:

    shard         a device stores                            known as
    "weights"     a part of weights, gradients and slots     ZeRO-3, FSDP
    "gradients"   whole weights and a part of them, a part   ZeRO-2
                  of gradients that accumulate and slots
    "optimizer"   the same, with whole sums of gradients     ZeRO-1

In a cluster the replicas are those of all workers. They are numbered worker by
worker, so that a group lies in one machine where it fits.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020. Zhao et al., "PyTorch FSDP: Experiences on Scaling
Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import REPLICA_AXES, Mesh, Split, single
from mgpu_tf.strategies.replicas.collectives import Groups
from mgpu_tf.strategies.replicas.mirrored import (
    MirroredStrategy,
    MultiWorkerExtended,
    MultiWorkerMirroredStrategy,
)
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.replicas.topology import Topology, synchronous_topology
from mgpu_tf.strategies.split.layout import Layout
from mgpu_tf.strategies.split.sharded_variable import (
    ShardedVariable,
    new_source,
    own_buffer,
    stored_part,
)

# To gather smaller weights costs more time than their memory is worth.
SMALLEST_SPLIT = 1024

Meeting = Callable[[str], contextlib.AbstractContextManager[None]]


class SplittingStrategy:
    """What strategies have whose replicas store parts of weights.

    Attributes:
        mesh: The axes.
        shard: What is split: `weights`, `gradients` or `optimizer`.
        smallest_split: The elements of the smallest weight that is split.
        layout: Which layers are computed in parts. The engine splits their
            weights when the model is built.
        sequence_parallel: Whether devices of the tensor axis have parts of
            sequences between these layers, where they can.
        splitting: How the variables that are made now are divided, if they
            are weights of such layers.
        spreading: How a table is divided that is made now, if its rows are to
            be spread.
        first_replica: The first replica of this process.
        is_apart: Whether several processes hold the replicas.
        meeting: Returns a block that all workers enter together, to read.
    """

    mesh: Mesh
    shard: str
    smallest_split: int
    layout: Layout
    sequence_parallel: bool = False
    splitting: Split | None = None
    spreading: Split | None = None
    first_replica: int = 0
    is_apart: bool = False
    meeting: Meeting = staticmethod(lambda name: contextlib.nullcontext())

    if TYPE_CHECKING:
        run: Any
        scope: Any
        experimental_local_results: Any
        experimental_distribute_values_from_function: Any

    @property
    def splits_later(self) -> bool:
        """Whether weights are split when the structure of a model is known."""
        return self.mesh.tensor > 1 or not self.layout.is_auto

    @property
    def splits_by_size(self) -> bool:
        """Whether weights are split when they are made, if they are large."""
        return not self.splits_later and self._table_axis is None

    @property
    def _table_axis(self) -> str | None:
        """The axis over which a `ShardedEmbedding` has its rows."""
        if self.mesh.fsdp > 1:
            return None  # They are split as other weights are.
        axes = ("rows", "tensor")
        return next((axis for axis in axes if self.mesh.length(axis) > 1), None)

    @contextlib.contextmanager
    def spreading_rows(self, rows: int, width: int) -> Iterator[None]:
        """Lets a table that is made in a block have its rows spread.

        Args:
            rows: Of the table.
            width: The length of a row.
        """
        axis = self._table_axis
        if axis is not None and rows >= self.mesh.length(axis):
            parts = self.mesh.length(axis)
            self.spreading = Split((rows, width), parts, 0, axis)
        try:
            yield
        finally:
            self.spreading = None

    def read_together(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns the whole value of a variable of several processes.

        Outside of replicas; all processes call this together.
        """
        if not tf.executing_eagerly():
            return self._joined(variable.split, variable.values)
        with self.meeting(f"a weight of shape {variable.shape}"):
            return self._read(variable)

    def _read(self, variable: ShardedVariable) -> tf.Tensor:
        split = variable.split
        key = (split, variable.dtype)
        parts = [part.read_value() for part in variable.values]
        # One for each shape: what is traced is numbered alike everywhere.
        if key not in self._readers:
            read = tf.function(
                lambda parts: self._joined(split, parts),
                autograph=False,
            )
            specs = [tf.TensorSpec(part.shape, part.dtype) for part in parts]
            self._readers[key] = read.get_concrete_function(specs)
        return self._readers[key](parts)

    def _joined(self, split: Split, parts: Any) -> tf.Tensor:
        def on_replica() -> tf.Tensor:
            replica = this_replica()
            part = tf.convert_to_tensor(parts[replica - self.first_replica])
            return self.joined(split, part)

        return self.experimental_local_results(self.run(on_replica))[0]

    def along(self, *axes: str) -> Groups:
        """Returns the groups of replicas that differ on these axes only."""
        given = single(axes)
        return self._groups_along[
            tuple(axis for axis in self.mesh.several if axis in given)
        ]

    def joined(self, split: Split, part: tf.Tensor) -> tf.Tensor:
        """Returns a whole value of the parts of several replicas. On a replica.

        Args:
            split: How it is divided.
            part: What this replica stores of it.
        """
        groups = self.along(split.over)
        inner = split.inner(groups.rank())
        if inner is not None and inner.length:
            part = self.along("fsdp").all_gather(part, 0, inner.length)
            part = tf.reshape(part, inner.shape)
        if split.over == "fsdp":
            return part
        if split.owner is not None:
            return groups.broadcast(part, split.owner, split.shape)
        return groups.all_gather(part, split.dim or 0, split.length)

    @contextlib.contextmanager
    def whole(
        self, variables: Iterable[Any], *, reads: bool = True
    ) -> Iterator[None]:
        """Lets one process read variables whole, alone, in a block.

        All processes enter the block together. The one that reads gathers a
        variable whenever it reads it, and keeps none. The others wait where
        the block begins, and give their parts.

        Args:
            variables: TensorFlow's variables, the same in all processes;
                others than split ones are left.
            reads: Whether this is the process that reads.
        """
        split = [
            variable
            for variable in variables
            if isinstance(variable, ShardedVariable) and variable.is_apart
        ]
        with self.meeting("the whole model"):
            if not reads:
                while (place := self._asked(None)) >= 0:
                    self._read(split[place])
                yield
                return
            for place, variable in enumerate(split):
                variable.reader = functools.partial(
                    self._read_alone, place, variable
                )
            try:
                yield
            finally:
                for variable in split:
                    variable.reader = None
                self._asked(-1)

    def _read_alone(self, place: int, variable: ShardedVariable) -> tf.Tensor:
        """Returns the whole value of a variable that the others wait for."""
        with tf.init_scope():
            self._asked(place)
            return self._read(variable)

    def _asked(self, place: int | None) -> int:
        """Returns which variable is read next; all processes call this.

        Args:
            place: Its place; -1 where there is none. None in the processes
                that receive it.
        """
        if "asked" not in self._readers:
            self._readers["asked"] = tf.function(
                self._sum, autograph=False
            ).get_concrete_function(tf.TensorSpec([], tf.int64))
        number = 0 if place is None else place + 1
        return int(self._readers["asked"](tf.constant(number, tf.int64))) - 1

    def _sum(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a number over processes."""

        def on_replica() -> tf.Tensor:
            replica = this_replica()
            own = number if replica == self.first_replica else number * 0
            return self.along(*REPLICA_AXES).all_reduce(own)

        return self.experimental_local_results(self.run(on_replica))[0]

    def _split_over(
        self,
        mesh: Mesh,
        shard: str,
        smallest_split: int,
        layout: Any = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        self.mesh = mesh
        self.sequence_parallel = sequence_parallel
        self.layout = Layout(layout)
        self.shard = shard
        self.smallest_split = smallest_split
        self._readers: dict[Any, Any] = {}

    def _group(
        self, communication: str = "auto", *, beside: bool = False
    ) -> None:
        """Makes the groups of replicas, the same in all processes."""
        self._groups_along = {
            axes: Groups(
                self,
                self.mesh.groups(axes),
                communication=communication,
                beside=beside,
            )
            for count in range(len(self.mesh.several) + 1)
            for axes in itertools.combinations(self.mesh.several, count)
        }


class FullyShardedStrategy(SplittingStrategy, MirroredStrategy):
    """`MirroredStrategy` whose large weights are split over its devices.

    Args:
        devices: The names of the devices.
        mesh: Their axes.
        shard: What is split: `weights`, `gradients` or `optimizer`.
        cross_device_ops: How replicas sum what is not split.
        smallest_split: The elements of the smallest weight that is split.
        layout: Which layers are computed in parts on the tensor axis: `auto`,
            or patterns of paths.
        communication: How groups of replicas exchange what is split; as for
            `Groups`.
        sequence_parallel: As for `SplittingStrategy`.
    """

    def __init__(
        self,
        devices: list[str],
        mesh: Mesh,
        shard: str,
        cross_device_ops: tf.distribute.CrossDeviceOps | None,
        smallest_split: int = SMALLEST_SPLIT,
        layout: Any = "auto",
        communication: str = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        self._split_over(
            *(mesh, shard, smallest_split, layout, sequence_parallel)
        )
        self._collective_key_base = next(self._groups)
        tf.distribute.Strategy.__init__(
            self, _ShardedExtended(self, devices, cross_device_ops)
        )
        self._group(communication)


class MultiWorkerFullyShardedStrategy(
    SplittingStrategy, MultiWorkerMirroredStrategy
):
    """`MultiWorkerMirroredStrategy` whose large weights are split.

    Args:
        cluster: The cluster.
        options: How replicas communicate.
        num_local_devices: The replicas of each worker.
        mesh: The axes of the replicas of all workers.
        shard: What is split: `weights`, `gradients` or `optimizer`.
        communication: `auto`, `ring` or `nccl`.
        smallest_split: The elements of the smallest weight that is split.
        layout: As for `FullyShardedStrategy`.
        sequence_parallel: As there.
    """

    # A process may have several, over other meshes.
    _bases = itertools.count(start=100_000, step=1000)

    def __init__(
        self,
        cluster: ClusterConfig,
        options: tf.distribute.experimental.CommunicationOptions,
        num_local_devices: int,
        *,
        mesh: Mesh,
        shard: str,
        communication: str,
        smallest_split: int = SMALLEST_SPLIT,
        layout: Any = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        self._split_over(
            *(mesh, shard, smallest_split, layout, sequence_parallel)
        )
        self._collective_key_base = next(self._bases)
        super().__init__(
            cluster,
            options,
            num_local_devices,
            kind=_MultiWorkerShardedExtended,
        )
        self.is_apart = True
        self.first_replica = synchronous_topology(self).local.first
        self._group(communication)


class Splitting:
    """Makes large weights, and what optimizers keep for them, as parts."""

    _devices: Any
    _container_strategy: Any

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        strategy = self._container_strategy()
        beside = kwargs.get("colocate_with")
        if strategy.splitting is not None:
            value = kwargs["initial_value"]
            value = tf.convert_to_tensor(value() if callable(value) else value)
            return self._split(
                next_creator, value, kwargs, strategy.splitting, beside
            )
        spread = strategy.spreading
        is_weight = beside is None
        if is_weight and spread is None and not strategy.splits_by_size:
            return self._not_split(next_creator, kwargs)
        # What TensorFlow loads has a value later.
        later = kwargs.get("initial_value") is None
        if later or not _may_be_split(kwargs, beside, strategy.shard):
            return self._not_split(next_creator, kwargs)
        first = self._devices_of_parts(beside)[0]
        with tf.init_scope(), tf.device(first):
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
        shape = tuple(value.shape.as_list())
        split = spread or Split(shape, strategy.mesh.fsdp)
        if isinstance(beside, ShardedVariable):
            split = beside.split
            splits = shape == tuple(beside.shape)
        else:
            splits = spread is not None or (
                value.dtype.is_floating
                and math.prod(shape) >= strategy.smallest_split
                and split.is_possible
            )
        if not splits:
            kwargs["initial_value"] = lambda: value
            return self._not_split(next_creator, kwargs)
        kwargs.pop("colocate_with", None)
        if strategy.is_apart:
            value = self._of_first_worker(value, kwargs)
        return self._split(next_creator, value, kwargs, split, beside)

    def _update(
        self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        """Updates parts; a step gives each replica what belongs to its own."""
        if isinstance(var, ShardedVariable) and any(
            isinstance(each, tf.Tensor)
            and each.shape == var.shape != var.values[0].shape
            for each in args
        ):
            raise ConfigurationError(
                "Outside of a step the optimizer of a Trainer's model applies "
                "gradients to weights that are split, and no other. Received: "
                f"another, for {var.name!r}. Use trainer.model.optimizer, or "
                "assign to the weight."
            )
        return super()._update(  # type: ignore[misc]
            var, fn, args, kwargs, group
        )

    def _not_split(self, next_creator: Any, kwargs: dict[str, Any]) -> Any:
        return super()._create_variable(  # type: ignore[misc]
            next_creator, **kwargs
        )

    def _devices_of_parts(self, beside: Any) -> Any:
        """Returns where the replicas store their parts of a variable.

        Args:
            beside: A variable that it belongs to, if any.
        """
        del beside
        return self._devices

    def _of_first_worker(
        self, value: tf.Tensor, kwargs: dict[str, Any]
    ) -> tf.Tensor:
        """Returns the value that the first worker begins with."""
        given = dict(kwargs, initial_value=value, dtype=value.dtype)
        with tf.init_scope():
            return self._get_variable_creator_initial_value(  # type: ignore
                0, self._devices[0], None, **given
            )()

    def _split(
        self,
        next_creator: Any,
        value: tf.Tensor,
        kwargs: dict[str, Any],
        split: Split,
        beside: Any,
    ) -> ShardedVariable:
        strategy = self._container_strategy()
        mesh, devices = strategy.mesh, self._devices_of_parts(beside)
        name = kwargs.get("name") or "Variable"

        def create(
            place: int, initial: tf.Tensor, suffix: str, **more: Any
        ) -> Any:
            # No tape watches them: gradients are of the whole weight.
            options = dict(
                kwargs, initial_value=lambda: initial, trainable=False
            )
            options["name"] = f"{name}{suffix}" if suffix else name
            with tf.init_scope(), tf.device(devices[place]):
                return next_creator(**options | more)

        parts, whole = [], []
        keeps_whole = strategy.shard != "weights" and kwargs.get("trainable")
        for place in range(len(devices)):
            replica = strategy.first_replica + place
            part = stored_part(value, split, mesh, replica)
            suffix = f"/replica_{replica}" if place else ""
            parts.append(create(place, own_buffer(part), suffix))
            if keeps_whole:
                whole.append(create(place, value, f"/whole_{replica}"))
        source = None
        if kwargs.get("trainable") and value.dtype.is_floating:
            source = new_source(
                lambda initial_value, shape: create(
                    *(0, initial_value, "/gradient"),
                    shape=shape,
                    trainable=True,
                ),
                value.dtype,
            )
        return ShardedVariable(
            strategy,
            parts,
            kwargs.get("aggregation", tf.VariableAggregation.NONE),
            mesh=mesh,
            split=split,
            whole=whole,
            source=source,
        )


class _ShardedExtended(Splitting, mirrored_strategy.MirroredExtended):
    """Splits weights over the devices of this process."""


class _MultiWorkerShardedExtended(Splitting, MultiWorkerExtended):
    """Splits weights over the devices of all workers."""


def _may_be_split(kwargs: dict[str, Any], beside: Any, shard: str) -> bool:
    """Whether a variable is a weight, or is kept for one that is split."""
    if isinstance(beside, ShardedVariable):
        sums = "gradient_accumulator" in (kwargs.get("name") or "")
        return not (sums and shard == "optimizer")
    return beside is None and bool(kwargs.get("trainable"))


def split_over(
    strategy: SplittingStrategy, held: tf.Variable, split: Split
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


def sharded_topology(strategy: tf.distribute.Strategy) -> Topology:
    """Returns the topology.

    Devices of the tensor axis, and blocks of a pipeline, have the same rows.
    """
    topology = synchronous_topology(strategy)
    mesh = strategy.mesh
    local = dataclasses.replace(
        topology.local, same_rows=mesh.tensor * mesh.blocks
    )
    return dataclasses.replace(
        topology, local=local, data_parallel_degree=local.ranges
    )
