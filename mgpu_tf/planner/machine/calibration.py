"""What was measured of a machine and its links, in a file that plans read.

    found = Calibration.read(path)
    found.device, found.link

`mgpu-tf calibrate` writes the file (`probe.py` measures). Plans for the
devices that are here read it where it is.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.devices import Device, Efficiencies, Link

VARIABLE = "MGPU_TF_CALIBRATION"


def default_path() -> str:
    """Returns where the file is: `MGPU_TF_CALIBRATION`, or in the cache."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "mgpu_tf", "calibration.json")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        device: The device here, with what programs reach of it.
        link: Between the workers of the cluster; None where there was none.
        workers: How many took part.
    """

    device: Device
    link: Link | None = None
    workers: int = 1

    def write(self, path: str) -> None:
        """Writes the file, its folder too."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)
            file.write("\n")

    @classmethod
    def read(cls, path: str) -> Calibration:
        """Reads a file.

        Raises:
            ConfigurationError: It is none that `mgpu-tf calibrate` wrote.
        """
        try:
            with open(path, encoding="utf-8") as file:
                value = json.load(file)
            return cls.from_dict(value)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                "calibration must be a file that mgpu-tf calibrate wrote. "
                f"Received: calibration={path!r} ({type(error).__name__})."
            ) from None

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Calibration:
        """Returns what `dataclasses.asdict` has made a dict of.

        Raises:
            ValueError: A number in it is none that a machine can have.
        """
        device = dict(value["device"])
        good = Efficiencies(**device.pop("efficiencies"))
        link = value.get("link")
        found = cls(
            Device(**device, efficiencies=good),
            None if link is None else Link(**link),
            int(value["workers"]),
        )
        numbers = [
            found.device.memory_bytes,
            found.device.bytes_per_second,
            *found.device.rates.values(),
            good.products,
            good.memory,
        ]
        if not all(
            isinstance(number, int | float) and 0 < number < math.inf
            for number in numbers
        ):
            raise ValueError(value)
        return found

    def text(self) -> str:
        """Returns the figures, for a terminal."""
        good = self.device.efficiencies
        lines = [
            f"device             {self.device.name}",
            "memory             "
            f"{self.device.memory_bytes / (1 << 30):,.2f} GiB",
            "products           "
            f"{self.device.rates['float32'] / 1e9:,.1f} Gflop/s, of which "
            f"models reach {good.products:.0%}",
            "memory bandwidth   "
            f"{self.device.bytes_per_second / 1e9:,.2f} GB/s, of which "
            f"models reach {good.memory:.0%}",
            f"an operation       {good.overhead_seconds * 1e6:,.1f} us",
            f"a step             {good.step_seconds * 1e3:,.2f} ms",
        ]
        if self.link is not None:
            rate = self.link.bytes_per_second * 8 / 1e6
            lines.append(
                f"link               {rate:,.1f} Mbit/s, "
                f"{self.link.latency_seconds * 1e3:,.2f} ms, between "
                f"{self.workers} workers"
            )
        return "\n".join(lines)
