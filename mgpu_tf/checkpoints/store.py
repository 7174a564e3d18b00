"""A folder of checkpoints: written whole or not at all, checked when read.

    write("run/checkpoints", step=120, state={"epoch": 3}, arrays=arrays)
    entry = newest("run/checkpoints")       # skips what is broken
    state, arrays = read(entry.path)

    run/checkpoints/step-0000000120/manifest.json   what it holds, checksums
                                    arrays.bin      the bytes, one after other

A checkpoint is written under another name and renamed when all of it is on
the disk, so a kill or a full disk leaves the ones before as they were. This
module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import IO, Any

from mgpu_tf.folders import not_through_links

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.bin"

_PREFIX = "step-"
_UNFINISHED = ".unfinished-"
_CHUNK_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint is broken; the message names it and says how."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as it is stored.

    Attributes:
        dtype: Name of the type, such as "float32".
        shape: Its shape.
        data: Its elements as C-contiguous little-endian bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder.

    Attributes:
        path: Its folder.
        step: The global step that it holds.
        problem: What is wrong with it, "" for nothing.
        manifest: What it says of itself; empty where that cannot be read.
    """

    path: str
    step: int
    problem: str
    manifest: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return os.path.basename(self.path)

    @property
    def bytes(self) -> int:
        """How large its arrays are."""
        return int(self.manifest.get("bytes", 0))

    def describe(self) -> str:
        """Returns one line: what it holds, or what is wrong with it."""
        if self.problem:
            return f"BROKEN  {self.problem}"
        state = self.manifest["state"]
        words = [f"ok      {self.name}", f"{self.bytes / 1e6:.1f} MB"]
        if "position" in state:
            position = state["position"]
            words.append(f"epoch {position['epoch']} step {position['step']}")
        if "num_replicas" in state:
            words.append(f"{state['num_replicas']} replicas")
        if "saved_at" in state:
            moment = datetime.datetime.fromtimestamp(state["saved_at"])
            words.append(moment.isoformat(sep=" ", timespec="seconds"))
        return ", ".join(words)


def write(
    folder: str,
    step: int,
    state: Mapping[str, Any],
    arrays: Mapping[str, Array],
) -> str:
    """Writes a checkpoint; one of the same step is replaced.

    Args:
        folder: Where checkpoints are kept; made where it is missing.
        step: The global step.
        state: What JSON can hold.
        arrays: By name.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: The disk is full or the folder cannot be written; nothing
            of this checkpoint is left then.
    """
    os.makedirs(folder, exist_ok=True)
    name = f"{_PREFIX}{step:010d}"
    path = os.path.join(folder, name)
    unfinished = os.path.join(folder, _UNFINISHED + name)
    shutil.rmtree(unfinished, ignore_errors=True)
    os.mkdir(unfinished)
    try:
        index, digest = _write_arrays(unfinished, arrays)
        body = {
            "format": FORMAT,
            "step": step,
            "bytes": sum(entry["bytes"] for entry in index),
            "sha256": digest,
            "arrays": index,
            "state": dict(state),
        }
        _write_manifest(unfinished, body)
        _sync(unfinished)
        replaced = _replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync(folder)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
    return path


