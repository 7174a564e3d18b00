"""Memory, time and price of a training, before it is started.

graph, tracing      a training step as operations with sizes
liveness, scratch   the most that is held at one time
layout, splits      what is divided over devices
program, memory     the bytes of each device
costs, step_time    the work of each operation, and the time of a step
devices             what devices and links can do, with sources
communication       how long they exchange values
candidates, plans   which layouts there are, and which is best
page                a plan as a table and as a page
here                the machines that are here, and the best layout on them
remedies, largest   what helps where a step does not fit; the largest batch
calibration         what was measured of the machines here
state               what is counted from a number of parameters alone

Arithmetic needs no TensorFlow; a model is traced when one is given.
"""

from mgpu_tf.planner.choice.plans import Candidate, Plan, plan
from mgpu_tf.planner.machine.largest import largest_batch
from mgpu_tf.planner.memory.per_device import MemoryEstimate, estimate_memory
from mgpu_tf.planner.speed.step_time import Machines
from mgpu_tf.planner.state import SLOTS, StateMemory, hours

__all__ = [
    "SLOTS",
    "Candidate",
    "Machines",
    "MemoryEstimate",
    "Plan",
    "StateMemory",
    "estimate_memory",
    "hours",
    "largest_batch",
    "plan",
]
