"""What the state of a training takes, before it is started.

    memory = StateMemory(25_600_000, "adam")
    print(memory.text())
    print(hours(table, examples=1_280_000, epochs=90))

Memory is counted: what synchronous training holds on every device, whatever
the batch is. Time is measured by `mgpu-tf benchmark`, and given only for the
numbers of devices that it measured.

References: S. Rajbhandari et al.: ZeRO, 2020, section 3.1, counts the same
parts of what a model holds.
"""

from __future__ import annotations

import dataclasses
import math

from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name
from mgpu_tf.fields import check_types
from mgpu_tf.mesh import check_shard, mesh_of
from mgpu_tf.names import OPTIMIZERS
from mgpu_tf.reports.scaling import ScalingTable

# Values that Keras's optimizers keep for each parameter.
SLOTS = {
    "sgd": 0,
    "momentum": 1,
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
    "lars": 1,
    "lion": 1,
}

_FLOAT32 = 4
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class StateMemory:
    """What each device holds of a model in float32 while it is trained.

    Activations are not counted; they grow with the batch of a device. With
    `fsdp`, the gathered weights of a layer are not counted either; with
    `pipeline` too they are those of a stage, for a whole step, and counted.

    Attributes:
        parameters: Trainable parameters of the model.
        optimizer: One of `OPTIMIZERS`.
        fsdp: Over how many devices the state is split; 1 splits nothing.
        shard: What is split, one of `SHARDS`.
        tensor: Over how many devices layers are computed in parts; all
            weights are counted as split.
        pipeline: Into how many stages the layers are cut, each with as many
            parameters; 1 cuts nothing.

    Raises:
        ConfigurationError: An attribute is wrong.
    """

    parameters: int
    optimizer: str = "adam"
    fsdp: int = 1
    shard: str = "weights"
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_integer("parameters", self.parameters, 1)
        check_integer("fsdp", self.fsdp, 1)
        check_integer("tensor", self.tensor, 1)
        check_integer("pipeline", self.pipeline, 1)
        axes = (self.fsdp, self.tensor, self.pipeline)
        mesh_of(math.prod(axes), 1, *axes)
        check_shard(self.shard, self.tensor, self.pipeline)
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                unknown_name("optimizer", self.optimizer, OPTIMIZERS)
            )

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        if self.fsdp == 1:
            return self._part
        # A whole copy to compute with, beside the part that is updated.
        by_layer = self.shard == "weights" and self.pipeline == 1
        return self._part + (0 if by_layer else self._stage)

    @property
    def slots(self) -> int:
        """Bytes that the optimizer keeps between steps."""
        return SLOTS[self.optimizer] * self._part

    @property
    def gradients(self) -> int:
        """Bytes of the gradients at the end of a backward pass."""
        # Micro-batches add up those of the whole stage.
        return self._part if self.pipeline == 1 else self._stage

    @property
    def _stage(self) -> int:
        """Bytes of what one device computes with of the weights."""
        devices = self.tensor * self.pipeline
        return -(-_FLOAT32 * self.parameters // devices)

    @property
    def _part(self) -> int:
        """Bytes of what one device updates of the weights."""
        devices = self.fsdp * self.tensor * self.pipeline
        return -(-_FLOAT32 * self.parameters // devices)

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.weights + self.slots + self.gradients

    def fitting(self, device_memory: int, most: int = 1024) -> int | None:
        """Returns the least number of devices to split over that fits.

        Args:
            device_memory: Bytes of a device.
            most: The largest number to try.

        Returns:
            The number; None where no number up to `most` fits.
        """
        for fsdp in range(1, most + 1):
            split = dataclasses.replace(self, fsdp=fsdp, tensor=1, pipeline=1)
            if split.total <= device_memory:
                return fsdp
        return None

    def text(self, device_memory: int | None = None) -> str:
        """Returns the parts in GiB, for a terminal.

        Args:
            device_memory: Bytes of a device, to show what is left.
        """
        parts = [
            ("weights", self.weights),
            (f"optimizer ({self.optimizer})", self.slots),
            ("gradients", self.gradients),
            ("each device, without activations", self.total),
        ]
        if device_memory is not None:
            left = device_memory - self.total
            name = "left for activations" if left >= 0 else "does not fit by"
            parts.append((name, abs(left)))
        width = max(len(name) for name, _ in parts)
        lines = [
            f"{name:<{width}}  {size / _GIB:8.3f} GiB" for name, size in parts
        ]
        if device_memory is not None and device_memory < self.total:
            fits = self.fitting(device_memory)
            if fits is not None:
                lines.append(
                    f"fits with --strategy=fsdp over {fits} devices, without "
                    "activations"
                )
        return "\n".join(lines)


def hours(table: ScalingTable, examples: int, epochs: int) -> list[float]:
    """Returns how long a training takes at each point of a table.

    Args:
        table: What `mgpu-tf benchmark` measured.
        examples: In an epoch.
        epochs: How many.

    Returns:
        From the first step to the last, with batches that are ready; waiting
        for data, start, evaluation and saves come on top.

    Raises:
        ConfigurationError: The table is of parts of one CPU, which share
            its cores and say nothing about time on separate devices.
    """
    check_integer("examples", examples, 1)
    check_integer("epochs", epochs, 1)
    if table.kind == "virtual":
        raise ConfigurationError(
            "A plan needs devices that do not share cores. Received: a table "
            "of virtual devices. Measure with mgpu-tf benchmark "
            "--kind=processes, or on GPUs."
        )
    return [examples * epochs / point.median / 3600 for point in table.points]
