"""Which axes the devices of a strategy form, what is split, what is summed.

    mesh = Mesh(data=2, fsdp=4)          # 8 devices
    mesh.rank("fsdp", 5)                 # 1
    mesh.along(["fsdp"], 5)              # [4, 5, 6, 7]

    replica    0  1  2  3    4  5  6  7
    data       0  0  0  0    1  1  1  1      each has its own rows of a batch
    fsdp       0  1  2  3    0  1  2  3      each stores its own part of weights

Replicas of one data rank are a group. A group holds one copy of every weight,
split over its members.

    mesh = Mesh(data=2, tensor=2)        # 4 devices, 4 replicas

    replica    0  1    2  3
    data       0  0    1  1
    tensor     0  1    0  1                  these have the same rows, and each
                                             computes with its part of weights

    mesh = Mesh(fsdp=2, tensor=2)        # 4 devices, 4 replicas

    replica    0  1    2  3
    fsdp       0  0    1  1                  each has its own rows of a batch
    tensor     0  1    0  1                  each stores its own quarter

    mesh = Mesh(data=2, pipeline=2)      # 4 devices, 2 replicas

    device     0  1    2  3
    replica    0  0    1  1
    stage      0  1    0  1                  each has its own layers

    mesh = Mesh(fsdp=2, pipeline=2)      # 4 devices, 2 replicas

    replica    0  0    1  1
    fsdp       0  0    1  1                  each has its own rows of a batch
    stage      0  1    0  1                  each stores half of its layers

    mesh = Mesh(tensor=2, pipeline=2)    # 4 devices, 2 replicas

    replica    0  0    1  1
    tensor     0  0    1  1                  these have the same rows
    stage      0  1    0  1                  each computes with half of its
                                             layers' weights

    mesh = Mesh(data=2, pipeline=4, blocks=2)    # 8 devices, 4 replicas

    process    0  0    1  1    2  2    3  3
    replica    0  0    1  1    2  2    3  3
    data       0  0    0  0    1  1    1  1  each has its own rows of a batch
    blocks     0  0    1  1    0  0    1  1  neighbouring stages, in a process
    stage      0  1    2  3    0  1    2  3

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name
from mgpu_tf.names import SHARDS

# Micro-batches for each stage of a pipeline. Huang et al., "GPipe", NeurIPS
# 2019, section 2, finds the time without work negligible from here on.
MICRO_BATCHES = 4

# The axes on which replicas have a place.
REPLICA_AXES = ("data", "fsdp", "tensor", "blocks")
# Both at once, over which the rows of a batch are cut.
ROWS = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The axes of a strategy's devices; the last axis changes fastest.

    Ranks and groups are of replicas. Each has a device for every stage of a
    pipeline, or for those of a block.

    Attributes:
        data: How many copies of the weights there are.
        fsdp: Over how many devices each copy is split.
        tensor: Over how many devices the computing of a layer is split.
        pipeline: Into how many stages each copy is cut, a device for each.
        blocks: Over how many processes the stages of a copy are.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    blocks: int = 1

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return self.replicas * self.stages

    @property
    def replicas(self) -> int:
        """Returns the number of replicas."""
        return self.ranges * self.tensor * self.blocks

    @property
    def ranges(self) -> int:
        """Returns into how many ranges the rows of a batch are cut."""
        return self.data * self.fsdp

    @property
    def stages(self) -> int:
        """Returns how many stages a replica has, each on a device."""
        return self.pipeline // self.blocks

    @property
    def several(self) -> tuple[str, ...]:
        """Returns the axes on which replicas have different places."""
        return tuple(axis for axis in REPLICA_AXES if self.length(axis) > 1)

    def length(self, axis: str) -> int:
        """Returns the size of an axis, such as `fsdp`, or of `rows`."""
        return self.ranges if axis == "rows" else int(getattr(self, axis))

    def rank(self, axis: str, replica: int) -> int:
        """Returns the place of a replica on an axis.

        Args:
            axis: One of `REPLICA_AXES`, or `rows`.
            replica: Its number.
        """
        return replica // self._step(axis) % self.length(axis)

    def along(self, axes: Sequence[str], replica: int) -> list[int]:
        """Returns the replicas that differ from one on these axes only."""
        others = others_than(axes)
        return [
            each
            for each in range(self.replicas)
            if all(self.rank(a, each) == self.rank(a, replica) for a in others)
        ]

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Returns all replicas, in groups that differ on these axes only."""
        every = [self.along(axes, replica) for replica in range(self.replicas)]
        return [
            group for replica, group in enumerate(every) if group[0] == replica
        ]

    def _step(self, axis: str) -> int:
        return {
            "data": self.fsdp * self.tensor * self.blocks,
            "fsdp": self.tensor * self.blocks,
            "rows": self.tensor * self.blocks,
            "tensor": self.blocks,
            "blocks": 1,
        }[axis]

    def __str__(self) -> str:
        others = {"tensor": self.tensor, "pipeline": self.pipeline}
        return f"data={self.data}, fsdp={self.fsdp}" + "".join(
            f", {axis}={length}"
            for axis, length in others.items()
            if length > 1
        )


