"""The synchronous engine where the layers of a replica are in stages.

build     cut the model, and put each weight on the device of its stage, in
          parts where replicas compute parts of layers
step      micro-batches through the stages (`step.py`)
update    on the devices of the stages (`update.py`)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.exchange.composites import without_another
from mgpu_tf.engine.step import overwritten
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.step.tensor_parallel.plan import plan_of
from mgpu_tf.engine.step.update import Update, unwrap
from mgpu_tf.engine.synchronous.engine import SynchronousEngine
from mgpu_tf.engine.synchronous.pipeline.head import Head
from mgpu_tf.engine.synchronous.pipeline.schedule import orders, timing
from mgpu_tf.engine.synchronous.pipeline.split import (
    Stages,
    check_model,
    check_rows,
    stages_of,
)
from mgpu_tf.engine.synchronous.pipeline.state import BlockState, PipelineState
from mgpu_tf.engine.synchronous.pipeline.step import PipelineStep
from mgpu_tf.engine.synchronous.pipeline.update import PipelineUpdate
from mgpu_tf.engine.synchronous.sharded import check_not_lazy, needs_whole
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Split
from mgpu_tf.options import StepOptions
from mgpu_tf.reports.pipeline_plan import PipelinePlan
from mgpu_tf.reports.pipeline_trace import ShareTrace, StepTrace
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.split.pipeline import StagedStrategy

_log = logging.getLogger("mgpu_tf")


class PipelineEngine(SynchronousEngine):
    """Trains models whose layers are in stages, each on its device.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: A strategy with stages.
        options: How steps are made.

    Raises:
        ConfigurationError: The model is not compiled, was made elsewhere, or
            has what does not go with stages.
    """

    _strategy: StagedStrategy
    _step: PipelineStep
    _state: PipelineState

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
    ) -> None:
        if keras_internals.runs_eagerly(model):
            raise ConfigurationError(
                "A pipeline proves in a graph that micro-batches can be "
                "computed one after another. Received: run_eagerly=True. "
                "Leave it out, or debug with 'one_device' or 'mirrored'."
            )
        super().__init__(model, strategy, options)
        self._stages: Stages | None = None
        self._plan: PipelinePlan | None = None
        self._parts: TensorParallel | None = None
        check_model(model)
        _check_options(options)
        if self._strategy.mesh.blocks > 1:
            _check_apart(model, options)
        if self._jit_compile:
            _log.info(
                "jit_compile=True: XLA compiles for one device; the stages "
                "of %s run without",
                model.name,
            )
        if model.built and self._strategy.mesh.tensor == 1:
            self._cut({})

    def build(self, source: Source) -> None:
        """Creates all variables, each where it belongs; as in `Engine`."""
        if source.batch_size is not None:
            self._strategy.check_micro_batches(source.batch_size)
        self.build_layers(source, training=True)
        super().build(source)

    def build_layers(self, source: Source, *, training: bool = False) -> None:
        """Creates the variables of layers, in stages; as in `Engine`."""
        super().build_layers(source, training=training)
        if self._stages is not None:
            return
        if self._strategy.mesh.tensor == 1:
            self._cut({})
            return
        plan = plan_of(self._model, self._strategy, source.example())
        self._cut({id(variable): split for variable, split in plan.splits})
        self._parts = TensorParallel(self._model, self._strategy, plan)
        check_not_lazy(self._model, self._parts.tables)

    def _cut(self, parts: dict[int, Split]) -> None:
        """Cuts the model, and moves its variables to their stages.

        Args:
            parts: How weights are divided, by identity, where layers are
                computed in parts.
        """
        strategy = self._strategy
        count = strategy.mesh.pipeline
        stages = stages_of(self._model, count, strategy.begins)
        if strategy.mesh.ranges * strategy.micro_batches > 1:
            check_rows(self._model)
        owned = {
            id(variable): number
            for number, stage in enumerate(stages.every)
            for variable in stage.variables
        }
        if strategy.mesh.blocks > 1:
            _check_optimizers(self._model)
        optimizers = [
            part
            for optimizer in keras_internals.optimizers_of(self._model)
            for part in keras_internals.parts(optimizer)
            if part.built
        ]
        splits = {
            id(variable): parts[id(variable)]
            if id(variable) in parts
            else strategy.split_of(keras_internals.stored(variable), number)
            for number, stage in enumerate(stages.every)
            for variable in stage.variables
        }
        kept: dict[int, int] = {}
        for optimizer in optimizers:
            for weight, own in keras_internals.kept_for_weights(optimizer):
                place = kept[id(own)] = owned.get(id(weight), 0)
                if own.shape == weight.shape:
                    splits[id(own)] = splits.get(id(weight))
                elif strategy.mesh.blocks > 1:
                    splits[id(own)] = strategy.within(own.shape, place, 1)
        every = [
            *self._model.variables,
            *(v for optimizer in optimizers for v in optimizer.variables),
        ]
        places = owned | kept
        for key, variable in {id(v): v for v in every}.items():
            if key in places:
                with (
                    strategy.scope(),
                    strategy.placing(places[key], splits.get(key)),
                ):
                    keras_internals.store_again(variable)
        for number, stage in enumerate(stages.every):
            for variable in stage.borrowed:
                _log.info(
                    "pipeline: %s is stored in stage %d and sent to stage %d",
                    variable.path,
                    owned[id(variable)],
                    number,
                )
        self._stages = stages
        self._plan = self._planned(stages)
        _log.info("pipeline: %s", self._plan.text())

    def _planned(self, stages: Stages) -> PipelinePlan:
        schedule = self._strategy.schedule
        micro_batches = self._strategy.micro_batches
        plan = timing(orders(schedule, len(stages.every), micro_batches))
        return PipelinePlan(
            stages=[stage.first_name for stage in stages.every],
            parameters=[stage.parameters for stage in stages.every],
            micro_batches=micro_batches,
            schedule=schedule,
            bubble=plan.bubble,
            live=plan.live,
        )

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Returns the stages of the model, once it is built."""
        return self._plan

    def trace(self, source: Source) -> StepTrace:
        """Refuses: a step is not computed one operation after another."""
        raise _no_trace()

    def trace_outputs(self, source: Source) -> list[ShareTrace]:
        """Refuses, as `trace`."""
        raise _no_trace()

    def _make_state(self) -> PipelineState:
        blocks = self._strategy.mesh.blocks > 1
        kind = BlockState if blocks else PipelineState
        state = kind(self._model, self._strategy)
        state.add_global_seed(self._strategy)
        state.draws_alike = self._options.random == "equal"
        if self._returns_logs():
            state.keep_metrics_whole()
        return state

    @property
    def _cuts(self) -> bool:
        """Whether rows of a batch are computed apart; micro-batches are."""
        parts = self._local.ranges * self._strategy.micro_batches
        return parts > 1

    def _make_step(self) -> PipelineStep:
        head = Head(
            self._model,
            self._loss,
            self._state,
            self._local.ranges,
            self._exchange,
            self._parts,
            self._strategy.mesh.tensor,
        )
        return self._step_with(self._loss, self._state, head)

    def _step_with(
        self, loss: Any, state: PipelineState, head: Head | None = None
    ) -> PipelineStep:
        assert self._stages is not None
        return PipelineStep(
            self._model,
            loss,
            state,
            self._strategy,
            self._stages,
            recompute=self._options.recompute == "stages",
            head=head,
            tensor=self._parts,
        )

    def _predict_step(self, *arguments: Any) -> Any:
        parts = self._parts
        with parts.in_place() if parts else contextlib.nullcontext():
            return super()._predict_step(*arguments)

    @property
    def _update_type(self) -> type[Update]:
        return PipelineUpdate

    def _local_sums(
        self, optimizers: list[keras.optimizers.Optimizer]
    ) -> list[keras.Variable]:
        if self._strategy.mesh.fsdp * self._strategy.mesh.tensor > 1:
            return []
        return super()._local_sums(optimizers)

    @contextlib.contextmanager
    def _around_authored(self) -> Iterator[None]:
        """Computes each layer on the device of its stage, one after another.

        A step of the author's own has no micro-batches.
        """
        assert self._stages is not None
        stage_of = {
            id(call.layer): number
            for number, stage in enumerate(self._stages.every)
            for call in stage.calls
        }

        def on_its_device(
            layer: keras.layers.Layer,
            own: Callable[..., Any],
            *arguments: Any,
            **named: Any,
        ) -> Any:
            if tf.distribute.in_cross_replica_context():
                return own(*arguments, **named)
            devices = self._strategy.devices_of(stage_of[id(layer)])
            first = self._strategy.first_replica
            replica = this_replica(where_all_are_one=first)
            with tf.device(devices[replica - first]):
                return own(*arguments, **named)

        layers = [
            layer
            for layer in keras_internals.layers_of(self._model)
            if id(layer) in stage_of
        ]
        with keras_internals.calls_replaced(layers, on_its_device):
            yield

    def _predicting(self) -> Callable[..., Any]:
        state = self._state if self._prepared else self._make_state()
        step = self._step_with(None, state)

        def on_replica(
            rows: Any, local: tf.Tensor, total: tf.Tensor, low: Any
        ) -> Any:
            share = self._share(local, total, low)
            outputs, writes = step.outputs(rows, share)
            state.write(writes)
            return without_another(outputs, share.local)

        return on_replica

    def _replica_gradients(
        self, data: Any, local: tf.Tensor, total: tf.Tensor, low: Any
    ) -> tuple[list[Any], dict[str, tf.Tensor], tf.Tensor | None]:
        step = self._step
        scale = self._model.optimizer.scale_loss
        share = self._share(local, total, low)
        gradients, values, logs = step.gradients(data, share, scale)
        gradients = overwritten.contributions(
            gradients, step.held(), self._local.total
        )
        self._update.present = step.present
        self._update.alike = step.alike
        self._state.write(list(zip(step.written, values, strict=True)))
        return gradients, logs, self._own_square(gradients)

    def _replica_evaluate(
        self, data: Any, local: tf.Tensor, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        share = self._share(local, total, low)
        _, writes, logs = self._step.forward(data, share, training=False)
        self._state.write(writes)
        return logs


def _no_trace() -> ConfigurationError:
    return ConfigurationError(
        "A trace goes with strategies whose replicas have one device. "
        "Received: a pipeline. Trace the model with 'mirrored'."
    )


def _check_options(options: StepOptions) -> None:
    if options.recompute not in (None, "stages"):
        raise ConfigurationError(
            "A pipeline computes stages again, not layers. Received: "
            f"recompute={options.recompute!r}. Use recompute='stages'."
        )
    if options.step_parts > 1 or options.auto_micro_batch:
        raise ConfigurationError(
            "A pipeline cuts its rows into micro-batches already. Received: "
            f"step_parts={options.step_parts}, "
            f"auto_micro_batch={options.auto_micro_batch}. Use a larger "
            "micro_batches."
        )


def _check_apart(model: keras.Model, options: StepOptions) -> None:
    """Refuses what stages in several processes do not have."""
    for name in ("train_step", "test_step", "compute_metrics"):
        if keras_internals.overrides(model, name):
            raise ConfigurationError(
                "Stages in several processes go with Keras's own train_step, "
                f"test_step and compute_metrics. Received: {name} of "
                f"{type(model).__name__}. Let each process have all stages, "
                "or use 'fsdp'."
            )
    for name in ("noise_scale", "check_replicas_every"):
        if getattr(options, name):
            raise ConfigurationError(
                f"{name} goes with stages in one process. Received: "
                f"{name}={getattr(options, name)} with stages in several. "
                "Leave it out, or let each process have all stages."
            )


def _check_optimizers(model: keras.Model) -> None:
    for optimizer in keras_internals.optimizers_of(model):
        for part in keras_internals.parts(unwrap(optimizer)[1]):
            if needs_whole(part) or keras_internals.handles_gradients(part):
                raise ConfigurationError(
                    "Stages in several processes update weights where they "
                    "are, element by element. Received: "
                    f"{type(part).__name__}, which needs whole weights or all "
                    "gradients. Use Adam or another such optimizer, let each "
                    "process have all stages, or use 'fsdp'."
                )
