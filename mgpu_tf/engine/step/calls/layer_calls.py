"""Calls of layers in a step in which a replica has its rows.

Each layer, and each function of `keras.ops` in a functional model, is looked
at when it is called (`row_proof.py`). Of a few of Keras's it is known that
each row of their outputs comes of its own row (`keras_internals.is_by_row`).
If that is proven, and that what a layer adds to the loss is a sum or a mean
over the rows, all is well. If not, replicas send each other the inputs of this
layer, and each computes the layer whole: its outputs, its losses, its state
and its draws are those of one device, whatever the layer does. Each replica
goes on with its rows of the outputs. Outputs whose first axis is not that of
the rows stay whole, and so does what a functional model makes of them, up to
its outputs. Where parts of a batch are computed one after another, such a
layer is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import (
    BatchShare,
    current_share,
)
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.author.step_scope import Owners, StepScope, leaves_of
from mgpu_tf.engine.exchange.composites import composites_of
from mgpu_tf.engine.exchange.crossing import Exchange
from mgpu_tf.engine.inlined import Inlined, refused
from mgpu_tf.engine.row_proof import (
    FIXED,
    MEAN,
    SUM,
    UNPROVEN,
    RowProof,
    Rows,
    active,
    proving,
)
from mgpu_tf.engine.step.calls.eager_layers import APART, EagerLayers
from mgpu_tf.engine.step.calls.state_parts import held, keep, parts_of
from mgpu_tf.engine.step.calls.whole_layers import (
    WholeLayers,
    is_apart,
    is_same,
    masks_of,
    note_loss,
    part_of,
    rows_of,
)
from mgpu_tf.engine.trace_again import Attempts, TraceAgain
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")


class LayerCalls:
    """Computes layers whole that are not proven to keep rows apart.

    Args:
        model: A built model.
        state: What a step writes besides weights.
        exchange: Gives replicas the rows of all; None where nothing does.
        in_parts: Whether parts of a batch are computed one after another.
        plainly: Lets a layer be called once in a step and not layer by layer.
            Returns whether that changes anything. None where none is.

    Attributes:
        owners: Know whose rows are whose, of replicas that step together.
    """

    def __init__(
        self,
        model: keras.Model,
        state: ReplicaState,
        exchange: Exchange | None,
        *,
        in_parts: bool = False,
        plainly: Callable[[keras.layers.Layer], bool] | None = None,
    ) -> None:
        shared = exchange is not None or in_parts
        if shared and keras_internals.wrote_around_call(model):
            raise ConfigurationError(
                "On several devices the computation of a model is in its call. "
                f"Received: {type(model).__name__}, which has a __call__ of "
                "its own. Rename it to call."
            )
        self._model = model
        self._state = state
        self._exchange = exchange
        self._in_parts = in_parts
        self._plainly = plainly
        self._layers = keras_internals.layers_of(model)
        self._every = [
            *self._layers,
            *keras_internals.functions_of(self._layers),
        ]
        # Before the parts of layers are replaced for a trace.
        self._by_row = set(
            map(id, filter(keras_internals.is_by_row, self._layers))
        )
        self._graphs = {
            id(layer)
            for layer in self._layers
            if keras_internals.is_graph_of_layers(layer)
        }
        self._regularized = [
            layer
            for layer in self._layers
            if layer.activity_regularizer is not None
        ]
        self._regularizations = {
            id(layer): keras_internals.regularization_of(layer)
            for layer in self._regularized
        }
        self._whole: set[int] = set()
        # Those that a replica has proven in the trace at hand.
        self._proven: set[int] = set()
        self.owners = Owners()
        self._inlined = Inlined()
        self._attempts = Attempts()
        self._of_all: WholeLayers | None = None
        self._eager: EagerLayers | None = None
        if exchange is not None:
            self._of_all = WholeLayers(state, exchange, self.compute_whole)
        if exchange is not None or in_parts:
            self._eager = EagerLayers(
                self._of_all, self._take_whole, self._whole
            )

    @property
    def inlines(self) -> bool:
        """Whether functions of the author's are traced with the step."""
        return self._inlined.is_begun

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets layers be called so, while a step is traced."""
        self._proven.clear()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._attempts.left_behind())
            stack.enter_context(self._inlined.in_place())
            if self._exchange is not None or self._in_parts:
                stack.enter_context(
                    keras_internals.calls_replaced(self._every, self._called)
                )
                stack.enter_context(
                    keras_internals.regularizers_replaced(
                        self._regularized, self._regularize
                    )
                )
            yield

    def inline(self, variable: keras.Variable) -> None:
        """Lets functions of the author's be traced with the step.

        Args:
            variable: What one of them reads that the step lends to it, or
                writes.

        Raises:
            TraceAgain: They will be, in another trace.
            ConfigurationError: They cannot be.
        """
        self._inlined.begin(refused(variable))

    def compute_whole(self, variable: keras.Variable) -> bool:
        """Lets the layer that writes a variable be computed whole.

        Args:
            variable: State that replicas cannot bring together.

        Returns:
            Whether it will be, in another trace.
        """
        if self._exchange is None or tf.executing_eagerly():
            return False
        owners = [
            layer
            for layer in self._layers
            if id(layer) not in self._graphs | self._by_row | self._whole
            and any(own is variable for own in layer.variables)
        ]
        if not owners:
            return False
        layer = min(owners, key=lambda layer: len(layer.variables))
        self._take_whole(
            layer, f"what it writes to {variable.name!r} adds up over the rows"
        )
        return True

    def read_part(self, variable: keras.Variable) -> None:
        """Called where an author's code reads a metric besides its update.

        Args:
            variable: Of the metric.

        Raises:
            ConfigurationError: Parts of a batch are computed one after
                another, and update it in turn.
            TraceAgain: All replicas hold what it holds, in another trace.
        """
        if self._in_parts:
            raise ConfigurationError(
                "Where parts of a batch are computed one after another, only "
                "its own update reads a metric in a step. Received: "
                f"{variable.path}, which the model or its loss reads. Leave "
                "out step_parts."
            )
        if self._state.read_whole(variable):
            self._attempts.give_up()
            raise TraceAgain

    def read_aside(self, name: str, tensor: tf.Tensor) -> None:
        """Called where something of all rows reads what a replica has alone.

        Args:
            name: Of what reads it.
            tensor: What it reads.

        Raises:
            TraceAgain: It will be of all rows as well, in another trace.
            ConfigurationError: It cannot be.
        """
        scope = keras_internals.stateless_scope()
        assert isinstance(scope, StepScope)
        for key, (variable, _, _) in scope.parts.items():
            if scope.state_mapping[key] is tensor:
                if self.compute_whole(variable):
                    raise TraceAgain
                break
        if self._exchange is None or id(self._model) in self._whole:
            raise ConfigurationError(
                "What is computed from the rows of all replicas reads what it "
                f"is given. Received: {name}, which reads {tensor.name!r}, "
                "made of the rows of one replica elsewhere. Pass it as an "
                "argument or an output of the model."
            )
        self._take_whole(
            self._model,
            f"what {name} reads besides its arguments is of its own row",
        )
        raise TraceAgain

    def _take_whole(self, layer: keras.layers.Layer, unproven: str) -> None:
        if self._exchange is None:
            raise ConfigurationError(
                "Where parts of a batch are computed one after another, a "
                "layer makes each row of its own row. Received: "
                f"{layer.name!r} ({type(layer).__name__}), of which it is not "
                f"proven that {unproven}. Use a strategy without a pipeline, "
                "and no step_parts."
            )
        self._whole.add(id(layer))
        _log.info(
            "%s (%s) is computed whole by each replica, of the inputs that "
            "replicas send each other: it is not proven that %s. "
            "mgpu_tf.batch_mean(x) is a mean over the global batch that keeps "
            "rows apart",
            layer.name,
            type(layer).__name__,
            unproven,
        )
        if self._plainly is not None and self._plainly(layer):
            raise TraceAgain

    def _called(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        scope, share = keras_internals.stateless_scope(), current_share()
        if (
            share is None
            or share.replicas == 1
            or not isinstance(scope, StepScope)
            or scope.has_all_rows
            or scope.within_trusted
        ):
            return own(*arguments, **named)
        given = (arguments, named)
        if tf.executing_eagerly():
            if self._eager is None:
                return own(*arguments, **named)
            if self._exchange is None and id(layer) in self._graphs:
                return own(*arguments, **named)  # Its layers are proven.
            if (
                self._exchange is None
                and id(layer) in self._by_row
                and keras_internals.have_features(layer, leaves_of(given))
            ):
                return self._trusted(own, given, scope)
            return self._eager.call(layer, own, given, scope, share)
        if id(layer) in self._graphs - self._whole:
            return self._through_graph(own, given, scope, share)
        proofs = active()
        nested = tf.compat.v1.get_default_graph() is not scope.graph
        if proofs and (nested or not _in_rows(proofs[-1], given)):
            # The proof of the layer in which it is called says what it makes.
            return own(*arguments, **named)
        rows = rows_of(given)
        kinds = {scope.kinds.get(id(row), (row, Rows()))[1] for row in rows}
        if composites_of(given):
            kinds.add(Rows())
        if any(id(leaf) in scope.whole for leaf in tf.nest.flatten(given)):
            if self._plainly is not None and self._plainly(layer):
                raise TraceAgain
            return self._called_whole(layer, own, given, scope, share)
        by_row = id(layer) in self._by_row
        by_row = by_row and keras_internals.have_features(layer, rows)
        if by_row and len(kinds) < 2:
            outputs, proven = self._trusted(own, given, scope), True
            kind = kinds.pop() if kinds else FIXED
            self._keep(scope, outputs, kind)
            if not proofs:
                scope.proof.take(rows_of(outputs), kind)
                scope.proof.take(composites_of(outputs), UNPROVEN)
        elif id(layer) in self._whole or composites_of(given):
            if id(layer) not in self._whole:
                self._take_whole(layer, APART)
            outputs = self._called_whole(layer, own, given, scope, share)
            proven = True
        else:
            outputs, proven = self._tried(layer, own, given, scope, share)
        if proven:
            for proof in proofs:
                trust(proof, given, outputs)
                proof.take(composites_of(outputs), UNPROVEN)
                if id(layer) in self._whole:
                    leaves = tf.nest.flatten(outputs)
                    proof.take(
                        [leaf for leaf in leaves if is_same(leaf)], FIXED
                    )
        return outputs

    def _regularize(self, layer: keras.layers.Layer, output: tf.Tensor) -> None:
        """Adds to the loss what a regularizer makes of an output."""
        regularization = self._regularizations[id(layer)]
        scope = keras_internals.stateless_scope()
        if (
            not isinstance(scope, StepScope)
            or tf.compat.v1.get_default_graph() is not scope.graph
        ):
            regularization(output)
            return
        # What is trusted are the outputs of Keras's layers.
        within, scope.within_trusted = scope.within_trusted, False
        try:
            self._called(regularization, regularization, output)
        finally:
            scope.within_trusted = within

    @staticmethod
    def _trusted(own: Callable[..., Any], given: Any, scope: StepScope) -> Any:
        """Calls a layer of Keras's, with what is inside of it."""
        scope.within_trusted = True
        try:
            return own(*given[0], **given[1])
        finally:
            scope.within_trusted = False

    def _through_graph(
        self,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        """Calls a functional model; its outputs are of this replica's rows."""
        within, scope.within_graph = scope.within_graph, True
        try:
            outputs = own(*given[0], **given[1])
        finally:
            scope.within_graph = within
        if within or not scope.whole:
            return outputs
        assert self._exchange is not None
        cut = self._exchange.cut(share.local)

        def own_rows(leaf: Any) -> Any:
            if id(leaf) not in scope.whole:
                return leaf
            if rows_of(leaf):
                return part_of(leaf, cut, "the model")
            scope.take_alike([leaf])
            return leaf

        return tf.nest.map_structure(own_rows, outputs)

    def _called_whole(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        assert self._of_all is not None
        return self._of_all.call(layer, own, given, scope, share)

    @staticmethod
    def _keep(scope: StepScope, outputs: Any, kind: Any) -> None:
        """Notes what else outputs are than rows."""
        if kind not in (Rows(), FIXED):
            for leaf in rows_of(outputs):
                scope.kinds[id(leaf)] = (leaf, kind)

    def _tried(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> tuple[Any, bool]:
        """Calls a layer with the rows of this replica, if that is proven."""
        proof = scope.new_proof()
        rows = rows_of(given)
        for row in rows:
            kind = scope.kinds.get(id(row), (row, Rows()))[1]
            proof.take([row, *masks_of([row])], kind)
        mark, first = scope.mark(), len(scope.losses)
        masked = [(row, keras_internals.mask_of(row)) for row in rows]
        before = held(scope, getattr(layer, "variables", ()), proof)
        called = scope.mark()
        with proving(proof):
            outputs = own(*given[0], **given[1])
        kinds = [proof.of(loss) for loss in scope.losses[first:]]
        added = all(
            loss is scope.known_losses.get(id(loss))
            or kind in (SUM, MEAN, FIXED)
            for loss, kind in zip(scope.losses[first:], kinds, strict=True)
        )
        leaves = tf.nest.flatten(outputs, expand_composites=True)
        # Layers may exchange something themselves, and are computed whole then.
        made = [proof.found(leaf) for leaf in leaves]
        apart = not composites_of(outputs) and all(map(is_apart, made))
        written = scope.written_since(called)
        parts = parts_of(scope, proof, before, written, self._exchange)
        if added and apart and parts is not None:
            self._proven.add(id(layer))
            keep(scope, parts)
            for place, kind in enumerate(kinds, first):
                note_loss(layer, scope, place, kind, share)
            if not active():
                for leaf, kind in zip(leaves, made, strict=True):
                    self._keep(scope, leaf, kind)
                    scope.proof.take([leaf], kind)
            return outputs, True
        if (
            added
            and parts is not None
            and active()
            and all(kind == FIXED or isinstance(kind, Rows) for kind in made)
        ):
            return outputs, False  # Its caller's proof goes on from there.
        # What acts by itself would act here as well.
        remains = scope.written_in_place or scope.acts_since(mark)
        if not remains:
            scope.reset(mark)
        # Some of Keras's layers take the mask from what they are called with.
        for row, mask in masked:
            if mask is not None:
                keras_internals.set_mask(row, mask)
        unproven = (
            "what it adds to the loss is one number, a sum or a mean over rows"
        )
        if added:
            unproven = APART
        if apart and added:
            unproven = "what it writes adds up over the rows"
        self._take_whole(layer, unproven)
        # Replicas compute it whole together, or none does.
        if remains or id(layer) in self._proven:
            raise TraceAgain
        if not keras_internals.is_of_library(layer):
            self._attempts.give_up()
        return self._called_whole(layer, own, given, scope, share), True


def trust(proof: RowProof, inputs: Any, outputs: Any) -> None:
    """Takes for known what a layer makes that keeps rows apart.

    Args:
        proof: Knows the inputs, or does not.
        inputs: Of the layer.
        outputs: Of the layer.
    """
    kinds = {proof.of(row) for row in rows_of(inputs)}
    if len(kinds) != 1 or any(row.shape.rank == 1 for row in rows_of(inputs)):
        return
    (kind,) = kinds
    if isinstance(kind, Rows) and not kind.axis and not kind.listed:
        leaves = rows_of(outputs)
        proof.take([*leaves, *masks_of(leaves)], kind)


def _in_rows(proof: RowProof, given: Any) -> bool:
    """Returns whether the first axis of what is given is that of the rows."""
    if composites_of(given):
        return False
    kinds = [proof.of(row) for row in rows_of(given)]
    listed = any(isinstance(kind, Rows) and kind.listed for kind in kinds)
    return bool(kinds) and all(map(is_apart, kinds)) and not listed
