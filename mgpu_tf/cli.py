"""The command `mgpu-tf`.

A mistake in a flag is told in one line, with status 2, before TensorFlow,
Keras or NumPy is imported; `--help` needs none of them either.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf._version import __version__
from mgpu_tf.checkpoints import store
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.commands import benchmark, plan
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.launch import local
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.runtime import quiet_import

DIFFERENT = 1
BROKEN = 1
USAGE_ERROR = 2

_TRAIN = """mgpu-tf train [--flags]

Trains and tests a model. With --num_workers above 1 and no TF_CONFIG, the
worker processes are started on this machine; with --num_ps, parameter servers
and a coordinator as well. With --max_restarts they are started again when one
fails, and go on from --checkpoint_dir.

Example:
  mgpu-tf train --strategy=mirrored --num_virtual_devices=4 --model=cnn
  mgpu-tf train --strategy=parameter_server --num_workers=3 --num_ps=2
"""

_LAUNCH = """mgpu-tf launch --num_workers=N [--flags] -- COMMAND [ARGUMENTS]

Starts N processes of a command on this machine as a cluster: each gets its
TF_CONFIG. When one fails, all are ended and started again up to
--max_restarts times; then its exit code is returned, 128 + signal for a
signal. SIGTERM is passed on; 75 is returned where the processes could save.

With --num_ps a task that fails is started again alone.

Example:
  mgpu-tf launch --num_workers=2 -- python experiments/train.py --epochs=5
  mgpu-tf launch --num_workers=3 --num_ps=2 -- python experiments/train.py
  mgpu-tf launch --num_workers=3 --num_ps=2 --evaluator -- python script.py
"""

_PARITY = """mgpu-tf parity [--flags]

Trains a model for a few steps on one device and on strategies, compares all
weights after every step, and names the first that differs. Exits with status
1 where one differs by more than a multiple of the noise of one device.

Example:
  mgpu-tf parity --model=my_package.models:build --data=my_package.data:load
  mgpu-tf parity --model=cnn --num_workers=2
"""

_CHECKPOINTS = """mgpu-tf checkpoints FOLDER [--keep=N]

Lists the checkpoints in a folder and checks every byte of them; with --keep
deletes all but the newest first, which is not for a folder that a run is
writing to. Exits with status 1 where one is broken.

Example:
  mgpu-tf checkpoints runs/a/checkpoints --keep=2
"""

_TOP = """mgpu-tf COMMAND [--flags]

Distributed training for Keras 3 on TensorFlow.

Commands:
  train        train and test a model on a strategy
  launch       start a script as a cluster of local processes
  parity       compare a model on strategies with one device
  benchmark    throughput on 1, 2, 4, 8 devices
  plan         memory, hours and price of a training
  checkpoints  list, verify and prune the checkpoints of a run
  version      print the version

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
    _define_supervision(values)
    if not _parse_flags_only(values, arguments, "train", _TRAIN):
        return 0
    config = run_flags.config(values)
    cluster = ClusterConfig.from_environment()
    asynchronous = config.num_ps > 0 or config.strategy == "parameter_server"
    supervision = _supervision(values, asynchronous=asynchronous)
    supervised = local.RESTARTS in os.environ
    again = supervision["policy"].restarts and not supervised
    if cluster is None and (config.num_workers > 1 or asynchronous or again):
        return _as_local_cluster(
            "train",
            arguments,
            config.num_workers,
            num_ps=max(1, config.num_ps) if asynchronous else 0,
            alone=config.num_workers == 1 and not asynchronous,
            **supervision,
        )
    return _run(config)


def _run(config: RunConfig) -> int:
    quiet_import.import_tensorflow()
    logging.basicConfig(format="mgpu-tf: %(message)s")
    logging.getLogger("mgpu_tf").setLevel(logging.INFO)
    from mgpu_tf.job import run
    from mgpu_tf.reports import terminal

    report = run(config)
    cluster = ClusterConfig.from_environment()
    if cluster is None or cluster.is_chief:
        terminal.show(report)
    return 0


