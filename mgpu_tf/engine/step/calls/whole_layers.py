"""Layers that each replica computes from the rows of all.

Replicas send each other the inputs of such a layer, with their masks. Each
computes it as one device does, with the same draws, and goes on with its rows
of the outputs. Outputs whose first axis is not that of the rows stay whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.author.step_scope import StepScope, leaves_of
from mgpu_tf.engine.exchange import composites
from mgpu_tf.engine.exchange.composites import COMPOSITES, composites_of
from mgpu_tf.engine.exchange.crossing import Cut, Exchange
from mgpu_tf.engine.row_proof import (
    FIXED,
    SUM,
    UNPROVEN,
    Kind,
    Rows,
    active,
)
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError


class WholeLayers:
    """Computes layers of the rows of all replicas.

    Args:
        state: Knows the seeds.
        exchange: Gives replicas the rows of all.
        compute_whole: Lets the layer that writes a variable be computed whole.
            Returns whether it will be, in another trace.
    """

    def __init__(
        self,
        state: ReplicaState,
        exchange: Exchange,
        compute_whole: Callable[[keras.Variable], bool],
    ) -> None:
        self._state = state
        self._exchange = exchange
        self._compute_whole = compute_whole

    def call(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        """Calls a layer, and returns this replica's rows of its outputs."""
        cut = self._exchange.cut(share.local)
        leaves = tf.nest.flatten(given)
        every = {
            id(row): self._joined(row, share.local)
            for row in [*rows_of(given), *composites_of(given)]
            if id(row) not in scope.whole
        }
        proof = scope.new_proof()
        known = scope.whole | scope.kinds
        for leaf in leaves:
            if id(leaf) in every or id(leaf) in scope.whole:
                _, kind = known.get(id(leaf), (leaf, _kind_of(leaf)))
                proof.take([every.get(id(leaf), leaf)], kind)
        mixes = not any(id(leaf) in scope.whole for leaf in leaves)
        arguments, named = replaced(given, every)
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
            if isinstance(output, COMPOSITES):
                mine = part_of(output, cut, layer.name)
                if not active():
                    scope.proof.take([mine], _kind_of(mine))
                return mine
            if not isinstance(output, tf.Tensor):
                return output
            kind = proof.of(output)
            first = isinstance(kind, Rows) and not kind.axis
            # Of whole inputs what is not proven may have rows on any axis.
            first |= mixes and not isinstance(kind, Rows)
            if rows_of(output) and (first or active()):
                mine = part_of(output, cut, layer.name)
                if not active():
                    scope.proof.take([mine, *masks_of([mine])], Rows())
                return mine
            if kind == UNPROVEN:
                output = _not_of_rows(output, cut, layer.name)
            if not is_same(output):
                scope.whole[id(output)] = (output, kind)
            if not active():
                scope.take_alike([output])
            return output

        return tf.nest.map_structure(part, outputs)

    def call_eagerly(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        rows: dict[int, tf.Tensor],
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        """Calls a layer that runs eagerly.

        Args:
            layer: The layer.
            own: Calls it.
            given: Its arguments.
            rows: Those of them that have this replica's rows, by identity.
            scope: That of the step.
            share: Of the batch.
        """
        cut = self._exchange.cut(share.local)
        every = {
            key: self._exchange.joined(
                composites.own_rows(row, share.local), cut
            )
            for key, row in rows.items()
        }
        for value in composites_of(given):
            every[id(value)] = self._joined(value, share.local)
        arguments, named = replaced(given, every)
        outputs = self._of_all_rows(layer, own, arguments, named, scope)
        total = int(cut.total)

        def part(leaf: Any) -> Any:
            if isinstance(leaf, COMPOSITES):
                return part_of(leaf, cut, layer.name)
            if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
                return leaf
            several = leaf.shape[0] % total == 0
            own = part_of(leaf, cut, layer.name) if several else leaf
            scope.has_rows[id(own)] = own, several
            return own

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
                if self._compute_whole(variable):
                    raise TraceAgain
                raise ConfigurationError(
                    "State that a layer computes from all rows is not written "
                    "of the rows of one replica before that. Received: "
                    f"{variable.path}, which {layer.name!r} reads. Give each "
                    "of the two layers a variable of its own."
                )
        mark, first = scope.mark(), len(scope.losses)
        with (
            scope.of_all_rows(),
            self._same_draws(scope),
        ):
            outputs = own(*arguments, **named)
        for variable in scope.written_since(mark):
            scope.agree(variable)
        for place in range(first, len(scope.losses)):
            replace_loss(layer, scope, place, tf.identity(scope.losses[place]))
        return outputs

    def _joined(self, row: Any, local: tf.Tensor) -> Any:
        """Returns the rows of all replicas, with their mask."""
        exchange, own = self._exchange, composites.own_rows(row, local)
        if isinstance(row, COMPOSITES):
            return composites.joined(own, exchange.cut, exchange.joined)
        # An example may have several rows, as of flattened sequences.
        cut = exchange.cut_of(own)
        return keras_internals.carried(
            row,
            lambda each: exchange.joined(composites.own_rows(each, local), cut),
        )

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


def note_loss(
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
    replace_loss(layer, scope, place, mean)
    scope.added_as[id(mean)] = kind


def replace_loss(
    layer: keras.layers.Layer, scope: StepScope, place: int, loss: tf.Tensor
) -> None:
    """Puts another loss in the place of one that a layer has added."""
    keras_internals.own_loss_instead(layer, scope.losses[place], loss)
    scope.losses[place] = loss
    scope.known_losses[id(loss)] = loss


def _not_of_rows(output: tf.Tensor, cut: Cut, name: str) -> tf.Tensor:
    """Returns what has a length of its own, which may not be the batch's."""
    if not output.shape.rank or output.shape[0] is None:
        return output
    check = tf.debugging.assert_none_equal(
        cut.total,
        tf.constant(output.shape[0], tf.int64),
        message=f"{AS_MANY_ROWS} {name}, which returns {output.shape[0]}.",
    )
    with tf.control_dependencies([check] if check is not None else []):
        return keras_internals.carried(output, tf.identity)


def part_of(output: Any, cut: Cut, name: str) -> Any:
    """Returns a replica's rows of what was computed, as Keras knows them.

    Another example's where it has none, to compute with.
    """
    count = composites.number_of_rows(output)
    # An example may have several rows, as of flattened sequences.
    several = count // cut.total
    check = tf.debugging.assert_equal(
        several * cut.total,
        count,
        f"{ROWS_FOR_EACH} {name}.",
    )
    with tf.control_dependencies([check] if check is not None else []):
        low = several * cut.low
    own = several * cut.count
    if isinstance(output, COMPOSITES):
        own = tf.maximum(own, several)
        return composites.part(output, tf.minimum(low, count - own), own)

    few = tf.where(cut.count > 0, tf.constant(0, tf.int64), several)

    def mine(value: tf.Tensor) -> tf.Tensor:
        another = tf.stop_gradient(value[:few])
        rows = tf.concat([value[low : low + own], another], 0)
        rows.set_shape([None, *value.shape[1:]])
        return rows

    return keras_internals.carried(output, mine)


def replaced(given: Any, every: dict[int, tf.Tensor]) -> Any:
    """Returns arguments with other tensors for some, by identity."""
    return tf.nest.map_structure(lambda leaf: every.get(id(leaf), leaf), given)


def rows_of(values: Any) -> list[tf.Tensor]:
    """Returns the tensors among values that may have rows."""
    return [
        leaf
        for leaf in tf.nest.flatten(values)
        if isinstance(leaf, tf.Tensor)
        # What is the same for all rows, as a mask, has a length that is known.
        and (leaf.shape.rank is None or (leaf.shape.rank and not leaf.shape[0]))
    ]


AS_MANY_ROWS = (
    "On several replicas, where a layer computes all rows of a batch and "
    "returns a fixed number of rows, it cannot be proven whether these are one "
    "for each example. So the batch must have another number of rows. Change "
    "its size, take the number from ops.shape(x)[0], or use the strategy "
    "one_device. Received: the layer"
)


ROWS_FOR_EACH = (
    "On several replicas, where a layer computes all rows of a batch, it must "
    "return one row or more for each example. Pad what it leaves out, or use "
    "the strategy one_device. Received: another number of rows, of the layer"
)


def masks_of(rows: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the masks that Keras has left on rows."""
    masks = map(keras_internals.mask_of, rows)
    return [mask for mask in masks if mask is not None]


def is_apart(kind: Any) -> bool:
    """Returns whether each row of an output comes of its own row."""
    return kind == FIXED or (isinstance(kind, Rows) and not kind.axis)


def is_same(leaf: Any) -> bool:
    """Returns whether what is computed whole has no axis of rows."""
    return isinstance(leaf, tf.Tensor) and leaf.shape.is_fully_defined()


def _kind_of(leaf: Any) -> Kind:
    """Returns what is known of rows: nothing of ragged and sparse ones."""
    return UNPROVEN if isinstance(leaf, COMPOSITES) else Rows()
