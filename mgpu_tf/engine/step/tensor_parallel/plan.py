"""Which layers of a model are computed in parts, and how.

    plan = split_model(model, strategy, example)   # weights are stored in parts

A layout names weights; what it leaves follows from the structure of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import types
from collections.abc import Collection
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.row_proof import given_gradients
from mgpu_tf.engine.step.tensor_parallel import structure
from mgpu_tf.engine.step.tensor_parallel.layout import published_layout
from mgpu_tf.engine.step.tensor_parallel.lengths import asked_for, asked_inside
from mgpu_tf.engine.step.tensor_parallel.linear import Linear, linear_layers
from mgpu_tf.engine.step.tensor_parallel.sequence import (
    After,
    Passage,
    gates_of,
    leaves_of,
    passages_of,
)
from mgpu_tf.engine.step.tensor_parallel.structure import Gates
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Split
from mgpu_tf.strategies.split.fully_sharded import split_over
from mgpu_tf.strategies.split.layout import Layout
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

_log = logging.getLogger("mgpu_tf")

# The most weights that the log names, of those that stay whole.
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is computed in parts.

    Attributes:
        linear: The layers whose kernels are split.
        structure: How they are computed.
        over: The axis of the mesh of each, by identity.
        dropouts: The layers that draw for parts, each with its axis from the
            end, the length of that axis and the axis of the mesh.
        splits: How weights are stored in parts.
        passages: How layers pass parts of a sequence on, by identity.
        passing: Those of them that have no part of a weight.
        gates: Gates of the layers that hold layers; passages have them too.
    """

    linear: list[Linear]
    structure: structure.Structure
    over: dict[int, str]
    dropouts: list[tuple[keras.layers.Layer, int, int, str]]
    splits: list[tuple[keras.Variable, Split]]
    passages: dict[int, Passage]
    passing: list[keras.layers.Layer]
    gates: Gates


def split_model(
    model: keras.Model, strategy: tf.distribute.Strategy, example: Any
) -> Plan:
    """Splits the weights of a model; the arguments are those of `plan_of`."""
    plan = plan_of(model, strategy, example)
    for variable, split in plan.splits:
        if not _is_stored_as(variable, split):
            _store_in_parts(model, variable, split)
    return plan


def plan_of(
    model: keras.Model, strategy: tf.distribute.Strategy, example: Any
) -> Plan:
    """Returns what is split, as the layout of a strategy says.

    Args:
        model: A built model, made in the strategy's scope.
        strategy: The strategy.
        example: The specs of a batch.

    Raises:
        ConfigurationError: The layout does not fit the model.
    """
    chooser = _Chooser(model, strategy)
    linear = linear_layers(model)
    dropouts = keras_internals.dropout_layers(model)
    noted = [each.layer for each in linear.values()] + dropouts
    passes = _passes(model, example, noted)
    for one in passes:
        for op in given_gradients(one.operations[0].graph):
            raise ConfigurationError(
                "Where layers are computed in parts, a part of the gradient "
                "flows back between them. Received: a tf.custom_gradient that "
                f"is not linear in what flows back ({op.name}). Use 'fsdp', or "
                "apply it to gradients in a train_step."
            )
    inside = set().union(*(one.inside for one in passes), chooser.shared)
    linear = {key: each for key, each in linear.items() if key not in inside}
    given, over = chooser.given(linear)
    search = functools.partial(
        structure.structure_of,
        linear=linear,
        choose=chooser.choose,
        separate=lambda layer: over.get(layer, "tensor"),
    )
    found = search(passes, given=given)
    while stays := _outputs_in_parts(linear, found):
        # Code may have read a length that another device does not have.
        again = _passes(model, example, noted, stays)
        more = search(again, given=found.dims, gathered=found.gathered)
        gathered = more.gathered if again else found.gathered | set(stays)
        for known, unknown in zip(passes, again, strict=False):
            gathered = gathered | asked_for(
                known, unknown, stays, found.dropouts
            )
        if gathered == found.gathered:
            break
        found = search(passes, given=given, gathered=gathered)
    seen = {id(call.layer) for one in passes for call in one.calls.values()}
    for key, each in linear.items():
        if key not in seen:
            found.gathered.add(key)
            dim = chooser.choose(each, None)
            if key not in found.dims and dim is not None:
                found.dims[key] = dim
    used = [linear[key] for key in found.dims]
    splits = chooser.splits(found.dims, linear, over)
    _report(model, strategy, splits, found)
    drawn = _dropouts(passes, found, dropouts, over)
    plan = Plan(used, found, over, drawn, splits, {}, [], [])
    if strategy.sequence_parallel:
        return _with_passages(model, strategy, example, plan)
    return plan


