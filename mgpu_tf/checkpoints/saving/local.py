"""Checkpoints on the machines of a run: written by each, found together.

    local = Local("/local/checkpoints", peers, snapshot)
    local.open(run, token, in_memory=False)   # the same words on all
    stored = local.newest(above=40)           # of a step that all have
    state, pieces, before = local.taken(state)    # what this process saves
    local.writer.begin(step, pieces)
    local.writer.finish(state, KEPT, before)

    /local/checkpoints/RUN/worker-0/step-0000000120/manifest.json
                                                    arrays-0.bin

Each process writes a checkpoint of its own with all that it holds, by the
same `store`. What another process holds too is there twice, so the checkpoint
of the other can take its place: it is sent to a process whose own is missing
or broken. Own values of replicas, such as metrics, are sent to all at a save
if they are small, and what only the first worker knows of callbacks is sent
too. A step is whole if each process has its own or one that can take
its place, all of one save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.checkpoints import registry, store
from mgpu_tf.checkpoints.callback_state import with_arrays, without_arrays
from mgpu_tf.checkpoints.keeping import KEEPING
from mgpu_tf.checkpoints.manifest import DamagedError
from mgpu_tf.checkpoints.parts import write_copy
from mgpu_tf.checkpoints.reading import Stored, patiently
from mgpu_tf.checkpoints.recovery import Owner
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.checkpoints.saving.writer import Writer
from mgpu_tf.engine.snapshot import Snapshot
from mgpu_tf.errors import CheckpointError, ConfigurationError
from mgpu_tf.folders import make_folder
from mgpu_tf.mesh import Piece
from mgpu_tf.strategies.peers import Peers

# The newest; beside it stays the newest that is whole on all processes.
KEPT = 1
# What of a run's state is that of the first worker, as in a shared checkpoint.
_OF_FIRST = (
    *("generators", "begun", "goodput", "time_line", "saved_at"),
    KEEPING,
)
# Larger arrays of callbacks are not sent; each worker saves its own.
_SENT_BYTES = 1 << 16

_log = logging.getLogger("mgpu_tf")

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The checkpoint of one process, as it is sent to another.

    Attributes:
        step: The global step.
        save: The process group that saved it, and so what it goes with.
        worker: Which process has written it.
        workers: How many there were.
        layout: What they held.
    """

    step: int
    save: str
    worker: int
    workers: int
    layout: str


