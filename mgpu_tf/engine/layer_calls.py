"""Calls of layers in a step in which a replica has its rows.

A layer of the author's own is looked at when it is called (`row_proof.py`). If
it is proven that each row of its outputs comes of its own row, and that what it
adds to the loss is a sum or a mean over the rows, all is well. If not, replicas
send each other the inputs of this layer, and each computes the layer whole: its
outputs, its losses, its state and its draws are those of one device, whatever
the layer does. Each replica goes on with its rows of the outputs. Where parts
of a batch are computed one after another, such a layer is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.contributions import (
    BatchShare,
    current_share,
    sharing,
)
from mgpu_tf.engine.exchange import Exchange
from mgpu_tf.engine.random_rows import entered_again
from mgpu_tf.engine.row_proof import (
    FIXED,
    MEAN,
    SUM,
    RowProof,
    Rows,
    active,
    proving,
)
from mgpu_tf.engine.state import ReplicaState
from mgpu_tf.engine.step_scope import StepScope
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")


class LayerCalls:
    """Computes layers whole that are not proven to keep rows apart.

    Args:
        model: A built model.
        state: Knows the seeds.
        exchange: Gives replicas the rows of all; None where nothing does.
        in_parts: Whether parts of a batch are computed one after another.
        plainly: Lets a layer be called once in a step and not layer by layer.
            Returns whether that changes anything. None where none is.
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
        own = [
            layer
            for layer in self._layers
            if not keras_internals.is_keras_own(layer)
        ]
        self._own = {id(layer) for layer in own}
        self._whole: set[int] = set()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets layers be called so, while a step is traced."""
        looks = self._exchange is not None or self._in_parts
        if not looks or not self._own:
            yield
            return
        with keras_internals.calls_replaced(self._layers, self._called):
            yield

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
            if id(layer) in self._own - self._whole
            and any(own is variable for own in layer.variables)
        ]
        if not owners:
            return False
        layer = min(owners, key=lambda layer: len(layer.variables))
        self._take_whole(
            layer, f"what it writes to {variable.name!r} adds up over the rows"
        )
        return True

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
            or tf.executing_eagerly()
        ):
            return own(*arguments, **named)
        proofs = active()
        given = (arguments, named)
        if id(layer) not in self._own:
            outputs = own(*arguments, **named)
            if keras_internals.is_by_row(layer):
                for proof in proofs:
                    trust(proof, given, outputs)
            return outputs
        if id(layer) in self._whole:
            outputs = self._computed_whole(layer, own, given, scope, share)
            proven = True
        else:
            outputs, proven = self._tried(layer, own, given, scope, share)
        if proven:
            for proof in proofs:
                trust(proof, given, outputs)
        return outputs

    def _tried(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> tuple[Any, bool]:
        """Calls a layer with the rows of this replica, if that is proven."""
        proof = RowProof()
        proof.skip(tf.compat.v1.get_default_graph())
        rows = _rows(given)
        proof.take([*rows, *_masks(rows)], Rows())
        mark, first = scope.mark(), len(scope.losses)
        masked = [(row, keras_internals.mask_of(row)) for row in rows]
        with proving(proof):
            outputs = own(*given[0], **given[1])
        kinds = [proof.of(loss) for loss in scope.losses[first:]]
        added = all(
            loss is scope.known_losses.get(id(loss))
            or kind in (SUM, MEAN, FIXED)
            for loss, kind in zip(scope.losses[first:], kinds, strict=True)
        )
        leaves = tf.nest.flatten(outputs, expand_composites=True)
        apart = not rows or all(
            kind == FIXED or (isinstance(kind, Rows) and not kind.axis)
            for kind in map(proof.of, leaves)
        )
        if added and apart:
            for place, kind in enumerate(kinds, first):
                self._note_loss(layer, scope, place, kind, share)
            return outputs, True
        inner = keras_internals.inner_layers(layer)
        if added and any(id(each) in self._whole for each in inner):
            return outputs, False
        scope.reset(mark)
        # Some of Keras's layers take the mask from what they are called with.
        for row, mask in masked:
            if mask is not None:
                keras_internals.set_mask(row, mask)
        self._take_whole(
            layer,
            "each row of its outputs comes of its own row"
            if added
            else "what it adds to the loss is a sum or a mean over the rows",
        )
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
        every = {id(row): self._joined(row) for row in _rows(given)}
        arguments, named = tf.nest.map_structure(
            lambda leaf: every.get(id(leaf), leaf), given
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
            scope.agreed.add(id(variable))
        for place in range(first, len(scope.losses)):
            self._replace_loss(
                layer, scope, place, tf.identity(scope.losses[place])
            )

        def part(output: Any) -> Any:
            if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
                return output
            if output.shape.rank and output.shape[0] is not None:
                return output  # It has no rows.
            # An example may have several rows, as of flattened sequences.
            count = tf.shape(output, out_type=tf.int64)[0]
            several = count // cut.total
            check = tf.debugging.assert_equal(
                several * cut.total,
                count,
                f"{layer.name}: what a layer returns that is computed of the "
                "global batch has as many rows for each example.",
            )
            with tf.control_dependencies([check] if check is not None else []):
                low = several * cut.low
            mine = output[low : low + several * cut.count]
            return tf.ensure_shape(mine, [None, *output.shape[1:]])

        return tf.nest.map_structure(part, outputs)

    def _joined(self, row: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all replicas, with their mask."""
        assert self._exchange is not None
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
