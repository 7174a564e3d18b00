"""What lets a large batch learn as a small one does.

    recipe = large_batch_recipe(
        8192, learning_rate=0.1, base_batch=256, steps_per_epoch=156,
        epochs=90, warmup_epochs=5, weight_decay=1e-4, label_smoothing=0.1,
    )
    model.compile(recipe.optimizer, recipe.loss, metrics=["accuracy"])

The learning rate grows with the batch, and reaches its size gradually. Biases
and normalizations have no weight decay. `models.create_model("resnet", ...,
zero_init_residual=True)` is the part that belongs to the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
from keras import ops

from mgpu_tf.errors import ConfigurationError, check_number, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.names import LEARNING_RATE_DECAYS, LEARNING_RATE_RULES
from mgpu_tf.optimizers.named import create_optimizer, default_learning_rate


@checked
def scale_learning_rate(
    base: float, base_batch: int, batch: int, rule: str = "linear"
) -> float:
    """Returns the learning rate for another batch size.

    Example:
        >>> scale_learning_rate(0.1, 256, 8192)
        3.2

    Args:
        base: The learning rate that suits `base_batch`.
        base_batch: A global batch size, in examples.
        batch: The other global batch size, in examples.
        rule: "linear" multiplies by k = batch / base_batch, "sqrt" by the
            square root of k, "none" by 1.

    Returns:
        The learning rate.

    Raises:
        ConfigurationError: The rule is unknown, or a number is not above 0.

    References:
        P. Goyal et al.: Accurate, Large Minibatch SGD, 2017, arXiv
        1706.02677, section 2.1 (linear). A. Krizhevsky: One weird trick for
        parallelizing convolutional neural networks, 2014, arXiv 1404.5997,
        section 5 (square root).
    """
    for name, value in (
        ("base", base),
        ("base_batch", base_batch),
        ("batch", batch),
    ):
        check_number(name, value, above=0)
    if rule not in LEARNING_RATE_RULES:
        raise ConfigurationError(
            unknown_name("rule", rule, LEARNING_RATE_RULES)
        )
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    return base * (batch / base_batch) ** power


@checked
def create_schedule(
    learning_rate: float,
    *,
    start: float,
    steps: int,
    warmup_steps: int = 0,
    decay: str = "constant",
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Returns a learning rate with gradual warm-up, made by Keras.

    Args:
        learning_rate: The learning rate after warm-up.
        start: The learning rate of the first step of warm-up.
        steps: Number of steps of the training, warm-up included.
        warmup_steps: Number of steps over which the rate grows linearly.
        decay: "constant" keeps the rate after warm-up. "cosine" lets it fall
            to 0 at the end of the training.

    Returns:
        A number, or a `keras.optimizers.schedules.CosineDecay`.

    Raises:
        ConfigurationError: The decay is unknown, or no step is left after
            warm-up.
    """
    if decay not in LEARNING_RATE_DECAYS:
        raise ConfigurationError(
            unknown_name("decay", decay, LEARNING_RATE_DECAYS)
        )
    if decay == "constant" and not warmup_steps:
        return learning_rate
    if not 0 <= warmup_steps < steps:
        raise ConfigurationError(
            "Warm-up must end before the training does. Received: "
            f"{warmup_steps} steps of warm-up in {steps} steps of training. "
            "Use fewer epochs of warm-up, or train longer."
        )
    return keras.optimizers.schedules.CosineDecay(
        start if warmup_steps else learning_rate,
        decay_steps=steps - warmup_steps,
        # A rate that falls to all of itself stays.
        alpha=1.0 if decay == "constant" else 0.0,
        warmup_target=learning_rate if warmup_steps else None,
        warmup_steps=warmup_steps,
    )


@dataclasses.dataclass(frozen=True)
class LargeBatchRecipe:
    """What `compile` takes for a large batch.

    Attributes:
        optimizer: The optimizer, with its schedule.
        loss: The loss, for integer labels and logits.
        learning_rate: The learning rate after warm-up.
        warmup_steps: Number of steps of warm-up.
    """

    optimizer: keras.optimizers.Optimizer
    loss: keras.losses.Loss
    learning_rate: float
    warmup_steps: int


