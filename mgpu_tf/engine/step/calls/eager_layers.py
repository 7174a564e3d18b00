"""Layers that run eagerly in a step in which a replica has its rows.

The outermost such layer is traced once for each kind of input, and looked at
(`row_proof.py`). If it is not proven, or cannot be traced, each replica
computes it from the rows of all. Where no replica has these at once it is
refused.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals, throwaway
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.step_scope import StepScope
from mgpu_tf.engine.exchange.composites import composites_of
from mgpu_tf.engine.row_proof import FIXED, MEAN, SUM, RowProof, Rows, proving
from mgpu_tf.engine.step.calls.state_parts import Parts, held, keep, parts_of
from mgpu_tf.engine.step.calls.whole_layers import (
    WholeLayers,
    is_apart,
    note_loss,
    replaced,
)
from mgpu_tf.engine.step.plain_variables import check_parts
from mgpu_tf.errors import ConfigurationError

_log = logging.getLogger("mgpu_tf")
APART = "each row of its outputs comes of its own row"
_WHOLE = (
    "%s (%s) is computed whole by each replica, of the inputs that replicas "
    f"send each other: it runs eagerly, and it is not proven that {APART}"
)


@dataclasses.dataclass(frozen=True)
class _Proven:
    """What a trace has shown of a layer.

    Attributes:
        parts: What it writes, as `parts_of`.
        has_rows: Which of its outputs have rows.
        added: What it gives to `add_loss`: sums, means, or values that no
            example changes.
    """

    parts: Parts
    has_rows: list[bool]
    added: list[Any]


def _as_traced(
    layer: keras.layers.Layer, does: str, found: list[Any], traced: list[Any]
) -> None:
    if len(found) != len(traced):
        raise ConfigurationError(
            "In trainer.trace, on several replicas, a layer returns and "
            "adds to the loss as many values in each step as when it was "
            f"traced. Received: {layer.name!r}, which {does} {len(found)} "
            f"values, and {len(traced)} in its graph. Use 'one_device'."
        )


class EagerLayers:
    """Calls layers that run eagerly.

    Args:
        whole: Computes layers of the rows of all; None where no replica has
            them at once.
        refuse: Refuses a layer, for what is not proven of it.
        taken: The layers that are computed so, by identity. A trace adds to
            them what it finds.
    """

    def __init__(
        self,
        whole: WholeLayers | None,
        refuse: Callable[[keras.layers.Layer, str], None],
        taken: set[int],
    ) -> None:
        self._whole = whole
        self._refuse = refuse
        self._taken = taken
        # By what a layer is given; None where it is not proven.
        self._known: dict[Any, _Proven | None] = {}

    def call(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        scope: StepScope,
        share: BatchShare,
    ) -> Any:
        """Calls a layer that runs eagerly; the outermost one is proven.

        It is traced for that. If it is not proven, or cannot be traced, it is
        computed from the rows of all.
        """
        if scope.within_graph:
            return own(*given[0], **given[1])
        local = max(int(share.local), 1)
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
            if key not in self._known:
                self._known[key] = (
                    None
                    if composite
                    else self._proven(layer, own, given, rows, scope)
                )
                if self._known[key] is None and self._whole is not None:
                    _log.info(_WHOLE, layer.name, type(layer).__name__)
            known = self._known[key]
            if known is not None:
                starts = {
                    key: scope.hold(part[0])
                    for key, part in known.parts.items()
                    if part
                }
                first = len(scope.losses)
                outputs = own(*given[0], **given[1])
                keep(
                    scope,
                    {
                        key: part and (part[0], starts[key], part[2])
                        for key, part in known.parts.items()
                    },
                )
                leaves = tf.nest.flatten(outputs, expand_composites=True)
                _as_traced(layer, "returns", leaves, known.has_rows)
                _as_traced(layer, "adds", scope.losses[first:], known.added)
                for leaf, has in zip(leaves, known.has_rows, strict=True):
                    scope.has_rows[id(leaf)] = leaf, has
                for place, kind in enumerate(known.added, first):
                    note_loss(layer, scope, place, kind, share)
                return outputs
            if self._whole is None:
                self._refuse(layer, APART)
            assert self._whole is not None
            return self._whole.call_eagerly(
                layer, own, given, rows, scope, share
            )
        finally:
            scope.within_graph = False

    def _proven(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        given: Any,
        rows: dict[int, tf.Tensor],
        scope: StepScope,
    ) -> _Proven | None:
        """Traces a call of a layer that runs eagerly, and looks at it."""
        mark, graph, taken = scope.mark(), scope.graph, set(self._taken)
        busy, scope.busy = scope.busy, True  # Nothing is gathered for it.
        proven: list[_Proven | None] = []
        graphs: list[Any] = []

        def call(*traced: tf.Tensor) -> None:
            scope.graph = tf.compat.v1.get_default_graph()
            graphs.append(scope.graph)
            variables = getattr(layer, "variables", ())
            for variable in filter(keras_internals.is_split, variables):
                value = tf.zeros(variable.shape, variable.dtype)
                scope.state_mapping[id(variable)] = value
            every = dict(zip(rows, traced, strict=True))
            arguments, named = replaced(given, every)
            proof = RowProof(traced)
            first = len(scope.losses)
            before = held(scope, variables, proof)
            called = scope.mark()
            with proving(proof):
                outputs = own(*arguments, **named)
            leaves = tf.nest.flatten(outputs, expand_composites=True)
            kinds = list(map(proof.of, leaves))
            added = [
                scope.added_as.get(id(loss), proof.of(loss))
                for loss in scope.losses[first:]
            ]
            apart = (
                self._taken == taken
                and all(map(is_apart, kinds))
                and all(kind in (SUM, MEAN, FIXED) for kind in added)
            )
            written = scope.written_since(called)
            # There will be no graph to read what a layer writes to a weight.
            weights = list(filter(scope.state.is_read, written))
            values = map(scope.value, weights)
            apart = apart and all(proof.of(v) == FIXED for v in values)
            parts = parts_of(scope, proof, before, written) if apart else None
            has_rows = [isinstance(kind, Rows) for kind in kinds]
            found = None
            if parts is not None:
                parts |= dict.fromkeys(map(id, weights))
                found = _Proven(parts, has_rows, added)
            proven.append(found)
            if self._whole is None:
                check_parts(scope, scope.graph)

        specs = [
            tf.TensorSpec([None, *row.shape[1:]], row.dtype)
            for row in rows.values()
        ]
        try:
            throwaway.graph_of(call, *specs)
        except Exception as error:  # Code of the author's that needs values.
            if isinstance(error, ConfigurationError) and self._whole is None:
                raise
            proven.clear()
        finally:
            scope.reset(mark)
            scope.graph, scope.busy = graph, busy
            self._taken.intersection_update(taken)
        if len(proven) == 1 and proven[0] is not None:
            return proven[0]
        # It will be computed from the rows of all, where there is no graph.
        for traced_in in graphs:
            scope.check_gradients(layer.name, traced_in)
        return None