def _with_passages(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    example: Any,
    plan: Plan,
) -> Plan:
    """Returns a plan of which layers pass parts of a sequence on, and how.

    Args:
        model: The model.
        strategy: The strategy.
        example: The specs of a batch.
        plan: All else.
    """
    after = {id(layer): After.PARTS for layer, *_ in plan.dropouts}
    for linear in plan.linear:
        key = id(linear.layer)
        dim, axis = plan.structure.dims[key], plan.over.get(key, "tensor")
        if axis != "tensor":
            after[key] = After.PARTS
        elif linear.sums(dim) or dim == linear.rows:
            after[key] = After.SUM
        elif key in plan.structure.gathered and linear.output_axis(dim) == -1:
            after[key] = After.GATHERED
        else:
            after[key] = After.PARTS
    leaves = leaves_of(model)
    draws = {id(layer) for layer in keras_internals.dropout_layers(model)}
    draws -= after.keys()
    opened = {id(layer) for layer in leaves} - after.keys() - draws
    gates = gates_of(model)
    found = passages_of(
        lambda unknown, whole: _passes(
            model, example, leaves, unknown, opened, gates, whole
        ),
        lambda known, unknown, layers: (
            asked_for(known, unknown, layers),
            asked_inside(known, unknown),
        ),
        *(after, draws, strategy.mesh.tensor),
    )
    passing = [
        layer
        for layer in leaves
        if id(layer) in found and id(layer) not in after
    ]
    _report_sequence(model, found, leaves)
    gates = [each for each in gates if {*map(id, each[1:])} & found.keys()]
    return dataclasses.replace(
        plan, passages=found, passing=passing, gates=gates
    )


def _report_sequence(
    model: keras.Model,
    found: dict[int, Passage],
    leaves: list[keras.layers.Layer],
) -> None:
    names = [
        layer.name
        for layer in leaves
        if id(layer) in found
        and (found[id(layer)].computes or found[id(layer)].cuts)
    ]
    if not names:
        _log.warning(
            "sequence_parallel: no layer of %s computes with a part of a "
            "sequence. It takes sums over devices of shape [rows, positions, "
            "features], of known length, and layers that treat positions alike",
            model.name,
        )
        return
    _log.info(
        "sequence_parallel: %d layers of %s have a part of the sequence on "
        "each device: %s%s",
        len(names),
        model.name,
        ", ".join(names[:_NAMED]),
        ", ..." if names[_NAMED:] else "",
    )


def _passes(
    model: keras.Model,
    example: Any,
    noted: list[keras.layers.Layer],
    unknown: dict[int, int] | None = None,
    opened: Collection[int] = (),
    gates: Gates = (),
    whole: structure.Known = types.MappingProxyType({}),
) -> list[structure.Pass]:
    try:
        return structure.traced(
            *(model, example, noted, unknown, opened, gates, whole)
        )
    except Exception as error:  # The author's code; the reason is theirs.
        _log.warning(
            "layout: outputs are gathered after each layer, since %s cannot "
            "be traced to find which may stay split (%s: %s)",
            model.name,
            type(error).__name__,
            " ".join(str(error).split()),
        )
        return []


