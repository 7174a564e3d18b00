"""The walk over a graph that proves something of its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mgpu_tf.engine.row_proof.gradients import is_linear, keeps_rows_apart
from mgpu_tf.engine.row_proof.kinds import (
    FIXED,
    OTHERS,
    ROWS,
    UNPROVEN,
    Kind,
    Rows,
    Sizes,
    Spread,
)
from mgpu_tf.engine.row_proof.operations import Operations, Turns
from mgpu_tf.engine.row_proof.rules import as_fixed, by_rule
from mgpu_tf.engine.row_proof.writes import body_of, functions_of, written_by
from mgpu_tf.strategies.replicas.own_gradient import is_sum_over_replicas

# Calls of functions, reads of variables, and what reaches no number.
CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
READS = frozenset(("ReadVariableOp", "VarHandleOp"))
CHECKS = frozenset(("Assert", "NoOp", "PrintV2", "StringFormat"))
BRANCHES = frozenset(("If", "StatelessIf"))
LOOPS = frozenset(("While", "StatelessWhile"))


class RowProof:
    """What is proven of the tensors of a graph.

    Args:
        rows: Tensors whose first axis is that of the rows.
        fixed: Returns whether a value that is read of a variable is the same
            for all cuts. Default: every variable's is.
        outer: The proof of the graph around this one.
        known: Returns what a tensor is, whatever made it; None where that is
            not known.

    Attributes:
        unproven: The operations that no rule proves.
        writes_rows: Whether something of the rows is written to a variable of
            TensorFlow's.
    """

    def __init__(
        self,
        rows: Iterable[Any] = (),
        fixed: Callable[[Any], bool] = lambda handle: True,
        outer: RowProof | None = None,
        known: Callable[[Any], Kind | None] = lambda tensor: None,
    ) -> None:
        self._known = known
        self.fixed = fixed
        self._outer = outer
        self._under_way: set[int] = set()
        self._kinds: dict[int, Kind] = {}
        self._taken: dict[int, Kind] = {}
        self._skipped: dict[int, int] = {}
        self._alive: list[Any] = []
        self._walked: dict[int, int] = {}
        self.unproven: list[tf.Operation] = []
        self._unknown: Callable[[Any], Kind] = lambda tensor: FIXED
        self._refuse: Callable[[Any], None] = lambda tensor: None
        self.writes_rows = False
        # By a graph, where the operations of other replicas begin and end, in
        # turn.
        self._of_others: dict[int, Turns] = {}
        self.take(rows, Rows())

    def take(self, tensors: Iterable[Any], kind: Kind) -> None:
        """Takes for known what some tensors are.

        Args:
            tensors: A structure of tensors.
            kind: What they are.
        """
        for tensor in tf.nest.flatten(list(tensors), expand_composites=True):
            if tf.is_symbolic_tensor(tensor):
                self._kinds[id(tensor)] = self._taken[id(tensor)] = kind
                self._alive.append(tensor)

    def skip(
        self,
        graph: Any,
        unknown: Callable[[Any], Kind] = lambda tensor: FIXED,
        refuse: Callable[[Any], None] = lambda tensor: None,
    ) -> None:
        """Does not look at what a graph has so far.

        Args:
            graph: The graph.
            unknown: Returns what a tensor of it is that is not known here;
                by default it is fixed.
            refuse: Called with a tensor that is asked for and is made of the
                rows of another replica.
        """
        self._unknown, self._refuse = unknown, refuse
        while graph is not None:
            count = len(graph.get_operations())
            self._walked[id(graph)] = self._skipped[id(graph)] = count
            self._alive.append(graph)
            # The first step of several is in the graph around their loop.
            graph = getattr(graph, "outer_graph", None)

    def begin_as(self, other: RowProof) -> None:
        """Takes for known what another proof was given as known."""
        self.fixed, taken, skipped, alive, *functions = other.given
        self._known, self._unknown, self._refuse = functions
        self._kinds |= taken
        self._taken |= taken
        self._walked |= skipped
        self._skipped |= skipped
        self._alive += alive

    @property
    def given(self) -> tuple[Any, ...]:
        """What was given as known, and what keeps it alive."""
        return (
            *(self.fixed, self._taken, self._skipped, self._alive),
            *(self._known, self._unknown, self._refuse),
        )

    def of(self, tensor: Any) -> Kind:
        """Returns what is proven of a tensor."""
        kind = self.found(tensor)
        if kind == OTHERS:
            self._refuse(tensor)
        return kind

    def found(self, tensor: Any) -> Kind:
        """The same, of another replica's rows too."""
        if not tf.is_symbolic_tensor(tensor):
            return UNPROVEN if tf.executing_eagerly() else FIXED
        if id(tensor) not in self._kinds:
            # What is captured while a graph is walked stands before in it.
            walking = self.walking(tensor.graph)
            if walking is None:
                self.walk(tensor.graph)
            elif walking is not self:
                return walking.found(tensor)
        kind = self._kind(tensor)
        # Until they are put together again.
        return UNPROVEN if isinstance(kind, Spread) else kind

    def neighbours(self, shape: tf.Tensor, axis: int) -> int | None:
        """Returns how many neighbours on an axis belong to an example.

        Args:
            shape: The shape of what is asked about.
            axis: The axis.

        Returns:
            The number; None where it is not proven that the axis has rows.
        """
        kind = self.found(shape)
        of_rows = isinstance(kind, Sizes) and kind.lengths[axis] == ROWS
        return 1 if of_rows else None

    def walking(self, graph: Any) -> RowProof | None:
        """Returns which looks at a graph now: this proof, or one around it."""
        if id(graph) in self._under_way:
            return self
        return None if self._outer is None else self._outer.walking(graph)

    def _kind(self, tensor: Any) -> Kind:
        """What is known of a tensor that has been walked, or was skipped."""
        found = self._taken.get(id(tensor)) or self._known(tensor)
        if found is not None:
            return found
        found = self._kinds.get(id(tensor))
        if found is None:
            found = self._kinds[id(tensor)] = self._unknown(tensor)
        return found

    def walk(self, graph: Any) -> None:
        """Looks at what a graph has got since it was last looked at."""
        operations = graph.get_operations()
        self._under_way.add(id(graph))
        first = self._walked.get(id(graph), 0)
        for place, op in enumerate(operations[first:], first):
            before = self.writes_rows
            kinds = self._of(op)
            if self.is_of_others(graph, place):
                self.writes_rows = before
            for output, kind in zip(op.outputs, kinds, strict=True):
                self._kinds.setdefault(id(output), kind)
        self._under_way.discard(id(graph))
        self._walked[id(graph)] = len(operations)
        self._alive.append(graph)

    def leave_out(self, graph: Any, begin: int, end: int) -> None:
        """Does not look at what other replicas write.

        Args:
            graph: The graph of the step.
            begin: The first of their operations, by its number in the graph.
            end: The number after the last.
        """
        self._of_others.setdefault(id(graph), Turns()).add(begin, end)

    def is_of_others(self, graph: Any, place: int) -> bool:
        """Returns whether an operation was made in the turn of others.

        Args:
            graph: Its graph.
            place: Its number there.
        """
        turns = self._of_others.get(id(graph))
        return turns is not None and place in turns

    def _of(self, op: tf.Operation) -> Sequence[Kind]:
        """Returns the kinds of an operation's outputs."""
        if op.type == "Const":  # Of every two operations about one is.
            return [FIXED]
        count = len(op.outputs)
        kinds = [self._kind(each) for each in op.inputs]
        if op.type == "Placeholder":
            kinds = [self._of_captured(op)]
            return kinds * count
        if is_sum_over_replicas(op):
            # On one machine it is made of what the others had in their turn.
            self.unproven.append(op)
            return [UNPROVEN] * count
        if OTHERS in kinds:
            # Another replica's, traced where it had its turn.
            return [OTHERS] * count
        if op.type in READS or op.type in ("ResourceGather",):
            if not self.fixed(op.inputs[0] if op.inputs else op.outputs[0]):
                return [UNPROVEN] * count
        elif op.type not in (*CALLS, *BRANCHES, *LOOPS) and _writes(op):
            # What reads the variable later depends on the rows as well.
            self.writes_rows |= any(
                kind != FIXED
                for kind, given in zip(kinds, op.inputs, strict=True)
                if given.dtype != tf.resource
            )
            if not count:
                return []
            self.unproven.append(op)
            return [UNPROVEN] * count
        elif op.op_def.is_stateful and op.type not in (
            *CALLS,
            *CHECKS,
            *BRANCHES,
            *LOOPS,
            "CheckNumerics",
        ):
            self.writes_rows |= _writes(op)
            self.unproven.append(op)
            return [UNPROVEN] * count
        apart = self.walked_apart
        if op.type == "IdentityN" and not keeps_rows_apart(op, kinds, apart):
            self.unproven.append(op)
            return [UNPROVEN] * count
        if all(kind == FIXED for kind in kinds):
            return [FIXED] * count
        if op.type == "PlaceholderWithDefault":
            return kinds
        if UNPROVEN in kinds and op.type not in (
            *CALLS,
            *BRANCHES,
            *LOOPS,
            "IdentityN",
        ):
            self.writes_rows |= _writes(op)
            return [UNPROVEN] * count
        found = self._by_rule(op, kinds)
        if not isinstance(found, Kind):
            return found
        if found == UNPROVEN:
            self.unproven.append(op)
        return [found] * count

    def _of_captured(self, op: tf.Operation) -> Kind:
        for captured, inner in getattr(op.graph, "captures", ()):
            if inner is op.outputs[0] and tf.is_symbolic_tensor(captured):
                return (self._outer or self).found(captured)
        return FIXED

    def _by_rule(
        self, op: tf.Operation, kinds: list[Kind]
    ) -> Kind | list[Kind]:
        if op.type in CALLS:
            return self._called(op, op.get_attr("f"), kinds)
        if op.type in BRANCHES:
            return self._chosen(op, kinds)
        if op.type in LOOPS:
            return self._repeated(op, kinds)
        if op.type == "IdentityN":
            return list(kinds)
        if op.type in CHECKS:  # Text is made of what is printed.
            return [UNPROVEN] * len(op.outputs)
        return by_rule(op, kinds)

    def walked_apart(
        self, traced: Callable[[], Any], kinds: list[Kind]
    ) -> list[Kind]:
        """Returns what the outputs of another graph are, given its inputs."""
        inner = RowProof(fixed=self.fixed, outer=self)
        with proving(inner):
            graph = traced()
        for tensor, kind in zip(graph.inputs, kinds, strict=False):
            inner.take([tensor], kind)
        inner.walk(graph)
        return [inner.of(tensor) for tensor in graph.outputs]

    # Calls, branches and loops.

    def _called(
        self, op: tf.Operation, function: Any, kinds: list[Kind]
    ) -> Kind | list[Kind]:
        body = body_of(op, function)
        if body is None or len(body.inputs) != len(kinds):
            self.writes_rows |= _writes(op)
            return UNPROVEN
        inner = RowProof(fixed=self.fixed, outer=self)
        for tensor, kind in zip(body.inputs, kinds, strict=True):
            inner.take([tensor], kind)
        inner.walk(body)
        found = [inner.of(tensor) for tensor in body.outputs]
        self.unproven += inner.unproven
        self.writes_rows |= inner.writes_rows
        return found if len(found) == len(op.outputs) else UNPROVEN

    def _chosen(self, op: tf.Operation, kinds: list[Kind]) -> Kind | list[Kind]:
        if as_fixed(kinds[0]) != FIXED:
            self.writes_rows |= _writes(op)
            return UNPROVEN
        branches = [
            self._called(op, op.get_attr(name), kinds[1:])
            for name in ("then_branch", "else_branch")
        ]
        first, second = branches
        if isinstance(first, Kind) or isinstance(second, Kind):
            return UNPROVEN
        return [
            _either(one, other)
            for one, other in zip(first, second, strict=True)
        ]

    def _repeated(
        self, op: tf.Operation, kinds: list[Kind]
    ) -> Kind | list[Kind]:
        held = list(kinds)
        for _ in range(len(held) + 2):
            after = self._called(op, op.get_attr("body"), held)
            if isinstance(after, Kind):
                return UNPROVEN
            joined = [
                _joined(before, now, output)
                for before, now, output in zip(
                    held, after, op.outputs, strict=True
                )
            ]
            if joined == held:
                break
            held = joined
        else:
            self.writes_rows |= _writes(op)
            return UNPROVEN
        body = body_of(op, op.get_attr("cond"))
        asked = self._called_outputs(body, held)
        if asked == [FIXED]:
            return held
        self.writes_rows |= _writes(op)
        return UNPROVEN

    def _called_outputs(self, body: Any, kinds: list[Kind]) -> list[Kind]:
        if body is None or len(body.inputs) != len(kinds):
            return [UNPROVEN]
        inner = RowProof(fixed=self.fixed, outer=self)
        for tensor, kind in zip(body.inputs, kinds, strict=True):
            inner.take([tensor], kind)
        return [inner.of(tensor) for tensor in body.outputs]


