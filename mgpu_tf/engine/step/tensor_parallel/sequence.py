"""Which activations may be parts of a sequence, between layers in parts.

A layer whose outputs are a sum over devices may leave each device a part of the
sequence, in place of all of it. What treats positions alike, such as a layer
normalization, a dropout or a residual, computes with that part:

    row -> scattered -> dropout -> + -> normalization -> gathered -> column

A reduce-scatter and an all-gather are the two halves of the all-reduce in their
place. As in `structure.py`, the graph of a forward pass shows what is so, and
what is not known to treat positions alike gets the whole sequence: layers are
closed, and outputs are made whole, until nothing is left to be changed.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.step.tensor_parallel.alike import (
    Cut,
    Halves,
    Whole,
    outputs_of,
)
from mgpu_tf.engine.step.tensor_parallel.structure import (
    Call,
    Gate,
    Gates,
    Known,
    Pass,
    Place,
    call_key,
)

_log = logging.getLogger("mgpu_tf")


class After(enum.Enum):
    """What devices have after a layer that is computed in parts.

    Attributes:
        SUM: The sum of what each has computed.
        GATHERED: The parts of all.
        PARTS: A part each, along another axis; or not a part each.
    """

    SUM = enum.auto()
    GATHERED = enum.auto()
    PARTS = enum.auto()


@dataclasses.dataclass(frozen=True)
class Passage:
    """How a layer passes parts of a sequence on.

    Attributes:
        joins: What it is called with that is gathered first, by place.
        computes: How its inputs are cut, where it computes with parts.
        cuts: How whole outputs are cut; of a sum over devices, as it is made.
        gathers: How outputs are cut that are gathered.
        also: How outputs are cut that others take whole too.
    """

    joins: dict[Place, Cut]
    computes: Cut | None = None
    cuts: Cut | None = None
    gathers: Cut | None = None
    also: Cut | None = None

    @property
    def whole(self) -> dict[Place | None, Cut]:
        """What is gathered: arguments by place, and outputs as None."""
        found: dict[Place | None, Cut] = dict(self.joins.items())
        if self.gathers is not None:
            found[None] = self.gathers
        return found


NOTHING = Passage({})


def leaves_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model that hold no layers."""
    return [
        layer
        for layer in keras_internals.layers_of(model)
        if not keras_internals.inner_layers(layer)
        and not isinstance(layer, keras.layers.InputLayer)
    ]


def gates_of(model: keras.Model) -> Gates:
    """Returns gates of the layers of a model that hold layers."""
    return [
        (layer, Gate(layer.name), Gate(layer.name))
        for layer in keras_internals.layers_of(model)
        if layer is not model and keras_internals.inner_layers(layer)
    ]


def passage_of(
    passages: Mapping[int, Passage],
    layer: keras.layers.Layer,
    args: Any,
    kwargs: Any,
) -> Passage:
    """Returns what concerns a call of a layer.

    Args:
        passages: From `passages_of`.
        layer: The layer.
        args: What it is called with.
        kwargs: The same, by name.
    """
    return passages.get(call_key(layer, args, kwargs), NOTHING)


def passages_of(
    trace: Callable[[dict[int, int], Known], list[Pass]],
    asked: Callable[[Pass, Pass, Collection[int]], tuple[set[int], set[int]]],
    computed: Mapping[int, After],
    dropouts: Collection[int],
    size: int,
) -> dict[int, Passage]:
    """Returns how layers pass parts of a sequence on, by identity.

    Args:
        trace: Returns forward passes in which the leaves of the model are
            noted; without the lengths of the outputs of some layers, and
            with those of what is whole again.
        asked: Returns, of a pass that knows lengths and one that does not know
            those of some layers, the layers after which code has asked for
            them, and those whose own code has.
        computed: The layers that are computed in parts.
        dropouts: The layers that multiply by what they draw.
        size: How many devices have a part each.
    """
    passes = trace({}, {})
    if not passes:
        return {}
    opaque = {*computed, *dropouts}
    search = _Search(computed, dropouts, size)
    for one in passes:
        search.closed |= one.inside
        search.whole |= one.inside
    search.settle(passes)
    while search.left:
        before = search.decided
        again = trace(
            {key: cut.axis for key, cut in search.left.items()},
            {key: each.whole for key, each in search.passages().items()},
        )
        if not again:
            return {}
        lengths = {key: cut.length for key, cut in search.left.items()}
        more = search.without(lengths)
        more.settle(again)
        for known, unknown in zip(passes, again, strict=True):
            whole, closed = asked(known, unknown, lengths)
            more.whole |= whole
            more.closed |= closed - opaque
        search.closed |= more.closed
        search.whole |= more.whole
        if search.decided == before:
            break
        search.settle(passes)
    return search.passages()


