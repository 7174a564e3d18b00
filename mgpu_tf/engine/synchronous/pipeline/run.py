"""The passes of a replica through its stages.

Each pass is a call of the function of a stage. Passes are put in order by
control dependencies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.exchange import composites
from mgpu_tf.engine.keras_internals import Key
from mgpu_tf.engine.step.replica_step import Logs, mean_increments
from mgpu_tf.engine.synchronous.pipeline.head import reached
from mgpu_tf.engine.synchronous.pipeline.schedule import Pass, in_turn

# Tensors by their keys, with the masks that layers gave them.
Values = dict[Key, tuple[tf.Tensor, tf.Tensor | None]]


@dataclasses.dataclass
class _Made:
    """What a forward pass has made.

    Attributes:
        inputs: What it took that has a gradient: keys and tensors.
        targets: What it made that has a gradient: keys, None for the loss.
        tensors: These tensors.
        tape: Has recorded the pass.
    """

    inputs: list[tuple[Key, tf.Tensor]]
    targets: list[Key | None]
    tensors: list[tf.Tensor]
    tape: tf.GradientTape


class Run:
    """The passes of one replica through all stages. On a replica.

    Args:
        step: The `PipelineStep`.
        data: The rows of the replica.
        share: The part of the replica in the global batch.
        kind: `train`, `evaluate` or `predict`.
        here: The stages that are computed. Default: those of this process.
    """

    def __init__(
        self,
        step: Any,
        data: Any,
        share: BatchShare,
        kind: str,
        here: range | None = None,
    ) -> None:
        self._step = step
        self._kind = kind
        self._share = share
        self._count = len(step.stages.every)
        self._here = step.stages_here if here is None else here
        self._devices = [step.device(s) for s in range(self._count)]
        self._parts = [
            step.part(data, share, i) for i in range(step.micro_batches)
        ]
        self._weights: list[list[tf.Tensor]] = []
        self._before: dict[int, tf.Tensor] = {}
        for stage, device in enumerate(self._devices):
            self._begin_stage(stage)
            own, others = step.variables_of(stage)
            if stage not in self._here:
                own = others = []
            with tf.device(device):
                # Those of another stage come here once.
                self._weights.append(list(map(self._read, own)))
                for variable in others:
                    held = self._read(variable)
                    self._before.setdefault(id(variable), held)
        # Of each weight, whether each stage looks up rows as all parts do.
        self.alike: dict[int, list[bool]] = {}
        # What the head has made, where there is one.
        self.logs: Logs = {}
        self._data = data
        self._headed = False
        self._head_loss: tf.Tensor | None = None
        self._head_writes: Writes = []
        # What the passes have made, and the gradients that came back.
        self._values: list[Values] = []
        for data, _ in self._parts:
            flat = step.inputs_of(data)
            keys = step.stages.inputs
            masks = map(keras_internals.mask_of, flat)
            pairs = zip(flat, masks, strict=True)
            self._values.append(dict(zip(keys, pairs, strict=True)))
        self._losses: dict[Pass, tf.Tensor] = {}
        self._writes: dict[Pass, list[tf.Tensor]] = {}
        self._made: dict[Pass, _Made] = {}
        self._upstream: list[dict[Key, list[tf.Tensor]]] = [
            {} for _ in self._parts
        ]
        self._after: list[list[Any]] = [[] for _ in self._devices]
        # What each pass reads besides weights and inputs.
        self._held: dict[Pass, list[tf.Tensor]] = {}
        self._seeds = [self._seeds_of(i) for i in range(step.micro_batches)]
        # The gradients of what a stage has taken.
        self._returned: dict[Pass, dict[Key, tf.Tensor]] = {}

    def _begin_stage(self, stage: int) -> None:
        """Comes before the variables of a stage are read."""

    def _read(self, variable: keras.Variable) -> tf.Tensor:
        return self._step.read(variable)

    def _seeds_of(self, micro: int) -> dict[int, tf.Tensor]:
        return self._step.seeds_of(micro)

    @property
    def has_last(self) -> bool:
        """Whether the last stage is among those of this process."""
        return self._count - 1 in self._here

    def train(self, scale: Callable[[tf.Tensor], tf.Tensor]) -> dict[int, Any]:
        """Runs all passes; returns the sums of gradients by weight."""
        seed = scale(tf.ones([], self._loss_type())) / self._step.same_loss
        sums = [
            Sums(self._step.variables_of(stage)[0])
            for stage in range(self._count)
        ]
        for each in self._passes():
            if each.backward and not self._headed:
                self._by_head(scale, sums)
            if each.stage in self._here:
                kind = "backward" if each.backward else "forward"
                with (
                    tf.name_scope(f"stage_{each.stage}/{kind}_{each.micro}/"),
                    tf.device(self._devices[each.stage]),
                ):
                    if each.backward:
                        self._backward(each, seed, sums[each.stage])
                    else:
                        self._forward(each)
            self._passed(each)
        found: dict[int, list[Any]] = {}
        for stage in range(self._count):
            for variable, gradient, alike in self._found(stage, sums[stage]):
                found.setdefault(id(variable), []).append(gradient)
                self.alike.setdefault(id(variable), []).append(alike)
        return self._joined(found)

    def _found(
        self, stage: int, sums: Sums
    ) -> list[tuple[keras.Variable, Any, bool]]:
        """Returns the gradients that a stage has found.

        With each comes its weight, and whether all parts look up the same rows.
        """
        if stage not in self._here:
            return []
        own, _ = self._step.variables_of(stage)
        alike = self._step.traced(stage, self._kind).alike
        with tf.device(self._devices[stage]):
            totals = sums.totals(alike)
        return [
            each
            for each in zip(own, totals, alike, strict=True)
            if each[1] is not None
        ]

    def _joined(self, found: dict[int, list[Any]]) -> dict[int, Any]:
        """Adds up what stages have found for a weight, where it is stored."""
        joined: dict[int, Any] = {}
        for stage in self._here:
            device = self._devices[stage]
            for variable in self._step.stored_in(stage):
                key = id(variable)
                if key not in found:
                    continue
                with tf.device(device):
                    joined[key] = _of_stages(found[key])
                if len(set(self.alike[key])) > 1 and isinstance(
                    joined[key], tf.IndexedSlices
                ):
                    self._step.refuse_apart(variable)
        return joined

    def _passed(self, each: Pass) -> None:
        """Follows a pass of this process, or of another."""

    def _passes(self) -> Iterator[Pass]:
        """Yields the passes; in another order once a head is needed."""
        done: list[Pass] = []
        by_head = self._step.head_of(self._kind)
        for each in in_turn(self._step.orders(self._kind)):
            if self._step.head_of(self._kind) is not by_head:
                break
            yield each
            done.append(each)
        else:
            return
        for each in in_turn(self._step.orders(self._kind)):
            if each not in done:
                yield each

    def _by_head(
        self,
        scale: Callable[[tf.Tensor], tf.Tensor] | None,
        sums: list[Sums],
    ) -> None:
        """Computes losses and metrics of all rows, where that is needed."""
        self._headed = True
        head = self._step.head_of(self._kind)
        if head is None or not self.has_last:
            return
        keys = self._step.stages.outputs
        weights = [
            (variable, value, stage)
            for stage in self._here
            for variable, value in zip(
                self._step.variables_of(stage)[0],
                self._weights[stage],
                strict=True,
            )
            if head.has_own_loss
            and any(variable is v for v in self._step.stored_in(stage))
        ]
        with tf.name_scope("head/"), tf.device(self._devices[-1]):
            outputs = [
                keras_internals.with_mask(
                    self._of_all([each[key][0] for each in self._values]),
                    self._mask_of_all([each[key][1] for each in self._values]),
                )
                for key in keys
            ]
            loss, gradients, of_weights, writes, self.logs = head.of_outputs(
                outputs,
                self._step.packed,
                self._data,
                self._share,
                list(self._losses.values()),
                [(variable, value) for variable, value, _ in weights],
                scale,
            )
            self._head_writes = writes
            self._head_loss = loss
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is None:
                    continue
                for micro, part in enumerate(self._parts_of(gradient)):
                    self._upstream[micro].setdefault(key, []).append(part)
        found = {
            (stage, id(variable)): gradient
            for (variable, _, stage), gradient in zip(
                weights, of_weights, strict=True
            )
        }
        for stage in {stage for _, _, stage in weights} if sums else ():
            own, _ = self._step.variables_of(stage)
            with tf.device(self._devices[stage]):
                sums[stage].add([found.get((stage, id(v))) for v in own])

    def forward_only(self) -> None:
        """Runs the forward passes, without what a backward pass needs."""
        for each in self._passes():
            if each.stage in self._here:
                with (
                    tf.name_scope(f"stage_{each.stage}/forward_{each.micro}/"),
                    tf.device(self._devices[each.stage]),
                ):
                    self._forward(each)
            self._passed(each)
        if self._kind != "predict":
            self._by_head(None, [])

    def _loss_type(self) -> tf.DType:
        return tf.as_dtype(keras.config.floatx())

    def _state(self, each: Pass) -> list[tf.Tensor]:
        """What a pass reads besides weights and inputs."""
        if each not in self._held:
            _, others = self._step.variables_of(each.stage)
            seeds = self._seeds[each.micro]
            self._held[each] = [
                seeds.get(id(v), self._before[id(v)]) for v in others
            ]
        return self._held[each]

    def _call(
        self, each: Pass, tensors: list[tf.Tensor], weights: list[tf.Tensor]
    ) -> Any:
        stage = self._step.stages.every[each.stage]
        values = self._values[each.micro]
        masks = [values[key][1] for key in stage.inputs]
        taken = list(zip(tensors, masks, strict=True))
        function = self._step.stage_function(each.stage, self._kind, each.micro)
        data, share = self._parts[each.micro]
        last = each.stage == self._count - 1 and self._kind != "predict"
        with reached():
            return function(
                taken,
                weights,
                self._state(each),
                data if last else None,
                *share.places,
            )

    def _forward(self, each: Pass) -> None:
        stage = self._step.stages.every[each.stage]
        values = self._values[each.micro]
        with tf.control_dependencies(self._after[each.stage]):
            tensors = [tf.identity(values[key][0]) for key in stage.inputs]
        keeps = self._kind == "train" and not self._step.recomputes
        if keeps:
            made, outputs, loss, writes = self._recorded(each, tensors)
            self._made[each] = made
        else:
            outputs, loss, writes = self._call(
                each, tensors, self._weights[each.stage]
            )
        keys = self._sent(each.stage)
        values.update(zip(keys, map(tuple, outputs), strict=True))
        if loss is not None:
            self._losses[each] = loss
        self._writes[each] = writes
        written = self._step.traced(each.stage, self._kind).written
        for variable, value in zip(written, writes, strict=True):
            if self._step.is_global_seed(variable):
                # The next stage draws on from there.
                self._seeds[each.micro][id(variable)] = value
        ends = [tensor for tensor, _ in outputs]
        self._after[each.stage] = _ends(ends if loss is None else [loss])

    def _sent(self, stage: int) -> list[Key]:
        """Returns the keys of what a stage makes for others."""
        last = stage == self._count - 1
        stages = self._step.stages
        return stages.outputs if last else stages.every[stage].outputs

    def _recorded(
        self, each: Pass, tensors: list[tf.Tensor]
    ) -> tuple[_Made, Any, Any, Any]:
        """Computes a stage under a tape."""
        stage = self._step.stages.every[each.stage]
        weights = self._weights[each.stage]
        inputs = [
            (key, tensor)
            for key, tensor in zip(stage.inputs, tensors, strict=True)
            if tensor.dtype.is_floating and key not in self._step.stages.inputs
        ]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([tensor for _, tensor in inputs])
            tape.watch(weights)
            outputs, loss, writes = self._call(each, tensors, weights)
        keys = self._sent(each.stage)
        targets: list[Key | None] = []
        found = []
        last = each.stage == self._count - 1
        if not last or self._step.head_of(self._kind) is not None:
            for key, (tensor, _) in zip(keys, outputs, strict=True):
                if tensor.dtype.is_floating:
                    targets.append(key)
                    found.append(tensor)
        if loss is not None:
            targets.append(None)
            found.append(loss)
        return _Made(inputs, targets, found, tape), outputs, loss, writes

    def _backward(self, each: Pass, seed: tf.Tensor, sums: Sums) -> None:
        forward = Pass(each.stage, each.micro, False)
        upstream = self._upstream[each.micro]
        with tf.control_dependencies(self._after[each.stage]):
            arrived = {
                key: tf.identity(_added(upstream.pop(key)))
                for key in self._sent(each.stage)
                if key in upstream
            }
            seed = tf.identity(seed)
        made = self._made.pop(forward, None)
        if made is None:
            made = self._again(forward, [*arrived.values(), seed])
        pairs = []
        reaches = self._step.traced(each.stage, self._kind).reaches
        reached: tuple[set[int], set[int]] = set(), set()
        for key, target in zip(made.targets, made.tensors, strict=True):
            if key is None:
                pairs.append((target, tf.cast(seed, target.dtype)))
            elif key in arrived:
                # A model may return one tensor twice.
                pairs.append((target, arrived.pop(key)))
            else:
                continue
            for every, some in zip(reached, reaches[key], strict=True):
                every |= some
        weights = self._weights[each.stage]
        inputs = [tensor for _, tensor in made.inputs]
        if not pairs:
            return
        of_inputs, of_weights = made.tape.gradient(
            [target for target, _ in pairs],
            (inputs, weights),
            output_gradients=[gradient for _, gradient in pairs],
        )
        of_weights = [
            gradient if place in reached[0] else None
            for place, gradient in enumerate(of_weights)
        ]
        taken = self._step.stages.every[each.stage].inputs
        places = {key: place for place, key in enumerate(taken)}
        rows = self._parts[each.micro][1].local
        if self._step.micro_batches > 1 or not tf.get_static_value(rows):
            of_weights = [_where_rows(rows, g) for g in of_weights]
        ends = list(sums.add(of_weights))
        self._returned[each] = {
            key: gradient
            for (key, _), gradient in zip(made.inputs, of_inputs, strict=True)
            if gradient is not None and places[key] in reached[1]
        }
        for key, gradient in self._returned[each].items():
            upstream.setdefault(key, []).append(gradient)
            ends.append(gradient)
        self._after[each.stage] = _ends(ends)

    def _again(self, each: Pass, after: list[tf.Tensor]) -> _Made:
        """Computes a stage once more, when its gradients have arrived."""
        stage = self._step.stages.every[each.stage]
        values = self._values[each.micro]
        with tf.control_dependencies(after):
            tensors = [tf.identity(values[key][0]) for key in stage.inputs]
        return self._recorded(each, tensors)[0]

    def loss(self) -> tf.Tensor:
        """Returns the contribution of the replica to the loss."""
        losses = list(self._losses.values())
        if self._head_loss is not None:
            losses.append(self._head_loss)
        return tf.add_n([tf.cast(loss, self._loss_type()) for loss in losses])

    def writes(self) -> Writes:
        """Returns what is to be written to state and metrics."""
        found: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        for stage in self._here:
            device = self._devices[stage]
            written = self._step.traced(stage, self._kind).written
            for place, variable in enumerate(written):
                parts = [
                    self._writes[Pass(stage, micro, False)][place]
                    for micro in range(len(self._parts))
                ]
                before = self._before[id(variable)]
                with tf.device(device):
                    value = self._step.joined(variable, before, parts)
                found[id(variable)] = (variable, value)
        if not self.has_last:
            return list(found.values())
        if self._step.head_of(self._kind) is not None:
            found |= {id(v): (v, value) for v, value in self._head_writes}
        elif self._kind != "predict":
            tracker = self._step.loss_tracker
            for variable, increment in mean_increments(
                tracker, self.loss(), self._share
            ):
                value = tf.identity(variable.value) + increment
                found[id(variable)] = (variable, value)
        return list(found.values())

    def outputs(self) -> Any:
        """Returns the outputs of all rows, in the model's structure."""
        return self._step.packed(self._rows_of_outputs())

    def _rows_of_outputs(self) -> list[tf.Tensor]:
        return [
            self._of_all([values[key][0] for values in self._values])
            for key in self._step.stages.outputs
        ]

    def _of_all(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """Returns the rows of all micro-batches, as many as the data has."""
        if len(parts) == 1:
            return parts[0]
        own = [
            composites.own_rows(part, share.local)
            for part, (_, share) in zip(parts, self._parts, strict=True)
        ]
        # Where the replica has no row, each computes another one.
        another = parts[0][: _one_if_none(self._share.local)]
        return tf.concat([*own, another], 0)

    def _mask_of_all(self, masks: list[Any]) -> tf.Tensor | None:
        return None if any(m is None for m in masks) else self._of_all(masks)

    def _parts_of(self, gradient: Any) -> list[tf.Tensor]:
        """Returns the rows of each micro-batch of what flows back."""
        dense = tf.convert_to_tensor(gradient)
        if len(self._parts) == 1:
            return [dense]
        dense = composites.own_rows(dense, self._share.local)
        sizes = [share.local for _, share in self._parts]
        rest = tf.shape(dense, out_type=tf.int64)[1:]
        found = []
        for part, size in zip(tf.split(dense, sizes), sizes, strict=True):
            # Nothing flows back to a row that another one computes as well.
            shape = tf.concat([[_one_if_none(size)], rest], 0)
            nothing = tf.zeros(shape, dense.dtype)
            found.append(tf.concat([part, nothing], 0))
        return found


class Sums:
    """Adds the gradients of micro-batches up, on the device of a stage.

    Args:
        variables: The weights of the stage.
    """

    def __init__(self, variables: list[keras.Variable]) -> None:
        self._overwritten = list(map(keras_internals.is_overwritten, variables))
        self._held: list[Any] = []

    def add(self, gradients: list[Any]) -> list[tf.Tensor]:
        """Adds the gradients of a micro-batch; returns what it has made."""
        held = self._held or [None] * len(gradients)
        self._held = [
            _largest(before, gradient) if over else _both(before, gradient)
            for before, gradient, over in zip(
                held, gradients, self._overwritten, strict=True
            )
        ]
        return [
            gradient.values
            if isinstance(gradient, tf.IndexedSlices)
            else self._held[place]
            for place, gradient in enumerate(gradients)
            if gradient is not None
        ]

    def totals(self, alike: list[bool]) -> list[Any]:
        """Returns the sums; rows are joined, or added if all are alike."""
        return [
            _rows(held, same) if isinstance(held, list) else held
            for held, same in zip(
                self._held or [None] * len(alike), alike, strict=True
            )
        ]


def _largest(before: Any, gradient: Any) -> Any:
    """What two micro-batches overwrite a variable with."""
    if before is None or gradient is None:
        return gradient if before is None else before
    return tf.maximum(before, gradient)


def _both(before: Any, gradient: Any) -> Any:
    """Adds a gradient to a sum; rows stay rows, in a list."""
    rows = isinstance(gradient, tf.IndexedSlices)
    if gradient is None:
        return before
    if before is None:
        return [gradient] if rows else gradient
    if rows and isinstance(before, list):
        return [*before, gradient]
    if isinstance(before, list):
        before = tf.add_n([tf.convert_to_tensor(each) for each in before])
    return before + tf.convert_to_tensor(gradient)


def _rows(parts: list[tf.IndexedSlices], alike: bool) -> tf.IndexedSlices:
    if alike:
        values = tf.add_n([part.values for part in parts])
        return tf.IndexedSlices(values, parts[0].indices, parts[0].dense_shape)
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], 0),
        tf.concat([part.indices for part in parts], 0),
        parts[0].dense_shape,
    )


