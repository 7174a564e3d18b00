"""The computation of a replica whose layers are in stages on several devices.

    the replica's rows -> micro-batches
    each micro-batch   forward through the stages, and backward through them,
                       in the order of the schedule
    gradients          added up on the device of each stage

A micro-batch is to the loss, to metrics and to the state of layers what a
replica is on other strategies: it has contributions to the loss of the global
batch, draws its rows of the random numbers, and its writes become one by the
rules of `rules.py`.

Each stage is one function of tensors, traced once for all micro-batches. Its
passes are put in order by control dependencies. Gradients are taken by a tape
for each pass, on the device of the stage: the tape of a whole model would
compute all of its backward pass on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.contributions import BatchShare, sharing
from mgpu_tf.engine.keras_internals import Key
from mgpu_tf.engine.losses import GlobalLoss, NeedsAllRows
from mgpu_tf.engine.pipeline.head import Head, of_another_stage, reached
from mgpu_tf.engine.pipeline.schedule import Pass, in_turn, orders
from mgpu_tf.engine.pipeline.split import Stage, Stages
from mgpu_tf.engine.pipeline.state import PipelineState
from mgpu_tf.engine.reading import Reader
from mgpu_tf.engine.row_proof import noting
from mgpu_tf.engine.state import Writes
from mgpu_tf.engine.step import (
    Logs,
    ReplicaStep,
    batch_increments,
    check_gradients,
    drawing,
    know_rows,
    mean_increments,
    of_unknown_length,
)
from mgpu_tf.engine.step_scope import StepScope
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.pipeline import PipelineStrategy

_log = logging.getLogger("mgpu_tf")

# Tensors by their keys, with the masks that layers gave them.
Values = dict[Key, tuple[tf.Tensor, tf.Tensor | None]]


@dataclasses.dataclass(frozen=True)
class _Share(BatchShare):
    """The share of a micro-batch in the global batch."""

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Refuses a sum that is known after all micro-batches only."""
        if self.replicas == 1:
            return value
        raise NeedsAllRows(
            "A stage divides a loss by what it knows before the first "
            "micro-batch. Received: a loss that is divided by the sum of "
            f"masks or of weights, in {self.replicas} parts of a batch. Use "
            "reduction='sum', or sample weights in place of masks."
        )


@dataclasses.dataclass
class _Traced:
    """What is known of a stage's function once it was traced.

    Attributes:
        written: The variables that it writes, in order.
        alike: Of each trainable weight, whether all parts of a batch look up
            the same rows of it.
        has_loss: Whether it contributes to the loss.
    """

    written: list[keras.Variable]
    alike: list[bool]
    has_loss: bool


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


