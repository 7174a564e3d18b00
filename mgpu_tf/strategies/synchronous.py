"""Factories of the strategies whose replicas step together.

    create_mirrored_strategy(devices=2)              # GPU 0 and GPU 1
    create_mirrored_strategy(num_virtual_devices=4)  # no GPU needed
    create_multi_worker_mirrored_strategy()          # TF_CONFIG decides

What comes back is TensorFlow's own strategy. The factories add what is easy
to forget: memory growth on, GPUs that were not selected left alone, the
communication checked against the devices, and errors that name the remedy.
"""

from __future__ import annotations

import tensorflow as tf

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.waiting import told_of_missing
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.names import COMMUNICATIONS, Devices
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.mirrored import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
)


def create_one_device_strategy(
    device: int | str | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy with one replica.

    Args:
        device: A GPU by index, or a device by name ("GPU:1", "CPU:0"); by
            default the first GPU, or the CPU where there is none.

    Returns:
        A `tf.distribute.OneDeviceStrategy`.

    Raises:
        ConfigurationError: There is no such device.
    """
    if device is None:
        device = "GPU:0" if devices_lib.gpus() else "CPU:0"
    if isinstance(device, str) and device.upper().startswith("CPU"):
        devices_lib.select_gpus([])
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    devices_lib.select_gpus(devices_lib.gpu_indices([device]))
    return tf.distribute.OneDeviceStrategy("/gpu:0")


def create_mirrored_strategy(
    devices: Devices = None,
    *,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy for several devices of one machine.

    Args:
        devices: A number of GPUs, or GPUs by index or name; all visible
            GPUs by default, or the CPU where there is none.
        communication: `auto`, `nccl` (GPUs only) or `hierarchical_copy`.
        num_virtual_devices: Splits the CPU into N devices.

    Returns:
        A `tf.distribute.MirroredStrategy`.

    Raises:
        ConfigurationError: A device does not exist, or the communication
            cannot work on these devices.
    """
    names = devices_lib.select_local(devices, num_virtual_devices)
    return MirroredStrategy(names, _cross_device_ops(communication, names))


def create_multi_worker_mirrored_strategy(
    cluster: ClusterConfig | None = None,
    *,
    devices: Devices = None,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy for several machines that step together.

    It returns once every task of the cluster has been reached, so all tasks
    must be started.

    Args:
        cluster: The cluster; from `TF_CONFIG` by default. Where there is
            none, the strategy has this process as its only worker.
        devices: A number of GPUs of this task, or GPUs by index or name; all
            visible GPUs by default.
        communication: `auto`, `nccl` (GPUs only) or `ring`.
        num_virtual_devices: Splits the CPU of each task into N replicas.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
        ConfigurationError: An argument cannot work here, or an op ran before
            the strategy was created.
        ClusterError: `TF_CONFIG` is not valid.
    """
    cluster = cluster or ClusterConfig.from_environment()
    if cluster is not None:
        _check_synchronous(cluster)
    check_communication(
        "multi_worker_mirrored", communication, ("auto", "nccl", "ring")
    )
    if communication == "nccl" and not devices_lib.gpus():
        raise ConfigurationError(_no_gpu_for("nccl", "ring"))
    names = devices_lib.select_local(devices, num_virtual_devices)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=_IMPLEMENTATIONS[communication]
    )
    with told_of_missing(cluster):
        return MultiWorkerMirroredStrategy(cluster, options, len(names))


def create_central_storage_strategy(
    devices: Devices = None,
    *,
    num_virtual_devices: int | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy that keeps the variables once, on the CPU.

    Args:
        devices: A number of GPUs, or GPUs by index or name; all visible
            GPUs by default, or the CPU where there is none.
        num_virtual_devices: Splits the CPU into N devices.

    Returns:
        A `tf.distribute.experimental.CentralStorageStrategy`.

    Raises:
        ConfigurationError: A device does not exist.
    """
    names = devices_lib.select_local(devices, num_virtual_devices)
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=names, parameter_device="/cpu:0"
    )


def create_tpu_strategy(tpu: str = "") -> tf.distribute.Strategy:
    """Creates a strategy for the cores of a TPU. Untested on hardware.

    Args:
        tpu: Name or address of the TPU, "" for the local one.

    Returns:
        A `tf.distribute.TPUStrategy`.

    Raises:
        ConfigurationError: No TPU was found.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        raise ConfigurationError(
            f"The strategy 'tpu' needs a TPU. Received: tpu={tpu!r}, and "
            f"none was found ({_first_line(error)}). Name one, or use "
            "'mirrored' or 'one_device'."
        ) from None
    return tf.distribute.TPUStrategy(resolver)


_IMPLEMENTATIONS = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}


def _check_synchronous(cluster: ClusterConfig) -> None:
    _ = cluster.worker_index  # Refuses ps and evaluator tasks by name.
    if cluster.ps:
        raise ConfigurationError(
            "The strategy 'multi_worker_mirrored' has no parameter servers. "
            f"Received: TF_CONFIG with {len(cluster.ps)} ps tasks. Use a "
            "cluster of chief and worker tasks."
        )


def _cross_device_ops(
    communication: str, names: list[str]
) -> tf.distribute.CrossDeviceOps | None:
    check_communication(
        "mirrored", communication, ("auto", "nccl", "hierarchical_copy")
    )
    on_gpu = all("GPU" in name for name in names)
    if communication == "auto":
        return None
    if not on_gpu:
        raise ConfigurationError(_no_gpu_for(communication, "auto"))
    if communication == "nccl":
        return tf.distribute.NcclAllReduce()
    return tf.distribute.HierarchicalCopyAllReduce()


def check_communication(
    strategy: str, communication: str, valid: tuple[str, ...]
) -> None:
    """Refuses a way to communicate that a strategy does not have.

    Args:
        strategy: The strategy's name.
        communication: The name that was given.
        valid: The names that the strategy takes.

    Raises:
        ConfigurationError: The name is none of them.
    """
    if communication not in COMMUNICATIONS:
        raise ConfigurationError(
            unknown_name("communication", communication, COMMUNICATIONS)
        )
    if communication not in valid:
        raise ConfigurationError(
            f"The strategy {strategy!r} communicates by {_either(valid)}. "
            f"Received: communication={communication!r}."
        )


def _either(valid: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in valid)


def _no_gpu_for(communication: str, instead: str) -> str:
    return (
        f"communication={communication!r} works between GPUs only. Received: "
        f"a machine or a selection without GPUs. Use {instead!r}."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
