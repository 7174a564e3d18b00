"""The kinds of strategies: one row for each kind, and functions on rows.

    strategy = create_strategy("mirrored", num_virtual_devices=4)
    kind_of(strategy).name                  # "mirrored"
    topology_of(strategy).num_workers       # 1

A new kind is a row in `KINDS` and the modules that the row names. No other
module of the package checks the class of a strategy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import check_effects, checked, made_of
from mgpu_tf.options import StepOptions, StrategyOptions
from mgpu_tf.runtime import devices as devices_lib
from mgpu_tf.strategies.parameter_server import (
    EvaluatorStrategy,
    ParameterServerStrategy,
    create_parameter_server_strategy,
)
from mgpu_tf.strategies.replicas.topology import (
    Topology,
    asynchronous_topology,
    synchronous_topology,
)
from mgpu_tf.strategies.split.fully_sharded import (
    SplittingStrategy,
    sharded_topology,
)
from mgpu_tf.strategies.split.model_parallel import (
    create_model_parallel_strategy,
)
from mgpu_tf.strategies.split.pipeline import StagedStrategy
from mgpu_tf.strategies.synchronous import (
    check_communication,
    create_central_storage_strategy,
    create_mirrored_strategy,
    create_multi_worker_mirrored_strategy,
    create_one_device_strategy,
    create_tpu_strategy,
)
from mgpu_tf.user_function import is_target, load_function

_log = logging.getLogger("mgpu_tf")

_SYNCHRONOUS = "mgpu_tf.engine.synchronous.engine:SynchronousEngine"
_SHARDED = "mgpu_tf.engine.synchronous.sharded:ShardedEngine"
_PIPELINE = "mgpu_tf.engine.synchronous.pipeline.engine:PipelineEngine"
_ASYNCHRONOUS = "mgpu_tf.engine.asynchronous.engine:AsynchronousEngine"
_PLANNER = "mgpu_tf.planner.machine.here"


@dataclasses.dataclass(frozen=True)
class StrategyKind:
    """The properties of a kind of strategy.

    Attributes:
        name: The name that `create_strategy` takes.
        type: The class of the strategies.
        create: Creates a strategy from `StrategyOptions`.
        engine: The engine class, as `module:class`; loaded when a model is
            built.
        in_step: Whether the strategy is synchronous.
        stored_once: Whether there is one copy of a variable for all replicas.
        trains: Whether `fit` trains; if not, it evaluates checkpoints.
        partitions: Whether a variable may be split over several servers.
        splits: Whether replicas store parts of a variable, or each variable
            on a device of its own.
        topology: Returns the topology of a strategy.
    """

    name: str
    type: type
    create: Callable[[StrategyOptions], tf.distribute.Strategy]
    engine: str = _SYNCHRONOUS
    in_step: bool = True
    stored_once: bool = False
    trains: bool = True
    partitions: bool = False
    splits: bool = False
    topology: Callable[[tf.distribute.Strategy], Topology] = (
        synchronous_topology
    )


def kind_of(strategy: tf.distribute.Strategy) -> StrategyKind:
    """Returns the kind of a strategy.

    Raises:
        ConfigurationError: No kind in `KINDS` has such a strategy.
    """
    for row in _ROWS:
        if isinstance(strategy, row.type):
            return KINDS.get(getattr(strategy, "asked_for", ""), row)
    if type(strategy) is _NO_STRATEGY:
        return KINDS["one_device"]
    raise ConfigurationError(
        "A strategy must be one of those that create_strategy makes. "
        f"Received: {type(strategy).__name__}. Valid: {', '.join(KINDS)}."
    )


def topology_of(strategy: tf.distribute.Strategy) -> Topology:
    """Returns the topology of a strategy, as seen from this process."""
    return kind_of(strategy).topology(strategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process is the chief, which writes files.

    Args:
        strategy: Any strategy.
    """
    return topology_of(strategy).is_chief


