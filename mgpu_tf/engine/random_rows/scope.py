"""The scope in which a replica draws its rows of global draws."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from mgpu_tf.engine.random_rows.dimensions import (
    Dimension,
    Follows,
    RowDimensions,
)

_log = logging.getLogger("mgpu_tf")

# What was warned of for the engine made last, and of which draw.
warned: set[tuple[str, str]] = set()

# Where a graph notes the draws that replicas made here. Replicas with the same
# rows draw in one graph, each by a scope of its own.
_NOTED = "mgpu_tf/draws"
# What the names of operations begin with in a loop of steps and on a replica.
_PLACES = re.compile(r"^(while/)?(replica_\d+/)?")


@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """Which part of a draw is that of this replica.

    Attributes:
        axis: Where its rows are.
        shape: The shape of the part, int64.
        row: Elements for each example: an integer where it is known.
        first: The first row of the part, counted along the axis.
        total: How long the axis is in the draw of the whole batch.
        block: How many neighbours on the axis belong to an example; None
            where the graph does not show it.
    """

    axis: int
    shape: tf.Tensor
    row: int | tf.Tensor
    first: tf.Tensor
    total: tf.Tensor
    block: int | None


# Gets what was drawn, and its rows.
Taken = Callable[[tf.Tensor, DrawnRows], None]


class RowScope:
    """The rows of a replica, while its part of a step is traced.

    Args:
        low: The first row of the replica in the global batch, int64.
        local: How many rows it has, int64.
        total: How many the global batch has, int64.
        data: Tensors that have these rows.
        taken: See `rows_of_global_draws`.
        compiled: Whether XLA compiles what is traced.
    """

    def __init__(
        self,
        low: tf.Tensor,
        local: tf.Tensor,
        total: tf.Tensor,
        data: Any,
        taken: Taken,
        *,
        compiled: bool,
    ) -> None:
        self._taken = taken
        self.low, self.local, self.total = low, local, total
        self.compiled = compiled
        self._dimensions = RowDimensions(tf.nest.flatten(data))

    def rows_of(self, shape: Any) -> DrawnRows | None:
        """Returns which part of a draw this replica has.

        Args:
            shape: The shape that is drawn here: a tensor, or numbers.

        Returns:
            The part; None for a draw without rows.
        """
        nothing = isinstance(shape, (list, tuple)) and not shape
        shape = tf.convert_to_tensor(shape, tf.int32 if nothing else None)
        if shape.shape.num_elements() is None:
            _warn_once(
                "%s draws numbers of an unknown number of dimensions: each "
                "replica draws its own",
                tf.get_current_name_scope(),
            )
            return None
        if tf.is_symbolic_tensor(shape):
            dimensions = self._dimensions.of(shape)
            axis, checks = self._axis(shape, dimensions)
        else:
            numbers = shape.numpy().tolist()
            dimensions = [Dimension(Follows.OTHERS)] * len(numbers)
            axis, checks = self._axis_of_numbers(numbers), []
        if axis is None:
            return None
        with tf.control_dependencies(checks):
            shape = tf.cast(shape, tf.int64)
        # Rows of the shape for each example, such as the windows of an image.
        several = shape[axis] // tf.maximum(self.local, 1)
        return DrawnRows(
            axis,
            shape,
            _row(shape, axis, dimensions, several),
            self.low * several,
            self.total * several,
            _block(dimensions[axis]),
        )

    def note(self, drawn: tf.Tensor) -> tf.Tensor:
        """Notes a draw that was made here; returns it."""
        if tf.is_symbolic_tensor(drawn):
            drawn.graph.add_to_collection(_NOTED, drawn.op.name)
        return drawn

    def take(self, drawn: tf.Tensor, rows: DrawnRows) -> tf.Tensor:
        """Notes the rows that were drawn; returns them."""
        self._taken(drawn, rows)
        return drawn

    def warn_of_others(self, operations: list[tf.Operation]) -> None:
        """Warns of draws that have rows, and are not those of one device.

        Args:
            operations: What was traced in this scope.
        """
        graph = tf.compat.v1.get_default_graph()
        noted = set(graph.get_collection(_NOTED))
        for op in operations:
            if op.name in noted:
                continue
            if draws_by_own_state(op):
                warn_of_own_state(op)
            elif _is_stateless_draw(op):
                dimensions = self._dimensions.of_tensor(op.outputs[0])
                if len(_axes(dimensions, Follows.ROWS)) == 1:
                    _warn_once(
                        "%s draws for the rows of a batch by a seed that no "
                        "generator of a layer gives: each replica draws what "
                        "one device draws for the first rows. Make a "
                        "keras.random.SeedGenerator in the layer's __init__",
                        op.name,
                    )

    def _axis(
        self, shape: tf.Tensor, dimensions: list[Dimension]
    ) -> tuple[int | None, list[Any]]:
        """Returns the axis of the rows, and what checks it in the step."""
        rows = _axes(dimensions, Follows.ROWS)
        if len(rows) == 1:
            return rows[0], []
        name = tf.get_current_name_scope()
        if rows or _axes(dimensions, Follows.MIXED):
            _warn_once(
                "%s draws numbers whose shape depends on the number of rows "
                "otherwise than by one dimension in proportion: each replica "
                "draws its own",
                name,
            )
            return None, []
        unknown = _axes(dimensions, Follows.UNKNOWN)
        if not unknown:
            return None, []
        return unknown[0], [self._check(shape, unknown[0], name)]

    def _check(self, shape: tf.Tensor, axis: int, name: str) -> Any:
        """Checks in the step what its graph does not prove."""
        length = tf.cast(shape[axis], tf.int64)
        return tf.debugging.assert_equal(
            length % tf.maximum(self.local, 1) + length * self._none(),
            tf.zeros([], tf.int64),
            f"{name or 'A layer'} draws random numbers of a shape whose "
            f"dimension {axis} is not in proportion to the rows of a replica, "
            "so they cannot be those of one device. Use random='per_replica'.",
        )

    def _none(self) -> tf.Tensor:
        return tf.cast(tf.equal(self.local, 0), tf.int64)

    def _axis_of_numbers(self, dimensions: list[int]) -> int | None:
        """Without a graph: the first dimension, if it is the rows' number."""
        return 0 if dimensions[:1] == [int(self.local)] else None


