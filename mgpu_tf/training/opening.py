"""The lines with which a training begins: what runs where, in which batches.

    mgpu_tf: mirrored on GPU:0 and GPU:1; 2 replicas, global batch 64, 32 each

The chief prints them, once for each trainer and batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.engine import keras_internals
from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.strategies.replicas.topology import balance_of

_SHOWN_DEVICES = 2


def what_runs(strategy: tf.distribute.Strategy, batch: int | None) -> str:
    """Returns one line: strategy, devices, replicas, batch sizes.

    Args:
        strategy: Any strategy.
        batch: The global batch size; None where the data decides.
    """
    kind, topology = kind_of(strategy), topology_of(strategy)
    here = _listed(devices_here(strategy))
    if not kind.in_step:
        servers = len(strategy.cluster.ps)
        size = "whole batches" if batch is None else f"batches of {batch}"
        return (
            f"{kind.name} with {_count(topology.num_workers, 'worker')} and "
            f"{_count(servers, 'server')}; each worker computes {size}"
        )
    where = f"on {here}"
    if topology.num_workers > 1:
        where = f"on {topology.num_workers} workers, this one with {here}"
    mesh = getattr(strategy, "mesh", None)
    axes = "" if mesh is None else f"{_axes(mesh)}, "
    blocks = 1 if mesh is None else mesh.blocks
    replicas = _count(strategy.num_replicas_in_sync // blocks, "replica")
    ranges = topology.local.ranges
    return (
        f"{kind.name} {where}; {axes}{replicas}, "
        f"{_sizes(batch, ranges, str(balance_of(strategy)))}"
    )


def devices_here(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the devices of this process, such as `GPU:0`."""
    names = getattr(strategy, "stage_of_device", None)
    names = names or strategy.extended.worker_devices
    return [name.rpartition("device:")[2].lstrip("/") for name in names]


def tasks(strategy: tf.distribute.Strategy) -> list[dict[str, str]]:
    """Returns the processes of a run: for each `task` and `role`."""
    kind, topology = kind_of(strategy), topology_of(strategy)
    workers = [f"worker {n}" for n in range(topology.num_workers)]
    if kind.in_step:
        chief = "trains, writes the files"
        roles = [chief, *["trains"] * (len(workers) - 1)]
        return [
            {"task": task, "role": role}
            for task, role in zip(workers, roles, strict=True)
        ]
    cluster = strategy.cluster
    found = [("coordinator", "deals out steps, writes the files")]
    found += [(name, "computes gradients") for name in workers]
    found += [
        (f"ps {n}", "stores and updates variables")
        for n in range(len(cluster.ps))
    ]
    found += [("evaluator", "evaluates checkpoints")] * len(cluster.evaluator)
    return [{"task": task, "role": role} for task, role in found]


def batch_size_of(source: data_lib.Source) -> int | None:
    """Returns the global batch size, None where only the data knows it."""
    rows = source.rows()
    return None if rows is None else rows.batch_size


def of_normalization(model: keras.Model, replicas: int) -> str:
    """Returns a line on BatchNormalization by replicas, "" for none.

    Args:
        model: The model.
        replicas: How many have rows of their own.
    """
    if replicas == 1:
        return ""
    found = [
        layer
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not layer.synchronized
        and layer.trainable
    ]
    if not found:
        return ""
    return (
        f"{_count(len(found), 'BatchNormalization layer')} normalized by each "
        "replica's own rows; for the numbers of one device: "
        'Trainer(..., batch_normalization="synchronized")'
    )


def _sizes(batch: int | None, ranges: int, shares: str) -> str:
    if batch is None:
        return "global batches as the data has them"
    if ranges == 1:
        return f"batch {batch}"
    if "," in shares:
        return f"global batch {batch}, shares {shares}"
    least, most = batch // ranges, -(-batch // ranges)
    each = str(least) if least == most else f"{least} or {most}"
    return f"global batch {batch}, {each} each"


def _axes(mesh: object) -> str:
    names = ("data", "fsdp", "tensor", "pipeline")
    sizes = [(name, getattr(mesh, name, 1)) for name in names]
    return ", ".join(f"{name} {size}" for name, size in sizes if size > 1)


def _listed(devices: Sequence[str]) -> str:
    if len(devices) > _SHOWN_DEVICES:
        return f"{devices[0]} to {devices[-1]}"
    return " and ".join(devices)


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
