"""Factories for `tf.distribute` strategies, one for each, and a selector.

    create_strategy("auto")                          # the situation decides
    create_mirrored_strategy(devices=2)              # GPU 0 and GPU 1
    create_mirrored_strategy(num_virtual_devices=4)  # no GPU needed
    create_multi_worker_mirrored_strategy()          # TF_CONFIG decides

What comes back is TensorFlow's own strategy. The factories add what is easy
to forget: memory growth on, GPUs that were not selected left alone, the
communication checked against the devices, and errors that name the remedy.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import tensorflow as tf

from mgpu_tf import devices as devices_lib
from mgpu_tf.cluster import ClusterConfig
from mgpu_tf.config import COMMUNICATIONS
from mgpu_tf.devices import Devices
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
from mgpu_tf.missing import told_of_missing
from mgpu_tf.parameter_server import (
    EvaluatorStrategy,
    ParameterServerStrategy,
    create_parameter_server_strategy,
)

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """What `create_strategy` hands to the factory that it selects.

    Attributes:
        devices: A number of GPUs, or GPUs by index or name ("GPU:1"); all
            visible GPUs by default.
        communication: How replicas reduce, one of `COMMUNICATIONS`.
        num_virtual_devices: Splits the CPU into so many devices, to try
            several replicas without GPUs.
        tpu: Name or address of a TPU, "" for the local one.
        max_staleness: See `create_parameter_server_strategy`.
        late_gradients: See `create_parameter_server_strategy`.
    """

    devices: Devices = None
    communication: str = "auto"
    num_virtual_devices: int | None = None
    tpu: str = ""
    max_staleness: int | None = None
    late_gradients: str = "hold"


def create_strategy(
    name: str = "auto",
    *,
    devices: Devices = None,
    communication: str = "auto",
    num_virtual_devices: int | None = None,
    tpu: str = "",
    max_staleness: int | None = None,
    late_gradients: str = "hold",
) -> tf.distribute.Strategy:
    """Creates a strategy by name.

    `auto` takes `parameter_server` where `TF_CONFIG` names ps tasks,
    `multi_worker_mirrored` where it names another cluster, `mirrored` where
    there are several GPUs or virtual devices, and `one_device` otherwise. It
    logs one line with its choice and the reason.

    Example:
        strategy = mgpu_tf.create_strategy("mirrored", devices=[0, 2])

    Args:
        name: One of `auto`, `one_device`, `mirrored`,
            `multi_worker_mirrored`, `parameter_server`, `central_storage`,
            `tpu`.
        devices: A number of GPUs, or GPUs by index or name; all visible
            GPUs by default.
        communication: `auto`, `nccl`, `ring` or `hierarchical_copy`.
        num_virtual_devices: Splits the CPU into so many devices.
        tpu: Name or address of the TPU, "" for the local one.
        max_staleness: For `parameter_server`: how late a gradient may be.
        late_gradients: For `parameter_server`: `hold` or `scale`.

    Returns:
        The strategy.

    Raises:
        ConfigurationError: The name is unknown, or an argument cannot work
            with the strategy or on this machine.
    """
    options = StrategyOptions(
        devices,
        communication,
        num_virtual_devices,
        tpu,
        max_staleness,
        late_gradients,
    )
    if name == "auto":
        name, reason = _choose(options)
        _log.info("strategy %s: %s", name, reason)
    try:
        factory = _FACTORIES[name]
    except KeyError:
        raise ConfigurationError(
            unknown_name("strategy", name, ["auto", *_FACTORIES])
        ) from None
    return factory(options)


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
        num_virtual_devices: Splits the CPU into so many devices.

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
        num_virtual_devices: Splits the CPU of each task into so many
            replicas.

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
    _check_communication(
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
        num_virtual_devices: Splits the CPU into so many devices.

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


def local_replica_count(strategy: tf.distribute.Strategy) -> int:
    """Returns how many replicas of the strategy run in this process."""
    return len(strategy.extended.worker_devices)


def worker_count(strategy: tf.distribute.Strategy) -> int:
    """Returns how many processes the strategy's replicas are spread over."""
    if isinstance(strategy, ParameterServerStrategy):
        return strategy.num_workers
    return strategy.num_replicas_in_sync // local_replica_count(strategy)


def replica_count(strategy: tf.distribute.Strategy) -> int:
    """Returns how many replicas compute gradients, in step or not."""
    if isinstance(strategy, ParameterServerStrategy):
        return strategy.num_workers * strategy.num_replicas_in_sync
    return strategy.num_replicas_in_sync


