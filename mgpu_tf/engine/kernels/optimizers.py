"""The updates of Keras's optimizers as one operation for each weight.

Keras computes an update in elementary operations, each a pass over memory.
TensorFlow has operations that do all of it in one pass. A row of the table
says when they compute the same, and how Keras's settings become arguments:

    type of optimizer -> when it is the same, the update of one weight

Keras converts some settings to float32 before it takes them as float64. Those
are converted in the same way here, so in float64 the results are the same up
to rounding.

Gradients of embeddings have a table of their own. TensorFlow's sparse
operations decay only the rows that were looked up, where Keras decays all. So
only what Keras leaves alone in other rows is there.

In float32 `ResourceApplyAdam` takes `1 - beta_2` of a rounded beta, where Keras
rounds the difference. Velocities differ by 1.3e-5 of their value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.optimizers.lazy_adam import LazyAdam

Update = Callable[[Any, tf.Tensor], None]

DTYPES = (tf.float32, tf.float64)


class Settings:
    """Settings of an optimizer as tensors, made once for an update.

    A model has hundreds of weights on each device, and each update of one takes
    the same powers of the same betas. So those of a device are shared.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what was made for a key; makes it if nothing was."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight that is updated, as TensorFlow's operations take it.

    Attributes:
        handle: Of the variable.
        slots: Handles of what the optimizer keeps for it.
        gradient: Dense or rows, of the type of the variable.
        rate: The learning rate, of the type of the variable.
        settings: Those of the update.
        place: The optimizer, the graph, the device and the type.
    """

    handle: tf.Tensor
    slots: list[tf.Tensor]
    gradient: Any
    rate: tf.Tensor
    settings: Settings
    place: tuple[Any, ...]

    def cast(self, value: Any) -> tf.Tensor:
        """Returns a setting as Keras's `cast` has it, by way of float32."""
        return self._once(
            "cast", value, lambda: keras.ops.cast(value, self.gradient.dtype)
        )

    def exact(self, value: Any) -> tf.Tensor:
        """Returns a setting in the type of the variable."""
        return self._once(
            "exact",
            value,
            lambda: tf.convert_to_tensor(value, self.gradient.dtype),
        )

    def power(self, beta: float, optimizer: Any) -> tf.Tensor:
        """Returns a beta to the power of the number of the update."""
        return self._once(
            "power", beta, lambda: self.cast(beta) ** self.step(optimizer)
        )

    def step(self, optimizer: Any) -> tf.Tensor:
        """Returns the number of the update, from 1."""
        return self._once(
            "step",
            None,
            lambda: keras.ops.cast(
                optimizer.iterations + 1, self.gradient.dtype
            ),
        )

    def _once(
        self, kind: str, value: Any, make: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """Returns what all weights at this place share, of a number."""
        if not isinstance(value, int | float | None):
            return make()
        key = (*self.place, kind, value)
        return self.settings.once(key, make)


def is_fused(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether some gradients are applied in fused form."""
    return any(
        update_of(optimizer, rows=rows) is not None for rows in (False, True)
    )


def update_of(
    optimizer: keras.optimizers.Optimizer, *, rows: bool = False
) -> Update | None:
    """Returns what updates a weight in fused form, None where nothing does.

    Args:
        optimizer: An optimizer of Keras, of exactly its class.
        rows: Whether the gradient has rows of an embedding, or is dense.

    Returns:
        A function of the optimizer and a `Weight`.
    """
    row = (ROWS if rows else TABLE).get(type(optimizer))
    if row is None or not row.is_same(optimizer):
        return None
    return row.update


def weight_of(
    optimizer: keras.optimizers.Optimizer,
    gradient: Any,
    variable: Any,
    rate: Any,
    settings: Settings,
) -> Weight | None:
    """Returns a weight with its slots, None where no fused form takes it.

    Args:
        optimizer: Its optimizer.
        gradient: Its gradient.
        variable: TensorFlow's variable, as an update has it.
        rate: The learning rate.
        settings: Those of the update that this is a part of.
    """
    if not tf.is_tensor(gradient):
        return None
    slots = keras_internals.slots(optimizer, variable)
    dtype = variable.dtype
    if dtype not in DTYPES or any(slot.dtype != dtype for slot in slots):
        return None
    place = (
        id(optimizer),
        tf.compat.v1.get_default_graph(),
        variable.device,
        dtype,
    )
    # With what it was made of, whose identity is in the key.
    _, own_rate = settings.once(
        (*place, "rate", id(rate)), lambda: (rate, tf.cast(rate, dtype))
    )
    return Weight(
        variable.handle,
        [slot.handle for slot in slots],
        tf.cast(gradient, dtype),
        own_rate,
        settings,
        place,
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        update: Updates a weight.
        is_same: Whether it does what the optimizer, as it is set, would do.
    """

    update: Callable[[Any, Weight], None]
    is_same: Callable[[Any], bool] = lambda optimizer: True


def _sgd(optimizer: Any, weight: Weight) -> None:
    if not weight.slots:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=weight.handle, alpha=weight.rate, delta=weight.gradient
        )
        return
    [momentum] = weight.slots
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=weight.handle,
        accum=momentum,
        lr=weight.rate,
        grad=weight.gradient,
        momentum=weight.cast(optimizer.momentum),
        use_nesterov=bool(optimizer.nesterov),
    )


