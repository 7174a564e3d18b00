"""The operations of a call, and whether another call makes the same ones.

    with recorded() as first:
        outputs = layer.call(x)
    with recorded() as second:
        again = layer.call(z)
    first.are_same(second, outputs, again, given=[(x, z)])

Two calls of the same Python make other operations where what they read has
changed in between: an attribute of an object, a counter, a random number.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable
from typing import Any

import tensorflow as tf

from mgpu_tf.engine.row_proof.writes import (
    act,
    body_of,
    functions_of,
    is_exchange,
    outside,
    taken,
)

Pairs = Iterable[tuple[Any, Any]]


class Turns:
    """The numbers of the operations that a graph got in the turn of others."""

    def __init__(self) -> None:
        self._bounds: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Adds the operations from one number to before another."""
        if self._bounds[-2:] and self._bounds[-2] < begin < self._bounds[-1]:
            return  # Within one that has not ended.
        while self._bounds and self._bounds[-2] >= begin:
            del self._bounds[-2:]  # Within this one.
        self._bounds += [begin, end]

    def __contains__(self, place: int) -> bool:
        return bisect.bisect_right(self._bounds, place) % 2 == 1


class Operations:
    """The operations that a call makes, on one replica.

    Args:
        graph: To which they are added.

    Attributes:
        own: Those of this replica, by identity, once the call has ended.
        of_others: What other replicas made in their turns meanwhile.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._first = len(graph.get_operations())
        self._turns = Turns()
        self.own: dict[int, tf.Operation] = {}
        self.of_others: dict[int, tf.Operation] = {}

    def leave_out(self, graph: Any, begin: int, end: int) -> None:
        """Does not count what other replicas make in their turn."""
        if graph is self._graph:
            self._turns.add(begin, end)

    def end(self) -> None:
        """Ends the call."""
        operations = self._graph.get_operations()[self._first :]
        for place, op in enumerate(operations, self._first):
            of = self.of_others if place in self._turns else self.own
            of[id(op)] = op

    def act(self) -> bool:
        """Returns whether they do more than make their outputs."""
        return act(self.own.values())

    def take_others(
        self, known: Iterable[Any], handles: Callable[[], Container[int]]
    ) -> bool:
        """Returns whether they take what has a gradient and is not known.

        Such as scalars, tensors in attributes, and variables of TensorFlow's.
        To be asked before others are made.

        Args:
            known: What they may take.
            handles: Returns the identities of the handles of the variables
                that they may read.
        """
        names = {leaf.name for leaf in known if tf.is_symbolic_tensor(leaf)}
        found = taken(self._graph, self._first, self._turns.__contains__)
        return any(
            given.name not in names and _may_learn(op, source, handles)
            for op, given, source in found
        )

    def are_read(self, outputs: Container[int]) -> bool:
        """Returns whether others take a tensor of them that is no output.

        Args:
            outputs: The identities of the outputs.
        """
        known = self.own.keys() | self.of_others.keys()
        return any(
            id(reader) not in known
            for op in self.own.values()
            for made in op.outputs
            if id(made) not in outputs
            for reader in made.consumers()
        )

    def read(self, others: list[Operations]) -> Any:
        """Returns a tensor that other replicas have made, if one is taken.

        What replicas exchange is made by none of them, or by all, where the
        author does that with TensorFlow's own methods.
        """
        made = set().union(*(other.own for other in others))
        apart = made - self.own.keys()
        return next(
            (
                given
                for key, op in self.own.items()
                if key not in made
                for given in op.inputs
                # A graph has constants, and what it captures, once, where
                # they are first taken.
                if id(given.op) in apart and len(given.op.inputs)
            ),
            None,
        )

    def are_same(
        self,
        other: Operations,
        outputs: list[Any],
        again: list[Any],
        given: Pairs,
    ) -> bool:
        """Returns whether another call makes the same outputs of its own.

        Args:
            other: The operations of the other call.
            outputs: What this one has made.
            again: What the other one has made.
            given: What is given to this one, and to the other one instead.
        """
        if len(outputs) != len(again):
            return False

        def is_leaf(mine: Any, its: Any) -> bool | None:
            if id(mine.op) in self.own:
                return None
            if id(mine.op) in self.of_others:
                return id(its.op) in other.of_others
            return outside(mine) is outside(its)

        return _are_same(zip(outputs, again, strict=True), given, is_leaf)


def _may_learn(
    op: tf.Operation, source: Any, handles: Callable[[], Container[int]]
) -> bool:
    """Returns whether a gradient may flow from an operation to its input."""
    if source.dtype == tf.resource:
        return any(map(_has_gradient, op.outputs)) and (
            id(source) not in handles()
        )
    # A tensor of no graph is a constant.
    symbolic = tf.is_symbolic_tensor(source) and source.op.type != "Const"
    return symbolic and _has_gradient(source)


def _has_gradient(tensor: Any) -> bool:
    """Returns whether a gradient may flow back to a tensor."""
    dtype = tensor.dtype
    return dtype.is_floating or dtype.is_complex or dtype == tf.variant


def _are_same(
    pairs: Pairs,
    given: Pairs,
    is_leaf: Callable[[Any, Any], bool | None] = lambda mine, its: None,
) -> bool:
    """Returns whether pairs of tensors are made alike of pairs that are given.

    Args:
        pairs: The pairs.
        given: The given ones.
        is_leaf: Whether two tensors are alike that are not looked into; None
            for others.
    """
    # Several tensors may be given instead of one that is given several times.
    seen = {(id(mine), id(its)) for mine, its in given}
    known, left = {mine for mine, _ in seen}, list(pairs)
    while left:
        mine, its = left.pop()
        if (id(mine), id(its)) in seen:
            continue
        seen.add((id(mine), id(its)))
        alike = False if id(mine) in known else is_leaf(mine, its)
        if alike is None:
            alike = mine.value_index == its.value_index
            alike = alike and _do_the_same(mine.op, its.op)
            count = 1 if is_exchange(mine.op) else None
            left += zip(
                mine.op.inputs[:count], its.op.inputs[:count], strict=False
            )
        if not alike:
            return False
    return True


def _do_the_same(mine: tf.Operation, its: tf.Operation) -> bool:
    """Returns whether two operations make the same of the same inputs."""
    if mine is its:
        return True
    if mine.type != its.type or len(mine.inputs) != len(its.inputs):
        return False
    if is_exchange(mine):
        return True  # Keys tell one from another.
    ours, theirs = mine.node_def.attr, its.node_def.attr
    for attribute in mine.op_def.attr:
        name = attribute.name
        calls = attribute.type in ("func", "list(func)")
        if not calls and ours[name] != theirs[name]:
            return False
    return all(
        _are_functions_same(mine, its, one, another)
        for one, another in zip(
            functions_of(mine), functions_of(its), strict=True
        )
    )


def _are_functions_same(
    mine: tf.Operation, its: tf.Operation, one: Any, another: Any
) -> bool:
    if one.name == another.name:
        return True
    bodies = body_of(mine, one), body_of(its, another)
    if None in bodies or len(bodies[0].outputs) != len(bodies[1].outputs):
        return False
    inputs, outputs = (
        list(zip(*each, strict=False))
        for each in (
            [body.inputs for body in bodies],
            [body.outputs for body in bodies],
        )
    )
    return _are_same(outputs, inputs)
