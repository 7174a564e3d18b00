"""Calls of layers in a step in which a replica has its rows.

Layers of Keras's that make each row of its own row are known by their type.
Each other layer, and each function of `keras.ops` in a functional model, is
looked at when it is called (`row_proof.py`). If it is proven that each row of
its outputs comes of its own row, and that what it adds to the loss is a sum or
a mean over the rows, all is well. If not, replicas send each other the inputs
of this layer, and each computes the layer whole: its outputs, its losses, its
state and its draws are those of one device, whatever the layer does. Each
replica goes on with its rows of the outputs. Outputs whose first axis is not
that of the rows stay whole, and so does what a functional model makes of them,
up to its outputs. Where parts of a batch are computed one after another, such
a layer is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import composites, keras_internals, throwaway
from mgpu_tf.engine.composites import COMPOSITES, composites_of
from mgpu_tf.engine.contributions import (
    BatchShare,
    current_share,
    sharing,
)
from mgpu_tf.engine.exchange import Cut, Exchange
from mgpu_tf.engine.inlined import inlined, refused
from mgpu_tf.engine.random_rows import entered_again
from mgpu_tf.engine.row_proof import (
    FIXED,
    MEAN,
    SUM,
    UNPROVEN,
    Kind,
    RowProof,
    Rows,
    active,
    proving,
)
from mgpu_tf.engine.state import ReplicaState
from mgpu_tf.engine.state_parts import Parts, held, keep, parts_of
from mgpu_tf.engine.step_scope import Owners, StepScope, leaves_of
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")
_APART = "each row of its outputs comes of its own row"
_WHOLE_EAGERLY = (
    "%s (%s) is computed whole by each replica, of the inputs that replicas "
    "send each other: it runs eagerly, and it is not proven that each row of "
    "its outputs comes of its own row"
)


class LayerCalls:
    """Computes layers whole that are not proven to keep rows apart.

    Args:
        model: A built model.
        state: Knows the seeds.
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
        self._whole: set[int] = set()
        self.owners = Owners()
        # Raised where functions of the author's cannot be inlined.
        self._refusal: ConfigurationError | None = None
        # What a layer writes that runs eagerly, by what it is given; None
        # where it is not proven.
        self._eager: dict[Any, Parts | None] = {}

    @property
    def inlines(self) -> bool:
        """Whether functions of the author's are traced with the step."""
        return self._refusal is not None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets layers be called so, while a step is traced."""
        with contextlib.ExitStack() as stack:
            if self.inlines:
                stack.enter_context(inlined())
            if self._exchange is not None or self._in_parts:
                stack.enter_context(
                    keras_internals.calls_replaced(self._every, self._called)
                )
            try:
                yield
            except tf.errors.OperatorNotAllowedInGraphError as error:
                if self._refusal is None:
                    raise
                raise self._refusal from error

    def inline(self, variable: keras.Variable) -> None:
        """Lets functions of the author's be traced with the step.

        Args:
            variable: What one of them reads that the step lends to it.

        Raises:
            TraceAgain: They will be, in another trace.
            ConfigurationError: They cannot be.
        """
        again = not tf.config.functions_run_eagerly()
        self._refusal = refused(variable)
        raise TraceAgain if again else self._refusal

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
                "What is computed of the rows of all replicas reads what it "
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
            return self._called_eagerly(layer, own, given, scope, share)
        if id(layer) in self._graphs - self._whole:
            return self._through_graph(own, given, scope, share)
        proofs = active()
        nested = tf.compat.v1.get_default_graph() is not scope.graph
        if proofs and (nested or not _in_rows(proofs[-1], given)):
            # The proof of the layer in which it is called says what it makes.
            return own(*arguments, **named)
        rows = _rows(given)
        kinds = {scope.kinds.get(id(row), (row, Rows()))[1] for row in rows}
        if composites_of(given):
            kinds.add(Rows())
        if any(id(leaf) in scope.whole for leaf in tf.nest.flatten(given)):
            if self._plainly is not None and self._plainly(layer):
                raise TraceAgain
            return self._computed_whole(layer, own, given, scope, share)
        if id(layer) in self._by_row and len(kinds) < 2:
            outputs, proven = self._trusted(own, given, scope), True
            kind = kinds.pop() if kinds else FIXED
            self._keep(scope, outputs, kind)
            if not proofs:
                scope.proof.take(_rows(outputs), kind)
                scope.proof.take(composites_of(outputs), UNPROVEN)
        elif id(layer) in self._whole or composites_of(given):
            if id(layer) not in self._whole:
                self._take_whole(layer, _APART)
            outputs = self._computed_whole(layer, own, given, scope, share)
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
                        [leaf for leaf in leaves if _is_same(leaf)], FIXED
                    )
        return outputs

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
        return tf.nest.map_structure(
            lambda leaf: (
                _part(leaf, cut, "the model")
                if id(leaf) in scope.whole
                else leaf
            ),
            outputs,
        )

    def _called_eagerly(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        """Calls a layer that runs eagerly; the outermost one is proven.

        It is traced for that. If it is not proven, or cannot be traced, it is
        computed of the rows of all.
        """
        if scope.within_graph or self._exchange is None:
            return own(*given[0], **given[1])
        local = int(share.local)
        rows = {
            id(leaf): leaf
            for leaf in tf.nest.flatten(given)
            if isinstance(leaf, tf.Tensor) and leaf.shape[:1] == [local]
        }
        scope.within_graph = True
        try:
            specs = tuple((t.dtype, *t.shape[1:]) for t in rows.values())
            composite = bool(composites_of(given))
            key = id(layer), scope.trains, composite, specs
            if key not in self._eager:
                self._eager[key] = (
                    None
                    if composite
                    else self._proven(layer, own, given, rows, scope)
                )
                if self._eager[key] is None:
                    _log.info(_WHOLE_EAGERLY, layer.name, type(layer).__name__)
            parts = self._eager[key]
            if parts is not None:
                starts = {
                    key: scope.hold(part[0])
                    for key, part in parts.items()
                    if part
                }
                outputs = own(*given[0], **given[1])
                keep(
                    scope,
                    {
                        key: part and (part[0], starts[key], part[2])
                        for key, part in parts.items()
                    },
                )
                return outputs
            cut = self._exchange.cut(share.local)
            every = {
                key: self._exchange.joined(row, cut)
                for key, row in rows.items()
            }
            for value in composites_of(given):
                every[id(value)] = self._joined(value)
            arguments, named = _with(given, every)
            outputs = self._of_all_rows(layer, own, arguments, named, scope)
            total = int(cut.total)

            def part(leaf: Any) -> Any:
                if isinstance(leaf, COMPOSITES):
                    return _part(leaf, cut, layer.name)
                if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
                    return leaf
                several = leaf.shape[0] % total == 0
                return _part(leaf, cut, layer.name) if several else leaf

            return tf.nest.map_structure(part, outputs)
        finally:
            scope.within_graph = False

    def _proven(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        rows: dict[int, tf.Tensor],
        scope: StepScope,
    ) -> Parts | None:
        """Traces a call of a layer that runs eagerly, and looks at it.

        Returns:
            What it writes, as `parts_of`; None where it is not proven.
        """
        mark, graph, whole = scope.mark(), scope.graph, set(self._whole)
        busy, scope.busy = scope.busy, True  # Nothing is gathered for it.
        proven: list[Parts | None] = []

        def call(*traced: tf.Tensor) -> None:
            scope.graph = tf.compat.v1.get_default_graph()
            for variable in filter(keras_internals.is_split, layer.variables):
                value = tf.zeros(variable.shape, variable.dtype)
                scope.state_mapping[id(variable)] = value
            every = dict(zip(rows, traced, strict=True))
            arguments, named = _with(given, every)
            proof = RowProof(traced)
            first = len(scope.losses)
            before = held(scope, getattr(layer, "variables", ()), proof)
            called = scope.mark()
            with proving(proof):
                outputs = own(*arguments, **named)
            leaves = tf.nest.flatten(outputs, expand_composites=True)
            apart = (
                self._whole == whole
                and all(map(_is_apart, map(proof.of, leaves)))
                and all(
                    id(loss) in scope.known_losses
                    or proof.of(loss) in (SUM, MEAN, FIXED)
                    for loss in scope.losses[first:]
                )
            )
            written = scope.written_since(called)
            proven.append(
                parts_of(scope, proof, before, written) if apart else None
            )

        specs = [
            tf.TensorSpec([None, *row.shape[1:]], row.dtype)
            for row in rows.values()
        ]
        try:
            throwaway.graph_of(call, *specs)
        except Exception:  # Code of the author's that needs values.
            return None
        finally:
            scope.reset(mark)
            scope.graph, self._whole, scope.busy = graph, whole, busy
        return proven[0] if len(proven) == 1 else None

    @staticmethod
    def _keep(scope: StepScope, outputs: Any, kind: Any) -> None:
        """Notes what else outputs are than rows."""
        if kind not in (Rows(), FIXED):
            for leaf in _rows(outputs):
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
        rows = _rows(given)
        for row in rows:
            kind = scope.kinds.get(id(row), (row, Rows()))[1]
            proof.take([row, *_masks([row])], kind)
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
        apart = not composites_of(outputs) and all(map(_is_apart, made))
        written = scope.written_since(called)
        parts = parts_of(scope, proof, before, written, self._exchange)
        if added and apart and parts is not None:
            keep(scope, parts)
            for place, kind in enumerate(kinds, first):
                self._note_loss(layer, scope, place, kind, share)
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
        remains = scope.written_in_place or any(
            op.op_def.is_stateful for op in proof.unproven
        )
        if not remains:
            scope.reset(mark)
        # Some of Keras's layers take the mask from what they are called with.
        for row, mask in masked:
            if mask is not None:
                keras_internals.set_mask(row, mask)
        unproven = "what it adds to the loss is a sum or a mean over the rows"
        if added:
            unproven = _APART
        if apart and added:
            unproven = "what it writes adds up over the rows"
        self._take_whole(layer, unproven)
        if remains:
            raise TraceAgain
        return self._computed_whole(layer, own, given, scope, share), True

    def _note_loss(
        self,
        layer: keras.layers.Layer,
        scope: StepScope,
        place: int,
        kind: Any,
        share: BatchShare,
    ) -> None:
        """Makes an added loss a mean over the rows, which is known as such."""
        loss = scope.losses[place]
        if id(loss) in scope.known_losses:
            return
        mean = tf.identity(loss)
        if kind == SUM:
            mean = loss / share.fraction(loss.dtype)
        self._replace_loss(layer, scope, place, mean)

    def _replace_loss(
        self,
        layer: keras.layers.Layer,
        scope: StepScope,
        place: int,
        loss: tf.Tensor,
    ) -> None:
        scope.losses[place] = loss
        scope.known_losses[id(loss)] = loss
        keras_internals.own_loss(layer, loss)

    def _computed_whole(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        assert self._exchange is not None
        cut = self._exchange.cut(share.local)
        leaves = tf.nest.flatten(given)
        every = {
            id(row): self._joined(row)
            for row in [*_rows(given), *composites_of(given)]
            if id(row) not in scope.whole
        }
        proof = scope.new_proof()
        known = scope.whole | scope.kinds
        for leaf in leaves:
            if id(leaf) in every or id(leaf) in scope.whole:
                _, kind = known.get(id(leaf), (leaf, _kind_of(leaf)))
                proof.take([every.get(id(leaf), leaf)], kind)
        mixes = not any(id(leaf) in scope.whole for leaf in leaves)
        arguments, named = _with(given, every)
        scope.take_alike(leaves_of(list(every.values())))
        begun, mark, first = (
            scope.known_operations(),
            scope.mark(),
            len(scope.losses),
        )
        outputs = self._of_all_rows(layer, own, arguments, named, scope)
        written = list(map(scope.value, scope.written_since(mark)))
        made = [outputs, scope.losses[first:], written]
        scope.check_given(layer.name, begun, made)

        def part(output: Any) -> Any:
            mine = mine_of(output)
            if not active() and isinstance(output, (tf.Tensor, *COMPOSITES)):
                if mine is output:
                    scope.take_alike([mine])
                else:
                    scope.proof.take([mine], _kind_of(mine))
            return mine

        def mine_of(output: Any) -> Any:
            if isinstance(output, COMPOSITES):
                return _part(output, cut, layer.name)
            if not isinstance(output, tf.Tensor) or _is_same(output):
                return output
            kind = proof.of(output)
            first = isinstance(kind, Rows) and not kind.axis
            # Of whole inputs what is not proven may have rows on any axis.
            first |= mixes and not isinstance(kind, Rows)
            if _rows(output) and (first or active()):
                return _part(output, cut, layer.name)
            scope.whole[id(output)] = (output, kind)
            return output

        return tf.nest.map_structure(part, outputs)

    def _of_all_rows(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        arguments: Any,
        named: Any,
        scope: StepScope,
    ) -> Any:
        """Calls a layer with the rows of all, as on one device."""
        for variable in getattr(layer, "variables", ()):
            if id(variable) in scope.parts:
                # It is of this replica's rows, and is read here.
                if self.compute_whole(variable):
                    raise TraceAgain
                raise ConfigurationError(
                    "State that a layer computes of all rows is not written "
                    "of the rows of one replica before that. Received: "
                    f"{variable.path}, which {layer.name!r} reads. Give each "
                    "of the two layers a variable of its own."
                )
        mark, first = scope.mark(), len(scope.losses)
        with (
            scope.of_all_rows(),
            sharing(None),
            self._same_draws(scope),
            entered_again(None),
        ):
            outputs = own(*arguments, **named)
        for variable in scope.written_since(mark):
            scope.agree(variable)
        for place in range(first, len(scope.losses)):
            self._replace_loss(
                layer, scope, place, tf.identity(scope.losses[place])
            )
        return outputs

    def _joined(self, row: Any) -> Any:
        """Returns the rows of all replicas, with their mask."""
        assert self._exchange is not None
        if isinstance(row, COMPOSITES):
            exchange = self._exchange
            return composites.joined(row, exchange.cut, exchange.joined)
        # An example may have several rows, as of flattened sequences.
        cut = self._exchange.cut(tf.shape(row, out_type=tf.int64)[0])
        every = self._exchange.joined(row, cut)
        mask = keras_internals.mask_of(row)
        if mask is not None:
            every_mask = self._exchange.joined(mask, cut)
            keras_internals.set_mask(every, every_mask)
        return every

    @contextlib.contextmanager
    def _same_draws(self, scope: StepScope) -> Iterator[None]:
        """Lets replicas draw from the same seeds in a block."""
        offsets = [] if self._state.draws_alike else self._state.seed_offsets()
        for sign in (-1, 1):
            for seed, offset in offsets:
                value = scope.value(seed) + sign * offset
                scope.state_mapping[id(seed)] = value
            if sign < 0:
                yield


def trust(proof: RowProof, inputs: Any, outputs: Any) -> None:
    """Takes for known what a layer makes that keeps rows apart.

    Args:
        proof: Knows the inputs, or does not.
        inputs: Of the layer.
        outputs: Of the layer.
    """
    kinds = {proof.of(row) for row in _rows(inputs)}
    if len(kinds) != 1 or any(row.shape.rank == 1 for row in _rows(inputs)):
        return
    (kind,) = kinds
    if isinstance(kind, Rows) and not kind.axis and not kind.listed:
        leaves = _rows(outputs)
        proof.take([*leaves, *_masks(leaves)], kind)


def _part(output: Any, cut: Cut, name: str) -> Any:
    """Returns a replica's rows of what was computed of the global batch."""
    composite = isinstance(output, COMPOSITES)
    if composite:
        count = composites.number_of_rows(output)
    else:
        count = tf.shape(output, out_type=tf.int64)[0]
    # An example may have several rows, as of flattened sequences.
    several = count // cut.total
    check = tf.debugging.assert_equal(
        several * cut.total,
        count,
        f"{name}: what a layer returns that is computed of the global batch "
        "has as many rows for each example.",
    )
    with tf.control_dependencies([check] if check is not None else []):
        low = several * cut.low
    if composite:
        return composites.part(output, low, several * cut.count)
    mine = output[low : low + several * cut.count]
    return tf.ensure_shape(mine, [None, *output.shape[1:]])