def _adam(optimizer: Any, weight: Weight) -> None:
    options = {
        "var": weight.handle,
        "m": weight.slots[0],
        "v": weight.slots[1],
        "beta1_power": weight.power(optimizer.beta_1, optimizer),
        "beta2_power": weight.power(optimizer.beta_2, optimizer),
        "lr": weight.rate,
        "beta1": weight.exact(optimizer.beta_1),
        "beta2": weight.exact(optimizer.beta_2),
        "epsilon": weight.exact(optimizer.epsilon),
        "grad": weight.gradient,
    }
    if optimizer.amsgrad:
        tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=weight.slots[2], **options)
    else:
        tf.raw_ops.ResourceApplyAdam(**options)


def _adamax(optimizer: Any, weight: Weight) -> None:
    moment, norm = weight.slots
    tf.raw_ops.ResourceApplyAdaMax(
        var=weight.handle,
        m=moment,
        v=norm,
        beta1_power=weight.power(optimizer.beta_1, optimizer),
        lr=weight.rate,
        beta1=weight.exact(optimizer.beta_1),
        beta2=weight.exact(optimizer.beta_2),
        epsilon=weight.exact(optimizer.epsilon),
        grad=weight.gradient,
    )


def _nadam(optimizer: Any, weight: Weight) -> None:
    """Adam with another step for the momentum, and one for the gradient."""
    moment, velocity = weight.slots
    beta = weight.cast(optimizer.beta_1)
    decay = weight.cast(0.96)
    step = weight.step(optimizer)
    now = beta * (1.0 - 0.5 * decay**step)
    following = beta * (1.0 - 0.5 * decay ** (step + 1))
    product = weight.cast(keras_internals.product_of_momentums(optimizer))
    remains = 1 - weight.power(optimizer.beta_2, optimizer)
    epsilon = weight.exact(optimizer.epsilon)
    tf.raw_ops.ResourceApplyAdam(
        var=weight.handle,
        m=moment,
        v=velocity,
        beta1_power=weight.exact(0.0),
        beta2_power=1 - remains,
        lr=weight.rate * following / (1 - product * following),
        beta1=beta,
        beta2=weight.cast(optimizer.beta_2),
        epsilon=epsilon * tf.sqrt(remains),
        grad=weight.gradient,
    )
    squares = tf.raw_ops.ReadVariableOp(
        resource=velocity, dtype=weight.gradient.dtype
    )
    tf.raw_ops.AssignSubVariableOp(
        resource=weight.handle,
        value=weight.gradient
        * (weight.rate * (1 - now) / (1 - product))
        / (tf.sqrt(squares / remains) + epsilon),
    )


def _rmsprop(optimizer: Any, weight: Weight) -> None:
    velocity, momentum = weight.slots
    tf.raw_ops.ResourceApplyRMSProp(
        var=weight.handle,
        ms=velocity,
        mom=momentum,
        lr=weight.rate,
        rho=weight.exact(optimizer.rho),
        momentum=weight.exact(optimizer.momentum),
        epsilon=weight.exact(optimizer.epsilon),
        grad=weight.gradient,
    )


def _adadelta(optimizer: Any, weight: Weight) -> None:
    gradients, deltas = weight.slots
    tf.raw_ops.ResourceApplyAdadelta(
        var=weight.handle,
        accum=gradients,
        accum_update=deltas,
        lr=weight.rate,
        rho=weight.exact(optimizer.rho),
        epsilon=weight.exact(optimizer.epsilon),
        grad=weight.gradient,
    )


def _ftrl(optimizer: Any, weight: Weight) -> None:
    accumulator, linear = weight.slots
    l2 = weight.exact(optimizer.l2_regularization_strength)
    tf.raw_ops.ResourceApplyFtrlV2(
        var=weight.handle,
        accum=accumulator,
        linear=linear,
        grad=weight.gradient,
        lr=weight.rate,
        l1=weight.exact(optimizer.l1_regularization_strength),
        l2=l2 + weight.exact(optimizer.beta) / (2.0 * weight.rate),
        l2_shrinkage=weight.exact(
            optimizer.l2_shrinkage_regularization_strength
        ),
        lr_power=weight.exact(optimizer.learning_rate_power),
    )


def _adagrad_rows(optimizer: Any, weight: Weight) -> None:
    """Keras takes the root of all rows; only these are used."""
    [accumulator] = weight.slots
    rows = {"indices": weight.gradient.indices}
    tf.raw_ops.ResourceScatterAdd(
        resource=accumulator,
        updates=tf.square(weight.gradient.values),
        **rows,
    )
    squares = tf.raw_ops.ResourceGather(
        resource=accumulator, dtype=weight.gradient.dtype, **rows
    )
    tf.raw_ops.ResourceScatterSub(
        resource=weight.handle,
        updates=weight.rate
        * weight.gradient.values
        / tf.sqrt(squares + weight.exact(optimizer.epsilon)),
        **rows,
    )


TABLE: dict[type[keras.optimizers.Optimizer], Row] = {
    keras.optimizers.SGD: Row(_sgd),
    keras.optimizers.Adam: Row(_adam),
    keras.optimizers.AdamW: Row(_adam),
    LazyAdam: Row(_adam),
    keras.optimizers.Adamax: Row(_adamax),
    keras.optimizers.Nadam: Row(_nadam),
    # TensorFlow's operation keeps a momentum, Keras none where it is zero. A
    # centered one divides by a difference, which magnifies other rounding.
    keras.optimizers.RMSprop: Row(
        _rmsprop, lambda o: o.momentum > 0 and not o.centered
    ),
    keras.optimizers.Adadelta: Row(_adadelta),
    keras.optimizers.Ftrl: Row(_ftrl),
}

ROWS: dict[type[keras.optimizers.Optimizer], Row] = {
    # Without an epsilon Keras divides rows that were never looked up by zero.
    keras.optimizers.Adagrad: Row(_adagrad_rows, lambda o: o.epsilon > 0),
}