@checked
def large_batch_recipe(
    batch_size: int,
    *,
    optimizer: str = "momentum",
    learning_rate: float | None = None,
    base_batch: int | None = None,
    learning_rate_rule: str = "linear",
    learning_rate_decay: str = "constant",
    steps_per_epoch: int = 0,
    epochs: int = 1,
    warmup_epochs: float = 0.0,
    weight_decay: float | None = None,
    label_smoothing: float = 0.0,
) -> LargeBatchRecipe:
    """Returns optimizer and loss for a large batch.

    Without options it returns what `create_optimizer` and Keras's
    cross-entropy are.

    Args:
        batch_size: Global batch size, in examples.
        optimizer: A name for `create_optimizer`.
        learning_rate: The learning rate for `base_batch`. Default: that
            of `create_optimizer`.
        base_batch: The global batch size that `learning_rate` suits.
            Default: `batch_size`, so nothing is scaled.
        learning_rate_rule: As `rule` of `scale_learning_rate`.
        learning_rate_decay: As `decay` of `create_schedule`.
        steps_per_epoch: Number of steps in an epoch. Needed for warm-up and
            decay.
        epochs: Number of epochs.
        warmup_epochs: Number of epochs of warm-up, which may be a fraction.
            The rate grows from `learning_rate`, or from 0 if it is not
            scaled.
        weight_decay: Weight decay of all weights but biases and the scale and
            offset of normalizations. Default: that of the optimizer.
        label_smoothing: The part of each label that all classes share, 0 or
            more and below 1.

    Returns:
        The recipe.

    Raises:
        ConfigurationError: A name is unknown or a number out of range.

    References:
        P. Goyal et al.: Accurate, Large Minibatch SGD, 2017, arXiv
        1706.02677.
    """
    base = learning_rate or default_learning_rate(optimizer)
    scaled = scale_learning_rate(
        base, base_batch or batch_size, batch_size, learning_rate_rule
    )
    warmup_steps = round(warmup_epochs * steps_per_epoch)
    needs_steps = warmup_epochs or learning_rate_decay == "cosine"
    if needs_steps and not steps_per_epoch:
        raise ConfigurationError(
            "Warm-up and decay need steps_per_epoch. Received: "
            f"warmup_epochs={warmup_epochs}, "
            f"learning_rate_decay={learning_rate_decay!r} without it."
        )
    rate = create_schedule(
        scaled,
        start=0.0 if base_batch is None else base,
        steps=steps_per_epoch * epochs,
        warmup_steps=warmup_steps,
        decay=learning_rate_decay,
    )
    return LargeBatchRecipe(
        create_optimizer(optimizer, rate, weight_decay=weight_decay),
        create_loss(label_smoothing),
        scaled,
        warmup_steps,
    )


def create_loss(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """Returns cross-entropy for integer labels and logits.

    Args:
        label_smoothing: As for `large_batch_recipe`.

    Raises:
        ConfigurationError: The number is out of range.
    """
    if not label_smoothing:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return SmoothedCrossentropy(label_smoothing)


@keras.saving.register_keras_serializable("mgpu_tf")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy for integer labels and logits, with smoothed labels.

    Keras has label smoothing for one-hot labels only.

    Args:
        label_smoothing: The part of each label that all classes share, above 0
            and below 1.
        **options: Further arguments of `keras.losses.Loss`.

    Raises:
        ConfigurationError: The number is out of range.

    References:
        C. Szegedy et al.: Rethinking the Inception Architecture for Computer
        Vision, 2015, arXiv 1512.00567, section 7.
    """

    def __init__(
        self,
        label_smoothing: float,
        name: str = "smoothed_crossentropy",
        **options: Any,
    ) -> None:
        super().__init__(name=name, **options)
        if not 0 < label_smoothing < 1:
            raise ConfigurationError(
                "label_smoothing must be 0 or more and below 1. Received: "
                f"label_smoothing={label_smoothing}."
            )
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns a loss for each example.

        Args:
            y_true: Labels, `[batch]` or `[batch, 1]`.
            y_pred: Logits, `[batch, classes]`.
        """
        if len(y_true.shape) == len(y_pred.shape):
            y_true = ops.squeeze(y_true, -1)
        classes = y_pred.shape[-1]
        one_hot = ops.one_hot(
            ops.cast(y_true, "int32"), classes, dtype=y_pred.dtype
        )
        return keras.losses.categorical_crossentropy(
            one_hot,
            y_pred,
            from_logits=True,
            label_smoothing=self.label_smoothing,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same loss."""
        return super().get_config() | {"label_smoothing": self.label_smoothing}