def lost_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns how often the strategy lost a worker and went on without."""
    if isinstance(strategy, ParameterServerStrategy):
        return strategy.lost_workers
    return 0


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process writes the files of a run."""
    if isinstance(strategy, EvaluatorStrategy):
        return False
    resolver = strategy.cluster_resolver
    if worker_count(strategy) == 1 or resolver is None:
        return True
    chief = resolver.cluster_spec().as_dict().get("chief")
    task = (resolver.task_type, resolver.task_id)
    return task == (("chief", 0) if chief else ("worker", 0))


def strategy_name(strategy: tf.distribute.Strategy) -> str:
    """Returns the name under which `create_strategy` knows a strategy."""
    for name, kind in _KINDS.items():
        if isinstance(strategy, kind):
            return name
    return type(strategy).__name__


def _choose(options: StrategyOptions) -> tuple[str, str]:
    cluster = ClusterConfig.from_environment()
    if cluster is not None and cluster.ps:
        return (
            "parameter_server",
            f"TF_CONFIG names {len(cluster.worker)} workers and "
            f"{len(cluster.ps)} parameter servers, this is "
            f"{cluster.task_name}",
        )
    if cluster is not None:
        return (
            "multi_worker_mirrored",
            f"TF_CONFIG names {cluster.num_workers} workers, "
            f"this is {cluster.task_name}",
        )
    if options.num_virtual_devices:
        count = options.num_virtual_devices
        return "mirrored", f"the CPU is split into {count} virtual devices"
    gpus = len(devices_lib.gpu_indices(options.devices))
    if gpus > 1:
        return "mirrored", f"{gpus} GPUs on this machine"
    if gpus == 1:
        return "one_device", "one GPU on this machine"
    return "one_device", "no GPU on this machine, so the CPU"


def _one_device(options: StrategyOptions) -> tf.distribute.Strategy:
    _refuse_virtual_devices("one_device", options.num_virtual_devices)
    _check_communication("one_device", options.communication, ("auto",))
    chosen = options.devices
    if isinstance(chosen, int):
        if chosen != 1:
            raise ConfigurationError(
                "The strategy 'one_device' takes one device. Received: "
                f"devices={chosen}. Use 'mirrored' for several."
            )
        chosen = None
    if chosen is not None and len(chosen) != 1:
        raise ConfigurationError(
            "The strategy 'one_device' takes one device. Received: "
            f"devices={list(chosen)}. Use 'mirrored' for several."
        )
    return create_one_device_strategy(chosen[0] if chosen else None)


def _parameter_server(options: StrategyOptions) -> tf.distribute.Strategy:
    name = "parameter_server"
    _refuse_virtual_devices(name, options.num_virtual_devices)
    _check_communication(name, options.communication, ("auto",))
    if options.devices is not None:
        raise ConfigurationError(
            "The strategy 'parameter_server' takes the GPUs that each worker "
            f"sees. Received: devices={options.devices!r}. Set "
            "CUDA_VISIBLE_DEVICES for the workers."
        )
    return create_parameter_server_strategy(
        max_staleness=options.max_staleness,
        late_gradients=options.late_gradients,
    )


def _central_storage(options: StrategyOptions) -> tf.distribute.Strategy:
    _check_communication("central_storage", options.communication, ("auto",))
    return create_central_storage_strategy(
        options.devices, num_virtual_devices=options.num_virtual_devices
    )


def _tpu(options: StrategyOptions) -> tf.distribute.Strategy:
    _refuse_virtual_devices("tpu", options.num_virtual_devices)
    _check_communication("tpu", options.communication, ("auto",))
    return create_tpu_strategy(options.tpu)


_FACTORIES: dict[str, Callable[[StrategyOptions], tf.distribute.Strategy]] = {
    "one_device": _one_device,
    "mirrored": lambda options: create_mirrored_strategy(
        options.devices,
        communication=options.communication,
        num_virtual_devices=options.num_virtual_devices,
    ),
    "multi_worker_mirrored": lambda options: (
        create_multi_worker_mirrored_strategy(
            devices=options.devices,
            communication=options.communication,
            num_virtual_devices=options.num_virtual_devices,
        )
    ),
    "parameter_server": _parameter_server,
    "central_storage": _central_storage,
    "tpu": _tpu,
}

_KINDS = {
    "parameter_server": ParameterServerStrategy,
    "one_device": tf.distribute.OneDeviceStrategy,
    "multi_worker_mirrored": tf.distribute.MultiWorkerMirroredStrategy,
    "mirrored": tf.distribute.MirroredStrategy,
    "central_storage": tf.distribute.experimental.CentralStorageStrategy,
    "tpu": tf.distribute.TPUStrategy,
}

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
    _check_communication(
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


def _check_communication(
    strategy: str, communication: str, valid: tuple[str, ...]
) -> None:
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


def _refuse_virtual_devices(strategy: str, count: int | None) -> None:
    if count is not None:
        raise ConfigurationError(
            f"The strategy {strategy!r} takes no virtual devices. Received: "
            f"num_virtual_devices={count}. Use 'mirrored'."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