class PipelineStep(ReplicaStep):
    """The computation of one replica.

    Args:
        model: A compiled and built model.
        loss: Its loss in contributions; None for predictions.
        state: What a step may write besides weights.
        strategy: Where the stages are.
        stages: The layers of each stage.
        recompute: Whether a stage keeps only its inputs for the backward
            pass, and computes everything else again.
        head: Computes losses and metrics that need all rows; None for
            predictions.
    """

    _state: PipelineState

    def __init__(
        self,
        model: keras.Model,
        loss: GlobalLoss | None,
        state: PipelineState,
        strategy: PipelineStrategy,
        stages: Stages,
        *,
        recompute: bool,
        head: Head | None = None,
    ) -> None:
        self._micro = strategy.micro_batches
        parts = strategy.num_replicas_in_sync * self._micro
        super().__init__(
            model,
            loss,  # type: ignore[arg-type]
            state,
            parts,
            in_parts=parts > 1,
        )
        self._strategy = strategy
        self._stages = stages
        self._recompute = recompute
        self._head = head
        # For what losses and metrics are computed by the head.
        self._by_head: set[str] = set()
        if self._own_logs or keras_internals.overrides(model, "compute_loss"):
            self._by_head = {"train", "evaluate"}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._traced: dict[Any, _Traced] = {}

    @property
    def can_be_compiled(self) -> bool:
        """Returns that XLA, which compiles for one device, cannot."""
        return False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model's parts act as the engine needs; as in the base.

        Functions of stages are traced anew, with what is in place then.
        """
        self._functions = {}
        with super().in_place():
            yield

    # On a replica.

    def gradients(
        self,
        data: Any,
        share: BatchShare,
        scale: Callable[[tf.Tensor], tf.Tensor],
        given: Writes | None = None,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        jit_compile: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor], Logs]:
        """Computes gradients; as in `ReplicaStep`."""
        del given, gathered, jit_compile
        run = _Run(self, data, share, "train")
        sums = run.train(scale)
        self.log_names = list(run.logs)
        gradients, alike = [], []
        for variable in self._model.trainable_variables:
            gradient = sums.get(id(variable))
            gradients.append(gradient)
            if gradient is not None:
                alike.append(all(run.alike[id(variable)]))
        check_gradients(gradients, self._model.trainable_variables)
        self.present = [g is not None for g in gradients]
        self.alike = alike
        writes = run.writes()
        self.written = [variable for variable, _ in writes]
        present = [g for g in gradients if g is not None]
        return present, [value for _, value in writes], run.logs

    def forward(
        self,
        data: Any,
        share: BatchShare,
        training: bool,
        given: Writes | None = None,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> tuple[tf.Tensor, Writes, Logs]:
        """Computes the loss and what is to be written; of an evaluation."""
        del training, given, gathered
        run = _Run(self, data, share, "evaluate")
        run.forward_only()
        self.log_names = list(run.logs)
        return run.loss(), run.writes(), run.logs

    def outputs(self, data: Any, share: BatchShare) -> tuple[Any, Writes]:
        """Returns what the model predicts for rows, and what is written."""
        run = _Run(self, data, share, "predict")
        run.forward_only()
        return run.outputs(), run.writes()

    # In the function of a stage.

    def stage_function(self, stage: int, kind: str) -> Callable[..., Any]:
        """Returns the function of a stage: of tensors, traced once."""
        key = stage, kind
        if key not in self._functions:

            def compute(*args: Any) -> Any:
                return self._compute(stage, kind, *args)

            # One that runs eagerly reads Python's values of a step.
            self._functions[key] = (
                compute
                if tf.executing_eagerly()
                else tf.function(compute, autograph=False)
            )
        return self._functions[key]

    def traced(self, stage: int, kind: str) -> _Traced:
        """Returns what is known of a stage's function."""
        return self._traced[stage, kind]

    def _compute(
        self,
        number: int,
        kind: str,
        taken: list[tuple[tf.Tensor, tf.Tensor | None]],
        weights: list[tf.Tensor],
        held: list[tf.Tensor],
        data: Any,
        *places: tf.Tensor,
    ) -> tuple[list[Any], tf.Tensor | None, list[tf.Tensor]]:
        """Computes a stage.

        Args:
            number: The stage.
            kind: `train`, `evaluate` or `predict`.
            taken: Its inputs, with their masks.
            weights: The values of its trainable weights.
            held: The values of what else it reads.
            data: The rows of the micro-batch, for the loss; None where
                another stage computes it.
            *places: Those of the share of the micro-batch: how many rows it
                has, how many the global batch has, and its first row, if
                random numbers need it.

        Returns:
            Its outputs with their masks, its contribution to the loss, and
            what it writes.
        """
        stage = self._stages.every[number]
        parts = self._replicas
        local, total, *first = places
        share = _Share(local, total, parts, low=first[0] if first else None)
        trained, others = self.variables_of(number)
        given = [
            *zip(trained, weights, strict=True),
            *zip(others, held, strict=True),
        ]
        if self._state.generator is not None:
            keras_internals.lend_global_seed(self._state.generator)
        with contextlib.ExitStack() as stack:
            declared = stack.enter_context(sharing(share))
            moments = stack.enter_context(self._moments.noted())
            rows = [t for t, _ in taken if t.shape.rank and not t.shape[0]]
            drawn: list[tf.Tensor] = []
            scope = stack.enter_context(
                StepScope(self._model, given, None, self._refuse_other_stage)
            )
            scope.share, scope.state = share, self._state
            scope.read_aside = self._calls.read_aside
            know_rows(scope, [rows, data], share)
            stack.enter_context(noting(scope.proof))
            with drawing(share, [rows, data], drawn):
                made = self._outputs_of(stage, taken, kind == "train")
            y_pred: Any = None
            if number == len(self._stages.every) - 1:
                y_pred = keras_internals.structured(
                    self._model, [made[k][0] for k in self._stages.outputs]
                )
            reader = Reader(
                [
                    rows,
                    data,
                    y_pred,
                    self._state.drawn(given),
                    local,
                    share.low,
                    drawn,
                ],
                declared,
                moments,
            )
            scope.reader = reader
            losses: list[tf.Tensor] = []
            increments: Writes = []
            if kind != "predict":
                # Regularizers of a weight count where it is stored.
                losses, increments = self._contributions(
                    scope, data, y_pred, share, self.stored_in(number), kind
                )
        self._check_direct(scope.within)
        self._check_scope(scope, trained)
        writes = self._written(scope, given, reader, share, increments)
        before = {id(variable): value for variable, value in given}
        for variable, increment in increments:
            value = before[id(variable)] + increment
            writes[id(variable)] = (variable, value)
        self._traced[number, kind] = _Traced(
            [variable for variable, _ in writes.values()],
            [_looks_up_alike(reader, weight) for weight in weights],
            bool(losses),
        )
        sent = stage.outputs if y_pred is None else self._stages.outputs
        return (
            [made[key] for key in sent],
            tf.add_n(losses) if losses else None,
            [value for _, value in writes.values()],
        )

    def _contributions(
        self,
        scope: StepScope,
        data: Any,
        y_pred: Any,
        share: BatchShare,
        trained: list[keras.Variable],
        kind: str,
    ) -> tuple[list[tf.Tensor], Writes]:
        """Returns the contributions of a stage, and what means grow by.

        Where they need all rows, they are left to the head.
        """
        if y_pred is not None and kind not in self._by_head:
            mark = scope.mark()
            try:
                return self._losses(
                    scope, data, y_pred, share, trained, kind == "train"
                )
            except NeedsAllRows as reason:
                scope.reset(mark)
                self._by_head.add(kind)
                _log.info(
                    "pipeline: the loss or a metric needs all rows, so all "
                    "micro-batches go forward before one goes back: %s",
                    str(reason).split("Received: ")[1].split(". ")[0],
                )
        own_loss = self._head is not None and self._head.regularizes
        if own_loss and kind in self._by_head:
            if scope.losses:
                raise ConfigurationError(
                    "On a pipeline a compute_loss of your own sees no losses "
                    "of layers. Received: a layer that calls add_loss. Leave "
                    "out one of the two, or use 'fsdp'."
                )
            return [], []
        own = self._loss.of_layers(scope.losses, share, scope.reader, trained)
        return own, []

    def _losses(
        self,
        scope: StepScope,
        data: Any,
        y_pred: Any,
        share: BatchShare,
        trained: list[keras.Variable],
        training: bool,
    ) -> tuple[list[tf.Tensor], Writes]:
        """Returns the loss of a micro-batch, and what means grow by."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, terms = self._loss(
            x,
            y,
            y_pred,
            sample_weight,
            scope.losses,
            share,
            training,
            scope.reader,
            trained,
        )
        self._metrics.computed((x, y, y_pred, sample_weight))
        increments: Writes = []
        for mean, part in zip(self._loss.trackers, terms, strict=False):
            increments += batch_increments(mean, part, share)
        return [loss], increments

    def _outputs_of(
        self,
        stage: Stage,
        taken: list[tuple[tf.Tensor, tf.Tensor | None]],
        training: bool,
    ) -> Values:
        """Runs the calls of a stage; returns all that they have made."""
        values: Values = dict(zip(stage.inputs, taken, strict=True))

        def call() -> list[Any]:
            tensors = {
                key: keras_internals.with_mask(tensor, mask)
                for key, (tensor, mask) in values.items()
            }
            for each in stage.calls:
                made = each.run([tensors[k] for k in each.inputs], training)
                tensors.update(zip(each.outputs, made, strict=True))
            for key, tensor in tensors.items():
                values[key] = (tensor, keras_internals.mask_of(tensor))
            return []

        keras_internals.as_one_call(call, training=training)
        return values

    def _by_rule(
        self,
        variable: keras.Variable,
        value: tf.Tensor,
        before: tf.Tensor | None,
        reader: Reader,
        share: BatchShare,
    ) -> tf.Tensor:
        """What a micro-batch writes, to be brought together by the rule."""
        if self._state.is_declared_mean(variable):
            return share.select(value, before)
        return super()._by_rule(variable, value, before, reader, share)

    def _check_scope(
        self, scope: StepScope, trained: list[keras.Variable]
    ) -> None:
        graph = tf.compat.v1.get_default_graph()
        known = {id(variable) for variable in trained}
        read = [v.path for v in scope.seen.values() if id(v) not in known]
        read += [v.name for v in getattr(graph, "variables", ())]
        if read:
            raise of_another_stage(read[0])
        for variable in trained:
            if scope.is_written(variable):
                raise ConfigurationError(
                    "A layer of a pipeline cannot assign its own weights. "
                    f"Received: an assignment to {variable.path}. Make it "
                    "trainable=False, or use 'mirrored'."
                )

    def _refuse_other_stage(self, variable: keras.Variable) -> None:
        """Refuses what a stage reads of state that is not its own."""
        if any(variable is each for each in self._state.layers):
            raise of_another_stage(variable.path)

    def variables_of(
        self, number: int
    ) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """Returns the trainable weights of a stage, and what else it reads."""
        trained = {id(v) for v in self._model.trainable_variables}
        stage = self._stages.every[number]
        variables = [*stage.variables, *stage.borrowed]
        own = [v for v in variables if id(v) in trained]
        others = [v for v in variables if id(v) not in trained]
        if number == len(self._stages.every) - 1:
            others += self._state.metrics
        others += filter(self.is_global_seed, self._state.seeds)
        return own, list({id(v): v for v in others}.values())

    def stored_in(self, number: int) -> list[keras.Variable]:
        """Returns the trainable weights that a stage stores."""
        borrowed = set(map(id, self._stages.every[number].borrowed))
        own, _ = self.variables_of(number)
        return [v for v in own if id(v) not in borrowed]

    # What a run of micro-batches needs to know.

    @property
    def micro_batches(self) -> int:
        """Into how many parts the rows of a replica are cut."""
        return self._micro

    @property
    def stages(self) -> Stages:
        """The layers of each stage."""
        return self._stages

    @property
    def recomputes(self) -> bool:
        """Whether stages are computed again in the backward pass."""
        return self._recompute

    def refuse_apart(self, table: keras.Variable) -> None:
        """Refuses a table that stages look up in two ways, if that matters.

        Raises:
            ConfigurationError: There are several replicas.
        """
        if self._strategy.num_replicas_in_sync == 1:
            return
        raise ConfigurationError(
            "Where stages share a table, all look up rows of each example, or "
            f"all the same for every example. Received: {table.path}, which "
            "is looked up both ways, on several replicas. Name "
            "pipeline_stages so that both are in one stage, or use 'fsdp'."
        )

    def device(self, stage: int) -> str:
        """Returns the device of a stage on this replica."""
        context = tf.distribute.get_replica_context()
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        return self._strategy.devices_of(stage)[int(replica)]

    def inputs_of(self, data: Any) -> list[tf.Tensor]:
        """Returns the model's inputs in order, of their types."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return keras_internals.flat_inputs(self._model, x)

    def orders(self) -> list[list[Pass]]:
        """Returns the passes of each stage in a step of training."""
        schedule = self._strategy.schedule
        if "train" in self._by_head:
            schedule = "gpipe"
        return orders(schedule, len(self._stages.every), self._micro)

    def head_of(self, kind: str) -> Head | None:
        """Returns what computes losses and metrics of all rows, if needed."""
        return self._head if kind in self._by_head else None

    def is_global_seed(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is that of unseeded draws."""
        return self._state.is_global_seed(variable)

    def seeds_of(self, micro: int) -> dict[int, tf.Tensor]:
        """Returns the seeds of a micro-batch, by variable."""
        return self._state.seeds_of(micro, self._micro)

    def part(
        self, data: Any, share: BatchShare, micro: int
    ) -> tuple[Any, BatchShare]:
        """Returns the rows of a micro-batch, and its share."""
        count, local, low = self._micro, share.local, share.low
        if count > 1:
            first, after = local * micro // count, local * (micro + 1) // count
            data = structures.rows(data, first, after)
            low = None if low is None else low + first
            share = dataclasses.replace(share, local=after - first, low=low)
        if self._replicas > 1 or self._state.reads_rules:
            data = tf.nest.map_structure(of_unknown_length, data)
        return data, share

    def joined(
        self,
        variable: keras.Variable,
        before: tf.Tensor,
        parts: list[tf.Tensor],
    ) -> tf.Tensor:
        """Makes one value of what micro-batches wrote to a variable."""
        if self._replicas == 1:
            return parts[0]
        if any(variable is seed for seed in self._state.seeds):
            if self._state.draws_alike:
                return parts[-1]
            # Each part has a seed of its own; the count is that of all.
            return tf.stack([before[0], parts[-1][1]])
        if len(parts) == 1:
            return parts[0]
        return self._state.rule(variable).joined(before, parts)

    @property
    def loss_tracker(self) -> keras.metrics.Mean:
        """The mean that Keras reports as the loss."""
        return keras_internals.loss_tracker(self._model)

    def packed(self, outputs: list[Any]) -> Any:
        """Returns outputs in the structure of the model's."""
        return keras_internals.structured(self._model, outputs)


class _Run:
    """The passes of one replica through all stages. On a replica.

    Args:
        step: The step.
        data: The rows of the replica.
        share: The part of the replica in the global batch.
        kind: `train`, `evaluate` or `predict`.
    """

    def __init__(
        self,
        step: PipelineStep,
        data: Any,
        share: BatchShare,
        kind: str,
    ) -> None:
        self._step = step
        self._kind = kind
        self._share = share
        self._count = len(step.stages.every)
        self._devices = [step.device(s) for s in range(self._count)]
        self._parts = [
            step.part(data, share, i) for i in range(step.micro_batches)
        ]
        self._weights: list[list[tf.Tensor]] = []
        self._before: dict[int, tf.Tensor] = {}
        for stage, device in enumerate(self._devices):
            own, others = step.variables_of(stage)
            with tf.device(device):
                # Those of another stage come here once.
                self._weights.append([tf.identity(v.value) for v in own])
                for variable in others:
                    held = tf.identity(variable.value)
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
        self._seeds = [step.seeds_of(i) for i in range(step.micro_batches)]

    def train(self, scale: Callable[[tf.Tensor], tf.Tensor]) -> dict[int, Any]:
        """Runs all passes; returns the sums of gradients by weight."""
        seed = scale(tf.ones([], self._loss_type()))
        sums = [_Sums() for _ in self._devices]
        for each in self._passes():
            if each.backward and not self._headed:
                self._by_head(scale, sums)
            kind = "backward" if each.backward else "forward"
            with (
                tf.name_scope(f"stage_{each.stage}/{kind}_{each.micro}/"),
                tf.device(self._devices[each.stage]),
            ):
                if each.backward:
                    self._backward(each, seed, sums[each.stage])
                else:
                    self._forward(each)
        found: dict[int, list[Any]] = {}
        for stage, device in enumerate(self._devices):
            own, _ = self._step.variables_of(stage)
            alike = self._step.traced(stage, self._kind).alike
            with tf.device(device):
                totals = sums[stage].totals(alike)
            for variable, gradient, same in zip(
                own, totals, alike, strict=True
            ):
                if gradient is not None:
                    found.setdefault(id(variable), []).append(gradient)
                    self.alike.setdefault(id(variable), []).append(same)
        return self._joined(found)

    def _joined(self, found: dict[int, list[Any]]) -> dict[int, Any]:
        """Adds up what stages have found for a weight, where it is stored."""
        joined: dict[int, Any] = {}
        for stage, device in enumerate(self._devices):
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

    def _passes(self) -> Iterator[Pass]:
        """Yields the passes; in another order once a head is needed."""
        done: list[Pass] = []
        by_head = self._step.head_of(self._kind)
        for each in in_turn(self._step.orders()):
            if self._step.head_of(self._kind) is not by_head:
                break
            yield each
            done.append(each)
        else:
            return
        for each in in_turn(self._step.orders()):
            if each not in done:
                yield each

    def _by_head(
        self,
        scale: Callable[[tf.Tensor], tf.Tensor] | None,
        sums: list[_Sums],
    ) -> None:
        """Computes losses and metrics of all rows, where that is needed."""
        self._headed = True
        head = self._step.head_of(self._kind)
        if head is None:
            return
        keys = self._step.stages.outputs
        weights = [
            (variable, value, stage)
            for stage in range(self._count)
            for variable, value in zip(
                self._step.variables_of(stage)[0],
                self._weights[stage],
                strict=True,
            )
            if head.regularizes
            and variable.regularizer is not None
            and any(variable is v for v in self._step.stored_in(stage))
        ]
        with tf.name_scope("head/"), tf.device(self._devices[-1]):
            outputs = [
                keras_internals.with_mask(
                    tf.concat([each[key][0] for each in self._values], 0),
                    _joined_mask([each[key][1] for each in self._values]),
                )
                for key in keys
            ]
            loss, gradients, of_weights, writes, self.logs = head.of_outputs(
                outputs,
                self._data,
                self._share,
                list(self._losses.values()),
                [(variable, value) for variable, value, _ in weights],
                scale,
            )
            self._head_writes = writes
            self._head_loss = loss
            sizes = [share.local for _, share in self._parts]
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is None:
                    continue
                dense = tf.convert_to_tensor(gradient)
                for micro, part in enumerate(tf.split(dense, sizes)):
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
        for micro in range(len(self._parts)):
            for stage, device in enumerate(self._devices):
                with (
                    tf.name_scope(f"stage_{stage}/forward_{micro}/"),
                    tf.device(device),
                ):
                    self._forward(Pass(stage, micro, False))
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
        function = self._step.stage_function(each.stage, self._kind)
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

    def _backward(self, each: Pass, seed: tf.Tensor, sums: _Sums) -> None:
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
        for key, target in zip(made.targets, made.tensors, strict=True):
            if key is None:
                pairs.append((target, tf.cast(seed, target.dtype)))
            elif key in arrived:
                pairs.append((target, arrived[key]))
        weights = self._weights[each.stage]
        inputs = [tensor for _, tensor in made.inputs]
        if not pairs:
            return
        of_inputs, of_weights = made.tape.gradient(
            [target for target, _ in pairs],
            (inputs, weights),
            output_gradients=[gradient for _, gradient in pairs],
        )
        rows = self._parts[each.micro][1].local
        if self._step.micro_batches > 1 or not tf.get_static_value(rows):
            of_weights = [_where_rows(rows, g) for g in of_weights]
        ends = list(sums.add(of_weights))
        for (key, _), gradient in zip(made.inputs, of_inputs, strict=True):
            if gradient is not None:
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
        for stage, device in enumerate(self._devices):
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
        keys = self._step.stages.outputs
        rows = [
            tf.concat([values[key][0] for values in self._values], 0)
            for key in keys
        ]
        return self._step.packed(rows)


class _Sums:
    """Adds the gradients of micro-batches up, on the device of a stage."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def add(self, gradients: list[Any]) -> list[tf.Tensor]:
        """Adds the gradients of a micro-batch; returns what it has made."""
        held = self._held or [None] * len(gradients)
        self._held = [
            _both(before, gradient)
            for before, gradient in zip(held, gradients, strict=True)
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
            for held, same in zip(self._held, alike, strict=True)
        ]


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


def _joined_mask(masks: list[tf.Tensor | None]) -> tf.Tensor | None:
    return None if any(m is None for m in masks) else tf.concat(masks, 0)


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
    if tf.executing_eagerly():
        return []
    return [tf.group(*[tf.identity(tensor) for tensor in tensors])]


def _looks_up_alike(reader: Reader, weight: tf.Tensor) -> bool:
    """Returns whether rows of a weight are looked up, the same by all parts.

    Args:
        reader: Reads the function of a stage.
        weight: The weight, an argument of that function.
    """
    if not tf.is_symbolic_tensor(weight):
        return False
    lookups = []
    stack = [weight]
    while stack:
        for op in stack.pop().consumers():
            if op.type in ("Identity", "Cast"):
                stack += op.outputs
            elif op.type in ("GatherV2", "ResourceGather"):
                lookups.append(op.inputs[1])
    return bool(lookups) and all(map(reader.is_alike, lookups))
