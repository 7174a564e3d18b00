"""Speed against devices: the table of a scaling benchmark.

    table = ScalingTable("mlp", "processes", "weak", points)
    print(table.text())
    table.write("scaling.json")

Speed-up is throughput over the throughput of the first point, times its
devices; efficiency is speed-up over devices. Weak scaling keeps the batch of
a device, strong scaling that of all devices.

References: TensorFlow's benchmarks of 2017 on a DGX-1 (P100, synthetic data);
the curve of this project's source text, which it credits to Krizhevsky.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence

from mgpu_tf.folders import open_regular

# Speed-ups on 1, 2, 4 and 8 GPUs.
PUBLISHED = {
    "source text, CNN": {1: 1.0, 2: 1.7, 4: 3.5, 8: 6.2},
    "TensorFlow DGX-1, ResNet-50": {1: 1.0, 2: 1.93, 4: 3.89, 8: 7.92},
    "TensorFlow DGX-1, VGG16": {1: 1.0, 2: 1.92, 4: 3.79, 8: 7.02},
}

MEANING = {
    "virtual": "Parts of one CPU share its cores: this shows the overhead of "
    "more replicas, not speed-up.",
    "processes": "One process to a core: this is speed-up.",
    "gpu": "One GPU to a replica: this is speed-up.",
}


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """What one number of devices reached.

    Attributes:
        devices: How many.
        global_batch_size: Examples in a step.
        examples_per_second: One value for each repeat.
        loss: After the last repeat.
    """

    devices: int
    global_batch_size: int
    examples_per_second: list[float]
    loss: float

    @property
    def median(self) -> float:
        """The throughput that is shown."""
        return statistics.median(self.examples_per_second)


@dataclasses.dataclass(frozen=True)
class ScalingTable:
    """A scaling benchmark.

    Attributes:
        model: What was trained.
        kind: What a device is: "virtual", "processes" or "gpu".
        scaling: "weak" or "strong".
        points: Ordered by devices.
    """

    model: str
    kind: str
    scaling: str
    points: list[ScalingPoint]

    def speedup(self, point: ScalingPoint) -> list[float]:
        """Returns the least, the median and the greatest speed-up."""
        first = self.points[0]
        one = first.median / first.devices
        values = point.examples_per_second
        return [min(values) / one, point.median / one, max(values) / one]

    def efficiency(self, point: ScalingPoint) -> float:
        """Returns speed-up over devices."""
        return self.speedup(point)[1] / point.devices

    def text(self) -> str:
        """Returns the table for a terminal, at most 80 columns wide."""
        rows = [["devices", "examples/s", "speed-up", "efficiency"]]
        for point in self.points:
            low, middle, high = self.speedup(point)
            rows.append(
                [
                    str(point.devices),
                    f"{point.median:,.0f}",
                    f"{middle:.2f} ({low:.2f} - {high:.2f})",
                    f"{self.efficiency(point):.0%}",
                ]
            )
        title = f"{self.model}, {self.scaling} scaling."
        lines = [title, MEANING[self.kind], *aligned(rows)]
        for name, curve in self.published.items():
            shown = ", ".join(f"{v:g} on {n}" for n, v in curve.items())
            lines.append(f"{name}: {shown}")
        return "\n".join(lines)

    @property
    def published(self) -> dict[str, dict[int, float]]:
        """Published speed-ups, where devices are GPUs as theirs were."""
        return PUBLISHED if self.kind == "gpu" else {}

    def write(self, path: str) -> None:
        """Writes the table as JSON."""
        value = dataclasses.asdict(self)
        for entry, point in zip(value["points"], self.points, strict=True):
            entry["speedup"] = self.speedup(point)
            entry["efficiency"] = self.efficiency(point)
        value["meaning"] = MEANING[self.kind]
        value["published"] = self.published
        with open_regular(path, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")

    @classmethod
    def read(cls, path: str) -> ScalingTable:
        """Reads what `write` wrote."""
        with open_regular(path, encoding="utf-8") as file:
            value = json.load(file)
        names = [field.name for field in dataclasses.fields(ScalingPoint)]
        points = [
            ScalingPoint(**{name: entry[name] for name in names})
            for entry in value["points"]
        ]
        return cls(value["model"], value["kind"], value["scaling"], points)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, its columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    ]
