"""Values that are functions of sums over the rows.

    masked loss = sum(losses * mask) / sum(mask)

Such a value is neither a sum nor a mean over the rows, but replicas need no
rows of each other for it: it is enough that they add up the two sums. Where an
operation takes a sum in a way that is not linear, the sum of all replicas is
taken for it, which depends on no cut, and the proof goes on from there. So
`x / sum(x)` is made of rows again, and its sums are added up in turn.

    proof = SumProof(plain)                 plain: what is known of the rows
    proof.of(value)                         FIXED
    (value,) = proof.computed([value], added_up)

The operations that follow a sum are computed again, of the sum of all.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mgpu_tf.engine.row_proof.kinds import (
    FIXED,
    MEAN,
    SUM,
    UNPROVEN,
    Kind,
    Sizes,
)
from mgpu_tf.engine.row_proof.proof import (
    CALLS,
    CHECKS,
    RowProof,
    body_of,
)

# Sums of more elements than this may be larger than the rows.
MOST_ELEMENTS = 1 << 14

# Adds up values over replicas: tensors, and what each is over the rows.
AddedUp = Callable[[list[tuple[tf.Tensor, Kind]]], list[tf.Tensor]]


class SumProof(RowProof):
    """What is proven of tensors where sums over the rows may be added up.

    Args:
        known: Whose rows and other known tensors are known here.
        outer: The proof of the graph around this one.

    Attributes:
        places: By an operation, of which of its inputs it takes the sums of
            all replicas.
        moved: The tensors that these sums have changed, by identity.
        bodies: By a call, what is proven of the function.
    """

    def __init__(self, known: RowProof, outer: RowProof | None = None) -> None:
        super().__init__(outer=outer)
        self.begin_as(known)
        self.places: dict[int, tuple[int, ...]] = {}
        self.moved: set[int] = set()
        self.bodies: dict[int, SumProof] = {}

    def _of(self, op: tf.Operation) -> Sequence[Kind]:
        found = super()._of(op)
        # What is known stays as it is, whatever sums it was made of.
        if all(id(each) in self._taken for each in op.outputs):
            return found
        kinds = [self._kind(each) for each in op.inputs]
        if UNPROVEN in found and UNPROVEN not in kinds:
            places = tuple(
                place
                for place, kind in enumerate(kinds)
                if _may_be_added_up(op.inputs[place], kind)
            )
            again = self._settled(op, kinds, places) if places else found
            if UNPROVEN not in again:
                found, self.places[_key(op)] = again, places
        if self._takes_moved(op) or {_key(op)} & {*self.places, *self.bodies}:
            if _key(op) not in self.bodies and not _is_computable(op):
                self.places.pop(_key(op), None)
                return [UNPROVEN] * len(found)
            self.moved |= {id(each) for each in op.outputs}
        return found

    def _settled(
        self, op: tf.Operation, kinds: list[Kind], places: tuple[int, ...]
    ) -> Sequence[Kind]:
        """What an operation makes of sums of all replicas."""
        settled = [
            FIXED if place in places else kind
            for place, kind in enumerate(kinds)
        ]
        if all(kind == FIXED for kind in settled):
            return [FIXED] * len(op.outputs)
        found = self._by_rule(op, settled)
        return [found] * len(op.outputs) if isinstance(found, Kind) else found

    def _by_rule(
        self, op: tf.Operation, kinds: list[Kind]
    ) -> Kind | list[Kind]:
        found = super()._by_rule(op, kinds)
        if op.type not in CALLS:
            return found
        plain = [found] if isinstance(found, Kind) else found
        if UNPROVEN not in plain and not self._takes_moved(op):
            return found
        return self._called_of_all(op, kinds)

    def _called_of_all(
        self, op: tf.Operation, kinds: list[Kind]
    ) -> Kind | list[Kind]:
        """What a call gives whose function takes sums of all replicas."""
        graph = body_of(op, op.get_attr("f"))
        if graph is None or len(graph.inputs) != len(kinds):
            return UNPROVEN
        if not _is_computable(op):
            return UNPROVEN
        inner = SumProof(RowProof(fixed=self.fixed), outer=self)
        for tensor, kind in zip(graph.inputs, kinds, strict=True):
            inner.take([tensor], kind)
        found = [inner.of(tensor) for tensor in graph.outputs]
        if len(found) != len(op.outputs):
            return UNPROVEN
        self.bodies[_key(op)] = inner
        return found

    def _of_captured(self, op: tf.Operation) -> Kind:
        captured = {id(b): a for a, b in getattr(op.graph, "captures", ())}
        outer = captured.get(id(op.outputs[0]))
        kind = super()._of_captured(op)
        return UNPROVEN if id(outer) in self.moved else kind

    def _takes_moved(self, op: tf.Operation) -> bool:
        return any(id(each) in self.moved for each in op.inputs)

    def computed(
        self, values: Sequence[tf.Tensor], added_up: AddedUp
    ) -> list[tf.Tensor]:
        """Returns values, computed from the sums of all replicas.

        Args:
            values: Tensors of one graph, none of them unproven.
            added_up: Adds up sums over replicas. Those that do not depend on
                each other are given at once.
        """
        for tensor in values:
            self.of(tensor)
        again = _Computed(self, values)
        while True:
            asked: list[_Asked] = []
            again.go_on(asked)
            if not asked:
                return [again.value(tensor) for tensor in values]
            sums = added_up([(each.value, each.kind) for each in asked])
            for each, total in zip(asked, sums, strict=True):
                each.by.totals[each.key] = total


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A sum that is to be added up."""

    value: tf.Tensor
    kind: Kind
    by: _Computed
    key: int


