"""What more devices give, from the measured step of one device.

    efficiency(0.29, 102e6, 8, network, Efficiencies())     # 0.97

Weak scaling: each device keeps its rows, so a step of n devices takes that of
one, what of the exchange is not hidden behind the backward pass, and the wait
for the slowest. It needs no graph: a measured step and the bytes of the
gradients are enough.

This module does not import TensorFlow.
"""

from __future__ import annotations

import math

from mgpu_tf.planner.devices import Efficiencies
from mgpu_tf.planner.speed.communication import Network

# The part of a step that is the backward pass: two products for each of the
# forward pass.
BACKWARD = 2 / 3


def efficiency(
    step_seconds: float,
    gradient_bytes: float,
    devices: int,
    network: Network,
    reached: Efficiencies,
) -> float:
    """Returns the throughput of n devices, over n times that of one.

    Args:
        step_seconds: The step of one device.
        gradient_bytes: The bytes of all gradients.
        devices: n.
        network: The links.
        reached: What programs reach; `overlap` and `deviation` are used.
    """
    if devices == 1:
        return 1.0
    exchanged = network.all_reduce(gradient_bytes, devices)
    hidden = reached.overlap * BACKWARD * step_seconds
    spent = step_seconds + max(0.0, exchanged - hidden)
    late = reached.deviation * math.sqrt(2 * math.log(devices))
    return step_seconds / (spent * (1 + late))
