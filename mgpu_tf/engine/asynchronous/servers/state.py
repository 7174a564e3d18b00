"""What steps write besides weights, where several workers write at once.

    on a worker     new = f(what it read)
    on the server   moving statistic   m * held + (new - m * read)
                    counter            held + (new - read)
                    else               new: the step that writes last

If a worker wrote its new value, it would undo the writes of other workers since
its read. So the worker sends the change, and the server adds the change to the
held value.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.asynchronous.servers.packed_variables import Packs
from mgpu_tf.engine.asynchronous.servers.sections import whole
from mgpu_tf.engine.author.rules import Rule
from mgpu_tf.engine.author.state import ReplicaState, Writes
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")


class SharedStatistics:
    """Moving statistics and counters of a model.

    Args:
        model: A built model.
        state: Knows by which rule a variable is written.
        packed: Whether those of a server travel together.
        workers: How many write.
    """

    def __init__(
        self,
        model: keras.Model,
        state: ReplicaState,
        *,
        packed: bool,
        workers: int,
    ) -> None:
        self._state = state
        self._workers = workers
        self._kept = keras_internals.kept_shares(model)
        self._warned: set[int] = set()
        self._packs = Packs(state.layers if packed else [], also=state.layers)

    def read(self) -> Writes:
        """Returns the held values, for a step. On a worker."""
        return self._packs.read()

    def change(
        self, variable: keras.Variable, before: Any, after: tf.Tensor
    ) -> tf.Tensor:
        """Returns what is sent for a variable. On a worker.

        Args:
            variable: What the step writes.
            before: What `read` returned for it, or the variable.
            after: What the step makes of it.
        """
        share = self._share(variable)
        if share is None:
            self._warn(variable)
            return after
        before = tf.convert_to_tensor(before)
        return after - tf.constant(share, before.dtype) * before

    def write(
        self, variables: Sequence[keras.Variable], changes: Sequence[Any]
    ) -> None:
        """Writes what was sent. Outside of replicas.

        Args:
            variables: What the step writes.
            changes: What `change` gave for each.

        Raises:
            ConfigurationError: A layer writes a weight, over what other
                workers' updates made of it.
        """
        for variable in variables:
            if variable.trainable and self._workers > 1:
                raise ConfigurationError(
                    "On 'parameter_server' with several workers a layer may "
                    "not write its own trainable weights, which would undo "
                    f"updates of others. Received: {variable.path}. Use one "
                    "worker, or another strategy."
                )
        pairs = list(zip(variables, changes, strict=True))
        for variable, value in pairs:
            if self._share(variable) is None:
                variable.assign(value)
        held = [v for v in variables if self._share(v) is not None]
        sent = self._packs.sent(
            [value for v, value in pairs if self._share(v) is not None], held
        )
        of = {id(v): value for v, value in zip(held, sent, strict=True)}
        for name, group in self._packs.groups(held).items():
            self._add(name, group, [of[id(variable)] for variable in group])

    def _add(
        self,
        name: str,
        group: list[keras.Variable],
        changes: list[tf.Tensor],
    ) -> None:
        def add(*changes: tf.Tensor) -> list[tf.Tensor]:
            for variable, change in zip(group, changes, strict=True):
                held = variable.value
                share = tf.constant(self._share(variable), held.dtype)
                held.assign(share * held + change)
            return []

        whole(name, group[0].value.device, add, changes)

    def _share(self, variable: keras.Variable) -> float | None:
        """The share of the held value that a step keeps, or None."""
        kept = self._kept.get(id(variable))
        if kept is not None:
            return kept
        return 1 if self._state.rule(variable) is Rule.SUM else None

    def _warn(self, variable: keras.Variable) -> None:
        """Warns once of what steps of several workers overwrite."""
        if id(variable) not in self._warned:
            _log.warning(
                "on 'parameter_server' %s holds what the last step of any "
                "worker wrote, since it is neither a sum nor a moving "
                "statistic of Keras",
                variable.path,
            )
        self._warned.add(id(variable))
