"""Starting a script as a cluster of processes of this machine."""

from __future__ import annotations

import os

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf.cluster.config import TF_CONFIG, ClusterConfig
from mgpu_tf.cluster.environments.place import DEFAULT_PORT
from mgpu_tf.commands.arguments import (
    RESTART_NEEDS,
    Call,
    check_evaluator,
    define_isolation,
    define_supervision,
    supervision,
)
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import names_of
from mgpu_tf.launch import hosts, isolation, local, ssh
from mgpu_tf.launch.job import STARTUP_SECONDS, LaunchJob
from mgpu_tf.options import WatchOptions

USAGE = """mgpu-tf launch --num_workers=N [--flags] -- COMMAND [ARGUMENTS]
mgpu-tf launch --hosts=A,B --ssh [--flags] -- COMMAND [ARGUMENTS]
mgpu-tf launch --hosts=A,B --print [--flags] -- COMMAND [ARGUMENTS]

Starts N processes of a command on this machine, as the workers of a cluster.
Each process gets its own TF_CONFIG. With --hosts and --ssh, it starts them on
other machines, in the folder of the same name there.

When a process fails, all processes are ended and started again, at most
--max_restarts times. With --num_ps, only the process that failed is started
again. When no restart is left, the exit code of the failed process is returned:
128 + the number of the signal if a signal ended it.

SIGTERM is passed on to all processes. If they saved their state, the exit code
is 75.

With --hosts and --print, nothing is started. For each task, the command is
printed that starts it on its machine.

Example:
  mgpu-tf launch --num_workers=2 -- python experiments/train.py --epochs=5
  mgpu-tf launch --num_workers=3 --num_ps=2 -- python experiments/train.py
  mgpu-tf launch --num_workers=3 --num_ps=2 --evaluator -- python script.py
  mgpu-tf launch --hosts=host0,host1 --ssh -- python script.py
  mgpu-tf launch --hosts=host0,host1 --print -- python script.py
"""


NEEDS = {
    "ssh_command": ("ssh",),
    "port": ("hosts",),
    **RESTART_NEEDS,
    **dict.fromkeys(
        (
            *("startup_seconds", "max_restarts", "min_workers", "spares"),
            "max_workers",
            *("grace_seconds", "log_dir", "isolate"),
            *names_of(WatchOptions),
        ),
        ("not print",),
    ),
}


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_integer(
        "num_workers",
        None,
        "Number of worker processes to start. Default with --hosts: one on "
        "each machine.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_ps",
        0,
        "Number of parameter servers to start. If it is above 0, a "
        "coordinator is started too.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "evaluator",
        False,
        "Start one more process, which evaluates the checkpoints.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "startup_seconds",
        STARTUP_SECONDS,
        "Seconds that a process may take to open its port. 0: no limit.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "hosts",
        None,
        "Other machines to run on, separated by commas. With --ssh or --print.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "ssh",
        False,
        "With --hosts: start the processes with ssh, and supervise them.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "ssh_command",
        "ssh",
        "With --ssh: the program, with options of yours.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "print",
        False,
        "With --hosts: print the command for each task.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "port",
        DEFAULT_PORT,
        "With --hosts: the first port on each machine.",
        flag_values=values,
    )
    run_flags.define(values, WatchOptions)
    define_supervision(values)
    define_isolation(values)


def run(call: Call) -> int:
    """Starts the processes, and returns the status of the job."""
    values = call.values
    command = call.own_command("--num_workers=2")
    if values.hosts is not None or values.ssh or values["print"].value:
        return _elsewhere(values, command)
    if values.num_workers is None:
        raise ConfigurationError(
            "launch needs the number of processes. Received: no "
            "--num_workers. Write --num_workers=2."
        )
    check_evaluator(values)
    cluster = ClusterConfig.from_environment()
    if cluster is not None:
        raise ConfigurationError(
            f"launch makes the cluster itself. Received: {cluster.source} is "
            "set. Unset it, or run the command without launch."
            if cluster.source == TF_CONFIG
            else "launch makes the cluster itself. Received: "
            f"{cluster.source}, which has one. Run the command without launch."
        )
    return local.launch(
        command,
        values.num_workers,
        num_ps=values.num_ps,
        evaluator=values.evaluator,
        startup_seconds=values.startup_seconds,
        isolate=values.isolate,
        needs=isolation.outside(command, os.environ),
        **supervision(values, asynchronous=values.num_ps > 0),
    )


def _elsewhere(values: flags.FlagValues, command: list[str]) -> int:
    """Starts the tasks on other machines, or prints how."""
    check_evaluator(values)
    prints = values["print"].value
    if values.hosts is None or prints == values.ssh:
        raise ConfigurationError(
            "--hosts goes with one of --ssh, which starts the processes, and "
            "--print, which prints their commands. Received: "
            f"{_given(values)}. Write --hosts=host0,host1 --ssh."
        )
    if values.isolate == "on":
        raise ConfigurationError(
            "isolate=on goes with processes of this machine. Received: "
            f"--isolate=on with --hosts={values.hosts}. Leave it out, and keep "
            "the ports of the hosts behind a firewall."
        )
    names = values.hosts.split(",")
    workers = len(names) if values.num_workers is None else values.num_workers
    if values.ssh:
        return ssh.launch(
            command,
            names,
            num_workers=workers,
            port=values.port,
            ssh_command=values.ssh_command,
            num_ps=values.num_ps,
            evaluator=values.evaluator,
            startup_seconds=values.startup_seconds,
            **supervision(values, asynchronous=values.num_ps > 0),
        )
    job = LaunchJob(
        tuple(command),
        workers,
        num_ps=values.num_ps,
        evaluator=values.evaluator,
    )
    for host, task, line in hosts.commands(job, names, values.port):
        print(f"# {task}, on {host}\n{line}")
    return 0


def _given(values: flags.FlagValues) -> str:
    """Returns which of the three flags were given."""
    given = [f"--hosts={values.hosts}"] if values.hosts is not None else []
    given += [f"--{name}" for name in ("ssh", "print") if values[name].value]
    return " ".join(given)
