"""The synchronous engine where replicas store parts of weights (FSDP, ZeRO).

    gather      the parts of a weight      -> the whole weight, on each replica
    forward and backward on whole weights, as on other strategies
    scatter     the gradients of replicas  -> each replica the sum of its part
    update      the optimizer, on parts

To gather and to scatter move together as many bytes as to sum gradients: each
replica of n receives (n - 1)/n of a weight, and as much of a gradient.

Weights are gathered and gradients scattered layer by layer, in the forward and
backward pass; see `engine/step/per_layer.py`. What is read outside of layers,
and gradients of tables, are exchanged in packs before the update.

What needs whole gradients takes them from all parts: norms to clip by, and
the check that gradients are finite.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.exchange.embedding_rows import RowGather, own_rows
from mgpu_tf.engine.exchange.noise_scale import square_of
from mgpu_tf.engine.exchange.parts import (
    LayerCopies,
    LayerParts,
    computed,
    in_packs,
)
from mgpu_tf.engine.exchange.reduction import Reduction, of_shape
from mgpu_tf.engine.step.per_layer import LayerByLayer
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.step.tensor_parallel.plan import split_model
from mgpu_tf.engine.step.update import (
    Gradients,
    Update,
    beside,
    divided,
    unwrap,
    values,
)
from mgpu_tf.engine.synchronous.engine import (
    SynchronousEngine,
    refuse_stages,
)
from mgpu_tf.engine.synchronous.whole_update import move_whole
from mgpu_tf.engine.whole_norms import two_steps
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Split, others_than
from mgpu_tf.optimizers.by_norms import Norms
from mgpu_tf.optimizers.lazy_adam import LazyAdam
from mgpu_tf.options import StepOptions
from mgpu_tf.reports.pipeline_trace import ShareTrace, StepTrace
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.split.sharded_variable import (
    ShardedVariable,
    stored_part,
)

# Optimizers that compute each element of a weight from that element alone.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    LazyAdam,
)


class ShardedEngine(SynchronousEngine):
    """Trains with weights that are split over replicas.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: A strategy that splits weights.
        options: How steps are made.

    Raises:
        ConfigurationError: The model is not compiled, was made elsewhere, or
            does not go with one of the options.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
    ) -> None:
        super().__init__(model, strategy, options)
        if strategy.is_apart and keras_internals.runs_eagerly(model):
            raise ConfigurationError(
                "Weights that are split over several processes are gathered "
                "in graphs. Received: run_eagerly=True. Leave it out, or use "
                "one process."
            )
        self._parts: TensorParallel | None = None
        self._layered: LayerByLayer | None = None

    def build(self, source: Source) -> None:
        """Creates the variables; as in `Engine`, but weights in parts."""
        self.build_layers(source, training=True)
        super().build(source)

    def build_layers(self, source: Source, *, training: bool = False) -> None:
        """Creates the layers' variables; as in `Engine`, but in parts."""
        super().build_layers(source, training=training)
        self._split_layers(source)

    def _split_layers(self, source: Source) -> None:
        if self._parts is not None:
            return
        has_tables = any(map(keras_internals.is_spread, self._model.variables))
        if has_tables or self._strategy.splits_later:
            plan = split_model(self._model, self._strategy, source.example())
            self._parts = TensorParallel(self._model, self._strategy, plan)
            check_not_lazy(self._model, self._parts.tables)
            if self._options.noise_scale:
                _check_own_rows(self._model.trainable_variables)

    def _tensor(self) -> TensorParallel | None:
        return self._parts

    def _predict_step(self, *arguments: Any) -> Any:
        with self._in_parts():
            return super()._predict_step(*arguments)

    def _in_parts(self) -> contextlib.AbstractContextManager[None]:
        if self._parts is None:
            return contextlib.nullcontext()
        return self._parts.in_place()

    def _selected(self, gradients: list[Any], share: BatchShare) -> list[Any]:
        """As in `SynchronousEngine`, but weights that see the rows of all."""
        if self._parts is not None and self._parts.has_rows_of_all:
            return gradients
        held = itertools.compress(
            self._model.trainable_variables, self._step.present
        )
        of_all = [
            in_parts or _sees_all_rows(variable)
            for variable, in_parts in zip(
                held, self._step.in_parts, strict=True
            )
        ]
        own = iter(
            share.select_all(
                [
                    g
                    for g, each in zip(gradients, of_all, strict=True)
                    if not each
                ]
            )
        )
        return [
            gradient if each else next(own)
            for gradient, each in zip(gradients, of_all, strict=True)
        ]

    def trace(self, source: Source) -> StepTrace:
        """Runs the first step of training and undoes it; as in `Engine`."""
        self._refuse_trace()
        self.prepare(source)
        if self._layered is None:
            return super().trace(source)
        # It shows the gradients of replicas before they are summed.
        with self._layered.unscattered():
            return super().trace(source)

    def trace_outputs(self, source: Source) -> list[ShareTrace]:
        """Predicts one batch; as in `Engine`."""
        self._refuse_trace()
        self.build_layers(source)
        with self._in_parts():
            return super().trace_outputs(source)

    def _refuse_trace(self) -> None:
        if self._strategy.is_apart:
            raise ConfigurationError(
                "A trace runs one operation after another, and gathers of "
                "weights wait for each other. Received: weights that are "
                "split over several processes. Trace in one process, with "
                "num_virtual_devices."
            )

    @property
    def _update_type(self) -> type[Update]:
        return ShardedUpdate

    def _local_sums(
        self, optimizers: list[keras.optimizers.Optimizer]
    ) -> list[keras.Variable]:
        if self._strategy.shard == "optimizer":
            return super()._local_sums(optimizers)
        return []

    def _begin(self) -> None:
        refresh(self._model.variables)

    def _layers(self) -> LayerByLayer | None:
        refuse_stages(self._options)
        if self._options.recompute is None and self._gathers_at_once:
            return None
        if self._parts is not None:
            return LayerByLayer(
                self._model, chosen=self._chosen(), tensor=self._parts
            )
        if self._strategy.shard != "weights":
            return LayerByLayer(
                self._model, LayerCopies(), chosen=self._chosen()
            )
        name = self._options.gradient_dtype
        parts = LayerParts(tf.as_dtype(name) if name else None)
        measures = self._noise is not None
        layered = LayerByLayer(
            self._model, parts, measures=measures, chosen=self._chosen()
        )
        self._layered = layered
        if measures and (self._options.step_parts > 1 or self._gathers):
            # The gradient of a replica is known at the end of its step.
            layered.scatters = False
        return layered

    def _squares(self) -> dict[int, tf.Tensor]:
        return {} if self._layered is None else self._layered.squares_here()

    @property
    def _gathers_at_once(self) -> bool:
        if self._parts is not None or self._strategy.shard != "weights":
            return True
        return not any(map(keras_internals.is_split, self._model.variables))

    def _gathered(self) -> Writes:
        if not self._gathers_at_once or self._options.recompute is not None:
            return []  # Layer by layer.
        if self._parts is not None:
            return []  # In parts.
        return [
            (variable, tf.convert_to_tensor(variable.value))
            for variable in self._model.variables
            if keras_internals.is_split(variable)
        ]


