"""Replicas of one process are traced in turns, and share what Python holds.

    apart = Apart()
    with apart.checked():              # outside of replicas
        strategy.run(step)             # with apart.replica(): each its own

An object that is no layer has, after an exchange, what another replica has left
in it. Numbers of that replica are refused, wherever they are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from mgpu_tf.engine.author.step_scope import refuse_others
from mgpu_tf.engine.row_proof import Operations, recorded
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica


class Apart:
    """Knows which operations of a step each replica has made."""

    def __init__(self) -> None:
        # With the number of the replica.
        self._made: list[tuple[int, Operations]] = []

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Around the steps of all replicas, outside of them.

        Raises:
            ConfigurationError: One reads what another has made. Errors of the
                trace may follow from that.
        """
        try:
            yield
            self._check()
        except TraceAgain:
            raise
        except Exception:
            self._check()
            raise
        finally:
            self._made = []

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """Around the step of a replica."""
        if tf.executing_eagerly():
            yield
            return
        with recorded() as made:
            self._made.append((this_replica(where_all_are_one=0), made))
            yield

    def _check(self) -> None:
        for number, mine in self._made:
            others = [made for other, made in self._made if other != number]
            tensor = mine.read(others)
            if tensor is not None:
                refuse_others(tensor)
