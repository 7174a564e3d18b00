"""The command line `mgpu-tf`: runs a command, reports mistakes in one line.

A mistake in a flag ends the program with status 2, before TensorFlow, Keras or
NumPy is imported. `--help` imports none of them either.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from absl import flags

from mgpu_tf._version import __version__
from mgpu_tf.commands import (
    benchmark,
    calibrate,
    checkpoints,
    completion,
    doctor,
    help,
    kubernetes,
    launch,
    parity,
    plan,
    ray,
    replay,
    report,
    slurm,
    status,
    test,
    trace,
    train,
)
from mgpu_tf.commands.arguments import Call, check_flags
from mgpu_tf.errors import (
    CheckpointError,
    ConfigurationError,
    DivergedError,
    OutOfMemoryError,
    WorkerError,
    hint,
    unknown_name,
)

USAGE_ERROR = 2
# As a shell says it of a program that a signal has ended.
INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE

_LONGEST_LINE = 2000
# As absl says that a flag cannot have a value.
_ILLEGAL = re.compile(r"flag --(?P<name>\w+)=(?P<value>.*?): ", re.S)

COMMANDS: dict[str, ModuleType] = {
    "test": test,
    "train": train,
    "launch": launch,
    "parity": parity,
    "benchmark": benchmark,
    "plan": plan,
    "calibrate": calibrate,
    "trace": trace,
    "report": report,
    "status": status,
    "checkpoints": checkpoints,
    "replay": replay,
    "doctor": doctor,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "ray": ray,
    "completion": completion,
}

_TOP = """mgpu-tf COMMAND [--flags]

Distributed training for Keras 3 on TensorFlow.

Commands:
  test         try this installation: replicas, processes, a kill, a resume
  train        train and test a model on a strategy
  launch       start a script as a cluster of local processes
  parity       compare a model on strategies with one device
  benchmark    measure throughput on 1, 2, 4 and 8 devices
  plan         estimate the memory, speed and price of a training run
  calibrate    measure this machine, for plans
  trace        show what is where in each stage of a training run
  status       show the tasks of a running job
  report       write the page of a run, or of two runs side by side
  checkpoints  list, verify and prune the checkpoints of a run
  replay       repeat a step of a run: is data, model or hardware to blame?
  doctor       check this machine and its cluster before a run
  slurm        print or submit a batch script for Slurm
  kubernetes   print the manifests of a job for Kubernetes
  ray          start a script as a cluster on the nodes of Ray
  completion   print what makes a shell complete commands and flags
  version      print the version

mgpu-tf COMMAND --help lists the flags of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments without the program; `sys.argv[1:]` by default.

    Returns:
        The exit status: 0, 2 for a mistake of the user, 130 after Ctrl-C,
        141 when nobody reads the output, or the status that the command
        returns, such as that of the processes of a cluster.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # What was not written yet is not tried again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return NO_READER
        where = f": {error.filename}" if error.filename else ""
        print(f"mgpu-tf: No space is left to write{where}.", file=sys.stderr)
        return 1
    return code


def _main(arguments: list[str]) -> int:
    """Runs a command; reports a mistake in one line."""
    if not arguments or arguments[0] in ("help", "--help", "-h", "-help"):
        print(_TOP, end="")
        return 0 if arguments else USAGE_ERROR
    if arguments[0] in ("version", "--version"):
        print(f"mgpu_tf {__version__}")
        return 0
    try:
        return _run(arguments[0], arguments[1:])
    except (ConfigurationError, flags.Error) as error:
        print(f"mgpu-tf: {_line(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except (
        CheckpointError,
        DivergedError,
        OutOfMemoryError,
        WorkerError,
    ) as error:
        message = " ".join(str(error).split())
        print(f"mgpu-tf: {message}", file=sys.stderr)
        return 1


def _line(message: str) -> str:
    """Returns a message as one line that can be read."""
    line = " ".join(message.split())
    cut = len(line) - _LONGEST_LINE
    if cut <= 0:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} [... {cut} characters ...] {line[-half:]}"


def _of_value(message: str, values: flags.FlagValues) -> str:
    """Returns what a message of absl on the value of a flag says, as ours."""
    found = _ILLEGAL.match(message)
    if found is None or found["name"] not in values:
        return message
    name, received = found["name"], found["value"]
    parser = values[name].parser
    if isinstance(parser, flags.EnumParser):
        return unknown_name(name, received, parser.enum_values)
    kind = {"int": "a whole number", "float": "a number"}.get(
        parser.flag_type()
    )
    try:
        float(received)  # It is out of range then, and absl says so.
    except ValueError:
        if kind is not None:
            line = f"{name} must be {kind}. Received: {name}={received!r}."
            if name == "devices" and "," in received:
                line += f" To choose GPUs, set CUDA_VISIBLE_DEVICES={received}."
            return line
    return message


def _run(name: str, given: list[str]) -> int:
    """Parses the flags of a command and runs it; prints its help if asked."""
    if name not in COMMANDS:
        raise ConfigurationError(
            unknown_name("command", name, [*COMMANDS, "version"])
        )
    command = COMMANDS[name]
    values = flags.FlagValues()
    command.define(values)
    own, after = given, None
    if "--" in given:
        split = given.index("--")
        own, after = given[:split], given[split + 1 :]
    if any(argument in ("--help", "-h", "-help") for argument in own):
        print(f"{command.USAGE}\n{help.text(values)}")
        return 0
    try:
        rest = values(["mgpu-tf", *own])[1:]
    except flags.UnrecognizedFlagError as error:
        meant = hint(error.flagname, list(values), "--")
        dashes = "-" if f"-{error.flagname}" in own else "--"
        if not meant.startswith("Did") and "-- COMMAND" in command.USAGE:
            meant += " Flags of the command go after --."
        raise ConfigurationError(
            f"Unknown flag of {name}. Received: "
            f"'{dashes}{error.flagname}'. {meant} "
            f"mgpu-tf {name} --help lists them."
        ) from None
    except flags.IllegalFlagValueError as error:
        raise ConfigurationError(_of_value(str(error), values)) from None
    except flags.Error:
        raise
    except ValueError as error:  # As of --noevaluator=1.
        raise ConfigurationError(
            f"{error}. Write --name or --noname, or --name=value."
        ) from None
    check_flags(values, getattr(command, "NEEDS", {}))
    return command.run(Call(name, given, values, rest, after, COMMANDS))
