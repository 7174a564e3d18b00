"""The command `mgpu-tf replay`: repeats a step and says what is to blame."""

from __future__ import annotations

import os

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.job import REPLAY

USAGE = """mgpu-tf replay --step=N -- COMMAND

Starts the command of a run that has saved checkpoints. Its fit() goes to the
last checkpoint before step N, and repeats the steps up to N twice. It writes
nothing. Then it prints what is to blame:

  data      the batch has a number that is not finite: the input and the row
  model     the batch is finite, the loss or a weight is not: the first layer
  hardware  the repeats differ, or differ from the losses that a run with
            --on_nan=stop or --on_nan=restore has recorded
  no fault  the repeats have the same bits, all of them finite

Exits with status 1 if something is to blame.

Example:
  mgpu-tf replay --step=100 -- mgpu-tf train --checkpoint_dir=run/checkpoints
  mgpu-tf replay --step=120 -- python train.py
"""


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_integer(
        "step",
        None,
        "The step to repeat, from 1.",
        lower_bound=1,
        flag_values=values,
    )


def run(call: Call) -> int:
    """Becomes the command, with the step in its environment."""
    command = call.own_command("--step=N")
    if call.values.step is None:
        raise ConfigurationError(
            "replay needs the step to repeat. Received: no --step. Write "
            "mgpu-tf replay --step=N -- COMMAND."
        )
    told = {**os.environ, REPLAY: str(call.values.step)}
    try:
        os.execvpe(command[0], command, told)
    except OSError as error:
        raise ConfigurationError(
            "The command must be a program that can be started. Received: "
            f"{command[0]!r} ({error.strerror})."
        ) from None
