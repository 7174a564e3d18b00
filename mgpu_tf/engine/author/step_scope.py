"""The scope in which a replica computes a step: what is read, what is written.

    with StepScope(model, given, tape) as scope:
        outputs = model(x)                       # writes nothing
    scope.gradients(tape, loss, weights, values)

A weight that no replica stores whole is gathered when it is read.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare, sharing
from mgpu_tf.engine.author.state import ReplicaState, Writes
from mgpu_tf.engine.exchange.composites import composites_of
from mgpu_tf.engine.inlined import check_lent, is_within_function
from mgpu_tf.engine.random_rows import RowScope, entered_again
from mgpu_tf.engine.row_proof import (
    FIXED,
    OTHERS,
    UNPROVEN,
    Kind,
    RowProof,
    Rows,
    acts,
    as_fixed,
    given_gradients,
)
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError

Gather = Callable[[keras.Variable], tf.Tensor | None]
# A variable, what it held before the step, and the kind of what it holds now.
Part = tuple[keras.Variable, tf.Tensor, Any]


class Places(NamedTuple):
    """Where the gradients of a weight go that is stored in parts.

    They hold no value of the weight: gradients have shapes of their own.

    Attributes:
        part: Of that of this replica's part, summed over replicas.
        whole: Of what is not summed yet: rows that were looked up, or all.
    """

    part: tf.Tensor
    whole: tf.Tensor


class StepScope(keras.StatelessScope):
    """A scope that lets layers assign their own variables, as in Keras.

    A weight that is assigned and then read has its gradient where it is read;
    none flows back into what was assigned, to a weight or to other state.

    Args:
        model: The model.
        given: Values that variables have in place of their own.
        tape: Records the step, where it is one of training.
        gather: Returns the value of a weight that is stored in parts, None
            for other variables.
        sources: See below.
        join: As `gather`, but the value is made of a source, which has its
            gradient.
        direct: Takes what is written to variables that are written in place
            wherever it is; returns whether it has.
        owners: Know the rows of all replicas of this process.
        place: Which part of the global batch this replica has.

    Attributes:
        state: What it may write.
        proof: Knows what layers have made, for proofs that meet it.
        read_aside: Called where something of all rows reads what is of the
            rows of this replica, with its name and the tensor.
        inline: Called with what a `tf.function` of the author's reads of the
            graph of the step, and would keep; and with what it writes, which
            it would not write when it is called again.
        draws: In which random numbers are drawn; None where replicas draw
            their own.
        sources: What gradients of weights are taken from, by the identity of
            the weight, where layers are recomputed: tensors, or `Places`.
        share: What this replica has of the batch.
        order: In which order layers exchange weights and gradients.
        busy: Whether a layer that is recomputed is being called.
        seen: The weights that were read since it was set to none.
        reads: How often each was, by its identity. What is read in a graph
            of its own, as of a loop, counts as several times.
        narrow: Those of which a value of a smaller type was lent than is
            read.
        agreed: The variables to which all replicas have written the same, by
            identity.
        known_losses: What layers have added that is a mean over the rows, by
            identity.
        global_losses: The same, where they are of the rows of all.
        added_as: What known losses were when layers added them, by identity.
        has_all_rows: Whether what runs has the rows of all replicas.
        graph: In which the step is traced.
        begun: How many operations that had before.
        is_over: Whether its forward pass is traced.
        kinds: What tensors are that layers have made, where it is not one row
            for each example; by identity, with the tensor.
        whole: The same of tensors that are made of the rows of all replicas.
        has_rows: Whether what layers return that run eagerly has rows, by
            identity, with the tensor.
        within_graph: Whether a functional model is being called.
        within_trusted: Whether a layer is that is known to keep rows apart.
        added: The variables of metrics to which replicas have added what adds
            up, by identity.
        parts: The state that layers have written of the rows of this replica,
            by identity, with what it was before and what is proven of what
            it is now.
        read_part: Called where an author's code reads a metric of which this
            replica has a part; None where all replicas have all of it.
        within: What was written within a function, a branch or a loop of
            TensorFlow, where nothing can be kept; by identity.
        written_in_place: How often something was written to a variable
            itself, which cannot be undone.
    """

    state: ReplicaState
    draws: RowScope | None = None
    share: BatchShare

    def __init__(
        self,
        model: keras.Model,
        given: Writes,
        tape: tf.GradientTape | None,
        gather: Gather | None = None,
        sources: dict[int, Any] | None = None,
        join: Gather | None = None,
        direct: Callable[[keras.Variable, Any], bool] = lambda v, value: False,
        owners: Owners | None = None,
        place: int = 0,
    ) -> None:
        super().__init__(given, collect_losses=True)
        self._direct = direct
        self._owners = Owners() if owners is None else owners
        self._known = lambda tensor: self._owners.kind(tensor, place)
        self.proof = RowProof(known=self._known)
        self.read_aside: Callable[[str, tf.Tensor], None] | None = None
        self.inline: Callable[[keras.Variable], None] = lambda variable: None
        self.read_part: Callable[[keras.Variable], None] | None = None
        # The metric that is being updated, which adds to its part.
        self._updated: frozenset[int] = frozenset()
        self.parts: dict[int, Part] = {}
        self.within: dict[int, keras.Variable] = {}
        self.written_in_place = 0
        self.sources = sources or {}
        self._join = join
        self.order: Any = None
        self.busy = False
        self.seen: dict[int, keras.Variable] = {}
        self.reads: collections.Counter[int] = collections.Counter()
        self.narrow: list[keras.Variable] = []
        self.agreed: set[int] = set()
        self.added: set[int] = set()
        self.has_all_rows = False
        self.graph = tf.compat.v1.get_default_graph()
        self.begun = self.known_operations()
        self.is_over = False
        self.kinds: dict[int, tuple[tf.Tensor, Any]] = {}
        self.whole: dict[int, tuple[tf.Tensor, Any]] = {}
        self.has_rows: dict[int, tuple[Any, bool]] = {}
        self.within_graph = False
        self.within_trusted = False
        self.known_losses: dict[int, tf.Tensor] = {}
        self.added_as: dict[int, Any] = {}
        self.global_losses: dict[int, tf.Tensor] = {}
        self._gather = gather
        self._weights = {id(v) for v in model.trainable_variables}
        self._tape = tape
        self._assigned: dict[int, list[tf.Tensor]] = {}
        self._written: dict[int, keras.Variable] = {}
        self._reading: set[int] | None = None

    def __exit__(self, *arguments: Any) -> None:
        """Ends the forward pass."""
        self.is_over = True
        super().__exit__(*arguments)

    @property
    def is_here(self) -> bool:
        """Whether what runs is in the graph of the step itself."""
        here = tf.compat.v1.get_default_graph()
        return tf.executing_eagerly() or here is self.graph

    @property
    def trains(self) -> bool:
        """Whether the step is one of training."""
        return self._tape is not None

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value of a variable in this step, None for its own.

        Keras calls it wherever code reads a variable.
        """
        if (
            self.read_part is not None
            and not self.is_over
            and id(variable) not in self._updated
            and self.state.is_metric(variable)
        ):
            self.read_part(variable)
        if self._reading is not None:
            self._reading.add(id(variable))
        value = super().get_current_value(variable)
        if id(variable) in self._weights:
            self._note_read(variable, value)
        if value is None and self._join is not None:
            value = self._join(variable)
            if value is not None:
                self.take_alike([value])
                self.state_mapping[id(variable)] = value
        if value is None and self._gather is not None:
            value = self._gather(variable)
            if value is not None:
                self.take_alike([value])
                self._watch(variable, value)
                self.state_mapping[id(variable)] = value
        if value is None and keras_internals.is_split(variable):
            value = self._read_outside(variable)
        elif value is not None and is_within_function(self.graph):
            self.inline(variable)
        if value is not None and id(variable) in self._weights:
            check_lent(variable)
        return value

    @contextlib.contextmanager
    def updating(self, variables: Iterable[keras.Variable]) -> Iterator[None]:
        """Lets a block read parts of metrics, and add to them.

        Args:
            variables: Those of the metrics that it updates.
        """
        before = self._updated
        self._updated |= frozenset(map(id, variables))
        try:
            yield
        finally:
            self._updated = before

    @contextlib.contextmanager
    def reading(self) -> Iterator[set[int]]:
        """Yields the identities of the variables that a block reads."""
        found: set[int] = set()
        self._reading = found
        try:
            yield found
        finally:
            self._reading = None

    def _read_outside(self, variable: keras.Variable) -> tf.Tensor | None:
        """Reads parts of other devices, which no function of XLA does."""
        if is_within_function(self.graph):
            self.inline(variable)
        if not keras_internals.is_within_compiled_convolution():
            return None
        with tf.compat.v1.get_default_graph().outer_graph.as_default():
            return tf.convert_to_tensor(keras_internals.stored(variable))

    def _note_read(
        self, variable: keras.Variable, value: tf.Tensor | None
    ) -> None:
        self.seen[id(variable)] = variable
        here = tf.compat.v1.get_default_graph()
        graph = getattr(value, "graph", here)
        inside = tf.is_symbolic_tensor(value) and graph is not here
        self.reads[id(variable)] += 2 if inside else 1
        if value is not None:
            # A type is that of a read, where layers cast weights.
            read = tf.as_dtype(variable.dtype)
            if read.is_floating and read.size > value.dtype.size:
                self.narrow.append(variable)

    def new_proof(self) -> RowProof:
        """Returns a proof of what is traced from here on."""
        proof = RowProof(known=self._known)
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            proof.skip(graph, self.proof.of, refuse_others)
        return proof

    def known_operations(self) -> int:
        """Returns how many operations are traced so far."""
        if tf.executing_eagerly():
            return 0
        return len(tf.compat.v1.get_default_graph().get_operations())

    def check_given(self, name: str, since: int, made: Any) -> None:
        """Refuses what is not the same on all replicas.

        Args:
            name: Of what was computed.
            since: From `known_operations`, before that.
            made: A structure of what it made.

        Raises:
            ConfigurationError: It reads something of this replica's rows, or
                a gradient is not the same on all of them.
            TraceAgain: It will not in another trace.
        """
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        self.check_gradients(name, graph, since)
        if self.read_aside is None:
            return
        operations = graph.get_operations()[since:]
        new = {id(op): place for place, op in enumerate(operations, since)}
        # Each with whether what makes it was computed in the turn of others.
        left = [
            (leaf, False)
            for leaf in tf.nest.flatten(made, expand_composites=True)
            if tf.is_symbolic_tensor(leaf)
        ]
        seen: set[tuple[int, bool]] = set()
        while left:
            tensor, joined = left.pop()
            if (id(tensor), joined) in seen:
                continue
            seen.add((id(tensor), joined))
            if self._known(tensor) == FIXED:
                continue
            place = new.get(id(tensor.op))
            if place is not None:
                joined |= self.proof.is_of_others(graph, place)
                left += [(each, joined) for each in tensor.op.inputs]
            elif joined and self.proof.found(tensor) == OTHERS:
                continue  # Of what another replica has checked itself.
            elif self.proof.of(tensor) != FIXED:
                self.read_aside(name, tensor)

    def check_gradients(self, name: str, graph: Any, since: int = 0) -> None:
        """Refuses gradients that replicas take of parts of what flows back.

        Args:
            name: Of what was computed from the rows of all replicas.
            graph: Where it was traced.
            since: The first of its operations, by its number in the graph.

        Raises:
            ConfigurationError: There is one.
        """
        if self.trains and any(given_gradients(graph, since)):
            raise ConfigurationError(
                "On several replicas the gradient of a tf.custom_gradient must "
                "be one of each row, or linear in what flows back to it. "
                f"Received: {name}, which has another one, such as one that is "
                "divided by its norm. Train by a train_step of your own, which "
                "has the rows of all replicas."
            )

    def lend(self, variables: list[keras.Variable], values: Any) -> None:
        """Sets the values of weights that a layer reads."""
        for variable, value in zip(variables, values, strict=True):
            self.state_mapping[id(variable)] = value

    def may_try(self, author: Any) -> bool:
        """Returns whether code of the author's may be tried and given up.

        That is not so where it runs eagerly, nor where a trace has found that
        it does more than return something.

        Args:
            author: A loss, a metric or a model.
        """
        acting = self.state.acting
        return not tf.executing_eagerly() and id(author) not in acting

    def give_up(self, mark: tuple[Any, ...], author: Any) -> None:
        """Forgets what code of the author's did that is computed otherwise.

        Args:
            mark: Of before.
            author: As for `may_try`, which is false from now on where that
                code cannot be forgotten.

        Raises:
            TraceAgain: It cannot: another trace does not try it.
        """
        if self.acts_since(mark):
            self.state.acting.add(id(author))
        self.reset(mark)

    def acts_since(self, mark: tuple[Any, ...]) -> bool:
        """Returns whether what was traced since a mark cannot be forgotten.

        It stays in the graph, and writes to a variable of TensorFlow's, prints
        or calls Python when that runs.
        """
        if tf.executing_eagerly():
            return False
        return acts(tf.compat.v1.get_default_graph(), mark[-1])

    def mark(self) -> tuple[Any, ...]:
        """Returns what `reset` needs to undo all that follows."""
        assigned = {key: list(each) for key, each in self._assigned.items()}
        return (
            dict(self.state_mapping),
            dict(self._written),
            assigned,
            len(self.losses),
            dict(self.parts),
            self.written_in_place,
            self.known_operations(),
        )

    def reset(self, mark: tuple[Any, ...]) -> None:
        """Forgets what was written since a mark.

        Whoever calls it has noted how the next trace does without that.

        Raises:
            ConfigurationError: Something was written in place.
            TraceAgain: What was traced cannot be forgotten.
        """
        mapping, written, assigned, losses, parts, in_place, _ = mark
        if self.written_in_place > in_place:
            raise ConfigurationError(
                "What is written within tf.function, tf.cond or loops of "
                "TensorFlow is written by a layer that is called once in a "
                "step. Received: a step that calls it again with the rows of "
                "all replicas. Write it outside of such functions."
            )
        if self.acts_since(mark):
            raise TraceAgain
        self.state_mapping, self._written = dict(mapping), dict(written)
        self.parts = dict(parts)
        self._assigned = {key: list(each) for key, each in assigned.items()}
        del self.losses[losses:]

    def written_since(self, mark: tuple[Any, ...]) -> list[keras.Variable]:
        """Returns the variables that were written since a mark."""
        before = mark[0]
        return [
            variable
            for key, variable in self._written.items()
            if self.state_mapping[key] is not before.get(key)
        ]

    @contextlib.contextmanager
    def of_all_rows(self) -> Iterator[None]:
        """Says that what runs in the block has the rows of all replicas."""
        self.has_all_rows = True
        try:
            # It has no share of a batch, and draws for all of it.
            with sharing(None), entered_again(None):
                yield
        finally:
            self.has_all_rows = False

    def hold(self, variable: keras.Variable) -> tf.Tensor:
        """Returns what a variable holds, which is read once from now on."""
        value = tf.identity(self.value(variable))
        self.state_mapping[id(variable)] = value
        return value

    def take_alike(self, tensors: list[tf.Tensor]) -> None:
        """Notes tensors that are the same on all replicas."""
        self._owners.note(tensors, None)

    def is_alike(self, indices: tf.Tensor) -> bool:
        """Returns whether indices of a lookup are the same on all replicas.

        Without a graph they are compared later, by `RowGather`.
        """
        if not tf.is_symbolic_tensor(indices):
            return True
        return as_fixed(self.proof.of(indices)) == FIXED

    def agree(self, variable: keras.Variable) -> None:
        """Notes that what all replicas have written is the same."""
        self.parts.pop(id(variable), None)
        self.agreed.add(id(variable))
        self.take_alike([self.state_mapping[id(variable)]])

    def has_added(self, mark: tuple[Any, ...]) -> bool:
        """Returns whether a loss was added, or a weight assigned, since."""
        assigned, losses = mark[2:4]
        return len(self.losses) > losses or assigned != self._assigned

    def _watch(self, variable: keras.Variable, value: tf.Tensor) -> None:
        if self._tape is not None and id(variable) in self._weights:
            self._tape.watch(value)
            self._assigned.setdefault(id(variable), []).append(value)

    def is_written(self, variable: keras.Variable) -> bool:
        """Returns whether the step has assigned something to a variable."""
        return id(variable) in self._written

    def check_known(self, variables: Iterable[keras.Variable]) -> None:
        """Refuses writes to variables that nobody would keep.

        Args:
            variables: Those of the model and of its metrics.

        Raises:
            ConfigurationError: The step writes to another.
        """
        known = set(map(id, variables))
        for variable in [*self._written.values(), *self.within.values()]:
            if id(variable) not in known:
                raise ConfigurationError(
                    "A variable that a step writes belongs to the model, so "
                    "that a run can resume. Received: "
                    f"{variable.path!r}, which no layer, metric or loss of "
                    "the model has as an attribute. Make it one."
                )

    def value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns what a variable holds at the end of the step."""
        with self.updating([variable]):
            value = self.get_current_value(variable)
            return tf.convert_to_tensor(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes what is assigned to a variable."""
        variable, value = update
        if self._direct(variable, value):
            self.written_in_place += 1
            return
        if not self.is_here:
            self.within[id(variable)] = variable
            if is_within_function(self.graph):
                self.inline(variable)
            return
        self._written[id(variable)] = variable
        self.agreed.discard(id(variable))
        # What is read afterwards is the variable, not what was assigned.
        value = tf.stop_gradient(value)
        if self._tape is not None:
            value = self._assigned_to(variable, value)
        super().add_update((variable, value))

    def _assigned_to(
        self, variable: keras.Variable, value: tf.Tensor
    ) -> tf.Tensor:
        """Returns what is assigned, with the gradient of the variable."""
        trained = id(variable) in self._weights
        joined = self._join(variable) if trained and self._join else None
        if joined is None:
            self._watch(variable, value)
            return value
        # The gradient flows back to the parts of the weight.
        return value + (joined - tf.stop_gradient(joined))

    def gradients(
        self,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        variables: list[keras.Variable],
        weights: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of weights, wherever they were read.

        Args:
            tape: Has recorded the step.
            loss: The loss.
            variables: The weights.
            weights: What they were at the beginning, in the same order; of
                some the `Places` of their gradients.

        Returns:
            Of each weight this replica's gradient, and the sum over replicas
            of the gradient of its part; None where there is none.
        """
        assigned = [self._assigned.get(id(v), []) for v in variables]
        found, of_assigned = tape.gradient(loss, (weights, assigned))
        placed = [
            each if isinstance(each, Places) else Places(None, each)
            for each in found
        ]
        whole = [
            _total([each.whole, *others])
            for each, others in zip(placed, of_assigned, strict=True)
        ]
        return whole, [each.part for each in placed]


class Reading(keras.StatelessScope):
    """Notes which variables are read before something is assigned to them.

    Attributes:
        read: Their identities.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value of a variable here, None for its own."""
        value = super().get_current_value(variable)
        if value is None:
            self.read.add(id(variable))
        return value


class Replay(keras.StatelessScope):
    """The scope in which a layer is computed again.

    Args:
        values: What variables had when it was computed first, and weights what
            gradients are taken from, by identity.
        parts: The same of weights that a replica computes with a part of.

    Attributes:
        sources: The parts.
    """

    def __init__(
        self, values: dict[int, tf.Tensor], parts: dict[int, tf.Tensor]
    ) -> None:
        super().__init__()
        self.state_mapping = values
        self.sources: dict[int, Any] = parts

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes what is assigned to a variable, as the first scope does."""
        variable, value = update
        super().add_update((variable, tf.stop_gradient(value)))


def _total(gradients: list[Any]) -> Any:
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(each, tf.IndexedSlices) for each in present):
        # As TensorFlow adds up: an optimizer sees each row of a lookup.
        return tf.IndexedSlices(
            tf.concat([each.values for each in present], 0),
            tf.concat([tf.cast(each.indices, tf.int64) for each in present], 0),
            present[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in present])


