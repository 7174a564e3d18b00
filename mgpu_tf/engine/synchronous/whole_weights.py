"""Weights that are stored in parts, as a step of the author's own reads them.

    weights = WholeWeights(model)
    with weights.around():               # outside of replicas
        strategy.run(on_replica)

    with weights.begun():                # on a replica
        w = tf.convert_to_tensor(weight) # whole, gathered once until it is
                                         # written

    tape.gradient(loss, weight)          # whole, as the author expects it

A tape knows a variable by its handle. Each replica has a variable for each of
these weights that is declared in the whole shape and holds a scalar, and lends
its handle: what is read is made of it and of the gathered value, and a gradient
of the whole shape flows to it. A branch that reads nothing has zeros in the
declared shape. Of a weight that is read in a loop, the variable becomes zeros.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.author_scope import graph_here
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.split.sharded_variable import (
    ShardedVariable,
    from_source,
)


class WholeWeights:
    """Lends the whole values of weights to steps of the author's own.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._split = [
            keras_internals.stored(variable)
            for variable in model.variables
            if keras_internals.is_split(variable)
        ]
        self._sources = {
            id(held): [_source(held, part.device) for part in held.values]
            for held in self._split
        }
        # Each replica is a thread of its own.
        self._here = threading.local()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Lets weights be lent, around steps. Outside of replicas."""
        for held in self._split:
            held.lender = self
        try:
            yield
        finally:
            for held in self._split:
                held.lender = None

    # On a replica.

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Lends them in a block, a step on this replica."""
        self._here.known, self._here.graph = {}, graph_here()
        try:
            yield
        finally:
            self._here.known = None

    def read(self, held: ShardedVariable) -> tf.Tensor:
        """Returns the whole value of a weight, with a gradient.

        Raises:
            ConfigurationError: It cannot be gathered where it is read.
        """
        known = getattr(self._here, "known", None)
        if known is None:
            return held.read_here()
        if graph_here() is not self._here.graph:
            whole = self._within(held)
            # The gradient of a loop adds zeros like what was read.
            with tf.init_scope():
                _hold(self._source_here(held), held.shape)
        else:
            if id(held) not in known:
                known[id(held)] = tf.identity(held.read_here())
            whole = known[id(held)]
        source = self._source_here(held)
        with tf.device(source.device):
            return from_source(source.read_value(), whole)

    def _within(self, held: ShardedVariable) -> tf.Tensor:
        """Reads a weight in a graph inside of the step.

        The graph may run again, and then reads what is there then.
        """
        if held.is_apart:
            raise ConfigurationError(
                "Within tf.function, tf.cond and loops of TensorFlow a step "
                "reads no weights that several processes hold parts of. "
                f"Received: {held.name}, read inside of one. Read it in the "
                "step itself, by tf.convert_to_tensor, and pass the value; "
                "or call the model there."
            )
        return held.read_here()

    def handle(self, held: ShardedVariable) -> Any:
        """Returns what a tape knows a weight by."""
        return self._source_here(held).handle

    def _source_here(self, held: ShardedVariable) -> tf.Variable:
        return self._sources[id(held)][held.place_here()]

    def forget(self, variables: Iterable[keras.Variable]) -> None:
        """Lets weights be gathered anew, since they were written."""
        for variable in variables:
            self._here.known.pop(id(keras_internals.stored(variable)), None)


def _source(held: ShardedVariable, device: str) -> tf.Variable:
    """Makes what gradients of a whole weight flow to, on a device."""
    with tf.init_scope(), tf.device(device):
        source = tf.Variable(tf.zeros(held.shape, held.dtype))
        _hold(source, ())
        return source


def _hold(source: tf.Variable, shape: Any) -> None:
    """Lets it hold zeros of a shape, which is not the one it declares."""
    tf.raw_ops.AssignVariableOp(
        resource=source.handle, value=tf.zeros(shape, source.dtype)
    )