class _Search:
    """Walks over forward passes, until all that it meets fits.

    Attributes:
        closed: The layers that take no parts.
        whole: The layers whose outputs are whole.
        entering: The layers whose whole outputs are cut.
        left: The layers whose outputs are parts.
    """

    def __init__(
        self,
        computed: Mapping[int, After],
        dropouts: Collection[int],
        size: int,
        lengths: dict[int, int] | None = None,
    ) -> None:
        self._computed = computed
        self._dropouts = dropouts
        self._size = size
        self._lengths = lengths or {}
        self.closed: set[int] = set()
        self.whole: set[int] = set()
        self.entering: set[int] = set()
        self.left: dict[int, Cut] = {}

    @property
    def decided(self) -> tuple[int, ...]:
        """How much is decided; it only grows."""
        return len(self.closed), len(self.whole), len(self.entering)

    def without(self, lengths: dict[int, int]) -> _Search:
        """Returns a search of passes that do not know some lengths."""
        other = _Search(self._computed, self._dropouts, self._size, lengths)
        other.closed, other.whole = set(self.closed), set(self.whole)
        other.entering = set(self.entering)
        return other

    def settle(self, passes: list[Pass]) -> None:
        """Walks until nothing changes."""
        while True:
            before = self.decided
            self._begin()
            for one in passes:
                self._walk(one)
            if self.decided == before:
                self._compare()
            if self.decided == before:
                self._leave_no_part_to_gathers_alone()
            if self.decided == before:
                return

    def passages(self) -> dict[int, Passage]:
        """Returns what was found, of the layers that it concerns."""
        found = {}
        for key, (first, *_) in self._seen.items():
            if key in self.left and self._gathered[key] > 1:
                first = dataclasses.replace(first, also=self.left[key])
            if first != NOTHING:
                found[key] = first
        return found

    def _begin(self) -> None:
        self.left = {}
        # What walks go by; what they find is for the next ones.
        self._is_closed, self._is_whole = set(self.closed), set(self.whole)
        self._enters = set(self.entering)
        # How each call of a layer was, and of what its parts were made.
        self._seen = collections.defaultdict[int, list[Passage]](list)
        self._made_of = collections.defaultdict[int, set[int]](set)
        # How often outputs of layers are gathered, and are taken as parts.
        self._gathered = collections.Counter[int]()
        self._taken = collections.Counter[int]()

    def _compare(self) -> None:
        """Layers whose calls differ have nothing to do with parts."""
        for key, passages in self._seen.items():
            if any(each != passages[0] for each in passages):
                self.closed.add(key)
                self.whole |= {key} | self._made_of[key]

    def _leave_no_part_to_gathers_alone(self) -> None:
        """Outputs that all who take them gather are gathered at once."""
        for key in list(self.left):
            if self._gathered[key] and not self._taken[key]:
                self.whole.add(key)

    # One pass.

    def _walk(self, one: Pass) -> None:
        self._split: dict[str, Halves] = {}
        # What would be split if some more outputs were.
        self._could: dict[str, Halves] = {}
        # Which layer's output a tensor is.
        self._output_of: dict[str, int] = {}
        place = 0
        while place < len(one.operations):
            call = one.calls.get(place)
            if call is None:
                self._operation(one.operations[place])
                place += 1
                continue
            self._call(call, one)
            place = max(call.after, place + 1)
        for name in one.outputs:
            self._need(self._split.get(name))

    def _need(self, *found: Halves | None) -> None:
        for halves in found:
            if halves is not None:
                self.whole |= halves.layers

    def _halves(self, tensor: Any) -> Halves | None:
        if not tf.is_symbolic_tensor(tensor):
            return None
        return self._split.get(tensor.name)

    def _count(self, counter: collections.Counter[int], tensor: Any) -> None:
        key = self._output_of.get(tensor.name)
        if key is not None:
            counter[key] += 1

    def _call(self, call: Call, one: Pass) -> None:
        key = call.key
        held = {
            place: (tensor, halves)
            for place, tensor in call.arguments.items()
            if (halves := self._halves(tensor)) is not None
        }
        for _, halves in held.values():
            self._made_of[key] |= halves.layers
        opaque = abs(key) in self._computed
        closed = opaque or key in self._is_closed
        # To pass through a gate is no work: it may as well be gathered before.
        closed |= isinstance(call.layer, Gate) and key in self._is_whole
        joins = {}
        hidden: dict[str, Halves] = {}
        if closed:
            for place, (tensor, halves) in held.items():
                cut = self._cut(tensor, halves)
                if cut is None:
                    self._need(halves)
                    continue
                joins[place] = cut
                self._count(self._gathered, tensor)
                hidden[tensor.name] = self._split.pop(tensor.name, halves)
        computes = None
        if held and not closed:
            (tensor, halves), *others = held.values()
            computes = self._cut(tensor, halves)
            if key in self._dropouts:
                self._draw(call, tensor, halves, others)
        if not opaque and not (computes and key in self._dropouts):
            for op in one.operations[call.first : call.after]:
                self._operation(op, inside=key)
        self._split |= hidden
        self._end(call, Passage(joins, computes))

    def _draw(
        self, call: Call, tensor: Any, halves: Halves, others: list[Any]
    ) -> None:
        """A dropout, of which each device draws what the whole has."""
        if others or not tf.is_tensor(call.outputs):
            self.closed.add(call.key)
            return
        self._count(self._taken, tensor)
        self._split[call.outputs.name] = halves

    def _end(self, call: Call, passage: Passage) -> None:
        """Notes what a call returns."""
        key = call.key
        made = [t for t in tf.nest.flatten(call.outputs) if tf.is_tensor(t)]
        found = [each for each in map(self._halves, made) if each is not None]
        single = tf.is_tensor(call.outputs)
        if not single:
            if found:
                self.closed.add(key)
                self._need(*found)
            self._seen[key].append(passage)
            return
        [output] = made
        if found:
            del self._split[output.name]
            cut = self._cut(output, found[0])
            if cut is None:
                self.closed.add(key)
            elif key in self._is_whole:
                passage = dataclasses.replace(passage, gathers=cut)
            else:
                self._leave(key, output, cut)
        elif key not in self._is_whole:
            passage = self._may_cut(call, key, output, passage)
        self._seen[key].append(passage)

    def _may_cut(
        self, call: Call, key: int, output: tf.Tensor, passage: Passage
    ) -> Passage:
        """Whole outputs are cut, or would be if it helped."""
        after = self._computed.get(abs(key))
        rank = output.shape.rank
        if after is After.PARTS or key < 0 or rank is None or rank < 2:
            return passage
        halves = Halves(rank - 2, frozenset([key]))
        cut = self._cut(output, halves)
        if cut is None:
            return passage
        # Of rows, positions and features.
        is_summed = after is After.SUM and rank == 3
        if is_summed or key in self._enters:
            self._leave(key, output, cut)
            return dataclasses.replace(passage, cuts=cut)
        self._could[output.name] = halves
        return passage

    def _leave(self, key: int, output: tf.Tensor, cut: Cut) -> None:
        self.left[key] = cut
        self._output_of[output.name] = key
        axis = output.shape.rank + cut.axis
        self._split[output.name] = Halves(axis, frozenset([key]))

    def _cut(self, tensor: tf.Tensor, halves: Halves) -> Cut | None:
        """Returns how a tensor is cut; None if its length is not known."""
        if tensor.shape.rank is None or halves.is_shape:
            return None
        length = tensor.shape[halves.axis]
        if length is None:
            known = {self._lengths.get(each) for each in halves.layers}
            length = known.pop() if len(known) == 1 else None
        if length is None or length < self._size:
            return None
        return Cut(halves.axis - tensor.shape.rank, length)

    def _operation(self, op: tf.Operation, inside: int | None = None) -> None:
        held = [self._halves(tensor) for tensor in op.inputs]
        if not any(held):
            self._what_could_be(op)
            return
        for tensor, halves in zip(op.inputs, held, strict=True):
            if halves is not None:
                self._count(self._taken, tensor)
        made: dict[str, Halves] | None
        try:
            made = outputs_of(op, held)
        except Whole:
            made = self._entered(op, held)
        if made is not None:
            self._split |= made
        elif inside is not None:
            self.closed.add(inside)
        else:
            _log.debug("sequence: %s needs whole inputs", op.name)
            self._need(*held)

    def _what_could_be(self, op: tf.Operation) -> None:
        held = [self._could.get(tensor.name) for tensor in op.inputs]
        if any(held):
            try:
                self._could |= outputs_of(op, held)
            except Whole:
                return

    def _entered(
        self, op: tf.Operation, held: list[Halves | None]
    ) -> dict[str, Halves] | None:
        """Returns what is split if whole inputs are cut too; None if not."""
        either = [
            self._could.get(tensor.name) if halves is None else halves
            for tensor, halves in zip(op.inputs, held, strict=True)
        ]
        try:
            made = outputs_of(op, either)
        except Whole:
            return None
        for halves, could in zip(held, either, strict=True):
            if halves is None and could is not None:
                self.entering |= could.layers
        return made
