"""The logs of a `compute_metrics` that the model's author wrote.

On one device they are what it returns. On several replicas an entry is

    computed of metrics alone   computed again of the metrics of all replicas,
                                of what they held before the step where the
                                author read them before they were updated
    a mean, a sum, a constant   read, and added up in the step

and anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine.contributions import BatchShare
from mgpu_tf.engine.reading import Reader, Unreadable, is_same
from mgpu_tf.engine.rules import Rule
from mgpu_tf.engine.state import ReplicaState, Writes
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.own_gradient import sum_over_replicas

# Names that no log has: what metrics held before the step.
_BEFORE = "before the step: "


class OwnLogs:
    """What `compute_metrics` returns, brought together over replicas.

    Args:
        model: The model.
        state: Knows by which rule metrics become one.
        replicas: Number of replicas that step together.
    """

    def __init__(
        self, model: keras.Model, state: ReplicaState, replicas: int
    ) -> None:
        self._name = type(model).__name__
        self._state = state
        self._replicas = replicas
        self._order: list[str] = []
        self._results: dict[str, tf.Tensor] = {}
        self._metrics: Writes = []
        self._before: dict[str, tf.Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The names of the logs, none where they are the model's metrics."""
        return self._order

    def taken(
        self,
        returned: Mapping[str, Any],
        metrics: Writes,
        before: Writes,
        reader: Reader,
        share: BatchShare,
    ) -> dict[str, tf.Tensor]:
        """Keeps what can be computed later. On a replica, in a trace.

        Args:
            returned: What the author's method returned.
            metrics: The variables of metrics with their values then.
            before: Those that the method updated, with their values before.
            reader: Reads the step.
            share: This replica's part of the global batch.

        Returns:
            The contributions of the other entries, to be added up.

        Raises:
            ConfigurationError: There is no rule for an entry.
        """
        flat = flat_logs(returned)
        self._order, self._results, self._metrics = list(flat), {}, metrics
        self._before = {}
        own: dict[str, tf.Tensor] = {}
        for name, value in flat.items():
            value = tf.convert_to_tensor(value)
            leaves = self._leaves_in_metrics(value, before)
            if leaves:
                self._results[name] = value
                own |= self._held_before(name, leaves, before)
            elif share.replicas == 1:
                own[name] = value
            else:
                own[name] = self._read(name, value, reader, share)
        return own

    def summed(self, own: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Adds the contributions up. On a replica."""
        if self._replicas == 1 or not own:
            return own
        return {
            name: self._state.counted_once(sum_over_replicas(value))
            for name, value in own.items()
        }

    def whole(
        self, own: Mapping[str, tf.Tensor], metrics: Writes
    ) -> dict[str, tf.Tensor]:
        """Returns the logs. Outside of replicas.

        Args:
            own: The entries that were added up.
            metrics: The variables of metrics with their values over all
                replicas.
        """
        every = {id(variable): value for variable, value in metrics}
        values = [(value, every[id(v)]) for v, value in self._metrics]
        values += [(value, own[name]) for name, value in self._before.items()]
        return {
            name: own[name]
            if name in own
            else _again(self._results[name], values)
            for name in self._order
        }

    def _leaves_in_metrics(
        self, value: tf.Tensor, before: Writes
    ) -> list[tf.Tensor]:
        """The values of metrics that a log is computed of, if of them alone."""
        held = [tensor for _, tensor in [*self._metrics, *before]]
        try:
            leaves = _leaves(value, held)
        except Unreadable:
            return []
        return [leaf for leaf in leaves if not isinstance(leaf, tf.Operation)]

    def _held_before(
        self, name: str, leaves: list[tf.Tensor], before: Writes
    ) -> dict[str, tf.Tensor]:
        """What a log needs of metrics as they were, to be added up."""
        found = {}
        for variable, value in before:
            if not any(is_same(leaf, value) for leaf in leaves):
                continue
            if self._state.rule(variable) is not Rule.SUM:
                raise ConfigurationError(
                    "On several replicas compute_metrics can read a metric "
                    "before it is updated where replicas' values add up. "
                    f"Received: {name!r} of {self._name}, which reads "
                    f"{variable.path}. Update that metric first."
                )
            self._before[_BEFORE + variable.path] = value
            found[_BEFORE + variable.path] = self._state.addend(value)
        return found

    def _read(
        self, name: str, value: tf.Tensor, reader: Reader, share: BatchShare
    ) -> tf.Tensor:
        try:
            return share.select(reader.contribution(value, share), 0)
        except Unreadable as error:
            raise ConfigurationError(
                "On several replicas what compute_metrics returns must come "
                "of metrics, or be a sum of means, sums and constants over "
                f"the examples. Received: {name!r} of {self._name}, on "
                f"{share.replicas} replicas, from {error}. Give the values "
                "to a metric, or reduce them by "
                "`mgpu_tf.mean_over_batch(values)`."
            ) from None


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Lifts nested logs to the top, as Keras does.

    A metric may return its variable. What it holds is read here, since it is
    another value outside of the scope that has the state of all replicas.
    """
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, keras.Variable):
            value = tf.convert_to_tensor(value.value)
        nested = isinstance(value, Mapping)
        flat |= flat_logs(value) if nested else {name: value}
    return flat


def _again(value: tf.Tensor, values: list[tuple[Any, Any]]) -> tf.Tensor:
    """Computes a value anew, in this graph, of other metrics.

    Args:
        value: What `_leaves` knows the leaves of.
        values: What metrics held there, and what they hold here.
    """
    graph = tf.compat.v1.get_default_graph()
    made: dict[int, tf.Tensor] = {}

    def copy(tensor: tf.Tensor) -> tf.Tensor:
        for held, now in values:
            if is_same(tensor, held):
                return tf.convert_to_tensor(now)
        if id(tensor) not in made:
            op = tensor.op
            attributes = op.node_def.attr
            outputs = graph.create_op(
                op.type,
                [copy(source) for source in op.inputs],
                [output.dtype for output in op.outputs],
                attrs={k: v for k, v in attributes.items() if k[0] != "_"},
                op_def=op.op_def,
            ).outputs
            made.update(zip(map(id, op.outputs), outputs, strict=True))
        return made[id(tensor)]

    return copy(value)


def _leaves(value: tf.Tensor, held: list[tf.Tensor]) -> list[Any]:
    """What a value is computed of: held tensors, and constants.

    Raises:
        Unreadable: It is computed of something else as well.
    """
    leaves: list[Any] = []
    stack, seen = [value], set()
    while stack:
        tensor = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if any(is_same(tensor, known) for known in held):
            leaves.append(tensor)
            continue
        if not tf.is_symbolic_tensor(tensor):
            raise Unreadable()
        op = tensor.op
        if op.op_def.is_stateful or op.type == "Placeholder":
            raise Unreadable(op)
        if not op.inputs:
            leaves.append(op)
        stack += op.inputs
    return leaves
