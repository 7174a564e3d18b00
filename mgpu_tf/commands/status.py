"""The command `mgpu-tf status`: the tasks of a job that runs."""

from __future__ import annotations

import time

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import status

USAGE = """mgpu-tf status LOG_DIR [--every=SECONDS]

Shows each task of a job on this machine: its step, its steps per second, what
it does and for how long, and how often tasks were started again. LOG_DIR is the
--log_dir of the job. Nothing is asked of the tasks.

Example:
  mgpu-tf train --num_workers=2 --log_dir=runs/logs
  mgpu-tf status runs/logs
  mgpu-tf status runs/logs --every=5
"""


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_float(
        "every",
        None,
        "Show it again each N seconds, until the job has ended.",
        lower_bound=0.1,
        flag_values=values,
    )


def run(call: Call) -> int:
    """Prints the status; returns 0."""
    folders = [*call.rest, *(call.command or [])]
    if len(folders) != 1:
        raise ConfigurationError(
            "status takes the log_dir of a job. Received: "
            f"{' '.join(folders) or 'no folder'!r}. Write mgpu-tf status "
            "runs/logs."
        )
    while True:
        print(status.text(folders[0]), flush=True)
        every = call.values.every
        if every is None or not status.read(folders[0]).is_running:
            return 0
        time.sleep(every)
