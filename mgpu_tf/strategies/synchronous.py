"""Factories of the synchronous strategies.

    create_mirrored_strategy(devices=2)              # GPU 0 and GPU 1
    create_mirrored_strategy(num_virtual_devices=4)  # no GPU needed
    create_multi_worker_mirrored_strategy()          # TF_CONFIG, Slurm ...

The factories return TensorFlow's strategies. They also turn memory growth on,
hide GPUs that were not selected, check that the communication works on the
devices, and raise errors that name the remedy.
"""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from mgpu_tf.cluster import watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.waiting import naming_missing
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.names import COMMUNICATIONS, VISIBLE_GPUS, Devices, Shares
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.replicas.balance import Balance
from mgpu_tf.strategies.replicas.mirrored import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
)


@checked
def create_one_device_strategy(
    device: int | str | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy with one replica.

    Args:
        device: The index of a GPU, or the name of a device ("GPU:1", "CPU:0").
            Default: the first GPU, or the CPU on a machine without GPUs.

    Returns:
        A `tf.distribute.OneDeviceStrategy`.

    Raises:
        ConfigurationError: The device does not exist.
    """
    if device is None:
        device = "GPU:0" if devices_lib.gpus() else "CPU:0"
    if isinstance(device, str) and device.upper().startswith("CPU"):
        devices_lib.select_gpus([])
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    devices_lib.select_gpus(devices_lib.gpu_indices([device]))
    return tf.distribute.OneDeviceStrategy("/gpu:0")


@checked
def create_mirrored_strategy(
    devices: Devices = None,
    *,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
    balance: Shares = None,
) -> tf.distribute.Strategy:
    """Creates a strategy for several devices of one machine.

    Args:
        devices: A number of GPUs, or a list of their indices or names.
            Default: all visible GPUs, or the CPU on a machine without GPUs.
        communication: `auto`, `nccl` or `hierarchical_copy`; the last two only
            between GPUs.
        num_virtual_devices: Split the CPU into N devices.
        balance: The share of each replica in a global batch, such as "2,1".
            Default: equal shares.

    Returns:
        A `tf.distribute.MirroredStrategy`.

    Raises:
        ConfigurationError: A device does not exist, or the communication
            cannot work on these devices.
    """
    names = devices_lib.select_local(devices, num_virtual_devices)
    return MirroredStrategy(
        names,
        cross_device_ops(communication, names),
        Balance.of(balance, 1, len(names)),
    )


@checked
def create_multi_worker_mirrored_strategy(
    cluster: ClusterConfig | None = None,
    *,
    devices: Devices = None,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
    balance: Shares = None,
) -> tf.distribute.Strategy:
    """Creates a synchronous strategy for several processes or machines.

    The function returns when it has reached every task of the cluster, so all
    tasks must be started.

    Args:
        cluster: The cluster. Default: the cluster in `TF_CONFIG`, or that of
            the scheduler. Without one, this process is the only worker.
        devices: A number of GPUs of this task, or a list of their indices or
            names. Default: all visible GPUs.
        communication: `auto`, `nccl` (only between GPUs) or `ring`.
        num_virtual_devices: Split the CPU of each task into N devices.
        balance: The share of each worker in a global batch, such as "2,1", or
            "auto": shares that follow from measured speed, chosen anew after
            each epoch where that saves time. Default: equal shares.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
        ConfigurationError: An argument does not work on this machine, or
            TensorFlow ran an operation before the strategy was created.
        ClusterError: `TF_CONFIG` is not valid.
    """
    cluster = cluster or ClusterConfig.from_environment()
    check_workers("multi_worker_mirrored", cluster, communication)
    names = devices_lib.select_local(devices, num_virtual_devices)
    chosen = between_workers(communication, cluster, devices, names)
    options = collective_options(chosen)
    workers = 1 if cluster is None else cluster.num_workers
    shares = Balance.of(balance, workers, workers * len(names))
    watchdog.begin(cluster)
    with naming_missing(cluster):
        return MultiWorkerMirroredStrategy(cluster, options, len(names), shares)


@checked
def create_central_storage_strategy(
    devices: Devices = None,
    *,
    num_virtual_devices: int | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy with one copy of the variables, on the CPU.

    Args:
        devices: A number of GPUs, or a list of their indices or names.
            Default: all visible GPUs, or the CPU on a machine without GPUs.
        num_virtual_devices: Split the CPU into N devices.

    Returns:
        A `tf.distribute.experimental.CentralStorageStrategy`.

    Raises:
        ConfigurationError: A device does not exist.
    """
    names = devices_lib.select_local(devices, num_virtual_devices)
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=names, parameter_device="/cpu:0"
    )


