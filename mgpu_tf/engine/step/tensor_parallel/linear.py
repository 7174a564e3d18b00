"""What the dimensions of a layer's weights do: make outputs, or are summed.

layer               kernel                    an output axis   summed
Dense               [inputs, units]           1                0
EinsumDense         as its equation says
Conv                [..., channels, filters]  -1               -2
Embedding           [vocabulary, features]    1                0: by rows
ShardedEmbedding    [vocabulary, features]                     0: by rows

The equation of an EinsumDense may have a label in inputs, kernel and outputs,
as for experts. A part of the inputs makes that part of the outputs then.
"""

from __future__ import annotations

import keras

from mgpu_tf.engine import keras_internals
from mgpu_tf.layers import ShardedEmbedding


class Linear:
    """A layer whose outputs are linear in its kernel, then activated.

    Attributes:
        layer: The layer.
        kernel: Its kernel, or the table of an embedding.
        bias: Its bias, if it has one.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self.layer = layer
        self.kernel: keras.Variable = keras_internals.kernel_of(layer)
        self.bias: keras.Variable | None = getattr(layer, "bias", None)
        self._outputs: dict[int, int] = {}
        self._summed: dict[int, int] = {}
        self._alike: dict[int, tuple[int, int]] = {}
        self.rows: int | None = None
        if isinstance(layer, ShardedEmbedding):
            self.rows = 0
        elif isinstance(layer, keras.layers.Embedding):
            self.rows = 0
            if not self.is_reversible:
                self._outputs = {1: -1}
        elif isinstance(layer, keras.layers.Dense):
            self._outputs, self._summed = {1: -1}, {0: -1}
        elif isinstance(layer, keras.layers.EinsumDense):
            self._read_equation(layer.equation)
        elif layer.groups == 1:
            rank = len(self.kernel.shape)
            first = layer.data_format == "channels_first"
            channels = 1 - rank if first else -1
            self._outputs = {rank - 1: channels}
            self._summed = {rank - 2: channels}

    def _read_equation(self, equation: str) -> None:
        given, wanted = equation.replace(" ", "").split("->")
        inputs, kernel = given.split(",")
        for dim, label in enumerate(kernel):
            behind, rest = (
                inputs.partition(label)[2],
                wanted.partition(label)[2],
            )
            if "." in behind + rest:
                continue  # The place of what is before it is not known.
            if any(term.count(label) > 1 for term in (inputs, kernel, wanted)):
                continue  # A diagonal is no part of an axis.
            match label in inputs, label in wanted:
                case False, True:
                    self._outputs[dim] = -1 - len(rest)
                case True, False:
                    self._summed[dim] = -1 - len(behind)
                case True, True:
                    self._alike[dim] = -1 - len(behind), -1 - len(rest)

    @property
    def is_spread(self) -> bool:
        """Whether its author wants its rows over the replicas."""
        return isinstance(self.layer, ShardedEmbedding)

    @property
    def is_reversible(self) -> bool:
        """Whether it is an embedding that also makes logits."""
        return isinstance(self.layer, keras.layers.ReversibleEmbedding)

    @property
    def is_tied(self) -> bool:
        """Whether the logits of such a one are made with the same table."""
        return self.is_reversible and self.layer.tie_weights

    @property
    def dims(self) -> list[int]:
        """The dimensions along which the kernel may be split."""
        rows = [] if self.rows is None else [self.rows]
        return [*rows, *self.output_dims, *self._summed]

    @property
    def output_dims(self) -> list[int]:
        """Those of them that make an axis of the outputs, the best first.

        Of experts each needs a part of the inputs alone.
        """
        return [*self._alike, *self._outputs]

    def sums(self, dim: int) -> bool:
        """Returns whether outputs are a sum over a dimension."""
        return dim in self._summed

    def input_axis(self, dim: int) -> int | None:
        """Returns the axis of inputs, from the end, that goes with one."""
        if dim in self._alike:
            return self._alike[dim][0]
        return self._summed.get(dim)

    def output_axis(self, dim: int) -> int | None:
        """Returns the axis of outputs, from the end, that one makes."""
        if dim in self._alike:
            return self._alike[dim][1]
        return self._outputs.get(dim)

    def axis_of_outputs(self, axis: int) -> int | None:
        """Returns where an axis of the inputs is in the outputs, from 0 on.

        Args:
            axis: One that no dimension of the kernel goes with. None is
                returned where it is added up.
        """
        if not isinstance(self.layer, keras.layers.EinsumDense):
            return axis
        given, wanted = self.layer.equation.replace(" ", "").split("->")
        inputs, _ = given.split(",")
        if "." in inputs[: axis + 1]:
            return axis
        label = inputs[axis]
        return wanted.index(label) if label in wanted else None

    def bias_dim(self, dim: int) -> int | None:
        """Returns the dimension of the bias that goes with one."""
        axis = self.output_axis(dim)
        if self.bias is None or axis is None:
            return None
        if not isinstance(self.layer, keras.layers.EinsumDense):
            return 0
        place = len(self.bias.shape) + axis
        if place < 0 or self.bias.shape[place] != self.kernel.shape[dim]:
            return None
        return place


def linear_layers(model: keras.Model) -> dict[int, Linear]:
    """Returns the layers of a model that can be computed in parts, by identity.

    Args:
        model: A built model.
    """
    return {
        id(layer): Linear(layer)
        for layer in keras_internals.linear_layers(model)
    }
