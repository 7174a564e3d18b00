"""The help of a command: its flags in groups, the most used first.

    print(text(values))

The flags of a run and of its processes have the groups of their options. A
command that has none of these groups has one of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from absl import flags

from mgpu_tf.fields import names_of
from mgpu_tf.options import (
    LargeBatchOptions,
    SaveOptions,
    StepOptions,
    StrategyOptions,
    WatchOptions,
)

_WIDTH = 80

_COMMON = (
    "model",
    "dataset",
    "global_batch_size",
    "epochs",
    "optimizer",
    "learning_rate",
    "precision",
    "strategy",
    "num_workers",
    "num_ps",
    "hosts",
    "ssh",
    "num_virtual_devices",
    "checkpoint_dir",
    "max_restarts",
    "log_dir",
    "output_dir",
    "report",
    "log_with",
    "config",
)
_DATA = ("data_dir", "deterministic", "steps_per_epoch", "seed")
_MACHINES = ("print", "ssh_command", "port")
_PROCESSES = (
    "evaluator",
    "startup_seconds",
    "min_workers",
    "max_workers",
    "spares",
    "backoff_seconds",
    "grace_seconds",
    "isolate",
)
_GROUPS: dict[str, tuple[str, ...]] = {
    "Common": _COMMON,
    "Data and model": (*_DATA, "initial_model"),
    "Strategy": tuple(names_of(StrategyOptions)),
    "Steps": (*names_of(StepOptions), "profile"),
    "Large batches": tuple(names_of(LargeBatchOptions)),
    "Checkpoints": tuple(names_of(SaveOptions)),
    "Other machines": _MACHINES,
    "Processes and restarts": (*_PROCESSES, *names_of(WatchOptions)),
}


def text(values: flags.FlagValues) -> str:
    """Returns the flags of a command, each with its default.

    Args:
        values: The flags.
    """
    names = [n for n in values if n == values[n].name]
    left = sorted(names)
    groups: dict[str, list[str]] = {"This command": []}
    for title, group in _GROUPS.items():
        groups[title] = [name for name in group if name in left]
        left = [name for name in left if name not in group]
    if not groups["Common"]:
        return _block("Flags", sorted(names), values)
    groups["This command"] = left
    return "\n\n".join(
        _block(title, group, values) for title, group in groups.items() if group
    )


def _block(title: str, names: Iterable[str], values: flags.FlagValues) -> str:
    return "\n".join(
        [f"{title}:", *(_described(values[name]) for name in names)]
    )


def _described(flag: flags.Flag) -> str:
    """Returns a flag with its default, and its help below."""
    name = f"[no]{flag.name}" if flag.boolean else flag.name
    default = (flag.default_as_str or "").strip("'")
    head = f"  --{name}" + (f"  (default: {default})" if default else "")
    choices = getattr(flag.parser, "enum_values", None)
    # absl puts the choices of a flag before its help, between < and >.
    words = flag.help.partition(">: ")[2] if choices else flag.help
    if choices:
        words += f" One of: {', '.join(choices)}."
    return "\n".join(
        [
            head,
            *textwrap.wrap(
                words,
                _WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
            ),
        ]
    )
