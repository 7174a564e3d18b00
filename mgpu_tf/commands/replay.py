"""The command `mgpu-tf replay`: repeats a step and says what is to blame."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.job import REPLAY, VERDICT

USAGE = """mgpu-tf replay --step=N -- COMMAND

Starts the command of a run that has saved checkpoints. Its fit() goes to the
last checkpoint before step N, and repeats the steps up to N twice. It writes
nothing. Then it prints what is to blame:

  data      the batch has a number that is not finite: the input and the row
  model     the batch is finite, the loss or a weight is not: the first layer
  hardware  the repeats differ, or differ from the losses that a run with
            --on_nan=stop or --on_nan=restore has recorded
  no fault  the repeats have the same bits, all of them finite

Exits with status 1 if something is to blame, and with 2 if the command ends
without a verdict.

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
    """Runs the command, with the step in its environment.

    Returns:
        The status of the command.

    Raises:
        ConfigurationError: It cannot be started, or ended without a verdict.
    """
    command = call.own_command("--step=N")
    if call.values.step is None:
        raise ConfigurationError(
            "replay needs the step to repeat. Received: no --step. Write "
            "mgpu-tf replay --step=N -- COMMAND."
        )
    with tempfile.TemporaryDirectory(prefix="mgpu_tf-") as folder:
        verdict = os.path.join(folder, "verdict")
        step = str(call.values.step)
        status = _status(
            command, {**os.environ, REPLAY: step, VERDICT: verdict}
        )
        if status == 0 and not os.path.exists(verdict):
            raise ConfigurationError(
                "The command must call fit() with the checkpoint_dir of a "
                f"run. Received: {shlex.join(command)!r}, which ended without "
                "a verdict. Give the command that has trained."
            )
    return status


def _status(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command; SIGTERM goes to it."""
    try:
        process = subprocess.Popen(command, env=environment)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            "The command must be a program that can be started. Received: "
            f"{command[0]!r} ({reason})."
        ) from None
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            # Ctrl-C goes to both, and the command decides.
            with contextlib.suppress(KeyboardInterrupt):
                code = process.wait()
                return 128 - code if code < 0 else code
    finally:
        signal.signal(signal.SIGTERM, before)