def _outputs_in_parts(
    linear: dict[int, Linear], found: structure.Structure
) -> dict[int, int]:
    """Returns the layers whose outputs stay split, and along which axis."""
    axes = {
        key: linear[key].output_axis(dim)
        for key, dim in found.dims.items()
        if key not in found.gathered
    }
    return {key: axis for key, axis in axes.items() if axis is not None}


class _Chooser:
    """Decides along which dimensions weights are split."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        self._model = model
        self._mesh = strategy.mesh
        self._smallest = strategy.smallest_split
        layout: Layout = strategy.layout
        self._by_structure = layout.is_auto and self._mesh.tensor > 1
        if layout.is_auto:
            published = published_layout(model)
            if published is not None:
                layout, self._by_structure = Layout(published), False
        else:
            layout.check_used([weight.path for weight in model.weights])
        self._layout = layout
        self.shared = _shared(model)

    def given(
        self, linear: dict[int, Linear]
    ) -> tuple[dict[int, int], dict[int, str]]:
        """Returns the dimensions of kernels that patterns name, and axes."""
        dims, over = {}, {}
        for key, each in linear.items():
            found = self._named(each.kernel)
            if found is None and keras_internals.is_split(each.kernel):
                found = keras_internals.stored(each.kernel).split
            if found is not None and found.dim in each.dims:
                dims[key], over[key] = found.dim, found.over
        return dims, over

    def _named(self, variable: keras.Variable) -> Split | None:
        found = self._layout.split_of(variable)
        if found is None:
            return None
        dim, axis = found
        return self._possible(variable, dim, axis)

    def _possible(
        self, variable: keras.Variable, dim: int, axis: str, rows: bool = False
    ) -> Split | None:
        parts = self._mesh.length(axis)
        length = variable.shape[dim]
        rows = rows or id(variable) in self._tables
        if parts == 1 or length < parts or (length % parts and not rows):
            return None
        return Split(tuple(variable.shape), parts, dim, axis)

    @functools.cached_property
    def _tables(self) -> set[int]:
        """The tables of embeddings, whose rows need not divide exactly."""
        return {
            id(each.kernel)
            for each in linear_layers(self._model).values()
            if each.rows is not None
        }

    def choose(self, linear: Linear, axis: int | None) -> int | None:
        """Returns the dimension of a kernel by structure; None to leave it."""
        kernel = linear.kernel
        convolution = hasattr(linear.layer, "kernel_size")
        if (
            not self._by_structure
            or convolution
            or math.prod(kernel.shape) < self._smallest
        ):
            return None
        if axis is not None:
            dims = [d for d in linear.dims if linear.input_axis(d) == axis]
        elif linear.rows is not None:
            dims = [linear.rows]
        else:
            dims = linear.output_dims
        for dim in dims:
            if self._possible(kernel, dim, "tensor") is not None:
                return dim
        return None

    def splits(
        self,
        dims: dict[int, int],
        linear: dict[int, Linear],
        over: dict[int, str],
    ) -> list[tuple[keras.Variable, Split]]:
        """Returns the variables that are split, and how.

        What is split over the tensor axis is split over the fsdp axis again,
        and what it leaves over that axis alone, where it is large enough.
        """
        found: dict[int, tuple[keras.Variable, Split]] = {}
        for key, dim in dims.items():
            each, axis = linear[key], over.get(key, "tensor")
            split = self._possible(each.kernel, dim, axis)
            assert split is not None
            found[id(each.kernel)] = (each.kernel, split)
            bias_dim = each.bias_dim(dim)
            if self._by_structure and bias_dim is not None:
                part = self._possible(each.bias, bias_dim, axis)
                if part is not None:
                    found[id(each.bias)] = (each.bias, part)
        for variable in self._model.trainable_variables:
            named = self._named(variable)
            if id(variable) not in found and named is not None:
                found[id(variable)] = (variable, named)
        for variable in self._model.trainable_variables:
            _, split = found.get(id(variable), (variable, None))
            split = self._over_fsdp(variable, split)
            if split is not None:
                found[id(variable)] = (variable, split)
        return list(found.values())

    def _over_fsdp(
        self, variable: keras.Variable, split: Split | None
    ) -> Split | None:
        """Returns a split that also divides over the fsdp axis, if it can."""
        fsdp = self._mesh.fsdp
        if split is not None and split.over == "rows":
            return split  # Over fsdp too.
        shapes = [tuple(variable.shape)]
        if split is not None:
            shapes = [split.shape_of(part) for part in range(split.parts)]
        inner = [Split(shape, fsdp) for shape in shapes]
        large = all(math.prod(each.shape) >= self._smallest for each in inner)
        if fsdp == 1 or not large or not all(s.is_possible for s in inner):
            return split
        if split is None:
            return inner[0]
        return dataclasses.replace(split, again=fsdp)


def _shared(model: keras.Model) -> set[int]:
    """Returns the layers whose kernel is that of another layer too."""
    owners: dict[int, list[int]] = {}
    for key, each in linear_layers(model).items():
        owners.setdefault(id(each.kernel), []).append(key)
    return {key for keys in owners.values() if len(keys) > 1 for key in keys}


def _is_stored_as(variable: keras.Variable, split: Split) -> bool:
    if not keras_internals.is_split(variable):
        return False
    held: ShardedVariable = keras_internals.stored(variable)
    return held.split == split


def _store_in_parts(
    model: keras.Model, variable: keras.Variable, split: Split
) -> None:
    """Splits a weight, and what built optimizers keep for it."""
    beside = [
        kept
        for optimizer in _built_optimizers(model)
        for weight, kept in keras_internals.kept_for_weights(optimizer)
        if weight is variable and tuple(kept.shape) == tuple(weight.shape)
    ]
    for each in (variable, *beside):
        held = keras_internals.stored(each)
        strategy = model.distribute_strategy
        keras_internals.store_as(each, split_over(strategy, held, split))


def _built_optimizers(
    model: keras.Model,
) -> list[keras.optimizers.Optimizer]:
    return [
        part
        for optimizer in keras_internals.optimizers_of(model)
        for part in keras_internals.parts(optimizer)
        if part.built
    ]


def _report(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    splits: list[tuple[keras.Variable, Split]],
    found: structure.Structure,
) -> None:
    parted = {id(variable) for variable, _ in splits}
    weights = model.trainable_variables
    whole = [
        variable.path
        for variable in weights
        if id(variable) not in parted
        and len(variable.shape) > 1
        and math.prod(variable.shape) >= strategy.smallest_split
    ]
    held = sum(math.prod(variable.shape) for variable, _ in splits)
    total = sum(math.prod(variable.shape) for variable in weights) or 1
    more = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
    _log.info(
        "layout: %d of %d weights are split, %.1f %% of the elements; %d "
        "layers take parts from the layers before; whole on each device: %s%s",
        len(parted),
        len(weights),
        100 * held / total,
        len(found.arrives),
        ", ".join(whole[:_NAMED]) or "small weights and vectors",
        more,
    )


def _dropouts(
    passes: list[structure.Pass],
    found: structure.Structure,
    layers: list[keras.layers.Layer],
    over: dict[int, str],
) -> list[tuple[keras.layers.Layer, int, int, str]]:
    drawn = []
    for layer in layers:
        axis = found.dropouts.get(id(layer))
        if axis is None:
            continue
        call = next(
            call
            for one in passes
            for call in one.calls.values()
            if call.layer is layer
        )
        length = int(call.inputs.shape[axis])
        source = found.dropout_sources[id(layer)]
        drawn.append((layer, axis, length, over.get(source, "tensor")))
    return drawn
