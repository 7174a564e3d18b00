"""What the planner predicts of a run, beside what the run has measured.

compared(build_model, trainer, 256)["step_seconds"]
{"predicted": 0.031, "measured": 0.034}
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StrategyOptions
from mgpu_tf.planner.choice.remedies import layout_here
from mgpu_tf.planner.machine.here import machines_here
from mgpu_tf.planner.memory.per_device import memory_of
from mgpu_tf.planner.operations.tracing import trace
from mgpu_tf.planner.speed.step_time import step_time
from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.training.trainer import Trainer

_log = logging.getLogger("mgpu_tf")

# What comes of a model that cannot be built without values.
_UNTRACED = (ConfigurationError, ValueError, TypeError, NotImplementedError)


def compared(
    build_model: Callable[[], keras.Model],
    trainer: Trainer,
    global_batch_size: int,
) -> dict[str, Any] | None:
    """Returns predictions with what was measured.

    Args:
        build_model: Returns a compiled model.
        trainer: That has trained it.
        global_batch_size: Rows of a step.

    Returns:
        As in `report.json`; None where nothing can be predicted.
    """
    strategy = trainer.strategy
    records = trainer.records
    steps = -(-records[-1].examples // global_batch_size) if records else 0
    if not kind_of(strategy).in_step or not steps:
        return None
    try:
        graph = trace(build_model)
        layout = layout_here(strategy, trainer.step_options)
        memory = memory_of(graph, layout, global_batch_size)
    except _UNTRACED as error:
        _log.debug("nothing is predicted: %s", error)
        return None
    machines = _machines(strategy, layout.devices)
    time = step_time(graph, layout, global_batch_size, machines)
    goodput = trainer.goodput
    total = max(trainer.global_step, 1)
    return {
        "memory_bytes": {
            "predicted": round(memory.largest.total),
            "measured": _measured_bytes(strategy),
            "by_kind": {
                kind: round(size)
                for kind, size in memory.largest.by_kind.items()
                if size >= 1
            },
        },
        "step_seconds": {
            "predicted": time.seconds,
            "measured": records[-1].seconds / steps,
        },
        "parts": {
            "predicted": dataclasses.asdict(time),
            "measured": {"input": goodput.input_seconds / total},
        },
    }


def _machines(strategy: tf.distribute.Strategy, devices: int) -> Any:
    topology = topology_of(strategy)
    workers = topology.num_workers
    gpus = tf.config.list_logical_devices("GPU")
    here = max(1, devices // workers)
    options = StrategyOptions()
    if not gpus and here > 1:
        options = StrategyOptions(num_virtual_devices=here)
    return machines_here(options, workers)


def _measured_bytes(strategy: tf.distribute.Strategy) -> int | None:
    """Returns the most that a device has held; None where it is unknown.

    Parts of a CPU have one allocator, so it is unknown for one of them.
    """
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus and strategy.extended.worker_devices[1:]:
        return None
    names = [device.name for device in gpus] or ["CPU:0"]
    try:
        infos = [tf.config.experimental.get_memory_info(n) for n in names]
    except (ValueError, tf.errors.OpError):
        return None
    return max(int(info["peak"]) for info in infos)
