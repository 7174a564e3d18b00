"""The boundary of a call: inside, a replica has its rows; outside, all of them.

    with boundary.around():                      outside of replicas
        strategy.run(on_replica)

    with boundary.entered(scope, rows):          on a replica
        outputs = model(x)          x and outputs: the global batch
                                    inside of the call: the rows of this replica

What an author writes around calls, such as losses, ratios, clipping, metrics
and draws, sees the global batch on every replica and needs no rule. A call is
cut where the graph proves that each row of its outputs is made of its own row
alone (`row_proof.py`). Another call is opened: its body sees the global batch,
and the calls inside of it are cut. A layer that mixes rows is so computed whole
by each replica.

Calls inside of a `tf.function`, a branch or a loop of TensorFlow, and calls of
a step that runs eagerly, are computed whole as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.author_scope import AuthorScope, graph_here
from mgpu_tf.engine.author.contributions import BatchShare, sharing
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.exchange.composites import composites_of
from mgpu_tf.engine.exchange.crossing import Cut, Exchange
from mgpu_tf.engine.random_rows import DrawnRows, rows_of_global_draws
from mgpu_tf.engine.row_proof import (
    FIXED,
    Operations,
    RowProof,
    Rows,
    proving,
    recorded,
)
from mgpu_tf.engine.step.apart import Apart
from mgpu_tf.engine.step.calls.layer_calls import trust
from mgpu_tf.engine.step.calls.whole_layers import masks_of, rows_of
from mgpu_tf.engine.trace_again import (
    Attempts,
    TraceAgain,
    refusal_within,
)
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.own_gradient import own_gradient

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass
class _Call:
    """A call with the rows of a replica.

    Attributes:
        layer: What was called.
        made: The operations that it has made.
        outputs: Its outputs, by identity.
    """

    layer: keras.layers.Layer
    made: Operations
    outputs: dict[int, tf.Tensor]
    _is_read: bool | None = None

    def is_read(self) -> bool:
        """Returns whether others take a tensor of it that is no output.

        As it is when this is asked first: before a gradient of the call is
        taken, the operations of which take such tensors too.
        """
        if self._is_read is None:
            self._is_read = self.made.are_read(self.outputs)
        return self._is_read


class Boundary:
    """Cuts the calls of a model's layers.

    Args:
        model: A built model.
        state: Knows the seeds and the moving statistics.
        exchange: Moves rows and gradients.
    """

    def __init__(
        self, model: keras.Model, state: ReplicaState, exchange: Exchange
    ) -> None:
        self._model = model
        self._state = state
        self._exchange = exchange
        self._layers = keras_internals.layers_of(model)
        # Before the parts of layers are replaced for a trace.
        self._by_row = set(
            map(id, filter(keras_internals.is_by_row, self._layers))
        )
        self._weights = keras_internals.float_weights(model)
        self._moving = {
            id(variable)
            for variable in keras_internals.moving_statistics(model)
        }
        # A gradient that overwrites a weight is no sum over replicas.
        self._opened = {
            id(layer)
            for layer in self._layers
            if any(map(keras_internals.is_overwritten, layer.variables))
        }
        # Layers that read weights of others in their call.
        self._read_all: set[int] = set()
        self._proven: list[_Call] = []
        self._apart = Apart()
        self._attempts = Attempts()
        # Each replica is a thread of its own.
        self._here = threading.local()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Lets calls be cut. Outside of replicas, around the steps of all.

        Raises:
            ConfigurationError: A replica reads what another one has made.
            TraceAgain: A tensor of a call that was cut is read elsewhere, and
                is no output. The call will be computed whole.
        """
        try:
            with (
                self._attempts.left_behind(),
                self._apart.checked(),
                keras_internals.calls_replaced(self._layers, self._called),
            ):
                yield
            left = [call.layer for call in self._proven if call.is_read()]
        finally:
            self._proven = []
        for layer in left:
            self._open(layer)
        if left:
            raise TraceAgain

    @contextlib.contextmanager
    def entered(
        self, scope: AuthorScope, cut: Cut, rows: Any, others: dict[int, Cut]
    ) -> Iterator[None]:
        """Sets what a step on this replica reads and writes.

        Args:
            scope: The scope of the step.
            cut: How the global batch is divided.
            rows: The global batch.
            others: How arrays of it are divided that may have other numbers
                of rows, by identity.
        """
        here = self._here
        here.scope, here.cut, here.graph = scope, cut, graph_here()
        here.inside, here.handles, here.cuts = None, None, {}
        here.proof = RowProof()
        here.proof.skip(here.graph) if here.graph is not None else None
        for row in tf.nest.flatten(rows, expand_composites=True):
            other = others.get(id(row))
            self._know([row], other or cut, None if other else Rows())
        scope.lent = self._lent
        try:
            with self._apart.replica():
                yield
        finally:
            here.scope = here.proof = here.graph = None
            here.cuts = {}

    # On a replica.

    @property
    def is_in_call(self) -> bool:
        """Whether what runs has the rows of this replica alone."""
        return getattr(self._here, "inside", None) is not None

    def _know(self, tensors: list[Any], cut: Cut, kind: Rows | None) -> None:
        for tensor in tensors:
            if tf.is_symbolic_tensor(tensor):
                self._here.cuts[id(tensor)] = (cut, tensor)
        if kind is not None:
            self._here.proof.take(tensors, kind)

    def _lent(self, variable: keras.Variable) -> Any:
        """Returns a weight as the call that is under way reads it.

        Raises:
            TraceAgain: It is of another layer. In another trace the call is
                lent all weights.
        """
        here = self._here
        if here.inside is None:
            return None
        if id(variable) in here.not_lent:
            self._read_all.add(id(here.layer))
            self._attempts.give_up()  # Its author may catch what is raised.
            raise TraceAgain
        return here.inside.get(id(variable))

    def open(self) -> bool:
        """Lets all calls be computed whole; returns whether some were not."""
        before = len(self._opened)
        for layer in self._layers:
            if id(layer) not in self._opened:
                self._open(layer)
        return len(self._opened) > before

    def check_write(self, value: Any) -> None:
        """Called before a step writes to a weight.

        Args:
            value: What it writes.

        Raises:
            TraceAgain: The call that is under way will be computed whole.
        """
        here = self._here
        if self.is_in_call and here.inner.of(value) != FIXED:
            self._open(here.layer)
            self._attempts.give_up()
            raise TraceAgain

    def lend_again(self, variable: keras.Variable) -> None:
        """Lends what a weight holds now to the call that is under way."""
        here = self._here
        if self.is_in_call and id(variable) in here.inside:
            (lent,) = self._shared([variable], here.inner)
            here.inner.take([lent], FIXED)
            here.inside[id(variable)] = lent

    def _shared(
        self, weights: list[keras.Variable], proof: RowProof
    ) -> list[tf.Tensor]:
        return self._exchange.shared(
            [tf.convert_to_tensor(keras_internals.stored(w)) for w in weights],
            lambda indices: proof.of(indices) == FIXED,
        )

    def _called(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        here = self._here
        if (
            getattr(here, "scope", None) is None
            or graph_here() is not here.graph
        ):
            return own(*arguments, **named)
        if here.graph is None:
            return own(*arguments, **named)
        if here.inside is not None:
            outputs = own(*arguments, **named)
            self._trust(layer, (arguments, named), outputs)
            return outputs
        if id(layer) in self._opened:
            return own(*arguments, **named)
        leaves = tf.nest.flatten((arguments, named))
        rows = [leaf for leaf in leaves if _has_axis(leaf)]
        holds = any(map(keras_internals.attributes_of_author, leaves))
        cut = None if holds or composites_of(leaves) else self._cut_of(rows)
        if cut is None:
            return own(*arguments, **named)
        mark = here.scope.mark()
        try:
            outputs, proven = self._local(
                *(layer, own, arguments, named, rows, cut)
            )
        except Exception as error:
            if refusal_within(error) is None:
                # It may take all rows: its first axis may be another one.
                self._open(layer)
                self._attempts.give_up()
            raise
        if proven:
            call, length = self._proven[-1], rows[0].shape[0]
            return tf.nest.map_structure(
                lambda output: self._joined(output, cut, length, call), outputs
            )
        self._open(layer)
        here.scope.reset(mark)
        if not keras_internals.is_of_library(layer):
            self._attempts.give_up()
        return own(*arguments, **named)

    def _open(self, layer: keras.layers.Layer) -> None:
        self._opened.add(id(layer))
        if not keras_internals.inner_layers(layer):
            _log.info(
                "%s (%s) is computed whole by each replica: it is not proven "
                "that it makes each row of its own row alone, or it adds a "
                "loss or keeps something of the rows",
                layer.name,
                type(layer).__name__,
            )

    def _cut_of(self, rows: list[Any]) -> Cut | None:
        """Returns how the rows of a call are divided, None if they are not."""
        here = self._here
        if not rows or any(not tf.is_symbolic_tensor(row) for row in rows):
            return None
        kinds = {self._number_of_rows(row) for row in rows}
        if len(kinds) != 1:
            return None
        (kind,) = kinds
        if kind == "batch":
            return here.cut
        known = here.cuts.get(kind)
        if known is not None:
            return known[0]
        number = tf.shape(rows[0], out_type=tf.int64)[0]
        cut = Cut.equal(number, here.cut.replica, here.cut.replicas)
        self._know(rows, cut, None)
        return cut

    def _number_of_rows(self, row: tf.Tensor) -> Any:
        """Returns what is the same for tensors with as many rows."""
        here = self._here
        known = here.cuts.get(id(row))
        if known is not None and known[0] is here.cut:
            return "batch"
        if here.proof.of(row) == Rows():
            return "batch"
        if row.shape[0] is not None:
            return ("rows", row.shape[0])
        return id(row) if known is None else ("cut", id(known[0]))

    def _local(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        arguments: Any,
        named: Any,
        rows: list[tf.Tensor],
        cut: Cut,
    ) -> tuple[Any, bool]:
        """Calls a layer with the rows of this replica.

        Returns:
            The outputs, and whether it is proven that they may be joined.
        """
        here = self._here
        proof = RowProof()
        proof.skip(here.graph)
        given: dict[int, tf.Tensor] = {}
        for row in rows:
            given[id(row)] = local = self._cut_rows(row, cut)
            proof.take([local], Rows())
            mask = keras_internals.mask_of(row)
            if mask is not None:
                mask = self._cut_rows(mask, cut)
                keras_internals.set_mask(local, mask)
                proof.take([mask], Rows())
        arguments, named = tf.nest.map_structure(
            lambda leaf: given.get(id(leaf), leaf), (arguments, named)
        )
        trainable = [
            weight
            for weight in self._weights
            if id(weight) not in here.scope.state_mapping
        ]
        not_lent: set[int] = set()
        if id(layer) not in self._read_all:
            own_weights = set(map(id, layer.variables))
            not_lent = set(map(id, trainable)) - own_weights
            trainable = [w for w in trainable if id(w) in own_weights]
        lent = self._shared(trainable, proof)
        # In order, so that the proof does not take them for rows.
        before = here.scope.mark()
        losses = len(here.scope.losses)
        seeds = self._own_seeds()
        left = keras_internals.tensors_left_in(layer)
        known = [*given.values(), *lent, *here.scope.state_mapping.values()]
        known += map(keras_internals.mask_of, given.values())
        here.inside = dict(zip(map(id, trainable), lent, strict=True))
        here.not_lent, here.inner, here.layer = not_lent, proof, layer
        try:
            with (
                proving(proof),
                recorded() as made,
                self._drawing(cut, list(given.values()), proof),
                sharing(
                    BatchShare(cut.count, cut.total, cut.replicas),
                    exchange=self._exchange,
                ),
            ):
                outputs = own(*arguments, **named)
        finally:
            here.inside = None
        self._same_seeds(seeds)
        written = here.scope.written_since(before)
        leaves = tf.nest.flatten(outputs, expand_composites=True)
        moved = [
            part
            for leaf in leaves
            for part in keras_internals.taken_apart(leaf)[0]
        ]
        kinds = list(map(proof.of, [*leaves, *moved, *masks_of(leaves)]))
        if proof.writes_rows:
            raise ConfigurationError(
                "What a layer writes of the rows of a batch must be in a "
                f"variable of Keras's. Received: {layer.name!r}, which writes "
                "to a tf.Variable. Make it by self.add_weight(..., "
                "trainable=False)."
            )
        proven = (
            # What a call leaves behind is read where all rows are.
            keras_internals.tensors_left_in(layer) <= left
            and not any(map(keras_internals.attributes_of_author, leaves))
            and not made.take_others(known, self._handles)
            and len(here.scope.losses) == losses
            and all(kind == Rows() for kind in kinds)
            and all(self._may_write(v, value, proof) for v, value in written)
        )
        if proven:
            known = [*leaves, *moved, *masks_of(leaves)]
            outputs_known = {id(tensor): tensor for tensor in known}
            self._proven.append(_Call(layer, made, outputs_known))
        return outputs, proven

    def _handles(self) -> set[int]:
        """Returns the handles of Keras's variables that are not lent."""
        here = self._here
        if here.handles is None:
            lent = set(map(id, self._weights))
            here.handles = keras_internals.handles_of(
                each for each in self._state.variables if id(each) not in lent
            )
        return here.handles

    def _drawing(
        self, cut: Cut, rows: list[Any], proof: RowProof
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope in which a call draws for its rows."""
        if not self._state.draws_alike:
            return contextlib.nullcontext()

        def take(drawn: tf.Tensor, of: DrawnRows) -> None:
            block = of.block or proof.neighbours(of.shape, of.axis)
            if block is not None:
                proof.take([drawn], Rows(axis=of.axis, block=block))

        count = tf.maximum(cut.count, 1)
        low = tf.minimum(cut.low, cut.total - count)
        return rows_of_global_draws(low, count, cut.total, rows, taken=take)

    def _cut_rows(self, row: tf.Tensor, cut: Cut) -> tf.Tensor:
        mine = self._exchange.rows_to_call(row, cut)
        return tf.ensure_shape(mine, [None, *row.shape[1:]])

    def _joined(
        self, output: tf.Tensor, cut: Cut, length: int | None, call: _Call
    ) -> tf.Tensor:
        kind = Rows() if cut is self._here.cut else None

        @own_gradient
        def looked_at(value: tf.Tensor) -> Any:
            def backward(up: Any) -> Any:
                call.is_read()
                return up

            return tf.identity(value), backward

        def joined(value: tf.Tensor) -> tf.Tensor:
            if value.dtype.is_floating or value.dtype.is_complex:
                value = looked_at(value)
            rows = self._exchange.all_rows(cut.without_another(value), cut)
            rows = tf.ensure_shape(rows, [length, *value.shape[1:]])
            self._know([rows], cut, kind)
            return rows

        rows = keras_internals.carried(output, joined)
        self._know([rows], cut, kind)
        return rows

    def _may_write(
        self, variable: keras.Variable, value: Any, proof: RowProof
    ) -> bool:
        """Whether replicas may write what they do in a call of their rows."""
        drawn = any(variable is seed for seed in self._state.seeds)
        return drawn or id(variable) in self._moving or proof.of(value) == FIXED

    def _own_seeds(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Lets random layers draw other numbers, where replicas may."""
        if self._state.draws_alike:
            return []
        scope = self._here.scope
        kept = []
        for state, offset in self._state.seed_offsets():
            value = scope.value(state)
            kept.append((state, value))
            scope.state_mapping[id(state)] = value + offset
        return kept

    def _same_seeds(self, kept: list[tuple[keras.Variable, tf.Tensor]]) -> None:
        scope = self._here.scope
        for state, before in kept:
            count = scope.value(state)[1]
            scope.state_mapping[id(state)] = tf.stack([before[0], count])

    def _trust(
        self, layer: keras.layers.Layer, inputs: Any, outputs: Any
    ) -> None:
        """Takes for known what a layer of Keras's makes of rows."""
        if id(layer) in self._by_row and keras_internals.have_features(
            layer, rows_of(inputs)
        ):
            trust(self._here.inner, inputs, outputs)


def _has_axis(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0
