"""Listing, verifying and pruning the checkpoints of a run."""

from __future__ import annotations

import os

from absl import flags

from mgpu_tf.checkpoints import store
from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError

USAGE = """mgpu-tf checkpoints FOLDER [--keep=N]

Lists the checkpoints in a folder and verifies every byte of them. With --keep,
first deletes all but the N newest. Do not use --keep on a folder that a run is
writing to. Exits with status 1 if a checkpoint is broken. FOLDER may also be a
local_checkpoint_dir: then it lists the parts of each worker.

Example:
  mgpu-tf checkpoints runs/a/checkpoints --keep=2
"""

BROKEN = 1


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_integer(
        "keep",
        None,
        "Delete all but the N newest checkpoints.",
        lower_bound=1,
        flag_values=values,
    )


def run(call: Call) -> int:
    """Prints a line for each checkpoint; returns 1 if one is broken."""
    values, rest = call.values, [*call.rest, *(call.command or [])]
    if len(rest) != 1:
        raise ConfigurationError(
            "checkpoints takes one folder. Received: "
            f"{' '.join(rest) or 'nothing'!r}. Write mgpu-tf checkpoints "
            "RUN/checkpoints."
        )
    (path,) = rest
    if not os.path.isdir(path):
        raise ConfigurationError(
            f"checkpoints takes a folder. Received: {path!r}, which is none."
        )
    broken = False
    for folder in store.folders(path):
        if folder != path:
            print(f"{os.path.relpath(folder, path)}:")
        if values.keep is not None:
            for name in store.prune(folder, values.keep):
                print(f"deleted {name}")
        for entry in store.entries(folder):
            print(entry.describe())
            broken |= bool(entry.problem)
    return BROKEN if broken else 0
