"""What replicas of one process share while they take turns.

Replicas of one process are threads, of which one runs at a time. Where they
exchange something, the others run until they are there as well. What one has
set on an object that all share, such as an attribute of a layer, is gone then.

    with kept(snapshot):            outside of replicas
        strategy.run(step)          with taken(): around each exchange
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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
