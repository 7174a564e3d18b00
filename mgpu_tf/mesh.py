"""Which axes the devices of a strategy form, and how a variable is split.

    mesh = Mesh(data=2, fsdp=4)          # 8 devices
    mesh.fsdp_rank(5), mesh.group(5)     # 1, [4, 5, 6, 7]

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

    mesh = Mesh(data=2, pipeline=2)      # 4 devices, 2 replicas

    device     0  1    2  3
    replica    0  0    1  1
    stage      0  1    0  1                  each has its own layers

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math

from mgpu_tf.errors import ConfigurationError, check_integer

# Micro-batches for each stage of a pipeline. Huang et al., "GPipe", NeurIPS
# 2019, section 2, finds the time without work negligible from here on.
MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The axes of a strategy's devices; the last axis changes fastest.

    Ranks and groups are of replicas, each of which has `pipeline` devices.

    Attributes:
        data: How many copies of the weights there are.
        fsdp: Over how many devices each copy is split.
        tensor: Over how many devices the computing of a layer is split.
        pipeline: Into how many stages each copy is cut, a device for each.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """Returns the number of replicas."""
        return self.data * self.fsdp * self.tensor

    def fsdp_rank(self, replica: int) -> int:
        """Returns which part of the split weights a replica stores."""
        return self.rank("fsdp", replica)

    def group(self, replica: int) -> list[int]:
        """Returns the replicas that together store one copy of the weights."""
        return self.along("fsdp", replica)

    def copies(self, rank: int) -> list[int]:
        """Returns the replicas that store the same part of the weights."""
        return self.of_rank("fsdp", rank)

    def length(self, axis: str) -> int:
        """Returns the size of an axis, such as `fsdp`."""
        return int(getattr(self, axis))

    def rank(self, axis: str, replica: int) -> int:
        """Returns the place of a replica on `data`, `fsdp` or `tensor`."""
        return replica // self._step(axis) % self.length(axis)

    def along(self, axis: str, replica: int) -> list[int]:
        """Returns the replicas that differ from one on this axis only."""
        step = self._step(axis)
        first = replica - self.rank(axis, replica) * step
        return [first + place * step for place in range(self.length(axis))]

    def of_rank(self, axis: str, rank: int) -> list[int]:
        """Returns the replicas at one place of an axis."""
        return [r for r in range(self.replicas) if self.rank(axis, r) == rank]

    def groups(self, axis: str) -> list[list[int]]:
        """Returns all replicas, in groups that differ on this axis only."""
        return [self.along(axis, replica) for replica in self.of_rank(axis, 0)]

    def _step(self, axis: str) -> int:
        return {
            "data": self.fsdp * self.tensor,
            "fsdp": self.tensor,
            "tensor": 1,
        }[axis]

    def __str__(self) -> str:
        others = {"tensor": self.tensor, "pipeline": self.pipeline}
        return f"data={self.data}, fsdp={self.fsdp}" + "".join(
            f", {axis}={length}"
            for axis, length in others.items()
            if length > 1
        )


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
    mesh = Mesh(data, fsdp, tensor, pipeline)
    _check_together(mesh, workers)
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


def _check_together(mesh: Mesh, workers: int) -> None:
    long = [
        f"{axis}={mesh.length(axis)}"
        for axis in ("fsdp", "tensor", "pipeline")
        if mesh.length(axis) > 1
    ]
    if len(long) > 1:
        raise ConfigurationError(
            "The axes fsdp, tensor and pipeline do not go together. Received: "
            f"{', '.join(long)}. Use data with one of them."
        )
    if workers > 1 and mesh.tensor * mesh.pipeline > 1:
        raise ConfigurationError(
            "The axes tensor and pipeline are within one process. Received: "
            f"{long[0]} with {workers} workers. Use fsdp, or one process."
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

    With `dim` it is divided along that dimension.

    Attributes:
        shape: The shape of the whole variable.
        parts: The number of parts.
        dim: The dimension along which it is divided. None: see above.
        over: The axis of the mesh.
    """

    shape: tuple[int, ...]
    parts: int
    dim: int | None = None
    over: str = "fsdp"

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
