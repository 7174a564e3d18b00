"""The computation of a replica whose layers are in stages on several devices.

    the replica's rows -> micro-batches
    each micro-batch   forward through the stages, and backward through them,
                       in the order of the schedule
    gradients          added up on the device of each stage

A micro-batch is to the loss, to metrics and to the state of layers what a
replica is on other strategies: it has contributions to the loss of the global
batch, draws its rows of the random numbers, and its writes become one by the
rules of `rules.py`.

Each stage is one function of tensors, traced once for all micro-batches. Where
replicas of the tensor axis compute parts of its layers, they exchange
activations, which they cannot within a function: there each pass is traced
with the step. Passes are put in order by control dependencies. Gradients are
taken by a tape for each pass, on the device of the stage: the tape of a whole
model would compute all of its backward pass on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare, sharing
from mgpu_tf.engine.author.state import Writes
from mgpu_tf.engine.author.step_scope import StepScope
from mgpu_tf.engine.exchange.parts import computed
from mgpu_tf.engine.exchange.shared_rows import refuse_mixed
from mgpu_tf.engine.keras_internals import Key
from mgpu_tf.engine.row_proof import RowProof, noting
from mgpu_tf.engine.step.global_metrics import reads_late
from mgpu_tf.engine.step.losses import GlobalLoss, NeedsAllRows
from mgpu_tf.engine.step.plain_variables import check_parts
from mgpu_tf.engine.step.replica_step import (
    Logs,
    ReplicaStep,
    batch_increments,
    check_gradients,
    drawing,
    know_rows,
    of_unknown_length,
)
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.synchronous.pipeline.blocks import RunOfBlock, survey
from mgpu_tf.engine.synchronous.pipeline.head import Head, of_another_stage
from mgpu_tf.engine.synchronous.pipeline.run import Run, Values
from mgpu_tf.engine.synchronous.pipeline.schedule import Pass, orders
from mgpu_tf.engine.synchronous.pipeline.split import Stage, Stages
from mgpu_tf.engine.synchronous.pipeline.state import PipelineState
from mgpu_tf.engine.trace_again import ReadRefused
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.mirrored import as_one_replica
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.split.pipeline import StagedStrategy

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass(frozen=True)
class _Share(BatchShare):
    """The share of a micro-batch in the global batch.

    Attributes:
        place: Which of all micro-batches it is, where each is traced.
    """

    place: int = 0

    def summed(self, value: tf.Tensor, needed_by: str) -> tf.Tensor:
        """Refuses a sum that is known after all micro-batches only."""
        raise NeedsAllRows(
            "A stage knows what all rows add up to after the last micro-batch. "
            f"Received: {needed_by}, in {self.replicas} parts of a batch. Use "
            "'mirrored' or 'fsdp'; for a loss also reduction='sum', or sample "
            "weights in place of masks."
        )


@dataclasses.dataclass
class _Traced:
    """What is known of a stage's function once it was traced.

    Attributes:
        written: The variables that it writes, in order.
        alike: Of each trainable weight, whether all parts of a batch look up
            the same rows of it.
        reaches: Of each of its outputs, None for the loss, which weights and
            which inputs have a gradient from it, by their places.
    """

    written: list[keras.Variable]
    alike: list[bool]
    reaches: dict[Key | None, tuple[set[int], set[int]]]


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
        tensor: What computes with parts of weights, where weights are split
            so. Replicas exchange nothing within a function, so each pass of a
            stage is traced then.
    """

    _state: PipelineState

    def __init__(
        self,
        model: keras.Model,
        loss: GlobalLoss | None,
        state: PipelineState,
        strategy: StagedStrategy,
        stages: Stages,
        *,
        recompute: bool,
        head: Head | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        self._micro = strategy.micro_batches
        parts = strategy.mesh.ranges * self._micro
        super().__init__(
            model,
            loss,  # type: ignore[arg-type]
            state,
            parts,
            tensor=tensor,
            in_parts=parts > 1,
        )
        self._strategy = strategy
        self._stages = stages
        self._recompute = recompute
        self._head = head
        # For what losses and metrics are computed by the head.
        self._by_head: set[str] = set()
        if self._own_logs or keras_internals.has_own_loss(model):
            self._by_head = {"train", "evaluate"}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._traced: dict[Any, _Traced] = {}
        # What makes of what is sent, such as logits, what a layer has made.
        self._together: dict[Key, Callable[..., tf.Tensor]] = {}
        self._line = strategy.line

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
        run = self._run(data, share, "train")
        sums = run.train(scale)
        self.log_names = list(run.logs)
        gradients, alike = [], []
        for variable in self._model.trainable_variables:
            gradient = sums.get(id(variable))
            gradients.append(gradient)
            if gradient is not None:
                alike.append(all(run.alike.get(id(variable), [False])))
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
        run = self._run(data, share, "evaluate")
        run.forward_only()
        self.log_names = list(run.logs)
        return run.loss(), run.writes(), run.logs

    def outputs(self, data: Any, share: BatchShare) -> tuple[Any, Writes]:
        """Returns what the model predicts for rows, and what is written."""
        run = self._run(data, share, "predict")
        run.forward_only()
        return run.outputs(), run.writes()

    def _run(self, data: Any, share: BatchShare, kind: str) -> Run:
        """Returns the passes of a replica. On a replica."""
        if self._line is None:
            return Run(self, data, share, kind)
        seen = survey(self, data, share, kind)
        return RunOfBlock(self, data, share, kind, seen, self._line)

    # In the function of a stage.

    def stage_function(
        self, stage: int, kind: str, micro: int
    ) -> Callable[..., Any]:
        """Returns the function of a stage: of tensors, traced once.

        Where replicas exchange something it is traced with the step.
        """

        def compute(*args: Any, place: int = 0) -> Any:
            return self._compute(stage, kind, place, *args)

        if self._tensor is not None:
            rows = this_replica() // self._strategy.mesh.tensor
            return functools.partial(compute, place=rows * self._micro + micro)
        key = stage, kind
        if key not in self._functions:
            self._functions[key] = tf.function(compute, autograph=False)
        return self._functions[key]

    def traced(self, stage: int, kind: str) -> _Traced:
        """Returns what is known of a stage's function."""
        return self._traced[stage, kind]

    def _compute(
        self,
        number: int,
        kind: str,
        place: int,
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
            place: The number of the micro-batch, where each is traced.
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
        parts, parameters = self._replicas, weights
        local, total, *first = places
        low = first[0] if first else None
        share = _Share(local, total, parts, low=low, place=place)
        trained, others = self.variables_of(number)
        if self._tensor is not None:
            # Other passes read the same tensors.
            weights = list(map(tf.identity, weights))
            self._calls.owners.note([taken, data], share.place)
            self._calls.owners.note(weights, None)
        given: Writes = []
        sources: Writes = []
        for variable, value in [
            *zip(trained, weights, strict=True),
            *zip(others, held, strict=True),
        ]:
            own = sources if self.is_in_parts(variable) else given
            own.append((variable, value))
        join = None
        if self._tensor is not None:
            join = self._tensor.join(sources)
            given += self._tensor.given(join, trained)
        if self._state.generator is not None:
            keras_internals.lend_global_seed(self._state.generator)
        with contextlib.ExitStack() as stack:
            # Keras would divide a loss by the number of replicas.
            stack.enter_context(as_one_replica())
            stack.enter_context(sharing(share))
            rows = [t for t, _ in taken if t.shape.rank and not t.shape[0]]
            scope = stack.enter_context(
                StepScope(
                    self._model,
                    given,
                    None,
                    self._refuse_other_stage,
                    {id(v): source for v, source in sources},
                    join,
                    owners=self._calls.owners,
                    place=share.place,
                )
            )
            scope.share, scope.state = share, self._state
            scope.read_aside = self._calls.read_aside
            scope.inline = self._calls.inline
            scope.read_part = self._refuse_metric
            know_rows(scope, [rows, data], share)
            stack.enter_context(noting(scope.proof))
            stack.enter_context(drawing(share, [rows, data]))
            if self._tensor is not None:
                stack.enter_context(self._tensor.within_model())
            made, tensors = self._outputs_of(stage, taken, kind == "train")
            y_pred: Any = None
            if number == len(self._stages.every) - 1:
                y_pred = keras_internals.structured(
                    self._model, [tensors[k] for k in self._stages.outputs]
                )
            losses: list[tf.Tensor] = []
            increments: Writes = []
            if kind != "predict":
                # Regularizers of a weight count where it is stored.
                losses, increments = self._contributions(
                    scope, data, y_pred, share, self.stored_in(number), kind
                )
        losses = [tf.add_n(losses)] if losses else []
        self._check_direct(scope.within)
        self._check_scope(scope, trained)
        if share.replicas > 1:
            check_parts(scope)
        writes = self._written(scope, given, share, increments)
        before = {id(variable): value for variable, value in given}
        for variable, increment in increments:
            value = before[id(variable)] + increment
            writes[id(variable)] = (variable, value)
        sent = stage.outputs if y_pred is None else self._stages.outputs
        ends = [made[key][0] for key in sent] + losses
        self._traced[number, kind] = _Traced(
            [variable for variable, _ in writes.values()],
            [
                _looks_up_alike(scope, weight, variable.path)
                for variable, weight in zip(trained, weights, strict=True)
            ],
            {
                key: _reached(end, parameters, [given for given, _ in taken])
                for key, end in zip(
                    [*sent, *[None] * len(losses)], ends, strict=True
                )
            },
        )
        return (
            [made[key] for key in sent],
            losses[0] if losses else None,
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
                self._by_head.add(kind)
                _log.info(
                    "pipeline: the loss or a metric needs all rows, so all "
                    "micro-batches go forward before one goes back: %s",
                    str(reason).split("Received: ")[1].split(". ")[0],
                )
                scope.reset(mark)
        own_loss = self._head is not None and self._head.has_own_loss
        if own_loss and kind in self._by_head:
            if scope.losses:
                raise ConfigurationError(
                    "On a pipeline a compute_loss of your own sees no losses "
                    "of layers. Received: a layer that calls add_loss. Leave "
                    "out one of the two, or use 'fsdp'."
                )
            return [], []
        own = self._loss.of_layers(scope.losses, share, trained)
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
        x, y, sample_weight = structures.unpacked(data)
        loss, terms = self._loss(
            x,
            y,
            y_pred,
            sample_weight,
            scope.losses,
            share,
            training,
            trained,
        )
        given = x, y, y_pred, sample_weight
        if training:
            _, late = self._metrics.computed_before(given, scope)
            if late is not None:
                raise reads_late(late)
        else:
            self._metrics.computed(given)
        increments: Writes = []
        for mean, part in zip(self._loss.trackers, terms, strict=False):
            increments += batch_increments(mean, part, share)
        return [loss], increments

    def _outputs_of(
        self,
        stage: Stage,
        taken: list[tuple[tf.Tensor, tf.Tensor | None]],
        training: bool,
    ) -> tuple[Values, dict[Key, tf.Tensor]]:
        """Runs the calls of a stage.

        Returns:
            What is sent of all that it has and has made, and that itself.
        """
        values: Values = dict(zip(stage.inputs, taken, strict=True))
        tensors = {
            key: self._as_made(key, keras_internals.with_mask(tensor, mask))
            for key, (tensor, mask) in values.items()
        }

        def call() -> list[Any]:
            for each in stage.calls:
                made = each.run([tensors[k] for k in each.inputs], training)
                tensors.update(zip(each.outputs, made, strict=True))
            return []

        keras_internals.as_one_call(call, training=training)
        for key, tensor in tensors.items():
            if key not in values:
                sent, self._together[key] = keras_internals.taken_apart(tensor)
                if len(sent) > 1:
                    raise ConfigurationError(
                        "On a pipeline a softmax is over the last axis. "
                        f"Received: an output of the shape {tensor.shape} that "
                        "is one over another. Move its axis to the end, or use "
                        "'fsdp'."
                    )
                values[key] = (sent[0], keras_internals.mask_of(tensor))
        return values, tensors

    def _as_made(self, key: Key, sent: tf.Tensor) -> tf.Tensor:
        """Returns what a stage has made, of what it has sent."""
        together = self._together.get(key)  # None of the model's inputs.
        if together is None:
            return sent
        return keras_internals.with_mask_of(together([sent]), sent)

    def _by_rule(
        self,
        variable: keras.Variable,
        value: tf.Tensor,
        before: tf.Tensor | None,
        proof: RowProof,
        share: BatchShare,
    ) -> tf.Tensor:
        """What a micro-batch writes, to be brought together by the rule."""
        if self._state.is_declared_mean(variable):
            return share.select(value, before)
        return super()._by_rule(variable, value, before, proof, share)

    def _check_scope(
        self, scope: StepScope, trained: list[keras.Variable]
    ) -> None:
        known = {id(variable) for variable in trained}
        read = [v.path for v in scope.seen.values() if id(v) not in known]
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

    def _refuse_metric(self, variable: keras.Variable) -> None:
        """Refuses what a stage reads of a metric, besides updating it."""
        if self._state.is_split(variable):
            raise ReadRefused(
                "A stage of a pipeline reads no metric, which is updated "
                f"behind the last one. Received: {variable.path}, which a "
                "layer or the loss of a micro-batch reads. Use 'mirrored', "
                "'fsdp' or 'tensor'."
            )

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
            # Losses and metrics draw from what no layer has.
            others += [*self._state.metrics, *self._free_seeds()]
        others += filter(self.is_global_seed, self._state.seeds)
        return own, list({id(v): v for v in others}.values())

    def _free_seeds(self) -> list[keras.Variable]:
        held = {id(v) for each in self._stages.every for v in each.variables}
        return [seed for seed in self._state.seeds if id(seed) not in held]

    def is_in_parts(self, variable: keras.Variable) -> bool:
        """Returns whether a weight is joined where layers read it whole."""
        return self._tensor is not None and keras_internals.is_split(variable)

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """Returns what a replica computes with of a variable. On a replica."""
        if not self.is_in_parts(variable):
            return tf.identity(variable.value)
        return tf.identity(computed([keras_internals.stored(variable)])[0])

    @property
    def same_loss(self) -> int:
        """How many replicas compute the same loss, each its share of it."""
        return self._strategy.mesh.tensor

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
    def trainable(self) -> list[keras.Variable]:
        """The trainable weights of the model."""
        return list(self._model.trainable_variables)

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
        if self._strategy.mesh.ranges == 1:
            return
        raise ConfigurationError(
            "Where stages share a table, all look up rows of each example, or "
            f"all the same for every example. Received: {table.path}, which "
            "is looked up both ways, on several replicas. Name "
            "pipeline_stages so that both are in one stage, or use 'fsdp'."
        )

    def check_apart(self, kind: str) -> None:
        """Refuses what does not go with stages in several processes.

        Args:
            kind: `train`, `evaluate` or `predict`, of which all stages were
                traced.

        Raises:
            ConfigurationError: A stage draws without a seed of its own, or
                several replicas have a loss that needs all rows.
        """
        for number in range(len(self._stages.every)):
            if any(map(self.is_global_seed, self.traced(number, kind).written)):
                raise ConfigurationError(
                    "Stages in several processes draw from the seeds of their "
                    "layers. Received: draws without a seed in the stage of "
                    f"{self._stages.every[number].first_name}. Draw from a "
                    "keras.random.SeedGenerator that the layer keeps, or let "
                    "each process have all stages."
                )
        if kind in self._by_head and self._strategy.mesh.ranges > 1:
            raise ConfigurationError(
                "A loss or a metric that needs all rows goes with one replica "
                "where stages are in several processes. Received: "
                f"{self._strategy.mesh.ranges} replicas. Use data=1 and "
                "fsdp=1, a loss that adds up over rows, or let each process "
                "have all stages."
            )

    def device(self, stage: int) -> str:
        """Returns the device of a stage on this replica."""
        place = this_replica() - self._strategy.first_replica
        return self._strategy.devices_of(stage)[place]

    def pair(self, one: int, other: int) -> int:
        """Returns the number of two stages of this replica among all pairs."""
        mesh = self._strategy.mesh
        first, second = sorted((one, other))
        place = this_replica() // mesh.blocks
        return (place * mesh.pipeline + first) * mesh.pipeline + second

    @property
    def stages_here(self) -> range:
        """The stages of this process."""
        return self._strategy.stages_here

    def inputs_of(self, data: Any) -> list[tf.Tensor]:
        """Returns the model's inputs in order, of their types."""
        x, _, _ = structures.unpacked(data)
        return keras_internals.flat_inputs(self._model, x)

    def orders(self, kind: str) -> list[list[Pass]]:
        """Returns the passes of each stage in a step."""
        schedule = self._strategy.schedule
        if kind != "train" or kind in self._by_head:
            schedule = "gpipe"
        every = orders(schedule, len(self._stages.every), self._micro)
        if kind == "train":
            return every
        return [order[: self._micro] for order in every]

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
            computed = structures.or_another(first, after, local)
            data = structures.rows(data, *computed)
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

    def packed(self, sent: list[Any]) -> Any:
        """Returns the outputs of the model, of what stages have sent."""
        outputs = list(map(self._as_made, self._stages.outputs, sent))
        return keras_internals.structured(self._model, outputs)


def _reached(
    end: tf.Tensor, weights: list[tf.Tensor], inputs: list[tf.Tensor]
) -> tuple[set[int], set[int]]:
    """Returns the places of the weights and inputs that a gradient flows to.

    The gradient of a function is zero, not None, where none does.

    Args:
        end: What it is the gradient of.
        weights: The weights of a stage.
        inputs: What the stage takes from others.
    """
    seen, tensors = set[str](), [end]
    while tensors:
        tensor = tensors.pop()
        flows = not (tensor.dtype.is_integer or tensor.dtype.is_bool)
        if tensor.name in seen or not flows or tensor.dtype == tf.string:
            continue
        seen.add(tensor.name)
        if tensor.op.type != "StopGradient":
            tensors += tensor.op.inputs

    def places(some: list[tf.Tensor]) -> set[int]:
        return {place for place, each in enumerate(some) if each.name in seen}

    return places(weights), places(inputs)


def _looks_up_alike(scope: StepScope, weight: tf.Tensor, path: str) -> bool:
    """Returns whether rows of a weight are looked up, the same by all parts.

    Args:
        scope: That of the function of a stage.
        weight: The weight, an argument of that function.
        path: Its path, for a message.

    Raises:
        ConfigurationError: Some are those of examples, and some are not.
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
    alike = {*map(scope.is_alike, lookups)}
    if len(alike) > 1:
        raise refuse_mixed(path)
    return alike == {True}
