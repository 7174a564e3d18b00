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
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.reduction import Reduction
from mgpu_tf.errors import ConfigurationError

Gradients = list[Any]


class Update:
    """Applies gradients with the optimizer of a model.

    Args:
        model: A compiled and built model.
        strategy: Its strategy.
        stored_once: Whether there is one copy of variables for all replicas.
        gradient_dtype: What gradients are sent as; see `Reduction`.

    Raises:
        ConfigurationError: The optimizer asks for what cannot be made right.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        stored_once: bool,
        gradient_dtype: str | None = None,
    ) -> None:
        self._strategy = strategy
        self._reduction = Reduction(strategy, gradient_dtype)
        self._variables = model.trainable_variables
        self._scaler, self._optimizer = unwrap(model.optimizer)
        self._stored_once = stored_once
        self._replicas = strategy.num_replicas_in_sync
        self._every = accumulation_steps(self._optimizer)
        # Which variables have a gradient; known once a step is traced.
        self.present: list[bool] = []

    @property
    def accumulated(self) -> list[keras.Variable]:
        """The sums of gradients that wait for the end of an accumulation."""
        if self._every == 1:
            return []
        return keras_internals.accumulators(self._optimizer, self._variables)

    def __call__(self, gradients: Gradients) -> None:
        """Makes one step of training. Outside of replicas.

        Args:
            gradients: For each variable with a gradient the contributions
                of the replicas, scaled by the optimizer's `scale_loss`.
        """
        if self._every == 1 or self._stored_once:
            with tf.name_scope("reduce"):
                gradients = self._strategy.run(self._sum, args=(gradients,))
        if self._scaler is None:
            self._step(gradients)
            return
        checked = self._strategy.run(self._finite, args=(gradients,))
        tf.cond(
            self._first(checked),
            lambda: self._unscaled_step(gradients),
            self._shrink_scale,
        )

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
        with (
            tf.name_scope("apply"),
            keras_internals.engine_order(self._optimizer),
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

    @contextlib.contextmanager
    def _constraints_outside(self) -> Iterator[None]:
        """Constrains the one copy of a weight once, after all replicas.

        Keras does so in every replica, right after the update.
        """
        constraints = [variable.constraint for variable in self._variables]
        if not self._stored_once or not any(constraints):
            yield
            return
        for variable in self._variables:
            variable.constraint = None
        try:
            yield
        finally:
            for variable, own in zip(self._variables, constraints, strict=True):
                variable.constraint = own
        for variable, constrain in zip(
            self._variables, constraints, strict=True
        ):
            if constrain is not None:
                variable.assign(constrain(variable))

    def _end_accumulation(self, gradients: Gradients) -> tf.Tensor:
        gradients = self._strategy.run(self._take, args=(gradients,))
        self._apply(gradients)
        return tf.constant(True)

    def _accumulate(self, gradients: Gradients) -> tf.Tensor:
        optimizer = self._optimizer
        if self._stored_once:
            for sums, gradient in zip(
                self._accumulators(), gradients, strict=True
            ):
                sums.assign_add(self._first(gradient))
        else:
            self._strategy.run(self._add, args=(gradients,))
        if optimizer.use_ema:
            self._strategy.run(
                lambda: keras_internals.update_averages(optimizer)
            )
        keras_internals.count_micro_step(optimizer)
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

    # On a replica.

    def _sum(self, gradients: Gradients) -> Gradients:
        return summed(
            gradients, self._replicas, self._optimizer, self._reduction
        )

    def _finite(self, gradients: Gradients) -> tf.Tensor:
        bad = [
            tf.reduce_any(~tf.math.is_finite(values(gradient)))
            for gradient in gradients
        ]
        count = tf.cast(tf.reduce_any(tf.stack(bad)), tf.float32)
        if self._every > 1 and self._replicas > 1:
            # Not summed yet, so the replicas have to be asked.
            context = tf.distribute.get_replica_context()
            count = context.all_reduce("sum", count)
        return tf.equal(count, 0.0)

    def _unscale(self, gradients: Gradients) -> Gradients:
        scale = tf.cast(self._scaler.dynamic_scale, tf.float32)
        return [divided(gradient, scale) for gradient in gradients]

    def _add(self, gradients: Gradients) -> None:
        for sums, gradient in zip(self._accumulators(), gradients, strict=True):
            sums.assign(sums + _dense(gradient))

    def _take(self, gradients: Gradients) -> Gradients:
        """Returns the mean over micro-steps, and sets the sums to zero."""
        accumulators = self._accumulators()
        gradients = [
            sums + _dense(gradient)
            for sums, gradient in zip(accumulators, gradients, strict=True)
        ]
        if self._stored_once:
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda _: _set_to_zero(accumulators))
        else:
            _set_to_zero(accumulators)
            gradients = self._sum(gradients)
        return [gradient / self._every for gradient in gradients]

    def _apply_on_replica(self, gradients: Gradients) -> None:
        queue = iter(gradients)
        full = [next(queue) if has else None for has in self.present]
        self._optimizer.apply(full, self._variables)

    def _accumulators(self) -> list[keras.Variable]:
        every = keras_internals.accumulators(self._optimizer, self._variables)
        return [
            sums for sums, has in zip(every, self.present, strict=True) if has
        ]

    def _first(self, value: Any) -> tf.Tensor:
        return self._strategy.experimental_local_results(value)[0]


def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Gradients,
    variables: list[keras.Variable],
) -> None:
    """Sums gradients over replicas, then clips and applies them.

    For the author of a `train_step`, in place of
    `optimizer.apply_gradients(zip(gradients, variables))`, which clips what
    a replica has before it sums.

    Example:
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            variables = self.generator.trainable_variables
            gradients = tape.gradient(loss, variables)
            mgpu_tf.apply_gradients(self.optimizer, gradients, variables)
            return {"loss": loss}

    Args:
        optimizer: Any optimizer with these variables.
        gradients: One for each variable, or None where it has none; of a
            loss of which the replicas' values add up to the global one.
        variables: The variables.

    Raises:
        ConfigurationError: The optimizer accumulates, overwrites weights
            with averages or scales the loss dynamically, which a train_step
            of one's own does not go with.
    """
    refuse_in_train_step(optimizer, clipping=False)
    present = [_dense(g) for g in gradients if g is not None]
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
        present = context.all_reduce("sum", present)
    queue = iter(present)
    full = [None if g is None else next(queue) for g in gradients]

    def apply(strategy: tf.distribute.Strategy, full: Gradients) -> None:
        with keras_internals.engine_order(optimizer):
            strategy.extended.call_for_each_replica(
                optimizer.apply, args=(full, list(variables))
            )

    context.merge_call(apply, args=(full,))


def refuse_in_train_step(
    optimizer: keras.optimizers.Optimizer, *, clipping: bool
) -> None:
    """Refuses what needs the engine's order, under a train_step's own.

    Args:
        optimizer: The optimizer that is about to apply gradients.
        clipping: Whether clipping is refused as well.

    Raises:
        ConfigurationError: The optimizer asks for one of them.
    """
    wants = []
    for part in keras_internals.parts(optimizer):
        if isinstance(part, keras.optimizers.LossScaleOptimizer):
            wants.append("LossScaleOptimizer")
        names = ["gradient_accumulation_steps"]
        if part.use_ema:
            names.append("ema_overwrite_frequency")
        if clipping:
            names += ["clipnorm", "global_clipnorm", "clipvalue"]
        wants += [name for name in names if getattr(part, name, None)]
    if wants:
        remedy = "Leave train_step to Keras"
        if clipping:
            remedy += ", or call mgpu_tf.apply_gradients in it to clip"
        raise ConfigurationError(
            "On several replicas a train_step of one's own goes without "
            f"{', '.join(wants)}. Received: the optimizer "
            f"{optimizer.name!r} with it. {remedy}."
        )


def unwrap(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[Any, keras.optimizers.Optimizer]:
    """Returns the loss scaling, or None, and the optimizer inside."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer, optimizer.inner_optimizer
    return None, optimizer


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how many gradients an optimizer adds up for an update."""
    inner = list(keras_internals.parts(optimizer))[1:]
    if any(part.gradient_accumulation_steps for part in inner):
        raise ConfigurationError(
            "Optimizers inside of a MultiOptimizer cannot accumulate. "
            "Received: gradient_accumulation_steps on one of them. Use a "
            "larger batch size."
        )
    return optimizer.gradient_accumulation_steps or 1


def summed(
    gradients: Gradients,
    replicas: int,
    optimizer: keras.optimizers.Optimizer,
    reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]] | None = None,
) -> Gradients:
    """Sums gradients over replicas that step together. On a replica.

    Args:
        gradients: Those of this replica.
        replicas: How many there are.
        optimizer: What they are for.
        reduce: Sums dense gradients; as the strategy does by default.

    Returns:
        The sums; dense wherever they have to be.
    """
    if replicas == 1 and not _clips(optimizer):
        return gradients
    # TensorFlow gathers sparse gradients, and fails in a loop when their
    # length changes; a norm needs the rows of one index added up anyway.
    gradients = [_dense(gradient) for gradient in gradients]
    if replicas == 1:
        return gradients
    if reduce is None:
        return tf.distribute.get_replica_context().all_reduce("sum", gradients)
    return reduce(gradients)


def _clips(optimizer: keras.optimizers.Optimizer) -> bool:
    return any(
        part.clipnorm or part.global_clipnorm or part.clipvalue
        for part in keras_internals.parts(optimizer)
    )


def _set_to_zero(variables: list[keras.Variable]) -> None:
    for variable in variables:
        variable.assign(tf.zeros(variable.shape, variable.dtype))


def values(gradient: Any) -> tf.Tensor:
    """Returns the numbers of a gradient, dense or sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


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