def _kind_of(leaf: Any) -> Kind:
    """Returns what is known of rows: nothing of ragged and sparse ones."""
    return UNPROVEN if isinstance(leaf, COMPOSITES) else Rows()


def _with(given: Any, every: dict[int, tf.Tensor]) -> Any:
    """Returns arguments with other tensors for some, by identity."""
    return tf.nest.map_structure(lambda leaf: every.get(id(leaf), leaf), given)


def _is_apart(kind: Any) -> bool:
    """Returns whether each row of an output comes of its own row."""
    return kind == FIXED or (isinstance(kind, Rows) and not kind.axis)


def _in_rows(proof: RowProof, given: Any) -> bool:
    """Returns whether the first axis of what is given is that of the rows."""
    if composites_of(given):
        return False
    kinds = [proof.of(row) for row in _rows(given)]
    listed = any(isinstance(kind, Rows) and kind.listed for kind in kinds)
    return all(map(_is_apart, kinds)) and not listed


def _is_same(leaf: Any) -> bool:
    """Returns whether what is computed whole has no axis of rows."""
    return isinstance(leaf, tf.Tensor) and leaf.shape.is_fully_defined()


def _rows(values: Any) -> list[tf.Tensor]:
    return [
        leaf
        for leaf in tf.nest.flatten(values)
        if isinstance(leaf, tf.Tensor)
        # What is the same for all rows, as a mask, has a length that is known.
        and (leaf.shape.rank is None or (leaf.shape.rank and not leaf.shape[0]))
    ]


def _masks(rows: list[tf.Tensor]) -> list[tf.Tensor]:
    masks = map(keras_internals.mask_of, rows)
    return [mask for mask in masks if mask is not None]
