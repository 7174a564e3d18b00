"""One step of training, to see whether it fits.

fits(build_model, layout, 256)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.errors import OutOfMemoryError
from mgpu_tf.planner.layout import Layout
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.registry import create_strategy
from mgpu_tf.training.trainer import Trainer


def fits(
    build_model: Callable[[], keras.Model],
    layout: Layout,
    global_batch_size: int,
    data: Any = None,
) -> bool:
    """Trains one step on the devices that are here.

    Args:
        build_model: Returns a compiled model.
        layout: How it is laid out.
        global_batch_size: Rows of the step.
        data: A batch with the shapes and types. Default: zeros in the shapes
            of the model's inputs and outputs.

    Returns:
        Whether there was room.
    """
    options = layout.strategy_options
    if layout.devices > 1:
        gpus = len(devices_lib.gpus())
        name = "devices" if gpus else "num_virtual_devices"
        options |= {name: layout.devices}
    strategy = create_strategy(layout.strategy, **options)
    trainer = Trainer(build_model, strategy)
    x, y = _batch(trainer.model, global_batch_size, data)
    try:
        trainer.train_on_batch(x, y)
    except OutOfMemoryError:
        return False
    finally:
        del trainer
        gc.collect()
    return True


def _batch(model: keras.Model, rows: int, data: Any) -> tuple[Any, Any]:
    if data is not None:
        x, y = data
        return (
            tf.nest.map_structure(lambda leaf: _zeros(leaf, rows), x),
            tf.nest.map_structure(lambda leaf: _zeros(leaf, rows), y),
        )
    inputs = [_zeros(spec, rows) for spec in model.inputs]
    sparse = "sparse" in str(getattr(model.loss, "name", model.loss)).lower()
    outputs = [
        np.zeros((rows, *spec.shape[1 : -1 if sparse else None]), "int32")
        if sparse
        else _zeros(spec, rows)
        for spec in model.outputs
    ]
    return (
        inputs[0] if len(inputs) == 1 else inputs,
        outputs[0] if len(outputs) == 1 else outputs,
    )


def _zeros(spec: Any, rows: int) -> np.ndarray:
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return np.zeros((rows, *spec.shape[1:]), dtype)
