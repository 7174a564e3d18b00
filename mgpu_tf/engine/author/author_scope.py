"""The scope in which a step of the author's own runs.

    with AuthorScope(given, write) as scope:
        model.train_step(data)
    scope.written        the variables among `given` that the step wrote to

Weights keep their places, so that the author's tapes and optimizers find them.
State is kept in the scope, for whoever brings the replicas' values together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.inlined import check_lent, is_within_function
from mgpu_tf.engine.row_proof import acts
from mgpu_tf.engine.trace_again import TraceAgain


class AuthorScope(keras.StatelessScope):
    """Keeps what is written to some variables, and hands on the rest.

    Args:
        given: The variables whose values are kept, with those to begin with.
        write: Takes another variable that is written to, and the value; by
            default nothing is written.

    Attributes:
        written: The variables of `given` that were written to, by identity.
        within: Those that it wrote to within a function, a branch or a loop of
            TensorFlow, where nothing can be kept.
        lent: Returns the value of a weight in the call that is under way, None
            where it is read as it is.
        inline: Called with such a weight that a `tf.function` of the author's
            reads, and would keep.
        read_within: Called with what such a function reads or writes of the
            state that is kept.
    """

    def __init__(
        self,
        given: Writes,
        write: Callable[[keras.Variable, tf.Tensor], None] | None = None,
    ) -> None:
        super().__init__(given, collect_losses=True)
        self.written: dict[int, keras.Variable] = {}
        self.within: dict[int, keras.Variable] = {}
        self.lent: Callable[[keras.Variable], Any] = lambda variable: None
        self.inline: Callable[[keras.Variable], None] = lambda _: None
        self.read_within: Callable[[keras.Variable], None] = lambda _: None
        self._write = write
        self._kept = set(self.state_mapping)
        self._graph = graph_here()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value that is kept, or TensorFlow's own variable."""
        value = super().get_current_value(variable)
        if value is not None and is_within_function(self._graph):
            self.read_within(variable)
        if value is None:
            value = self.lent(variable)
            if value is not None:
                if is_within_function(self._graph):
                    self.inline(variable)
                if variable.trainable:
                    check_lent(variable)
        return keras_internals.stored(variable) if value is None else value

    def value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns what a variable holds at this point of the step."""
        return tf.convert_to_tensor(self.get_current_value(variable))

    def mark(self) -> tuple[Any, ...]:
        """Returns what `reset` needs to undo all that follows."""
        graph = graph_here()
        return (
            dict(self.state_mapping),
            dict(self.written),
            len(self.losses),
            0 if graph is None else len(graph.get_operations()),
        )

    def reset(self, mark: tuple[Any, ...]) -> None:
        """Forgets what was written, and what was added, since a mark.

        Whoever calls it has noted how the next trace does without that.

        Raises:
            TraceAgain: What was traced writes to a variable of TensorFlow's,
                prints or calls Python: it cannot be forgotten.
        """
        mapping, written, losses, operations = mark
        graph = graph_here()
        if graph is not None and acts(graph, operations):
            raise TraceAgain
        self.state_mapping, self.written = dict(mapping), dict(written)
        del self.losses[losses:]

    def written_since(
        self, mark: tuple[Any, ...]
    ) -> list[tuple[keras.Variable, Any]]:
        """Returns what was written since a mark, with the values."""
        before = mark[0]
        return [
            (variable, self.state_mapping[key])
            for key, variable in self.written.items()
            if self.state_mapping[key] is not before.get(key)
        ]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Takes what is assigned to a variable."""
        variable, value = update
        if id(variable) not in self._kept:
            if self._write is not None:
                self._write(variable, value)
            return
        if graph_here() is not self._graph:
            self.within[id(variable)] = variable
            if is_within_function(self._graph):
                self.read_within(variable)
            return
        self.written[id(variable)] = variable
        # As from a variable, no gradient flows back into what was assigned.
        super().add_update((variable, tf.stop_gradient(value)))


def graph_here() -> Any:
    """Returns the graph that is being made; None where nothing is traced."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()
