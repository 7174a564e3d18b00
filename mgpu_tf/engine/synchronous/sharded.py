"""The synchronous engine where replicas store parts of weights (FSDP, ZeRO).

    gather      the parts of a weight      -> the whole weight, on each replica
    forward and backward on whole weights, as on other strategies
    scatter     the gradients of replicas  -> each replica the sum of its part
    update      the optimizer, on parts

To gather and to scatter move together as many bytes as to sum gradients: each
replica of n receives (n - 1)/n of a weight, and as much of a gradient.

Where several processes hold the replicas, weights are gathered and gradients
scattered by collectives of the strategy's groups, gradients in packs.

What needs whole gradients takes them from all parts: norms to clip by, and
the check that gradients are finite.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.per_layer import LayerByLayer
from mgpu_tf.engine.state import Writes
from mgpu_tf.engine.synchronous.engine import (
    SynchronousEngine,
    refuse_stages,
)
from mgpu_tf.engine.synchronous.parts import cut, gathered, scattered
from mgpu_tf.engine.update import Gradients, Update, divided, unwrap, values
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.reports.pipeline_trace import ShareTrace, StepTrace
from mgpu_tf.strategies.sharded_variable import ShardedVariable

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
)


class ShardedEngine(SynchronousEngine):
    """Trains with weights that are split over replicas.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: A strategy that splits weights.
        options: How steps are made.

    Raises:
        ConfigurationError: The model is not compiled, was made elsewhere, or
            has a `train_step` or an optimizer that needs whole weights.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
    ) -> None:
        super().__init__(model, strategy, options)
        for method in ("train_step", "test_step"):
            if keras_internals.overrides(model, method):
                raise ConfigurationError(
                    f"A {method} of one's own, or a Loop, needs whole weights "
                    "on each device. Received: "
                    f"{type(model).__name__} on a strategy that splits them. "
                    "Use 'mirrored'."
                )
        if options.noise_scale:
            raise ConfigurationError(
                "noise_scale needs whole weights on each device. Received: "
                "noise_scale=True on a strategy that splits them. Use "
                "'mirrored'."
            )
        if strategy.is_apart and model.run_eagerly:
            raise ConfigurationError(
                "Weights that are split over several processes are gathered "
                "in graphs. Received: run_eagerly=True. Leave it out, or use "
                "one process."
            )
        if model.optimizer is not None:
            _check_elementwise(model.optimizer)

    def trace(self, source: Source) -> StepTrace:
        """Runs the first step of training and undoes it; as in `Engine`."""
        self._refuse_trace()
        return super().trace(source)

    def trace_outputs(self, source: Source) -> list[ShareTrace]:
        """Predicts one batch; as in `Engine`."""
        self._refuse_trace()
        return super().trace_outputs(source)

    def _refuse_trace(self) -> None:
        if self._strategy.is_apart:
            raise ConfigurationError(
                "A trace runs one operation after another, and gathers of "
                "weights wait for each other. Received: weights that are "
                "split over several processes. Trace in one process, with "
                "num_virtual_devices."
            )

    def _make_update(self) -> Update:
        return ShardedUpdate(
            self._model.optimizer,
            self._model.trainable_variables,
            self._strategy,
            stored_once=False,
            options=self._options,
        )

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
        return LayerByLayer(self._model, _gathered)

    @property
    def _gathers_at_once(self) -> bool:
        return self._strategy.shard != "weights"

    def _gathered(self) -> Writes:
        if not self._gathers_at_once or self._options.recompute is not None:
            return []  # Layer by layer.
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
        stored_once: As for `Update`.
        options: As for `Update`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
        strategy: tf.distribute.Strategy,
        *,
        stored_once: bool,
        options: StepOptions,
    ) -> None:
        super().__init__(
            optimizer,
            variables,
            strategy,
            stored_once=stored_once,
            options=options,
        )
        self._mesh = strategy.mesh
        self._constrains_once = True
        self._are_alike = False
        if strategy.shard != "optimizer":
            self._reduces_first = True
        name = options.gradient_dtype
        self._dtype = tf.as_dtype(name) if name else None

    # Outside of replicas.

    def _summed(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
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
            if is_split
            else next(summed)
            for gradient, variable, is_scattered, is_split in zip(
                gradients, variables, scattered, split, strict=True
            )
        ]

    def _parts(
        self, gradients: Gradients, variables: list[ShardedVariable]
    ) -> Gradients:
        """Gives each replica the sums of its parts of dense gradients."""
        if gradients and self._strategy.is_apart:
            return self._strategy.run(
                lambda every: scattered(every, variables, self._dtype),
                args=(gradients,),
            )
        return [
            self._scattered(gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _scattered(self, gradient: Any, variable: ShardedVariable) -> Any:
        """Gives each replica the sum of its part of a dense gradient.

        First the members of a group add up the part of each, then those of
        several groups that store the same part.
        """
        mesh = self._mesh
        every = self._strategy.experimental_local_results(gradient)
        parts: list[tf.Tensor] = [None] * mesh.size
        for replica in range(mesh.size):
            rank = mesh.fsdp_rank(replica)
            with tf.device(variable.values[replica].device):
                parts[replica] = tf.add_n(
                    [
                        self._sent(every[member], variable, rank, member)
                        for member in mesh.group(replica)
                    ]
                )
        if mesh.data > 1:
            for rank in range(mesh.fsdp):
                copies = mesh.copies(rank)
                for replica in copies:
                    with tf.device(variable.values[replica].device):
                        parts[replica] = tf.identity(
                            tf.add_n([parts[copy] for copy in copies])
                            if replica == copies[0]
                            else parts[copies[0]]
                        )
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )

    def _sent(
        self,
        gradient: tf.Tensor,
        variable: ShardedVariable,
        rank: int,
        member: int,
    ) -> tf.Tensor:
        """Returns the part of a rank, cut on the device that computed it."""
        with tf.device(variable.values[member].device):
            part = cut(gradient, variable, rank, self._dtype)
        return tf.cast(part, gradient.dtype)

    def _own_rows(self, slices: Any, variable: keras.Variable) -> Any:
        """Keeps of the rows of all replicas those that a replica stores."""
        split = variable.value.split
        if not split.by_rows:
            raise ConfigurationError(
                "Rows are looked up in a matrix where weights are split. "
                f"Received: {variable.path} of shape {split.shape}. Reshape "
                "the weight to a matrix, or use 'mirrored'."
            )

        def kept(slices: tf.IndexedSlices) -> tf.IndexedSlices:
            context = tf.distribute.get_replica_context()
            replica = tf.get_static_value(context.replica_id_in_sync_group)
            first, after = split.bounds(self._mesh.fsdp_rank(int(replica)))
            indices = slices.indices
            mine = (indices >= first) & (indices < after)
            return tf.IndexedSlices(
                tf.boolean_mask(slices.values, mine),
                tf.boolean_mask(indices, mine) - first,
                tf.constant([after - first, split.shape[1]], indices.dtype),
            )

        return self._strategy.run(kept, args=(slices,))

    def _apply(self, gradients: Gradients) -> None:
        super()._apply(gradients)
        refresh(self._variables)

    def _overwrite_with_average(self) -> None:
        super()._overwrite_with_average()
        if any(
            part.ema_overwrite_frequency
            for part in keras_internals.parts(self._optimizer)
        ):
            refresh(self._variables)

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        return keras_internals.engine_order(
            self._optimizer, clipped=self._clipped
        )

    # On a replica.

    def _clipped(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: list[keras.Variable],
    ) -> Gradients:
        """Clips by norms of whole gradients, as Keras does."""
        by_norm, by_all = optimizer.clipnorm, optimizer.global_clipnorm
        norms = tf.unstack(self._squares(gradients, variables))
        if by_norm:
            return [
                divided(gradient, tf.maximum(tf.sqrt(norm), by_norm) / by_norm)
                for gradient, norm in zip(gradients, norms, strict=True)
            ]
        norm = tf.sqrt(tf.add_n(norms))
        scale = by_all * tf.minimum(1.0 / norm, 1.0 / by_all)
        # Not finite where the norm is not, as in Keras.
        scale = scale + (norm - norm)
        # Rows become dense here, as in Keras.
        return [
            tf.convert_to_tensor(gradient) * tf.cast(scale, gradient.dtype)
            for gradient in gradients
        ]

    def _squares(
        self, gradients: Gradients, variables: list[keras.Variable]
    ) -> tf.Tensor:
        """Returns the squared norm of each whole gradient, `[gradients]`."""
        wide = max((values(g).dtype for g in gradients), key=lambda d: d.size)
        own = [
            tf.cast(tf.reduce_sum(tf.square(values(gradient))), wide)
            / (
                self._mesh.data
                if keras_internals.is_split(variable)
                else self._mesh.size
            )
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.stack(own))

    def _accumulators(self) -> list[Any]:
        """Returns the sums of gradients: of a split weight, this replica's."""
        return [
            sums.value.here() if keras_internals.is_split(sums) else sums
            for sums in super()._accumulators()
        ]


def _gathered(variable: keras.Variable) -> tf.Tensor | None:
    """Returns the whole value of a weight that is split. On a replica."""
    if not keras_internals.is_split(variable):
        return None
    return tf.convert_to_tensor(keras_internals.stored(variable))


def refresh(variables: list[keras.Variable]) -> None:
    """Writes parts to the whole copies of variables, where there are such."""
    copied = [
        variable.value
        for variable in variables
        if keras_internals.is_split(variable) and variable.value.keeps_whole
    ]
    if not any(variable.is_apart for variable in copied):
        for variable in copied:
            variable.refresh()
        return

    def on_replica() -> None:
        for variable, value in zip(copied, gathered(copied), strict=True):
            variable.refresh_here(value)

    copied[0].distribute_strategy.run(on_replica)


def _check_elementwise(optimizer: keras.optimizers.Optimizer) -> None:
    for part in keras_internals.parts(unwrap(optimizer)[1]):
        wraps = hasattr(part, "optimizers")
        own = type(part).update_step
        if not wraps and all(own is not k.update_step for k in ELEMENTWISE):
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigurationError(
                "Where weights are split, an optimizer must compute each "
                "element of a weight from that element alone. Received: "
                f"{type(part).__name__}. Use one of {names}, or the strategy "
                "'mirrored'."
            )
