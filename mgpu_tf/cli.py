"""The command `mgpu-tf`.

A mistake in a flag is told in one line, with status 2, before TensorFlow,
Keras or NumPy is imported; `--help` needs none of them either.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf import quiet
from mgpu_tf._version import __version__
from mgpu_tf.cluster import ClusterConfig
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.launch import local

DIFFERENT = 1
USAGE_ERROR = 2

_TRAIN = """mgpu-tf train [--flags]

Trains and tests a model. With --num_workers above 1 and no TF_CONFIG, the
worker processes are started on this machine.

Example:
  mgpu-tf train --strategy=mirrored --num_virtual_devices=4 --model=cnn
"""

_LAUNCH = """mgpu-tf launch --num_workers=N [--flags] -- COMMAND [ARGUMENTS]

Starts N processes of a command on this machine as a cluster: each gets its
TF_CONFIG. Ends all when one fails and returns its exit code.

Example:
  mgpu-tf launch --num_workers=2 -- python experiments/train.py --epochs=5
"""

_PARITY = """mgpu-tf parity [--flags]

Trains a model for a few steps on one device and on strategies, compares all
weights after every step, and names the first that differs. Exits with status
1 where one differs by more than a multiple of the noise of one device.

Example:
  mgpu-tf parity --model=my_package.models:build --data=my_package.data:load
  mgpu-tf parity --model=cnn --num_workers=2
"""

_TOP = """mgpu-tf COMMAND [--flags]

Distributed training for Keras 3 on TensorFlow.

Commands:
  train     train and test a model on a strategy
  launch    start a script as a cluster of local processes
  parity    compare a model on strategies with one device
  version   print the version

mgpu-tf COMMAND --help lists a command's flags.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments without the program; `sys.argv[1:]` by default.

    Returns:
        The exit status: 0, 2 for a mistake of the user, or what the
        processes of a cluster returned.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("help", "--help", "-h", "-help"):
        print(_TOP, end="")
        return 0 if arguments else USAGE_ERROR
    if arguments[0] in ("version", "--version"):
        print(f"mgpu_tf {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    try:
        if name not in _COMMANDS:
            raise ConfigurationError(
                unknown_name("command", name, [*_COMMANDS, "version"])
            )
        return _COMMANDS[name](rest)
    except (ConfigurationError, flags.Error) as error:
        message = " ".join(str(error).split())
        print(f"mgpu-tf: {message}", file=sys.stderr)
        return USAGE_ERROR


def _train(arguments: list[str]) -> int:
    values = flags.FlagValues()
    run_flags.define(values)
    rest = _parse(values, arguments, _TRAIN)
    if rest is None:
        return 0
    if rest:
        raise ConfigurationError(
            f"train takes flags only. Received: {rest[0]!r}. Write "
            "--name=value."
        )
    config = run_flags.config(values)
    cluster = ClusterConfig.from_environment()
    if config.num_workers > 1 and cluster is None:
        command = [sys.executable, "-m", "mgpu_tf", "train", *arguments]
        return local.launch(
            command, config.num_workers, chief_has_terminal=True
        )
    return _run(config)


def _run(config: RunConfig) -> int:
    quiet.import_tensorflow()
    logging.basicConfig(format="mgpu-tf: %(message)s")
    logging.getLogger("mgpu_tf").setLevel(logging.INFO)
    from mgpu_tf import display
    from mgpu_tf.job import run

    report = run(config)
    cluster = ClusterConfig.from_environment()
    if cluster is None or cluster.is_chief:
        display.show(report)
    return 0


def _launch(arguments: list[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "num_workers", None, "Processes to start.", flag_values=values
    )
    flags.DEFINE_float(
        "startup_seconds",
        local.STARTUP_SECONDS,
        "How long a process may take until it serves its port; 0 for no limit.",
        flag_values=values,
    )
    own, command = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, command = arguments[:split], arguments[split + 1 :]
    rest = _parse(values, own, _LAUNCH)
    if rest is None:
        return 0
    if rest or not command:
        raise ConfigurationError(
            "launch takes flags, then -- and the command. Received: "
            f"{' '.join(arguments) or 'nothing'!r}. Write mgpu-tf launch "
            "--num_workers=2 -- python script.py."
        )
    if values.num_workers is None:
        raise ConfigurationError(
            "launch needs the number of processes. Received: no "
            "--num_workers. Write --num_workers=2."
        )
    if ClusterConfig.from_environment() is not None:
        raise ConfigurationError(
            "launch makes the cluster itself. Received: TF_CONFIG is set. "
            "Unset it, or run the command without launch."
        )
    return local.launch(
        command, values.num_workers, startup_seconds=values.startup_seconds
    )


def _parity(arguments: list[str]) -> int:
    values = flags.FlagValues()
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    for define, name, default, meaning in (
        (text, "model", "mlp", "mlp, cnn, or package.module:function."),
        (
            text,
            "data",
            "digits",
            "digits, or package.module:function, which "
            "returns (x, y) or a batched tf.data.Dataset.",
        ),
        (text, "strategies", "mirrored", "Names, with commas between."),
        (
            number,
            "num_workers",
            1,
            "Worker processes; above 1 the strategy is multi_worker_mirrored.",
        ),
        (
            number,
            "num_virtual_devices",
            2,
            "Replicas of a process where there are no GPUs.",
        ),
        (number, "global_batch_size", 64, "Examples in a step."),
        (number, "steps", 10, "Steps to compare."),
        (number, "seed", 0, "Decides initial weights."),
    ):
        define(name, default, meaning, flag_values=values)
    rest = _parse(values, arguments, _PARITY)
    if rest is None:
        return 0
    if rest:
        raise ConfigurationError(
            f"parity takes flags only. Received: {rest[0]!r}. Write "
            "--name=value."
        )
    cluster = ClusterConfig.from_environment()
    if values.num_workers > 1 and cluster is None:
        command = [sys.executable, "-m", "mgpu_tf", "parity", *arguments]
        return local.launch(
            command, values.num_workers, chief_has_terminal=True
        )
    quiet.import_tensorflow()
    from mgpu_tf.job import compare

    report = compare(
        values.model,
        values.data,
        values.strategies.split(",")
        if cluster is None
        else ["multi_worker_mirrored"],
        batch_size=values.global_batch_size,
        steps=values.steps,
        num_virtual_devices=1 if cluster else values.num_virtual_devices,
        seed=values.seed,
    )
    if cluster is None or cluster.is_chief:
        print(report)
    return 0 if report.same else DIFFERENT


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "launch": _launch,
    "parity": _parity,
}


def _parse(
    values: flags.FlagValues, arguments: list[str], usage: str
) -> list[str] | None:
    """Parses flags; prints the help and returns None where it is wanted.

    Returns:
        What is no flag.
    """
    if any(a in ("--help", "-h", "-help") for a in arguments):
        print(f"{usage}\n{_flags_help(values)}")
        return None
    return values(["mgpu-tf", *arguments])[1:]


def _flags_help(values: flags.FlagValues) -> str:
    module = next(iter(values.flags_by_module_dict()))
    text = values.get_help(include_special_flags=False)
    return text.replace(f"{module}:\n", "Flags:\n")
