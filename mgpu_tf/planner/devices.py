"""What devices and links can do: a table, or what was measured here.

    device("a100-40gb").rate("mixed_bfloat16")     # operations per second
    link("25gbe").bytes_per_second

Rates are those that makers state for dense products, memory those of one
device. What programs reach of them is in `Efficiencies`, which
`mgpu-tf calibrate` measures for the device that is here.

Sources: data sheets of NVIDIA by the names of the products (Tesla K80, 2015;
Tesla P100, 2016; Tesla V100, 2018; T4, 2019; A10, 2021; A100, 2021; L4, 2023;
H100, 2023; H200, 2024; B200 in the DGX B200, 2024; GeForce RTX 3090, whitepaper
GA102, 2021; GeForce RTX 4090, whitepaper Ada, 2022). Where a sheet states a
rate "with sparsity", half of it is taken. Links: PCI Express base
specifications, NVLink in the same sheets by direction, Ethernet and InfiniBand
by their names.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from mgpu_tf.errors import ConfigurationError, unknown_name

_T = 1e12
_GB = 1e9
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Efficiencies:
    """What programs reach of a device, and what they lose.

    Attributes:
        products: The part of the rate that products and convolutions reach.
        memory: The part of the bandwidth that the others reach.
        overhead_seconds: What starting one operation costs.
        step_seconds: What starting a step costs.
        overlap: The part of the backward pass during which gradients can be
            exchanged.
        deviation: The standard deviation of a device's step time, as a part
            of it.
        link: The part of a link's rate that sums over replicas reach.
    """

    products: float = 0.5
    memory: float = 0.7
    overhead_seconds: float = 4e-6
    step_seconds: float = 1e-3
    overlap: float = 0.6
    deviation: float = 0.01
    link: float = 0.8


@dataclasses.dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        name: Its name in the table.
        memory_bytes: What a program can have of its memory.
        bytes_per_second: Its memory bandwidth.
        rates: Operations per second of products, by the type in which they
            are computed: "float32", "tf32", "float16", "bfloat16".
        inside: The name of the link between devices of a machine.
        efficiencies: What programs reach.
    """

    name: str
    memory_bytes: float
    bytes_per_second: float
    rates: Mapping[str, float]
    inside: str = "pcie4"
    efficiencies: Efficiencies = Efficiencies()

    def rate(self, precision: str) -> float:
        """Returns the operations per second of products.

        Args:
            precision: A policy of Keras, such as "mixed_bfloat16". With
                "float32" a device that has TF32 uses it, as TensorFlow does.
        """
        names: tuple[str, ...]
        if precision.endswith("bfloat16"):
            names = ("bfloat16", "float16", "tf32", "float32")
        elif precision.endswith("float16"):
            names = ("float16", "bfloat16", "tf32", "float32")
        else:
            names = ("tf32", "float32")
        return next(self.rates[name] for name in names if name in self.rates)

    def vector_rate(self) -> float:
        """Returns the operations per second of what is no product."""
        return self.rates["float32"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between two devices or machines.

    Attributes:
        name: Its name.
        bytes_per_second: In one direction.
        latency_seconds: Of a message.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float


def _gpu(
    name: str,
    gib: float,
    bandwidth: float,
    float32: float,
    inside: str,
    **others: float,
) -> Device:
    """A row: memory in GiB, bandwidth in GB/s, rates in teraflops."""
    rates = {"float32": float32 * _T} | {k: v * _T for k, v in others.items()}
    # Contexts and libraries take some of it.
    return Device(name, gib * _GIB * 0.94, bandwidth * _GB, rates, inside)


DEVICES = {
    row.name: row
    for row in (
        _gpu("k80", 12, 240, 4.37, "pcie3"),
        _gpu("p100-16gb", 16, 732, 10.6, "nvlink1", float16=21.2),
        _gpu("p100-pcie-16gb", 16, 732, 9.3, "pcie3", float16=18.7),
        _gpu("v100-16gb", 16, 900, 15.7, "nvlink2", float16=125),
        _gpu("v100-32gb", 32, 900, 15.7, "nvlink2", float16=125),
        _gpu("t4", 16, 320, 8.1, "pcie3", float16=65),
        _gpu(
            "a10", 24, 600, 31.2, "pcie4", tf32=62.5, float16=125, bfloat16=125
        ),
        _gpu("l4", 24, 300, 30.3, "pcie4", tf32=60, float16=121, bfloat16=121),
        _gpu(
            "a100-40gb",
            40,
            1555,
            19.5,
            "nvlink3",
            tf32=156,
            float16=312,
            bfloat16=312,
        ),
        _gpu(
            "a100-80gb",
            80,
            2039,
            19.5,
            "nvlink3",
            tf32=156,
            float16=312,
            bfloat16=312,
        ),
        _gpu(
            "h100-pcie-80gb",
            80,
            2000,
            51,
            "pcie5",
            tf32=378,
            float16=756,
            bfloat16=756,
        ),
        _gpu(
            "h100-80gb",
            80,
            3350,
            67,
            "nvlink4",
            tf32=494,
            float16=989,
            bfloat16=989,
        ),
        _gpu(
            "h200",
            141,
            4800,
            67,
            "nvlink4",
            tf32=494,
            float16=989,
            bfloat16=989,
        ),
        _gpu(
            "b200",
            180,
            8000,
            80,
            "nvlink5",
            tf32=1125,
            float16=2250,
            bfloat16=2250,
        ),
        _gpu(
            "rtx3090",
            24,
            936,
            35.6,
            "pcie4",
            float16=71,
            bfloat16=71,
        ),
        _gpu(
            "rtx4090",
            24,
            1008,
            82.6,
            "pcie4",
            float16=165,
            bfloat16=165,
        ),
        # A part of one core of a server; `mgpu-tf calibrate` measures yours.
        Device(
            "cpu",
            16 * _GIB,
            10 * _GB,
            {"float32": 5e10},
            "memory",
            Efficiencies(overhead_seconds=1e-5, overlap=0.3),
        ),
    )
}

LINKS = {
    one.name: one
    for one in (
        Link("memory", 5e9, 2e-5),
        Link("pcie3", 12e9, 1e-5),
        Link("pcie4", 24e9, 1e-5),
        Link("pcie5", 48e9, 1e-5),
        Link("nvlink1", 80e9, 6e-6),
        Link("nvlink2", 150e9, 6e-6),
        Link("nvlink3", 300e9, 6e-6),
        Link("nvlink4", 450e9, 6e-6),
        Link("nvlink5", 900e9, 6e-6),
        Link("edr", 12.5e9, 3e-6),
        Link("hdr", 25e9, 3e-6),
        Link("ndr", 50e9, 3e-6),
    )
}

_RATE = re.compile(r"(\d+(?:\.\d+)?)(gbe|gbit|mbit)", re.IGNORECASE)
_ETHERNET_LATENCY = 3e-5


def device(name: str) -> Device:
    """Returns a device by its name.

    Raises:
        ConfigurationError: The table has no such device.
    """
    if name not in DEVICES:
        raise ConfigurationError(unknown_name("device", name, DEVICES))
    return DEVICES[name]


def link(name: str) -> Link:
    """Returns a link by its name, or by its rate such as `25gbe`.

    Raises:
        ConfigurationError: It is neither.
    """
    if name in LINKS:
        return LINKS[name]
    found = _RATE.fullmatch(name.strip())
    if found is None or float(found[1]) <= 0:
        raise ConfigurationError(
            "interconnect must be a rate such as 25gbe or 100mbit, or one of "
            f"{', '.join(LINKS)}. Received: {name!r}."
        )
    unit = 1e6 if found[2].lower() == "mbit" else 1e9
    return Link(name, float(found[1]) * unit / 8, _ETHERNET_LATENCY)
