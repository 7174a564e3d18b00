"""Files of TensorFlow's profiler: the newest of a folder, and lengths."""

from __future__ import annotations

import glob
import os
from typing import Any


def newest_profile(folder: str) -> Any:
    """Returns the newest profile in a folder, an `XSpace`."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    pattern = os.path.join(folder, "**", "*.xplane.pb")
    newest = max(glob.glob(pattern, recursive=True), key=os.path.getmtime)
    space = xplane_pb2.XSpace()
    with open(newest, "rb") as file:
        space.ParseFromString(file.read())
    return space


def length_of_union(spans: list[tuple[int, int]]) -> int:
    """Returns how long any of some spans, each with begin and end, lasts."""
    total = reached = 0
    for begin, end in sorted(spans):
        begin = max(begin, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total
