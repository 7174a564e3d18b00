"""The command `mgpu-tf slurm`: a batch script of Slurm for a script."""

from __future__ import annotations

import subprocess

from absl import flags

from mgpu_tf.commands.arguments import Call, check_evaluator
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.slurm import SlurmJob, batch_script

USAGE = """mgpu-tf slurm --nodes=N [--flags] -- COMMAND [ARGUMENTS]

Prints a batch script for Slurm, or submits it with --submit. Each node gets one
worker, which uses all GPUs of the node.

Before the time limit, the tasks get a signal to save and end, and the job is
queued again. It resumes if the command has a checkpoint folder. Slurm also
queues it again after a preemption and after the failure of a node.

Example:
  mgpu-tf slurm --nodes=4 --gpus_per_node=8 -- python train.py > train.sbatch
  mgpu-tf slurm --nodes=4 --min_nodes=2 --grow_minutes=10 -- python train.py
  mgpu-tf slurm --nodes=4 --num_ps=2 --submit -- python train.py --epochs=5
"""


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    for define_flag, name, default, meaning in (
        (number, "nodes", None, "Number of nodes. Each gets one worker."),
        (
            number,
            "min_nodes",
            None,
            "Start with this number of nodes or more, up to --nodes, and "
            "again after the failure of a node.",
        ),
        (
            number,
            "grow_minutes",
            0,
            "With fewer nodes than --nodes, look every N minutes for idle "
            "ones. If there are any, save and queue the job again. 0: never.",
        ),
        (number, "gpus_per_node", 0, "Number of GPUs of each node."),
        (
            number,
            "num_ps",
            0,
            "Number of parameter servers. If it is above 0, there is a "
            "coordinator too. They run beside the workers.",
        ),
        (
            flags.DEFINE_boolean,
            "evaluator",
            False,
            "One more task evaluates the checkpoints.",
        ),
        (text, "name", "mgpu-tf", "The name of the job."),
        (text, "log_dir", "logs", "The folder for a log file of each task."),
        (
            number,
            "signal_seconds",
            120,
            "Seconds before the end of the job at which tasks get a signal to "
            "save.",
        ),
        (
            number,
            "max_restarts",
            0,
            "Queue the job again after a failure, at most N times. Restarts "
            "before the time limit and after preemptions count too.",
        ),
        (
            text,
            "container_image",
            None,
            "The image that tasks run in. Slurm needs the plugin pyxis.",
        ),
        (text, "time", None, "The time limit, such as 2-12:00:00."),
        (text, "partition", None, "The partition."),
        (text, "account", None, "The account."),
        (
            flags.DEFINE_multi_string,
            "sbatch_option",
            [],
            "One more option of sbatch, such as qos=high. Repeat it for more.",
        ),
        (
            flags.DEFINE_boolean,
            "submit",
            False,
            "Submit the script with sbatch.",
        ),
    ):
        define_flag(name, default, meaning, flag_values=values)


def run(call: Call) -> int:
    """Prints or submits the script; returns the status."""
    values = call.values
    command = call.own_command("--nodes=4")
    if values.nodes is None:
        raise ConfigurationError(
            "slurm needs the number of nodes. Received: no --nodes. Write "
            "--nodes=4."
        )
    check_evaluator(values)
    text = batch_script(
        SlurmJob(
            tuple(command),
            values.nodes,
            min_nodes=values.min_nodes,
            grow_minutes=values.grow_minutes,
            gpus_per_node=values.gpus_per_node,
            num_ps=values.num_ps,
            evaluator=values.evaluator,
            name=values.name,
            log_dir=values.log_dir,
            signal_seconds=values.signal_seconds,
            max_restarts=values.max_restarts,
            container_image=values.container_image,
            time=values.time,
            partition=values.partition,
            account=values.account,
            options=tuple(values.sbatch_option),
        )
    )
    if not values.submit:
        print(text, end="")
        return 0
    try:
        done = subprocess.run(["sbatch"], input=text, text=True, check=False)
    except FileNotFoundError:
        raise ConfigurationError(
            "--submit needs the program sbatch. Received: a machine without "
            "it. Leave out --submit, and run sbatch where Slurm is."
        ) from None
    return done.returncode
