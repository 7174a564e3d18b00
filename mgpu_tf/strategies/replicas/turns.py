"""What replicas of one process share while they take turns.

Replicas of one process are threads, of which one runs at a time. Where they
exchange something, the others run until they are there as well. What one has
set on an object that all share, such as an attribute of a layer, is gone then.

    with kept(snapshot):            outside of replicas
        strategy.run(step)          merged(exchange, values) on a replica
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Returns what puts back how shared objects are now.
Snapshot = Callable[[], Callable[[], None]]

_snapshots: list[Snapshot] = []


@contextlib.contextmanager
def kept(snapshot: Snapshot) -> Iterator[None]:
    """Lets each replica find shared objects as it has left them.

    Args:
        snapshot: Called before an exchange; what it returns is called after.
    """
    _snapshots.append(snapshot)
    try:
        yield
    finally:
        _snapshots.remove(snapshot)


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Around an exchange, in which other replicas run. On a replica."""
    put_back = [snapshot() for snapshot in _snapshots]
    yield
    for each in put_back:
        each()


def merged(function: Callable[..., Any], arguments: Sequence[Any] = ()) -> Any:
    """Calls a function once for all replicas, when these are there as well.

    Args:
        function: Called with the strategy, and the arguments of all replicas.
        arguments: Those of this replica.

    Returns:
        What the function returns for this replica.
    """
    context = tf.distribute.get_replica_context()
    with taken():
        return context.merge_call(function, args=tuple(arguments))
