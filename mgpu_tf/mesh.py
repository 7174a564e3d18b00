"""Which axes the devices of a strategy form, and how a variable is split.

    mesh = Mesh(data=2, fsdp=4)          # 8 devices
    mesh.fsdp_rank(5), mesh.group(5)     # 1, [4, 5, 6, 7]

    replica    0  1  2  3    4  5  6  7
    data       0  0  0  0    1  1  1  1      each has its own rows of a batch
    fsdp       0  1  2  3    0  1  2  3      each stores its own part of weights

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
    """

    data: int = 1
    fsdp: int = 1

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return self.data * self.fsdp

    def fsdp_rank(self, replica: int) -> int:
        """Returns which part of the split weights a replica stores."""
        return replica % self.fsdp

    def group(self, replica: int) -> list[int]:
        """Returns the replicas that together store one copy of the weights."""
        first = replica - replica % self.fsdp
        return list(range(first, first + self.fsdp))

    def copies(self, rank: int) -> list[int]:
        """Returns the replicas that store the same part of the weights."""
        return list(range(rank, self.size, self.fsdp))

    def __str__(self) -> str:
        return f"data={self.data}, fsdp={self.fsdp}"


def mesh_of(
    devices: int, data: int | None, fsdp: int | None, workers: int = 1
) -> Mesh:
    """Returns the mesh of a number of devices.

    Args:
        devices: The number of devices of a worker.
        data: The size of the data axis. Default: what `fsdp` leaves, or 1.
        fsdp: The size of the fsdp axis. Default: what `data` leaves.
        workers: How many workers there are, each with as many devices.

    Raises:
        ConfigurationError: The product is not the number of devices.
    """
    total = devices * workers
    if fsdp is None:
        fsdp = total // (data or 1) or 1
    if data is None:
        data = total // fsdp or 1
    mesh = Mesh(data, fsdp)
    if mesh.size != total:
        there_are = f"{devices} devices"
        if workers > 1:
            there_are = f"{workers} workers x {devices} devices = {total}"
        raise ConfigurationError(
            "The sizes of the axes must multiply to the number of devices. "
            f"Received: data={data} x fsdp={fsdp} = {mesh.size} for "
            f"{there_are}. Change data_parallel or fsdp_parallel, or the "
            "devices."
        )
    return mesh


@dataclasses.dataclass(frozen=True)
class Split:
    """How the elements of a variable are divided over the fsdp axis.

    A matrix is divided by rows, so that the gradient of an embedding stays a
    list of rows. Any other variable is flattened and divided by elements.

        shape (10, 8), 4 parts     rows 0-1 | 2-4 | 5-6 | 7-9
        shape (3, 3, 5, 7), 2      elements 0-156 | 157-314

    Attributes:
        shape: The shape of the whole variable.
        parts: The number of parts.
    """

    shape: tuple[int, ...]
    parts: int

    @property
    def by_rows(self) -> bool:
        """Whether parts are rows of a matrix, not elements."""
        return len(self.shape) == 2

    @property
    def is_possible(self) -> bool:
        """Whether every part has something of the variable."""
        return self.length >= self.parts

    @property
    def length(self) -> int:
        """Returns how many rows or elements are divided."""
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
        if self.by_rows:
            return (after - first, self.shape[1])
        return (after - first,)