def _of_stages(gradients: list[Any]) -> Any:
    """Adds up what several stages have found for one weight."""
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(each, tf.IndexedSlices) for each in gradients):
        # Lookups by int32 and by int64 meet here.
        wide = [
            tf.IndexedSlices(
                each.values,
                tf.cast(each.indices, tf.int64),
                tf.cast(each.dense_shape, tf.int64),
            )
            for each in gradients
        ]
        return _rows(wide, alike=False)
    return tf.add_n([tf.convert_to_tensor(each) for each in gradients])


def _added(gradients: list[tf.Tensor]) -> tf.Tensor:
    if len(gradients) == 1:
        return gradients[0]
    return tf.add_n(gradients)


def _one_if_none(rows: tf.Tensor) -> tf.Tensor:
    """Returns 1 for no row, and else 0."""
    return tf.cast(tf.equal(rows, 0), tf.int64)


def _where_rows(rows: tf.Tensor, gradient: Any) -> Any:
    """Returns a gradient, or zeros where the micro-batch has no row."""
    if gradient is None or tf.get_static_value(rows):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = _where_rows(rows, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(rows > 0, gradient, tf.zeros([], gradient.dtype))


def _ends(tensors: list[tf.Tensor]) -> list[Any]:
    """Returns what the next pass of a stage waits for.

    The tensors come from calls of functions, which TensorFlow replaces by
    their bodies; only values, not calls, can be waited for then.
    """
    return [tf.group(*[tf.identity(tensor) for tensor in tensors])]
