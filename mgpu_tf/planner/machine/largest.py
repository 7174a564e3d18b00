"""The largest batch that fits on a device, checked by one step.

    rows = largest_batch(build_model, "mirrored", devices=4)

This module imports TensorFlow when a model is traced, and not before.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.layout import Layout, layout_of
from mgpu_tf.planner.memory.per_device import graph_of, memory_of
from mgpu_tf.planner.operations.graph import Graph

if TYPE_CHECKING:
    import keras

_log = logging.getLogger("mgpu_tf")

# A training step needs the trainer, which is above this package.
_TRIAL = "mgpu_tf.training.one_step"
_MOST = 1 << 24


def largest_batch(
    build_model: Callable[[], keras.Model],
    strategy: str = "one_device",
    *,
    devices: int = 1,
    memory_bytes: float | None = None,
    data: Any = None,
    verify: bool = True,
    **options: Any,
) -> int:
    """Returns how many rows each replica can have in a step.

    Args:
        build_model: Returns a compiled model.
        strategy: A name for `create_strategy`.
        devices: The devices.
        memory_bytes: What a device has. Default: what is free here.
        data: A batch, as in `trace`; needed to verify where the inputs of
            the model are unknown.
        verify: Whether one step is run with the batch on the devices that
            are here. If it does not fit, a smaller one is tried.
        **options: As in `layout_of`.

    Returns:
        Rows of a replica.

    Raises:
        ConfigurationError: Not even one row fits.
    """
    graph = graph_of(build_model, data)
    layout = layout_of(strategy, devices, **options)
    if memory_bytes is None:
        from mgpu_tf.planner.machine.here import device_memory

        memory_bytes = device_memory(devices)
    rows = fitting_rows(graph, layout, memory_bytes)
    if not rows:
        least = memory_of(graph, layout, layout.replicas * layout.parts)
        raise ConfigurationError(
            "A batch needs a row for each device that fits. Received: "
            f"{memory_bytes / (1 << 20):,.0f} MiB for each device, of which "
            f"one row takes {least.largest.total / (1 << 20):,.0f} on "
            f"{layout}. Use a larger device, fsdp, or mixed precision."
        )
    if verify:
        trial = importlib.import_module(_TRIAL)
        while not trial.fits(build_model, layout, rows * layout.replicas, data):
            _log.info("%d rows of each replica do not fit", rows)
            rows = rows * 7 // 8
            if not rows:
                raise ConfigurationError(
                    "A batch needs a row for each device that fits. Received: "
                    f"no row that fits on {layout}. Use a larger device."
                )
    return rows


def fitting_rows(graph: Graph, layout: Layout, memory_bytes: float) -> int:
    """Returns the most rows of a replica that are predicted to fit.

    Args:
        graph: A traced model.
        layout: How it is laid out.
        memory_bytes: What a device has.
    """

    def fits(parts: int) -> bool:
        batch = parts * layout.parts * layout.replicas * layout.accumulation
        needed = memory_of(graph, layout, batch).largest.total
        return needed <= memory_bytes

    low, high = 0, 1
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low * layout.parts
