"""A folder of checkpoints: what is there, what is whole, what may go.

    entry = newest("run/checkpoints")       # passes by what is damaged
    stored = Stored(entry.path)             # see `reading`
    prune("run/checkpoints", keep=3)

    run/checkpoints/step-0000000120/manifest.json   what it holds, checksums
                                    arrays-0.bin    what process 0 has written
                                    arrays-1.bin    what process 1 has written

Only what is known to be whole is deleted or written over. What is damaged, of
a later release, or not readable stays; where a new checkpoint needs its name,
it gets the name `damaged-step-...`. This module does not import TensorFlow,
Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mgpu_tf.checkpoints import registry, storage
from mgpu_tf.checkpoints.keeping import Best, best_of, for_good_of, why_kept
from mgpu_tf.checkpoints.manifest import (
    DamagedError,
    Manifest,
)
from mgpu_tf.checkpoints.reading import (
    check_file,
    check_size,
    patiently,
    read_manifest,
)
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.checkpoints.storage.interface import ASIDE, PREFIX
from mgpu_tf.errors import CheckpointError, ConfigurationError, is_integer
from mgpu_tf.folders import is_address

# In the folders of processes in a `local_checkpoint_dir`.
LOCAL_OWNER = "owner"

_NAME = re.compile(PREFIX + r"(\d{10,18})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder: whole, or damaged.

    Attributes:
        path: Its folder.
        step: The global step that it holds.
        problem: Why it is damaged, "" where it is whole.
        manifest: What it says of itself; None where that is damaged.
    """

    path: str
    step: int
    problem: str
    manifest: Manifest | None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return os.path.basename(self.path)

    @property
    def bytes(self) -> int:
        """How large its arrays are."""
        return self.manifest.bytes if self.manifest else 0

    @property
    def state(self) -> Mapping[str, Any]:
        """What JSON can hold; empty where that is damaged."""
        return self.manifest.state if self.manifest else {}

    @property
    def whole(self) -> bool:
        """Whether a run can go on from it."""
        return not self.problem

    def describe(self) -> str:
        """Returns one line: what it holds, or what is wrong with it."""
        if self.problem:
            return f"BROKEN  {self.problem}"
        words = [f"ok      {self.name}", f"{self.bytes / 1e6:.1f} MB"]
        # A state that no release has written is not described.
        with contextlib.suppress(KeyError, TypeError, ValueError, *_TIMES):
            words += _described(self.state)
        return ", ".join(words)


# Of a moment that no calendar has.
_TIMES = (OverflowError, OSError)


