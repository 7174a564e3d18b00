"""The loss of each step of a run, kept beside its checkpoints.

    write("run/checkpoints", 41, [0.52, 0.49])    # of the steps 41 and 42
    read("run/checkpoints")[42]                   # 0.49, to the bit

A step takes 16 bytes. A step that is done again is written again. This module
does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence

from mgpu_tf.checkpoints import storage
from mgpu_tf.folders import NotRegularError

FILE = "losses"
# The step, and its loss. Of a step that was not written both are 0.
_ENTRY = struct.Struct("<qd")


def write(folder: str, first: int, losses: Sequence[float]) -> None:
    """Writes the losses of steps, the first of which has a number from 1.

    Raises:
        OSError: The file cannot be written.
    """
    data = b"".join(
        _ENTRY.pack(first + place, loss) for place, loss in enumerate(losses)
    )
    notes = storage.of(folder).notes(os.path.join(folder, FILE))
    with contextlib.closing(notes):
        notes.write_at((first - 1) * _ENTRY.size, data)


def read(folder: str) -> dict[int, float]:
    """Returns the losses by step; none where nothing was written."""
    data = b""
    with contextlib.suppress(FileNotFoundError, NotRegularError):
        data = storage.of(folder).read_notes(os.path.join(folder, FILE))
    whole = len(data) // _ENTRY.size * _ENTRY.size
    return {
        step: loss for step, loss in _ENTRY.iter_unpack(data[:whole]) if step
    }
