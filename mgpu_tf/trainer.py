"""The loop around the engine, in Keras's words.

    trainer = Trainer(build_model, create_strategy("mirrored"))
    history = trainer.fit(train_data, epochs=5, validation_data=test_data)
    trainer.evaluate(test_data)
    trainer.model.save("model.keras")

`fit`, `evaluate` and `predict` take what Keras's take; batch sizes are
global. Every worker of a cluster runs the same script and gets the same
results; only the chief prints.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf import callbacks as callbacks_lib
from mgpu_tf import data as data_lib
from mgpu_tf.arguments import (
    NO_BATCH,
    FitNumbers,
    by_batch,
    check_build_model,
    check_finite,
    check_repeats,
    check_seeded,
    check_steps_per_execution,
    check_verbose,
    data_facts,
    data_shape,
    fit_facts,
    split_validation,
)
from mgpu_tf.callbacks import Callbacks
from mgpu_tf.determinism import enable_determinism
from mgpu_tf.engine import create_engine, keras_internals
from mgpu_tf.engine.base import DataFeed, Engine, Execution, Logs
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.explain import explained
from mgpu_tf.follower import follow
from mgpu_tf.goodput import Meter
from mgpu_tf.pace import Pace
from mgpu_tf.parameter_server import (
    EvaluatorStrategy,
    ParameterServerStrategy,
)
from mgpu_tf.peers import Peers
from mgpu_tf.profiling import Profiler
from mgpu_tf.run_state import EpochRecord, Position, RunState
from mgpu_tf.save_options import SaveOptions, save_options
from mgpu_tf.saver import CheckpointSaver, Saver
from mgpu_tf.strategy import create_strategy, is_chief

# What differs between the same object of two processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

BuildModel = Callable[[], keras.Model]

_log = logging.getLogger("mgpu_tf")


class Trainer:
    """Trains a Keras 3 model on a strategy, with the numbers of one device.

    Example:
        def build_model():
            model = keras.Sequential([keras.layers.Dense(10)])
            model.compile("adam", "mse")
            return model

        trainer = mgpu_tf.Trainer(build_model, strategy)
        trainer.fit(x, y, batch_size=64, epochs=2)

    Args:
        build_model: Returns a compiled model; called in the strategy's scope.
        strategy: From `create_strategy` or a factory; `auto` by default.
        seed: Given to `keras.utils.set_random_seed` before the model is
            built, and the seed of the order of arrays, so that runs repeat
            and agree between strategies. None leaves the generators alone.
        steps_per_execution: Steps in one call of the engine; batch-level
            callbacks are called once for each. "auto" takes what the model
            was compiled with, and where that is 1, as many as fit into about
            half a second, or 1 where a callback of yours has a batch hook.
        gradient_dtype: "bfloat16" or "float16" sends gradients between
            replicas with half the bytes, and rounds them; as they are by
            default.
        profiler: Traces some steps of `fit`; the same on every worker.

    Attributes:
        global_step: Training steps done by this trainer.
        examples_seen: Examples trained on by this trainer.
        records: One `EpochRecord` for each epoch trained.
        saver: What saving and failures have cost the last `fit`.
        meter: Where the time of the process went, as far as `fit` knows.

    Raises:
        ConfigurationError: `build_model` does not return a compiled model
            made inside of it.
    """

    def __init__(
        self,
        build_model: BuildModel,
        strategy: tf.distribute.Strategy | None = None,
        *,
        seed: int | None = 0,
        steps_per_execution: int | str = "auto",
        gradient_dtype: str | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        check_steps_per_execution(steps_per_execution)
        check_build_model(build_model)
        self._strategy = strategy or create_strategy("auto")
        self._seed = seed
        self._steps_per_execution = steps_per_execution
        self._gradient_dtype = gradient_dtype
        self._profiler = profiler or Profiler(0, 0, None)
        self._build_model = build_model
        self._stop_together = False
        self._build()
        self.global_step = 0
        self.examples_seen = 0
        self.records: list[EpochRecord] = []
        self.saver = Saver()
        self.meter = Meter()

    def _build(self) -> None:
        self._is_chief = is_chief(self._strategy)
        self._peers = Peers(self._strategy)
        if self._seed is not None:
            keras.utils.set_random_seed(self._seed)
        with self._peers.together():
            with self._strategy.scope(), self._peers.same_variables():
                self._model = self._build_model()
            self._engine = create_engine(
                self._model, self._strategy, self._gradient_dtype
            )
            if not self._peers.alone:
                self._peers.compare("Trainer", self._model_facts())

    @property
    def model(self) -> keras.Model:
        """Returns the model; save and inspect it as any Keras model."""
        return self._model

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy."""
        return self._strategy

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
        checkpoint_dir: str | None = None,
        save_every_steps: int | None = None,
        save_every_seconds: float | None = None,
        keep_checkpoints: int = 3,
        resume: str = "auto",
    ) -> keras.callbacks.History:
        """Trains the model.

        Args:
            x: Arrays; a `tf.data.Dataset`, a `keras.utils.PyDataset` or a
                generator of global batches; or a function from
                `tf.distribute.InputContext` to a dataset batched with the
                per-replica size.
            y: Targets, for arrays.
            batch_size: Global batch size, for arrays; 32 by default.
            epochs: Index of the epoch to stop before.
            verbose: 0 silent, 1 progress bar, 2 a line for each epoch.
            callbacks: As in Keras; they run on every worker, but files are
                written by the chief alone.
            validation_split: What part of the arrays, the last of them, is
                kept for validation.
            validation_data: `(x, y)`, `(x, y, sample_weight)`, a dataset or
                a dataset_fn, evaluated at the end of epochs.
            shuffle: Whether arrays come in a new order each epoch.
            class_weight: The weight of the examples of each class, for
                integer targets or one-hot ones; a class left out weighs 1.
            sample_weight: Weights, for arrays.
            initial_epoch: Index of the epoch to start at.
            steps_per_epoch: Steps in an epoch; data then goes on from one
                epoch to the next and starts again when it ends. By default
                an epoch is one pass.
            validation_steps: Steps in an evaluation; all data by default.
            validation_batch_size: Global; `batch_size` by default.
            validation_freq: Evaluate every so many epochs.
            checkpoint_dir: A folder that every worker sees, for checkpoints
                of the whole state. Operations are then made to repeat bit
                for bit, and SIGTERM saves and ends the process.
            save_every_steps: Save after each so many steps; at the end of
                every epoch by default, and always at the end of the run.
            save_every_seconds: Save when so much time has passed.
            keep_checkpoints: How many are kept.
            resume: "auto" goes on from the newest usable checkpoint, if any;
                "always" needs one; "never" needs a folder without.

        Returns:
            Keras's `History`; of the whole run where it was resumed.

        Raises:
            ConfigurationError: An argument breaks a rule.
            Preempted: SIGTERM came, and the state is saved.
        """
        with self._peers.together():
            saving = save_options(
                checkpoint_dir,
                every_steps=save_every_steps,
                every_seconds=save_every_seconds,
                keep=keep_checkpoints,
                resume=resume,
            )
            if validation_split:
                x, validation_data = split_validation(
                    x, y, sample_weight, validation_split, validation_data
                )
                y = sample_weight = None
            source = self._source(x, y, sample_weight, batch_size, shuffle)
            if class_weight is not None:
                source = data_lib.with_class_weight(source, class_weight)
            numbers = FitNumbers(
                epochs=epochs,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )
            check_finite("fit", source, steps_per_epoch, "steps_per_epoch")
            check_repeats(numbers, source)
            validation = None
            if validation_data is not None:
                validation = self._source(
                    validation_data,
                    batch_size=None
                    if data_lib.is_batched(validation_data)
                    else validation_batch_size or batch_size,
                )
            if isinstance(self._strategy, EvaluatorStrategy):
                return self._follow(source, validation, numbers, saving)
            while True:
                try:
                    with explained(source):
                        return self._fit(
                            source,
                            validation,
                            numbers,
                            verbose,
                            callbacks_lib.as_list(callbacks),
                            saving,
                        )
                except tf.errors.OpError:
                    if not self._engine.is_lost():
                        raise
                    saving = self._begin_again(saving)

    def _follow(
        self,
        source: data_lib.Source,
        validation: data_lib.Source | None,
        numbers: FitNumbers,
        saving: SaveOptions | None,
    ) -> keras.callbacks.History:
        """Evaluates the checkpoints of the cluster, in place of training."""
        engine = self._prepare(source)
        evaluate = None
        if validation is not None:
            steps = numbers.validation_steps
            feed = self._feed_once(validation, steps)
            hooks = self._callback_list([], 0, 1, None, False)

            def evaluate() -> Logs:
                return self._evaluate(feed, steps, hooks)

        return follow(engine, saving, evaluate, numbers.epochs)

    def _begin_again(self, saving: SaveOptions | None) -> SaveOptions:
        """Makes strategy, model and engine anew where variables were lost.

        Returns:
            The options with which a run goes on from its last checkpoint.
        """
        if saving is None:
            raise ConfigurationError(
                "A run whose parameter server was lost goes on from a "
                "checkpoint. Received: no checkpoint_dir. Pass one to fit()."
            ) from None
        _log.warning(
            "a parameter server was lost; going on from the last checkpoint"
        )
        assert isinstance(self._strategy, ParameterServerStrategy)
        self._strategy = self._strategy.again()
        self._build()
        return dataclasses.replace(saving, resume="auto")

    def _fit(
        self,
        source: data_lib.Source,
        validation_source: data_lib.Source | None,
        numbers: FitNumbers,
        verbose: int | str,
        callbacks: list[keras.callbacks.Callback],
        saving: SaveOptions | None,
    ) -> keras.callbacks.History:
        if not self._peers.alone or saving is not None:
            check_seeded(source)
        validation = None
        if validation_source is not None:
            validation = self._feed_once(
                validation_source, numbers.validation_steps
            )
        if not self._peers.alone:
            self._peers.compare("fit", fit_facts(source, validation, numbers))
        engine = self._prepare(source)
        run = RunState(
            self,
            self._model,
            engine,
            data_shape(source),
            callbacks,
            numbers.initial_epoch,
        )
        self.saver = self._saver(saving, run, callbacks)
        pace = self._pace(callbacks, exact=saving is not None)
        self._stop_together = self._peers.any(bool(callbacks))
        steps = numbers.steps_per_epoch
        hooks = self._callback_list(
            callbacks + callbacks_lib.histograms(callbacks, engine.staleness),
            verbose,
            numbers.epochs,
            steps or source.steps,
            True,
        )
        run.load(self.saver.find())
        self._model.stop_training = False
        hooks.on_train_begin()
        run.begin(keras_internals.take_restored_epoch(self._model))
        feed = engine.feed(
            source,
            run.first_epoch,
            chain=steps is not None or source.seekable,
            training=True,
        )
        if run.resumed:
            feed.resume(run.position.finished, run.position.step)
        last = run.position.epoch if run.stopped else numbers.epochs
        with self.saver.listening():
            for epoch in range(run.position.epoch, last):
                hooks.on_epoch_begin(epoch)
                record = self._train_epoch(run, feed, steps, pace, hooks)
                logs = dict(record.logs)
                if validation and (epoch + 1) % numbers.validation_freq == 0:
                    with self.meter.phase("evaluate"):
                        scores = self._evaluate(
                            validation, numbers.validation_steps, hooks
                        )
                    logs |= {f"val_{name}": v for name, v in scores.items()}
                self.records.append(dataclasses.replace(record, logs=logs))
                hooks.on_epoch_end(epoch, logs)
                stopped = self._stopped()
                run.end_epoch(logs)
                self.saver.boundary(
                    self.global_step, run.position.votes, epoch_ends=True
                )
                if stopped:
                    break
            self.saver.finish()
        self._profiler.close()
        if numbers.epochs > run.first_epoch:
            self._model.optimizer.finalize_variable_values(
                self._model.trainable_weights
            )
        hooks.on_train_end(run.position.last_logs)
        return self._model.history

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
    ) -> Any:
        """Computes loss and metrics; each example counts once.

        Args:
            x: As for `fit`.
            y: Targets, for arrays.
            batch_size: Global batch size, for arrays; 32 by default.
            verbose: 0 silent, 1 progress bar, 2 one line.
            sample_weight: Weights, for arrays.
            steps: Steps to run; all data by default.
            callbacks: As in Keras.
            return_dict: Whether to return a dict by name.

        Returns:
            The loss, a list of loss and metrics, or a dict, as in Keras.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        with self._peers.together():
            source = self._source(x, y, sample_weight, batch_size)
            self._compare("evaluate", source, steps)
            hooks = self._callback_list(
                callbacks_lib.as_list(callbacks),
                verbose,
                1,
                steps or source.steps,
                False,
            )
            feed = self._feed_once(source, steps)
            with explained(source):
                scores = self._evaluate(feed, steps, hooks)
        if return_dict:
            return scores
        return keras_internals.in_order(self._model, scores)

    def predict(
        self,
        x: Any,
        *,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
    ) -> Any:
        """Returns the model's outputs in the order of the rows.

        Args:
            x: Arrays or a `tf.data.Dataset` with the global batch size.
            batch_size: Global batch size, for arrays; 32 by default.
            verbose: 0 silent, 1 progress bar, 2 one line.
            steps: Steps to run; all data by default.
            callbacks: As in Keras.

        Returns:
            Arrays of shape `[examples, ...]` in the structure of the model's
            outputs, the same on every worker.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        with self._peers.together():
            source = self._source(x, batch_size=batch_size)
            if not source.totals_known:
                raise ConfigurationError(
                    "predict keeps the order of rows, which a dataset_fn does "
                    "not tell. Received: a dataset_fn. Pass arrays or a "
                    "tf.data.Dataset."
                )
            check_finite("predict", source, steps)
            self._compare("predict", source, steps)
            hooks = self._callback_list(
                callbacks_lib.as_list(callbacks),
                verbose,
                1,
                steps or source.steps,
                False,
            )
            with explained(source):
                return self._predict(source, steps, hooks)

    def _predict(
        self,
        source: data_lib.Source,
        steps: int | None,
        hooks: keras.callbacks.CallbackList,
    ) -> Any:
        engine = self._current_engine()
        limit = steps or source.steps
        iterator = self._feed_once(source, steps).iterator(0, limit)
        batches: list[Any] = []
        hooks.on_predict_begin()
        while limit is None or len(batches) < limit:
            hooks.on_predict_batch_begin(len(batches))
            outputs = engine.predict(iterator, source)
            if outputs is None:
                break
            batches.append(outputs)
            hooks.on_predict_batch_end(len(batches) - 1, {"outputs": outputs})
        hooks.on_predict_end()
        if not batches:
            raise ConfigurationError(NO_BATCH)
        return tf.nest.map_structure(
            lambda *parts: np.concatenate(parts), *batches
        )

    def save(self, path: str, **options: Any) -> None:
        """Saves the model, optimizer state included, from the chief.

        Every worker calls it and returns when the file is there.
        `keras.models.load_model(path)` in `build_model` goes on from it.

        Args:
            path: Ends with `.keras`.
            **options: For `keras.Model.save`.
        """
        self._write(lambda: self._model.save(path, **options))

    def save_weights(self, path: str, **options: Any) -> None:
        """Saves the weights from the chief; every worker calls it.

        Args:
            path: Ends with `.weights.h5`.
            **options: For `keras.Model.save_weights`.
        """
        self._write(lambda: self._model.save_weights(path, **options))

    def export(self, path: str, **options: Any) -> None:
        """Writes a SavedModel for serving; every worker calls it.

        Args:
            path: A folder.
            **options: For `keras.Model.export`.
        """
        self._write(lambda: self._model.export(path, **options))

    def train_on_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses; a `Trainer` owns its loop.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(by_batch("train_on_batch", "fit"))

    def test_on_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses; a `Trainer` owns its loop.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(by_batch("test_on_batch", "evaluate"))

    def predict_on_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses; a `Trainer` owns its loop.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(by_batch("predict_on_batch", "predict"))

    def _write(self, write: Callable[[], Any]) -> None:
        with self._peers.together():
            if self._is_chief:
                write()
            self._peers.any(False)

    def _model_facts(self) -> dict[str, str]:
        model = self._model
        with warnings.catch_warnings():
            # It is compared, and not saved.
            warnings.simplefilter("ignore")
            config = str(model.optimizer.get_config())
        return {
            "seed": str(self._seed),
            "steps_per_execution": str(self._steps_per_execution),
            "optimizer": _ADDRESS.sub("", config),
            "jit_compile": str(model.jit_compile),
        }

    def _compare(
        self, call: str, source: data_lib.Source, steps: int | None
    ) -> None:
        if not self._peers.alone:
            check_seeded(source)
            facts = data_facts(source) | {"steps": str(steps)}
            self._peers.compare(call, facts)

    def _prepare(self, source: data_lib.Source) -> Engine:
        engine = self._current_engine()
        with self._strategy.scope(), self._peers.same_variables():
            engine.prepare(source)
        return engine

    def _source(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> data_lib.Source:
        return data_lib.as_source(
            x,
            y,
            sample_weight,
            strategy=self._strategy,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self._seed or 0,
        )

    def _current_engine(self) -> Engine:
        """Returns the engine, a new one where the model was recompiled."""
        if not self._engine.is_current():
            self._engine = create_engine(
                self._model, self._strategy, self._gradient_dtype
            )
        return self._engine

    def _feed_once(
        self, source: data_lib.Source, steps: int | None
    ) -> DataFeed:
        """Returns a feed of whole passes, for evaluations."""
        whole = steps is None or steps == source.steps
        return self._current_engine().feed(
            source, chain=source.seekable and whole, training=False
        )

    def _saver(
        self,
        options: SaveOptions | None,
        run: RunState,
        callbacks: list[keras.callbacks.Callback],
    ) -> Saver:
        if options is None:
            return Saver()
        callbacks_lib.refuse_restoring(callbacks)
        enable_determinism()
        return CheckpointSaver(
            options,
            self._peers,
            is_chief=self._is_chief,
            capture=run.capture,
        )

    def _train_epoch(
        self,
        run: RunState,
        feed: DataFeed,
        steps: int | None,
        pace: Pace,
        hooks: keras.callbacks.CallbackList,
    ) -> EpochRecord:
        engine, source, at = self._engine, feed.source, run.position
        limit = steps or source.steps
        iterator = feed.iterator(at.epoch, limit)
        if not run.begin_epoch():
            engine.reset_metrics()

        def train(wanted: int) -> Execution:
            votes = self.saver.votes()
            left = wanted if limit is None else limit - at.step
            ahead = self.saver.room(self.global_step, left)
            started = time.perf_counter()
            with self._profiler.around(self.global_step):
                done = engine.train(
                    iterator, wanted, source, pace.seconds, votes, ahead
                )
            self._profiler.note(
                self.global_step + done.steps, done.steps, done.input_seconds
            )
            self.meter.execution(
                time.perf_counter() - started,
                done.steps,
                done.input_seconds,
                done.traced,
            )
            return self._count(done)

        self._run_steps(
            train,
            limit,
            pace,
            hooks.on_train_batch_begin,
            hooks.on_train_batch_end,
            self._stopped,
            at,
            self.saver,
        )
        rest = self._count(engine.finish(iterator))
        at.step += rest.steps
        at.examples += rest.examples
        if not at.step:
            raise ConfigurationError(NO_BATCH)
        return EpochRecord(
            at.epoch, at.step, at.examples, at.seconds, at.logs | rest.logs
        )

    def _count(self, execution: Execution) -> Execution:
        self.global_step += execution.steps
        self.examples_seen += execution.examples
        return execution

    def _evaluate(
        self,
        feed: DataFeed,
        steps: int | None,
        hooks: keras.callbacks.CallbackList,
    ) -> Logs:
        source = feed.source
        check_finite("evaluate", source, steps)
        engine = self._prepare(source)
        engine.reset_metrics()
        pace = Pace(self._fixed_steps())
        limit = steps or source.steps
        iterator = feed.iterator(0, limit)
        self._model.stop_evaluating = False
        hooks.on_test_begin()
        at = Position()
        self._run_steps(
            lambda wanted: engine.evaluate(
                iterator, wanted, source, pace.seconds
            ),
            limit,
            pace,
            hooks.on_test_batch_begin,
            hooks.on_test_batch_end,
            lambda: self._model.stop_evaluating,
            at,
            Saver(),
        )
        if not at.step:
            raise ConfigurationError(NO_BATCH)
        if at.step != limit:
            feed.restart()
        hooks.on_test_end(at.logs)
        return at.logs

    def _run_steps(
        self,
        execute: Callable[[int], Execution],
        limit: int | None,
        pace: Pace,
        begin: Callable[[int], None],
        end: Callable[[int, Logs], None],
        stopped: Callable[[], bool],
        at: Position,
        saver: Saver,
    ) -> None:
        """Executes up to `limit` steps, or until the data ends.

        Saves between executions; at the end of an epoch that is left for
        when its evaluation and its callbacks are done.
        """
        while limit is None or at.step < limit:
            started = time.perf_counter()
            wanted = saver.room(self.global_step, pace.steps)
            wanted = self._profiler.room(self.global_step, wanted)
            if limit is not None:
                wanted = min(wanted, limit - at.step)
            begin(at.step)
            result = pace.time(execute, wanted)
            at.votes = result.votes
            if result.steps:
                at.step += result.steps
                at.examples += result.examples
                at.logs = result.logs
                end(at.step - 1, at.logs)
            over = result.steps < wanted or stopped() or at.step == limit
            at.seconds += time.perf_counter() - started
            if over:
                break
            saver.boundary(self.global_step, at.votes)

    def _stopped(self) -> bool:
        """Returns whether a callback of any worker has ended the training."""
        if self._stop_together:
            self._model.stop_training = self._peers.any(
                self._model.stop_training
            )
        return bool(self._model.stop_training)

    def _fixed_steps(self) -> int | None:
        if self._steps_per_execution != "auto":
            return int(self._steps_per_execution)
        compiled = self._model.steps_per_execution
        return compiled if compiled > 1 else None

    def _pace(
        self, callbacks: list[keras.callbacks.Callback], *, exact: bool
    ) -> Pace:
        fixed = self._fixed_steps()
        watched = self._peers.any(
            any(map(keras_internals.sees_every_batch, callbacks))
        )
        if fixed is None and watched:
            fixed = 1
        if fixed is None and exact and self._engine.boundaries_matter:
            fixed = Pace.EXACT_STEPS
        return Pace(fixed)

    def _callback_list(
        self,
        callbacks: list[keras.callbacks.Callback],
        verbose: int | str,
        epochs: int,
        steps: int | None,
        training: bool,
    ) -> keras.callbacks.CallbackList:
        check_verbose(verbose)
        if not self._is_chief:
            verbose = 0
            callbacks = callbacks_lib.for_other_workers(callbacks)
        return keras.callbacks.CallbackList(
            callbacks,
            add_history=training,
            add_progbar=verbose != 0,
            model=self._model,
            verbose=1 if verbose == "auto" else verbose,
            epochs=epochs,
            steps=steps,
        )
