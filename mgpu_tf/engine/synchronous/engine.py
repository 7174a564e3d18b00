"""The synchronous engine: several steps in one `tf.function`, reduce first.

A training step is the same on every synchronous strategy:

    on each replica    forward, loss contribution, gradients of it
    `Update`           sum over replicas -> clip -> apply -> EMA

Gradients are reduced before the optimizer sees them, so what it does with
them (clipping above all) is the same on all replicas and the same as on one
device. The forward pass runs in a `keras.StatelessScope`: what layers and
metrics would write is collected, dropped where the replica had no example,
and only then written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.data import Feed, Form, Source, next_batch
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.state import (
    AgreedState,
    ReplicaState,
    Writes,
    state_for,
)
from mgpu_tf.engine.author.step_scope import Reading
from mgpu_tf.engine.exchange.composites import without_another
from mgpu_tf.engine.exchange.crossing import Exchange, ExchangedInLoop
from mgpu_tf.engine.exchange.global_batch import of_all
from mgpu_tf.engine.exchange.noise_scale import NoiseScale
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.random_rows import seed_for_rows, warned
from mgpu_tf.engine.recomputed import chosen_layers
from mgpu_tf.engine.row_proof import leave_others
from mgpu_tf.engine.snapshot import Snapshot, Variables
from mgpu_tf.engine.step import overwritten
from mgpu_tf.engine.step.base import (
    NO_VOTES,
    Engine,
    Execution,
    UnevenData,
    Votes,
)
from mgpu_tf.engine.step.calls.layer_calls import LayerCalls
from mgpu_tf.engine.step.losses import GlobalLoss
from mgpu_tf.engine.step.moments import normalizations
from mgpu_tf.engine.step.per_layer import LayerByLayer
from mgpu_tf.engine.step.replica_step import ReplicaStep, outputs_of_share
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.step.traced import (
    Watch,
    Weights,
    batch_of,
    one_by_one,
    refuse_accumulation,
    undone,
)
from mgpu_tf.engine.step.update import (
    Update,
    accumulated,
    accumulation_steps,
    unwrap,
)
from mgpu_tf.engine.step_watch import StepWatch, Watched
from mgpu_tf.engine.synchronous.outside_update import OutsideUpdate
from mgpu_tf.engine.synchronous.overridden_step import (
    AuthorStep,
    check_held,
)
from mgpu_tf.engine.synchronous.replica_check import (
    ReplicaCheck,
    check_copies,
)
from mgpu_tf.engine.synchronous.step_parts import in_parts
from mgpu_tf.engine.synchronous.traced_replicas import TracedReplicas
from mgpu_tf.engine.trace_again import TraceAgain, refusal_within
from mgpu_tf.engine.untracked import (
    UnheldVariables,
    seed_generators,
    untracked_variables,
)
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.reports.pipeline_trace import ShareTrace, StepTrace
from mgpu_tf.runtime import determinism
from mgpu_tf.runtime.room import lacks_room
from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.balance import balanced
from mgpu_tf.strategies.replicas.collectives import Groups, carrier_of
from mgpu_tf.strategies.replicas.mirrored import follow_one_replica
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.replicas.topology import LocalReplicas, balance_of

_log = logging.getLogger("mgpu_tf")

# What an engine keeps that is made anew for the same model.
_KEPT = (
    "_as_made",
    "_jit_compile",
    "_metrics_begin_at",
    "_noise",
    "_unheld",
    "_work",
)


class SynchronousEngine(Engine):
    """Trains, evaluates and predicts with a compiled model on a strategy.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: Any synchronous strategy.
        options: How steps are made.

    Raises:
        ConfigurationError: The model is not compiled, or was made elsewhere.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
    ) -> None:
        super().__init__(model, strategy, options)
        if strategy.num_replicas_in_sync > 1:
            follow_one_replica(strategy)
        if options.check_replicas_every:
            check_copies(strategy)
        eager = keras_internals.runs_eagerly(model)
        if eager:
            _check_eager(options)
        if model.built:
            chosen_layers(model, options.recompute)
        self._replica_check: ReplicaCheck | None = None
        self._unheld = UnheldVariables(strategy)
        warned.clear()  # Another model, or another strategy, is warned anew.
        self._options = options
        self._local = topology_of(strategy).local
        # Without a graph nothing is proven: each replica has all rows.
        self._gathers = eager and self._local.ranges > 1
        if self._gathers:
            self._rows = Exchange(strategy, self._local, options)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._authored: dict[str, AuthorStep] = {}
        self._prepared = False
        self._noise: NoiseScale | None = None
        # When the gradients of the step that is traced were there, and what
        # this worker has computed since the shares were last chosen.
        self._computed: tf.Tensor | None = None
        self._seconds: Callable[[], tf.Tensor] = determinism.seconds
        self._work = Work()
        self._exchange: Exchange | None = None
        # What a reset has set metrics to, until a step reads it.
        self._metrics_begin_at: Writes = []
        # In which replicas call layers to predict.
        self._calls: LayerCalls | None = None
        self._loss: GlobalLoss
        self._state: ReplicaState
        # That of steps of the author's own.
        self._agreed: ReplicaState
        # That of the last execution, which metrics are held as.
        self._held: ReplicaState
        self._step: ReplicaStep
        self._update: Update
        if strategy.num_replicas_in_sync > 1:
            self._catch_outside()

    def _renew(self) -> None:
        """Makes all that follows from the model anew, if its author asks.

        Such as after a layer was frozen, or given another attribute, in a
        callback. What a run has counted stays.
        """
        if not self._traces_anew():
            return
        kept = {name: vars(self)[name] for name in _KEPT}
        self.__init__(  # type: ignore[misc]
            self._model, self._strategy, self._options
        )
        vars(self).update(kept)

    def _catch_outside(self) -> None:
        """Lets optimizers apply outside of steps as in them."""
        if kind_of(self._strategy).stored_once:
            return  # As on one device.
        optimizers = keras_internals.optimizers_of(self._model)
        outside = OutsideUpdate(
            self._strategy,
            functools.partial(
                self._update_type, stored_once=False, options=self._options
            ),
            lambda: bool(self._local_sums(optimizers)),
        )
        every = [p for each in optimizers for p in keras_internals.parts(each)]
        keras_internals.catch_from_now_on(every, outside)

    def feed(
        self, source: Source, first: int = 0, *, chain: bool, training: bool
    ) -> Feed:
        """Returns where the epochs of a run read from; as in `Engine`."""
        method = "train_step" if training else "test_step"
        authored = keras_internals.overrides(self._model, method)
        source.cuts_each = authored and source.may_differ
        return Feed(source, self._strategy, first, chain=chain)

    @property
    def boundaries_matter(self) -> bool:
        """Whether it changes bits of the result where executions end.

        Statistics of which replicas have their own are averaged there, and
        the first step of an author's own is traced apart from the others.
        """
        averaged = self._state.averages and self._computing.ranges > 1
        authored = keras_internals.overrides(self._model, "train_step")
        return authored or (averaged and not self._state.stored_once)

    @property
    def can_be_compiled(self) -> bool:
        """Whether XLA can compile steps of training; as in `Engine`."""
        authored = keras_internals.overrides(self._model, "train_step")
        return (
            not authored
            and not keras_internals.runs_eagerly(self._model)
            and self._step.can_be_compiled
            and keras_internals.layers_support_jit(self._model)
        )

    def snapshot(self) -> Snapshot:
        """Returns what takes and puts back all; as in `Engine`."""
        kept, own = self._kept()
        variables = Variables.of(
            kept,
            own=own,
            is_sum=self._is_sum,
            once_means=[
                variable
                for variable in self._model.non_trainable_variables
                if keras.backend.is_float_dtype(variable.dtype)
            ],
            sums=self._sums(keras_internals.optimizers_of(self._model)),
        )
        snapshot = Snapshot(
            variables, self._strategy, stored_once=self._state.stored_once
        )
        snapshot.before_taking(self._unheld.check_saved)
        return snapshot.after_putting(self._adapt)

    def _kept(self) -> tuple[list[Any], list[Any]]:
        """Returns what a checkpoint has, and what each replica has alone."""
        optimizers = keras_internals.optimizers_of(self._model)
        kept = [
            *self._model.variables,
            *self._state.layers,
            *(v for o in optimizers for v in keras_internals.state_of(o)),
            *(() if self._noise is None else self._noise.variables),
            *untracked_variables(self._model),
        ]
        return kept, [*self._state.metrics, *self._local_sums(optimizers)]

    def check_replicas(self, step: int) -> None:
        """Checks that all replicas hold the same; as in `Engine`."""
        if self._replica_check is None:
            variables = self.snapshot().shared
            self._replica_check = ReplicaCheck(variables, self._strategy)
        self._replica_check(step)

    def _local_sums(
        self, optimizers: list[keras.optimizers.Optimizer]
    ) -> list[keras.Variable]:
        """Returns sums of gradients of which each replica has its own."""
        return self._sums(optimizers)

    def _sums(
        self, optimizers: list[keras.optimizers.Optimizer]
    ) -> list[keras.Variable]:
        """Returns sums of gradients of which replicas may have their own."""
        if keras_internals.overrides(self._model, "train_step"):
            return []  # They are of gradients of the global batch.
        return accumulated(optimizers)

    def _is_sum(self, variable: keras.Variable) -> bool:
        authored = keras_internals.overrides(self._model, "train_step")
        state = self._agreed if authored else self._state
        return not state.is_metric(variable) or state.is_split(variable)

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
        del ahead
        done = self._execute("train", iterator, steps, source, seconds, votes)
        self._work.add(done)
        if self._noise is None:
            return done
        return dataclasses.replace(done, logs=done.logs | self._noise.logs())

    @property
    def rate(self) -> float | None:
        """Rows per second of this worker; as in `Engine`."""
        balance = balance_of(self._strategy)
        if not balance.measured:
            return None
        low, _ = self._local.rows_of(self._work.examples, 0)
        _, high = self._local.rows_of(
            self._work.examples, self._local.count - 1
        )
        seconds, self._work = self._work.seconds, Work()
        return (high - low) / seconds if seconds > 0 else 0.0

    def rebalance(self, rates: Sequence[float]) -> bool:
        """Chooses the shares of workers; as in `Engine`."""
        balance = balance_of(self._strategy)
        shares = balanced(rates, balance.shares)
        if shares is None:
            return False
        self.take_shares(shares)
        return True

    def take_shares(self, shares: Sequence[int] | None) -> None:
        """Sets the shares of workers; as in `Engine`."""
        topology = topology_of(self._strategy)
        several = topology.num_workers > 1
        count = topology.num_workers if several else topology.local.total
        if shares is not None and len(shares) != count:
            shares = None
        chosen = None if shares is None else tuple(shares)
        balance_of(self._strategy).shares = chosen
        self._local = topology_of(self._strategy).local

    def reset_metrics(self, *, first: bool = False) -> None:
        """Sets every metric of the model to its beginning; as in `Engine`."""
        as_made = first and self._as_made
        alone = self._local.total == 1 or self._state.stored_once
        # Before the reset itself, which reads what one replica holds.
        reset, reads = ({}, False) if alone else self._reset_to(as_made=False)
        kept = self._reset_to(as_made=True)[0] if as_made and not alone else {}
        super().reset_metrics(first=first)
        if alone:
            return
        self._metrics_begin_at = [
            (variable, value)
            for variable, value in self._state.made_with(
                reset, kept, as_made=as_made
            )
            if reads or np.any(value)
        ]

    def _reset_to(self, *, as_made: bool) -> tuple[dict[int, tf.Tensor], bool]:
        """Returns what a reset sets metrics to, and whether it reads them.

        By identity.
        """
        held = {id(variable) for variable in self._state.metrics}
        scope: keras.StatelessScope = Reading()
        with scope:
            keras_internals.reset_metrics(self._model, as_made=as_made)
        reads = not held.isdisjoint(scope.read)
        if reads:
            # Rare; traced anew, since a checkpoint changes what is traced.
            values = tf.function(
                lambda: self._strategy.run(self._held.whole_metrics)
            )()
            scope = keras.StatelessScope(
                zip(
                    self._held.metrics,
                    tf.nest.map_structure(self._first, values),
                    strict=True,
                )
            )
            with scope:
                keras_internals.reset_metrics(self._model, as_made=as_made)
        found = [
            (variable, scope.get_current_value(variable))
            for variable in self._state.metrics
        ]
        return {id(v): value for v, value in found if value is not None}, reads

    def evaluate(
        self, iterator: Any, steps: int, source: Source, seconds: float = 0.0
    ) -> Execution:
        """Runs evaluation steps; as in `Engine`."""
        self._as_made = False
        return self._execute("evaluate", iterator, steps, source, seconds)

    def predict(self, iterator: Any, source: Source) -> Any | None:
        """Runs one prediction step; as in `Engine`."""
        self._renew()
        self.build_layers(source)
        if self._exchange is None:
            # It makes variables, which a function may only once.
            self._exchange = self._make_exchange()
        form = source.form
        predict = self._function(
            "predict", form, lambda *args: self._predict_step(form, *args)
        )
        outputs, total, ended = _traced(predict, iterator)
        self._check_ended(ended, 0)
        if int(total) == 0:
            return None
        return tf.nest.map_structure(
            lambda t: t if isinstance(t, tf.RaggedTensor) else t.numpy(),
            outputs,
        )

    def trace(self, source: Source) -> StepTrace:
        """Runs the first step of training and undoes it; as in `Engine`.

        The step is the engine's own, one operation after another in place of
        a graph, so that values can be seen inside of it.
        """
        self.prepare(source)
        if keras_internals.overrides(self._model, "train_step"):
            raise ConfigurationError(
                "A trace goes with Keras's own train_step. Received: "
                f"{type(self._model).__name__}, which has its own."
            )
        scaler, optimizer = unwrap(self._model.optimizer)
        refuse_accumulation(accumulation_steps(optimizer))
        iterator = self.feed(source, chain=False, training=True).iterator(0, 1)
        replicas = TracedReplicas(self._strategy)
        losses = StepWatch(self._model, self._strategy, weights=False)

        def step(data: Any, local: Any, total: tf.Tensor, low: Any) -> Any:
            replicas.begin(data, local, total, optimizer, scaler)
            done = self._train_step(data, local, total, low)
            replicas.note_losses(self._strategy.run(losses.row))
            return done

        with undone(self), one_by_one():
            weights = Weights(self._model)
            self._update.watch = watch = Watch()
            try:
                one, notes = tf.constant(1, tf.int64), tf.zeros(3)
                logs = self._steps(step, source.form, iterator, one, notes)[4]
            finally:
                self._update.watch = None
            changed = weights.changed()
        paths = [
            variable.path
            for variable in itertools.compress(
                self._model.trainable_variables, self._update.present
            )
        ]
        return StepTrace(
            [batch_of(source, 0)] if source.totals_known else [],
            replicas.trained(paths, watch.local),
            replicas.received(paths, watch.received),
            changed,
            {name: float(value) for name, value in logs.items()},
        )

    def trace_outputs(self, source: Source) -> list[ShareTrace]:
        """Predicts one batch; as in `Engine`."""
        self.build_layers(source)
        self._begin()
        iterator = self.feed(source, chain=False, training=False).iterator(0)
        data, local, total, low = self._next(iterator, source.form)
        on_replica = self._predicting()
        with one_by_one(), self._in_place_to_predict():
            outputs = self._strategy.run(
                on_replica, args=(data, local, total, low)
            )
        replicas = TracedReplicas(self._strategy)
        replicas.begin(data, local, total)
        return replicas.predicted(outputs)

    def prepare(self, source: Source) -> None:
        """Creates what training and evaluation need; as in `Engine`."""
        if self._prepared:
            return
        self.build(source)
        overwritten.check(
            self._model,
            self._strategy,
            self._options,
            replicas=self._local.total,
        )
        self._exchange = self._make_exchange()
        self._loss = GlobalLoss(self._model)
        self._state = self._make_state()
        if self._options.noise_scale and self._noise is None:
            self._noise = self._make_noise_scale()
        self._update = self._make_update()
        self._trained = self._model.trainable_variables
        self._step = self._make_step()
        authored = keras_internals.overrides(self._model, "train_step")
        options = self._options
        goes_back = options.on_nan == "restore" or options.max_loss is not None
        if authored and goes_back:
            raise ConfigurationError(
                "on_nan='restore' and max_loss go with Keras's own train_step. "
                f"Received: {type(self._model).__name__}, which has its own. "
                "Use on_nan='stop' without max_loss."
            )
        if authored and (options.step_parts > 1 or options.auto_micro_batch):
            raise ConfigurationError(
                "step_parts and auto_micro_batch go with Keras's own "
                f"train_step. Received: {type(self._model).__name__}, which "
                "has its own. Use a smaller batch."
            )
        if authored and self._options.recompute is not None:
            raise ConfigurationError(
                "recompute goes with Keras's own train_step. Received: "
                f"recompute={self._options.recompute!r} with "
                f"{type(self._model).__name__}, which has its own. Leave it "
                "out."
            )
        if authored and self._local.total > 1:
            check_held(self._model)
        self._agreed = self._make_agreed_state()
        self._held = self._state
        self._log_statistics()
        self._prepared = True

    def _log_statistics(self) -> None:
        """Says once which layers take the statistics of each replica."""
        own = [
            layer.name
            for layer in normalizations(self._model)
            if layer.trainable and not layer.synchronized
        ]
        if own and self._cuts:
            _log.info(
                "BatchNormalization takes the statistics of the rows of each "
                "replica in %d layers (%s, ...); with batch_normalization="
                "'synchronized' those of the global batch, as on one device",
                len(own),
                own[0],
            )

    @property
    def _cuts(self) -> bool:
        """Whether rows of a batch are computed apart."""
        return self._computing.ranges > 1

    @property
    def _computing(self) -> LocalReplicas:
        """The replicas here, and which of them compute the same rows."""
        if not self._gathers:
            return self._local
        return dataclasses.replace(
            self._local, bounds=None, same_rows=self._local.total
        )

    @property
    def _draws_alike(self) -> bool:
        """Whether replicas draw their rows of what one device draws."""
        cuts = self._cuts or self._options.step_parts > 1
        return self._options.random == "equal" and cuts

    def _make_step(self) -> ReplicaStep:
        return ReplicaStep(
            self._model,
            self._loss,
            self._state,
            self._computing.ranges,
            self._layers(),
            self._tensor(),
            self._computing.same_rows,
            self._exchange,
            in_parts=self._options.step_parts > 1,
        )

    def _make_exchange(self) -> Exchange | None:
        """Returns what gives replicas the rows of all, where there are any.

        A step in parts never has all rows at once.
        """
        local = self._computing
        if local.ranges == 1 or self._options.step_parts > 1:
            return None
        return Exchange(self._strategy, local, self._options)

    def _layers(self) -> LayerByLayer | None:
        """Returns what computes layer by layer, None where none does."""
        if self._options.recompute is None:
            return None
        refuse_stages(self._options)
        return LayerByLayer(self._model, chosen=self._chosen())

    def _chosen(self) -> list[keras.layers.Layer] | None:
        """Returns the layers that are computed again, None for all."""
        return chosen_layers(self._model, self._options.recompute)

    def _tensor(self) -> TensorParallel | None:
        """Returns what computes with parts of weights, None where none does."""
        return None

    def _around_authored(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block for steps of the author's own, while traced."""
        return contextlib.nullcontext()

    @property
    def _update_type(self) -> type[Update]:
        """What applies gradients."""
        return Update

    def _make_update(self) -> Update:
        return self._update_type(
            self._model.optimizer,
            self._model.trainable_variables,
            self._strategy,
            stored_once=self._state.stored_once,
            options=self._options,
            noise=self._noise,
        )

    def _make_noise_scale(self) -> NoiseScale:
        if keras_internals.overrides(self._model, "train_step"):
            raise ConfigurationError(
                "noise_scale goes with Keras's own train_step. Received: "
                f"{type(self._model).__name__}, which has its own. Leave it "
                "out."
            )
        scaler, optimizer = unwrap(self._model.optimizer)
        every = accumulation_steps(optimizer)
        return NoiseScale(self._strategy, scaler, optimizer, every)

    def _make_state(self) -> ReplicaState:
        state = state_for(self._model, self._strategy, self._computing)
        state.add_global_seed(self._strategy)
        state.draws_alike = self._options.random == "equal"
        state.restored_alike = self._local.same_rows
        if self._returns_logs() and self._computing.ranges > 1:
            state.keep_metrics_whole()
        return state

    def _make_agreed_state(self) -> ReplicaState:
        """Returns the state of steps of the author's own."""
        methods = ("train_step", "test_step")
        if self._local.total == 1 or not any(
            keras_internals.overrides(self._model, name) for name in methods
        ):
            return self._state
        local = self._computing
        state = AgreedState(
            self._model, local.ranges, same_rows=local.same_rows
        )
        state.add_global_seed(self._strategy, create=True)
        state.draws_alike = self._options.random == "equal"
        return state

    def _execute(
        self,
        kind: str,
        iterator: Any,
        steps: int,
        source: Source,
        seconds: float,
        votes: Votes = NO_VOTES,
    ) -> Execution:
        self._renew()
        self.prepare(source)
        step = self._step_of(kind)
        if isinstance(step, AuthorStep):
            step.cuts_each = source.cuts_each
        form = source.form
        run = self._function(
            kind, form, lambda *args: self._steps(step, form, *args)
        )
        notes = [seconds, float(votes.save), float(votes.end)]
        traces, exact = _traces(run), determinism.is_enabled()
        given = (
            iterator,
            tf.constant(steps, tf.int64),
            tf.constant(notes),
            self._measured_bounds(),
        )
        self._held = (
            self._agreed if isinstance(step, AuthorStep) else self._state
        )
        self._held.begin_metrics_at(self._metrics_begin_at, self._local.first)
        self._metrics_begin_at = []
        results = _traced(run, *given)
        self._unheld.check_alone()
        done, examples, spent, ended, logs, means, watched, last = results
        self._check_ended(ended, int(done))
        return Execution(
            steps=int(done),
            examples=int(examples),
            logs={name: _number(value) for name, value in logs.items()},
            returned={name: _number(value) for name, value in last.items()},
            seconds=float(means[0]),
            input_seconds=0.0 if exact else float(spent[0]),
            computing_seconds=float(spent[1]),
            sections=self._sections(spent, int(done)),
            traced=_traces(run) > traces,
            watched=Watched(*(t.numpy() for t in watched)) if watched else None,
            votes=Votes(save=float(means[1]) > 0, end=float(means[2]) > 0),
        )

    def _sections(
        self, spent: tf.Tensor, steps: int
    ) -> tuple[float, float] | None:
        """Returns the seconds for data and for gradients of a timed step."""
        if self._local.num_processes == 1 or not steps:
            return None
        timed = 1 if determinism.is_enabled() else steps
        return float(spent[0]) / timed, float(spent[1]) / timed

    def _step_of(self, kind: str) -> Callable[..., dict[str, tf.Tensor]]:
        """Returns the engine's step, or the one that the author wrote."""
        method = {"train": "train_step", "evaluate": "test_step"}[kind]
        if keras_internals.overrides(self._model, method):
            if self._state.stored_once:
                raise ConfigurationError(
                    f"A {method} of your own does not go with "
                    "'central_storage', whose one copy of each metric it "
                    "would write from every replica. Received: "
                    f"{type(self._model).__name__}. Use 'mirrored'."
                )
            if method not in self._authored:
                self._authored[method] = AuthorStep(
                    self._model,
                    method,
                    self._strategy,
                    self._computing,
                    self._agreed,
                    self._options,
                    self._found.returned if kind == "train" else None,
                    self._update_type,
                    self._around_authored,
                )
            return self._authored[method]
        return self._train_step if kind == "train" else self._evaluate_step

    def _function(
        self, kind: str, form: Form, python: Callable[..., Any]
    ) -> Any:
        exact = determinism.is_enabled()
        python = self.kernels.around(python)
        if keras_internals.runs_eagerly(self._model):
            return python
        jit = kind == "train" and self._jit_compile
        given = kind in ("train", "evaluate") and (
            balance_of(self._strategy).measured
        )
        key = (
            *(kind, form, exact, jit),
            None if given else self._local.bounds,
        )
        if key not in self._functions:
            self._functions[key] = tf.function(
                python, autograph=False, reduce_retracing=True
            )
        return self._functions[key]

    def _measured_bounds(self) -> tf.Tensor | None:
        """Returns the bounds of replicas, None where they stay the same.

        Steps take bounds that change as an argument: tracing a step anew takes
        longer than new shares save in many epochs.
        """
        if not balance_of(self._strategy).measured:
            return None
        equal = range(self._local.total + 1)
        return tf.constant(self._local.bounds or [*equal], tf.int64)

    # In the graph, outside of replicas.

    def _steps(
        self,
        step: Callable[[Any, tf.Tensor, tf.Tensor, Any], Any],
        form: Form,
        iterator: Any,
        steps: tf.Tensor,
        notes: tf.Tensor,
        bounds: tf.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Runs up to `steps` steps and sums the metrics over replicas."""
        authored = isinstance(step, AuthorStep)
        held = self._agreed if authored else self._state
        trains = step == self._train_step and not tf.executing_eagerly()
        if trains:
            self.step_graphs.clear()

        def once(
            before_it: Any, number: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, Any]:
            """Runs a step.

            Args:
                before_it: The logs of the step before, where there was one.
                number: Its index in the execution.

            Returns:
                Its count, its examples, the seconds that it waited for data
                and those that it computed, on which workers the data has
                ended, and its logs.
            """
            seconds = self._clock(number, steps)
            before = seconds()
            with tf.control_dependencies([before]):
                data, local, total, low = self._next(iterator, form, bounds)
            arrived = [
                leaf
                for leaf in tf.nest.flatten(
                    [data, total], expand_composites=True
                )
                if leaf is not None
            ]
            with tf.control_dependencies(arrived):
                began = seconds()
            waited = began - before

            def timed() -> tuple[Any, tf.Tensor]:
                if trains:
                    self.step_graphs.append(tf.compat.v1.get_default_graph())
                self._computed, self._seconds = None, seconds
                logs = step(data, local, total, low)
                if self._computed is None:
                    return logs, tf.zeros([], tf.float64)
                return logs, self._computed - began

            if not form.may_end:
                logs, busy = timed()
                ended = tf.zeros([1], tf.int32)
                spent = tf.stack([waited, busy])
                return tf.constant(1, tf.int64), total, spent, ended, logs
            ended = self._ended_on(form, total)
            shapes: list[Any] = []

            def go_on() -> Any:
                logs, busy = timed()
                shapes.append(logs)
                return tf.constant(1, tf.int64), busy, logs

            def end() -> Any:
                logs = before_it
                if logs is None:
                    logs = tf.nest.map_structure(
                        lambda t: tf.zeros(t.shape, t.dtype),
                        shapes[0] if shapes else {},
                    )
                return tf.constant(0, tf.int64), tf.zeros([], tf.float64), logs

            count, busy, logs = tf.cond(tf.reduce_all(ended == 0), go_on, end)
            spent = tf.stack([waited, busy])
            return count, count * total, spent, ended, logs

        watch = self._watch() if step == self._train_step else None

        def body(
            done: tf.Tensor,
            examples: tf.Tensor,
            waiting: tf.Tensor,
            ended: tf.Tensor,
            logs: Any,
            rows: Any,
        ) -> tuple[Any, ...]:
            count, total, waited, ended, logs = once(logs, done)
            waiting += waited
            done += count
            if watch is not None:
                rows = watch.after(rows, done)
            return done, examples + total, waiting, ended, logs, rows

        self._begin()
        before = self._strategy.run(held.begin)
        zero = tf.constant(0, tf.int64)
        rows = zero if watch is None else watch.begin()
        begin: tuple[Any, ...]
        nobody = self._ended_on(form, tf.constant(1, tf.int64), ask=False)
        begin = (zero, zero, tf.zeros([2], tf.float64), nobody, {})
        no_logs = step.begin() if isinstance(step, AuthorStep) else None
        if no_logs is not None:
            begin = (*begin[:-1], no_logs)
        elif authored or self._returns_logs():
            # The first step stands alone: the others return its structure.
            begin = once(None, zero)
            if watch is not None:
                rows = watch.after(rows, begin[0])
        done, examples, waiting, ended, returned, rows = tf.while_loop(
            lambda done, examples, waiting, ended, *_: (
                (done < steps) & tf.reduce_all(ended == 0)
            ),
            body,
            (*begin, rows),
            parallel_iterations=1,
        )
        held.join_metrics()
        with tf.control_dependencies([done]):
            results = self._strategy.run(held.collect, args=(notes, before))
        metrics, mean_notes = tf.nest.map_structure(self._first, results)
        state = list(zip(held.metrics, metrics, strict=True))
        with keras.StatelessScope(state_mapping=state):
            logs = flat_logs(self._model.get_metrics_result())
            last = {}
            if isinstance(step, AuthorStep):
                logs, last = step.logs(returned), returned
        if not authored and self._step.log_names:
            logs = {name: returned[name] for name in self._step.log_names}
        watched = () if watch is None else watch.end(rows, done)
        if not tf.executing_eagerly():
            kept, own = self._kept()
            seeds = keras_internals.global_seed_generator()
            if seeds is not None:
                kept.append(seeds.state)
            self._unheld.note(tf.compat.v1.get_default_graph(), [*kept, *own])
        return done, examples, waiting, ended, logs, mean_notes, watched, last

    def _watch(self) -> StepWatch | None:
        """Returns what notes the loss of each step, where it is asked for."""
        on_nan = self._options.on_nan
        if on_nan == "ignore":
            return None
        weights = on_nan == "restore"
        return StepWatch(self._model, self._strategy, weights=weights)

    def _clock(
        self, number: tf.Tensor, steps: tf.Tensor
    ) -> Callable[[], tf.Tensor]:
        """Returns what reads the time in a step.

        Args:
            number: The index of the step.
            steps: How many there will be. If operations must repeat, only
                the last of them is timed, or all where shares follow from
                the times.
        """
        if balance_of(self._strategy).measured:
            return lambda: determinism.sampled_seconds(tf.constant(True))
        if self._local.num_processes == 1:
            return determinism.seconds
        is_last = tf.equal(number, steps - 1)
        return lambda: determinism.sampled_seconds(is_last)

    def _begin(self) -> None:
        """Prepares weights to be read by replicas."""

    def _returns_logs(self) -> bool:
        """Whether the model's own `compute_metrics` may return others."""
        return keras_internals.overrides(self._model, "compute_metrics")

    def _ended_on(
        self, form: Form, total: tf.Tensor, *, ask: bool = True
    ) -> tf.Tensor:
        """Returns one number for each worker, above 0 if its data has ended.

        If only reading finds the end of the data, each worker knows only its
        own data, and a worker alone in a step would wait for ever. Otherwise
        the result has one entry for all workers.
        """
        ended = tf.cast([total == 0], tf.int32)
        workers = self._local.num_processes
        if workers == 1 or not (form.may_end and form.totals_known):
            return ended
        mine = self._local.process
        ended = tf.pad(ended, [[mine, workers - 1 - mine]])
        if not ask:
            return ended

        def on_replica(ended: tf.Tensor) -> tf.Tensor:
            return sum_over_replicas(tf.identity(ended))

        return self._first(self._strategy.run(on_replica, args=(ended,)))

    def _check_ended(self, ended: tf.Tensor, steps: int) -> None:
        found = ended.numpy()
        if 0 < found.astype(bool).sum() < len(found):
            raise UnevenData(found.nonzero()[0].tolist(), len(found), steps)

    def _next(
        self, iterator: Any, form: Form, bounds: tf.Tensor | None = None
    ) -> tuple[Any, Any, tf.Tensor, Any]:
        """Takes a global batch, and gives each replica what it computes.

        As `_taken`.
        """
        data, local, total, low = self._taken(iterator, form, bounds)
        if self._gathers and int(total):
            data, local, low = self._strategy.run(
                functools.partial(self._replica_rows, form.cuts_each),
                args=(data, local, total),
            )
        return data, local, total, low

    def _taken(
        self, iterator: Any, form: Form, bounds: tf.Tensor | None
    ) -> tuple[Any, Any, tf.Tensor, Any]:
        """Takes a global batch; its size comes as one tensor.

        Returns:
            The rows of each replica, how many they are, the size, and the
            first row of each replica; None where replicas draw their own
            random numbers.
        """
        data, local, total = next_batch(iterator, form, self._strategy, bounds)
        topology = self._local
        if form.totals_known:
            total = self._first(total)
            if not self._draws_alike:
                return data, local, total, None
            if bounds is not None:
                topology = dataclasses.replace(topology, bounds=bounds)
            low = self._strategy.experimental_distribute_values_from_function(
                lambda context: topology.rows_of(
                    total, context.replica_id_in_sync_group - topology.first
                )[0]
            )
            return data, local, total, low
        counts = self._strategy.run(self._replica_counts, args=(local,))
        total = tf.reduce_sum(self._first(counts)) // topology.same_rows
        if not self._draws_alike:
            return data, local, total, None
        low = self._strategy.run(self._replica_low, args=(counts,))
        return data, local, total, low

    def _train_step(
        self, data: Any, local: Any, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        self._check_trained()
        with self._step.in_place(), tf.name_scope("forward_backward"):
            gradients, logs, square = self._strategy.run(
                self._replica_gradients, args=(data, local, total, low)
            )
        if balance_of(self._strategy).measured or (
            self._local.num_processes > 1
        ):
            self._computed = self._time_of(gradients)
        if self._noise is not None:
            self._noise.observe(square, local, total)
        self._update(gradients)
        if self._step.updates_metrics_after:
            with self._step.in_place():
                logs = self._strategy.run(
                    self._replica_metrics, args=(data, local, total, low)
                )
        return {name: self._first(value) for name, value in logs.items()}

    def _check_trained(self) -> None:
        """Refuses other variables than those that the optimizer has."""
        now = self._model.trainable_variables
        changed = {id(v): v for v in self._trained}.keys() ^ set(map(id, now))
        for variable in [*self._trained, *now]:
            if id(variable) in changed:
                raise ConfigurationError(
                    "What is trained is known before a fit begins, and after "
                    "that until the model is compiled. Received: "
                    f"{variable.path}, whose layer has another value of "
                    "trainable since, as a callback may set. Set it in "
                    "build_model, or between two fits, and compile the model "
                    "then."
                )

    def _time_of(self, gradients: Any) -> tf.Tensor:
        """Returns when all gradients of this worker were there."""
        own = [
            leaf
            for gradient in tf.nest.flatten(gradients)
            if gradient is not None
            for leaf in tf.nest.flatten(
                self._strategy.experimental_local_results(gradient),
                expand_composites=True,
            )
            if leaf is not None
        ]
        with tf.control_dependencies(own):
            return self._seconds()

    def _evaluate_step(
        self, data: Any, local: Any, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        with self._step.in_place():
            logs = self._strategy.run(
                self._replica_evaluate, args=(data, local, total, low)
            )
        return {name: self._first(value) for name, value in logs.items()}

    def _predict_step(
        self, form: Form, iterator: Any
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        self._begin()
        data, local, total, low = self._next(iterator, form)
        ended = self._ended_on(form, total)
        like: list[Any] = []
        on_replica = self._predicting()

        def outputs() -> Any:
            with self._in_place_to_predict():
                every = self._strategy.run(
                    on_replica, args=(data, local, total, low)
                )
            every = tf.nest.map_structure(self._rows_of_worker, every)
            if self._local.num_processes > 1:
                every = tf.nest.map_structure(self._rows_of_all, every)
            like.append(every)
            return every

        def nothing() -> Any:
            return tf.nest.map_structure(
                lambda t: tf.zeros([n or 0 for n in t.shape], t.dtype), like[0]
            )

        if not form.may_end:
            return outputs(), total, ended
        # Nothing is sent where some have no rows: `predict` refuses it.
        going = tf.reduce_all(ended == 0)
        if tf.executing_eagerly():
            return (outputs() if going else ()), total, ended
        return tf.cond(going, outputs, nothing), total, ended

    @contextlib.contextmanager
    def _in_place_to_predict(self) -> Iterator[None]:
        """Lets layers act as replicas need, while these predict."""
        generator = keras_internals.global_seed_generator()
        seeds = keras_internals.seeds_replaced(
            [*seed_generators(self._model), generator], seed_for_rows
        )
        layers = keras_internals.layers_of(self._model)
        objects = keras_internals.objects_of(layers)
        apart = turns.kept(lambda: keras_internals.snapshot(layers, objects))
        calls = self._calls
        whole = calls.in_place() if calls else contextlib.nullcontext()
        with seeds, apart, whole:
            yield

    def _predicting(self) -> Callable[..., Any]:
        """Returns what predicts the rows of a replica."""
        state = self._state if self._prepared else self._make_state()
        state.generator = keras_internals.global_seed_generator()
        exchange = self._exchange or self._make_exchange()
        if self._calls is None:
            self._calls = LayerCalls(self._model, state, exchange)
        calls = self._calls

        def on_replica(
            rows: Any, local: tf.Tensor, total: tf.Tensor, low: Any
        ) -> Any:
            share = self._share(local, total, low)
            given = self._model, rows, state, share, exchange, calls
            state.begin()
            with state.replica_seeds_in_place():
                return outputs_of_share(*given)

        return on_replica

    def _rows_of_worker(self, value: Any) -> tf.Tensor:
        every = self._strategy.experimental_local_results(value)
        return tf.concat(every[:: self._computing.same_rows], 0)

    def _rows_of_all(self, rows: Any) -> Any:
        """Joins the rows of all workers in order.

        Every worker puts its rows where they belong among zeros; the sum
        over workers is all of them. An example may have several rows.
        """
        if isinstance(rows, tf.RaggedTensor):
            return tf.RaggedTensor.from_nested_row_lengths(
                self._rows_of_all(rows.flat_values),
                list(map(self._rows_of_all, rows.nested_row_lengths())),
                validate=False,
            )
        if rows.dtype.is_complex:
            parts = tf.math.real(rows), tf.math.imag(rows)
            return tf.complex(*map(self._rows_of_all, parts))
        local, own = self._computing, tf.shape(rows, out_type=tf.int64)[0]
        here = tf.one_hot(local.process, local.num_processes, own)
        found = self._strategy.run(self._replica_gather, args=(here,))
        counts = self._first(found)
        # Of workers with the same rows, those of the first one count.
        first = local.first // local.same_rows * local.same_rows
        before = tf.reduce_sum(counts[: first // local.count])
        after = tf.reduce_sum(counts) - before - own
        paddings = tf.pad([[before, after]], [[0, tf.rank(rows) - 1], [0, 0]])
        padded = tf.pad(tf.cast(rows, carrier_of(rows.dtype)), paddings)
        every = self._strategy.run(self._replica_gather, args=(padded,))
        return tf.cast(self._first(every), rows.dtype)

    def _first(self, value: Any) -> tf.Tensor:
        return self._strategy.experimental_local_results(value)[0]

    # In the graph, on a replica.

    def _replica_rows(
        self, cuts_each: bool, data: Any, local: tf.Tensor, total: tf.Tensor
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Returns all rows, how many they are, and which is the first."""
        if not cuts_each:
            data = without_another(data, local)
        cut = self._rows.cut(local)
        every, _ = of_all(self._rows, data, cut, cuts_each=cuts_each)
        return every, tf.identity(total), tf.zeros([], tf.int64)

    def _gathered(self) -> Writes:
        """Returns weights that are not stored whole, with their values."""
        return []

    def _replica_counts(self, local: tf.Tensor) -> tf.Tensor:
        """Returns the rows of every replica."""
        context = tf.distribute.get_replica_context()
        where = tf.one_hot(
            context.replica_id_in_sync_group,
            self._local.total,
            dtype=tf.int64,
        )
        return sum_over_replicas(where * local)

    def _replica_low(self, counts: tf.Tensor) -> tf.Tensor:
        """Returns the first row of this replica."""
        context = tf.distribute.get_replica_context()
        same = self._local.same_rows
        first = context.replica_id_in_sync_group // same * same
        return tf.reduce_sum(counts[:first]) // same

    def _replica_gradients(
        self, data: Any, local: tf.Tensor, total: tf.Tensor, low: Any
    ) -> tuple[list[Any], dict[str, tf.Tensor], tf.Tensor | None]:
        """Returns gradients, logs, and the squared norm of the gradients."""
        step = self._step
        share = self._share(local, total, low)
        gradients, values, logs = self._computed_gradients(data, share)
        self._update.present = step.present
        self._update.alike = step.alike
        self._update.in_parts = step.in_parts
        self._state.write(list(zip(step.written, values, strict=True)))
        return gradients, logs, self._own_square(gradients)

    def _own_square(self, gradients: list[Any]) -> tf.Tensor | None:
        """Returns the squared norm of gradients, where noise is measured."""
        if self._noise is None:
            return None
        return self._update.own_square(gradients, self._squares())

    def _squares(self) -> dict[int, tf.Tensor]:
        """Returns that of each weight whose gradient is summed already."""
        return {}

    def _computed_gradients(
        self, data: Any, share: BatchShare
    ) -> tuple[list[Any], list[tf.Tensor], dict[str, tf.Tensor]]:
        """Returns gradients, what is to be written, and logs.

        Nothing is written here.
        """
        scale = self._model.optimizer.scale_loss
        if self._options.step_parts > 1:
            return in_parts(
                self._step,
                self._state,
                self._options.step_parts,
                data,
                share,
                scale,
                self._gathered(),
                self._counted,
            )
        gradients, values, logs = self._step.gradients(
            data,
            share,
            scale,
            gathered=self._gathered(),
            jit_compile=self._jit_compile,
        )
        return self._counted(gradients, share), values, logs

    def lacks_memory(self, source: Source) -> bool:
        """Whether the gradients of a batch do not fit; as in `Engine`."""
        self.prepare(source)
        iterator = self.feed(source, chain=False, training=True).iterator(0, 1)

        def on_replica(data: Any, *places: Any) -> tf.Tensor:
            gradients, _, _ = self._computed_gradients(
                data, self._share(*places)
            )
            leaves = tf.nest.flatten(gradients, expand_composites=True)
            return tf.add_n(
                [tf.reduce_sum(tf.cast(leaf, tf.float32)) for leaf in leaves]
            )

        def compute() -> Any:
            self._begin()
            batch = self._next(iterator, source.form)
            with self._step.in_place():
                return self._strategy.run(on_replica, args=batch)

        # What the sums of all replicas and the update will need.
        spare = [
            tf.zeros(variable.shape, variable.dtype)
            for variable in self._model.trainable_variables
        ]
        run = tf.function(self.kernels.around(compute), autograph=False)
        try:
            tf.nest.map_structure(
                lambda value: value.numpy(),
                self._strategy.experimental_local_results(run()),
            )
        except (MemoryError, tf.errors.OpError) as error:
            if not lacks_room(error):
                raise
            return True
        finally:
            spare.clear()
        return False

    def _replica_evaluate(
        self, data: Any, local: tf.Tensor, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        share = self._share(local, total, low)
        _, writes, logs = self._step.forward(
            data, share, training=False, gathered=self._gathered()
        )
        self._state.write(writes)
        return logs

    def _replica_metrics(
        self, data: Any, local: tf.Tensor, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        """Updates metrics after the weights."""
        share = self._share(local, total, low)
        writes, logs = self._step.metrics_after(data, share, self._gathered())
        self._state.write(writes)
        return logs

    def _counted(self, gradients: list[Any], share: BatchShare) -> list[Any]:
        """Returns what gradients of a replica add to those of the batch."""
        return overwritten.contributions(
            self._selected(gradients, share),
            self._step.held(),
            self._local.total,
        )

    def _selected(self, gradients: list[Any], share: BatchShare) -> list[Any]:
        """Returns gradients, zeros of a replica without rows of its own."""
        return share.select_all(gradients)

    def _share(
        self, local: tf.Tensor, total: tf.Tensor, low: tf.Tensor | None
    ) -> BatchShare:
        ranges, same = self._computing.ranges, self._computing.same_rows
        return BatchShare(local, total, ranges, same, low)

    def _replica_gather(self, padded: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        first = replica % self._local.count == 0
        first &= self._computing.is_first_of_rows
        mine = tf.where(first, padded, tf.zeros_like(padded))
        return sum_over_replicas(mine)


@dataclasses.dataclass
class Work:
    """What was computed, and in what time.

    Attributes:
        examples: Rows of global batches.
        seconds: The time of this worker for its part of them.
    """

    examples: int = 0
    seconds: float = 0.0

    def add(self, done: Execution) -> None:
        """Adds an execution."""
        self.examples += done.examples
        self.seconds += done.computing_seconds


def refuse_stages(options: StepOptions) -> None:
    """Refuses what only a pipeline can compute again."""
    if options.recompute == "stages":
        raise ConfigurationError(
            "recompute='stages' goes with pipeline_parallel. Received: a "
            "strategy without stages. Use recompute='layers'."
        )


def _check_eager(options: StepOptions) -> None:
    """Refuses what needs replicas, or parts of a batch, with rows of their own.

    Without a graph each replica computes all rows.
    """
    for name, given in (
        ("step_parts", options.step_parts > 1),
        ("noise_scale", options.noise_scale),
    ):
        if given:
            raise ConfigurationError(
                "With run_eagerly=True each replica computes all rows of a "
                f"batch at once. Received: {name}={getattr(options, name)!r} "
                "as well. Leave one of them out."
            )


def _traces(function: Any) -> int:
    """Returns how often a `tf.function` was traced; 0 where it is none."""
    count = getattr(function, "experimental_get_tracing_count", None)
    return count() if count is not None else 0


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


# Each finds a layer, a loss or a metric that the next one computes otherwise.
_MOST_TRACES = 1000


def _traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function, which may have to be traced several times.

    Processes need not trace equally often: stages of a pipeline have other
    layers.
    """
    forget_calls = Groups.counted()
    for _ in range(_MOST_TRACES):
        try:
            with turns.kept(leave_others):
                return function(*arguments)
        except ExchangedInLoop as error:
            raise ConfigurationError(str(error)) from error
        except Exception as error:
            refusal = refusal_within(error)
            if not isinstance(refusal, TraceAgain):
                if refusal is None or refusal is error:
                    raise
                raise refusal from error
            forget_calls()
    raise RuntimeError(
        f"A step was traced {_MOST_TRACES} times, and each trace asked for "
        "another one. This is a fault of mgpu_tf: please report the program."
    )