@checked
def create_tpu_strategy(tpu: str = "") -> tf.distribute.Strategy:
    """Creates a strategy for the cores of a TPU. Untested on hardware.

    Args:
        tpu: Name or address of the TPU; "" for the local TPU.

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


def check_workers(
    strategy: str, cluster: ClusterConfig | None, communication: str
) -> None:
    """Checks that workers can communicate in a way.

    Args:
        strategy: The strategy's name.
        cluster: The cluster.
        communication: `auto`, `nccl` or `ring`.

    Raises:
        ConfigurationError: The cluster has parameter servers, or the
            communication cannot work on this machine.
    """
    if cluster is not None:
        _check_synchronous(strategy, cluster)
    check_communication(strategy, communication, ("auto", "nccl", "ring"))
    if communication == "nccl" and not devices_lib.gpus():
        raise ConfigurationError(_no_gpu_for("nccl", "ring"))


def between_workers(
    communication: str,
    cluster: ClusterConfig | None,
    devices: Devices,
    names: list[str],
) -> str:
    """Returns how workers communicate, with `auto` decided where it matters.

    Left to decide, TensorFlow sends the tensors of GPUs over sockets of the
    hosts. NCCL takes a GPU once, so it is for workers that have their own.

    Args:
        communication: `auto`, `nccl` or `ring`.
        cluster: The cluster.
        devices: The GPUs that were asked for; None for all that are visible.
        names: The devices of this worker.
    """
    if communication != "auto" or not all("GPU" in name for name in names):
        return communication
    if len(names) > len(tf.config.get_visible_devices("GPU")):
        return "ring"
    beside = 1 if cluster is None else cluster.workers_beside
    if beside > 1 and devices is None and VISIBLE_GPUS not in os.environ:
        logging.getLogger("mgpu_tf").warning(
            "%d workers of this machine take the same GPUs, which NCCL does "
            "not do: they exchange by sockets, which is slow. Give each its "
            "own by %s.",
            beside,
            VISIBLE_GPUS,
        )
        return "ring"
    return "nccl"


def collective_options(
    communication: str,
) -> tf.distribute.experimental.CommunicationOptions:
    """Returns TensorFlow's options of a communication.

    Args:
        communication: As `between_workers` returns it.
    """
    return tf.distribute.experimental.CommunicationOptions(
        implementation=_IMPLEMENTATIONS[communication]
    )


def _check_synchronous(strategy: str, cluster: ClusterConfig) -> None:
    _ = cluster.worker_index  # Refuses ps and evaluator tasks by name.
    if cluster.ps:
        raise ConfigurationError(
            f"The strategy {strategy!r} has no parameter servers. "
            f"Received: {cluster.source} with {len(cluster.ps)} ps tasks. Use "
            "a cluster of chief and worker tasks."
        )


def cross_device_ops(
    communication: str, names: list[str]
) -> tf.distribute.CrossDeviceOps | None:
    """Returns how the devices of one machine sum; None for the default.

    TensorFlow keeps a record of each collective operation that it has run, so
    CPUs sum on the first of them instead.

    Args:
        communication: `auto`, `nccl` or `hierarchical_copy`.
        names: The devices.

    Raises:
        ConfigurationError: The communication cannot work on these devices.
    """
    check_communication(
        "mirrored", communication, ("auto", "nccl", "hierarchical_copy")
    )
    on_gpu = all("GPU" in name for name in names)
    if communication == "auto":
        return None if on_gpu else tf.distribute.ReductionToOneDevice()
    if not on_gpu:
        raise ConfigurationError(_no_gpu_for(communication, "auto"))
    if communication == "nccl":
        # What TensorFlow takes between GPUs by itself. Its `NcclAllReduce` is
        # an older way, which copies all gradients into one.
        return None
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
        ConfigurationError: The name is not valid.
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
