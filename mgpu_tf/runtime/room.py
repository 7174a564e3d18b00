"""Whether an error says that a device or the machine has no room."""

from __future__ import annotations

import tensorflow as tf

# What oneDNN says where it gets no scratch.
_OF_KERNELS = "could not execute a primitive"


def lacks_room(error: BaseException) -> bool:
    """Returns whether an error is that of an allocation."""
    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        return True
    aborted = isinstance(error, tf.errors.AbortedError)
    return aborted and _OF_KERNELS in str(error)
