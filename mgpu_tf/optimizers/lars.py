"""LARS: SGD whose rate follows the norm of each weight.

    optimizer = LARS(learning_rate=4.0, momentum=0.9, weight_decay=1e-4)
    model.compile(optimizer, "sparse_categorical_crossentropy")

Keras has no LARS. This one works in Keras's own `fit` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from mgpu_tf.errors import check_names, check_number
from mgpu_tf.optimizers.by_norms import ByNorms, Norms

# Biases, and the scale and offset of normalizations, by parts of their names.
EXCLUDED = ("bias", "gamma", "beta")


@keras.saving.register_keras_serializable("mgpu_tf")
class LARS(ByNorms):
    """SGD with momentum and layer-wise adaptive rates (LARS).

    For a weight w with gradient g, weight decay b, momentum m, trust
    coefficient t and learning rate r:

        ratio = t |w| / (|g| + b |w| + epsilon)     1 if |w| or |g| is 0
        step  = r ratio (g + b w)
        v     = m v + step
        w     = w - v                               Nesterov: w - (m v + step)

    The norms are over the whole weight. A weight that is excluded has no
    weight decay and the ratio 1.

    Example:
        >>> optimizer = LARS(4.0, momentum=0.9, weight_decay=1e-4)
        >>> optimizer.exclude_from_weight_decay(var_names=["bias", "norm"])

    Args:
        learning_rate: A number, a schedule or a callable. The ratio is small,
            so the rate is often larger than that of SGD.
        momentum: m, 0 or more and below 1.
        nesterov: Whether to use Nesterov momentum.
        trust_coefficient: t, above 0.
        epsilon: Added to the denominator, 0 or more.
        weight_decay: b, 0 or more. It is part of the gradient, as in the
            paper. None is 0.
        exclude: Parts of names, as for `exclude_from_weight_decay`. Weights
            whose name has one of them are excluded. Default: biases, and the
            scale and offset of normalizations.
        name: The name of the optimizer.
        **options: Further arguments of `keras.optimizers.Optimizer`, such as
            `clipnorm` or `use_ema`.

    Raises:
        ConfigurationError: A number is out of range.

    References:
        Y. You, I. Gitman, B. Ginsburg: Large Batch Training of Convolutional
        Networks, 2017, arXiv 1708.03888, algorithm 1. The exclusion is that of
        M. Yamazaki et al.: Yet Another Accelerated SGD, 2019, arXiv
        1903.12650.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        weight_decay: float | None = None,
        exclude: Sequence[str] = EXCLUDED,
        name: str = "lars",
        **options: Any,
    ) -> None:
        check_number("momentum", momentum, least=0, below=1)
        check_number("epsilon", epsilon, least=0)
        check_number("trust_coefficient", trust_coefficient, above=0)
        if weight_decay is not None:
            check_number("weight_decay", weight_decay, least=0)
        check_names("exclude", exclude)
        super().__init__(
            learning_rate, weight_decay=weight_decay, name=name, **options
        )
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.exclude_from_weight_decay(var_names=exclude)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[keras.Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Excludes weights from weight decay and from the ratio.

        Replaces what was excluded before. Call it before the optimizer is
        built.

        Args:
            var_list: Some weights. They are not saved with the optimizer, as
                in Keras.
            var_names: Parts of names.
        """
        self.exclude = list(var_names or ())
        super().exclude_from_weight_decay(var_list, self.exclude)

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates the momentum of each weight, if there is momentum."""
        if self.built:
            return
        super().build(variables)
        self._momentums = []
        if self.momentum:
            self._momentums = self.add_optimizer_variables(
                variables, "momentum"
            )

    def direction(self, gradient: Any, variable: Any) -> Any:
        """Returns the gradient, with the rows of one index added up."""
        return ops.cast(ops.convert_to_tensor(gradient), variable.dtype)

    def move(
        self, direction: Any, variable: Any, learning_rate: Any, norms: Norms
    ) -> None:
        """Updates one weight."""
        rate = ops.cast(learning_rate, variable.dtype)
        step = rate * direction
        if self._use_weight_decay(variable):
            decay = self.weight_decay or 0.0
            ratio = self._ratio(norms.weight, norms.direction, decay)
            weight = ops.convert_to_tensor(variable)
            step = rate * ratio * (direction + decay * weight)
        if not self.momentum:
            self.assign_sub(variable, step)
            return
        held = self._momentums[self._get_variable_index(variable)]
        moved = self.momentum * ops.convert_to_tensor(held) + step
        self.assign(held, moved)
        if self.nesterov:
            moved = self.momentum * moved + step
        self.assign_sub(variable, moved)

    def _ratio(self, weight: Any, gradient: Any, decay: float) -> Any:
        """Returns the ratio from the norms of a weight and its gradient."""
        there = ops.logical_and(weight > 0, gradient > 0)
        below = gradient + decay * weight + self.epsilon
        below = ops.where(there, below, ops.ones_like(below))
        ratio = self.trust_coefficient * weight / below
        return ops.where(there, ratio, ops.ones_like(ratio))

    def _apply_weight_decay(self, variables: list[Any]) -> None:
        """Does nothing: the decay is part of the gradient in `move`."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same optimizer."""
        return super().get_config() | {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "exclude": list(self.exclude),
        }
