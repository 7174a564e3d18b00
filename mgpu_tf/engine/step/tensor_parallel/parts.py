"""Layers computed in parts, while a step is traced.

    plan = split_model(model, strategy, example)   # weights are stored in parts
    tensor = TensorParallel(model, strategy, plan)
    with tensor.in_place():                        # around the steps of all
        ...                                        # traces forward, backward

A weight that is read outside of its layer, or by a layer that is not known, is
gathered. Its gradient goes to the parts as well.

In the backward pass a device has a part of each gradient, and the parts are
summed at its end. A model that takes a gradient in its own call, as of its
inputs, needs all of it there: its layers are computed with whole weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.author.step_scope import Replay, StepScope, is_read_inside
from mgpu_tf.engine.exchange.embedding_rows import own_rows
from mgpu_tf.engine.exchange.parts import computed
from mgpu_tf.engine.row_proof import FIXED, given_gradients, note
from mgpu_tf.engine.step.tensor_parallel import structure
from mgpu_tf.engine.step.tensor_parallel.forms import Form, dropped
from mgpu_tf.engine.step.tensor_parallel.layout import published_layout
from mgpu_tf.engine.step.tensor_parallel.lengths import asked_for
from mgpu_tf.engine.step.tensor_parallel.linear import Linear, linear_layers
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Split
from mgpu_tf.strategies.replicas.collectives import Groups
from mgpu_tf.strategies.replicas.own_gradient import own_gradient
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
    """

    linear: list[Linear]
    structure: structure.Structure
    over: dict[int, str]
    dropouts: list[tuple[keras.layers.Layer, int, int, str]]
    splits: list[tuple[keras.Variable, Split]]


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
            gathered = gathered | asked_for(known, unknown, stays)
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
    return Plan(used, found, over, drawn, splits)


def _passes(
    model: keras.Model,
    example: Any,
    noted: list[keras.layers.Layer],
    unknown: dict[int, int] | None = None,
) -> list[structure.Pass]:
    try:
        return structure.traced(model, example, noted, unknown)
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


class _Noted(threading.local):
    """What the replica of a thread notes while it is traced.

    Attributes:
        depth: How many calls of the model are under way.
    """

    depth = 0