def single(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns axes with those that `rows` is of in its place."""
    every = ([*ROWS] if axis == "rows" else [axis] for axis in axes)
    return tuple(itertools.chain.from_iterable(every))


def others_than(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of replicas that are not among some."""
    given = single(axes)
    return tuple(axis for axis in REPLICA_AXES if axis not in given)


def mesh_of(
    devices: int,
    data: int | None,
    fsdp: int | None,
    tensor: int = 1,
    pipeline: int = 1,
    workers: int = 1,
) -> Mesh:
    """Returns the mesh of a number of devices.

    Args:
        devices: The number of devices of a worker.
        data: The size of the data axis. Default: what the others leave, or 1.
        fsdp: The size of the fsdp axis. Default: what `data` leaves; 1 with
            `tensor` or `pipeline`.
        tensor: The size of the tensor axis.
        pipeline: The size of the pipeline axis.
        workers: How many workers there are, each with as many devices.

    Raises:
        ConfigurationError: The product is not the number of devices, or axes
            do not go together.
    """
    for name, length in (("data_parallel", data), ("fsdp_parallel", fsdp)):
        if length is not None:
            check_integer(name, length, 1)
    total = devices * workers
    within = tensor * pipeline
    if fsdp is None:
        fsdp = 1 if within > 1 else total // (data or 1) or 1
    if data is None:
        data = total // (fsdp * within) or 1
    blocks = max(pipeline // devices, 1) if workers > 1 else 1
    mesh = Mesh(data, fsdp, tensor, pipeline, blocks)
    _check_together(mesh, devices, workers)
    if mesh.size != total:
        there_are = f"{devices} devices"
        if workers > 1:
            there_are = f"{workers} workers x {devices} devices = {total}"
        factors = str(mesh).replace(", ", " x ")
        raise ConfigurationError(
            "The sizes of the axes must multiply to the number of devices. "
            f"Received: {factors} = {mesh.size} for {there_are}. Change "
            "data_parallel, fsdp_parallel, tensor_parallel or "
            "pipeline_parallel, or the devices."
        )
    return mesh


def _check_together(mesh: Mesh, devices: int, workers: int) -> None:
    if workers == 1:
        return
    if mesh.tensor > 1 and mesh.blocks > 1:
        raise ConfigurationError(
            "With tensor, a worker has all stages of a pipeline: their number "
            "must divide that of its devices. Received: "
            f"pipeline={mesh.pipeline}, tensor={mesh.tensor} for {devices} "
            "devices of each worker. Use fewer stages or more devices, or "
            "fsdp in place of tensor."
        )
    # Devices that have a place of their own on an axis.
    for axis, own in (
        ("pipeline", devices),
        ("tensor", max(devices // mesh.stages, 1)),
    ):
        length = mesh.length(axis)
        if length % own and own % length:
            places = f"{devices} devices"
            if own != devices:
                places += f", {own} for each stage,"
            raise ConfigurationError(
                f"The size of the {axis} axis must divide the number of "
                "devices of a worker, or be a multiple of it. Received: "
                f"{axis}={length} for {places} of each worker. "
                f"Change {axis}_parallel."
            )


def check_shard(
    shard: str, tensor: int = 1, pipeline: int = 1, layout: Any = "auto"
) -> None:
    """Raises where a choice of what is split does not go with the axes.

    Args:
        shard: What is split over fsdp, one of `SHARDS`.
        tensor: The size of the tensor axis.
        pipeline: The size of the pipeline axis.
        layout: `auto`, or which layers are computed in parts.

    Raises:
        ConfigurationError: It is none of `SHARDS`, or each device stores what
            it computes with, and there is nothing to choose.
    """
    if shard not in SHARDS:
        raise ConfigurationError(unknown_name("shard", shard, SHARDS))
    in_parts = tensor > 1 or pipeline > 1 or layout != "auto"
    if shard != "weights" and in_parts:
        raise ConfigurationError(
            "shard goes with fsdp. Received: "
            f"shard={shard!r} with tensor={tensor}, pipeline={pipeline}, "
            f"layout={layout!r}. Leave it out: each device stores what it "
            "computes with."
        )


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the part of a step in which a stage of a pipeline has no work.

    It is (p - 1) / (m + p - 1) for p stages of equal work and m
    micro-batches. Huang et al., "GPipe", NeurIPS 2019, section 2.

    Args:
        stages: p.
        micro_batches: m.
    """
    return (stages - 1) / (micro_batches + stages - 1)


@dataclasses.dataclass(frozen=True)
class Split:
    """How the elements of a variable are divided over an axis of a mesh.

    A matrix is divided by rows, so that the gradient of an embedding stays a
    list of rows. Any other variable is flattened and divided by elements.

        shape (10, 8), 4 parts     rows 0-1 | 2-4 | 5-6 | 7-9
        shape (3, 3, 5, 7), 2      elements 0-156 | 157-314

    With `dim` it is divided along that dimension. With `again`, each part is
    divided once more, as above, over the fsdp axis. With `owner`, one part has
    all of it, and the others nothing.

        shape (6, 8), 2 parts along dimension 1, again 3
            (6, 4) of each part, and of these rows 0-1 | 2-3 | 4-5

    Attributes:
        shape: The shape of the whole variable.
        parts: The number of parts.
        dim: The dimension along which it is divided. None: see above.
        over: The axis of the mesh, or `rows`.
        again: Into how many parts each part is divided once more.
        owner: The part that has all. None: see above.
    """

    shape: tuple[int, ...]
    parts: int
    dim: int | None = None
    over: str = "fsdp"
    again: int = 1
    owner: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh over which it is divided."""
        return (self.over,) if self.again == 1 else (self.over, "fsdp")

    def inner(self, part: int) -> Split | None:
        """Returns how what a replica computes with is divided over fsdp.

        Args:
            part: The rank of the replica on the axis `over`.

        Returns:
            None where it is not divided over fsdp.
        """
        if self.over == "fsdp":
            return self
        if self.again == 1:
            return None
        return Split(self.shape_of(part), self.again)

    @property
    def by_rows(self) -> bool:
        """Whether parts are rows of a matrix, not elements."""
        return self.dim is None and len(self.shape) == 2

    @property
    def is_possible(self) -> bool:
        """Whether every part has something of the variable."""
        return self.length >= self.parts

    @property
    def length(self) -> int:
        """Returns how many rows, elements or places are divided."""
        if self.dim is not None:
            return self.shape[self.dim]
        return self.shape[0] if self.by_rows else math.prod(self.shape)

    def bounds(self, part: int) -> tuple[int, int]:
        """Returns the first row or element of a part, and the next part's."""
        if self.owner is not None:
            first = self.length * (part > self.owner)
            return first, self.length * (part >= self.owner)
        return (
            self.length * part // self.parts,
            self.length * (part + 1) // self.parts,
        )

    def shape_of(self, part: int) -> tuple[int, ...]:
        """Returns the shape of a part."""
        first, after = self.bounds(part)
        if self.dim is not None:
            before, behind = self.shape[: self.dim], self.shape[self.dim + 1 :]
            return (*before, after - first, *behind)
        if self.by_rows:
            return (after - first, self.shape[1])
        return (after - first,)

    def region(self, part: int) -> Region:
        """Returns the elements of a part."""
        first, after = self.bounds(part)
        if self.dim is not None:
            inner = math.prod(self.shape[self.dim + 1 :])
            return Region(
                first * inner,
                (after - first) * inner,
                self.length * inner,
                math.prod(self.shape[: self.dim]),
            )
        inner = self.shape[1] if self.by_rows else 1
        return Region(first * inner, (after - first) * inner)

    def regions(self, part: int, again: int = 0) -> list[Region]:
        """Returns the elements that a replica stores, in their order.

        Args:
            part: Its rank on the axis `over`.
            again: Its rank on the fsdp axis, where parts are divided again.
        """
        outer, inner = self.region(part), self.inner(part)
        if self.again == 1 or inner is None:
            return [outer]
        own = inner.region(again)
        return outer.within(own.first, own.first + own.size)


@dataclasses.dataclass(frozen=True)
class Region:
    """Some elements of an array, counted as they lie in memory.

        a matrix of shape (4, 6)

        rows 1 and 2        Region(6, 12)           6-17
        columns 3 to 5      Region(3, 3, 6, 4)      3-5 | 9-11 | 15-17 | 21-23

    Attributes:
        first: The first element.
        length: The elements of a run.
        stride: From the first element of a run to that of the next.
        runs: The number of runs.
    """

    first: int
    length: int
    stride: int = 0
    runs: int = 1

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return self.length * self.runs

    @property
    def grain(self) -> int:
        """Returns the fewest elements that it can be cut into."""
        return 1 if self.runs == 1 else self.length

    def cut(self, begin: int, end: int) -> Region:
        """Returns a range of its elements.

        Args:
            begin: The first of them, counted in this region. It is divided
                by `grain`.
            end: The one after the last, likewise.
        """
        if self.runs == 1:
            return Region(self.first + begin, end - begin)
        runs = range(begin // self.length, end // self.length)
        first = self.first + runs.start * self.stride
        return Region(first, self.length, self.stride, len(runs))

    def within(self, begin: int, end: int) -> list[Region]:
        """Returns any range of its elements, as up to three regions.

        Args:
            begin: The first of them, counted in this region.
            end: The one after the last, likewise.
        """
        if self.runs == 1:
            return [self.cut(begin, end)]
        found = []
        while begin < end:
            run, place = divmod(begin, self.length)
            after = end - end % self.length
            if place or after <= begin:
                after = min(end, (run + 1) * self.length)
                first = self.first + run * self.stride + place
                found.append(Region(first, after - begin))
            else:
                found.append(self.cut(begin, after))
            begin = after
        return found

    def overlaps(self, other: Region) -> Iterator[tuple[int, int, int]]:
        """Yields the runs of elements that are in both regions.

        Args:
            other: Of the same array.

        Yields:
            The place of the run here, its place there, and its length.
        """
        if self == other:
            yield 0, 0, self.size
            return
        stride = other.stride or 1
        for run in range(self.runs):
            begin = self.first + run * self.stride
            end = begin + self.length
            near = (begin - other.first - other.length) // stride + 1
            for there in range(max(near, 0), other.runs):
                first = other.first + there * other.stride
                if first >= end:
                    break
                low, high = max(begin, first), min(end, first + other.length)
                if low < high:
                    yield (
                        run * self.length + low - begin,
                        there * other.length + low - first,
                        high - low,
                    )


@dataclasses.dataclass(frozen=True)
class Piece:
    """A region of an array, with its elements.

    Attributes:
        name: The name of the array.
        dtype: Name of its type, such as "float32".
        itemsize: The bytes of an element.
        shape: The shape of the whole array.
        region: Which elements these are.
        chunks: Returns their little-endian bytes in parts, none of them
            large, in the order of the region, as buffers.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    region: Region
    chunks: Callable[[], Iterable[Any]]

    def held(self) -> Piece:
        """Returns a copy with the elements in memory."""
        data = bytearray().join(self.chunks())
        return dataclasses.replace(self, chunks=lambda: [data])


Shares = list[tuple[int, int, Region]]


def shares(regions: Sequence[tuple[Region, int]], count: int) -> list[Shares]:
    """Divides regions evenly among a number of processes.

        shares([(Region(0, 6), 4), (Region(0, 2), 4)], 2)
        [[(0, 0, Region(0, 4))], [(0, 4, Region(4, 2)), (1, 0, Region(0, 2))]]

    Args:
        regions: Each with the bytes of an element.
        count: The number of processes.

    Returns:
        For each process the numbers of regions, and what of them is its own:
        the place in the region where it begins, and its elements.
    """
    total = sum(region.size * itemsize for region, itemsize in regions)
    found: list[Shares] = [[] for _ in range(count)]
    before = 0
    for number, (region, itemsize) in enumerate(regions):
        if not region.size:
            found[0].append((number, 0, region))
            continue
        grain = region.grain * itemsize
        parts = region.size // region.grain
        cuts = [
            min(max(total * k // count - before, 0) // grain, parts)
            for k in range(1, count)
        ]
        cuts = [0, *cuts, parts]
        for process, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin < end:
                first, after = begin * region.grain, end * region.grain
                own = region.cut(first, after)
                found[process].append((number, first, own))
        before += region.size * itemsize
    return found


# What a reduction costs anyway is worth about this number of bytes more in one.
PACK_BYTES = 1 << 20


def packs(
    sizes: Sequence[int], pack_bytes: int = PACK_BYTES
) -> list[list[int]]:
    """Returns which gradients replicas sum together, in the order of readiness.

    A pack is one reduction. Large gradients go alone, so that none of them is
    copied to lie beside another, and as soon as the backward pass has made
    them; small ones go together, for a reduction takes milliseconds whatever
    its size.

    Example:
        >>> packs([4, 90, 3, 2, 5], pack_bytes=10)
        [[1], [4, 3, 2], [0]]

    Args:
        sizes: Bytes of each gradient, in the order of the variables; the
            backward pass makes the last first.
        pack_bytes: What is as large goes alone; what is smaller goes with
            its neighbours until there are that many.

    Returns:
        Indices; each once.
    """
    found: list[list[int]] = []
    small: list[int] = []
    held = 0
    for index in reversed(range(len(sizes))):
        if sizes[index] >= pack_bytes:
            found.append([index])
            continue
        small.append(index)
        held += sizes[index]
        if held >= pack_bytes:
            found.append(small)
            small, held = [], 0
    if small:
        found.append(small)
    return found