def _launch(arguments: list[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "num_workers", None, "Processes to start.", flag_values=values
    )
    flags.DEFINE_integer(
        "num_ps",
        0,
        "Parameter servers to start; with any, a coordinator is started too.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "evaluator",
        False,
        "Start a process beside them that evaluates every checkpoint.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "startup_seconds",
        local.STARTUP_SECONDS,
        "How long a process may take until it serves its port; 0 for no limit.",
        flag_values=values,
    )
    _define_supervision(values)
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
    if values.evaluator and not values.num_ps:
        raise ConfigurationError(
            "An evaluator goes with parameter servers. Received: --evaluator "
            "without --num_ps. Write --num_ps=1, or leave it out."
        )
    if ClusterConfig.from_environment() is not None:
        raise ConfigurationError(
            "launch makes the cluster itself. Received: TF_CONFIG is set. "
            "Unset it, or run the command without launch."
        )
    return local.launch(
        command,
        values.num_workers,
        num_ps=values.num_ps,
        evaluator=values.evaluator,
        startup_seconds=values.startup_seconds,
        **_supervision(values, asynchronous=values.num_ps > 0),
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
    if not _parse_flags_only(values, arguments, "parity", _PARITY):
        return 0
    cluster = ClusterConfig.from_environment()
    if values.num_workers > 1 and cluster is None:
        return _as_local_cluster("parity", arguments, values.num_workers)
    quiet_import.import_tensorflow()
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


def _checkpoints(arguments: list[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "keep",
        None,
        "Delete all but the N newest.",
        lower_bound=1,
        flag_values=values,
    )
    rest = _parse(values, arguments, _CHECKPOINTS)
    if rest is None:
        return 0
    if len(rest) != 1:
        raise ConfigurationError(
            "checkpoints takes one folder. Received: "
            f"{' '.join(rest) or 'nothing'!r}. Write mgpu-tf checkpoints "
            "RUN/checkpoints."
        )
    (folder,) = rest
    if not os.path.isdir(folder):
        raise ConfigurationError(
            f"checkpoints takes a folder. Received: {folder!r}, which is none."
        )
    if values.keep is not None:
        for name in store.prune(folder, values.keep):
            print(f"deleted {name}")
    found = store.entries(folder)
    for entry in found:
        print(entry.describe())
    return BROKEN if any(entry.problem for entry in found) else 0


def _of_module(name: str, module: Any, arguments: list[str]) -> int:
    """Runs a command whose flags and text are a module's."""
    values = flags.FlagValues()
    module.define(values)
    if not _parse_flags_only(values, arguments, name, module.USAGE):
        return 0
    return module.run(values)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "launch": _launch,
    "checkpoints": _checkpoints,
    "parity": _parity,
    "benchmark": functools.partial(_of_module, "benchmark", benchmark),
    "plan": functools.partial(_of_module, "plan", plan),
}


def _define_supervision(values: flags.FlagValues) -> None:
    """Defines the flags of whatever starts processes."""
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "How often the job is started again when a process fails.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "min_workers",
        None,
        "With the restarts used up, go on with one process less, down to N.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "backoff_seconds",
        1.0,
        "The pause before a restart; it doubles while attempts fail soon.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "grace_seconds",
        local.GRACE_SECONDS,
        "How long processes have to save and end after a signal.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "log_dir",
        None,
        "Gets a file with the output of each process.",
        flag_values=values,
    )


def _supervision(
    values: flags.FlagValues, *, asynchronous: bool
) -> dict[str, Any]:
    """Returns what those flags mean to `local.launch`."""
    return {
        "grace_seconds": values.grace_seconds,
        "policy": RestartPolicy(
            max_restarts=values.max_restarts,
            min_workers=values.min_workers,
            backoff_seconds=values.backoff_seconds,
            unit="task" if asynchronous else "job",
        ),
        "log_dir": values.log_dir,
    }


def _parse_flags_only(
    values: flags.FlagValues, arguments: list[str], name: str, usage: str
) -> bool:
    """Parses flags, and refuses anything else; False where help was printed."""
    rest = _parse(values, arguments, usage)
    if rest:
        raise ConfigurationError(
            f"{name} takes flags only. Received: {rest[0]!r}. Write "
            "--name=value."
        )
    return rest is not None


def _as_local_cluster(
    name: str, arguments: list[str], num_workers: int, **options: Any
) -> int:
    """Runs a command of this program as worker processes of this machine."""
    command = [sys.executable, "-m", "mgpu_tf", name, *arguments]
    return local.launch(
        command, num_workers, chief_has_terminal=True, **options
    )


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
