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
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.synchronous import Execution, Logs, SynchronousEngine
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategy import create_strategy, is_chief

BuildModel = Callable[[], keras.Model]


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What an epoch of training took.

    Attributes:
        epoch: Index of the epoch, from 0.
        steps: Steps done.
        examples: Examples seen, over all replicas.
        seconds: Time for the steps; evaluation and callbacks at the end of
            the epoch are not in it.
        logs: The logs of the epoch as `History` has them.
    """

    epoch: int
    steps: int
    examples: int
    seconds: float
    logs: Logs

    @property
    def examples_per_second(self) -> float:
        """Returns the rate over the whole epoch, tracing included."""
        return self.examples / self.seconds if self.seconds else 0.0


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

    Attributes:
        global_step: Training steps done by this trainer.
        examples_seen: Examples trained on by this trainer.
        records: One `EpochRecord` for each epoch trained.

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
    ) -> None:
        _check_steps_per_execution(steps_per_execution)
        self._strategy = strategy or create_strategy("auto")
        self._seed = seed
        self._steps_per_execution = steps_per_execution
        self._is_chief = is_chief(self._strategy)
        if seed is not None:
            keras.utils.set_random_seed(seed)
        with self._strategy.scope():
            self._model = build_model()
        self._engine = SynchronousEngine(self._model, self._strategy)
        self.global_step = 0
        self.examples_seen = 0
        self.records: list[EpochRecord] = []

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
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Trains the model.

        Args:
            x: Arrays, a `tf.data.Dataset` batched with the global batch
                size, or a function from `tf.distribute.InputContext` to a
                dataset batched with the per-replica size.
            y: Targets, for arrays.
            batch_size: Global batch size, for arrays; 32 by default.
            epochs: Index of the epoch to stop before.
            verbose: 0 silent, 1 progress bar, 2 a line for each epoch.
            callbacks: As in Keras.
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

        Returns:
            Keras's `History`.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        source = self._source(x, y, sample_weight, batch_size, shuffle)
        if class_weight is not None:
            source = data_lib.with_class_weight(source, class_weight)
        _check_epochs(epochs, initial_epoch, steps_per_epoch, source)
        validation = None
        if validation_data is not None:
            validation = self._feed_once(
                self._source(
                    validation_data,
                    batch_size=_array_batch(
                        validation_data, validation_batch_size or batch_size
                    ),
                ),
                validation_steps,
            )
        engine = self._current_engine()
        engine.prepare(source)
        pace = self._pace(callbacks)
        hooks = self._callback_list(
            callbacks, verbose, epochs, steps_per_epoch or source.steps, True
        )
        self._model.stop_training = False
        hooks.on_train_begin()
        logs: Logs = {}
        feed = data_lib.Feed(
            source,
            self._strategy,
            initial_epoch,
            chain=steps_per_epoch is not None or source.seekable,
        )
        for epoch in range(initial_epoch, epochs):
            hooks.on_epoch_begin(epoch)
            record = self._train_epoch(
                epoch, feed, steps_per_epoch, pace, hooks
            )
            logs = dict(record.logs)
            if validation and (epoch + 1) % validation_freq == 0:
                scores = self._evaluate(validation, validation_steps, hooks)
                logs |= {f"val_{name}": v for name, v in scores.items()}
            self.records.append(dataclasses.replace(record, logs=logs))
            hooks.on_epoch_end(epoch, logs)
            if self._model.stop_training:
                break
        if epochs > initial_epoch:
            self._model.optimizer.finalize_variable_values(
                self._model.trainable_weights
            )
        hooks.on_train_end(logs)
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
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
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
        source = self._source(x, y, sample_weight, batch_size)
        hooks = self._callback_list(
            callbacks, verbose, 1, steps or source.steps, False
        )
        scores = self._evaluate(self._feed_once(source, steps), steps, hooks)
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
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
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
        source = self._source(x, batch_size=batch_size)
        if not source.totals_known:
            raise ConfigurationError(
                "predict keeps the order of rows, which a dataset_fn does "
                "not tell. Received: a dataset_fn. Pass arrays or a "
                "tf.data.Dataset."
            )
        _check_finite("predict", source, steps)
        engine = self._current_engine()
        limit = steps or source.steps
        hooks = self._callback_list(callbacks, verbose, 1, limit, False)
        iterator = iter(data_lib.distribute(source, self._strategy))
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
        return tf.nest.map_structure(
            lambda *parts: np.concatenate(parts), *batches
        )

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

    def _current_engine(self) -> SynchronousEngine:
        """Returns the engine, a new one where the model was recompiled."""
        if not self._engine.is_current():
            self._engine = SynchronousEngine(self._model, self._strategy)
        return self._engine

    def _feed_once(
        self, source: data_lib.Source, steps: int | None
    ) -> data_lib.Feed:
        """Returns a feed of whole passes, for evaluations."""
        whole = steps is None or steps == source.steps
        return data_lib.Feed(
            source, self._strategy, chain=source.seekable and whole
        )

    def _train_epoch(
        self,
        epoch: int,
        feed: data_lib.Feed,
        steps: int | None,
        pace: _Pace,
        hooks: keras.callbacks.CallbackList,
    ) -> EpochRecord:
        engine, source = self._engine, feed.source
        iterator = feed.iterator(epoch)
        engine.reset_metrics()

        def train(wanted: int) -> Execution:
            result = engine.train(iterator, wanted, source, pace.seconds)
            self.global_step += result.steps
            self.examples_seen += result.examples
            return result

        started = time.perf_counter()
        done, examples, logs = self._run_steps(
            train,
            steps or source.steps,
            pace,
            hooks.on_train_batch_begin,
            hooks.on_train_batch_end,
            lambda: self._model.stop_training,
        )
        seconds = time.perf_counter() - started
        return EpochRecord(epoch, done, examples, seconds, logs)

    def _evaluate(
        self,
        feed: data_lib.Feed,
        steps: int | None,
        hooks: keras.callbacks.CallbackList,
    ) -> Logs:
        source = feed.source
        _check_finite("evaluate", source, steps)
        engine = self._current_engine()
        engine.prepare(source)
        engine.reset_metrics()
        pace = _Pace(self._fixed_steps())
        iterator = feed.iterator(0)
        self._model.stop_evaluating = False
        hooks.on_test_begin()
        limit = steps or source.steps
        done, _, logs = self._run_steps(
            lambda wanted: engine.evaluate(
                iterator, wanted, source, pace.seconds
            ),
            limit,
            pace,
            hooks.on_test_batch_begin,
            hooks.on_test_batch_end,
            lambda: self._model.stop_evaluating,
        )
        if done != limit:
            feed.restart()
        hooks.on_test_end(logs)
        return logs

    def _run_steps(
        self,
        execute: Callable[[int], Execution],
        limit: int | None,
        pace: _Pace,
        begin: Callable[[int], None],
        end: Callable[[int, Logs], None],
        stopped: Callable[[], bool],
    ) -> tuple[int, int, Logs]:
        """Executes up to `limit` steps, or until the data ends.

        Returns:
            The steps, the examples in them, and the last logs.
        """
        done = examples = 0
        logs: Logs = {}
        while limit is None or done < limit:
            wanted = pace.steps
            if limit is not None:
                wanted = min(wanted, limit - done)
            begin(done)
            result = pace.time(execute, wanted)
            if result.steps:
                done += result.steps
                examples += result.examples
                logs = result.logs
                end(done - 1, logs)
            if result.steps < wanted or stopped():
                break
        return done, examples, logs

    def _fixed_steps(self) -> int | None:
        if self._steps_per_execution != "auto":
            return int(self._steps_per_execution)
        compiled = self._model.steps_per_execution
        return compiled if compiled > 1 else None

    def _pace(
        self, callbacks: Sequence[keras.callbacks.Callback] | None
    ) -> _Pace:
        fixed = self._fixed_steps()
        watched = any(map(keras_internals.sees_every_batch, callbacks or ()))
        return _Pace(1 if fixed is None and watched else fixed)

    def _callback_list(
        self,
        callbacks: Sequence[keras.callbacks.Callback] | None,
        verbose: int | str,
        epochs: int,
        steps: int | None,
        training: bool,
    ) -> keras.callbacks.CallbackList:
        if not self._is_chief:
            verbose = 0
        return keras.callbacks.CallbackList(
            list(callbacks or ()),
            add_history=training,
            add_progbar=verbose != 0,
            model=self._model,
            verbose=1 if verbose == "auto" else verbose,
            epochs=epochs,
            steps=steps,
        )


class _Pace:
    """How many steps go into the next execution.

    All workers must ask for the same number. They do, because the number
    follows from times that the engine averaged over them.
    """

    TARGET_SECONDS = 0.5
    MOST_STEPS = 1000

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self.steps = fixed or 1
        self.seconds = 0.0
        self._timed = 0
        self._calls = 0

    def time(
        self, execute: Callable[[int], Execution], steps: int
    ) -> Execution:
        """Runs an execution and settles the size of the next one.

        The mean time that comes back belongs to the call before; the time
        of the first call is dropped, since it traces the function.
        """
        started = time.perf_counter()
        result = execute(steps)
        before = self._timed
        self._timed = steps
        self.seconds = time.perf_counter() - started
        self._calls += 1
        if self._fixed is None and self._calls > 2 and result.seconds > 0:
            per_step = result.seconds / before
            fitting = int(self.TARGET_SECONDS / per_step)
            most = min(8 * self.steps, self.MOST_STEPS)
            self.steps = max(1, min(fitting, most))
        return result


def _array_batch(validation_data: Any, batch_size: int | None) -> int | None:
    """Leaves out the batch size for data that is batched already."""
    return batch_size if isinstance(validation_data, (tuple, list)) else None


def _check_steps_per_execution(value: int | str) -> None:
    if value == "auto" or (isinstance(value, int) and value >= 1):
        return
    raise ConfigurationError(
        "steps_per_execution must be 1 or more, or 'auto'. Received: "
        f"steps_per_execution={value!r}."
    )


def _check_epochs(
    epochs: int,
    initial_epoch: int,
    steps_per_epoch: int | None,
    source: data_lib.Source,
) -> None:
    for name, value, least in (
        ("epochs", epochs, 1),
        ("initial_epoch", initial_epoch, 0),
        ("steps_per_epoch", steps_per_epoch, 1),
    ):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigurationError(
                f"{name} must be an integer of {least} or more. Received: "
                f"{name}={value!r}."
            )
    _check_finite("fit", source, steps_per_epoch, "steps_per_epoch")


def _check_finite(
    method: str,
    source: data_lib.Source,
    steps: int | None,
    argument: str = "steps",
) -> None:
    if source.endless and steps is None:
        raise ConfigurationError(
            f"Data without an end needs {argument}. Received: an infinite "
            f"dataset and {argument}=None. Call {method}(..., {argument}=N)."
        )
