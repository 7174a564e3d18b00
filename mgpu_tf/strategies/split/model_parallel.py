"""The one way to a strategy whose devices form a mesh.

    create_model_parallel_strategy(data=2, fsdp=4)        weights in parts
    create_model_parallel_strategy(data=2, tensor=2)      layers in parts
    create_model_parallel_strategy(fsdp=2, tensor=2)      both
    create_model_parallel_strategy(data=2, pipeline=2)    layers in stages
    create_model_parallel_strategy(fsdp=2, pipeline=2)    both in parts
    create_model_parallel_strategy(tensor=2, pipeline=2)  parts of layers

All axes go with data; `mesh.mesh_of` refuses by name what does not go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mgpu_tf.cluster import watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.waiting import naming_missing
from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.mesh import MICRO_BATCHES, Mesh, check_shard, mesh_of
from mgpu_tf.names import PIPELINE_SCHEDULES, Devices
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.split.fully_sharded import (
    SMALLEST_SPLIT,
    FullyShardedStrategy,
    MultiWorkerFullyShardedStrategy,
)
from mgpu_tf.strategies.split.layout import Layout
from mgpu_tf.strategies.split.pipeline import (
    MultiWorkerPipelineStrategy,
    PipelineStrategy,
)
from mgpu_tf.strategies.synchronous import (
    between_workers,
    check_workers,
    collective_options,
    cross_device_ops,
)


@checked
def create_model_parallel_strategy(
    data: int | None = None,
    fsdp: int | None = None,
    tensor: int | None = None,
    *,
    layout: str | Mapping[str, Any] | Layout = "auto",
    shard: str = "weights",
    cluster: ClusterConfig | None = None,
    devices: Devices = None,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
    smallest_split: int = SMALLEST_SPLIT,
    pipeline: int = 1,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    stages: Sequence[str] | None = None,
    sequence_parallel: bool = False,
) -> tf.distribute.Strategy:
    """Creates a strategy that splits a model over devices.

    The devices are those of this machine, or in a cluster those of all
    workers, of which each has as many.

    Example:
        strategy = mgpu_tf.create_model_parallel_strategy(data=2, fsdp=4)
        strategy = mgpu_tf.create_model_parallel_strategy(data=2, tensor=2)
        strategy = mgpu_tf.create_model_parallel_strategy(data=2, pipeline=2)

    Args:
        data: How many copies of the weights there are. Default: what the
            other axes leave, or 1.
        fsdp: Over how many devices each copy is split. Default: what `data`
            leaves; 1 with `tensor`, `pipeline` or a layout.
        tensor: Over how many devices the computing of layers is split.
            Default: 1.
        layout: Which layers these are. `auto`: attention, the layers after it,
            embeddings and other dense layers, where the structure of the model
            allows. Or a mapping from patterns of the paths of weights to a
            tuple, as `keras.distribution.LayoutMap`: "model" at the dimension
            that is split over the tensor axis, "batch" over the data and fsdp
            axes together.
        shard: With `fsdp`, what is split: `weights`, `gradients` or
            `optimizer`.
        cluster: The cluster. Default: the cluster in `TF_CONFIG`, or that of
            the scheduler.
        devices: As for `create_mirrored_strategy`; of each worker.
        communication: As for `create_mirrored_strategy`; in a cluster as for
            `create_multi_worker_mirrored_strategy`. `ring` in one process uses
            TensorFlow's collective operations between CPUs too, one for each
            group and layer, where `auto` copies.
        num_virtual_devices: Split the CPU of each process into N devices.
        smallest_split: With `fsdp`, weights with fewer elements stay whole on
            each device.
        pipeline: Into how many stages the layers of each copy are cut.
        micro_batches: With `pipeline`, into how many parts the rows of a
            replica are cut. Default: 4 for each stage.
        schedule: With `pipeline`, `1f1b` or `gpipe`.
        stages: With `pipeline`, the names of the layers at which the second
            and further stages begin. Default: stages of equal cost.
        sequence_parallel: With `tensor`, devices have parts of a sequence
            between the layers that are computed in parts: norms, dropouts and
            residuals (Korthikanti et al., 2022). Sequences are tensors
            `[rows, positions, features]` of a known number of positions.

    Returns:
        A `tf.distribute.MirroredStrategy`, or in a cluster a
        `tf.distribute.MultiWorkerMirroredStrategy`, whose large weights are
        split, or whose layers are in parts or in stages.

    Raises:
        ConfigurationError: The axes do not multiply to the number of devices
            or do not go together, a name is unknown, or a device does not
            exist.
        ClusterError: `TF_CONFIG` is not valid.
    """
    tensor = 1 if tensor is None else tensor
    check_integer("tensor_parallel", tensor, 1)
    check_integer("pipeline_parallel", pipeline, 1)
    check_integer("smallest_split", smallest_split, 0)
    begins = None if stages is None else _names(stages)
    _check_stages(pipeline, micro_batches, schedule, begins)
    check_shard(shard, tensor, pipeline, layout)
    _check_sequence(sequence_parallel, tensor)
    cluster = cluster or ClusterConfig.from_environment()
    workers = 1 if cluster is None else cluster.num_workers
    if cluster is not None and workers > 1:
        check_workers("model_parallel", cluster, communication)
    names = devices_lib.select_local(devices, num_virtual_devices)
    if layout != "auto" and fsdp is None:
        fsdp = 1
    mesh = mesh_of(len(names), data, fsdp, tensor, pipeline, workers)
    if layout != "auto":
        _check_layout(layout, mesh)
    if cluster is not None and workers > 1:
        communication = between_workers(communication, cluster, devices, names)
        watchdog.begin(cluster)
        with naming_missing(cluster):
            if pipeline > 1:
                return MultiWorkerPipelineStrategy(
                    cluster,
                    collective_options(communication),
                    len(names),
                    mesh=mesh,
                    micro_batches=micro_batches or MICRO_BATCHES * pipeline,
                    schedule=schedule,
                    begins=begins,
                    communication=communication,
                    smallest_split=smallest_split,
                    layout=layout,
                    sequence_parallel=sequence_parallel,
                )
            return MultiWorkerFullyShardedStrategy(
                cluster,
                collective_options(communication),
                len(names),
                mesh=mesh,
                shard=shard,
                communication=communication,
                smallest_split=smallest_split,
                layout=layout,
                sequence_parallel=sequence_parallel,
            )
    reducing = None
    if communication != "ring" or pipeline > 1:
        reducing = cross_device_ops(communication, names[::pipeline])
    if communication == "hierarchical_copy":
        communication = "auto"  # It is for what is not split.
    if pipeline > 1:
        return PipelineStrategy(
            names,
            mesh,
            micro_batches or MICRO_BATCHES * pipeline,
            schedule,
            begins,
            reducing,
            smallest_split,
            layout,
            sequence_parallel,
        )
    return FullyShardedStrategy(
        *(names, mesh, shard, reducing, smallest_split, layout),
        communication=communication,
        sequence_parallel=sequence_parallel,
    )


def _names(stages: Any) -> tuple[str, ...]:
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        raise ConfigurationError(
            "stages must be a list of names of layers. Received: "
            f"stages={stages!r}. Write stages=['dense_1']."
        )
    return tuple(stages)


def _check_sequence(sequence_parallel: bool, tensor: int) -> None:
    if sequence_parallel and tensor == 1:
        raise ConfigurationError(
            "sequence_parallel goes with tensor_parallel: devices that compute "
            "parts of layers have parts of the sequence between them. "
            f"Received: tensor_parallel={tensor}. Use 2 or more, or leave "
            "sequence_parallel out."
        )


def _check_layout(layout: Any, mesh: Mesh) -> None:
    if mesh.pipeline > 1 and "rows" in Layout(layout).names:
        raise ConfigurationError(
            "In a layout, 'batch' goes with the axes data, fsdp and tensor. "
            f"Received: layout={layout!r} with {mesh}. Name 'model', or use "
            "pipeline=1."
        )
    if mesh.pipeline > 1 and mesh.tensor == 1:
        raise ConfigurationError(
            "On a pipeline a layout goes with tensor. Received: "
            f"layout={layout!r} with {mesh}. Use tensor=2 or more, or leave "
            "the layout out."
        )


def _check_stages(
    pipeline: int,
    micro_batches: int | None,
    schedule: str,
    begins: tuple[str, ...] | None,
) -> None:
    if schedule not in PIPELINE_SCHEDULES:
        raise ConfigurationError(
            unknown_name("pipeline_schedule", schedule, PIPELINE_SCHEDULES)
        )
    if begins is not None and len(begins) != pipeline - 1:
        raise ConfigurationError(
            "pipeline_stages names the first layer of each stage but the "
            f"first. Received: {len(begins)} names with "
            f"pipeline_parallel={pipeline}. Name {pipeline - 1}, or none."
        )
    if micro_batches is None:
        return
    check_integer("micro_batches", micro_batches, 1)
    if pipeline == 1:
        raise ConfigurationError(
            "micro_batches goes with pipeline_parallel. Received: "
            f"micro_batches={micro_batches} with pipeline_parallel=1. Leave "
            "it out, or accumulate with gradient_accumulation_steps."
        )