def _axes(dimensions: list[Dimension], follows: Follows) -> list[int]:
    """Returns the axes that follow from something."""
    return [a for a, each in enumerate(dimensions) if each.follows is follows]


def _block(dimension: Dimension) -> int | None:
    return dimension.length if dimension.follows is Follows.ROWS else None


def _row(
    shape: tf.Tensor,
    axis: int,
    dimensions: list[Dimension],
    several: tf.Tensor,
) -> int | tf.Tensor:
    """Returns how many elements of a draw belong to an example."""
    lengths = [each.length for each in dimensions]
    if _block(dimensions[axis]) is not None and None not in lengths:
        return math.prod(length or 0 for length in lengths)
    others = tf.concat([shape[:axis], shape[axis + 1 :]], 0)
    return several * tf.reduce_prod(others)


@dataclasses.dataclass
class _Current(threading.local):
    """The scope of this thread; each replica has its own thread."""

    scope: RowScope | None = None


_current = _Current()


def current_scope() -> RowScope | None:
    """Returns the scope that this thread is in; None outside of any."""
    return _current.scope


@contextlib.contextmanager
def rows_of_global_draws(
    low: tf.Tensor,
    local: tf.Tensor,
    total: tf.Tensor,
    data: Any,
    *,
    compiled: bool = False,
    taken: Taken = lambda drawn, rows: None,
) -> Iterator[RowScope]:
    """Lets a replica draw its rows of what one device would draw.

    For generators whose seeds pass through `seed_for_rows`. A draw of which a
    dimension follows from the number of rows of `data` is cut; any other is
    the same on all replicas.

    Args:
        low: The first row of the replica in the global batch, int64.
        local: How many rows it has, int64; may be 0.
        total: How many the global batch has, int64.
        data: Tensors that have these rows, in any structure. In a graph their
            first dimension is unknown.
        compiled: Whether XLA compiles what is traced, where normal numbers
            have another order.
        taken: Called with what was drawn with rows, and where these are.

    Yields:
        The scope, for `entered_again`.
    """
    scope = RowScope(low, local, total, data, taken, compiled=compiled)
    graph = None
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        done = len(graph.get_operations())
    with entered_again(scope):
        yield scope
    if graph is not None:
        scope.warn_of_others(graph.get_operations()[done:])


@contextlib.contextmanager
def entered_again(scope: RowScope | None) -> Iterator[None]:
    """Enters a scope anew, such as for layers that are computed again.

    Args:
        scope: The scope; None for none.
    """
    before, _current.scope = _current.scope, scope
    try:
        yield
    finally:
        _current.scope = before


def _is_stateless_draw(op: tf.Operation) -> bool:
    return op.type.startswith("Stateless") and not op.type.startswith(
        ("StatelessRandomGet", "StatelessWhile", "StatelessIf", "StatelessCase")
    )


def draws_by_own_state(op: tf.Operation) -> bool:
    """Returns whether an operation draws by a state that no other layout has.

    Its attributes are the seeds with which that state begins.
    """
    attributes = {each.name for each in op.op_def.attr}
    return op.op_def.is_stateful and {"seed", "seed2"} <= attributes


def warn_of_own_state(op: tf.Operation) -> None:
    """Names such an operation once."""
    _warn_once(
        "%s draws by an operation of TensorFlow that has a state of its own: "
        "its numbers are not those of one device. Use keras.random with a "
        "keras.random.SeedGenerator",
        _PLACES.sub("", op.name),
    )


def _warn_once(text: str, name: str) -> None:
    if (text, name) not in warned:
        _log.warning(text, name)
    warned.add((text, name))
