"""The help of a command: its flags in groups, the most used first.

    print(text(values))

The flags of a run have the groups of their options. A command without such
flags has one group.
"""

from __future__ import annotations

import textwrap

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
    "num_virtual_devices",
    "checkpoint_dir",
    "output_dir",
    "report",
    "log_with",
    "config",
)
_DATA = ("data_dir", "deterministic", "steps_per_epoch", "seed")
_RESTARTS = (
    "max_restarts",
    "min_workers",
    "max_workers",
    "spares",
    "backoff_seconds",
    "grace_seconds",
    "log_dir",
    "isolate",
)
_GROUPS: dict[str, tuple[str, ...]] = {
    "Common": _COMMON,
    "Data and model": (*_DATA, "initial_model"),
    "Strategy": ("num_ps", *names_of(StrategyOptions)),
    "Steps": (*names_of(StepOptions), "profile"),
    "Large batches": tuple(names_of(LargeBatchOptions)),
    "Checkpoints": tuple(names_of(SaveOptions)),
    "Processes and restarts": (*_RESTARTS, *names_of(WatchOptions)),
}


def text(values: flags.FlagValues) -> str:
    """Returns the flags of a command, each with its default.

    Args:
        values: The flags.
    """
    names = [n for n in values if n == values[n].name]
    # Only the commands of a run have both.
    if not {"model", "epochs"} <= set(names):
        return "\n".join(["Flags:", *(_told(values[n]) for n in sorted(names))])
    lines: list[str] = []
    shown: set[str] = set()
    for title, group in _GROUPS.items():
        here = [n for n in group if n in names and n not in shown]
        shown |= set(here)
        if here:
            lines += [f"{title}:", *(_told(values[n]) for n in here), ""]
    rest = [n for n in sorted(names) if n not in shown]
    if rest:
        lines = ["This command:", *(_told(values[n]) for n in rest), "", *lines]
    return "\n".join(lines).rstrip("\n")


def _told(flag: flags.Flag) -> str:
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