class Owners:
    """Knows what the replicas of a process have, who are traced in turns."""

    def __init__(self) -> None:
        # Ids of tensors do not come again while their graph lives.
        self._places: weakref.WeakKeyDictionary[
            Any, dict[int, tuple[int | None, bool]]
        ] = weakref.WeakKeyDictionary()

    def note(self, tensors: Any, place: int | None) -> None:
        """Notes what some tensors are.

        Args:
            tensors: A structure of tensors.
            place: Of which part of the global batch they are the rows; None
                for what is the same on all replicas.
        """
        for leaf in tf.nest.flatten(tensors):
            dense = isinstance(leaf, tf.Tensor)
            for tensor in tf.nest.flatten(leaf, expand_composites=True):
                if tf.is_symbolic_tensor(tensor):
                    known = self._places.setdefault(tensor.graph, {})
                    known[id(tensor)] = place, dense

    def kind(self, tensor: Any, place: int) -> Kind | None:
        """Returns what a tensor is on a replica; None where it is not noted.

        Args:
            tensor: The tensor.
            place: Which part of the global batch the replica has.
        """
        known = self._places.get(tensor.graph, {})
        if id(tensor) not in known:
            return None
        owner, dense = known[id(tensor)]
        if owner is None:
            return FIXED
        if owner != place:
            return OTHERS
        return Rows() if dense and tensor.shape.rank else UNPROVEN