class ShardedUpdate(Update):
    """Applies gradients to weights of which each replica stores a part.

    Args:
        optimizer: As for `Update`.
        variables: As for `Update`.
        strategy: A strategy that splits weights.
        options: As for `Update`.
        others: As for `Update`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
        strategy: tf.distribute.Strategy,
        *,
        options: StepOptions,
        **others: Any,
    ) -> None:
        super().__init__(
            optimizer, variables, strategy, options=options, **others
        )
        self._mesh = strategy.mesh
        self._constrains_once = True
        self._are_alike = False
        # Sums of gradients are split as weights are, or of whole ones.
        self._reduces_first = self._every == 1 or strategy.shard != "optimizer"
        self._options = options
        name = options.gradient_dtype
        self._dtype = tf.as_dtype(name) if name else None
        parts = list(keras_internals.parts(self._optimizer))
        # An author's own method may take means and norms of a gradient.
        self._hands_over_whole = any(
            map(keras_internals.handles_gradients, parts)
        )
        # Tables of which every replica has the rows that all have looked up.
        self._whole_rows = {
            id(variable)
            for part in parts
            if self._every == 1
            and (self._hands_over_whole or needs_whole(part))
            for variable in keras_internals.variables_of(part)
        }

    # Outside of replicas.

    def _of_all(self, gradients: Gradients) -> Gradients:
        """As in `Update`; of those that are whole it keeps the own parts."""
        if not self._reduced:
            return super()._of_all(gradients)
        held = list(itertools.compress(self._variables, self.present))

        def own(gradients: Gradients) -> Gradients:
            return [
                gradient
                if self._keeps_rows(gradient, variable)
                else self._own(gradient, variable)
                for gradient, variable in zip(gradients, held, strict=True)
            ]

        return self._strategy.run(own, args=(gradients,))

    def _square(self, gradients: Gradients) -> tf.Tensor:
        return self._first(
            self._strategy.run(self._square_here, args=(gradients,))
        )

    def _summed(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        if self._strategy.splits_later or any(
            map(keras_internals.is_spread, variables)
        ):
            return self._summed_by_axes(gradients, variables, alike)
        in_parts = self.in_parts or [False] * len(gradients)
        left = [not each for each in in_parts]
        summed = iter(
            self._of_whole_weights(
                list(itertools.compress(gradients, left)),
                list(itertools.compress(variables, left)),
                list(itertools.compress(alike, left)),
            )
        )
        return [
            gradient if each else next(summed)
            for gradient, each in zip(gradients, in_parts, strict=True)
        ]

    def _of_whole_weights(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Sums gradients that the backward pass has not scattered."""
        split = [keras_internals.is_split(v) for v in variables]
        sparse = [
            isinstance(self._first(g), tf.IndexedSlices) for g in gradients
        ]
        scattered = [s and not r for s, r in zip(split, sparse, strict=True)]
        others = [not each for each in scattered]
        summed = iter(
            super()._summed(
                list(itertools.compress(gradients, others)),
                list(itertools.compress(variables, others)),
                list(itertools.compress(alike, others)),
            )
        )
        parts = iter(
            self._parts(
                list(itertools.compress(gradients, scattered)),
                [v.value for v in itertools.compress(variables, scattered)],
            )
        )
        return [
            next(parts)
            if is_scattered
            else self._own_rows(next(summed), variable)
            if is_split and id(variable) not in self._whole_rows
            else next(summed)
            for gradient, variable, is_scattered, is_split in zip(
                gradients, variables, scattered, split, strict=True
            )
        ]

    def _parts(
        self, gradients: Gradients, variables: list[ShardedVariable]
    ) -> Gradients:
        """Gives each replica the sums of its parts of dense gradients."""
        if not gradients:
            return []
        return self._strategy.run(
            lambda every: in_packs(every, variables, self._dtype),
            args=(gradients,),
        )

    def _summed_by_axes(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Sums where gradients are of what a replica computes with.

        Such a one is of a part, where a layer is computed in parts. It is
        summed over the replicas that compute with the same part, and each
        gets what it stores of it.
        """
        places: dict[tuple[str, ...], list[int]] = {}
        for place, variable in enumerate(variables):
            axes: tuple[str, ...] = ()
            if keras_internals.is_split(variable):
                axes = keras_internals.stored(variable).split.axes
            places.setdefault(axes, []).append(place)
        received = list(gradients)
        for axes, some in places.items():
            found = self._of_axes(
                axes,
                [gradients[place] for place in some],
                [variables[place] for place in some],
                [alike[place] for place in some],
            )
            for place, value in zip(some, found, strict=True):
                received[place] = value
        return received

    def _of_axes(
        self,
        axes: tuple[str, ...],
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Sums gradients of weights that are split over the same axes."""
        sparse = [
            isinstance(self._first(g), tf.IndexedSlices) for g in gradients
        ]
        dense = [not each for each in sparse]
        rows = iter(
            self._rows_of_axes(
                axes,
                list(itertools.compress(gradients, sparse)),
                list(itertools.compress(variables, sparse)),
                list(itertools.compress(alike, sparse)),
            )
        )
        sums = iter(
            self._dense_of_axes(
                axes,
                list(itertools.compress(gradients, dense)),
                list(itertools.compress(variables, dense)),
            )
        )
        return [next(rows) if each else next(sums) for each in sparse]

    def _dense_of_axes(
        self,
        axes: tuple[str, ...],
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> Gradients:
        if not gradients or not axes:
            return super()._summed(
                gradients, variables, [False] * len(gradients)
            )
        held = [keras_internals.stored(variable) for variable in variables]
        copies = self._strategy.along(*others_than(axes))
        reduction = Reduction(self._options, copies)

        def summed(gradients: Gradients) -> Gradients:
            if "fsdp" in axes:
                return in_packs(gradients, held, self._dtype)
            shapes = [variable.here().shape for variable in held]
            return reduction(list(map(of_shape, gradients, shapes)))

        return self._strategy.run(summed, args=(gradients,))

    def _rows_of_axes(
        self,
        axes: tuple[str, ...],
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Gathers rows of embeddings; each row of a batch counts once."""
        spread = [axis for axis in axes if axis != "fsdp"]
        for variable in variables:
            if spread and id(variable) in self._whole_rows:
                raise ConfigurationError(
                    "An optimizer that needs whole weights takes no rows of a "
                    "table that layers compute with in parts. Received: "
                    f"{variable.path}, looked up by its rows. Use Adam or "
                    "another that computes element by element, or 'fsdp'."
                )
        same = [*spread, "tensor"]
        if "tensor" not in axes and self._mesh.tensor > 1:
            gradients = [self._rows_once(gradient) for gradient in gradients]
        gather = RowGather(
            self._strategy,
            self._options,
            apart=False,
            groups=self._strategy.along(*others_than(same)),
        )
        every = gather(gradients, alike)
        if "fsdp" not in axes:
            return every
        return [
            slices
            if id(variable) in self._whole_rows
            else self._own_rows(slices, variable)
            for slices, variable in zip(every, variables, strict=True)
        ]

    def _rows_once(self, slices: Any) -> Any:
        """Sums the rows of replicas that have the same rows of a batch."""
        return self._strategy.run(self._of_same_rows, args=(slices,))

    def _own_rows(self, slices: Any, variable: keras.Variable) -> Any:
        """Keeps of the rows of all replicas those that a replica stores."""
        held = keras_internals.stored(variable)

        def kept(slices: tf.IndexedSlices) -> tf.IndexedSlices:
            rank = self._strategy.along("fsdp").rank()
            with beside(slices):
                return _rows_of_part(slices, held.inner(), rank, held)

        return self._strategy.run(kept, args=(slices,))

    def _apply(self, gradients: Gradients) -> None:
        super()._apply(gradients)
        refresh(self._variables)

    def _accumulate(self, gradients: Gradients) -> tf.Tensor:
        done = super()._accumulate(gradients)
        if any(variable.constraint for variable in self._variables):
            refresh(self._variables)
        return done

    def _overwrite_with_average(self) -> None:
        super()._overwrite_with_average()
        if any(
            part.ema_overwrite_frequency
            for part in keras_internals.parts(self._optimizer)
        ):
            refresh(self._variables)

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        whole = self._hands_over_whole
        return keras_internals.engine_order(
            self._optimizer,
            sent=self._taken if whole else None,
            clipped=None if whole else self._clipped,
            moved=self._moved,
            done=_refresh_on_replica if whole else None,
            overwrite=self._write_over,
        )

    def _keeps_rows(self, gradient: Any, variable: keras.Variable) -> bool:
        """Whether every replica keeps the rows of a whole table."""
        rows = isinstance(gradient, tf.IndexedSlices)
        return rows and id(variable) in self._whole_rows

    # On a replica.

    def _apply_on_replica(self, gradients: Gradients) -> None:
        if self._hands_over_whole:
            held = itertools.compress(self._variables, self.present)
            gradients = list(map(self._joined, gradients, held))
        super()._apply_on_replica(gradients)

    def _joined(self, gradient: Any, variable: keras.Variable) -> Any:
        """Returns the whole gradient, of the parts that replicas have."""
        rows = isinstance(gradient, tf.IndexedSlices)
        if rows or not keras_internals.is_split(variable):
            return gradient
        with beside(gradient):
            return keras_internals.stored(variable).joined_here(gradient)

    def _taken(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> Gradients:
        """Returns what an optimizer applies here, of whole gradients."""
        if needs_whole(optimizer):
            return gradients
        return list(map(self._own, gradients, variables))

    def _own(self, gradient: Any, variable: keras.Variable) -> Any:
        """Returns what this replica stores of a whole gradient."""
        if not keras_internals.is_split(variable):
            return gradient
        return self._own_part(gradient, keras_internals.stored(variable))

    def own_square(
        self, gradients: Gradients, known: dict[int, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the squared norm of a replica's gradients; as in `Update`.

        Devices of a tensor group have the parts of the gradient of a weight
        that is split over it. Each has something of that of another weight,
        and their sum is the gradient.
        """
        held = itertools.compress(self._variables, self.present)
        squares, others = [], []
        for gradient, variable in zip(gradients, held, strict=True):
            if id(variable) in known:
                squares.append(known[id(variable)])
            elif self._mesh.tensor == 1 or _over_tensor(variable):
                squares.append(square_of(gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                others.append(gradient)
            else:
                others.append(of_shape(gradient, variable.shape))
        if others:
            summed = Reduction(StepOptions(), self._strategy.along("tensor"))
            dense = [g for g in others if not isinstance(g, tf.IndexedSlices)]
            rows = [g for g in others if isinstance(g, tf.IndexedSlices)]
            whole = [*summed(dense), *map(self._of_same_rows, rows)]
            same = tf.add_n(list(map(square_of, whole)))
            squares.append(same / self._mesh.tensor)
        return tf.add_n(squares)

    def _square_here(self, gradients: Gradients) -> tf.Tensor:
        held = list(itertools.compress(self._variables, self.present))
        squares = self._of_all_parts(
            self._squares_of(gradients),
            held,
            map(self._keeps_rows, gradients, held),
        )
        return tf.reduce_sum(squares)

    def _of_same_rows(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums rows over replicas that have the same rows of a batch."""
        return tf.IndexedSlices(
            self._strategy.along("tensor").all_reduce(slices.values),
            slices.indices,
            slices.dense_shape,
        )

    def _own_part(self, gradient: Any, held: ShardedVariable) -> Any:
        """Returns what belongs to this replica's part of a whole gradient."""
        replica = this_replica()
        split, mesh = held.split, self._mesh
        if not isinstance(gradient, tf.IndexedSlices):
            whole = of_shape(gradient, split.shape)
            return stored_part(whole, split, mesh, replica)
        rank = mesh.rank(split.over, replica)
        part = _rows_of_part(gradient, split, rank, held)
        inner = split.inner(rank)
        if inner is None or inner is split:
            return part
        return _rows_of_part(part, inner, mesh.rank("fsdp", replica), held)

    def _clipped(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> Gradients:
        """Clips by norms of whole gradients, as Keras does."""
        by_norm, by_all = optimizer.clipnorm, optimizer.global_clipnorm
        norms = tf.unstack(self._squares(gradients, variables))
        clipped = []
        if by_norm:
            for gradient, norm in zip(gradients, norms, strict=True):
                with beside(gradient):
                    most = tf.maximum(tf.sqrt(norm), by_norm) / by_norm
                    clipped.append(divided(gradient, most))
            return clipped
        norm = tf.sqrt(tf.add_n(norms))
        scale = by_all * tf.minimum(1.0 / norm, 1.0 / by_all)
        # Not finite where the norm is not, as in Keras.
        scale = scale + (norm - norm)
        for gradient, variable in zip(gradients, variables, strict=True):
            with beside(gradient):
                # Rows become dense here, as in Keras.
                dense = self._dense(gradient, variable)
                clipped.append(dense * tf.cast(scale, dense.dtype))
        return clipped

    def _dense(self, gradient: Any, variable: keras.Variable) -> tf.Tensor:
        dense = tf.convert_to_tensor(gradient)
        if self._keeps_rows(gradient, variable):
            # Rows do not know of how many others they are.
            return tf.ensure_shape(dense, variable.shape)
        return dense

    def _squares(
        self, gradients: Gradients, variables: list[keras.Variable]
    ) -> tf.Tensor:
        """Returns the squared norm of each whole gradient, `[gradients]`."""
        squares = []
        for gradient in gradients:
            with beside(gradient):
                squares.append(tf.reduce_sum(tf.square(values(gradient))))
        return self._of_all_parts(
            squares,
            variables,
            [
                self._keeps_rows(each, variable)
                for each, variable in zip(gradients, variables, strict=True)
            ],
        )

    def _of_all_parts(
        self,
        sums: list[tf.Tensor],
        variables: list[keras.Variable],
        whole: Iterable[bool] = (),
    ) -> tf.Tensor:
        """Sums scalars of what replicas store over all parts, `[sums]`.

        Each is divided by the replicas that have it.

        Args:
            sums: The scalars.
            variables: The variable of each.
            whole: Of each, whether all replicas have it of all parts.
        """
        wide = max((each.dtype for each in sums), key=lambda d: d.size)
        own = [
            tf.cast(each, wide)
            / (
                keras_internals.stored(variable).copies
                if keras_internals.is_split(variable) and not of_all
                else self._mesh.replicas
            )
            for each, variable, of_all in itertools.zip_longest(
                sums, variables, whole, fillvalue=False
            )
        ]
        return sum_over_replicas(tf.stack(own))

    def _moved(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> bool:
        """Updates by what is known of whole weights; whether it has done so."""
        if not gradients:
            return False
        if needs_whole(optimizer):
            move_whole(optimizer, gradients, variables, self._write_parts)
            return True
        steps = two_steps(optimizer)
        if steps is None:
            return False

        def begin(part: tf.Variable, gradient: Any) -> tuple[tf.Tensor, ...]:
            direction = steps.direction(gradient, part)
            return (
                direction,
                tf.reduce_sum(tf.square(tf.convert_to_tensor(part))),
                tf.reduce_sum(tf.square(direction)),
            )

        def end(
            part: tf.Variable, direction: tf.Tensor, *squares: tf.Tensor
        ) -> tuple[()]:
            norms = [tf.sqrt(tf.cast(each, part.dtype)) for each in squares]
            rate = optimizer.learning_rate
            steps.move(direction, part, rate, Norms(*norms))
            return ()

        begun = self._on_parts(begin, variables, [(g,) for g in gradients])
        directions, weights, lengths = zip(*begun, strict=True)
        squares = self._of_all_parts(
            [*weights, *lengths], [*variables, *variables]
        )
        every = zip(*map(tf.unstack, tf.split(squares, 2)), strict=True)
        self._on_parts(
            end,
            variables,
            [(d, *s) for d, s in zip(directions, every, strict=True)],
        )
        return True

    def _write_over(self, variable: keras.Variable, gradient: Any) -> None:
        if not keras_internals.is_split(variable):
            variable.assign(gradient)
            return
        if self._hands_over_whole:
            gradient = self._own(gradient, variable)
        self._write_parts([variable], [gradient])

    def _write_parts(
        self, variables: list[keras.Variable], parts: list[tf.Tensor]
    ) -> None:
        def write(held: tf.Variable, part: tf.Tensor) -> tuple[()]:
            held.assign(part)
            return ()

        self._on_parts(write, variables, [(part,) for part in parts])

    def _on_parts(
        self,
        function: Callable[..., tuple[Any, ...]],
        variables: list[keras.Variable],
        arguments: list[tuple[Any, ...]],
    ) -> list[list[Any]]:
        """Calls a function as updates are: with what a replica stores.

        Args:
            function: Takes what is stored of a variable, and its arguments.
            variables: For each a call is made.
            arguments: Of each call, those of this replica.

        Returns:
            What the calls on this replica returned.
        """

        def update(strategy: Any, arguments: list[tuple[Any, ...]]) -> Any:
            every = [
                strategy.extended.update(
                    variable.value, function, args=own, group=False
                )
                for variable, own in zip(variables, arguments, strict=True)
            ]

            def of_replica(context: Any) -> list[list[Any]]:
                place = context.replica_id_in_sync_group
                place -= strategy.first_replica
                return [[local[place] for local in each] for each in every]

            return strategy.experimental_distribute_values_from_function(
                of_replica
            )

        return turns.merged(update, [arguments])

    def _accumulators(self) -> list[Any]:
        """Returns the sums of gradients: of a split weight, this replica's."""
        return [
            sums.value.here() if keras_internals.is_split(sums) else sums
            for sums in super()._accumulators()
        ]


def _rows_of_part(
    slices: tf.IndexedSlices, split: Split, rank: int, held: ShardedVariable
) -> tf.IndexedSlices:
    """Returns what belongs to a part of a table, of rows of the whole table.

    Args:
        slices: The rows.
        split: How the table is divided.
        rank: Which part.
        held: The table.
    """
    first, after = split.bounds(rank)
    if split.by_rows or split.dim == 0:
        return own_rows(slices, (first, after), split.shape[1:])
    if split.dim is None:
        raise ConfigurationError(
            "Rows are looked up in a matrix where weights are split. "
            f"Received: {held.name} of shape {held.split.shape}. "
            "Reshape the weight to a matrix, or use 'mirrored'."
        )
    columns = (slice(None),) * split.dim + (slice(first, after),)
    shape = tf.constant(split.shape_of(rank), slices.indices.dtype)
    return tf.IndexedSlices(slices.values[columns], slices.indices, shape)


def _sees_all_rows(variable: keras.Variable) -> bool:
    """Whether a weight is split over devices that have other rows."""
    held = keras_internals.stored(variable)
    return isinstance(held, ShardedVariable) and held.split.over == "rows"


def _over_tensor(variable: keras.Variable) -> bool:
    """Whether devices of a tensor group have parts of a weight's gradient."""
    if not keras_internals.is_split(variable):
        return False
    return "tensor" in keras_internals.stored(variable).split.axes


def _check_own_rows(variables: list[keras.Variable]) -> None:
    """Refuses weights that have no gradient of the rows of one replica."""
    for variable in filter(_sees_all_rows, variables):
        raise ConfigurationError(
            "noise_scale compares the gradients of replicas, each of its own "
            "rows, and a layer whose weights a layout splits over 'batch' is "
            f"computed of the rows of all. Received: {variable.path}. Leave "
            "out noise_scale, or split other axes."
        )


def refresh(variables: list[keras.Variable]) -> None:
    """Writes parts to the whole copies of variables, where there are such."""
    copied = _copied(variables)
    if not any(variable.is_apart for variable in copied):
        for variable in copied:
            variable.refresh()
        return
    strategy = copied[0].distribute_strategy
    strategy.run(_refresh_on_replica, args=(variables,))


def _refresh_on_replica(variables: list[keras.Variable]) -> None:
    """As `refresh`. On a replica."""
    copied = _copied(variables)
    if not any(variable.is_apart for variable in copied):
        turns.merged(lambda _: refresh(variables))
        return
    for variable, value in zip(copied, computed(copied), strict=True):
        variable.refresh_here(value)


def _copied(variables: list[keras.Variable]) -> list[ShardedVariable]:
    """Returns the variables of which replicas keep whole copies."""
    return [
        variable.value
        for variable in variables
        if keras_internals.is_split(variable) and variable.value.keeps_whole
    ]


def check_not_lazy(model: keras.Model, tables: list[str]) -> None:
    """Refuses what distinguishes rows that were looked up from rows of zeros.

    Args:
        model: A compiled model.
        tables: The paths of those that are split by rows and not read so.

    Raises:
        ConfigurationError: There are some, and an optimizer is `LazyAdam`.
    """
    if tables and any(
        isinstance(part, LazyAdam)
        for optimizer in keras_internals.optimizers_of(model)
        for part in keras_internals.parts(unwrap(optimizer)[1])
    ):
        raise ConfigurationError(
            "LazyAdam updates the rows that a batch has looked up, and a "
            "device with a part of a vocabulary does not tell them apart. "
            f"Received: LazyAdam with {tables[0]} split by its rows. Use Adam, "
            "or 'fsdp' or 'mirrored'."
        )


def needs_whole(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer computes its update of whole weights."""
    if hasattr(optimizer, "optimizers") or two_steps(optimizer) is not None:
        return False
    own = type(optimizer).update_step
    return keras_internals.writes_itself(optimizer) or all(
        own is not kind.update_step for kind in ELEMENTWISE
    )
