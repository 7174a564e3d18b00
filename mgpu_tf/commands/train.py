"""The command `mgpu-tf train`: trains and tests a model on a strategy."""

from __future__ import annotations

import logging
import os

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.environments import ask_for_ps
from mgpu_tf.commands import saved_config
from mgpu_tf.commands.arguments import (
    RESTART_NEEDS,
    STARTED,
    Call,
    define_isolation,
    define_supervision,
    supervision,
)
from mgpu_tf.config import RunConfig
from mgpu_tf.launch import noise
from mgpu_tf.launch.job import RESTARTS
from mgpu_tf.runtime import quiet_import

_log = logging.getLogger("mgpu_tf")

USAGE = """mgpu-tf train [--flags]

Trains and tests a model.

With --num_workers above 1, the worker processes are started on this machine.
With --num_ps, parameter servers and a coordinator are started too. Nothing is
started if TF_CONFIG is set, or if Slurm, Kubernetes or SkyPilot has started the
processes: this process is one task of that cluster.

With --max_restarts, processes are started again after a failure, and resume
from --checkpoint_dir.

Example:
  mgpu-tf train --strategy=mirrored --num_virtual_devices=4 --model=cnn
  mgpu-tf train --strategy=parameter_server --num_workers=3 --num_ps=2
  mgpu-tf train --output_dir=runs/a --report=html
  mgpu-tf train --config=runs/a/report.json --epochs=10
"""


NEEDS = {
    **RESTART_NEEDS,
    **dict.fromkeys(
        ("log_dir", "grace_seconds", "isolate"),
        (*STARTED, "max_restarts", "min_workers", "max_workers"),
    ),
}
# What a scheduler does for the tasks that it has started.
_OF_SUPERVISOR = (
    *("max_restarts", "min_workers", "max_workers", "spares"),
    "backoff_seconds",
    *("grace_seconds", "log_dir", "isolate"),
)


def define(values: flags.FlagValues) -> None:
    """Defines the flags of a run and of its supervision."""
    run_flags.define(values)
    saved_config.define(values)
    define_supervision(values)
    define_isolation(values)


def run(call: Call) -> int:
    """Trains in this process or in new processes; returns the status."""
    call.takes_flags_only()
    values = call.values
    saved_config.apply(values)
    config = run_flags.config(values)
    asynchronous = config.num_ps > 0 or config.strategy == "parameter_server"
    ask_for_ps(config.num_ps)
    _show_log()
    # What a scheduler has made of this process, each says by itself.
    cluster = ClusterConfig.from_environment()
    if cluster is not None and not cluster.is_chief:
        _log.addFilter(_for_the_log_file)
    options = supervision(values, asynchronous=asynchronous)
    supervised = RESTARTS in os.environ
    again = options["policy"].restarts and not supervised
    if cluster is None and (config.num_workers > 1 or asynchronous or again):
        return call.as_local_cluster(
            config.num_workers,
            num_ps=max(1, config.num_ps) if asynchronous else 0,
            alone=config.num_workers == 1 and not asynchronous,
            **options,
        )
    idle = [name for name in _OF_SUPERVISOR if values[name].present]
    if cluster is not None and idle and not supervised:
        _log.warning(
            "%s has started its tasks and supervises them; %s of this command "
            "do nothing here",
            cluster.source,
            ", ".join(idle),
        )
    return _run(config)


def _show_log() -> None:
    """Prints the log of this package; other packages keep their own names."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mgpu-tf: %(message)s"))
        _log.addHandler(handler)
        # Another package may give the root a handler: each line once.
        _log.propagate = False
    _log.setLevel(logging.INFO)


def _for_the_log_file(record: logging.LogRecord) -> bool:
    """Leaves out what the chief says for all; the log of a task has it."""
    if record.levelno < logging.WARNING:
        noise.print_to_log(f"mgpu-tf: {record.getMessage()}")
        return False
    return True


def _run(config: RunConfig) -> int:
    quiet_import.import_tensorflow()
    from mgpu_tf.job import run
    from mgpu_tf.reports import terminal

    report = run(config)
    cluster = ClusterConfig.from_environment()
    if cluster is None or cluster.is_chief:
        terminal.show(report)
    return 0
