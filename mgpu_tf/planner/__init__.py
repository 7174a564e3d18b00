"""What a training will take, told before it is started.

graph, tracing      a training step as operations with sizes
liveness, scratch   the most that is held at one time
layout, splits      what is divided over devices
program, memory     the bytes of each device
costs               the work of each operation
state               what is counted from a number of parameters alone

Arithmetic needs no TensorFlow; a model is traced when one is given.
"""

from mgpu_tf.planner.memory import MemoryEstimate, estimate_memory
from mgpu_tf.planner.state import SLOTS, StateMemory, hours

__all__ = [
    "SLOTS",
    "MemoryEstimate",
    "StateMemory",
    "estimate_memory",
    "hours",
]