def given_gradients(graph: Any, first: int = 0) -> Iterator[tf.Operation]:
    """Yields operations to which more flows back than their true gradient.

    An author gives it by `tf.custom_gradient`, and it is not proven to be
    linear in what comes to it, as true gradients are.

    Args:
        graph: The graph; the functions that it calls as well.
        first: The operation to begin with, by its number in the graph.
    """
    for op in graph.get_operations()[first:]:
        for function in functions_of(op):
            body = body_of(op, function)
            if body is not None:
                yield from given_gradients(body)
        if op.type == "IdentityN":
            alone = RowProof()
            alone.skip(op.graph)
            if not is_linear(op, alone.walked_apart):
                yield op


def _joined(before: Kind, after: Kind, output: tf.Tensor) -> Kind:
    """What a variable of a loop is that begins as one and goes on as another.

    A list is empty before something is put into it.
    """
    empty = before == FIXED and output.dtype == tf.variant
    if empty and isinstance(after, Rows) and after.listed:
        return after
    return _either(before, after)


def _either(one: Kind, other: Kind) -> Kind:
    """What is one or the other."""
    if one == other:
        return one
    same = as_fixed(one) == as_fixed(other) == FIXED
    return FIXED if same else UNPROVEN


def _writes(op: tf.Operation) -> bool:
    return any(resource is not None for resource in written_by(op))