def read(path: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Reads a checkpoint and checks every byte of it.

    Args:
        path: Its folder.

    Returns:
        The state, and the arrays by name.

    Raises:
        CheckpointError: It is broken.
    """
    manifest = _read_manifest(path)
    data = bytearray()
    _check_arrays(path, manifest, data.extend)
    view = memoryview(data)
    arrays = {
        entry["name"]: Array(
            entry["dtype"],
            tuple(entry["shape"]),
            view[entry["offset"] : entry["offset"] + entry["bytes"]],
        )
        for entry in manifest["arrays"]
    }
    return manifest["state"], arrays


def entries(folder: str, *, thorough: bool = True) -> list[Entry]:
    """Returns the checkpoints of a folder, the newest last.

    Args:
        folder: Where checkpoints are kept; it may be missing.
        thorough: Whether all bytes are read to check them; otherwise only
            manifests and sizes.

    Returns:
        Usable and broken ones, those that were never finished left out.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        number = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and number.isdecimal():
            path = os.path.join(folder, name)
            found.append(_entry(path, int(number), thorough))
    return sorted(found, key=lambda entry: entry.step)


def newest(
    folder: str, on_broken: Callable[[Entry], None] | None = None
) -> Entry | None:
    """Returns the newest usable checkpoint.

    Args:
        folder: Where checkpoints are kept.
        on_broken: Called with each newer one that is broken.

    Returns:
        The checkpoint, None where there is none.
    """
    for known in reversed(entries(folder, thorough=False)):
        entry = known
        if not known.problem:
            entry = _entry(known.path, known.step, thorough=True)
        if not entry.problem:
            return entry
        if on_broken is not None:
            on_broken(entry)
    return None


def prune(folder: str, keep: int) -> list[str]:
    """Deletes all but the newest checkpoints that are whole.

    Broken ones that are older than the newest whole one go too, and what a
    killed process has left unfinished.

    Args:
        folder: Where checkpoints are kept. Nobody else may be writing there.
        keep: How many to keep, 1 or more.

    Returns:
        The names of what was deleted.
    """
    every = entries(folder, thorough=False)
    whole = [entry for entry in every if not entry.problem]
    kept = {entry.path for entry in whole[-keep:]}
    last = whole[-1].step if whole else -1
    gone = [e for e in every if e.path not in kept and e.step <= last]
    paths = [entry.path for entry in gone]
    with contextlib.suppress(FileNotFoundError):
        paths += [
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if name.startswith(_UNFINISHED)
        ]
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    return [os.path.basename(path) for path in paths]


def _open(path: str, mode: str) -> IO[bytes]:
    """Opens a file of a checkpoint, which is no link to another file."""
    return open(path, mode, opener=not_through_links)


def _write_arrays(
    folder: str, arrays: Mapping[str, Array]
) -> tuple[list[dict[str, Any]], str]:
    index, offset, digest = [], 0, hashlib.sha256()
    with _open(os.path.join(folder, ARRAYS), "wb") as file:
        for name, array in arrays.items():
            data = array.data.cast("B") if array.data.nbytes else b""
            digest.update(data)
            file.write(data)
            index.append(
                {
                    "name": name,
                    "dtype": array.dtype,
                    "shape": list(array.shape),
                    "offset": offset,
                    "bytes": len(data),
                }
            )
            offset += len(data)
        file.flush()
        os.fsync(file.fileno())
    return index, digest.hexdigest()


def _write_manifest(folder: str, body: dict[str, Any]) -> None:
    text = json.dumps(body | {"manifest_sha256": _digest(body)})
    with _open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _replace(unfinished: str, path: str) -> str | None:
    """Renames to the final name; returns what stood there before."""
    replaced = None
    if os.path.lexists(path):
        folder, name = os.path.split(path)
        replaced = os.path.join(folder, f"{_UNFINISHED}replaced-{name}")
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(unfinished, path)
    return replaced


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: str, step: int, thorough: bool) -> Entry:
    manifest: dict[str, Any] = {}
    try:
        manifest = _read_manifest(path)
        if thorough:
            _check_arrays(path, manifest, lambda _: None)
        else:
            _check_size(path, manifest)
    except CheckpointError as error:
        return Entry(path, step, str(error), manifest)
    return Entry(path, step, "", manifest)


def _read_manifest(path: str) -> dict[str, Any]:
    name = os.path.basename(path)
    if os.path.islink(path):
        raise CheckpointError(f"{name}: is a link, which is not followed")
    try:
        with _open(os.path.join(path, MANIFEST), "rb") as file:
            body = json.load(file)
        digest = body.pop("manifest_sha256")
    except OSError as error:
        raise CheckpointError(
            f"{name}: {MANIFEST} cannot be read ({error.strerror})"
        ) from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{name}: {MANIFEST} is not whole") from None
    if digest != _digest(body):
        raise CheckpointError(f"{name}: {MANIFEST} was changed")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{name}: format {body['format']}, this program reads {FORMAT}"
        )
    return body


def _check_size(path: str, manifest: Mapping[str, Any]) -> None:
    name = os.path.basename(path)
    try:
        size = os.path.getsize(os.path.join(path, ARRAYS))
    except OSError as error:
        raise CheckpointError(
            f"{name}: {ARRAYS} cannot be read ({error.strerror})"
        ) from None
    if size != manifest["bytes"]:
        raise CheckpointError(
            f"{name}: {ARRAYS} has {size} bytes of {manifest['bytes']}"
        )


def _check_arrays(
    path: str,
    manifest: Mapping[str, Any],
    take: Callable[[bytes], None],
) -> None:
    """Reads all bytes, hands them on, and compares their checksum."""
    _check_size(path, manifest)
    name, digest = os.path.basename(path), hashlib.sha256()
    try:
        with _open(os.path.join(path, ARRAYS), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                take(chunk)
    except OSError as error:
        raise CheckpointError(
            f"{name}: {ARRAYS} cannot be read ({error.strerror})"
        ) from None
    if digest.hexdigest() != manifest["sha256"]:
        raise CheckpointError(f"{name}: {ARRAYS} was changed")
