"""Updates of weights in parts by optimizers that need whole weights.

    gather   a weight, its gradient and its slots      from their parts
    compute  the optimizer's own `update_step`         on whole values
    keep     what belongs to the own part

Weights go one after another, so that one of them is whole at a time. Muon and
Adafactor are such optimizers, and every `update_step` of an author's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

# Writes values to variables, as updates do.
Write = Callable[[list[keras.Variable], list[tf.Tensor]], None]


class Held(tf.__internal__.types.Tensor):
    """A variable in an update: a value that is read and assigned to.

    As of a variable, `keras.ops.convert_to_tensor` makes no copy of it: what
    is assigned later is read by it as well.

    Args:
        variable: TensorFlow's variable, which is left as it is.
        value: Its whole value.

    Attributes:
        variable: As given.
        value: What was assigned last.
        is_written: Whether anything was.
    """

    def __init__(self, variable: tf.Variable, value: tf.Tensor) -> None:
        self.variable = variable
        self.value = value
        self.is_written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variable, name)

    @property
    def dtype(self) -> tf.DType:
        """The type of the variable."""
        return self.variable.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole variable."""
        return self.variable.shape

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def read_value(self) -> tf.Tensor:
        """Returns the value."""
        return self.value

    def assign(self, value: Any, **options: Any) -> None:
        """Sets the value; the variable keeps its own."""
        del options
        value = tf.cast(value, self.value.dtype)
        self.value, self.is_written = value, True

    def assign_add(self, value: Any, **options: Any) -> None:
        """Adds to the value."""
        self.assign(self.value + tf.cast(value, self.value.dtype), **options)

    def assign_sub(self, value: Any, **options: Any) -> None:
        """Subtracts from the value."""
        self.assign(self.value - tf.cast(value, self.value.dtype), **options)

    def scatter_add(self, slices: tf.IndexedSlices, **options: Any) -> None:
        """Adds rows to the value."""
        self.assign_add(tf.convert_to_tensor(slices), **options)

    def scatter_sub(self, slices: tf.IndexedSlices, **options: Any) -> None:
        """Subtracts rows from the value."""
        self.assign_sub(tf.convert_to_tensor(slices), **options)

    def scatter_update(self, slices: tf.IndexedSlices, **options: Any) -> None:
        """Sets rows of the value."""
        rows = tf.tensor_scatter_nd_update(
            self.value, slices.indices[:, tf.newaxis], slices.values
        )
        self.assign(rows, **options)


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: Held, *others: Any) -> Any:
        others = tuple(
            each.value if isinstance(each, Held) else each for each in others
        )
        return getattr(self.value, name)(*others)

    return compute


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
    *("pow", "rpow", "matmul", "rmatmul", "neg", "abs", "getitem"),
    *("lt", "le", "gt", "ge"),
):
    setattr(Held, f"__{_name}__", _operator(f"__{_name}__"))


def move_whole(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Any],
    variables: list[keras.Variable],
    write: Write,
) -> None:
    """Updates weights by whole values. On a replica.

    Args:
        optimizer: The optimizer.
        gradients: Of the whole batch: of own parts, of rows of whole tables,
            or whole.
        variables: The weight of each.
        write: Writes to variables what each replica stores of them.

    Raises:
        ConfigurationError: It keeps something where it cannot be found.
    """
    rate = optimizer.learning_rate
    slots = [
        pair
        for part in keras_internals.parts(optimizer)
        for pair in keras_internals.kept_for_weights(part)
    ]
    _check_slots(optimizer, [kept for _, kept in slots])
    # What belongs to no weight may be written as well.
    state = keras_internals.state_of(optimizer)
    shared = [v for v in state if not keras_internals.is_split(v)]
    for gradient, variable in zip(gradients, variables, strict=True):
        own = keras_internals.stored(variable)
        held = shared + [
            kept
            for weight, kept in slots
            if weight is variable and keras_internals.is_split(kept)
        ]
        gradient = _whole_gradient(gradient, own)
        every = [
            Held(keras_internals.stored(each), _whole(each))
            for each in [variable, *held]
        ]
        pairs = list(zip([variable, *held], every, strict=True))
        with keras_internals.with_values(pairs):
            optimizer.update_step(gradient, every[0], rate)
        written = [pair for pair in pairs if pair[1].is_written]
        write(
            [each for each, _ in written],
            [_part_here(value) for _, value in written],
        )


def _check_slots(
    optimizer: keras.optimizers.Optimizer, known: list[keras.Variable]
) -> None:
    """Refuses what is kept for weights and cannot be found by the weight."""
    ids = {id(variable) for variable in known}
    weights = set(map(id, keras_internals.variables_of(optimizer)))
    for variable in keras_internals.state_of(optimizer):
        if not keras_internals.is_split(variable) or id(variable) in ids:
            continue
        if id(variable) in weights:
            raise ConfigurationError(
                "An update_step of yours gets the weight that it updates, and "
                "holds no weight that is split. Received: "
                f"{type(optimizer).__name__}, which holds {variable.path}. "
                "Keep its place in the list that build gets, and compare it "
                "with self._get_variable_index(variable)."
            )
        raise ConfigurationError(
            "An optimizer keeps what belongs to weights that are split in "
            "lists, with one item for each weight. Received: "
            f"{type(optimizer).__name__}, which keeps {variable.path} "
            "elsewhere. Put it into a list, None where there is none."
        )


def _whole(variable: keras.Variable) -> tf.Tensor:
    held = keras_internals.stored(variable)
    if isinstance(held, ShardedVariable):
        return held.joined_here(held.here().read_value())
    return tf.identity(held)


def _whole_gradient(gradient: Any, own: tf.Variable) -> Any:
    if not isinstance(own, ShardedVariable) or isinstance(
        gradient, tf.IndexedSlices
    ):
        return gradient
    if gradient.shape == own.shape:
        return gradient
    return own.joined_here(gradient)


def _part_here(held: Held) -> tf.Tensor:
    variable = held.variable
    if not isinstance(variable, ShardedVariable):
        return held.value
    return variable.part_here(held.value)
