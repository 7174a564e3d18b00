"""From the gradients of the replicas to new weights, in one order.

    local gradients
    -> accumulated on the replica, without communication
    -> summed over replicas
    -> unscaled, and checked to be finite: one answer for all replicas
    -> clipped -> applied -> averaged (EMA)

Keras's optimizer does the last line itself. Its own places for the lines
before are inside of a replica, where clipping sees a part of the gradient and
conditions cannot communicate; here conditions stand outside of replicas.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.exchange.embedding_rows import RowGather
from mgpu_tf.engine.exchange.noise_scale import NoiseScale, square_of
from mgpu_tf.engine.exchange.reduction import Reduction, of_shape
from mgpu_tf.engine.step.traced import Watch
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

Gradients = list[Any]


class Update:
    """Applies gradients with an optimizer.

    Args:
        optimizer: The optimizer, built.
        variables: What it is applied to.
        strategy: Where they live.
        stored_once: Whether there is one copy of variables for all replicas.
        options: How steps are made.
        noise: Measures the noise of gradients, where it is asked for.
        by_pairs: Whether the optimizer's `apply_gradients` is called, and
            not its `apply`.
        reduced: Whether all replicas have the same gradients already, those
            of the global batch.

    Raises:
        ConfigurationError: The optimizer asks for what cannot be made right.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
        strategy: tf.distribute.Strategy,
        *,
        stored_once: bool,
        options: StepOptions,
        noise: NoiseScale | None = None,
        by_pairs: bool = True,
        reduced: bool = False,
    ) -> None:
        self._strategy = strategy
        self._noise = noise
        self._reduction = Reduction(options)
        self._rows = RowGather(
            strategy,
            options,
            apart=topology_of(strategy).num_workers > 1,
        )
        self._variables = variables
        self._scaler, self._optimizer = unwrap(optimizer)
        self._stored_once = stored_once
        self._replicas = strategy.num_replicas_in_sync
        self._every = accumulation_steps(self._optimizer)
        if self._every > 1 and keras_internals.applies_itself(self._optimizer):
            raise ConfigurationError(
                "Gradients are accumulated before an optimizer gets them. "
                "Received: gradient_accumulation_steps of "
                f"{type(self._optimizer).__name__}, whose author wrote its "
                "apply or apply_gradients, which Keras calls before. Write it "
                "as update_step, or use a larger batch size."
            )
        self._reduced = reduced
        self._reduces_first = self._every == 1 or stored_once or reduced
        self._constrains_once = stored_once
        # As Keras's own step does; a loss scaling calls the other method.
        self._by_pairs = by_pairs and self._scaler is None
        # Whether all replicas have the same gradients when they are checked.
        self._are_alike = self._reduces_first or self._replicas == 1
        # Which variables have a gradient; known once a step is traced.
        self.present: list[bool] = []
        # Whose rows all replicas have looked up alike; see `RowGather`.
        self.alike: list[bool] = []
        # Which gradients are of this replica's part of a weight, and summed.
        self.in_parts: list[bool] = []
        # Sees what passes, in a step that is traced.
        self.watch: Watch | None = None

    def __call__(self, gradients: Gradients) -> None:
        """Makes one step of training. Outside of replicas.

        Args:
            gradients: For each variable with a gradient the contributions
                of the replicas, scaled by the optimizer's `scale_loss`.
        """
        if self.watch is not None:
            self.watch.local = gradients
        if not gradients:
            return  # As Keras, where nothing is trainable.
        if self._reduces_first:
            gradients = self._of_all(gradients)
        if self._scaler is None:
            self._step(gradients)
            return
        checked = self._strategy.run(self._finite, args=(gradients,))
        tf.cond(
            self._first(checked),
            lambda: self._unscaled_step(gradients),
            self._shrink_scale,
        )

    def _of_all(self, gradients: Gradients) -> Gradients:
        """Makes gradients those of all replicas. Outside of replicas."""
        if self._reduced:
            return gradients
        held = self._held()
        alike = self.alike or [False] * len(held)
        with tf.name_scope("reduce"):
            return self._summed(gradients, held, alike)

    def _summed(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        alike: list[bool],
    ) -> Gradients:
        """Sums gradients over replicas. Outside of replicas.

        Dense ones are summed; rows of embeddings are gathered.

        Args:
            gradients: The gradients of the replicas.
            variables: The variable of each.
            alike: As for `RowGather`.
        """
        sparse = [
            isinstance(self._first(g), tf.IndexedSlices) for g in gradients
        ]
        rows = iter(
            self._rows(
                list(itertools.compress(gradients, sparse)),
                list(itertools.compress(alike, sparse)),
            )
        )
        dense = [
            g
            for g, is_sparse in zip(gradients, sparse, strict=True)
            if not is_sparse
        ]
        shapes = [
            variable.shape
            for variable, is_sparse in zip(variables, sparse, strict=True)
            if not is_sparse
        ]

        def summed(gradients: Gradients) -> Gradients:
            return self._reduction(list(map(of_shape, gradients, shapes)))

        if dense and self._replicas > 1:
            dense = self._strategy.run(summed, args=(dense,))
        sums = iter(dense)
        return [next(rows) if each else next(sums) for each in sparse]

    def _unscaled_step(self, gradients: Gradients) -> tf.Tensor:
        self._step(self._strategy.run(self._unscale, args=(gradients,)))
        keras_internals.grow_scale(self._scaler)
        return tf.constant(True)

    def _shrink_scale(self) -> tf.Tensor:
        keras_internals.shrink_scale(self._scaler)
        return tf.constant(False)

    def _step(self, gradients: Gradients) -> None:
        if self._every == 1:
            self._apply(gradients)
        else:
            count = keras_internals.micro_steps(self._optimizer)
            tf.cond(
                tf.equal((count + 1) % self._every, 0),
                lambda: self._end_accumulation(gradients),
                lambda: self._accumulate(gradients),
            )
        self._overwrite_with_average()

    def _apply(self, gradients: Gradients) -> None:
        if self._noise is not None:
            self._noise.update(self._square(gradients))
        if self.watch is not None:
            self.watch.received = gradients
        with (
            tf.name_scope("apply"),
            self._in_order(),
            self._constraints_outside(),
        ):
            try:
                self._strategy.run(self._apply_on_replica, args=(gradients,))
            except ValueError as error:
                if "aggregation method" not in str(error):
                    raise
                name = type(self._optimizer).__name__
                raise ConfigurationError(
                    "An optimizer that writes state of its own in a replica "
                    "does not go with 'central_storage', which keeps one "
                    f"copy. Received: {name}. Use 'mirrored'."
                ) from None

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        return keras_internals.engine_order(self._optimizer)

    @contextlib.contextmanager
    def _constraints_outside(self) -> Iterator[None]:
        """Constrains a weight once, after all replicas.

        Keras does so in every replica, right after the update.
        """
        constraints = [variable.constraint for variable in self._variables]
        if not self._constrains_once or not any(constraints):
            yield
            return
        for variable in self._variables:
            variable.constraint = None
        try:
            yield
        finally:
            for variable, own in zip(self._variables, constraints, strict=True):
                variable.constraint = own
        self._constrain()

    def _constrain(self) -> None:
        keras_internals.constrain(self._held())

    def _end_accumulation(self, gradients: Gradients) -> tf.Tensor:
        gradients = self._strategy.run(self._take, args=(gradients,))
        if not self._reduces_first:
            gradients = self._of_all(gradients)
        self._apply(gradients)
        return tf.constant(True)

    def _accumulate(self, gradients: Gradients) -> tf.Tensor:
        optimizer = self._optimizer
        if self._noise is not None:
            self._noise.accumulate()
        if self._stored_once:
            for sums, gradient, variable in zip(
                self._accumulators(), gradients, self._held(), strict=True
            ):
                if keras_internals.is_overwritten(variable):
                    sums.assign(tf.maximum(sums, self._first(gradient)))
                else:
                    sums.assign_add(self._first(gradient))
        else:
            self._strategy.run(self._add, args=(gradients,))
        if optimizer.use_ema:
            self._strategy.run(
                lambda: keras_internals.update_averages(optimizer)
            )
        keras_internals.count_micro_step(optimizer)
        # Keras does so after each micro-step: initial weights may need it.
        self._constrain()
        return tf.constant(False)

    def _overwrite_with_average(self) -> None:
        """Writes averages over weights where it is time to, as Keras does."""
        for optimizer in keras_internals.parts(self._optimizer):
            if not (optimizer.use_ema and optimizer.ema_overwrite_frequency):
                continue
            count = keras_internals.micro_steps(optimizer) - 1
            step = count // (optimizer.gradient_accumulation_steps or 1) + 1
            due = tf.equal(step % optimizer.ema_overwrite_frequency, 0)
            tf.cond(
                due,
                returning(True, keras_internals.overwrite, optimizer),
                lambda: tf.constant(False),
            )

    def _square(self, gradients: Gradients) -> tf.Tensor:
        """Returns the squared norm of the gradients of all replicas."""
        return tf.add_n(self._squares_of([self._first(g) for g in gradients]))

    # On a replica.

    def own_square(
        self, gradients: Gradients, known: dict[int, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the squared norm of a replica's gradients, in float64.

        Args:
            gradients: Before they are summed over replicas.
            known: That of each weight whose gradient is summed already, by the
                identity of the weight.

        Returns:
            Where replicas have the same rows, what adds up to it over them.
        """
        del known
        return tf.add_n(self._squares_of(gradients))

    def _squares_of(self, gradients: Gradients) -> list[tf.Tensor]:
        """Returns the squared norm of each gradient, where it lies."""
        return list(map(square_of, gradients))

    def _finite(self, gradients: Gradients) -> tf.Tensor:
        bad = [
            tf.reduce_any(~tf.math.is_finite(values(gradient)))
            for gradient in gradients
        ]
        count = tf.cast(tf.reduce_any(tf.stack(bad)), tf.float32)
        if not self._are_alike:
            count = sum_over_replicas(count)
        return tf.equal(count, 0.0)

    def _unscale(self, gradients: Gradients) -> Gradients:
        scale = tf.cast(self._scaler.dynamic_scale, tf.float32)
        return [
            gradient
            if keras_internals.is_overwritten(variable)
            else self._unscaled(gradient, scale)
            for gradient, variable in zip(gradients, self._held(), strict=True)
        ]

    def _unscaled(self, gradient: Any, scale: tf.Tensor) -> Any:
        return divided(gradient, scale)

    def _add(self, gradients: Gradients) -> None:
        accumulators = self._accumulators()
        every = self._plus(accumulators, gradients)
        for sums, value in zip(accumulators, every, strict=True):
            sums.assign(value)

    def _plus(
        self, accumulators: list[keras.Variable], gradients: Gradients
    ) -> list[tf.Tensor]:
        """Returns what gradients of a variable are up to now.

        Of one that is overwritten, Keras takes the largest value.
        """
        return [
            tf.maximum(sums, gradient)
            if keras_internals.is_overwritten(variable)
            else self._sum(sums, gradient)
            for sums, gradient, variable in zip(
                accumulators, gradients, self._held(), strict=True
            )
        ]

    def _sum(self, sums: Any, gradient: Any) -> tf.Tensor:
        return tf.ensure_shape(sums + _dense(gradient), sums.shape)

    def _mean(self, gradient: tf.Tensor) -> tf.Tensor:
        return gradient / self._every

    def _held(self) -> list[keras.Variable]:
        """Returns the variables that have a gradient."""
        return list(itertools.compress(self._variables, self.present))

    def _take(self, gradients: Gradients) -> Gradients:
        """Returns the mean over micro-steps, and sets the sums to zero."""
        accumulators = self._accumulators()
        gradients = self._plus(accumulators, gradients)
        if self._stored_once:
            turns.merged(lambda _: _set_to_zero(accumulators))
        else:
            _set_to_zero(accumulators)
        return [
            gradient
            if keras_internals.is_overwritten(variable)
            else self._mean(gradient)
            for gradient, variable in zip(gradients, self._held(), strict=True)
        ]

    def _apply_on_replica(self, gradients: Gradients) -> None:
        queue = iter(gradients)
        full = [next(queue) if has else None for has in self.present]
        hand_over(
            self._optimizer, full, self._variables, by_pairs=self._by_pairs
        )

    def _accumulators(self) -> list[keras.Variable]:
        every = keras_internals.accumulators(self._optimizer, self._variables)
        return [
            sums for sums, has in zip(every, self.present, strict=True) if has
        ]

    def _first(self, value: Any) -> tf.Tensor:
        return self._strategy.experimental_local_results(value)[0]


def unwrap(
    optimizer: keras.optimizers.Optimizer | None,
) -> tuple[Any, keras.optimizers.Optimizer]:
    """Returns the loss scaling, or None, and the optimizer inside.

    Raises:
        ConfigurationError: The model was compiled without an optimizer.
    """
    if optimizer is None:
        raise ConfigurationError(
            "Keras's own train_step needs an optimizer. Received: a model "
            "compiled with optimizer=None. Give one to `compile`."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer, optimizer.inner_optimizer
    return None, optimizer


def hand_over(
    optimizer: keras.optimizers.Optimizer,
    gradients: Gradients,
    variables: list[keras.Variable],
    *,
    by_pairs: bool,
) -> None:
    """Gives gradients to an optimizer.

    Args:
        optimizer: Whose methods may be an author's own.
        gradients: One for each variable, or None.
        variables: The variables.
        by_pairs: Whether by `apply_gradients`, as Keras's own step does. A
            loss scaling calls `apply` of what it wraps.
    """
    if by_pairs:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    else:
        optimizer.apply(gradients, variables)


def accumulated(
    optimizers: list[keras.optimizers.Optimizer],
) -> list[keras.Variable]:
    """Returns the sums of gradients that wait for the end of accumulations."""
    found: list[keras.Variable] = []
    for optimizer in optimizers:
        _, inner = unwrap(optimizer)
        if accumulation_steps(inner) > 1:
            found += keras_internals.accumulators(inner)
    return found


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how many gradients an optimizer adds up for an update."""
    inner = list(keras_internals.parts(optimizer))[1:]
    if any(part.gradient_accumulation_steps for part in inner):
        raise ConfigurationError(
            "Optimizers inside of another one cannot accumulate. "
            "Received: gradient_accumulation_steps on one of them. Use a "
            "larger batch size."
        )
    return optimizer.gradient_accumulation_steps or 1


def _set_to_zero(variables: list[keras.Variable]) -> None:
    for variable in variables:
        variable.assign(tf.zeros(variable.shape, variable.dtype))


def values(gradient: Any) -> tf.Tensor:
    """Returns the numbers of a gradient, dense or sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


def beside(gradient: Any) -> contextlib.AbstractContextManager[None]:
    """Computes on the device that has a gradient."""
    return tf.device(values(gradient).device)


def divided(gradient: Any, scale: tf.Tensor) -> Any:
    """Returns a gradient, dense or sparse, divided by a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            divided(gradient.values, scale),
            gradient.indices,
            gradient.dense_shape,
        )
    return gradient / tf.cast(scale, gradient.dtype)


def _dense(gradient: Any) -> tf.Tensor:
    return tf.convert_to_tensor(gradient)


def returning(
    value: bool, function: Callable[[Any], None], argument: Any
) -> Callable[[], tf.Tensor]:
    """Makes a branch for `tf.cond` of a function that returns nothing."""

    def run() -> tf.Tensor:
        function(argument)
        return tf.constant(value)

    return run