def lost_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns how often the strategy lost a worker and continued without it."""
    return getattr(strategy, "lost_workers", 0)


def spreading_rows(
    strategy: tf.distribute.Strategy, rows: int, width: int
) -> contextlib.AbstractContextManager[None]:
    """Lets a table that is made in a block have its rows over the replicas.

    Args:
        strategy: Any; most hold a table whole.
        rows: Of the table.
        width: The length of a row.
    """
    if isinstance(strategy, SplittingStrategy):
        return strategy.spreading_rows(rows, width)
    return contextlib.nullcontext()


@checked
def create_strategy(
    name: str = "auto",
    *,
    for_model: Callable[[], Any] | None = None,
    global_batch_size: int | None = None,
    **options: Any,
) -> tf.distribute.Strategy:
    """Creates a strategy by name.

    `auto` logs the reason of its choice in one line. It chooses the first
    that fits:

    1. `parameter_server` if the cluster has ps tasks. A cluster is that of
       `TF_CONFIG`, else that of Slurm, Kubernetes or SkyPilot;
    2. `multi_worker_mirrored` in another cluster;
    3. `mirrored` if there are several GPUs or virtual devices;
    4. `one_device`.

    Example:
        strategy = mgpu_tf.create_strategy("mirrored", devices=[0, 2])

    With `for_model` it takes instead the fastest layout that fits on the
    devices that are here, as `mgpu_tf.planner` predicts, and logs why.

    Args:
        name: One of `auto`, `one_device`, `mirrored`,
            `multi_worker_mirrored`, `parameter_server`, `central_storage`,
            `tpu`, `fsdp`, `model_parallel`.
        for_model: With `auto`, a function that returns the compiled model.
        global_batch_size: With `for_model`, the examples of a step.
        **options: The fields of `StrategyOptions`:
            devices: A number of GPUs, or a list of their indices or names.
                Default: all visible GPUs.
            communication: `auto`, `nccl`, `ring` or `hierarchical_copy`.
            num_virtual_devices: Split the CPU into N devices.
            tpu: Name or address of the TPU; "" for the local TPU.
            max_staleness: For `parameter_server`: the largest staleness of a
                gradient.
            late_gradients: For `parameter_server`: `hold` or `scale`.
            balance: The share of each worker, or of each replica of one
                machine, in a global batch: "2,1", or "auto".
            data_parallel, fsdp_parallel, shard: For `fsdp` and
                `model_parallel`; as in `create_model_parallel_strategy`.
            tensor_parallel, layout, sequence_parallel, pipeline_parallel,
                micro_batches, pipeline_schedule, pipeline_stages: For
                `model_parallel`; as there.

    Returns:
        The strategy.

    Raises:
        ConfigurationError: The name or an option is unknown, or an option
            does not work with the strategy or on this machine.
    """
    given = made_of(
        StrategyOptions, options, "create_strategy", {"Trainer": StepOptions}
    )
    if for_model is None and global_batch_size is None:
        return create_with(name, given)
    if name != "auto" or for_model is None or global_batch_size is None:
        raise ConfigurationError(
            "for_model and global_batch_size go together, with 'auto'. "
            f"Received: {name!r}, for_model={for_model!r}, "
            f"global_batch_size={global_batch_size!r}."
        )
    return create_planned(for_model, global_batch_size, given)[0]


def create_planned(
    build_model: Callable[[], Any],
    global_batch_size: int,
    options: StrategyOptions,
    *,
    recomputes: bool = False,
) -> tuple[tf.distribute.Strategy, Any]:
    """Creates the strategy that a plan chooses for the devices here.

    Args:
        build_model: Returns the compiled model.
        global_batch_size: Examples of a step.
        options: Which devices are taken; the plan chooses the rest.
        recomputes: Whether layers may be computed again.

    Returns:
        The strategy, and the `Choice` of the plan.
    """
    # The planner traces models, so it is above strategies.
    here = importlib.import_module(_PLANNER)
    choice = here.choose(
        build_model, global_batch_size, options, recomputes=recomputes
    )
    kept = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in ("devices", "num_virtual_devices")
    }
    given = StrategyOptions(**(kept | choice.options))
    _log.info("strategy %s: %s", choice.strategy, choice.why)
    return create_with(choice.strategy, given), choice


def strategy_from(
    given: tf.distribute.Strategy | str | None,
) -> tf.distribute.Strategy:
    """Returns a strategy as it is, or creates it by its name; None is auto."""
    if given is None or isinstance(given, str):
        return create_strategy(given or "auto")
    return given


def strategy_of_scope(model: Any) -> tf.distribute.Strategy | None:
    """Returns the strategy in whose scope a model was made, None for none."""
    strategy = model.distribute_strategy
    return None if type(strategy) is _NO_STRATEGY else strategy


def create_with(name: str, options: StrategyOptions) -> tf.distribute.Strategy:
    """Creates a strategy by name, from options as one value."""
    automatic = name == "auto"
    if automatic:
        name, reason = _choose(options)
        # The training says which strategy runs.
        _log.info("auto: %s", reason)
    row = KINDS.get(name)
    if row is None:
        raise ConfigurationError(
            unknown_name("strategy", name, ["auto", *KINDS])
        )
    try:
        check_effects(options, known={"strategy": name})
    except ConfigurationError as error:
        # One script for all platforms has options for each of them.
        if not automatic:
            raise
        _log.info("not used here: %s", error)
    return row.create(options)


def _choose(options: StrategyOptions) -> tuple[str, str]:
    cluster = ClusterConfig.from_environment()
    if cluster is not None and cluster.ps:
        return (
            "parameter_server",
            f"{cluster.source} names {len(cluster.worker)} workers and "
            f"{len(cluster.ps)} parameter servers, this is "
            f"{cluster.task_name}",
        )
    if cluster is not None:
        return (
            "multi_worker_mirrored",
            f"{cluster.source} names {cluster.num_workers} workers, "
            f"this is {cluster.task_name}",
        )
    if options.num_virtual_devices:
        count = options.num_virtual_devices
        what = "CPU" if options.devices is None else "GPU"
        return "mirrored", f"the {what} is split into {count} virtual devices"
    gpus = len(devices_lib.gpu_indices(options.devices))
    if gpus > 1:
        return "mirrored", f"{gpus} GPUs on this machine"
    if gpus == 1:
        return "one_device", "one GPU on this machine"
    return "one_device", "no GPU on this machine, so the CPU"


def _one_device(options: StrategyOptions) -> tf.distribute.Strategy:
    _refuse_virtual_devices("one_device", options.num_virtual_devices)
    check_communication("one_device", options.communication, ("auto",))
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
    check_communication(name, options.communication, ("auto",))
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
    check_communication("central_storage", options.communication, ("auto",))
    return create_central_storage_strategy(
        options.devices, num_virtual_devices=options.num_virtual_devices
    )


def _tpu(options: StrategyOptions) -> tf.distribute.Strategy:
    _refuse_virtual_devices("tpu", options.num_virtual_devices)
    check_communication("tpu", options.communication, ("auto",))
    return create_tpu_strategy(options.tpu)


def _mirrored(options: StrategyOptions) -> tf.distribute.Strategy:
    return create_mirrored_strategy(
        options.devices,
        communication=options.communication,
        num_virtual_devices=options.num_virtual_devices,
        balance=options.balance,
    )


def _fsdp(options: StrategyOptions) -> tf.distribute.Strategy:
    strategy = _model_parallel(options)
    strategy.asked_for = "fsdp"
    return strategy


def _model_parallel(options: StrategyOptions) -> tf.distribute.Strategy:
    stages = options.pipeline_stages
    layout = options.layout
    if isinstance(layout, str) and is_target(layout):
        layout = load_function(layout, "layout")()
    return create_model_parallel_strategy(
        options.data_parallel,
        options.fsdp_parallel,
        options.tensor_parallel,
        layout=layout,
        shard=options.shard,
        devices=options.devices,
        communication=options.communication,
        num_virtual_devices=options.num_virtual_devices,
        pipeline=options.pipeline_parallel,
        micro_batches=options.micro_batches,
        schedule=options.pipeline_schedule,
        stages=stages and [name.strip() for name in stages.split(",")],
        sequence_parallel=options.sequence_parallel,
    )


def _multi_worker_mirrored(options: StrategyOptions) -> tf.distribute.Strategy:
    return create_multi_worker_mirrored_strategy(
        devices=options.devices,
        communication=options.communication,
        num_virtual_devices=options.num_virtual_devices,
        balance=options.balance,
    )


def _refuse_virtual_devices(strategy: str, count: int | None) -> None:
    if count is not None:
        raise ConfigurationError(
            f"The strategy {strategy!r} takes no virtual devices. Received: "
            f"num_virtual_devices={count}. Use 'mirrored'."
        )


KINDS = {
    row.name: row
    for row in (
        StrategyKind(
            "one_device", tf.distribute.OneDeviceStrategy, _one_device
        ),
        StrategyKind(
            "mirrored",
            tf.distribute.MirroredStrategy,
            _mirrored,
        ),
        StrategyKind(
            "multi_worker_mirrored",
            tf.distribute.MultiWorkerMirroredStrategy,
            _multi_worker_mirrored,
        ),
        StrategyKind(
            "parameter_server",
            ParameterServerStrategy,
            _parameter_server,
            engine=_ASYNCHRONOUS,
            in_step=False,
            partitions=True,
            topology=asynchronous_topology,
        ),
        StrategyKind(
            "central_storage",
            tf.distribute.experimental.CentralStorageStrategy,
            _central_storage,
            stored_once=True,
        ),
        StrategyKind("tpu", tf.distribute.TPUStrategy, _tpu),
        StrategyKind(
            "fsdp",
            SplittingStrategy,
            _fsdp,
            engine=_SHARDED,
            splits=True,
            topology=sharded_topology,
        ),
        StrategyKind(
            "model_parallel",
            SplittingStrategy,
            _model_parallel,
            engine=_SHARDED,
            splits=True,
            topology=sharded_topology,
        ),
    )
}

# On an evaluator task `parameter_server` has another strategy class.
_EVALUATOR = dataclasses.replace(
    KINDS["parameter_server"],
    type=EvaluatorStrategy,
    engine=_SYNCHRONOUS,
    trains=False,
    topology=lambda strategy: dataclasses.replace(
        synchronous_topology(strategy), is_chief=False
    ),
)

# `model_parallel` with stages has another one.
_WITH_STAGES = dataclasses.replace(
    KINDS["model_parallel"], type=StagedStrategy, engine=_PIPELINE
)

# What `tf.distribute.get_strategy` returns where no strategy is entered.
_NO_STRATEGY = type(tf.distribute.get_strategy())

# TensorFlow's classes inherit from each other: subclasses come first.
_ROWS = (
    _EVALUATOR,
    _WITH_STAGES,
    KINDS["model_parallel"],
    KINDS["multi_worker_mirrored"],
    *KINDS.values(),
)
