"""Layers computed in parts, while a step is traced.

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
import logging
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
from mgpu_tf.engine.row_proof import FIXED, note, note_same
from mgpu_tf.engine.step.tensor_parallel import structure
from mgpu_tf.engine.step.tensor_parallel.alike import Cut
from mgpu_tf.engine.step.tensor_parallel.forms import (
    Form,
    OtherLength,
    check_length,
    dropped,
    of_length,
)
from mgpu_tf.engine.step.tensor_parallel.linear import Linear
from mgpu_tf.engine.step.tensor_parallel.plan import Plan
from mgpu_tf.engine.step.tensor_parallel.sequence import (
    NOTHING,
    Passage,
    passage_of,
)
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.collectives import Groups
from mgpu_tf.strategies.replicas.own_gradient import own_gradient
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

_log = logging.getLogger("mgpu_tf")


class _Noted(threading.local):
    """What the replica of a thread notes while it is traced.

    Attributes:
        depth: How many calls of the model are under way.
        wholes: Sequences that were gathered, by their parts.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.wholes: dict[Any, tf.Tensor] = {}


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
                cut=plan.passages.get(key, NOTHING).cuts,
            )
        # Where the model is not called as in the trace that the plan is of.
        self._alone = {
            key: dataclasses.replace(
                form, gathers=True, arrives=False, cut=None
            )
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
        self._passages, self._passing = plan.passages, plan.passing
        self._ways = {id(layer): each for layer, *each in plan.gates}
        self._holders = [layer for layer, *_ in plan.gates]
        draws = {id(layer) for layer in keras_internals.dropout_layers(model)}
        self._draws = draws - self._dropouts.keys()
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
            keras_internals.calls_replaced(self._passing, self._pass),
            keras_internals.calls_replaced(self._holders, self._pass_gates),
            keras_internals.inputs_unchecked(
                [*arriving, *self._passing, *self._holders]
            ),
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
        passage = self._passage(layer, args, kwargs)
        if _has_others(layer):
            if form.arrives or form.leaves_split or passage != NOTHING:
                self._leave_nothing(f"{layer.name} has other weights in a step")
            return own(*args, **kwargs)
        args, kwargs = self._gathered(passage, args, kwargs)
        inputs = args[0] if args else kwargs.pop("inputs")
        if form.arrives:
            inputs = keras_internals.with_mask_of(self._taken(inputs), inputs)
        with self._of_planned_length():
            outputs = form(
                self._part, _whole, _lent, own, inputs, *args[1:], **kwargs
            )
        if (form.leaves_split or passage.cuts is not None) and self._notes:
            self._noted.left.append(outputs)
        outputs = keras_internals.carried(outputs, self._watched)
        if passage.also is not None:
            self._note_whole(outputs, passage.also)
        return outputs

    def _taken(self, part: tf.Tensor) -> tf.Tensor:
        """Returns a copy of what was left split, for one that may take it.

        A layer that is computed again makes it again.
        """
        copy = tf.identity(part)
        if self._notes:
            self._noted.taken.add(copy.op.name)
        return copy

    def _passage(
        self, layer: keras.layers.Layer | structure.Gate, args: Any, kwargs: Any
    ) -> Passage:
        alone = self.forms is self._alone or not self._is_within
        if self._whole or alone or is_read_inside(()):
            return NOTHING
        return passage_of(self._passages, layer, args, kwargs)

    def _pass(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a layer that has to do with parts of a sequence."""
        passage = self._passage(layer, args, kwargs)
        if passage == NOTHING:
            return own(*args, **kwargs)
        args, kwargs = self._gathered(passage, args, kwargs)
        cut = passage.computes
        if cut is not None and id(layer) in self._draws:
            outputs = dropped(
                *(cut.axis, cut.length, self._groups["tensor"], False),
                *(layer, own, *args),
                **kwargs,
            )
        else:
            outputs = own(*args, **kwargs)
        return self._left(passage, outputs)

    def _pass_gates(
        self,
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a layer that holds layers, and may get or return parts."""
        way_in, way_out = self._ways[id(layer)]
        if args and tf.is_tensor(args[0]):
            args = (self._through(way_in, args[0]), *args[1:])
        outputs = own(*args, **kwargs)
        if tf.is_tensor(outputs):
            outputs = self._through(way_out, outputs)
        return outputs

    def _through(self, gate: structure.Gate, tensor: tf.Tensor) -> tf.Tensor:
        passage = self._passage(gate, (), {})
        if passage == NOTHING:
            return tensor
        (tensor,), _ = self._gathered(passage, (tensor,), {})
        return self._left(passage, tensor)

    def _left(self, passage: Passage, outputs: tf.Tensor) -> tf.Tensor:
        """Returns outputs as others take them."""
        if passage.gathers is not None:
            return self._of_all(outputs, passage.gathers)
        if passage.cuts is not None:
            outputs = self._cut(outputs, passage.cuts)
        if passage.also is not None:
            self._note_whole(outputs, passage.also)
        return outputs

    def _gathered(
        self, passage: Passage, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Returns what a layer is called with, its sequences whole."""
        given = structure.arguments_of(args, kwargs)
        if not passage.joins.keys() <= given.keys():
            self._leave_sequences_whole("a layer is called in another way")
        return structure.with_arguments(
            args,
            kwargs,
            {
                place: self._of_all(given[place], cut)
                for place, cut in passage.joins.items()
            },
        )

    def _of_all(self, part: tf.Tensor, cut: Cut) -> tf.Tensor:
        """Returns a whole sequence, of which each device has a part."""
        known = self._noted.wholes.get(part.ref())
        if known is not None:
            return known

        def gathered(part: tf.Tensor) -> tf.Tensor:
            taken, groups = self._taken(part), self._groups["tensor"]
            every = groups.all_gather(taken, cut.axis, cut.length)
            every = of_length(every, cut.axis, cut.length)
            return self._watched(note_same(every, part))

        return _moved(part, gathered)

    def _note_whole(self, part: tf.Tensor, cut: Cut) -> None:
        """Gathers a sequence once, for all that take it whole."""
        if tf.is_symbolic_tensor(part):
            whole = self._of_all(part, cut)
            self._noted.wholes[part.ref()] = whole

    def _cut(self, outputs: tf.Tensor, cut: Cut) -> tf.Tensor:
        """Returns this device's part of a sequence."""

        def own_part(whole: tf.Tensor) -> tf.Tensor:
            with self._of_planned_length():
                check_length(whole, cut)
            part = self._groups["tensor"].own_part(whole, cut.axis)
            part = self._watched(of_length(part, cut.axis, None))
            if self._notes:
                self._noted.left.append(part)
            return part

        return _moved(outputs, own_part)

    @contextlib.contextmanager
    def _of_planned_length(self) -> Iterator[None]:
        """A block in which sequences are cut.

        Raises:
            TraceAgain: One is of another length than in training.
        """
        try:
            yield
        except OtherLength as error:
            self._leave_sequences_whole(f"other lengths: {error}")

    def _leave_sequences_whole(self, reason: str) -> NoReturn:
        self._passages = {}
        for forms in (self.forms, self._alone):
            for key, form in forms.items():
                forms[key] = dataclasses.replace(form, cut=None)
        _log.info(
            "sequence_parallel: sequences are whole on each device: %s", reason
        )
        raise TraceAgain

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
            self._noted.left, self._noted.wholes = [], {}
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


def _moved(
    tensor: tf.Tensor, move: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns a tensor that was moved, with its logits, and its mask as it is.

    A mask is of the whole sequence.
    """
    parts, together = keras_internals.taken_apart(tensor)
    return keras_internals.with_mask_of(
        together(list(map(move, parts))), tensor
    )


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
