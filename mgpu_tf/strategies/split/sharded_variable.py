"""A variable of which each replica stores a part.

    in a replica            it reads as a whole, from the parts of its group;
                            what is assigned to it is kept as far as this
                            replica stores it
    outside of replicas     it is one variable of its whole shape
    in `extended.update`    it is this replica's part

An optimizer's update runs in `extended.update`, so it computes on parts. Its
slots are split in the same way. Code that saves, restores or compares the
variable sees its ordinary shape.

A process holds the parts of its own replicas. Where the parts of a group are
in several processes, reading is a collective, also outside of replicas: all
processes do it together. What is assigned, each process assigns by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, values

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Mesh, Split, others_than
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.own_gradient import own_gradient
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica


class Lender(Protocol):
    """What reads variables for a step of the author's own. On a replica."""

    def read(self, held: ShardedVariable) -> tf.Tensor:
        """Returns the whole value."""

    def handle(self, held: ShardedVariable) -> Any:
        """Returns the handle by which a tape knows the variable."""


class ShardedVariable(values.MirroredVariable):
    """A variable that is split over an axis of a mesh.

    Args:
        strategy: The strategy.
        parts: The part of each replica of this process.
        aggregation: As for other variables.
        mesh: The axes of the replicas.
        split: How the elements are divided.
        whole: A copy for each replica of this process to read, as the last
            `refresh` wrote it; none where a replica gathers the parts
            whenever it reads.
        source: A scalar that tapes outside of replicas know it by; None where
            they take no gradient of it.

    Attributes:
        mesh: The axes of the replicas.
        split: How the elements are divided.
        reader: Gathers the whole value in a block in which this process alone
            reads; see `SplittingStrategy.whole`.
        lender: Reads the whole value on a replica, in place of `read_here`.
        assigned: A hash of the whole value that this process has assigned
            last, where other processes hold parts.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        parts: Sequence[tf.Variable],
        aggregation: tf.VariableAggregation,
        *,
        mesh: Mesh,
        split: Split,
        whole: Sequence[tf.Variable] = (),
        source: tf.Variable | None = None,
    ) -> None:
        self.mesh = mesh
        self.split = split
        self.reader: Callable[[], tf.Tensor] | None = None
        self.lender: Lender | None = None
        self.assigned = ""
        self._whole = tuple(whole)
        self._source = source
        self._first = strategy.first_replica
        super().__init__(strategy, parts, aggregation)

    @property
    def shape(self) -> tf.TensorShape:
        """Returns the shape of the whole variable."""
        return tf.TensorShape(self.split.shape)

    def get_shape(self) -> tf.TensorShape:
        """Returns the shape of the whole variable."""
        return self.shape

    @property
    def trainable(self) -> bool:
        """Whether tapes take gradients of it."""
        return self._source is not None

    @property
    def stored(self) -> list[tuple[tf.Variable, ...]]:
        """Returns what each replica stores of it."""
        return list(zip(self.values, *filter(None, [self._whole]), strict=True))

    @property
    def keeps_whole(self) -> bool:
        """Whether each replica keeps a whole copy beside its part."""
        return bool(self._whole)

    @property
    def is_apart(self) -> bool:
        """Whether other processes hold parts of what is read here."""
        return not all(
            self._is_here(self._first + place)
            for place in range(len(self.values))
        )

    def gathered(self, replica: int) -> tf.Tensor:
        """Returns the whole value, made of the parts of a replica's group.

        Args:
            replica: A replica of this process. Where its group is in several
                processes, the one that calls this. What only stands for a
                replica meets no other process, and gets zeros.
        """
        if self.split.owner is not None:
            return self._owned(replica)
        if not self._is_here(replica):
            context = tf.distribute.get_replica_context()
            if getattr(context, "is_abstract", False):
                return tf.zeros(self.shape, self.dtype)
            part = self.values[replica - self._first]
            with tf.device(part.device):
                return self._distribute_strategy.joined(
                    self.split, part.read_value()
                )
        if self.split.over == "fsdp":
            return self._part_here(replica)
        parts = [
            self._part_here(member)
            for member in self.mesh.along([self.split.over], replica)
        ]
        return tf.concat(parts, self.split.dim or 0)

    def _part_here(self, replica: int) -> tf.Tensor:
        """Returns what a replica computes with, of parts in this process."""
        inner = self.inner(replica)
        pieces = []
        members = [replica]
        if inner is not None:
            members = self.mesh.along(["fsdp"], replica)
        for member in members:
            piece = self.values[member - self._first]
            with tf.device(piece.device):
                pieces.append(piece.read_value())
        if inner is None:
            return pieces[0]
        joined = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
        return tf.reshape(joined, inner.shape)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another block of stages has all of it."""
        split = self.split
        if split.owner is None:
            return False
        return self.mesh.rank(split.over, self._first) != split.owner

    def _owned(self, replica: int) -> tf.Tensor:
        """Returns the whole value, where one block of stages has it."""
        if self.is_elsewhere:
            raise ConfigurationError(
                "Each process of a pipeline reads the weights and the state "
                f"of its own stages. Received: {self.name}, of a stage in "
                "another process. Name pipeline_stages so that what reads it "
                "is in the same stage, or use 'fsdp'."
            )
        part = self.values[replica - self._first]
        with tf.device(part.device):
            value, inner = part.read_value(), self.inner(replica)
            if inner is not None:
                groups = self._distribute_strategy.along("fsdp")
                value = groups.all_gather(value, 0, inner.length)
            return tf.reshape(value, self.split.shape)

    def _is_here(self, replica: int) -> bool:
        """Whether this process holds all parts of a replica's group."""
        group = self.mesh.along(self.split.axes, replica)
        last = self._first + len(self.values) - 1
        return self._first <= group[0] and group[-1] <= last

    def refresh(self) -> None:
        """Writes the parts to the whole copies. Outside of replicas.

        Where other processes hold parts, each replica calls `refresh_here`.
        """
        for place, copy in enumerate(self._whole):
            with tf.device(copy.device):
                copy.assign(self.gathered(self._first + place))

    def refresh_here(self, value: tf.Tensor) -> None:
        """Writes a whole value to the copy of this replica. On a replica."""
        self._whole[self.place_here()].assign(value)

    @property
    def copies(self) -> int:
        """Returns how many replicas store the same part."""
        return len(self.mesh.along(others_than(self.split.axes), 0))

    def inner(self, replica: int | None = None) -> Split | None:
        """Returns how what a replica computes with is divided over fsdp.

        Args:
            replica: Its number. Default: this one, on a replica.
        """
        replica = self._replica() if replica is None else replica
        replica = self._first if replica is None else replica
        return self.split.inner(self.mesh.rank(self.split.over, replica))

    def here(self) -> tf.Variable:
        """Returns the part of this replica. In a replica or an update."""
        return self.values[self.place_here()]

    def joined_here(self, part: tf.Tensor) -> tf.Tensor:
        """Returns the whole value of parts as this replica's. On a replica."""
        return self._distribute_strategy.joined(self.split, part)

    def part_here(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what this replica stores of a whole value. On a replica."""
        replica = self._first + self.place_here()
        return stored_part(value, self.split, self.mesh, replica)

    def place_here(self) -> int:
        """Returns the place of this replica among those of the process."""
        replica = self._replica()
        return 0 if replica is None else replica - self._first

    def _replica(self) -> int | None:
        """Returns this replica; None outside of replicas and updates."""
        context = tf.distribute.get_replica_context()
        if context is None:
            place = distribute_lib.get_update_replica_id()
            return None if place is None else self._first + place
        if context.strategy is not self._distribute_strategy:
            return None  # No strategy is entered.
        return this_replica()

    # How TensorFlow reads it.

    def _get(self) -> Any:
        if distribute_lib.get_update_replica_id() is not None:
            return self.here()
        replica = self._replica()
        if replica is None:
            return self._read_outside()
        if self.lender is not None:
            return self.lender.read(self)
        value = self.read_here()
        return self._with_gradient(value) if self._is_abstract() else value

    def _is_abstract(self) -> bool:
        """Whether a step is traced for the variables that it makes."""
        context = tf.distribute.get_replica_context()
        return getattr(context, "is_abstract", False)

    def _with_gradient(self, value: tf.Tensor) -> tf.Tensor:
        if self._source is None:
            return value
        return from_source(self._source.read_value(), value)

    def read_here(self) -> tf.Tensor:
        """Returns the whole value, read from parts or a copy. On a replica."""
        place = self.place_here()
        if self._whole:
            copy = self._whole[place]
            with tf.device(copy.device):
                return copy.read_value()
        return self.gathered(self._first + place)

    @property
    def handle(self) -> Any:
        """Returns the handle of what this replica stores, or of its lender."""
        if distribute_lib.get_update_replica_id() is not None:
            return self.here().handle
        outside = self._replica() is None
        if self._source is not None and (outside or self._is_abstract()):
            return self._source.handle
        if outside:
            return super().handle  # Refuses, where there is no replica.
        if self.lender is None:
            return self.here().handle
        return self.lender.handle(self)

    def _read_outside(self) -> Any:
        if self.reader is not None:
            return self.reader()
        if self.is_apart:
            value = self._distribute_strategy.read_together(self)
        else:
            value = self.gathered(self._first)
        return self._with_gradient(value)

    def _get_cross_replica(self) -> Any:
        return self._get()

    def _get_on_device_or_primary(self) -> Any:
        return self._get()

    def _as_graph_element(self) -> Any:
        return tf.convert_to_tensor(self._get())

    def value(self) -> tf.Tensor:
        """Returns what it reads as here; see the head of this module."""
        return tf.convert_to_tensor(self._get())

    # How TensorFlow writes it.

    def assign(self, value: Any, **options: Any) -> Any:
        """Assigns a whole value; in an update, this replica's part."""
        return self._write("assign", value, options)

    def assign_add(self, value: Any, **options: Any) -> Any:
        """Adds to it; as `assign`."""
        return self._write("assign_add", value, options)

    def assign_sub(self, value: Any, **options: Any) -> Any:
        """Subtracts from it; as `assign`."""
        return self._write("assign_sub", value, options)

    def _write(self, method: str, value: Any, options: dict[str, Any]) -> Any:
        if distribute_lib.get_update_replica_id() is not None:
            return getattr(self.here(), method)(value, **options)
        value = tf.convert_to_tensor(value, self.dtype)
        if self._replica() is None:
            if tf.executing_eagerly() and self.is_apart:
                self._note(method, value.numpy())
            self._write_parts(method, [value] * len(self.values))
            return self
        # Another replica may not have read this replica's part yet.
        try:
            turns.merged(
                lambda strategy, every: self._write_all(
                    method, strategy.experimental_local_results(every)
                ),
                [value],
            )
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise ConfigurationError(
                "A weight that is stored in parts is written by all devices "
                "together, and so not within a branch, a loop or a "
                f"tf.function of a step. Received: {self.name!r}, which is "
                "written there. Write it in each step, such as with "
                "ops.where(condition, new, old) as its value, accumulate "
                "gradients by the optimizer's gradient_accumulation_steps, or "
                "use 'mirrored'."
            ) from None
        return self

    def _write_all(self, method: str, every: Sequence[tf.Tensor]) -> None:
        """Writes to parts, and to whole copies, which a step may read next."""
        self._write_parts(method, every)
        if self._whole:
            for copy, value in zip(self._whole, every, strict=True):
                with tf.device(copy.device):
                    getattr(copy, method)(value)

    def _note(self, method: str, value: np.ndarray) -> None:
        """Notes what is assigned, for what processes compare."""
        before = "" if method == "assign" else f"{self.assigned} {method} "
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        self.assigned = f"{before}{zlib.crc32(data.data):08x}"[-80:]

    def put_by_parts(self) -> None:
        """Notes that all processes have assigned parts of one value."""
        self.assigned = "parts"

    def _write_parts(self, method: str, every: Sequence[tf.Tensor]) -> None:
        for replica, (part, value) in enumerate(
            zip(self.values, every, strict=True), self._first
        ):
            kept = stored_part(value, self.split, self.mesh, replica)
            with tf.device(part.device):
                getattr(part, method)(own_buffer(kept))

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        raise _needs_update(self)

    def _update_cross_replica(
        self, update_fn: Any, value: Any, **kwargs: Any
    ) -> Any:
        raise _needs_update(self)

    # What would take the first part for the whole.

    def _gather_saveables_for_checkpoint(self) -> Any:
        raise _no_saving(self)

    def _serialize_to_tensors(self) -> Any:
        raise _no_saving(self)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        raise _no_saving(self)

    def _export_to_saved_model_graph(self, *args: Any, **options: Any) -> Any:
        raise _no_saving(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ConfigurationError(
            "A sharded variable cannot be copied by copy.deepcopy. Received: "
            f"{self.name}. Copy its value: variable.numpy()."
        )


@own_gradient
def from_source(source: tf.Tensor, whole: tf.Tensor) -> Any:
    """Returns a whole value, whose gradient flows to a scalar.

    Args:
        source: The scalar that a tape knows a weight by.
        whole: The value of the weight.
    """
    del source
    return tf.identity(whole), lambda up: (up, None)


def new_source(
    create: Callable[..., tf.Variable], dtype: tf.DType
) -> tf.Variable:
    """Makes what the gradients of a weight flow to.

    Args:
        create: As `tf.Variable`.
        dtype: The type of the weight.
    """
    # A graph would refuse a gradient of another shape than the variable's.
    any_shape = tf.TensorShape(None)
    return create(initial_value=tf.zeros([], dtype), shape=any_shape)


def stored_part(
    value: tf.Tensor, split: Split, mesh: Mesh, replica: int
) -> tf.Tensor:
    """Returns what a replica stores of a whole value."""
    rank = mesh.rank(split.over, replica)
    part = part_of(value, split, rank)
    inner = split.inner(rank)
    if inner is None or inner is split:
        return part
    return part_of(part, inner, mesh.rank("fsdp", replica))


def own_buffer(part: tf.Tensor) -> tf.Tensor:
    """Returns a part with memory of its own.

    TensorFlow's slices share the memory of the whole tensor, and a variable
    that was assigned one keeps all of it.
    """
    return tf.raw_ops.DeepCopy(x=part)


def part_of(value: tf.Tensor, split: Split, rank: int) -> tf.Tensor:
    """Returns a part of a whole value."""
    first, after = split.bounds(rank)
    if split.dim is not None:
        return value[(slice(None),) * split.dim + (slice(first, after),)]
    if not split.by_rows:
        value = tf.reshape(value, [-1])
    return value[first:after]


def _needs_update(variable: ShardedVariable) -> ConfigurationError:
    return ConfigurationError(
        "Rows of a sharded variable are written by its optimizer only. "
        f"Received: a write to rows of {variable.name}. Assign its "
        "whole value."
    )


def _no_saving(variable: ShardedVariable) -> ConfigurationError:
    return ConfigurationError(
        "TensorFlow's own checkpoints and SavedModel do not know sharded "
        f"variables. Received: {variable.name}. Call "
        "trainer.model.save('model.keras'), load the file where no strategy "
        "is active, and export that model."
    )
