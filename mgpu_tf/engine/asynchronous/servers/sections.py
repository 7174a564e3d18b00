"""What reads and writes variables of a server happens there as one.

    place, = whole("count", device, take_one, [])

    values of the worker arrive -> lock -> body -> unlock -> outputs leave

Nothing between lock and unlock leaves the server: what a body needs is there
before it asks for the lock. So a holder never waits for anybody, two locks
cannot wait for each other, and a worker that is killed holds none, as its
server ends the body without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mgpu_tf.errors import ConfigurationError

# A lock has a thread on its server; this number serves all locks there.
MOST_LOCKS = 16


def whole(
    name: str,
    device: str,
    body: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
) -> list[Any]:
    """Runs a body on a server while nobody else runs one of this name there.

    Args:
        name: What it locks.
        device: The server, as its variables have it.
        body: Takes the inputs; reads and writes variables of that server,
            and returns tensors.
        inputs: Tensors and `tf.IndexedSlices`, from anywhere.

    Returns:
        What the body returns, on the server.

    Raises:
        ConfigurationError: The body needs a variable of another server.
    """

    def run(*inputs: Any) -> list[Any]:
        return [tf.constant(True), *body(*inputs)]

    with tf.device(device):
        here = tf.nest.map_structure(
            tf.identity, list(inputs), expand_composites=True
        )
        steps = tf.function(run, autograph=False).get_concrete_function(*here)
        _check_device(steps, device)
        arrived = tf.nest.flatten(here, expand_composites=True)
        mutex = tf.raw_ops.MutexV2(shared_name=_lock_of(name))
        with tf.control_dependencies(arrived):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            done, *outputs = steps(*here)
        with tf.control_dependencies([done]):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    return outputs


def _lock_of(name: str) -> str:
    return f"mgpu_tf_{zlib.crc32(name.encode()) % MOST_LOCKS}"


def _check_device(steps: Any, device: str) -> None:
    for variable in steps.graph.variables:
        if variable.device != device:
            raise ConfigurationError(
                "A weight and the state that its optimizer has for it must "
                f"be on one parameter server. Received: {variable.name!r} on "
                f"{variable.device}, used on {device}. Create it by "
                "add_variable_from_reference, or use one server."
            )
