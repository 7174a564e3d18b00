"""The `Trainer`: Keras's `fit`, `evaluate` and `predict` on a strategy.

    trainer = Trainer(build_model, create_strategy("mirrored"))
    history = trainer.fit(train_data, epochs=5, validation_data=test_data)
    trainer.evaluate(test_data)
    trainer.save("model.keras")

`fit`, `evaluate` and `predict` take the arguments of Keras's methods. Batch
sizes are global. Every worker of a cluster runs the same script and gets the
same results. Only the chief prints.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.checkpoints import storage, store
from mgpu_tf.checkpoints.callback_state import remembered, remind
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.recovery import Recovery
from mgpu_tf.checkpoints.run_state import EpochRecord
from mgpu_tf.checkpoints.saving.writer import Variables, read_state
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.step.base import Logs
from mgpu_tf.engine.step.traced import excerpts
from mgpu_tf.engine.storage import memory_of
from mgpu_tf.errors import ConfigurationError, DivergedError
from mgpu_tf.fields import made_of
from mgpu_tf.folders import write_whole
from mgpu_tf.options import SaveOptions, StepOptions, StrategyOptions
from mgpu_tf.reports import trackers
from mgpu_tf.reports.device_times import Profile
from mgpu_tf.reports.goodput import Goodput, Meter
from mgpu_tf.reports.memory import MemoryTable
from mgpu_tf.reports.pipeline_plan import PipelinePlan
from mgpu_tf.reports.pipeline_trace import (
    PredictionTrace,
    StepTrace,
    joined,
    share_of,
)
from mgpu_tf.reports.profiling import Profiler
from mgpu_tf.reports.report import LeftOut
from mgpu_tf.reports.stragglers import Slow
from mgpu_tf.runtime.room import lacks_room
from mgpu_tf.strategies.registry import (
    kind_of,
    strategy_from,
    strategy_of_scope,
)
from mgpu_tf.training import callbacks as callbacks_lib
from mgpu_tf.training.call_arguments import (
    FitNumbers,
    by_batch,
    check_build_model,
    check_called,
    check_evaluation,
    check_finite,
    check_flag,
    check_fraction,
    check_repeats,
    check_restores,
    check_steps_per_execution,
    check_trained,
    file_path,
    saving_of,
    split_validation,
    unpack_validation,
    without_trainer,
)
from mgpu_tf.training.callbacks import Callbacks
from mgpu_tf.training.data_errors import explained
from mgpu_tf.training.distributed_model import BuildModel, DistributedModel
from mgpu_tf.training.evaluator import follow
from mgpu_tf.training.loops import loop
from mgpu_tf.training.loops.replay import (
    FOUND,
    Replay,
    asked,
    left_out_before,
    options_of,
    replay,
    report_verdict,
)
from mgpu_tf.training.loops.totals import Totals
from mgpu_tf.training.model_file import check_room, streamed
from mgpu_tf.training.profiled import profile_of

_log = logging.getLogger("mgpu_tf")

# Where options go that are not of steps.
_TAKERS = {"create_strategy": StrategyOptions, "SaveOptions": SaveOptions}


# What a callback may call of its model.
_KERAS_CALLS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)


class Trainer:
    """Trains a Keras 3 model on a strategy, to the numbers of one device.

    Example:
        def build_model():
            model = keras.Sequential([keras.layers.Dense(10)])
            model.compile("adam", "mse")
            return model

        trainer = mgpu_tf.Trainer(build_model, strategy)
        trainer.fit(x, y, batch_size=64, epochs=2)

    Args:
        build_model: A function that returns a compiled model. It is called in
            the strategy's scope. Or a compiled model that was made in `with
            strategy.scope():`.
        strategy: From `create_strategy` or a factory, or a name for
            `create_strategy`. Default: that of the scope in which a model was
            made; else `auto`.
        seed: The seed for `keras.utils.set_random_seed`, which is called before
            the model is built, and for the order of arrays. With a seed, runs
            repeat and agree between strategies. "auto" takes the seed that
            `keras.utils.set_random_seed` was given last, or 0. None sets no
            seed.
        steps_per_execution: Number of steps in one call of the engine.
            Batch-level callbacks are called once for each call of the engine.
            "auto" takes the number that the model was compiled with. If that
            number is 1, "auto" takes as many steps as fit into about half a
            second, or 1 if one of your callbacks has a batch hook.
        profiler: Traces some steps of `fit`. Must be the same on every worker.
        **options: The fields of `StepOptions`:
            precision: "mixed_bfloat16" or "mixed_float16": the dtype policy of
                Keras while `build_model` is called. Default: the policy that
                is set.
            gradient_dtype: "bfloat16" or "float16" rounds gradients to this
                type before replicas exchange them. Default: no rounding.
            embedding_gradients: "keras" gives the optimizer one gradient row
                for each lookup of an index, as Keras does. "summed" adds up
                the rows of each index first; the result is the gradient of
                the loss.
            step_parts: Compute the rows of each replica in this number of
                parts, one after another, and add up their gradients.
            auto_micro_batch: Before training, double `step_parts` while the
                gradients of a batch do not fit, on every worker.
            kernels: "fused" runs what Keras does in several operations as one
                of TensorFlow's, for the layers and optimizers where both
                compute the same. "keras" runs all as Keras does.
            recompute: "layers" keeps only the inputs of each layer for the
                backward pass, and computes the layer again there: less
                memory, more computing. Names of layers or models do so for
                these alone: a list, or a string with commas, in which "*"
                matches anything; or a function that says of a layer
                whether it is computed again. "stages" does the same with the
                stages of a pipeline. Default: "layers" where weights are
                split.
            random: "equal" gives each replica its rows of the random numbers
                that one device draws for the global batch. "per_replica" lets
                each replica draw its own.
            batch_normalization: "synchronized" lets every BatchNormalization
                take the statistics of the global batch, as on one device.
                "keras" leaves each layer as it was made.
            jit_compile: "auto" decides by a short trial, during training
                steps, whether XLA compiles the steps, and logs the choice.
                Default: the `jit_compile` of the model's `compile`.
            noise_scale: Whether to measure the gradient noise scale from the
                gradients of replicas or micro-batches, and to log it with the
                metrics.
            check_replicas_every: After every N steps, check that all copies of
                weights and optimizer state, or of their parts, are the same,
                bit for bit.
            on_nan: "stop" ends `fit` with the step at which the loss was no
                finite number first. "restore" goes back to the last
                checkpoint and leaves out the batch of the step. "ignore" goes
                on, as Keras does.
            max_restores: The number of batches that "restore" may leave out.
            max_loss: With "stop" and "restore", treat a step whose loss is
                above this number like one whose loss is NaN or infinite.

    Raises:
        ConfigurationError: `build_model` does not return a compiled model that
            was made inside `build_model`.
    """

    def __init__(
        self,
        build_model: BuildModel | keras.Model,
        strategy: tf.distribute.Strategy | str | None = None,
        *,
        seed: int | str | None = "auto",
        steps_per_execution: int | str = "auto",
        profiler: Profiler | None = None,
        **options: Any,
    ) -> None:
        check_steps_per_execution(steps_per_execution)
        check_build_model(build_model)
        if strategy is None and isinstance(build_model, keras.Model):
            strategy = strategy_of_scope(build_model)
        self._distributed = DistributedModel(
            build_model,
            strategy_from(strategy),
            seed=seed,
            steps_per_execution=steps_per_execution,
            options=options_of(
                made_of(StepOptions, options, "Trainer", _TAKERS)
            ),
        )
        if profiler is not None and not isinstance(profiler, Profiler):
            raise ConfigurationError(
                "profiler must be a Profiler. Received: "
                f"{type(profiler).__name__}. Leave it out."
            )
        self._profiler = profiler or Profiler(0, 0, None)
        self._totals = Totals()
        self._delegate_calls()

    @property
    def model(self) -> keras.Model:
        """Returns the model, which is an ordinary Keras model."""
        return self._distributed.model

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy."""
        return self._distributed.strategy

    @property
    def global_step(self) -> int:
        """Returns the number of training steps."""
        return self._totals.global_step

    @property
    def examples_seen(self) -> int:
        """Returns the number of examples in the training steps."""
        return self._totals.examples_seen

    @property
    def records(self) -> list[EpochRecord]:
        """Returns one `EpochRecord` for each epoch of training."""
        return self._totals.records

    @property
    def fused(self) -> dict[str, int]:
        """Returns how many layers and optimizers run as fused operations.

        By class, such as `{"Adam": 1, "BatchNormalization": 19}`. They are
        known once steps have run.
        """
        return self._distributed.engine.kernels.replaced

    @property
    def step_options(self) -> StepOptions:
        """Returns how steps are computed, with what was chosen for memory."""
        return self._distributed.options

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Returns the stages of the model; None where there is no pipeline.

        They are known once the model is built.
        """
        return self._distributed.engine.pipeline

    @property
    def recovery(self) -> Recovery:
        """Returns the cost of failures in the last `fit`, over restarts."""
        return self._totals.saver.recovery

    @property
    def left_out(self) -> list[LeftOut]:
        """Returns the batches that `on_nan="restore"` has left out."""
        return self._totals.left_out

    @property
    def slow(self) -> list[Slow]:
        """Returns the workers that were found slow in the last `fit`."""
        return self._totals.slow

    @property
    def step_times(self) -> list[dict[str, Any]]:
        """Returns what a step took on each worker, in epochs of the last `fit`.

        Each entry has the number of the epoch, from 1, and for each worker the
        medians of `input`, `compute` and `step` in seconds, or None.
        """
        return self._totals.step_times

    @property
    def distributions(self) -> list[dict[str, Any]]:
        """Returns how often a step took how long, for each worker.

        Of the last `fit`, since it was resumed. Each worker has `step`, and
        where there are several `compute`, the time for the gradients of its
        own rows. `mgpu_tf.reports.distribution` has what each holds.
        """
        return self._totals.distributions

    @property
    def goodput(self) -> Goodput:
        """Returns how the time of the run was spent, over restarts."""
        return self._totals.meter.goodput()

    @property
    def meter(self) -> Meter:
        """Returns what measures the time of the run."""
        return self._totals.meter

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        checkpoint_dir: str | None = None,
        checkpoint: SaveOptions | None = None,
        log_with: str | Sequence[str] | None = None,
    ) -> keras.callbacks.History:
        """Trains the model.

        Args:
            x: One of:
                - an array `[examples, ...]`, or a nested list, tuple or dict
                  of arrays;
                - an `mgpu_tf.RandomAccess`, examples by number;
                - a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator
                  of global batches;
                - a function from `tf.distribute.InputContext` to a dataset of
                  per-replica batches.
                For a task of keras-hub the data is raw, such as texts, and a
                list is one array.
            y: Targets `[examples, ...]`, for arrays. May be nested.
            batch_size: Global batch size, for arrays. Default: 32, or with
                `steps_per_epoch` the size that gives this number of steps.
            epochs: Index of the epoch to stop before.
            verbose: 0 is silent, 1 a progress bar, 2 a line for each epoch.
                "auto" is 1 on a terminal and in a notebook, and 2 in a log.
            callbacks: As in Keras. They run on every worker, so that all take
                the same decisions. Those of Keras that write files, those of
                trackers (wandb, mlflow, comet_ml, neptune), and those with an
                attribute `chief_only = True` run on the chief alone.
            validation_split: The fraction of the arrays, taken from the end,
                that is used for validation.
            validation_data: `(x, y)`, `(x, y, sample_weight)`, a dataset or
                a dataset_fn, evaluated at the end of epochs.
            shuffle: Whether arrays have a new order in each epoch. "batch"
                shuffles within batches. Arrays of a task of keras-hub keep
                their order, as in the task's own `fit`.
            class_weight: The weight of each class, for integer or one-hot
                targets. A missing class has the weight 1.
            sample_weight: Weights `[examples]`, for arrays.
            initial_epoch: Index of the epoch to start at.
            steps_per_epoch: Number of steps in an epoch. Data then continues
                from one epoch to the next and starts again when it ends.
                Default: an epoch is one pass.
            validation_steps: Number of steps in an evaluation. Default: all
                data.
            validation_batch_size: Global batch size. Default: `batch_size`.
            validation_freq: Evaluate after every Nth epoch, or after the
                epochs of a list, counted from 1.
            checkpoint_dir: A folder for checkpoints, which every worker sees,
                or an address of object storage such as s3://bucket/run.
                A checkpoint is saved after each epoch. `fit` resumes from the
                newest checkpoint in the folder. Operations repeat bit for bit.
                SIGTERM saves a checkpoint and ends the process.
            checkpoint: In place of `checkpoint_dir`, `SaveOptions`: the
                folder, when to save, how many checkpoints to keep, and
                whether to resume.
            log_with: Trackers that get each epoch: `tensorboard`, `mlflow`,
                `wandb`, `prometheus`, or several of them. A tracker with
                settings, such as `WandbTracker("project")`, is a callback.

        Returns:
            Keras's `History`. A resumed run returns that of the whole run.

        Raises:
            ConfigurationError: An argument breaks a rule.
            Preempted: SIGTERM was received, and the state is saved.
            DivergedError: Replicas differ, or the loss is not finite, where
                `check_replicas_every` or `on_nan` looks for it.
            OutOfMemoryError: A device has no room for a step.
        """
        with self._distributed.peers.together("fit"):
            saving = saving_of(checkpoint_dir, checkpoint)
            check_called(self.model, "fit", "make_train_function")
            check_trained(self.model)
            if check_fraction(validation_split):
                if not data_lib.is_batched(x):
                    x, y, sample_weight = self._distributed.arrays(
                        x, y, sample_weight
                    )
                (x, y, sample_weight), validation_data = split_validation(
                    x, y, sample_weight, validation_split, validation_data
                )
            numbers = FitNumbers(
                epochs=epochs,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )
            source = self._distributed.source(
                x, y, sample_weight, batch_size, shuffle, steps_per_epoch
            )
            if class_weight is not None:
                source = data_lib.with_class_weight(source, class_weight)
            check_finite("fit", source, steps_per_epoch, "steps_per_epoch")
            check_repeats(numbers, source)
            validation = None
            if validation_data is not None:
                check_called(self.model, "evaluate", "make_test_function")
                val_x, val_y, weight = unpack_validation(
                    validation_data, targets=y is not None
                )
                size = validation_batch_size or batch_size
                if data_lib.is_batched(val_x):
                    size = None
                validation = self._distributed.source(
                    val_x, val_y, weight, size, steps=validation_steps
                )
            if not kind_of(self.strategy).trains:
                return self._follow(source, validation, numbers, saving)
            hooks = callbacks_lib.as_list(callbacks)
            hooks += trackers.by_name(log_with)
            for hook in hooks:
                if isinstance(hook, trackers.Tracker):
                    hook.measured = self._measured
            before = [remembered(hook, self.model) for hook in hooks]
            self._totals.left_out.clear()
            self._totals.slow.clear()
            self._totals.step_times.clear()
            self._totals.distributions.clear()

            def training(
                kind: Callable[..., loop.Training], source: data_lib.Source
            ) -> Any:
                return kind(
                    self._distributed,
                    self._totals,
                    source,
                    validation,
                    numbers,
                    hooks,
                    verbose,
                    saving,
                    self._profiler,
                )

            def go_back() -> None:
                for callback, values in zip(hooks, before, strict=True):
                    remind(callback, values)

            step = asked()
            if step is not None and saving is not None:
                self._replay(
                    step, saving.folder, source, training, go_back, verbose
                )
            if self._distributed.options.on_nan == "restore":
                check_restores(source, saving)
            if self._distributed.options.auto_micro_batch:
                self._distributed.fit_memory(source)
            while True:
                try:
                    with explained(source):
                        return training(loop.Training, source).run()
                except loop.BadStep as bad:
                    saving = self._leave_out(bad.batch, saving)
                    source = source.anew()
                    go_back()
                except (MemoryError, tf.errors.OpError) as error:
                    if lacks_room(error):
                        raise self._distributed.out_of_memory(source) from error
                    if not self._distributed.is_lost:
                        raise
                    saving = self._begin_again(saving)

    def _measured(self) -> dict[str, float]:
        """Returns what trackers get besides the logs of an epoch."""
        totals = self._totals
        return {
            "examples_per_second": totals.records[-1].examples_per_second,
            "global_step": totals.global_step,
            "goodput": self.goodput.share,
        }

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
    ) -> Any:
        """Computes loss and metrics. Each example counts once.

        Args:
            x: As for `fit`.
            y: Targets `[examples, ...]`, for arrays.
            batch_size: Global batch size, for arrays. Default: 32.
            verbose: 0 is silent, 1 a progress bar, 2 one line.
            sample_weight: Weights `[examples]`, for arrays.
            steps: Number of steps. Default: all data.
            callbacks: As in Keras.
            return_dict: Whether to return a dict by name.

        Returns:
            The loss, a list of loss and metrics, or a dict, as in Keras.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        distributed = self._distributed
        check_evaluation(steps)
        with distributed.peers.together("evaluate"):
            check_called(self.model, "evaluate", "make_test_function")
            source = distributed.source(
                x, y, sample_weight, batch_size, steps=steps
            )
            distributed.compare_data(source, steps)
            hooks = distributed.hooks(
                callbacks_lib.as_list(callbacks),
                verbose,
                1,
                steps or source.steps,
            )
            feed = distributed.feed_once(source, steps)
            with explained(source), self._totals.meter.phase("evaluate"):
                scores = loop.evaluate(
                    distributed,
                    feed,
                    steps,
                    hooks,
                    first=self._totals.global_step == 0,
                )
        return self._scores(scores, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
    ) -> Any:
        """Returns the model's outputs in the order of the rows.

        Args:
            x: As for `fit`, but not a function.
            batch_size: Global batch size, for arrays. Default: 32.
            verbose: 0 is silent, 1 a progress bar, 2 one line.
            steps: Number of steps. Default: all data.
            callbacks: As in Keras.

        Returns:
            Arrays of shape `[examples, ...]` in the structure of the model's
            outputs. All workers get the same arrays.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        distributed = self._distributed
        check_evaluation(steps)
        with distributed.peers.together("predict"):
            check_called(self.model, "predict", "make_predict_function")
            source = distributed.source(x, batch_size=batch_size, steps=steps)
            if not source.totals_known:
                raise ConfigurationError(
                    "predict keeps the order of rows, which is unknown with a "
                    "dataset_fn. Received: a dataset_fn. Pass arrays or a "
                    "tf.data.Dataset."
                )
            check_finite("predict", source, steps)
            distributed.compare_data(source, steps)
            hooks = distributed.hooks(
                callbacks_lib.as_list(callbacks),
                verbose,
                1,
                steps or source.steps,
            )
            with explained(source):
                return loop.predict(distributed, source, steps, hooks)

    def trace(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        shuffle: bool | str = True,
    ) -> StepTrace:
        """Traces the first step of `fit`, and puts everything back.

        Args:
            x: As for `fit`.
            y: As for `fit`.
            batch_size: As for `fit`.
            shuffle: As for `fit`.

        Returns:
            What each device of all workers got and computed, what the
            optimizer received, and how the weights changed, as excerpts.

        Raises:
            ConfigurationError: An argument breaks a rule, or the step cannot
                be traced.
        """
        distributed = self._distributed
        with distributed.peers.together("trace"):
            source = distributed.source(x, y, None, batch_size, shuffle)
            distributed.compare_data(source, None)
            engine = distributed.prepare_training(source)
            with explained(source), distributed.peers.inside():
                step = engine.trace(source)
            every = distributed.peers.of_all(dataclasses.asdict(step))
        return joined(step, every)

    def trace_prediction(
        self, x: Any, batch_size: int | None = None
    ) -> PredictionTrace:
        """Traces `predict`.

        Args:
            x: Arrays: one global batch, or with parameter servers one batch
                for each worker.
            batch_size: As for `predict`.

        Returns:
            What each device of all workers got and computed, and what
            `predict` returned, as excerpts.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        outputs = self.predict(x, batch_size, verbose=0)
        distributed = self._distributed
        with distributed.peers.together("trace_prediction"):
            source = distributed.source(x, batch_size=batch_size)
            with explained(source), distributed.peers.inside():
                shares = distributed.engine.trace_outputs(source)
            own = [dataclasses.asdict(share) for share in shares]
            every = distributed.peers.of_all(own)
        return PredictionTrace(
            excerpts(x),
            [share_of(share) for worker in every for share in worker],
            excerpts(outputs, ("outputs", "", "")),
        )

    def profile(self, rows: int) -> Profile | None:
        """Returns what each device did in the steps of the profiler.

        Every worker must call this method.

        Args:
            rows: The rows of a device.

        Returns:
            For each device of all workers the time of computing, of
            communication and without either, and the bytes that it sent;
            None where not every worker has profiled steps.
        """
        with self._distributed.peers.together("profile"):
            return profile_of(self._distributed, self._profiler, rows)

    def summary(self, **options: Any) -> None:
        """Prints the layers of the model, on the chief alone.

        Args:
            **options: Arguments of `keras.Model.summary`.
        """
        if self._distributed.is_chief:
            self.model.summary(**options)

    def restore(
        self, folder: str, which: str | int, x: Any, y: Any = None
    ) -> int:
        """Puts a checkpoint of `fit` into the model.

        To evaluate it, or to write it with `save` or `export`. To go on with
        the training, call `fit` with the `checkpoint_dir`. The run may have
        had another strategy, but only parameter servers restore what
        parameter servers have saved. Every worker must call this method.

        Args:
            folder: The `checkpoint_dir` of the run, a folder or an address.
            which: "newest"; "best", by the `monitor` of the run; or a step.
            x: Data as for `fit`, of which only shapes and types are taken.
            y: As for `fit`.

        Returns:
            The step of the checkpoint.

        Raises:
            CheckpointError: It is damaged, of a later release, or cannot be
                read.
            ConfigurationError: There is no such checkpoint, or it is of
                another model.
        """
        distributed = self._distributed
        storage.check("folder", folder)
        with distributed.peers.together("restore"):
            engine = distributed.prepare(distributed.source(x, y))
            chosen = store.choose(folder, which)
            step = distributed.peers.of_first(chosen.step)
            if step != chosen.step:  # A run has saved meanwhile.
                chosen = store.choose(folder, step)
            stored = Stored(chosen.path)
            state = read_state(stored)
            if "position" not in state:
                raise ConfigurationError(
                    "restore takes a checkpoint of fit. Received: "
                    f"{stored.path}, of Loop.save. Use Loop.restore."
                )
            engine.snapshot().put(Variables(stored))
        self._totals.global_step = state["global_step"]
        self._totals.examples_seen = state["examples_seen"]
        return step

    def save(self, path: str, **options: Any) -> None:
        """Saves the model with its optimizer state.

        Every worker must call this method. The chief writes the file. All
        workers return when the file is complete. To continue from the file,
        call `keras.models.load_model(path)` in `build_model`.

        Args:
            path: A path that ends with `.keras`.
            **options: Arguments of `keras.Model.save`.
        """
        self._write_file("save", path, self.model.save, options)

    def save_weights(self, path: str, **options: Any) -> None:
        """Saves the weights. Every worker must call this method.

        Args:
            path: A path that ends with `.weights.h5`.
            **options: Arguments of `keras.Model.save_weights`.
        """
        self._write_file("save_weights", path, self.model.save_weights, options)

    def _write_file(
        self,
        name: str,
        path: str,
        save: Callable[..., Any],
        options: dict[str, Any],
    ) -> None:
        """Has the chief write a file, whole or not at all."""
        path = file_path(path)

        def write() -> None:
            check_room(path, self.model)
            is_file = path.endswith((".keras", ".weights.h5"))
            if is_file and not os.path.isdir(path) and not options:
                write_whole(path, streamed(save))
            else:
                save(path, **options)

        self._distributed.write(name, path, write)

    def export(self, path: str, **options: Any) -> None:
        """Writes a SavedModel for serving. Every worker must call this method.

        Args:
            path: A folder.
            **options: Arguments of `keras.Model.export`.
        """
        path = file_path(path)
        self._distributed.write(
            "export", path, lambda: self.model.export(path, **options)
        )

    def memory(self) -> MemoryTable:
        """Returns the bytes of variables on each device of this process.

        Call it after `fit`, when the optimizer has made its variables.
        """
        return memory_of(self.model)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one global batch.

        Every worker of a cluster must pass the whole batch.

        Args:
            x: Arrays, `[global_batch_size, ...]`.
            y: Targets.
            sample_weight: Weights.
            class_weight: As for `fit`. Excludes `sample_weight`.
            return_dict: Whether to return a dict by name.

        Returns:
            Loss and metrics of the batch, as in Keras.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        distributed = self._distributed
        with distributed.peers.together("train_on_batch"):
            source = self._one_batch("train_on_batch", x, y, sample_weight)
            if class_weight is not None:
                source = data_lib.with_class_weight(source, class_weight)
            engine = distributed.prepare(source)
            engine.reset_metrics(first=self._totals.global_step == 0)
            feed = engine.feed(source, chain=True, training=True)
            try:
                with explained(source):
                    done = engine.train(feed.iterator(0, 1), 1, source)
            except (MemoryError, tf.errors.OpError) as error:
                if not lacks_room(error):
                    raise
                raise self._distributed.out_of_memory(source) from error
        self._totals.global_step += done.steps
        self._totals.examples_seen += done.examples
        return self._scores(done.returned or done.logs, return_dict)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Computes loss and metrics of one global batch.

        Args:
            x: Arrays, `[global_batch_size, ...]`.
            y: Targets.
            sample_weight: Weights.
            return_dict: Whether to return a dict by name.

        Returns:
            As `evaluate`.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        distributed = self._distributed
        with distributed.peers.together("test_on_batch"):
            source = self._one_batch("test_on_batch", x, y, sample_weight)
            engine = distributed.prepare(source)
            engine.reset_metrics(first=self._totals.global_step == 0)
            feed = engine.feed(source, chain=True, training=False)
            with explained(source):
                done = engine.evaluate(feed.iterator(0, 1), 1, source)
        return self._scores(done.returned or done.logs, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the model's outputs for one global batch.

        Args:
            x: Arrays, `[global_batch_size, ...]`.

        Returns:
            Arrays in the order of the rows. All workers get the same arrays.

        Raises:
            ConfigurationError: An argument breaks a rule.
        """
        distributed = self._distributed
        with distributed.peers.together("predict_on_batch"):
            source = self._one_batch("predict_on_batch", x)
            feed = distributed.feed_once(source, 1)
            with explained(source):
                return distributed.engine.predict(feed.iterator(0, 1), source)

    def _one_batch(
        self, method: str, x: Any, y: Any = None, sample_weight: Any = None
    ) -> data_lib.Source:
        """Returns arrays as a source of a single batch."""
        if not kind_of(self.strategy).in_step:
            raise ConfigurationError(by_batch(method))
        check_called(self.model, method)
        if method == "train_on_batch":
            check_trained(self.model)
        (inputs,) = self._distributed.arrays(x)
        rows = data_lib.batch_rows(inputs)
        return self._distributed.source(
            inputs, y, sample_weight, batch_size=rows
        )

    def _scores(self, logs: Logs, return_dict: bool) -> Any:
        if check_flag("return_dict", return_dict):
            return dict(sorted(logs.items()))  # Keras's order.
        return keras_internals.in_order(self.model, logs)

    def _follow(
        self,
        source: data_lib.Source,
        validation: data_lib.Source | None,
        numbers: FitNumbers,
        saving: SaveOptions | None,
    ) -> keras.callbacks.History:
        """Evaluates the checkpoints of the cluster instead of training."""
        distributed = self._distributed
        engine = distributed.prepare(source)
        evaluate = None
        if validation is not None:
            steps = numbers.validation_steps
            feed = distributed.feed_once(validation, steps)
            hooks = distributed.hooks([], 0, 1, None)

            def evaluate() -> Logs:
                # The metrics of the checkpoint are those of training.
                return loop.evaluate(distributed, feed, steps, hooks)

        return follow(engine, saving, evaluate, numbers.epochs)

    def _replay(
        self,
        step: int,
        folder: str,
        source: data_lib.Source,
        training: Callable[..., Any],
        go_back: Callable[[], None],
        verbose: int | str,
    ) -> NoReturn:
        """Replays a step, prints the verdict and ends the process."""
        left_out = left_out_before(folder, step)

        def one_pass(looks: bool, source: data_lib.Source) -> Replay:
            go_back()
            self._totals.left_out[:] = left_out
            return training(functools.partial(Replay, step, looks), source)

        blamed, reason = replay(step, folder, source, one_pass)
        if self._distributed.is_chief:
            line = f"replay of step {step}: {blamed or 'no fault'} ({reason})"
            report_verdict(line)
            if verbose != 0:
                print()  # A progress bar has left the cursor in its line.
            print(line)
        raise SystemExit(FOUND if blamed else 0)

    def _delegate_calls(self) -> None:
        """Makes the trainer's own of what a callback calls of its model.

        Keras's have the rows of each replica, or cannot use workers at all.
        """
        kind = kind_of(self.strategy)
        several = self.strategy.num_replicas_in_sync > 1
        if kind.trains and (several or not kind.in_step):
            keras_internals.delegate_calls(
                self.model,
                _KERAS_CALLS,
                weakref.ref(self),
                None if kind.in_step else without_trainer,
            )

    def _leave_out(
        self, batch: LeftOut, saving: SaveOptions | None
    ) -> SaveOptions:
        """Notes that a batch is left out when the run goes back.

        Returns:
            The options that resume the run from its last checkpoint.

        Raises:
            DivergedError: As many batches as allowed were left out before.
        """
        assert saving is not None
        known, most = self._totals.left_out, self._distributed.options
        where = f"step {batch.step} (epoch {batch.epoch}, batch {batch.batch})"
        if len(known) >= most.max_restores:
            steps = ", ".join(str(one.step) for one in known)
            raise DivergedError(
                f"At most {most.max_restores} batches of a run are left out "
                f"(max_restores). Received: loss {batch.loss} in {where}, "
                f"after the batches of steps {steps}. Lower the learning rate, "
                "or look for values in the data that are not finite."
            )
        known.append(batch)
        if self._distributed.is_chief:
            _log.warning(
                "loss %s in %s: the run goes back to its last checkpoint and "
                "leaves out this batch (%d of %d)",
                batch.loss,
                where,
                len(known),
                most.max_restores,
            )
        return dataclasses.replace(saving, resume="auto")

    def _begin_again(self, saving: SaveOptions | None) -> SaveOptions:
        """Creates strategy, model and engine again after a lost server.

        Returns:
            The options that resume the run from its last checkpoint.
        """
        if saving is None:
            raise ConfigurationError(
                "A run whose parameter server was lost goes on from a "
                "checkpoint. Received: no checkpoint_dir. Pass one to fit()."
            ) from None
        _log.warning(
            "a parameter server was lost; going on from the last checkpoint"
        )
        self._totals.meter.fault("a parameter server was lost")
        self._distributed = self._distributed.again()
        self._delegate_calls()
        return dataclasses.replace(saving, resume="auto")
