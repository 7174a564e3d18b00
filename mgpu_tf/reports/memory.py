"""What each device stores of a model, as a table.

    table = trainer.memory()
    print(table.text())

    device   weights   optimizer   other   total
    CPU:0        1.5         3.0     0.0     4.5 MiB

Counted are the variables: weights that are trained, what optimizers keep for
them, and all other state, such as frozen weights and metrics. Activations,
gradients and gathered weights come and go within a step and are not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mgpu_tf.reports.scaling import aligned

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device stores.

    Attributes:
        device: Its name, such as "GPU:1".
        weights: Bytes of weights that are trained.
        optimizer: Bytes that optimizers keep.
        other: Bytes of all other variables.
        stage: Its stage of a pipeline, None without one.
    """

    device: str
    weights: int = 0
    optimizer: int = 0
    other: int = 0
    stage: int | None = None

    @property
    def name(self) -> str:
        """Returns the device, with its stage."""
        stage = "" if self.stage is None else f" stage {self.stage}"
        return self.device + stage

    @property
    def total(self) -> int:
        """Returns all bytes."""
        return self.weights + self.optimizer + self.other


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """What the devices of this process store.

    Attributes:
        rows: One row for each device that stores anything.
    """

    rows: Sequence[DeviceMemory]

    @property
    def largest(self) -> int:
        """Returns the bytes of the device that stores most."""
        return max((row.total for row in self.rows), default=0)

    def text(self) -> str:
        """Returns the table in MiB, for a terminal."""
        names = ("weights", "optimizer", "other", "total")
        lines = [["device", *names]]
        lines += [
            [row.name, *(f"{getattr(row, n) / _MIB:,.2f}" for n in names)]
            for row in self.rows
        ]
        return "\n".join(["MiB of variables", *aligned(lines)])