@dataclasses.dataclass
class _Active(threading.local):
    """The proofs of what this thread is tracing."""

    proofs: list[RowProof] = dataclasses.field(default_factory=list)
    step: RowProof | None = None
    calls: list[Operations] = dataclasses.field(default_factory=list)


_active = _Active()


@contextlib.contextmanager
def recorded() -> Iterator[Operations]:
    """Yields the operations that this replica makes in a block."""
    made = Operations(tf.compat.v1.get_default_graph())
    _active.calls.append(made)
    try:
        yield made
    finally:
        _active.calls.pop()
        made.end()


@contextlib.contextmanager
def proving(proof: RowProof) -> Iterator[None]:
    """Lets what is traced in a block add to what a proof knows."""
    _active.proofs.append(proof)
    try:
        yield
    finally:
        _active.proofs.pop()


def active() -> list[RowProof]:
    """Returns the proofs of what is being traced, the innermost last."""
    return list(_active.proofs)


def leave_others() -> Callable[[], None]:
    """Lets what looks at operations leave out those of other replicas.

    Call it where others have their turn, and what it returns afterwards.
    """
    if tf.executing_eagerly():
        return lambda: None
    graph = tf.compat.v1.get_default_graph()
    step = [] if _active.step is None else [_active.step]
    under_way: list[RowProof | Operations]
    under_way = [*active(), *step, *_active.calls]
    begin = len(graph.get_operations())
    for each in under_way:
        each.leave_out(graph, begin, sys.maxsize)  # If it does not come back.

    def back() -> None:
        end = len(graph.get_operations())
        for each in under_way:
            each.leave_out(graph, begin, end)

    return back


