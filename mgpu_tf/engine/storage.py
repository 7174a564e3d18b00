"""What each device stores of a model.

memory_of(model).text()
"""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.reports.memory import DeviceMemory, MemoryTable
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable


def memory_of(model: keras.Model) -> MemoryTable:
    """Returns what the variables take on each device of this process.

    Args:
        model: A compiled model.
    """
    optimizer = [
        variable
        for each in keras_internals.optimizers_of(model)
        for variable in keras_internals.state_of(each)
    ]
    trained = {id(variable) for variable in model.trainable_variables}
    others = [
        *(v for v in model.variables if id(v) not in trained),
        *(v for metric in model.metrics for v in metric.variables),
    ]
    strategy = model.distribute_strategy
    placed = getattr(strategy, "stage_of_device", {})
    stages = {_short(device): stage for device, stage in placed.items()}
    weights = _bytes(model.trainable_variables, strategy)
    slots = _bytes(optimizer, strategy)
    rest = _bytes(others, strategy)
    return MemoryTable(
        [
            DeviceMemory(
                device,
                weights.get(device, 0),
                slots.get(device, 0),
                rest.get(device, 0),
                stages.get(device),
            )
            for device in sorted({*weights, *slots, *rest})
        ]
    )


def _bytes(
    variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy
) -> dict[str, int]:
    """Returns the bytes of variables, each counted once, by device."""
    sizes: dict[str, int] = {}
    unique = {id(variable): variable for variable in variables}
    for variable in unique.values():
        for part in _stored(keras_internals.stored(variable), strategy):
            device = _short(part.device)
            size = part.shape.num_elements() * part.dtype.size
            sizes[device] = sizes.get(device, 0) + size
    return sizes


def _stored(
    held: tf.Variable, strategy: tf.distribute.Strategy
) -> list[tf.Variable]:
    if isinstance(held, ShardedVariable):
        return [part for parts in held.stored for part in parts]
    copies = strategy.experimental_local_results(held)
    # A table on parameter servers has parts of its own.
    return [
        part for copy in copies for part in getattr(copy, "variables", [copy])
    ]


def _short(device: str) -> str:
    """Returns "CPU:0" of a device here, "ps:1 CPU:0" of one elsewhere."""
    spec = tf.DeviceSpec.from_string(device or "/device:CPU:0")
    name = f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"
    if spec.job in (None, "localhost"):
        return name
    return f"{spec.job}:{spec.task or 0} {name}"
