"""The command `mgpu-tf ray`: a script as a cluster on the nodes of Ray."""

from __future__ import annotations

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf.commands.arguments import (
    RESTART_NEEDS,
    Call,
    check_evaluator,
    define_supervision,
    supervision,
)
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import ray
from mgpu_tf.launch.job import STARTUP_SECONDS
from mgpu_tf.options import WatchOptions

USAGE = """mgpu-tf ray --num_workers=N [--flags] -- COMMAND [ARGUMENTS]

Starts N processes of a command on the nodes of a Ray cluster, as the workers of
a cluster of TensorFlow. It runs on a node of the Ray cluster, and stays until
the job has ended. Ctrl-C ends all processes.

When a process or a node fails, all processes are ended and started again on the
nodes that are left, at most --max_restarts times. With --num_ps, only the
process that failed is started again, unless its node is lost. With
--max_workers, the number of processes follows the room that there is.

Example:
  mgpu-tf ray --num_workers=4 -- python train.py --checkpoint_dir=/shared/run
  mgpu-tf ray --num_workers=8 --gpus_per_worker=1 --num_ps=2 -- python train.py
"""


NEEDS = RESTART_NEEDS


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    number, text = flags.DEFINE_integer, flags.DEFINE_string
    for define_flag, name, default, meaning in (
        (number, "num_workers", None, "Number of worker processes to start."),
        (
            number,
            "num_ps",
            0,
            "Number of parameter servers to start. If it is above 0, a "
            "coordinator is started too.",
        ),
        (
            flags.DEFINE_boolean,
            "evaluator",
            False,
            "Start one more process, which evaluates the checkpoints.",
        ),
        (
            text,
            "address",
            None,
            "The address of the Ray cluster, HOST:PORT. Default: the cluster "
            "of this node, or RAY_ADDRESS.",
        ),
        (
            text,
            "node_ip_address",
            None,
            "The address of this node in the Ray cluster. Default: Ray finds "
            "it.",
        ),
        (
            flags.DEFINE_float,
            "cpus_per_worker",
            1.0,
            "CPUs that Ray reserves for each worker and each parameter server.",
        ),
        (
            flags.DEFINE_float,
            "gpus_per_worker",
            0.0,
            "GPUs that Ray reserves for each worker. A worker sees no others.",
        ),
        (
            flags.DEFINE_float,
            "startup_seconds",
            STARTUP_SECONDS,
            "Seconds that Ray may take to place the job, and then a process "
            "to open its port. 0: no limit.",
        ),
    ):
        define_flag(name, default, meaning, flag_values=values)
    flags.DEFINE_enum(
        "placement",
        "PACK",
        list(ray.PLACEMENTS),
        "How tasks lie on nodes. PACK: on few nodes. STRICT_SPREAD: each on a "
        "node of its own.",
        flag_values=values,
    )
    run_flags.define(values, WatchOptions)
    define_supervision(values)


def run(call: Call) -> int:
    """Starts the processes, and returns the status of the job."""
    values = call.values
    command = call.own_command("--num_workers=4")
    if values.num_workers is None:
        raise ConfigurationError(
            "ray needs the number of processes. Received: no --num_workers. "
            "Write --num_workers=4."
        )
    check_evaluator(values)
    return ray.run(
        command,
        values.num_workers,
        num_ps=values.num_ps,
        evaluator=values.evaluator,
        address=values.address,
        node_ip_address=values.node_ip_address,
        placement=values.placement,
        cpus_per_worker=values.cpus_per_worker,
        gpus_per_worker=values.gpus_per_worker,
        startup_seconds=values.startup_seconds,
        **supervision(values, asynchronous=values.num_ps > 0),
    )
