"""The machines that are here, and the best layout on them.

    name, options, why = choose(build_model, 256, options)

Devices are those that `create_strategy` would take: the GPUs of each worker of
the cluster, the parts of the CPU that were asked for, or the CPU. What they
can do is what `mgpu-tf calibrate` has measured here, else what the table says.

TensorFlow is imported when this is called.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StrategyOptions
from mgpu_tf.planner.choice.plans import Candidate, Plan, plan
from mgpu_tf.planner.devices import DEVICES, Device, device, link
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.machine import calibration
from mgpu_tf.planner.speed.step_time import Machines

if TYPE_CHECKING:
    import keras

# Parts of the name that TensorFlow gives a GPU, and its row of the table.
_NAMES = (
    ("H200", "h200"),
    ("H100 PCIe", "h100-pcie-80gb"),
    ("H100", "h100-80gb"),
    ("B200", "b200"),
    ("A100-SXM4-80GB", "a100-80gb"),
    ("A100 80GB", "a100-80gb"),
    ("A100", "a100-40gb"),
    ("V100-SXM2-32GB", "v100-32gb"),
    ("V100", "v100-16gb"),
    ("P100-SXM2", "p100-16gb"),
    ("P100", "p100-pcie-16gb"),
    ("K80", "k80"),
    ("A10", "a10"),
    ("L4", "l4"),
    ("T4", "t4"),
    ("3090", "rtx3090"),
    ("4090", "rtx4090"),
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a plan chose for the devices that are here.

    Attributes:
        strategy: The name for `create_strategy`.
        options: The options of the strategy.
        recompute: That of the steps.
        why: The sentence.
        plan: The whole plan.
    """

    strategy: str
    options: dict[str, Any]
    recompute: str | None
    why: str
    plan: Plan


def choose(
    build_model: Callable[[], keras.Model],
    global_batch_size: int,
    options: StrategyOptions,
    *,
    data: Any = None,
    recomputes: bool = False,
) -> Choice:
    """Chooses the best layout that fits on the devices that are here.

    Args:
        build_model: Returns a compiled model.
        global_batch_size: Rows of an update.
        options: Which devices are taken; axes are chosen here.
        data: A batch, as in `trace`.
        recomputes: Whether layouts that compute layers again may be chosen.

    Returns:
        The choice.

    Raises:
        ConfigurationError: No layout fits, or parameter servers are there.
    """
    cluster = ClusterConfig.from_environment()
    if cluster is not None and cluster.ps:
        raise ConfigurationError(
            "A plan chooses among strategies whose replicas step together. "
            f"Received: {cluster.source} with {len(cluster.ps)} parameter "
            "servers. Use 'parameter_server', or a cluster without ps."
        )
    workers = 1 if cluster is None else cluster.num_workers
    machines = machines_here(options, workers)
    found = plan(
        build_model,
        global_batch_size,
        machines,
        data=data,
        all_devices=workers > 1,
    )
    best = next(
        (
            each
            for each in found.candidates
            if each.fits and _can_be_made(each.layout, workers, recomputes)
        ),
        None,
    )
    if best is None:
        raise ConfigurationError(
            "A plan needs a layout that fits on the devices that are here. "
            f"Received: global_batch_size={global_batch_size}. {found.why}"
        )
    why = found.why if best is found.best else _said(best)
    strategy = best.layout.strategy
    if workers > 1 and strategy == "mirrored":
        strategy = "multi_worker_mirrored"
    return Choice(
        strategy,
        best.layout.strategy_options | _devices_of(best.layout, options),
        best.layout.recompute,
        why,
        found,
    )


def machines_here(options: StrategyOptions, workers: int = 1) -> Machines:
    """Returns the machines that a strategy of these options would have.

    Args:
        options: Which devices are taken.
        workers: The workers of the cluster.
    """
    measured = None
    path = calibration.default_path()
    if os.path.exists(path):
        measured = calibration.Calibration.read(path)
    between = link("25gbe")
    if measured is not None and measured.link is not None:
        between = measured.link
    names = []
    if options.devices is not None or not options.num_virtual_devices:
        names = _gpu_names(options)
    row = _gpu(names[0], measured) if names else _cpu(measured)
    if options.num_virtual_devices:
        count = options.num_virtual_devices
        row = dataclasses.replace(row, memory_bytes=row.memory_bytes / count)
        return Machines(
            row, count, workers, between, link("memory"), sharing=count
        )
    return Machines(row, max(1, len(names)), workers, between)


def _can_be_made(layout: Layout, workers: int, recomputes: bool) -> bool:
    """Whether `create_strategy` can make a layout, with its options alone.

    In a cluster a pipeline refuses more of a model than is known here, so it is
    taken where it is asked for.
    """
    if layout.accumulation > 1:
        return False
    if workers > 1 and layout.pipeline > 1:
        return False
    return recomputes or layout.recompute is None


def _said(best: Candidate) -> str:
    return (
        f"{best.layout}: it takes {best.bytes / (1 << 30):,.2f} GiB of each "
        f"device and does {best.examples_per_second:,.0f} examples/s, limited "
        f"by {best.time.limited_by}."
    )


def _devices_of(layout: Layout, options: StrategyOptions) -> dict[str, Any]:
    """Returns the option that takes as many devices as a layout has."""
    if options.num_virtual_devices:
        gpu = {} if options.devices is None else {"devices": options.devices}
        if layout.strategy == "one_device":
            return gpu
        return gpu | {"num_virtual_devices": layout.devices}
    if isinstance(options.devices, list | tuple):
        return {"devices": list(options.devices)[: layout.devices]}
    return {"devices": layout.devices} if _gpu_names(options) else {}


def _cpu(measured: calibration.Calibration | None) -> Device:
    row = DEVICES["cpu"]
    if measured is not None and measured.device.name == "cpu":
        row = measured.device
    return dataclasses.replace(row, memory_bytes=host_memory())


def host_memory() -> float:
    """Returns the bytes that this machine has free, less what all need."""
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
        return 0.9 * pages * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return DEVICES["cpu"].memory_bytes


def device_memory(devices: int) -> float:
    """Returns the bytes that each of some devices here has."""
    row = machines_here(StrategyOptions())
    share = 1 if row.device.name != "cpu" else devices
    return row.device.memory_bytes / share


def _gpu_names(options: StrategyOptions) -> list[str]:
    """Returns what TensorFlow calls each GPU that would be taken."""
    import tensorflow as tf

    from mgpu_tf.runtime import devices as devices_lib

    present = devices_lib.gpus()
    names = []
    for index in devices_lib.gpu_indices(options.devices):
        details = tf.config.experimental.get_device_details(present[index])
        names.append(str(details.get("device_name", "")))
    return names


def _gpu(name: str, measured: calibration.Calibration | None) -> Device:
    row = next((r for part, r in _NAMES if part in name), "a100-40gb")
    if measured is not None and measured.device.name == row:
        return measured.device
    return device(row)