class _Computed:
    """A graph that is computed again as far as sums have changed it.

    Args:
        proof: Knows what has changed.
        values: What is wanted.
        given: Values of the inputs of a function, by identity, of which all
            is computed again; None for a graph that has been computed.

    Attributes:
        totals: The sums of all replicas, by the identity of their part.
    """

    def __init__(
        self,
        proof: SumProof,
        values: Sequence[tf.Tensor],
        given: dict[int, tf.Tensor] | None = None,
    ) -> None:
        self._proof = proof
        self._now: dict[int, Any] = dict(given or {})
        self._whole = given is not None
        self._called: dict[int, tuple[_Computed, list[tf.Tensor]]] = {}
        self.totals: dict[int, tf.Tensor] = {}
        wanted = {id(tensor) for tensor in values}
        graphs = [v.graph for v in values if tf.is_symbolic_tensor(v)]
        self._operations: list[tf.Operation] = []
        for op in reversed(graphs[0].get_operations() if graphs else []):
            needed = any(id(each) in wanted for each in op.outputs)
            if needed and self._is_changed(op):
                wanted |= {id(each) for each in op.inputs}
                self._operations.insert(0, op)

    def _is_changed(self, op: tf.Operation) -> bool:
        if self._whole:
            return op.type != "Placeholder"
        return any(id(each) in self._proof.moved for each in op.outputs)

    def value(self, tensor: tf.Tensor) -> Any:
        """Returns what a tensor is now."""
        return self._now.get(id(tensor), tensor)

    def has(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Returns whether some tensors are what they are to be."""
        return all(
            id(each) in self._now or not self._is_changed(each.op)
            for each in tensors
            if tf.is_symbolic_tensor(each)
        )

    def go_on(self, asked: list[_Asked]) -> None:
        """Computes what can be, and asks for the sums that are lacking."""
        for op in self._operations:
            if self.has(op.outputs) or not self.has(op.inputs):
                continue
            places = self._proof.places.get(_key(op), ())
            sums = {id(op.inputs[place]): place for place in places}
            lacking = sums.keys() - self.totals.keys()
            known = {each.key for each in asked}
            for key in sorted(lacking - known, key=sums.__getitem__):
                tensor = op.inputs[sums[key]]
                kind = self._proof.of(tensor)
                asked.append(_Asked(self.value(tensor), kind, self, key))
            if lacking:
                continue
            given = [
                self.totals[id(each)] if place in places else self.value(each)
                for place, each in enumerate(op.inputs)
            ]
            if op.type in CALLS:
                outputs = self._of_function(op, given, asked)
            else:
                outputs = _computed_again(op, given)
            for tensor, now in zip(op.outputs, outputs, strict=False):
                self._now[id(tensor)] = now

    def _of_function(
        self, op: tf.Operation, given: list[Any], asked: list[_Asked]
    ) -> list[Any]:
        """Computes the body of a function in place of its call."""
        if _key(op) not in self._called:
            graph = body_of(op, op.get_attr("f"))
            proof = self._proof.bodies.get(_key(op)) or SumProof(RowProof())
            values = dict(zip(map(id, graph.inputs), given, strict=True))
            computed = _Computed(proof, graph.outputs, values)
            self._called[_key(op)] = computed, graph.outputs
        computed, outputs = self._called[_key(op)]
        computed.go_on(asked)
        if not computed.has(outputs):
            return []
        return [computed.value(tensor) for tensor in outputs]


def _key(op: tf.Operation) -> int:
    return id(op.outputs[0])


def _may_be_added_up(tensor: tf.Tensor, kind: Kind) -> bool:
    size = tensor.shape.num_elements()
    if kind in (SUM, MEAN):
        return size is not None and size <= MOST_ELEMENTS
    # A number of rows by which something is divided, and no length.
    counted = isinstance(kind, Sizes) and kind.scalar
    return counted and tensor.dtype.is_floating


def _is_computable(op: tf.Operation) -> bool:
    """Whether an operation can be computed again with its gradient."""
    if op.type in CALLS:
        graph = body_of(op, op.get_attr("f"))
        return graph is not None and all(
            # What is read again of a variable has no gradient on its tape.
            each.type in ("Placeholder", "Const", *CHECKS)
            or _is_computable(each)
            for each in graph.get_operations()
        )
    attributes = op.node_def.attr
    return (
        hasattr(tf.raw_ops, op.type)
        and not op.op_def.is_stateful
        and "_gradient_op_type" not in attributes
        and not any(a.type.endswith("func)") for a in op.op_def.attr)
        and not any(a.type == "func" for a in op.op_def.attr)
    )


def _computed_again(op: tf.Operation, given: list[Any]) -> list[Any]:
    """Makes an operation anew of other inputs."""
    if op.type == "Const":
        value = tf.get_static_value(op.outputs[0])
        return [tf.constant(value, op.outputs[0].dtype)]
    function = getattr(tf.raw_ops, op.type)
    inputs: dict[str, Any] = {}
    inferred = set()
    left = list(given)
    for argument in op.op_def.input_arg:
        number = argument.number_attr or argument.type_list_attr
        inferred |= {argument.type_attr, number}
        if number:
            count = op.get_attr(number)
            count = count if isinstance(count, int) else len(count)
            inputs[argument.name] = left[:count]
            del left[:count]
        else:
            inputs[argument.name] = left.pop(0)
    attributes = {
        attribute.name: op.get_attr(attribute.name)
        for attribute in op.op_def.attr
        if attribute.name not in inferred
    }
    # TensorFlow gives some arguments another name in Python.
    names = [
        name
        for name in inspect.signature(function).parameters
        if name not in {"name", *inputs, *attributes}
    ]
    renamed = {
        name
        if name in inspect.signature(function).parameters
        else names.pop(0): value
        for name, value in (inputs | attributes).items()
    }
    return list(tf.nest.flatten(function(**renamed)))
