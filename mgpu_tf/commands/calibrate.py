"""The command `mgpu-tf calibrate`: measures what plans are made of."""

from __future__ import annotations

from absl import flags

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.machine import calibration
from mgpu_tf.runtime import quiet_import

USAGE = """mgpu-tf calibrate [--flags]

Measures the device of this machine in a few seconds: products of matrices,
memory bandwidth, what it costs to start an operation. On every worker of a
cluster, the link between them too. The figures go to a file, which mgpu-tf plan
and create_strategy("auto", for_model=...) read.

Run it while nothing else runs on the machine.

Example:
  mgpu-tf calibrate
  mgpu-tf calibrate --output=machine.json
"""


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string(
        "output",
        None,
        "The file. Default: MGPU_TF_CALIBRATION, or calibration.json in the "
        "cache folder of the user.",
        flag_values=values,
    )


def run(call: Call) -> int:
    """Runs the command with parsed flags.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: The file cannot be written, or the cluster has
            parameter servers.
    """
    call.takes_flags_only()
    path = call.values.output or calibration.default_path()
    cluster = ClusterConfig.from_environment()
    if cluster is not None and cluster.ps:
        raise ConfigurationError(
            "calibrate measures the links between workers. Received: "
            f"{cluster.source} with parameter servers. Run it on a cluster of "
            "workers."
        )
    quiet_import.import_tensorflow()
    from mgpu_tf.planner.machine import probe
    from mgpu_tf.strategies.registry import create_strategy

    strategy = None
    if cluster is not None and cluster.num_workers > 1:
        strategy = create_strategy("multi_worker_mirrored")
    found = probe.measure(strategy)
    if cluster is not None and not cluster.is_chief:
        return 0
    try:
        found.write(path)
    except OSError as error:
        raise ConfigurationError(
            "output must be a file that can be written. Received: "
            f"output={path!r} ({error.strerror})."
        ) from None
    print(found.text())
    print(f"written to {path}")
    return 0