class TensorParallel:
    """Computes layers in parts.

    Args:
        model: A model whose weights are split.
        strategy: Its strategy.
        plan: From `split_model`.
    """

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, plan: Plan
    ) -> None:
        self._groups = {
            axis: strategy.along(axis) for axis in ("tensor", "rows")
        }
        found = plan.structure
        self.forms: dict[int, Form] = {}
        for linear in plan.linear:
            key = id(linear.layer)
            axis = plan.over.get(key, "tensor")
            self.forms[key] = Form(
                linear,
                found.dims[key],
                self._groups[axis],
                gathers=key in found.gathered,
                arrives=key in found.arrives,
                own_rows=axis == "rows",
                by_rows=_is_read_by_rows(linear, found.dims[key]),
            )
        # Where the model is not called as in the trace that the plan is of.
        self._alone = {
            key: dataclasses.replace(form, gathers=True, arrives=False)
            for key, form in self.forms.items()
        }
        self._model = model
        # What replicas, each a thread, have left split, and in which calls.
        self._noted = _Noted()
        self._layers = [linear.layer for linear in plan.linear]
        self._dropouts = {
            id(layer): (axis, length, self._groups[over], over == "rows")
            for layer, axis, length, over in plan.dropouts
        }
        self._drawing = [layer for layer, *_ in plan.dropouts]
        self._variables = [
            variable
            for variable in model.trainable_variables
            if keras_internals.is_split(variable)
        ]
        computed = {id(linear.kernel) for linear in plan.linear}
        computed |= {id(linear.bias) for linear in plan.linear}
        self._read_whole = [
            variable
            for variable in self._variables
            if id(variable) not in computed
        ]

        self._by_rows = {
            id(form.linear.kernel)
            for form in self.forms.values()
            if form.by_rows
        }
        # Whether layers are computed with whole weights. Without a graph code
        # of the author's would read the length of a part.
        self._whole = keras_internals.runs_eagerly(model)

    def looks_up_in_parts(self, layer: keras.layers.Layer) -> bool:
        """Whether a layer reads rows of a table where they are stored."""
        return any(id(v) in self._by_rows for v in layer.variables)

    @property
    def has_rows_of_all(self) -> bool:
        """Whether devices compute, with any weight, for each other's rows.

        Where a table is split by rows, they look up and compute nothing.
        """
        return any(
            form.own_rows and form.dim != form.linear.rows
            for form in self.forms.values()
        )

    @property
    def tables(self) -> list[str]:
        """The paths of tables split by rows that are not read by rows."""
        return [
            form.linear.kernel.path
            for form in self.forms.values()
            if form.dim == form.linear.rows and not form.by_rows
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets layers be computed so, while traced. Outside of replicas."""
        arriving = [
            layer for layer in self._layers if self.forms[id(layer)].arrives
        ]
        with (
            keras_internals.calls_replaced([self._model], self._call_model),
            keras_internals.calls_replaced(self._layers, self._call),
            keras_internals.calls_replaced(self._drawing, self._drop),
            keras_internals.inputs_unchecked(arriving),
        ):
            yield

    # On a replica.

    def sources(self) -> Writes:
        """Returns the parts of this replica, to take gradients from.

        Of a table that is read by rows it is the variable that stores them.
        """
        whole = [v for v in self._variables if id(v) not in self._by_rows]
        values = computed([keras_internals.stored(v) for v in whole])
        found = {id(v): value for v, value in zip(whole, values, strict=True)}
        return [
            (variable, found.get(id(variable), self._here(variable)))
            for variable in self._variables
        ]

    def _here(self, variable: keras.Variable) -> tf.Variable:
        return keras_internals.stored(variable).here()

    def join(
        self, sources: Writes
    ) -> Callable[[keras.Variable], tf.Tensor | None]:
        """Returns a function that makes whole weights of parts.

        Args:
            sources: What gradients are taken from, if they are.
        """
        parts = {id(variable): source for variable, source in sources}

        def joined(variable: keras.Variable) -> tf.Tensor | None:
            if not keras_internals.is_split(variable):
                return None
            held: ShardedVariable = keras_internals.stored(variable)
            part = parts.get(id(variable))
            if part is None:
                [part] = computed([held])
            part = tf.convert_to_tensor(part)
            split = held.split
            if split.over == "fsdp":
                return part
            self._join_before([variable])
            return _joined(variable, part, self._groups[split.over])

        return joined

    def given(
        self,
        join: Callable[[keras.Variable], tf.Tensor | None],
        among: Iterable[keras.Variable] | None = None,
    ) -> Writes:
        """Returns the weights that are read whole, by layers not known.

        Args:
            join: Makes whole weights of parts.
            among: The weights that are read at all. Default: those of the
                model.
        """
        known = None if among is None else set(map(id, among))
        return [
            (variable, join(variable))
            for variable in self._read_whole
            if known is None or id(variable) in known
        ]

    def _join_before(self, variables: list[keras.Variable]) -> None:
        """Lets weights be whole before branches and loops read them.

        Within these, replicas exchange nothing.

        Raises:
            TraceAgain: They will be, in another trace.
        """
        known = {id(variable) for variable in self._read_whole}
        missing = [
            variable
            for variable in variables
            if keras_internals.is_split(variable) and id(variable) not in known
        ]
        if missing and is_read_inside(missing):
            self._read_whole += missing
            raise TraceAgain

    def _call(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._join_before(layer.variables)
        form = (self.forms if self._is_within else self._alone)[id(layer)]
        if self._whole or is_read_inside(()):
            return own(*args, **kwargs)
        if _has_others(layer):
            if form.arrives or form.leaves_split:
                self._leave_nothing(f"{layer.name} has other weights in a step")
            return own(*args, **kwargs)
        inputs = args[0] if args else kwargs.pop("inputs")
        if form.arrives and self._notes:
            inputs = keras_internals.with_mask_of(tf.identity(inputs), inputs)
            self._noted.taken.add(inputs.op.name)
        outputs = form(
            self._part, _whole, _lent, own, inputs, *args[1:], **kwargs
        )
        if form.leaves_split and self._notes:
            self._noted.left.append(outputs)
        return keras_internals.carried(outputs, self._watched)

    @property
    def _is_within(self) -> bool:
        """Whether the model is called, as in the trace that the plan is of.

        Or a layer of it once more, for its gradient.
        """
        again = isinstance(keras_internals.stateless_scope(), Replay)
        return again or self._noted.depth > 0

    @property
    def _notes(self) -> bool:
        """Whether it is noted what is left split, as in a step's graph."""
        begun = hasattr(self._noted, "calls")
        return begun and not tf.executing_eagerly()

    def begin(self) -> None:
        """Begins a step. On a replica."""
        self._noted.calls, self._noted.taken = [], set()

    @contextlib.contextmanager
    def within_model(self) -> Iterator[None]:
        """A block in which layers are called as in the trace."""
        before = self._noted.depth
        if not before:
            self._noted.left = []
        self._noted.depth = before + 1
        try:
            yield
        finally:
            self._noted.depth = before

    def _call_model(
        self,
        model: keras.Model,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Other arguments may lead another way.
        if args[1:] or not kwargs.keys() <= {"training", "mask"}:
            return own(*args, **kwargs)
        with self.within_model():
            outputs = own(*args, **kwargs)
        if not self._is_within and self._notes:
            graph = tf.compat.v1.get_default_graph()
            count = len(graph.get_operations())
            self._noted.calls.append((count, self._noted.left))
        return outputs

    def check_left(self) -> None:
        """Looks whether code besides the model took what was left split.

        On a replica, at the end of a step.

        Raises:
            TraceAgain: It did: in another trace no layer leaves anything split.
        """
        if not self._notes:
            return
        graph = tf.compat.v1.get_default_graph()
        places = {op.name: i for i, op in enumerate(graph.get_operations())}
        calls = self._noted.calls
        del self._noted.calls
        for end, left in calls:
            tensors, seen = [*left], set[str]()
            while tensors:
                for op in tensors.pop().consumers():
                    if op.name in self._noted.taken | seen:
                        continue
                    seen.add(op.name)
                    if places.get(op.name, end) >= end:
                        self._leave_nothing(
                            f"{op.name} is outside of the model"
                        )
                    tensors += op.outputs

    def _leave_nothing(self, reason: str) -> NoReturn:
        self.forms = self._alone
        _log.info("layout: outputs are gathered after each layer: %s", reason)
        raise TraceAgain

    def _watched(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns outputs whose gradient a model does not take itself."""
        scope = keras_internals.stateless_scope()

        @own_gradient
        def watched(outputs: tf.Tensor) -> Any:
            def gradient(up: Any) -> Any:
                if isinstance(scope, StepScope) and not scope.is_over:
                    self._take_whole()
                return up

            return tf.identity(outputs), gradient

        return watched(outputs)

    def _take_whole(self) -> None:
        self._whole = True
        _log.info(
            "a gradient is taken within the call of the model: its layers are "
            "computed with whole weights, which stay stored in parts"
        )
        raise TraceAgain

    def _part(self, variable: keras.Variable) -> Any:
        scope = keras_internals.stateless_scope()
        if isinstance(scope, StepScope | Replay):
            source = scope.sources.get(id(variable))
            if source is not None:
                return source
        if id(variable) in self._by_rows:
            return self._here(variable)
        return note(computed([keras_internals.stored(variable)])[0], FIXED)

    def _drop(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        alone = self.forms is self._alone or not self._is_within
        if self._whole or alone:
            return own(*args, **kwargs)
        return dropped(*self._dropouts[id(layer)], layer, own, *args, **kwargs)


def _joined(
    variable: keras.Variable, part: tf.Tensor, groups: Groups
) -> tf.Tensor:
    """Returns a whole weight, whose gradient is that of the part.

    Rows of a lookup stay rows: an index that comes twice has two, as in Keras.
    """
    split = keras_internals.stored(variable).split
    dim = split.dim or 0

    def of_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
        if split.over != "tensor":
            # Devices have other rows of the batch, and so other indices.
            raise ConfigurationError(
                "Rows are looked up in a weight that the layout splits over "
                f"'batch'. Received: {variable.path}, read by a layer "
                "that is not Keras's Embedding. Leave it out of the layout."
            )
        values, indices = groups.all_reduce(rows.values), rows.indices
        if dim == 0:
            summed = tf.IndexedSlices(values, indices)
            bounds = split.bounds(groups.rank())
            return own_rows(summed, bounds, part.shape[1:])
        shape = tf.shape(part, indices.dtype)
        return tf.IndexedSlices(groups.own_part(values, dim), indices, shape)

    @own_gradient
    def whole(part: tf.Tensor) -> Any:
        def gradient(up: Any) -> Any:
            if isinstance(up, tf.IndexedSlices):
                return of_rows(up)
            return groups.reduce_scatter(up, dim)

        return groups.all_gather(part, dim, split.length), gradient

    return whole(part)


def _has_others(layer: keras.layers.Layer) -> bool:
    """Whether a layer has other weights now than those it stores.

    Those that a step has written, or that it was lent by `stateless_call`.
    """
    scope = keras_internals.stateless_scope()
    if isinstance(scope, StepScope):
        return any(map(scope.is_written, layer.variables))
    return scope is not None and not isinstance(scope, Replay)


def _is_read_by_rows(linear: Linear, dim: int) -> bool:
    """Whether a layer does nothing but look rows up where they are stored."""
    return (
        dim == linear.rows
        and keras_internals.looks_up_alone(linear.layer)
        and keras_internals.stored(linear.kernel).inner() is None
    )


def _whole(variable: keras.Variable) -> tf.Tensor:
    return note(tf.convert_to_tensor(variable.value), FIXED)


@contextlib.contextmanager
def _lent(pairs: Writes) -> Iterator[None]:
    """Gives weights other values for a while."""
    scope = keras_internals.stateless_scope()
    if not isinstance(scope, StepScope | Replay):
        own = keras.StatelessScope()
        own.state_mapping = {id(variable): value for variable, value in pairs}
        with own:
            yield
        return
    before = {
        id(variable): scope.state_mapping.get(id(variable))
        for variable, _ in pairs
    }
    scope.state_mapping |= {id(variable): value for variable, value in pairs}
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                scope.state_mapping.pop(key, None)
            else:
                scope.state_mapping[key] = value
