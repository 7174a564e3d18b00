"""Which axes the devices of a strategy form, and how a variable is split.

    mesh = Mesh(data=2, fsdp=4)          # 8 devices
    mesh.fsdp_rank(5), mesh.group(5)     # 1, [4, 5, 6, 7]

    replica    0  1  2  3    4  5  6  7
    data       0  0  0  0    1  1  1  1      each has its own rows of a batch
    fsdp       0  1  2  3    0  1  2  3      each stores its own part of weights

    mesh = Mesh(data=2, tensor=2)        # 4 devices
    replica    0  1    2  3
    data       0  0    1  1                  each has its own rows of a batch
    tensor     0  1    0  1                  these have the same rows, and each
                                             computes with its part of weights

Replicas of one data rank are a group. A group holds one copy of every weight,
split over its members. This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math

from mgpu_tf.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The axes of a strategy's replicas; the last axis changes fastest.

    Attributes:
        data: How many copies of the weights there are.
        fsdp: Over how many devices each copy is split.
        tensor: Over how many devices the computing of a layer is split.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Returns the number of devices."""
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
        """Returns the size of an axis: `data`, `fsdp` or `tensor`."""
        return int(getattr(self, axis))

    def rank(self, axis: str, replica: int) -> int:
        """Returns the place of a replica on an axis."""
        return replica // self._step(axis) % self.length(axis)

    def along(self, axis: str, replica: int) -> list[int]:
        """Returns the replicas that differ from one on this axis only."""
        step = self._step(axis)
        first = replica - self.rank(axis, replica) * step
        return [first + place * step for place in range(self.length(axis))]

    def of_rank(self, axis: str, rank: int) -> list[int]:
        """Returns the replicas at one place of an axis."""
        return [r for r in range(self.size) if self.rank(axis, r) == rank]

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
        text = f"data={self.data}, fsdp={self.fsdp}"
        return text if self.tensor == 1 else f"{text}, tensor={self.tensor}"


def mesh_of(
    devices: int,
    data: int | None,
    fsdp: int | None,
    tensor: int | None = None,
) -> Mesh:
    """Returns the mesh of a number of devices.

    Args:
        devices: The number of devices.
        data: The size of the data axis. Default: what `fsdp` and `tensor`
            leave, or 1.
        fsdp: The size of the fsdp axis. Default: what `data` leaves; 1 with
            `tensor`.
        tensor: The size of the tensor axis. Default: 1.

    Raises:
        ConfigurationError: The product is not the number of devices, or
            weights are split in two ways.
    """
    tensor = tensor or 1
    if tensor > 1 and fsdp is None:
        fsdp = 1
    if tensor > 1 and fsdp != 1:
        raise ConfigurationError(
            "Weights are split over the fsdp or the tensor axis, not over "
            f"both. Received: fsdp={fsdp}, tensor={tensor}. Use data with one "
            "of them."
        )
    if fsdp is None:
        fsdp = devices // (data or 1) or 1
    if data is None:
        data = devices // (fsdp * tensor) or 1
    mesh = Mesh(data, fsdp, tensor)
    if mesh.size != devices:
        factors = f"data={data} x fsdp={fsdp}"
        if tensor > 1:
            factors += f" x tensor={tensor}"
        raise ConfigurationError(
            "The sizes of the axes must multiply to the number of devices. "
            f"Received: {factors} = {mesh.size} for {devices} devices. Change "
            "data_parallel, fsdp_parallel or tensor_parallel, or the devices."
        )
    return mesh


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
