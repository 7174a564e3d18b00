"""The asynchronous engine: workers that do not wait for each other.

The coordinator hands out pieces of work, a few steps each in one
`tf.function`; a worker reads weights, computes gradients and applies them on
the parameter servers, step by step:

    coordinator     examples, index of the step  ->  worker
    on the worker   forward, loss, gradients; metrics added up
    on the ps       clip -> apply -> count -> EMA
    coordinator     <-  steps, examples, sums of the metrics, staleness

What a piece of work returns is added up once, so step counts, examples and
metrics are exact, also where a lost worker's work was done again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.asynchronous.piece import Piece, predict
from mgpu_tf.engine.asynchronous.schedule.feed import AsynchronousFeed
from mgpu_tf.engine.asynchronous.schedule.run import Run
from mgpu_tf.engine.asynchronous.schedule.work import Work
from mgpu_tf.engine.asynchronous.servers.packed_variables import Packs
from mgpu_tf.engine.asynchronous.servers.state import SharedStatistics
from mgpu_tf.engine.asynchronous.servers.update import AsynchronousUpdate
from mgpu_tf.engine.asynchronous.traced_workers import (
    once_each,
    outputs_by_share,
    predict_traced,
    received,
    shares_of,
)
from mgpu_tf.engine.author.state import ReplicaState
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.snapshot import Snapshot
from mgpu_tf.engine.step.base import (
    NO_VOTES,
    Engine,
    Execution,
    Logs,
    Votes,
)
from mgpu_tf.engine.step.losses import GlobalLoss
from mgpu_tf.engine.step.replica_step import ReplicaStep
from mgpu_tf.engine.step.traced import (
    Weights,
    batch_of,
    refuse_accumulation,
    undone,
)
from mgpu_tf.engine.step.update import unwrap
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.reports.pipeline_trace import ShareTrace, StepTrace
from mgpu_tf.strategies.parameter_server import ParameterServerStrategy

# Steps in a piece of work, where they fit into an execution of the trainer:
# more gain nothing, and with a worker as many are lost.
MOST_STEPS = 50


class AsynchronousEngine(Engine):
    """Trains, evaluates and predicts on workers and parameter servers.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: From `create_parameter_server_strategy`.
        options: How steps are made.

    Attributes:
        coordinator: TensorFlow's, which hands out work.
        next_step: Index of the next step to hand out, among all of the run.
        current: The epoch of training that is under way, or was last.

    Raises:
        ConfigurationError: The model asks for what cannot be made right.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ParameterServerStrategy,
        options: StepOptions,
    ) -> None:
        super().__init__(model, strategy, options)
        _refuse(model)
        for name in (
            "gradient_dtype",
            "recompute",
            "noise_scale",
            "check_replicas_every",
        ):
            value = getattr(options, name)
            if value:
                raise ConfigurationError(
                    f"{name} goes with synchronous strategies. Received: "
                    f"{name}={value!r} with parameter servers. Leave it out."
                )
        if options.step_parts > 1 or options.auto_micro_batch:
            raise ConfigurationError(
                "step_parts and auto_micro_batch go with synchronous "
                f"strategies. Received: step_parts={options.step_parts}, "
                f"auto_micro_batch={options.auto_micro_batch} with parameter "
                "servers. Use a smaller batch."
            )
        if options.on_nan == "restore" or options.max_loss is not None:
            raise ConfigurationError(
                "Parameter servers apply the gradients of a batch while others "
                "are computed, so no batch can be left out. Received: "
                f"on_nan={options.on_nan!r}, max_loss={options.max_loss}. Use "
                "on_nan='stop' without max_loss."
            )
        self._options = options
        self.strategy = strategy
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self.next_step = 0
        self.current: Run | None = None
        self._pieces: dict[Any, Any] = {}
        self._prepared = False
        self._state: ReplicaState
        self._step: ReplicaStep
        self._loss: GlobalLoss
        self._update: AsynchronousUpdate
        self._packs: Packs
        self._shared: SharedStatistics

    @property
    def most_steps(self) -> int:
        """The most steps of a piece of work: whole updates."""
        return -(-MOST_STEPS // self.every) * self.every

    @property
    def every(self) -> int:
        """Steps in an update; 1 before there are any."""
        return self._update.every if self._prepared else 1

    @property
    def waits_for_callbacks(self) -> bool:
        """Whether steps are held back: with one worker, which is exact."""
        return self.strategy.num_workers == 1

    def prepare(self, source: Source) -> None:
        """Creates what training and evaluation need; as in `Engine`."""
        if self._prepared:
            return
        with keras_internals.built_beside(self._model.optimizer):
            self.build(source)
        self._loss = GlobalLoss(self._model)
        replicas = self._strategy.num_replicas_in_sync
        self._state = ReplicaState(self._model, replicas, asynchronous=True)
        self._state.add_global_seed(self._strategy)
        self._step = ReplicaStep(self._model, self._loss, self._state, replicas)
        # Several GPUs of a worker each keep to their own copies.
        weights = self._model.trainable_variables if replicas == 1 else []
        several = keras_internals.written_in_steps(self._model)
        self._packs = Packs(weights, also=several if replicas == 1 else [])
        self._shared = SharedStatistics(
            self._model,
            self._state,
            packed=replicas == 1,
            workers=self.strategy.num_workers,
        )
        self._update = AsynchronousUpdate(
            self._model, self._strategy, self._packs, self._options
        )
        self._prepared = True

    def staleness(self) -> list[float]:
        """Returns how late gradients were in the last epoch; as in `Engine`."""
        return self.current.staleness.values if self.current else []

    def feed(
        self, source: Source, first: int = 0, *, chain: bool, training: bool
    ) -> AsynchronousFeed:
        """Returns where the epochs of a run read from; as in `Engine`."""
        del chain  # Arrays go on from epoch to epoch, and pass to pass.
        return AsynchronousFeed(self, source, first, training=training)

    def train(
        self,
        iterator: Any,
        steps: int,
        source: Source,
        seconds: float = 0.0,
        votes: Votes = NO_VOTES,
        ahead: int | None = None,
    ) -> Execution:
        """Runs training steps; as in `Engine`."""
        self._check_traces()
        self.prepare(source)
        settle = votes.save or votes.end
        known = len(self._pieces)
        done, examples = iterator.advance("train", steps, ahead, settle)
        return Execution(
            done,
            examples,
            iterator.logs(),
            seconds,
            votes,
            traced=len(self._pieces) > known,
        )

    def evaluate(
        self, iterator: Any, steps: int, source: Source, seconds: float = 0.0
    ) -> Execution:
        """Runs evaluation steps; as in `Engine`."""
        self._as_made = False
        self._check_traces()
        self.prepare(source)
        done, examples = iterator.advance("evaluate", steps)
        return Execution(done, examples, iterator.logs(), seconds)

    def predict(self, iterator: Any, source: Source) -> Any | None:
        """Runs one prediction step; as in `Engine`."""
        self._check_traces()
        self.build_layers(source)
        return iterator.next_outputs()

    def _adapt(self) -> None:
        changed = keras_internals.finalize_adapted(self._model)
        if changed and self._pieces:  # Workers compute with other numbers.
            keras_internals.trace_anew(self._model)

    def _check_traces(self) -> None:
        if self._traces_anew():
            raise ConfigurationError(
                "On 'parameter_server' steps are traced anew where a model is "
                "compiled, and nowhere else: workers compute ahead. Received: "
                "a new trace that was asked for, as by make_train_function("
                "force=True). Call model.compile in trainer.strategy.scope()."
            )

    def trace(self, source: Source) -> StepTrace:
        """Runs one step on each worker, and undoes them; as in `Engine`."""
        self.prepare(source)
        refuse_accumulation(self.every)
        if unwrap(self._model.optimizer)[0] is not None:
            raise ConfigurationError(
                "On 'parameter_server' a trace shows gradients that are not "
                "scaled. Received: a LossScaleOptimizer. Trace without it."
            )
        piece = self._piece(measured=False)

        def run(work: Work) -> Callable[..., Any]:
            return lambda *given: piece.trace(work, *given)

        with undone(self):
            weights = Weights(self._model)
            done = once_each(self, run, source, training=True)
            changed = weights.changed()
        paths = [
            variable.path
            for variable in itertools.compress(
                self._model.trainable_variables, self._step.present
            )
        ]
        sums = sum(metrics for *_, metrics in done.values())
        return StepTrace(
            # Of a dataset each worker reads a share of its own.
            [batch_of(source, k) for k in done if source.rows() is not None],
            shares_of(done, paths, self.metrics),
            received(done, paths, changed),
            changed,
            self.metrics(sums),
        )

    def trace_outputs(self, source: Source) -> list[ShareTrace]:
        """Predicts one batch on each worker; as in `Engine`."""
        self.build_layers(source)
        generator = keras_internals.global_seed_generator()

        def run(work: Work) -> Callable[..., Any]:
            return lambda iterator, arguments, _: predict_traced(
                self._model, self.strategy, work, iterator, arguments, generator
            )

        done = once_each(self, run, source, training=False)
        return outputs_by_share(done)

    def finish(self, iterator: Any) -> Execution:
        """Waits for what is under way; as in `Engine`."""
        return iterator.finish()

    def is_lost(self) -> bool:
        """Returns whether a parameter server is gone; as in `Engine`."""
        probes = {v.value.device: v.value for v in self._model.variables}
        try:
            for probe in probes.values():
                probe.numpy()
        except tf.errors.OpError:
            return True
        return False

    def function(self, kind: str, work: Work, measured: bool) -> Any:
        """Returns the function of a piece of work, traced once for each kind.

        Args:
            kind: `train`, `evaluate` or `predict`.
            work: What it reads.
            measured: Whether it measures staleness.
        """
        key = (kind, work.key, measured)
        if key not in self._pieces:
            python = (
                self._predicting(work)
                if kind == "predict"
                else self._stepping(kind == "train", work, measured)
            )
            self._pieces[key] = tf.function(
                self.kernels.around(python),
                autograph=False,
                reduce_retracing=True,
            )
        return self._pieces[key]

    def _predicting(self, work: Work) -> Callable[..., Any]:
        def run(iterator: Any, arguments: Any, steps: Any, first: Any) -> Any:
            del first
            return predict(
                self._model, self.strategy, work, iterator, arguments, steps
            )

        return run

    def _stepping(
        self, training: bool, work: Work, measured: bool
    ) -> Callable[..., Any]:
        piece = self._piece(measured=measured)

        def run(iterator: Any, arguments: Any, steps: Any, first: Any) -> Any:
            return piece(training, work, iterator, arguments, steps, first)

        return run

    def _piece(self, *, measured: bool) -> Piece:
        return Piece(
            self._model,
            self.strategy,
            self._step,
            self._state,
            self._update,
            self._packs,
            self._shared,
            measured=measured,
        )

    def steps_made(self) -> int:
        """Returns the count of steps on the parameter server."""
        return int(self._update.steps_made())

    def snapshot(self) -> Snapshot:
        """Returns what takes and puts back all; as in `Engine`."""
        return super().snapshot().before_taking(self._publish)

    def metrics(self, sums: np.ndarray) -> Logs:
        """Returns the metrics by name from the sums of their state."""
        with keras.StatelessScope(state_mapping=self._split(sums)):
            logs = flat_logs(self._model.get_metrics_result())
        return {name: _number(value) for name, value in logs.items()}

    def read_metrics(self) -> np.ndarray:
        """Returns the state of the metrics on the parameter servers."""
        parts = [np.ravel(v.numpy()) for v in self._state.metrics]
        return np.concatenate(parts).astype(np.float64)

    def write_metrics(self, sums: np.ndarray) -> None:
        """Writes the state of the metrics on the parameter servers."""
        for variable, value in self._split(sums):
            variable.assign(value)

    def _publish(self) -> None:
        if self.current is not None:
            self.current.publish()

    def _split(
        self, sums: np.ndarray
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        pairs, place = [], 0
        for variable in self._state.metrics:
            size = int(np.prod(variable.shape))
            part = sums[place : place + size].reshape(variable.shape)
            pairs.append((variable, tf.constant(part, variable.dtype)))
            place += size
        return pairs


def _refuse(model: keras.Model) -> None:
    if model.run_eagerly:
        raise ConfigurationError(
            "On 'parameter_server' workers get their steps as graphs. "
            "Received: run_eagerly=True. Debug with 'one_device' or "
            "'mirrored', or compile without it."
        )
    for method in ("train_step", "test_step"):
        if keras_internals.overrides(model, method):
            raise ConfigurationError(
                f"A {method} of your own does not go with "
                "'parameter_server', where it would count steps and metrics "
                f"wrongly. Received: {type(model).__name__}. Override "
                "compute_loss, or use another strategy."
            )


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array