@contextlib.contextmanager
def noting(proof: RowProof) -> Iterator[None]:
    """Lets a proof of a whole step know what is noted in a block."""
    before, _active.step = _active.step, proof
    try:
        yield
    finally:
        _active.step = before


def note(tensor: tf.Tensor, kind: Kind) -> tf.Tensor:
    """Notes what a tensor is for the proofs under way; returns it."""
    if _active.step is not None:
        _active.step.take([tensor], kind)
    for proof in _active.proofs:
        proof.take([tensor], kind)
    return tensor


def note_drawn(
    tensor: tf.Tensor, shape: tf.Tensor, axis: int, block: int | None
) -> bool:
    """Notes that each example has numbers of its own.

    Args:
        tensor: What was drawn.
        shape: Its shape, as it was asked for.
        axis: That of the rows.
        block: How many neighbours on it belong to an example; None if the
            proofs under way have to know.

    Returns:
        Whether that is proven.
    """
    step = [] if _active.step is None else [_active.step]
    for proof in [*step, *_active.proofs]:
        block = block or proof.neighbours(shape, axis)
    if block is not None:
        note(tensor, Rows(axis=axis, block=block))
    return block is not None


def axis_of_rows(tensor: tf.Tensor) -> int | None:
    """Returns the axis of a tensor that has a row for each example.

    None where the proofs under way do not know it.
    """
    step = [] if _active.step is None else [_active.step]
    for proof in [*step, *_active.proofs]:
        kind = proof.found(tensor)
        if isinstance(kind, Rows) and kind.block == 1 and not kind.listed:
            return kind.axis
    return None


def note_same(tensor: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Notes for the proofs under way that a tensor is what another is.

    Args:
        tensor: What replicas that have the same rows made of it together.
        source: What each of them gave, with the rows on the same axis.

    Returns:
        The tensor.
    """
    step = [] if _active.step is None else [_active.step]
    for proof in [*step, *_active.proofs]:
        kind = proof.found(source)
        if kind == FIXED or isinstance(kind, Rows):
            proof.take([tensor], kind)
    return tensor