def _described(state: Mapping[str, Any]) -> list[str]:
    words = []
    if "position" in state:
        position = state["position"]
        words.append(f"epoch {position['epoch']} step {position['step']}")
    if "num_replicas" in state:
        words.append(f"{state['num_replicas']} replicas")
    if "part" in state:
        part = state["part"]
        words.append(f"part of worker {part['worker']} of {part['of']}")
    if "saved_at" in state:
        moment = datetime.datetime.fromtimestamp(state["saved_at"])
        words.append(moment.isoformat(sep=" ", timespec="seconds"))
    return words


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A checkpoint of which it is not known here whether it is whole.

    Attributes:
        path: Its folder.
        step: The global step that it holds.
        problem: Why nobody can.
    """

    path: str
    step: int
    problem: str
    whole = False

    def describe(self) -> str:
        """Returns one line that says why."""
        return f"UNKNOWN {self.problem}"


def recover(folder: str) -> None:
    """Gives back its name to a checkpoint that was about to be replaced.

    A process was killed then, and the one that takes its place was not whole
    under any name. Nobody may be writing there.

    Raises:
        OSError: The folder cannot be written.
        UnreadableError: It cannot be read.
    """
    storage.of(folder).recover(folder, _listed(folder))


def remove_after(folder: str, step: int) -> None:
    """Deletes the whole checkpoints of later steps."""
    damaged = Registry(folder).damaged
    for entry in survey(folder):
        if entry.step > step and entry.whole and entry.step not in damaged:
            storage.of(folder).remove_all(entry.path)


def folders(path: str) -> list[str]:
    """Returns the folders of checkpoints of a `local_checkpoint_dir`.

    Args:
        path: Such a folder, the folder of a run in it, or any other.

    Returns:
        Those of the processes in it; the folder itself where it is another.
    """
    if is_address(path):
        return [path]
    for below in ("*", os.path.join("*", "*")):
        pattern = os.path.join(glob.escape(path), below, LOCAL_OWNER)
        if found := sorted(glob.glob(pattern)):
            return [os.path.dirname(each) for each in found]
    return [path]


def paths(folder: str) -> dict[int, str]:
    """Returns the paths of the checkpoints of a folder by their steps.

    Args:
        folder: Where checkpoints are kept; it may be missing.

    Returns:
        The newest last; those that were never finished are left out.

    Raises:
        UnreadableError: The folder cannot be read.
    """
    found = {
        int(match[1]): os.path.join(folder, match[0])
        for match in map(_NAME.fullmatch, _listed(folder))
        if match
    }
    return dict(sorted(found.items()))


def newest_first(
    folder: str, *, thorough: bool = False, below: int = sys.maxsize
) -> Iterator[Entry]:
    """Yields the checkpoints of a folder, looking at each when it is asked for.

    Args:
        folder: Where checkpoints are kept; it may be missing.
        thorough: Whether all bytes are read to check them; otherwise only
            manifests and sizes.
        below: Only earlier steps.

    Yields:
        Whole and damaged ones.

    Raises:
        NewerFormatError: The next one is of a later release.
        UnreadableError: The next one cannot be read, whole or not.
    """
    for step, path in reversed(paths(folder).items()):
        if step < below:
            yield _entry(path, step, thorough)


def entries(folder: str, *, thorough: bool = True) -> list[Entry]:
    """Returns the checkpoints of a folder, the newest last.

    Args:
        folder: As for `newest_first`.
        thorough: As for `newest_first`.

    Raises:
        NewerFormatError: One of them is of a later release.
        UnreadableError: One of them cannot be read, whole or not.
    """
    return list(newest_first(folder, thorough=thorough))[::-1]


def survey(
    folder: str,
    *,
    thorough: bool = False,
    known: Mapping[int, Entry] | None = None,
) -> list[Entry | Unknown]:
    """Returns all checkpoints of a folder, the newest last.

    For who shows them, or deletes what is whole; a run that goes on from one
    asks `newest_first`.

    Args:
        folder: As for `newest_first`.
        thorough: As for `newest_first`.
        known: Entries by their steps that need no other look.

    Raises:
        UnreadableError: The folder cannot be read.
    """
    known = known or {}
    found: list[Entry | Unknown] = []
    for step, path in paths(folder).items():
        try:
            found.append(known.get(step) or _entry(path, step, thorough))
        except CheckpointError as error:
            found.append(Unknown(path, step, str(error)))
    return found


def aside(folder: str) -> list[str]:
    """Returns the names of what was moved aside for a checkpoint."""
    return [name for name in _listed(folder) if name.startswith(ASIDE)]


def newest(
    folder: str, on_broken: Callable[[Entry], None] | None = None
) -> Entry | None:
    """Returns the newest checkpoint that is whole.

    Args:
        folder: Where checkpoints are kept.
        on_broken: Called with each newer one that is damaged.

    Returns:
        The checkpoint, None where there is none.

    Raises:
        NewerFormatError: One that may be newer is of a later release.
        UnreadableError: One that may be newer cannot be read.
    """
    for known in newest_first(folder):
        entry = known
        if known.whole:
            entry = _entry(known.path, known.step, thorough=True)
        if entry.whole:
            return entry
        if on_broken is not None:
            on_broken(entry)
    return None


def choose(folder: str, which: str | int) -> Entry:
    """Returns a checkpoint of a run, all of its bytes checked.

    Args:
        folder: Where checkpoints are kept.
        which: "newest", "best" by the metric that the run has kept the best
            by, or a step.

    Raises:
        ConfigurationError: There is none, or the run has kept no best.
        DamagedError: It is damaged.
        NewerFormatError: It is of a later release.
        UnreadableError: It cannot be read.
    """
    by_name = isinstance(which, str)
    # What cannot be judged may be the newest or the best.
    there = whole(
        entries(folder, thorough=False) if by_name else survey(folder)
    )
    found = {entry.step: entry.path for entry in there}
    known = ", ".join(map(str, found)) or "none"
    step = -1
    if is_integer(which):
        step = int(which)
    elif which == "newest":
        step = max(found, default=-1)
    elif which == "best" and there:
        best = best_of(there[-1].state)
        step = best.ranked(there)[0][0] if best and best.ranked(there) else -1
    if step not in found:
        raise ConfigurationError(
            "A checkpoint is named by its step, as 'newest', or, of a run with "
            f"monitor, as 'best'. Received: {which!r}, where {folder!r} has "
            f"checkpoints of the steps: {known}. Name one of them."
        )
    entry = _entry(found[step], step, thorough=True)
    if entry.problem:
        raise DamagedError(f"{entry.problem}. Name another checkpoint.")
    return entry


def whole(every: Iterable[Entry | Unknown]) -> list[Entry]:
    """Returns those that are whole, in their order."""
    return [each for each in every if isinstance(each, Entry) and each.whole]


def refuse_to_lose(argument: str, folder: str) -> None:
    """Refuses to begin anew where there are checkpoints, none of them usable.

    Args:
        argument: The name of the argument that the folder came from.
        folder: Where checkpoints are kept, none of which was found whole.

    Raises:
        ConfigurationError: There are checkpoints.
    """
    every = list(newest_first(folder))
    if every:
        problem = every[0].problem or f"{every[0].name} is not whole"
        raise ConfigurationError(
            "A run begins at the first step only in a folder without "
            f"checkpoints. Received: {argument}={folder!r} with "
            f"{len(every)}, all of them damaged; the newest: {problem}. "
            "Repair one, give another folder, or set restart_from_nothing: "
            "what is there stays."
        )


def prune(
    folder: str,
    keep: int,
    token: str | None = None,
    beside: int = -1,
    noted: Registry | None = None,
    best: Best | None = None,
    *,
    spare: bool = True,
    known: dict[int, Entry] | None = None,
) -> list[str]:
    """Deletes all but the newest checkpoints that are whole.

    What is kept for good stays, and so do the best. What a killed process has
    left unfinished goes. What is damaged, or was found to be damaged once, or
    cannot be judged here, stays.

    Args:
        folder: Where checkpoints are kept. Nobody else may be writing there.
        keep: How many to keep, 1 or more.
        token: The word of the run that is writing there, if there is one.
            What is unfinished of it stays, and one checkpoint becomes the
            files that it writes over next.
        beside: The step of one that is kept beside the newest.
        noted: The registry of the folder.
        best: Which of the best stay.
        spare: Whether more than the newest and `beside` stays.
        known: Those that are kept for good, as far as the caller has seen
            them; the others come in.

    Returns:
        The names of what was deleted.

    Raises:
        OSError: The folder cannot be written.
        UnreadableError: The folder cannot be read.
    """
    recover(folder)
    noted = noted or Registry(folder)
    known = {} if known is None else known
    every = whole(survey(folder, known=known))
    there = [entry for entry in every if entry.step not in noted.damaged]
    for_good = [e for e in there if for_good_of(e.state).kept == e.step]
    known.update((entry.step, entry) for entry in for_good)
    stay = {entry.step for entry in there[-keep:]} | {beside}
    if spare:
        stay |= set(why_kept(there, keep, best))
    gone = [entry for entry in there if entry.step not in stay]
    doomed = [entry.path for entry in gone]
    kept = storage.of(folder)
    if token and doomed:
        kept.keep_to_write_over(folder, doomed[-1], token)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        doomed += patiently(
            repr(folder), lambda: kept.unfinished(folder, token)
        )
    for path in doomed:
        kept.remove_all(path)
    for entry in gone:
        why = f"older than the newest {keep}"
        if best is not None:
            why += f", and not of the best {best.count} by {best.monitor}"
        noted.note(registry.DELETED, entry.step, why)
    return [os.path.basename(path) for path in doomed]


def _listed(folder: str) -> list[str]:
    """Returns the names in a folder, none where it is missing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        kept = storage.of(folder)
        return sorted(patiently(repr(folder), lambda: kept.names(folder)))
    return []


def _entry(path: str, step: int, thorough: bool) -> Entry:
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        if manifest.step != step:
            raise DamagedError(
                f"{os.path.basename(path)}: was renamed, it is of step "
                f"{manifest.step}"
            )
        for file in manifest.files:
            (check_file if thorough else check_size)(path, file)
    except DamagedError as error:
        return Entry(path, step, str(error), manifest)
    return Entry(path, step, "", manifest)
