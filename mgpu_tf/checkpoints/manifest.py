"""What a checkpoint says of itself: `manifest.json`, in all its formats.

    text = compose(step=120, files=[...], arrays=[...], state={"epoch": 3})
    manifest = parse("step-0000000120", text)     # checked in every field
    manifest.files[0].name                        # "arrays-0.bin", no path

    format 1   one file, `arrays.bin`, has all arrays, each of them whole
    format 2   a file of each process; an array is pieces of several files

Every later format keeps two fields as they are here: `format`, a number, and
`manifest_sha256`, over all other fields. By them a program knows what is newer
than itself from what is damaged. This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mgpu_tf.errors import CheckpointError
from mgpu_tf.mesh import Region

FORMAT = 2
MANIFEST = "manifest.json"

# Of format 1.
_ARRAYS = "arrays.bin"
_FILE_NAME = re.compile(r"arrays(-\d{1,9}(-[0-9a-f]{16})?)?\.bin", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}")
_DIGEST = "manifest_sha256"
# A sane bound of what is read whole; a model of 100,000 variables has 40 MB.
MOST_MANIFEST_BYTES = 1 << 30


class DamagedError(CheckpointError):
    """A checkpoint is not what was written; the one before it is used."""


class NewerFormatError(CheckpointError):
    """A checkpoint is of a format that this release does not know.

    It is no worse than others, so a run neither passes it by nor deletes it.
    """


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a checkpoint.

    Attributes:
        name: Its name in the folder of the checkpoint, which is no path.
        bytes: Its size.
        sha256: The checksum of its bytes.
    """

    name: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class StoredPiece:
    """Where some elements of an array are.

    Attributes:
        file: The number of the file.
        offset: The byte at which they begin there.
        region: Which elements.
    """

    file: int
    offset: int
    region: Region


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint, and where it is.

    Attributes:
        dtype: Name of the type, such as "float32".
        itemsize: Bytes of an element.
        shape: Its shape.
        pieces: What is there of it.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format: The number of its format.
        step: The global step.
        files: Its files.
        arrays: Its arrays by name.
        state: What JSON can hold.
    """

    format: int
    step: int
    files: tuple[File, ...]
    arrays: Mapping[str, StoredArray]
    state: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """How large its files are."""
        return sum(file.bytes for file in self.files)


def compose(
    step: int,
    files: Iterable[Mapping[str, Any]],
    arrays: Iterable[Mapping[str, Any]],
    state: Mapping[str, Any],
) -> bytes:
    """Returns the text of a manifest, of the newest format.

    Args:
        step: The global step.
        files: Name, bytes and sha256 of each.
        arrays: Name, dtype, itemsize, shape and pieces of each.
        state: What JSON can hold.
    """
    files = list(files)
    body = {
        "format": FORMAT,
        "step": step,
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
        "arrays": list(arrays),
        "state": dict(state),
    }
    return json.dumps(body | {_DIGEST: digest(body)}).encode()


def digest(body: Mapping[str, Any]) -> str:
    """Returns the checksum over the fields of a manifest."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def parse(name: str, text: bytes) -> Manifest:
    """Reads a manifest, and checks all of it but `state`.

    Args:
        name: The name of the checkpoint.
        text: All bytes of the file.

    Raises:
        DamagedError: It is not what a release of this package has written.
        NewerFormatError: A later release has written it.
    """
    try:
        body = json.loads(text)
        given = body.pop(_DIGEST)
        changed = given != digest(body)
        number = body["format"]
    except (
        *(ValueError, AttributeError, KeyError, TypeError),
        RecursionError,  # Of nested brackets.
    ):
        raise DamagedError(f"{name}: {MANIFEST} is not whole") from None
    if changed:
        raise DamagedError(f"{name}: {MANIFEST} was changed")
    if not _is_count(number) or number not in _READERS:
        raise NewerFormatError(
            f"{name} is of format {number!r:.40}. This release of mgpu_tf "
            f"reads formats 1 to {FORMAT}. Upgrade mgpu_tf on this machine; "
            "the checkpoint stays as it is."
        )
    try:
        files, arrays = _READERS[number](body)
        step, state = _count(body["step"]), body["state"]
        if not isinstance(state, dict):
            raise TypeError
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise DamagedError(
            f"{name}: {MANIFEST} has a field that no release has written"
        ) from None
    return Manifest(number, step, files, arrays, state)


_Read = tuple[tuple[File, ...], dict[str, StoredArray]]


def _format_1(body: Mapping[str, Any]) -> _Read:
    files = (_file({**body, "name": _ARRAYS}),)
    arrays = {}
    for entry in body["arrays"]:
        shape = _shape(entry)
        count = math.prod(shape)
        itemsize = _count(entry["bytes"]) // max(count, 1)
        piece = [0, entry["offset"], *dataclasses.astuple(Region(0, count))]
        arrays[_text(entry["name"])] = _array(
            entry | {"itemsize": itemsize, "pieces": [piece]}, files
        )
    return files, arrays


def _format_2(body: Mapping[str, Any]) -> _Read:
    files = tuple(_file(entry) for entry in body["files"])
    arrays = {
        _text(entry["name"]): _array(entry, files) for entry in body["arrays"]
    }
    return files, arrays


_READERS = {1: _format_1, 2: _format_2}


def _file(entry: Mapping[str, Any]) -> File:
    name, checksum = _text(entry["name"]), _text(entry["sha256"])
    if not (_FILE_NAME.fullmatch(name) and _SHA256.fullmatch(checksum)):
        raise ValueError
    return File(name, _count(entry["bytes"]), checksum)


def _array(entry: Mapping[str, Any], files: tuple[File, ...]) -> StoredArray:
    shape, itemsize = _shape(entry), _count(entry["itemsize"])
    pieces = []
    for values in entry["pieces"]:
        file, offset, *numbers = map(_count, values)
        region = Region(*numbers)
        last = region.first + (region.runs - 1) * region.stride + region.length
        if region.size and last > math.prod(shape):
            raise ValueError
        if offset + region.size * itemsize > files[file].bytes:
            raise ValueError
        pieces.append(StoredPiece(file, offset, region))
    return StoredArray(_text(entry["dtype"]), itemsize, shape, tuple(pieces))


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_count(size) for size in entry["shape"])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value