class Local:
    """The checkpoints of a run in the folders of its machines.

    Args:
        folder: Such as on a disk of this machine; made where it is missing.
        peers: The processes.
        snapshot: Knows what they hold.
    """

    def __init__(self, folder: str, peers: Peers, snapshot: Snapshot) -> None:
        self._folder, self._peers, self._snapshot = folder, peers, snapshot
        self._run = self._mine = self._token = ""
        self._layout = snapshot.layout()
        self.writer: Writer
        self._owner: Owner
        self._resumed: int | None = None
        # The newest step that is whole here.
        self._whole = -1

    def open(self, run: str, token: str, *, in_memory: bool) -> None:
        """Makes the folder of this process.

        Args:
            run: The name of the run, which its restarts share.
            token: A word that all processes share, and no other start.
            in_memory: As for `Writer`.

        Raises:
            ConfigurationError: It cannot be written on some machine.
        """
        self._run = os.path.join(self._folder, run)
        self._mine = os.path.join(self._run, f"worker-{self._peers.worker}")
        self._token = token
        wrong = ""
        owner = self._owner = Owner(self._mine)
        try:
            make_folder("local_checkpoint_dir", self._folder)
            make_folder("local_checkpoint_dir", self._mine)
            owner.take()
            store.recover(self._mine)
        except ConfigurationError as error:
            wrong = str(error)
        except OSError as error:
            wrong = (
                "local_checkpoint_dir must be a folder that can be written. "
                f"Received: {self._folder!r} ({error.strerror})."
            )
        for worker, why in enumerate(self._peers.of_all(wrong)):
            if why:
                where = "" if self._peers.alone else f"worker {worker}: "
                raise ConfigurationError(where + why)
        self.writer = Writer(
            self._mine, token, in_memory=in_memory, check=owner.check
        )

    # Saving.

    def taken(self, state: State) -> tuple[State, Iterator[Piece], int]:
        """Returns what this process writes; all of them take part.

        Args:
            state: From `RunState.capture`.

        Returns:
            The state, with what only the first worker knows, the pieces, and
            the step before that all processes can go on from, -1 for none.
        """
        if self._resumed is not None:
            # Nobody will go on from these.
            store.remove_after(self._mine, self._resumed)
            self._resumed = None
        whole = max(self._whole, self.writer.written)
        every = self._peers.bytes_of_all(
            whole.to_bytes(8, "big", signed=True)
            + (_sent(state) if self._peers.worker == 0 else b"")
        )
        shared = every[0][8:]
        whole = min(
            int.from_bytes(each[:8], "big", signed=True) for each in every
        )
        part = {
            "save": self._token,
            "worker": self._peers.worker,
            "of": self._peers.num_workers,
            "layout": self._layout.digest,
        }
        state = _received(state, shared) | {"part": part}
        pieces = self._snapshot.everything(self._peers.bytes_of_all)
        return state, pieces, whole

    def end(self) -> None:
        """Deletes all of the run on this machine: it has come to its end.

        Also what an earlier start has left here with more workers. No process
        writes any more.
        """
        self._owner.release()
        shutil.rmtree(self._run, ignore_errors=True)

    # Resuming.

    def goes_on_from(self, step: int) -> None:
        """Notes where the run goes on, -1 for the beginning."""
        self._resumed = step

    def newest(self, above: int) -> Stored | None:
        """Returns what this process goes on from; all of them take part.

        Who lacks a checkpoint gets one from another process, and writes it
        to its own folder.

        Args:
            above: Only later steps.

        Returns:
            That of the newest step that is whole, None if there is none.

        Raises:
            ConfigurationError: What another process has sent cannot be
                written here.
        """
        mine = self._found(above)
        while True:
            every = [
                [_Part(*values) for values in parts]
                for parts in self._peers.of_all(
                    [dataclasses.astuple(part) for part in mine]
                )
            ]
            plan = self._plan(every)
            if plan is None:
                self._tell_unused(every)
                return None
            broken = self._broken(plan, mine)
            if not any(self._peers.of_all(broken)):
                break
        self._tell_unused(
            [
                [p for p in parts if p.step > plan[0].part.step]
                for parts in every
            ]
        )
        return self._gather(plan, mine)

    def _found(self, above: int) -> dict[_Part, list[str]]:
        """Returns the paths of whole checkpoints here, of equal ones all."""
        found: dict[_Part, list[str]] = {}
        folders = patiently(self._run, lambda: os.listdir(self._run))
        for folder in sorted(folders):
            path = os.path.join(self._run, folder)
            for entry in store.newest_first(path):
                if entry.step <= above:
                    break
                if not entry.whole:
                    _warn_of_broken(path, entry.problem)
                    continue
                part = _part_of(entry.step, entry.state)
                if part is not None:
                    found.setdefault(part, []).append(entry.path)
        return found

    def _plan(self, every: Sequence[Sequence[_Part]]) -> list[_Use] | None:
        """Returns which part each process goes on from, of the newest step.

        Args:
            every: For each process the parts that it has.
        """
        groups = {
            (part.step, part.save)
            for parts in every
            for part in parts
            if part.layout == self._layout.digest
        }
        for group in sorted(groups, reverse=True):
            # The first process that has a part sends it.
            senders: dict[_Part, int] = {}
            for process, parts in enumerate(every):
                for part in parts:
                    if (part.step, part.save) == group:
                        senders.setdefault(part, process)
            uses = [
                self._use(process, parts, senders)
                for process, parts in enumerate(every)
            ]
            whole = [use for use in uses if use is not None]
            if len(whole) == len(uses):
                return whole
        return None

    def _use(
        self, process: int, has: Sequence[_Part], senders: Mapping[_Part, int]
    ) -> _Use | None:
        """Returns what a process goes on from, None if there is nothing."""
        like = self._layout.like[process]
        fit = [
            (part not in has, part.worker != process, part.worker, part)
            for part in senders
            if part.worker in like
        ]
        if not fit:
            return None
        part = min(fit, key=lambda each: each[:3])[-1]
        return _Use(part, process if part in has else senders[part])

    def _broken(
        self, plan: Sequence[_Use], mine: dict[_Part, list[str]]
    ) -> bool:
        """Reads whole what this process uses or sends; forgets what is broken.

        Returns:
            Whether a part is no longer there.
        """
        broken = False
        for part in {use.part for use in plan if use.source == self._me}:
            paths = mine[part]
            while paths:
                try:
                    Stored(paths[0]).check()
                    break
                except DamagedError as error:
                    path = os.path.dirname(paths[0])
                    _warn_of_broken(path, str(error))
                    Registry(path).note(registry.DAMAGED, part.step, str(error))
                    del paths[0]
            if not paths:
                del mine[part]
                broken = True
        return broken

    def _gather(
        self, plan: Sequence[_Use], mine: Mapping[_Part, list[str]]
    ) -> Stored:
        """Sends parts to those that lack them; returns this process's."""
        use = plan[self._me]
        stored, wrong = None, ""
        if use.source == self._me:
            stored = Stored(mine[use.part][0])
        sent = {
            (each.source, each.part)
            for process, each in enumerate(plan)
            if each.source != process
        }
        # In one order on all processes, also of parts that one sends.
        for source, part in sorted(
            sent, key=lambda each: (each[0], dataclasses.astuple(each[1]))
        ):
            outgoing: Iterator[bytes] = iter(())
            if source == self._me:
                outgoing = Stored(mine[part][0]).stream()
            incoming = self._from(source, outgoing)
            if use == _Use(part, source) and source != self._me:
                try:
                    stored = write_copy(
                        self._mine, part.step, self._token, incoming
                    )
                    if _part_of(stored.step, stored.state) != part:
                        raise DamagedError("another part came")
                except (OSError, CheckpointError) as error:
                    wrong = getattr(error, "strerror", None) or str(error)
            for _ in incoming:
                pass
        for worker, why in enumerate(self._peers.of_all(wrong)):
            if why:
                raise ConfigurationError(
                    "local_checkpoint_dir must have room for a checkpoint. "
                    f"Received: {self._folder!r} on worker {worker}, where "
                    f"one of another worker could not be written ({why})."
                )
        assert stored is not None
        self._whole = stored.step
        if self._me == 0:
            lacked = [
                f"worker {process} lacked it, and has it from worker "
                f"{each.source}"
                for process, each in enumerate(plan)
                if each.source != process
            ]
            _log.info(
                "resumed at step %d from local_checkpoint_dir%s",
                stored.step,
                "".join(f"; {text}" for text in lacked),
            )
        return stored

    def _from(self, source: int, outgoing: Iterator[bytes]) -> Iterator[bytes]:
        """Yields what a process sends, on all processes."""
        while data := self._peers.bytes_of_all(next(outgoing, b""))[source]:
            yield data

    def _tell_unused(self, every: Sequence[Sequence[_Part]]) -> None:
        """Logs the newest part that the run does not go on from."""
        parts = [part for parts in every for part in parts]
        if self._me or not parts:
            return
        newest = max(parts, key=lambda part: part.step)
        group = {
            part.worker
            for part in parts
            if (part.step, part.save) == (newest.step, newest.save)
        }
        why = f"it is of {newest.workers} workers, or of other devices"
        if newest.layout == self._layout.digest:
            missing = [
                str(worker)
                for worker, like in enumerate(self._layout.like)
                if not group & set(like)
            ]
            why = f"what worker {' and '.join(missing)} held is missing"
        _log.warning(
            "the checkpoint of step %d in local_checkpoint_dir is not taken: "
            "%s",
            newest.step,
            why,
        )

    @property
    def _me(self) -> int:
        return self._peers.worker


