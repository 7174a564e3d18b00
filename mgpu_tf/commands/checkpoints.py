"""Listing, verifying and pruning the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator

from absl import flags

from mgpu_tf.checkpoints import keeping, registry, storage, store
from mgpu_tf.checkpoints.recovery import living_owner
from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import CheckpointError, ConfigurationError, printable
from mgpu_tf.fields import check_needs

USAGE = """mgpu-tf checkpoints FOLDER [--keep=N]

Lists the checkpoints in a folder, verifies every byte of them, and says why
each was saved and is kept. With --keep, first deletes all but the N newest and
those that the run keeps for good or as its best; with --only_newest these too.
A folder that a run is writing to is left alone. What is damaged, of a later
release, or cannot be read is never deleted. Exits with status 1 if there is
any. FOLDER may also be a local_checkpoint_dir: then it lists the parts of each
worker. It may be an address of object storage, such as s3://bucket/run.

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
    flags.DEFINE_bool(
        "only_newest",
        False,
        "With --keep, delete also those that are kept for good or as the best.",
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
    check_needs(
        "only_newest",
        ("keep",) if values.only_newest else (),
        {"only_newest": values.only_newest, "keep": values.keep},
        () if values.keep is None else ("keep",),
    )
    (path,) = rest
    try:
        is_there = storage.of(path).is_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"{path!r} cannot be read ({error.strerror})."
        ) from None
    if not is_there:
        raise ConfigurationError(
            f"checkpoints takes a folder. Received: {path!r}, which is none."
        )
    broken = False
    for folder in store.folders(path):
        if folder != path:
            print(printable(f"{os.path.relpath(folder, path)}:"))
        if values.keep is not None:
            for name in _prune(folder, values.keep, not values.only_newest):
                print(printable(f"deleted {name}"))
        for whole, line in _lines(folder):
            print(printable(line))
            broken |= not whole
    return BROKEN if broken else 0


def _prune(folder: str, keep: int, spare: bool) -> list[str]:
    owner = living_owner(folder)
    if owner:
        raise ConfigurationError(
            "Checkpoints are deleted by the run that writes them, for as long "
            f"as it lives. Received: {folder!r}, which belongs to {owner}. "
            "Leave --keep out, or wait for the end of the run."
        )
    whole = store.whole(store.survey(folder))
    best = keeping.best_of(whole[-1].state) if whole else None
    return store.prune(folder, keep, best=best, spare=spare)


def _lines(folder: str) -> Iterator[tuple[bool, str]]:
    """Yields whether a checkpoint is whole, and a line about it."""
    saved = {
        event.step: event.why
        for event in registry.read(folder)
        if event.what == registry.SAVED and event.why
    }
    every = store.survey(folder, thorough=True)
    whole = store.whole(every)
    kept: dict[int, str] = {}
    if whole and "part" not in whole[-1].state:
        newest = whole[-1].state
        kept = keeping.why_kept(
            whole, keeping.newest_of(newest), keeping.best_of(newest)
        )
    for entry in every:
        line = entry.describe()
        for name, why in (("saved", saved), ("kept", kept)):
            if entry.step in why:
                line += f", {name}: {why[entry.step]}"
        yield entry.whole, line
    for name in store.aside(folder):
        yield False, f"ASIDE   {name}, which a new checkpoint took the name of"
