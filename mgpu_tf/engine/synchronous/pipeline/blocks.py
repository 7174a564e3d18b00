"""Stages of a pipeline in several processes.

    process 0    stages 0 and 1    sends activations, receives their gradients
    process 1    stages 2 and 3    receives activations, sends gradients

Each process computes the passes of its own stages. What a stage makes for one
in another process is a message between two devices, and so is each gradient
that comes back; see `Line`.

No process waits for ever for another one. All know one list of all passes: in
the order in which they would end if each began as soon as it can. There a pass
comes after all that it needs. Its messages follow it, which makes one list of
passes and messages. A process begins its messages one after another, as they
are in the list; a pass waits for the pass of its stage before it, and for what
it needs. So whatever anything waits for, in any process, is before it in the
list. Of all that has not ended, the first in the list waits for nothing: a pass
has its inputs, and of a message both sides have ended all messages before. It
ends, and so does each that follows. What follows a step in a process begins
after its last message.

A process has to know what comes: of which type, with a mask or without, and
whether there is a gradient. So each traces the functions of all stages once,
with placeholders, in a graph that nothing runs; see `survey`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.keras_internals import Key
from mgpu_tf.engine.synchronous.pipeline.run import Run, Sums
from mgpu_tf.engine.synchronous.pipeline.schedule import Pass, by_time
from mgpu_tf.engine.synchronous.pipeline.state import is_here
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.collectives import Line

# Steps of these number their messages apart.
_KINDS = ("train", "evaluate", "predict")


@dataclasses.dataclass
class Seen:
    """What is known of all stages.

    Attributes:
        values: The specs of what stages make, with those of their masks.
        losses: Those of contributions to the loss, by stage.
        returned: Of each stage, for what of its inputs there is a gradient.
        trained: The identities of the weights that have a gradient.
        found: Of each stage, the identities of those that have one there.
    """

    values: dict[Key, tuple[tf.TensorSpec, tf.TensorSpec | None]]
    losses: dict[int, tf.TensorSpec]
    returned: list[list[Key]]
    trained: set[int]
    found: list[set[int]]


def survey(step: Any, data: Any, share: BatchShare, kind: str) -> Seen:
    """Traces all stages with placeholders. On a replica.

    Args:
        step: The `PipelineStep`.
        data: The rows of the replica.
        share: The part of the replica in the global batch.
        kind: `train`, `evaluate` or `predict`.
    """
    found: list[Seen] = []

    def trace() -> tf.Tensor:
        rows = tf.nest.map_structure(_placeholder, data, expand_composites=True)
        places = {
            name: _placeholder(getattr(share, name))
            for name in ("local", "total", "low")
            if getattr(share, name) is not None
        }
        run = _Survey(step, rows, dataclasses.replace(share, **places), kind)
        found.append(run.seen())
        return tf.constant(0)

    tf.function(trace, autograph=False).get_concrete_function()
    step.check_apart(kind)
    return found[0]


class _Survey(Run):
    """One micro-batch of placeholders through all stages."""

    def __init__(
        self, step: Any, data: Any, share: BatchShare, kind: str
    ) -> None:
        every = range(len(step.stages.every))
        self._of_stages: list[set[int]] = [set() for _ in every]
        super().__init__(step, data, share, kind, every)

    def seen(self) -> Seen:
        """Runs all passes; returns what is known then."""
        trained: set[int] = set()
        if self._kind == "train":
            trained = set(self.train(tf.identity))
        else:
            self.forward_only()
        return Seen(
            {
                key: (_spec(tensor), None if mask is None else _spec(mask))
                for key, (tensor, mask) in self._values[0].items()
            },
            {each.stage: _spec(loss) for each, loss in self._losses.items()},
            [
                list(self._returned.get(Pass(stage, 0, True), ()))
                for stage in self._here
            ],
            trained,
            self._of_stages,
        )

    def _found(
        self, stage: int, sums: Sums
    ) -> list[tuple[keras.Variable, Any, bool]]:
        found = super()._found(stage, sums)
        self._of_stages[stage] = {id(variable) for variable, _, _ in found}
        return found

    def _read(self, variable: keras.Variable) -> tf.Tensor:
        return tf.compat.v1.placeholder(variable.dtype, variable.shape)

    def _seeds_of(self, micro: int) -> dict[int, tf.Tensor]:
        del micro
        return {}

    def _passes(self) -> Iterator[Pass]:
        yield from (Pass(stage, 0, False) for stage in self._here)
        if self._kind == "train":
            yield from (Pass(stage, 0, True) for stage in self._here[::-1])

    def _by_head(self, scale: Any, sums: list[Sums]) -> None:
        """In place of the head: all outputs have a gradient."""
        del scale, sums
        self._headed = True
        if self._step.head_of(self._kind) is None:
            return
        for key in self._step.stages.outputs:
            tensor, _ = self._values[0][key]
            if tensor.dtype.is_floating:
                self._upstream[0][key] = [tf.zeros_like(tensor)]


class RunOfBlock(Run):
    """The passes of one replica through the stages of this process.

    Args:
        step: As for `Run`.
        data: As for `Run`.
        share: As for `Run`.
        kind: As for `Run`.
        seen: What is known of all stages.
        line: Sends between stages.
    """

    def __init__(
        self,
        step: Any,
        data: Any,
        share: BatchShare,
        kind: str,
        seen: Seen,
        line: Line,
    ) -> None:
        self._seen = seen
        self._line = line
        # Of messages, by their pairs of devices.
        self._counts = collections.Counter[int]()
        # What the next message waits for.
        self._before_it: list[tf.Tensor] = []
        # Weights of other processes that stages here share, for this step.
        self._lent: dict[int, tf.Tensor] = {}
        self._owner = {
            id(variable): number
            for number, stage in enumerate(step.stages.every)
            for variable in stage.variables
        }
        super().__init__(step, data, share, kind)
        # Collectives that gather weights come before.
        self._before_it += [each for every in self._weights for each in every]
        self._maker = {
            key: number
            for number, stage in enumerate(step.stages.every)
            for key in stage.outputs
        }

    def train(self, scale: Callable[[tf.Tensor], tf.Tensor]) -> dict[int, Any]:
        """As in `Run`; for a weight of another process there is no element."""
        found = super().train(scale)
        for variable in self._step.trainable:
            if id(variable) in self._seen.trained and not is_here(variable):
                part = keras_internals.stored(variable).here()
                found[id(variable)] = tf.zeros(part.shape, part.dtype)
        with tf.control_dependencies(self._before_it):
            return {
                key: tf.nest.map_structure(
                    tf.identity, gradient, expand_composites=True
                )
                for key, gradient in found.items()
            }

    def _begin_stage(self, stage: int) -> None:
        """Moves the weights that a stage shares with one elsewhere."""
        for variable in self._step.stages.every[stage].borrowed:
            owner = self._owner[id(variable)]
            if not self._is_apart(owner, stage):
                continue
            value = variable.value if is_here(variable) else None
            spec = tf.TensorSpec(variable.shape, variable.dtype)
            received = self._moved(spec, value, owner, stage)
            if received is not None:
                self._lent[id(variable)] = received

    def _read(self, variable: keras.Variable) -> tf.Tensor:
        lent = self._lent.get(id(variable))
        return super()._read(variable) if lent is None else lent

    def _found(
        self, stage: int, sums: Sums
    ) -> list[tuple[keras.Variable, Any, bool]]:
        """As in `Run`; of a shared weight it is moved to where that is."""
        found = super()._found(stage, sums)
        for variable in self._step.stages.every[stage].borrowed:
            owner = self._owner[id(variable)]
            has_gradient = id(variable) in self._seen.found[stage]
            if not has_gradient or not self._is_apart(owner, stage):
                continue
            gradient = next((g for v, g, _ in found if v is variable), None)
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
            spec = tf.TensorSpec(variable.shape, variable.dtype)
            received = self._moved(spec, gradient, stage, owner)
            found = [each for each in found if each[0] is not variable]
            if received is not None:
                found.append((variable, received, False))
        return found

    def loss(self) -> tf.Tensor:
        """As in `Run`, where the last stage is; zero elsewhere."""
        if self.has_last:
            return super().loss()
        return tf.zeros([], self._loss_type())

    def writes(self) -> Writes:
        """As in `Run`, after the last message.

        TensorFlow leaves out what only sends, if nothing waits for it, so one
        variable is written in any case.
        """
        found = super().writes()
        if not self.has_last:
            tracker = self._step.loss_tracker.variables[0]
            found.append((tracker, tf.identity(tracker.value)))
        with tf.control_dependencies(self._before_it):
            return [(v, tf.identity(value)) for v, value in found]

    def outputs(self) -> Any:
        """As in `Run`; the last stage sends them to all processes."""
        keys, last = self._step.stages.outputs, self._count - 1
        found = self._rows_of_outputs() if self.has_last else [None] * len(keys)
        for place, key in enumerate(keys):
            spec = self._seen.values[key][0]
            for stage in range(0, self._count, len(self._here))[:-1]:
                received = self._moved(spec, found[place], last, stage)
                if received is not None:
                    found[place] = received
        with tf.control_dependencies(self._before_it):
            return self._step.packed(list(map(tf.identity, found)))

    def _passes(self) -> Iterator[Pass]:
        yield from by_time(self._step.orders(self._kind))

    def _by_head(
        self,
        scale: Callable[[tf.Tensor], tf.Tensor] | None,
        sums: list[Sums],
    ) -> None:
        head = self._step.head_of(self._kind)
        if head is not None and head.has_own_loss:
            self._check_regularizers()
        super()._by_head(scale, sums)
        if head is None or scale is None or not self.has_last:
            return
        for key in self._step.stages.outputs:
            tensor, _ = self._values[0][key]
            if tensor.dtype.is_floating and key not in self._upstream[0]:
                raise ConfigurationError(
                    "With stages in several processes, a loss that needs all "
                    "rows has a gradient for each output of the model. "
                    f"Received: an output of shape {tensor.shape} without. "
                    "Leave it out of the model, or let each process have all "
                    "stages."
                )

    def _check_regularizers(self) -> None:
        for number in range(self._count - len(self._here)):
            for variable in self._step.stored_in(number):
                if variable.regularizer is not None:
                    raise ConfigurationError(
                        "A compute_loss of your own has the regularizers of "
                        "all weights, and each process of a pipeline its own "
                        f"weights. Received: {variable.path}. Leave out the "
                        "regularizer, let each process have all stages, or "
                        "use 'fsdp'."
                    )

    def _passed(self, each: Pass) -> None:
        """Moves what a pass has made to the processes that need it."""
        if each.backward:
            for key in self._seen.returned[each.stage]:
                self._move_gradient(each, key)
            return
        for key in self._step.stages.every[each.stage].outputs:
            for stage in self._takers(each.stage, key):
                self._move_value(each, key, stage)
        spec = self._seen.losses.get(each.stage)
        last = self._count - 1
        if spec is not None and self._is_apart(each.stage, last):
            loss = self._losses.get(each)
            received = self._moved(spec, loss, each.stage, last)
            if received is not None:
                self._losses[each] = received

    def _takers(self, maker: int, key: Key) -> list[int]:
        """Returns the first stage of each other process that takes a value."""
        found: dict[int, int] = {}
        for number, stage in enumerate(self._step.stages.every):
            if key in stage.inputs and self._is_apart(maker, number):
                found.setdefault(number // len(self._here), number)
        return list(found.values())

    def _move_value(self, each: Pass, key: Key, stage: int) -> None:
        values = self._values[each.micro]
        value, mask = values.get(key, (None, None))
        of_value, of_mask = self._seen.values[key]
        value = self._moved(of_value, value, each.stage, stage)
        if of_mask is not None:
            mask = self._moved(of_mask, mask, each.stage, stage)
        if value is not None:
            values[key] = (value, mask)

    def _move_gradient(self, each: Pass, key: Key) -> None:
        maker = self._maker[key]
        if not self._is_apart(maker, each.stage):
            return
        gradient = shape = None
        if each.stage in self._here:
            gradient = tf.convert_to_tensor(self._returned[each][key])
        elif maker in self._here:
            value, _ = self._values[each.micro][key]
            shape = tf.shape(value)
        spec = self._seen.values[key][0]
        received = self._message(spec, gradient, each.stage, maker, shape)
        if received is not None:
            self._upstream[each.micro].setdefault(key, []).append(received)

    def _is_apart(self, one: int, other: int) -> bool:
        """Whether two stages are in different processes."""
        return one // len(self._here) != other // len(self._here)

    def _moved(
        self,
        spec: tf.TensorSpec,
        value: tf.Tensor | None,
        sender: int,
        receiver: int,
    ) -> tf.Tensor | None:
        """Moves a tensor between stages; all processes call this.

        Args:
            spec: Of the tensor. Its shape goes before it, where the spec
                leaves it open.
            value: The tensor, where the sender is.
            sender: The stage that sends.
            receiver: The stage that receives.

        Returns:
            The tensor, where the receiver is; None elsewhere.
        """
        if spec.shape.is_fully_defined():
            shape = tf.constant(spec.shape.as_list(), tf.int32)
            return self._message(spec, value, sender, receiver, shape)
        of_shape = tf.TensorSpec([spec.shape.rank], tf.int32)
        shape = None if value is None else tf.shape(value)
        shape = self._moved(of_shape, shape, sender, receiver)
        return self._message(spec, value, sender, receiver, shape)

    def _message(
        self,
        spec: tf.TensorSpec,
        value: tf.Tensor | None,
        sender: int,
        receiver: int,
        shape: tf.Tensor | None,
    ) -> tf.Tensor | None:
        """As `_moved`, where the receiver knows the shape."""
        pair = self._step.pair(sender, receiver)
        count = self._counts[pair]
        self._counts[pair] += 1
        number = len(_KINDS) * count + _KINDS.index(self._kind)
        number = 2 * number + (sender > receiver)
        if sender in self._here:
            device = self._devices[sender]
            with tf.control_dependencies(self._before_it):
                sent = self._line.send(value, device, pair, number)
            self._before_it = [sent]
        elif receiver in self._here:
            device = self._devices[receiver]
            with tf.device(device), tf.control_dependencies(self._before_it):
                found = self._line.receive(
                    shape, spec.dtype, device, pair, number
                )
                found = tf.ensure_shape(found, spec.shape)
            self._before_it = [found]
            return found
        return None


def _placeholder(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor):
        return tensor
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)


def _spec(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)