@dataclasses.dataclass(frozen=True)
class _Use:
    """A part, and the process that reads it for itself or sends it."""

    part: _Part
    source: int


def _part_of(step: int, state: Mapping[str, Any]) -> _Part | None:
    """Returns what the checkpoint of one process is a part of."""
    part = state.get("part", {})
    with contextlib.suppress(KeyError, TypeError):
        return _Part(
            step, part["save"], part["worker"], part["of"], part["layout"]
        )
    return None


def _sent(state: State) -> bytes:
    """Returns what other workers have to know of the first one's state."""
    arrays: list[np.ndarray] = []

    def keep_apart(array: np.ndarray) -> str:
        arrays.append(array)
        return str(len(arrays) - 1)

    callbacks = []
    for name, values in state["callbacks"]:
        before = len(arrays)
        plain = without_arrays(values, keep_apart)
        if sum(array.nbytes for array in arrays[before:]) > _SENT_BYTES:
            del arrays[before:]
            plain = None
        callbacks.append([name, plain])
    shared = {name: state[name] for name in _OF_FIRST}
    shared = without_arrays(shared, keep_apart) | {"callbacks": callbacks}
    flat = [
        (array.dtype.name, array.shape, array.tobytes().hex())
        for array in arrays
    ]
    return zlib.compress(json.dumps([shared, flat]).encode())


def _received(state: State, shared: bytes) -> State:
    """Puts what the first worker has sent into the state of this one."""
    values, flat = json.loads(zlib.decompress(shared))
    arrays = {
        str(number): np.frombuffer(
            bytes.fromhex(text), tf.as_dtype(dtype).as_numpy_dtype
        ).reshape(shape)
        for number, (dtype, shape, text) in enumerate(flat)
    }
    callbacks = [
        mine if plain is None else [name, with_arrays(plain, arrays)]
        for mine, (name, plain) in zip(
            state["callbacks"], values.pop("callbacks"), strict=True
        )
    ]
    return state | with_arrays(values, arrays) | {"callbacks": callbacks}


def _warn_of_broken(folder: str, problem: str) -> None:
    _log.warning("refused a damaged checkpoint in %s: %s", folder, problem)
