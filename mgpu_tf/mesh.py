"""Which axes the devices of a strategy form, and how a variable is split.

    mesh = Mesh(data=2, fsdp=4)          # 8 devices
    mesh.fsdp_rank(5), mesh.group(5)     # 1, [4, 5, 6, 7]

    replica    0  1  2  3    4  5  6  7
    data       0  0  0  0    1  1  1  1      each has its own rows of a batch
    fsdp       0  1  2  3    0  1  2  3      each stores its own part of weights

Replicas of one data rank are a group. A group holds one copy of every weight,
split over its members.

    mesh = Mesh(data=2, pipeline=2)      # 4 devices, 2 replicas

    device     0  1    2  3
    replica    0  0    1  1
    stage      0  1    0  1                  each has its own layers

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math

from mgpu_tf.errors import ConfigurationError

# Micro-batches for each stage of a pipeline. Huang et al., "GPipe", NeurIPS
# 2019, section 2, finds the time without work negligible from here on.
MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The axes of a strategy's devices; the last axis changes fastest.

    Attributes:
        data: How many copies of the weights there are.
        fsdp: Over how many devices each copy is split.
        pipeline: Into how many stages each copy is cut, a device for each.
    """

    data: int = 1
    fsdp: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return self.data * self.fsdp * self.pipeline

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
        axes = f"data={self.data}, fsdp={self.fsdp}"
        return axes + (f", pipeline={self.pipeline}" * (self.pipeline > 1))


def mesh_of(
    devices: int, data: int | None, fsdp: int | None, pipeline: int = 1
) -> Mesh:
    """Returns the mesh of a number of devices.

    Args:
        devices: The number of devices.
        data: The size of the data axis. Default: what the others leave, or 1.
        fsdp: The size of the fsdp axis. Default: what `data` leaves; 1 with
            a pipeline.
        pipeline: The size of the pipeline axis.

    Raises:
        ConfigurationError: The product is not the number of devices, or two
            axes do not go together.
    """
    if pipeline > 1 and (fsdp or 1) > 1:
        raise ConfigurationError(
            "The axes fsdp and pipeline do not go together. Received: "
            f"fsdp={fsdp}, pipeline={pipeline}. Use data with one of them."
        )
    if fsdp is None:
        fsdp = 1 if pipeline > 1 else devices // (data or 1) or 1
    if data is None:
        data = devices // (fsdp * pipeline) or 1
    mesh = Mesh(data, fsdp, pipeline)
    if mesh.size != devices:
        stages = f" x pipeline={pipeline}" if pipeline > 1 else ""
        raise ConfigurationError(
            "The sizes of the axes must multiply to the number of devices. "
            f"Received: data={data} x fsdp={fsdp}{stages} = {mesh.size} for "
            f"{devices} devices. Change data_parallel, fsdp_parallel or "
            "pipeline_parallel, or the devices."
        )
    return mesh


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
