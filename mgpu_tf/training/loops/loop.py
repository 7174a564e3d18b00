"""Steps, epochs and evaluations: the loops around an engine.

    training = Training(distributed, counts, ...)
    history = training.run()
    scores = evaluate(distributed, feed, None, hooks)

Between two executions of the engine callbacks run, states are saved, and it
is decided how many steps come next.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.checkpoints.run_state import (
    EpochRecord,
    Position,
    RunState,
)
from mgpu_tf.checkpoints.saving.local import Local
from mgpu_tf.checkpoints.saving.saver import CheckpointSaver, Saver
from mgpu_tf.cluster import heartbeat
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.step.base import DataFeed, Execution, Logs, UnevenData
from mgpu_tf.errors import ConfigurationError, DivergedError
from mgpu_tf.options import SaveOptions
from mgpu_tf.reports.profiling import Profiler
from mgpu_tf.reports.report import LeftOut
from mgpu_tf.reports.stragglers import SectionTimes, slow_workers
from mgpu_tf.runtime.determinism import enable_determinism
from mgpu_tf.strategies.peers import RATES
from mgpu_tf.strategies.registry import kind_of, lost_workers
from mgpu_tf.strategies.replicas.topology import balance_of
from mgpu_tf.training import callbacks as callbacks_lib
from mgpu_tf.training.call_arguments import (
    FitNumbers,
    check_finite,
    check_seeded,
    data_facts,
    data_shape,
    fit_facts,
)
from mgpu_tf.training.data_errors import explained
from mgpu_tf.training.distributed_model import DistributedModel
from mgpu_tf.training.loops.totals import Totals
from mgpu_tf.training.pace import Pace

_log = logging.getLogger("mgpu_tf")


class BadStep(Exception):
    """A step whose batch is to be left out; the same on all workers.

    Attributes:
        batch: Which one it was.
    """

    def __init__(self, batch: LeftOut) -> None:
        super().__init__(str(batch))
        self.batch = batch


class Training:
    """One `fit`.

    Args:
        distributed: What is trained.
        totals: What the trainer has done so far; it goes on from there.
        source: What it trains on.
        validation: What it evaluates on.
        numbers: The numbers that `fit` was given.
        callbacks: The user's.
        verbose: As for `fit`.
        saving: Whether and where it saves.
        profiler: Traces some of the steps.

    Raises:
        ConfigurationError: An argument breaks a rule, or is another on
            another worker.
    """

    def __init__(
        self,
        distributed: DistributedModel,
        totals: Totals,
        source: data_lib.Source,
        validation: data_lib.Source | None,
        numbers: FitNumbers,
        callbacks: list[keras.callbacks.Callback],
        verbose: int | str,
        saving: SaveOptions | None,
        profiler: Profiler,
    ) -> None:
        peers = distributed.peers
        if not peers.alone or saving is not None:
            check_seeded(source)
        self._validation = None
        if validation is not None:
            self._validation = distributed.feed_once(
                validation, numbers.validation_steps
            )
        if not peers.alone:
            facts = fit_facts(source, self._validation, numbers)
            facts["balance"] = str(balance_of(distributed.strategy))
            if saving is not None:
                names = [type(callback).__name__ for callback in callbacks]
                facts["callbacks, which a checkpoint has the state of"] = (
                    " and ".join(names) or "none"
                )
            peers.compare(facts)
            _log.info("data: each worker reads %s", source.reads)
        self._distributed = distributed
        self._model = distributed.model
        self._totals = totals
        self._source = source
        self._numbers = numbers
        self._profiler = profiler
        self._verbose = verbose
        self._folder = "" if saving is None else saving.folder
        self._checked = -1
        self._warned_of_length = self._data_has_ended = False
        self._validated = False
        self._times = SectionTimes()
        self._engine = engine = distributed.prepare_training(source)
        self._run = RunState(
            totals,
            self._model,
            engine,
            data_shape(source) if saving is None else data_facts(source),
            source.row_order,
            callbacks,
            numbers.initial_epoch,
            numbers.epochs,
            distributed.configuration,
        )
        self._saver = totals.saver = self._saver_of(saving, callbacks)
        self._pace = distributed.pace(callbacks, exact=saving is not None)
        self._waits = engine.waits_for_callbacks and any(
            map(keras_internals.sees_every_batch, callbacks)
        )
        self._stops_together = peers.any(bool(callbacks))
        self._hooks = distributed.hooks(
            self._watched_by(callbacks)
            + callbacks_lib.histograms(callbacks, engine.staleness),
            verbose,
            numbers.epochs,
            numbers.steps_per_epoch or source.steps,
            training=True,
            examples=lambda: totals.examples_seen,
        )

    def _watched_by(
        self, callbacks: list[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        """Returns the callbacks that are called."""
        return callbacks

    def _begins(self, step: int) -> None:
        """Is called before an execution, with the steps done so far."""

    def run(self) -> keras.callbacks.History:
        """Trains to the end.

        Returns:
            Keras's `History`; of the whole run where it was resumed.
        """
        numbers, run, hooks = self._numbers, self._run, self._hooks
        totals, peers = self._totals, self._distributed.peers
        run.load(self._saver.find())
        self._print_start()
        totals.left_out[:] = run.leave_out(totals.left_out)
        self._model.stop_training = False
        with callbacks_lib.files_go_on(hooks.callbacks if run.resumed else []):
            hooks.on_train_begin()
        run.begin(keras_internals.take_restored_epoch(self._model))
        if self._distributed.options.on_nan == "restore":
            self._saver.begin()
        feed = self._engine.feed(
            self._source,
            run.first_epoch,
            chain=numbers.steps_per_epoch is not None or self._source.seekable,
            training=True,
        )
        if run.resumed:
            with run.reading_again():
                feed.resume(run.position.finished, run.position.step)
        else:
            self._source.epochs.reset()
        last = run.position.epoch if run.stopped else numbers.epochs
        if run.resumed and run.position.epoch >= last:
            self._warn_complete()
        with self._saver.listening():
            for epoch in range(run.position.epoch, last):
                if not self._epoch(epoch, feed):
                    break
                stopped = self._ends_epoch(feed, is_last=epoch + 1 == last)
                if stopped or self._data_has_ended:
                    break
            self._saver.finish()
        totals.distributions[:] = peers.of_all(self._times.as_json())
        self._profiler.close()
        if numbers.epochs > run.first_epoch:
            self._model.optimizer.finalize_variable_values(
                self._model.trainable_weights
            )
        hooks.on_train_end(run.position.last_logs)
        return self._model.history

    def _print_start(self) -> None:
        """Prints what runs where, and whether it goes on."""
        if self._verbose == 0:
            return
        self._distributed.print_what_runs(self._source)
        at = self._run.position
        if self._run.resumed:
            where = f"after epoch {at.epoch}"
            if at.step:
                where = f"in epoch {at.epoch + 1}, after its step {at.step}"
            self._distributed.print_once(
                f"resumed {where}, from {self._folder}"
            )

    def _warn_complete(self) -> None:
        if self._distributed.is_chief:
            run = self._run
            _log.warning(
                "The run of this checkpoint_dir %s after %d epochs: nothing "
                "is trained. Give more than %d epochs to go on, or another "
                "folder for a new run.",
                "was ended by a callback" if run.stopped else "is complete",
                run.position.epoch,
                run.goes_on_above,
            )

    def _saver_of(
        self,
        options: SaveOptions | None,
        callbacks: list[keras.callbacks.Callback],
    ) -> Saver:
        if options is None:
            return Saver()
        callbacks_lib.refuse_restoring(callbacks)
        enable_determinism()
        peers, local = self._distributed.peers, None
        if options.local_checkpoint_dir is not None:
            folder = options.local_checkpoint_dir
            local = Local(folder, peers, self._run.snapshot)
        return CheckpointSaver(
            options,
            peers,
            local=local,
            is_chief=self._distributed.is_chief,
            capture=self._run.capture,
            meter=self._totals.meter,
            lost_workers=lambda: lost_workers(self._distributed.strategy),
            validates=self._validation is not None,
        )

    def _epoch(self, epoch: int, feed: DataFeed) -> bool:
        """Trains an epoch, evaluates, and notes what it took.

        Returns:
            Whether there was a batch to train on.
        """
        numbers, hooks = self._numbers, self._hooks
        # TensorFlow reads over all replicas what it overwrites.
        with self._distributed.peers.inside():
            first = self._totals.global_step == 0
            self._engine.reset_metrics(first=first)
        hooks.on_epoch_begin(epoch)
        record = self._train(feed)
        if record is None:
            return False
        logs = dict(record.logs)
        if self._validation is not None and numbers.validates(epoch):
            with self._totals.meter.phase("evaluate"):
                scores = evaluate(
                    self._distributed,
                    self._validation,
                    numbers.validation_steps,
                    hooks,
                    again=self._validated,
                )
            self._validated = True
            logs |= {f"val_{name}": v for name, v in scores.items()}
        self._totals.records.append(dataclasses.replace(record, logs=logs))
        self._look_for_slow(epoch)
        hooks.on_epoch_end(epoch, logs)
        if kind_of(self._distributed.strategy).in_step:
            # A callback of one worker may have set it there alone.
            rates = keras_internals.learning_rates(self._model)
            self._distributed.peers.compare({RATES: str(rates)})
        return True

    def _look_for_slow(self, epoch: int) -> None:
        """Names workers that are slower than the others, each once."""
        peers, known = self._distributed.peers, self._totals.slow
        if not kind_of(self._distributed.strategy).in_step:
            return
        times = peers.of_all(self._times.epoch())
        if any(times):
            self._totals.step_times.append(
                {"epoch": epoch + 1, "workers": times}
            )
        if peers.alone:
            return
        named = {(slow.worker, slow.section) for slow in known}
        for slow in slow_workers(times, epoch + 1):
            if (slow.worker, slow.section) not in named:
                known.append(slow)
                self._totals.meter.fault(str(slow))
                if self._distributed.is_chief:
                    _log.warning("%s", slow)

    def _ends_epoch(self, feed: DataFeed, *, is_last: bool) -> bool:
        """Saves where it is time to; returns whether the training ends."""
        stopped = self._stopped()
        self._run.end_epoch(self._totals.records[-1].logs)
        # Before the save: who resumes has the shares of the next epoch.
        if self._rebalance() and not (stopped or is_last):
            feed.cut_anew(self._run.position.finished)
        self._saver.boundary(
            self._totals.global_step,
            self._run.position.votes,
            epoch_ends=True,
        )
        return stopped

    def _rebalance(self) -> bool:
        """Chooses the shares of workers anew, where they are measured.

        Returns:
            Whether they have changed.
        """
        rate = self._engine.rate
        if rate is None:
            return False
        rates = self._distributed.peers.of_all(rate)
        if not self._engine.rebalance(rates):
            return False
        if self._distributed.is_chief:
            _log.info(
                "the workers have computed %s rows per second; their shares "
                "are now %s (balance repeats them)",
                " ".join(f"{rate:.4g}" for rate in rates),
                balance_of(self._distributed.strategy),
            )
        return True

    def _train(self, feed: DataFeed) -> EpochRecord | None:
        """Trains an epoch; None where a generator has ended before it."""
        engine, source, at = self._engine, self._source, self._run.position
        source.epochs.begin()
        limit = self._limit()
        iterator = feed.iterator(at.epoch, limit)
        self._run.begin_epoch()

        def train(wanted: int) -> Execution:
            step = self._totals.global_step
            self._begins(step)
            votes = self._saver.votes()
            left = wanted if limit is None else limit - at.step
            ahead = self._saver.room(step, wanted if self._waits else left)
            started = time.perf_counter()
            heartbeat.count(step)
            with (
                heartbeat.at(heartbeat.STEP),
                self._profiler.around(step),
                self._distributed.peers.inside(),
            ):
                done = engine.train(
                    iterator, wanted, source, self._pace.seconds, votes, ahead
                )
            self._profiler.note(
                step + done.steps, done.steps, done.input_seconds
            )
            self._check_loss(done)
            passed = time.perf_counter() - started
            self._totals.meter.execution(
                passed,
                done.steps,
                done.input_seconds,
                done.traced,
            )
            if done.steps and not done.traced:
                each = passed / done.steps
                self._times.note(done.sections, each, done.steps)
            return self._count(done)

        def room(wanted: int) -> int:
            step = self._totals.global_step
            every = self._distributed.options.check_replicas_every
            if every is not None:
                wanted = min(wanted, every - step % every)
            for bad in at.left_out_here[:1]:
                wanted = min(wanted, bad - at.step)
            return self._profiler.room(step, self._saver.room(step, wanted))

        def leave_out() -> None:
            while at.step in at.left_out_here:
                strategy = self._distributed.strategy
                data_lib.drop(iterator, source, strategy, 1)
                at.step += 1

        def between() -> None:
            self._check_replicas()
            self._saver.boundary(self._totals.global_step, at.votes)

        run_steps(
            train,
            limit,
            self._pace,
            at,
            self._hooks.on_train_batch_begin,
            self._hooks.on_train_batch_end,
            self._stopped,
            room,
            between,
            leave_out,
        )
        if not self._model.stop_training:
            source.epochs.end()
        rest = self._count(engine.finish(iterator))
        self._check_replicas()
        at.step += rest.steps
        at.examples += rest.examples
        if not source.repeats and not self._model.stop_training:
            self._note_end(limit)
        if not at.step:
            if self._data_has_ended:
                return None
            raise ConfigurationError(data_lib.NO_BATCH)
        if not at.trained:
            raise DivergedError(
                "An epoch must keep one batch or more. Received: epoch "
                f"{at.epoch + 1}, whose {at.step} batches are all left out "
                "(on_nan='restore'). Raise max_loss, lower the learning rate, "
                "or look for values in the data that are not finite."
            )
        return EpochRecord(
            at.epoch, at.trained, at.examples, at.seconds, at.logs | rest.logs
        )

    def _note_end(self, limit: int | None) -> None:
        """Warns where a generator has ended before the last epoch, as Keras.

        Args:
            limit: The steps of the epoch.
        """
        at = self._run.position
        missing = limit is not None and at.step < limit
        if not missing or not (at.step or at.finished):
            return
        self._data_has_ended = True
        if self._distributed.is_chief:
            _log.warning(
                "the generator has ended after %d of %d steps of epoch %d, "
                "and the training ends there. Let it yield steps_per_epoch * "
                "epochs batches to train %d epochs.",
                at.step,
                limit,
                at.epoch + 1,
                self._numbers.epochs,
            )

    def _limit(self) -> int | None:
        """Returns the steps of the epoch that has begun, if they are known.

        Raises:
            ConfigurationError: The data has fewer batches than before, where
                it cannot be followed.
        """
        distributed, source = self._distributed, self._source
        steps, given = source.steps, self._numbers.steps_per_epoch
        length = source.epochs.length()
        if length is None or steps is None:
            return given or steps
        if not distributed.peers.alone:
            distributed.peers.compare({"batches of the epoch": str(length)})
        if length >= steps:
            return given or steps
        if given is not None or not kind_of(distributed.strategy).in_step:
            raise ConfigurationError(
                "A PyDataset must keep its length where steps_per_epoch is "
                "given, and with parameter servers. Received: one of "
                f"{length} batches, which had {steps} before. Keep the length, "
                "or leave out steps_per_epoch."
            )
        if distributed.is_chief and not self._warned_of_length:
            _log.warning(
                "epoch %d ends after %d steps: the PyDataset has fewer batches "
                "than the %d that it had when fit began. Later epochs end "
                "where it ends, too.",
                self._run.position.epoch + 1,
                length,
                steps,
            )
            self._warned_of_length = True
        return length

    def _check_replicas(self) -> None:
        """Compares the replicas where it is time to."""
        step = self._totals.global_step
        every = self._distributed.options.check_replicas_every
        if every is None or step % every or step == self._checked:
            return
        self._checked = step
        with (
            heartbeat.at(heartbeat.COLLECTIVE),
            self._distributed.peers.inside(),
        ):
            self._engine.check_replicas(step)

    def _check_loss(self, done: Execution) -> None:
        """Ends the training at a loss that is not finite, if asked to.

        Raises:
            DivergedError: It is not finite, or above a bound.
            BadStep: The same, where the batch is to be left out.
        """
        options = self._distributed.options
        if options.on_nan == "ignore":
            return
        step, loss = self._totals.global_step, done.logs.get("loss", 0.0)
        if done.watched is None:
            if not np.isfinite(loss):
                raise _diverged(
                    f"loss {loss} in steps {step + 1} to {step + done.steps}"
                )
            return
        self._saver.record(step + 1, done.watched.losses.tolist())
        bad = done.watched.first_bad(options.max_loss)
        if bad < 0:
            return
        step, loss = step + bad + 1, done.watched.losses[bad]
        if options.on_nan == "restore":
            at = self._run.position
            batch = at.step + bad + 1
            self._totals.meter.fault(f"loss {loss:.6g} in step {step}")
            raise BadStep(LeftOut(at.epoch + 1, batch, step, f"{loss:.6g}"))
        if np.isfinite(loss):
            raise _diverged(f"loss {loss:.6g} in step {step}", options.max_loss)
        # It is the same loss on all workers, which all come here.
        found = self._distributed.peers.of_all(done.watched.first_bad_here())
        where = f"since step {step}"
        if bad in found:
            where += f", first on worker {found.index(bad)}"
        raise _diverged(f"loss {loss} {where}")

    def _count(self, execution: Execution) -> Execution:
        self._totals.global_step += execution.steps
        heartbeat.count(self._totals.global_step)
        self._totals.examples_seen += execution.examples
        return execution

    def _stopped(self) -> bool:
        """Returns whether a callback of any worker has ended the training."""
        model = self._model
        if self._stops_together:
            model.stop_training = self._distributed.peers.any(
                model.stop_training
            )
        return bool(model.stop_training)


def _diverged(received: str, bound: float | None = None) -> DivergedError:
    least = "finite" if bound is None else f"at most max_loss={bound:g}"
    return DivergedError(
        f"The loss must stay {least}. Received: {received}. Lower the "
        "learning rate, or look for values in the data that are not finite."
    )


def evaluate(
    distributed: DistributedModel,
    feed: DataFeed,
    steps: int | None,
    hooks: keras.callbacks.CallbackList,
    *,
    first: bool = False,
    again: bool = False,
) -> Logs:
    """Evaluates a model.

    Args:
        distributed: Whose model.
        feed: Where batches come from.
        steps: How many; all by default.
        hooks: The callbacks.
        first: Whether no step was trained before.
        again: Whether there was an evaluation before in this `fit`, which a
            generator that has ended since does not end.

    Returns:
        Loss and metrics by name.

    Raises:
        ConfigurationError: There is no batch, or no end of them.
    """
    source, model = feed.source, distributed.model
    check_finite("evaluate", source, steps)
    engine = distributed.prepare(source)
    fixed = distributed.fixed_steps
    pace = Pace(fixed, steps_per_execution=fixed)
    source.epochs.reset()
    source.epochs.begin()
    limit = _limit_of(source, steps)
    iterator = feed.iterator(0, limit)
    model.stop_evaluating = False
    hooks.on_test_begin()
    with distributed.peers.inside():
        engine.reset_metrics(first=first)
    at = Position()

    def execute(wanted: int) -> Execution:
        with (
            explained(source),
            heartbeat.at(heartbeat.EVALUATE),
            distributed.peers.inside(),
        ):
            return engine.evaluate(iterator, wanted, source, pace.seconds)

    run_steps(
        execute,
        limit,
        pace,
        at,
        hooks.on_test_batch_begin,
        hooks.on_test_batch_end,
        lambda: model.stop_evaluating,
    )
    if not at.step and not (again and not source.repeats):
        raise ConfigurationError(data_lib.NO_BATCH)
    if not source.repeats and not model.stop_evaluating:
        _warn_of_end(distributed, at.step, limit)
    if at.step != limit:
        feed.restart()
    if not model.stop_evaluating:
        source.epochs.end()
    hooks.on_test_end(at.logs)
    return at.logs


def _warn_of_end(
    distributed: DistributedModel, steps: int, limit: int | None
) -> None:
    """Warns where a generator has ended within an evaluation."""
    if steps >= (limit or 1) or not distributed.is_chief:
        return
    _log.warning(
        "an evaluation had %d%s batches, since its generator has ended. Each "
        "goes on where the last one has ended: let the generator yield "
        "validation_steps batches for each.",
        steps,
        f" of {limit}" if limit else "",
    )


def predict(
    distributed: DistributedModel,
    source: data_lib.Source,
    steps: int | None,
    hooks: keras.callbacks.CallbackList,
) -> Any:
    """Returns a model's outputs for all rows, in their order.

    Args:
        distributed: Whose model.
        source: The global batches.
        steps: How many; all by default.
        hooks: The callbacks.

    Raises:
        ConfigurationError: There is no batch.
    """
    source.epochs.begin()
    limit = _limit_of(source, steps)
    iterator = distributed.feed_once(source, steps).iterator(0, limit)
    engine, model = distributed.engine, distributed.model
    batches: list[Any] = []
    model.stop_predicting = False
    hooks.on_predict_begin()
    while limit is None or len(batches) < limit:
        hooks.on_predict_batch_begin(len(batches))
        try:
            with heartbeat.at(heartbeat.PREDICT), distributed.peers.inside():
                outputs = engine.predict(iterator, source)
        except UnevenData as error:
            raise error.after(len(batches)) from None
        if outputs is None:
            break
        batches.append(outputs)
        hooks.on_predict_batch_end(len(batches) - 1, {"outputs": outputs})
        if model.stop_predicting:
            break
    else:
        source.epochs.end()
    hooks.on_predict_end()
    if not batches:
        raise ConfigurationError(data_lib.NO_BATCH)
    return tf.nest.map_structure(_joined, *batches)


def _limit_of(source: data_lib.Source, steps: int | None) -> int | None:
    """Returns the steps of a pass that has begun, if they are known."""
    length = source.epochs.length()
    if length is None:
        return steps or source.steps
    return min(steps or length, length)


def _joined(*parts: Any) -> Any:
    """Joins the outputs of batches; ragged, as in Keras, where they differ."""
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(parts, 0)
    shapes = np.array([part.shape[1:] for part in parts])
    differ = np.flatnonzero((shapes != shapes[0]).any(axis=0))
    if not differ.size:
        return np.concatenate(parts)
    rank = int(differ[-1]) + 1
    return tf.concat(
        [tf.RaggedTensor.from_tensor(p, ragged_rank=rank) for p in parts], 0
    )


def run_steps(
    execute: Callable[[int], Execution],
    limit: int | None,
    pace: Pace,
    at: Position,
    begin: Callable[[int], None],
    end: Callable[[int, Logs], None],
    stopped: Callable[[], bool],
    room: Callable[[int], int] = lambda wanted: wanted,
    between: Callable[[], None] = lambda: None,
    leave_out: Callable[[], None] = lambda: None,
) -> None:
    """Executes up to `limit` steps, or until the data ends.

    Args:
        execute: Does at most the number of steps that it is called with.
        limit: How many; None until the data ends.
        pace: How many in an execution.
        at: The position, which moves.
        begin: Called before the steps of a pace with the index of the first.
        end: Called after them with the index of the last, and the logs.
        stopped: Whether to end before the limit.
        room: Returns how many of the wanted steps may come next.
        between: Called between two executions, and so not after the last,
            which may have more to do before all is in order.
        leave_out: Called before an execution; moves past batches that are
            left out.
    """
    # Of a run that was interrupted, and not at the end of an epoch.
    pending = at.step != limit and not pace.is_over(at.step)
    last = at.logs
    while limit is None or at.step < limit:
        started = time.perf_counter()
        leave_out()
        if at.step == limit:
            break
        wanted = room(pace.wanted(at.step))
        if limit is not None:
            wanted = min(wanted, limit - at.step)
        heartbeat.mark(heartbeat.CALLBACKS)
        if not pending:
            begin(at.step)
        try:
            result = pace.time(execute, wanted)
        except UnevenData as error:
            raise error.after(at.step) from None
        at.votes = result.votes
        if result.steps:
            at.step += result.steps
            at.examples += result.examples
            at.logs, last = result.logs, result.returned or result.logs
            pending = True
        over = result.steps < wanted or at.step == limit
        if pending and (over or pace.is_over(at.step)):
            end(pace.last(at.step), last)
            pending = False
        over = over or stopped()
        at.seconds += time.perf_counter() - started
        if over:
            break
        between()
    if pending:
        end(pace.last(at.step), last)