def refuse_others(tensor: tf.Tensor) -> None:
    """Refuses that a replica reads what another one has made.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        "Between the parts of a step in which replicas exchange values, rows "
        "go by arguments, outputs and add_loss, and not by attributes of an "
        f"object that all replicas share. Received: {tensor.name!r}, made of "
        "the rows of another replica. Return it from the call of the model."
    )


def is_read_inside(variables: Iterable[keras.Variable]) -> bool:
    """Returns whether a step reads weights within a branch or a loop.

    Args:
        variables: The weights.

    Raises:
        TraceAgain: It reads them within a `tf.function` of the author's, which
            is inlined in another trace.
    """
    scope = keras_internals.stateless_scope()
    if not isinstance(scope, StepScope) or scope.is_here:
        return False
    if is_within_function(scope.graph):
        for variable in variables:
            scope.inline(variable)
    return True


def leaves_of(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors of a structure, with their masks and logits."""
    leaves = [
        leaf
        for leaf in tf.nest.flatten(structure, expand_composites=True)
        if isinstance(leaf, tf.Tensor)
    ]
    logits = [
        part
        for leaf in leaves
        for part in keras_internals.taken_apart(leaf)[0]
        if part is not leaf
    ]
    masks = map(keras_internals.mask_of, leaves)
    return [*leaves, *logits, *(mask for mask in masks if mask is not None)]


def proof_of(rows: Any) -> RowProof:
    """Returns what proves things of values that are made of some rows."""
    scope = keras_internals.stateless_scope()
    if isinstance(scope, StepScope):
        proof = scope.new_proof()
    else:
        proof = RowProof()
        if not tf.executing_eagerly():
            proof.skip(tf.compat.v1.get_default_graph())
    for leaf in leaves_of(rows):
        if leaf.shape.rank and not is_alike(leaf):
            proof.take([leaf], Rows())
    proof.take(composites_of(rows), UNPROVEN)
    return proof


def is_alike(leaf: tf.Tensor) -> bool:
    """Whether what a model returns is the same on all replicas.

    It has no rows of theirs then, such as a weight or a mean over the batch.
    """
    scope = keras_internals.stateless_scope()
    if not isinstance(scope, StepScope):
        return False
    if not tf.is_symbolic_tensor(leaf):
        return not scope.has_rows.get(id(leaf), (leaf, True))[1]
    return scope.proof.found(leaf) == FIXED
