"""How long devices exchange values, by latency and bandwidth.

    network = Network(per_node=8, nodes=4, inside=link("nvlink3"), between=...)
    network.all_reduce(size_bytes, devices=32)

A sum of s bytes over n devices sends 2 (n - 1)/n s bytes through each link;
a gather and a scatter half of it. Where machines take part, the ring goes
through the link of each machine, and the slower link decides. A message costs
its latency; a tree has fewer of them than a ring, and is taken where they
count (Thakur et al., "Optimization of Collective Communication Operations in
MPICH", 2005).

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math

from mgpu_tf.planner.devices import Link


@dataclasses.dataclass(frozen=True)
class Network:
    """Machines with devices, and the links between them.

    Attributes:
        per_node: Devices of a machine.
        nodes: Machines.
        inside: The link between devices of a machine.
        between: The link of each machine to the others.
        efficiency: The part of a link's rate that is reached.
    """

    per_node: int
    nodes: int
    inside: Link
    between: Link
    efficiency: float = 0.8

    def all_reduce(self, size: float, devices: int, stride: int = 1) -> float:
        """Returns the seconds of a sum of `size` bytes to each device.

        Args:
            size: Bytes of the value.
            devices: How many take part.
            stride: From one of them to the next, as they are numbered.
        """
        return self._ring(2.0, size, devices, stride)

    def all_gather(self, size: float, devices: int, stride: int = 1) -> float:
        """Returns the seconds in which all get a whole of `size` bytes.

        A scatter of sums takes as long.
        """
        return self._ring(1.0, size, devices, stride)

    def send(self, size: float, *, between: bool = False) -> float:
        """Returns the seconds of a message of `size` bytes."""
        link = self.between if between else self.inside
        return link.latency_seconds + size / self._rate(link)

    def crosses(self, devices: int, stride: int = 1) -> bool:
        """Whether a group of devices is in several machines."""
        return self.nodes > 1 and (devices - 1) * stride >= self.per_node

    def _rate(self, link: Link) -> float:
        return link.bytes_per_second * self.efficiency

    def _ring(
        self, passes: float, size: float, devices: int, stride: int
    ) -> float:
        if devices == 1 or size <= 0:
            return 0.0
        link, rate = self.inside, self._rate(self.inside)
        if self.crosses(devices, stride):
            link = self.between
            # As many rings as there are groups share the link of a machine.
            sharing = min(stride, self.per_node)
            rate = min(rate, self._rate(self.between) / sharing)
        hops = min(
            passes * (devices - 1), 2 * passes * math.ceil(math.log2(devices))
        )
        moved = passes * (devices - 1) / devices * size
        return moved / rate + hops * link.latency_seconds
