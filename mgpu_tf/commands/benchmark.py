"""The command `mgpu-tf benchmark`: throughput on several devices."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING

from absl import flags

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.commands.arguments import Call, define_isolation
from mgpu_tf.errors import ConfigurationError, installing, unknown_name
from mgpu_tf.folders import make_folder
from mgpu_tf.launch import local
from mgpu_tf.names import MODELS
from mgpu_tf.reports.scaling import MEANING, ScalingPoint, ScalingTable
from mgpu_tf.runtime import quiet_import

if TYPE_CHECKING:
    from mgpu_tf.studies import benchmark

USAGE = """mgpu-tf benchmark [--flags]

Trains a model on 1, 2, 4 and 8 devices. Prints throughput, speed-up and
efficiency, for GPUs beside published curves. A device is a GPU. On a machine
without GPUs it is a part of the CPU, which shows the overhead but no speed-up.
With --kind=processes a device is a process on its own core.

Example:
  mgpu-tf benchmark --devices=1,2,4 --model=cnn --output_dir=runs/scaling
  mgpu-tf benchmark --kind=processes --devices=1,2 --strong
"""

JSON = "scaling.json"
FIGURE = "scaling.png"


NEEDS = {"isolate": ("kind=processes",)}


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    define_isolation(values)
    text, number, yes = (
        flags.DEFINE_string,
        flags.DEFINE_integer,
        flags.DEFINE_boolean,
    )
    kinds = ", ".join(["auto", *MEANING])
    for define_flag, name, default, meaning in (
        (
            text,
            "devices",
            "1,2,4,8",
            "Numbers of devices, separated by commas.",
        ),
        (text, "kind", "auto", f"What a device is: {kinds}."),
        (text, "model", "mlp", f"The model: {', '.join(MODELS)}."),
        (
            yes,
            "weak",
            False,
            "Weak scaling: keep the batch size of each device. The default.",
        ),
        (
            yes,
            "strong",
            False,
            "Strong scaling: keep the global batch size.",
        ),
        (
            number,
            "batch_size",
            64,
            "Batch size of each device; with --strong, the global batch size.",
        ),
        (number, "steps", 20, "Number of steps in a measurement."),
        (number, "repeats", 3, "Number of measurements for each point."),
        (text, "output_dir", None, f"The folder for {JSON} and {FIGURE}."),
    ):
        define_flag(name, default, meaning, flag_values=values)


def run(call: Call) -> int:
    """Runs the command with parsed flags.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: A flag is wrong.
    """
    call.takes_flags_only()
    values = call.values
    devices = _check(values)
    if values.output_dir is not None:
        make_folder("output_dir", values.output_dir)
    draws = values.output_dir is not None and _can_draw()
    cluster = ClusterConfig.from_environment()
    if cluster is not None:
        return _as_worker(values, cluster)
    if values.kind == "processes":
        table = _of_processes(values, devices)
    else:
        table = _in_this_process(values, devices)
    print(table.text())
    if values.output_dir is not None:
        table.write(os.path.join(values.output_dir, JSON))
    if draws:
        from mgpu_tf.reports.figures import draw_scaling

        draw_scaling(table, os.path.join(values.output_dir, FIGURE))
    return 0


def _can_draw() -> bool:
    """Whether there is matplotlib; if not, a line says so at once."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(
            f"mgpu-tf benchmark: without {FIGURE}, which needs matplotlib: "
            f"{installing('plot')}",
            file=sys.stderr,
        )
        return False
    return True


def _check(values: flags.FlagValues) -> list[int]:
    try:
        devices = [int(number) for number in values.devices.split(",")]
    except ValueError:
        devices = []
    if not devices or min(devices) < 1 or len(set(devices)) != len(devices):
        raise ConfigurationError(
            "devices must be numbers of 1 or more, each once, with commas "
            f"between. Received: devices={values.devices!r}. Write "
            "--devices=1,2,4."
        )
    if values.kind not in ("auto", *MEANING):
        raise ConfigurationError(
            unknown_name("kind", values.kind, ["auto", *MEANING])
        )
    if values.model not in MODELS:
        raise ConfigurationError(unknown_name("model", values.model, MODELS))
    if values.weak and values.strong:
        raise ConfigurationError(
            "Scaling is weak or strong. Received: --weak and --strong. Give "
            "one of them."
        )
    for name in ("batch_size", "steps", "repeats"):
        if values[name].value < 1:
            raise ConfigurationError(
                f"{name} must be 1 or more. Received: "
                f"{name}={values[name].value}."
            )
    cores = len(os.sched_getaffinity(0))
    if values.kind == "processes" and max(devices) > cores:
        raise ConfigurationError(
            f"One process to a core: there are {cores} here. Received: "
            f"devices={values.devices}. Use fewer, or --kind=virtual."
        )
    return sorted(devices)


def _scaling(values: flags.FlagValues) -> str:
    return "strong" if values.strong else "weak"


def _in_this_process(
    values: flags.FlagValues, devices: list[int]
) -> ScalingTable:
    quiet_import.import_tensorflow()
    import tensorflow as tf

    from mgpu_tf.studies import benchmark

    kind = values.kind
    if kind == "auto":
        gpus = tf.config.list_physical_devices("GPU")
        kind = "gpu" if gpus else "virtual"
    return benchmark.measure(_workload(values), devices, kind)


def _workload(values: flags.FlagValues) -> benchmark.Workload:
    from mgpu_tf.studies import benchmark

    return benchmark.Workload(
        model=values.model,
        batch_size=values.batch_size,
        scaling=_scaling(values),
        steps=values.steps,
        repeats=values.repeats,
    )


def _of_processes(values: flags.FlagValues, devices: list[int]) -> ScalingTable:
    """Measures each number of processes as a cluster of its own."""
    points: list[ScalingPoint] = []
    for count in devices:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "mgpu_tf",
                "benchmark",
                "--kind=processes",
                f"--devices={count}",
                f"--model={values.model}",
                f"--{_scaling(values)}",
                f"--batch_size={values.batch_size}",
                f"--steps={values.steps}",
                f"--repeats={values.repeats}",
                f"--output_dir={folder}",
            ]
            code = local.launch(command, count, isolate=values.isolate)
            if code:
                sys.exit(code)
            points += ScalingTable.read(os.path.join(folder, JSON)).points
    return ScalingTable(values.model, "processes", _scaling(values), points)


def _as_worker(values: flags.FlagValues, cluster: ClusterConfig) -> int:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[cluster.worker_index % len(cores)]})
    quiet_import.import_tensorflow()
    from mgpu_tf.studies import benchmark

    point = benchmark.measure_cluster(_workload(values))
    table = ScalingTable(values.model, "processes", _scaling(values), [point])
    if cluster.is_chief and values.output_dir is not None:
        table.write(os.path.join(values.output_dir, JSON))
    return 0
