"""A whole run from a `RunConfig`; the module that connects all parts.

    report = run(RunConfig(strategy="mirrored", num_virtual_devices=4))

config -> cluster -> strategy -> data and model -> trainer -> report
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf import datasets
from mgpu_tf.checkpoints import registry, storage
from mgpu_tf.checkpoints.run_state import EpochRecord
from mgpu_tf.cluster import watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.environments import ask_for_ps
from mgpu_tf.config import RunConfig, changed_fields
from mgpu_tf.engine.asynchronous.schedule.staleness import PREFIX
from mgpu_tf.engine.exchange.noise_scale import NAMES, SCALE
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import names_of
from mgpu_tf.folders import check_regular, keep_private, make_folder
from mgpu_tf.launch.job import RESTARTS
from mgpu_tf.models import create_model
from mgpu_tf.optimizers import create_optimizer, large_batch_recipe
from mgpu_tf.options import (
    LargeBatchOptions,
    SaveOptions,
    StepOptions,
    StrategyOptions,
    WatchOptions,
)
from mgpu_tf.reports import page, trackers
from mgpu_tf.reports.pipeline_trace import PipelineTrace
from mgpu_tf.reports.profiling import Profiler
from mgpu_tf.reports.report import (
    EpochReport,
    Report,
    suggested_batch_size,
    weights_sha256,
)
from mgpu_tf.runtime.determinism import enable_determinism
from mgpu_tf.runtime.devices import select_local
from mgpu_tf.runtime.remote import check_reachable
from mgpu_tf.strategies.registry import (
    create_planned,
    create_with,
    is_chief,
    kind_of,
    lost_workers,
    topology_of,
)
from mgpu_tf.strategies.split.pipeline import StagedStrategy
from mgpu_tf.studies.parity import ParityReport, check_parity, create_for_check
from mgpu_tf.studies.pipeline_trace import trace_pipeline
from mgpu_tf.studies.predicted import compared
from mgpu_tf.training.opening import devices_here, tasks
from mgpu_tf.training.trainer import Trainer
from mgpu_tf.user_function import is_target, load_function

MODEL_FILE = "model.keras"
# Steps before those that a trace profiles, and how many these are.
_PROFILED = (20, 5)
# Weights that are mostly zeros compress well; a file made to fill the memory
# does so a thousandfold.
_MOST_UNPACKED = 100

_log = logging.getLogger("mgpu_tf")


def run(config: RunConfig, *, verbose: int | str = "auto") -> Report:
    """Trains and tests a model. Every worker of a cluster must call it.

    Args:
        config: The configuration of the run.
        verbose: As in Keras's `fit`; only the chief prints.

    Returns:
        The report. It is the same on every worker, except for times. With
        `output_dir`, the chief writes the report and `model.keras` there.

    Raises:
        ConfigurationError: The configuration does not work on this machine or
            cluster.
    """
    _check_cluster(config)
    if config.private:
        keep_private()
    if config.output_dir is not None:
        make_folder("output_dir", config.output_dir)
    if config.checkpoint_dir is not None:
        storage.check("checkpoint_dir", config.checkpoint_dir)
        enable_determinism()
    watchdog.begin(
        ClusterConfig.from_environment(), config.options(WatchOptions)
    )
    warned = _Warned()
    _log.addHandler(warned)
    try:
        config, strategy, splits = _begun(config)
        trainer = _trained(config, splits, strategy, verbose)
        return _reported(config, splits, trainer, verbose, warned.texts)
    finally:
        _log.removeHandler(warned)


_Begun = tuple[
    RunConfig, tf.distribute.Strategy, datasets.Splits | datasets.Streams
]


def _begun(config: RunConfig) -> _Begun:
    """Returns the configuration, with its strategy and its data."""
    if config.strategy == "plan":
        config, strategy, splits = _planned(config)
        _check_batch(config, strategy)
        return config, strategy, splits
    strategy = create_with(config.strategy, config.options(StrategyOptions))
    _check_batch(config, strategy)
    return config, strategy, _splits(config)


def _planned(config: RunConfig) -> _Begun:
    """Lets a plan choose the strategy, and whether layers run again."""
    options = config.options(StrategyOptions)
    # Devices are chosen before the first op, which data may run.
    if options.num_virtual_devices:
        select_local(options.devices, options.num_virtual_devices)
    splits = _splits(config)
    strategy, choice = create_planned(
        lambda: _model(config, splits),
        config.global_batch_size,
        options,
        recomputes=config.recompute is None,
    )
    if choice.recompute is not None:
        config = dataclasses.replace(config, recompute=choice.recompute)
    return config, strategy, splits


def _trained(
    config: RunConfig,
    splits: datasets.Splits | datasets.Streams,
    strategy: tf.distribute.Strategy,
    verbose: int | str,
) -> Trainer:
    """Returns the trainer after `fit`."""
    profiler = _profiler(config, strategy)
    trainer = _trainer(config, splits, strategy, profiler)
    trainer.fit(
        **splits.training(config.global_batch_size),
        epochs=config.epochs,
        steps_per_epoch=config.steps_per_epoch,
        verbose=verbose,
        callbacks=[
            keras.callbacks.TerminateOnNaN(),
            *trackers.by_name(config.log_with, config.output_dir),
        ],
        checkpoint=config.options(SaveOptions),
    )
    _check_loss(trainer)
    if profiler is not None and is_chief(strategy):
        _log.info("%s", profiler.summary())
    return trainer


def _trainer(
    config: RunConfig,
    splits: datasets.Splits | datasets.Streams,
    strategy: tf.distribute.Strategy,
    profiler: Profiler | None = None,
) -> Trainer:
    return Trainer(
        lambda: _model(config, splits),
        strategy,
        seed=config.seed,
        profiler=profiler,
        **dataclasses.asdict(config.options(StepOptions)),
    )


def _profiler(
    config: RunConfig, strategy: tf.distribute.Strategy
) -> Profiler | None:
    if config.profile is None or config.output_dir is None:
        return None
    start, steps = map(int, config.profile.split(","))
    folder = os.path.join(config.output_dir, "profile")
    return Profiler(start, steps, folder if is_chief(strategy) else None)


def _reported(
    config: RunConfig,
    splits: datasets.Splits | datasets.Streams,
    trainer: Trainer,
    verbose: int | str,
    warned: list[str],
) -> Report:
    """Tests a trained model and writes the files of `output_dir`."""
    test = trainer.evaluate(
        **splits.testing(config.global_batch_size),
        return_dict=True,
        verbose=verbose,
    )
    strategy, goodput = trainer.strategy, trainer.goodput
    plan = trainer.pipeline
    result = Report(
        strategy=kind_of(strategy).name,
        num_workers=topology_of(strategy).num_workers,
        num_replicas=topology_of(strategy).data_parallel_degree,
        global_batch_size=config.global_batch_size,
        global_step=trainer.global_step,
        examples_seen=trainer.examples_seen,
        epochs=[_epoch_report(record) for record in trainer.records],
        test=test,
        weights_sha256=weights_sha256(trainer.model.get_weights()),
        # A task that ended before its first step has left no progress.
        restarts=max(
            trainer.recovery.restarts, int(os.environ.get(RESTARTS, 0))
        ),
        lost_steps=trainer.recovery.lost_steps,
        lost_seconds=trainer.recovery.lost_seconds,
        lost_workers=trainer.recovery.lost_workers + lost_workers(strategy),
        saving_seconds=goodput.save_seconds,
        goodput=dataclasses.asdict(goodput),
        fused=trainer.fused,
        pipeline=None if plan is None else dataclasses.asdict(plan),
        suggested_batch_size=_suggested(trainer),
        left_out=[dataclasses.asdict(batch) for batch in trainer.left_out],
        slow=[dataclasses.asdict(worker) for worker in trainer.slow],
        devices=[devices_here(strategy)] * topology_of(strategy).num_workers,
        mesh=_mesh_of(strategy),
        memory=[dataclasses.asdict(row) for row in trainer.memory().rows],
        step_times=trainer.step_times,
        time_line=_time_line(trainer),
        distributions=trainer.distributions,
        tasks=tasks(strategy),
        events=registry.of_last_run(config.checkpoint_dir, trainer.meter.moment)
        if config.checkpoint_dir
        else [],
        warnings=warned,
        configuration=changed_fields(config),
        predicted=_predicted(config, splits, trainer),
    )
    if config.output_dir is not None:
        trainer.save(os.path.join(config.output_dir, MODEL_FILE))
        if is_chief(strategy):
            result.write(config.output_dir)
            if config.report == "html":
                page.write(config.output_dir)
    return result


def _time_line(trainer: Trainer) -> dict[str, Any]:
    faults = [{"at": at, "text": text} for at, text in trainer.meter.faults]
    return trainer.meter.time_line().as_json() | {"faults": faults}


def _mesh_of(strategy: tf.distribute.Strategy) -> dict[str, int] | None:
    mesh = getattr(strategy, "mesh", None)
    return None if mesh is None else dataclasses.asdict(mesh)


class _Warned(logging.Handler):
    """Keeps what the run warns of.

    Attributes:
        texts: The warnings, each once.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a warning."""
        text = record.getMessage()
        if text not in self.texts:
            self.texts.append(text)


def _predicted(
    config: RunConfig,
    splits: datasets.Splits | datasets.Streams,
    trainer: Trainer,
) -> dict[str, Any] | None:
    """Returns what the planner predicts, beside what was measured."""
    if config.output_dir is None or not is_chief(trainer.strategy):
        return None
    return compared(
        lambda: _model(config, splits), trainer, config.global_batch_size
    )


def _suggested(trainer: Trainer) -> int | None:
    """Returns the batch size that the last noise scale suggests."""
    logs = trainer.records[-1].logs if trainer.records else {}
    replicas = topology_of(trainer.strategy).data_parallel_degree
    return suggested_batch_size(logs.get(SCALE), replicas)


def trace(
    config: RunConfig, profile_folder: str | None = None
) -> PipelineTrace:
    """Trains a model and shows the pipeline. Every worker must call it.

    Args:
        config: The configuration of the run. It does not save.
        profile_folder: Gets a profile of some later steps of this process;
            all workers have one, or none.

    Returns:
        The trace; the same on every worker.

    Raises:
        ConfigurationError: The configuration does not work on this machine or
            cluster, or the step cannot be traced.
    """
    _check_cluster(config)
    config, strategy, splits = _begun(config)
    profiler = None
    if profile_folder is not None:
        profiler = Profiler(*_PROFILED, profile_folder)
    return trace_pipeline(
        _trainer(config, splits, strategy, profiler),
        splits.training(config.global_batch_size),
        splits.testing(config.global_batch_size),
        num_examples=splits.num_examples,
        batch_size=config.global_batch_size,
        epochs=config.epochs,
        steps_per_epoch=config.steps_per_epoch,
    )


def compare(
    model: str,
    data: str,
    strategies: Sequence[str],
    *,
    batch_size: int = 64,
    steps: int = 10,
    num_virtual_devices: int = 2,
    seed: int = 0,
    embedding_gradients: str = "keras",
) -> ParityReport:
    """Compares a model on strategies with one device, both by name.

    Args:
        model: A name of the zoo, or `package.module:function` of a function
            that returns a compiled model.
        data: The name of a data set, or `package.module:function` of a
            function that returns `(x, y)`, a batched dataset, or
            `(x_train, y_train), (x_test, y_test)`, whose first pair is taken.
        strategies: Names for `create_strategy`.
        batch_size: Global batch size, for arrays.
        steps: Number of steps to compare.
        num_virtual_devices: Number of replicas on a machine without GPUs.
        seed: The seed of the initial weights.
        embedding_gradients: `embedding_gradients` of the strategies.

    Returns:
        The report.

    Raises:
        ConfigurationError: A name is unknown, or the data does not fit.
    """
    # Before the data is made: devices are chosen before the first op.
    made = [create_for_check(name, num_virtual_devices) for name in strategies]
    build_model: Callable[[], keras.Model]
    if is_target(data):
        batches = _training_data(load_function(data, "dataset")())
    else:
        splits = datasets.load(data)
        batches = splits.training(batch_size)["x"]
        if isinstance(splits, datasets.Splits):
            batches = splits.train
    if is_target(model):
        build_model = load_function(model, "model")
    elif is_target(data):
        raise ConfigurationError(
            "With your own data, --model must be your own too. "
            f"Received: model={model!r}. Write --model=package.module:function."
        )
    else:

        def build_model() -> keras.Model:
            return _compiled(
                create_model(model, splits.input_shape, splits.num_classes),
                create_optimizer("adam"),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )

    return check_parity(
        build_model,
        batches,
        made,
        batch_size=batch_size,
        steps=steps,
        seed=seed,
        embedding_gradients=embedding_gradients,
    )


def _training_data(loaded: Any) -> Any:
    """Returns the first pair of what a function for `train` returns.

    That is `(x_train, y_train), (x_test, y_test)`. Where all four are of one
    length they may be two inputs and two targets, and are taken so.
    """
    pairs = isinstance(loaded, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in loaded
    )
    if not pairs or len(loaded) != 2:
        return loaded
    train, test = ([len(part) for part in pair] for pair in loaded)
    is_split = train[0] == train[1] != test[0] == test[1]
    return tuple(loaded[0]) if is_split else loaded


def _splits(config: RunConfig) -> datasets.Splits | datasets.Streams:
    if not is_target(config.dataset):
        return datasets.load(
            config.dataset,
            config.data_dir,
            seed=config.seed,
            deterministic=config.deterministic,
        )
    made = load_function(config.dataset, "dataset")()
    try:
        (x_train, y_train), (x_test, y_test) = made
        classes = int(max(y_train.max(), y_test.max())) + 1
    except (TypeError, ValueError, AttributeError):
        raise ConfigurationError(
            "dataset must name a function that returns (x_train, y_train), "
            "(x_test, y_test), arrays with integer labels, as keras.datasets "
            f"do. Received: {type(made).__name__} from {config.dataset!r}."
        ) from None
    return datasets.Splits((x_train, y_train), (x_test, y_test), classes)


def _model(
    config: RunConfig, splits: datasets.Splits | datasets.Streams
) -> keras.Model:
    """Makes the model of a run, from its name or from a file."""
    path = config.initial_model
    if path is not None and path.endswith(".keras"):
        model = _from_file(path, keras.models.load_model)
    elif is_target(config.model):
        model = load_function(config.model, "model")()
    else:
        model = create_model(
            config.model,
            splits.input_shape,
            splits.num_classes,
            zero_init_residual=config.zero_init_residual,
        )
    if path is not None and not path.endswith(".keras"):
        if model.compiled:
            # Keras reads the state of the optimizer too, if there is one.
            model.optimizer.build(model.trainable_variables)
        _from_file(path, model.load_weights)
    if isinstance(model, keras.Model) and not model.compiled:
        return _compiled_by(config, splits, model)
    _check_own_compile(config)
    return model


def _compiled_by(
    config: RunConfig,
    splits: datasets.Splits | datasets.Streams,
    model: keras.Model,
) -> keras.Model:
    recipe = large_batch_recipe(
        config.global_batch_size,
        optimizer=config.optimizer,
        learning_rate=config.learning_rate,
        base_batch=config.base_batch,
        learning_rate_rule=config.learning_rate_rule,
        learning_rate_decay=config.learning_rate_decay,
        steps_per_epoch=config.steps_per_epoch
        or math.ceil(splits.num_examples / config.global_batch_size),
        epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        weight_decay=config.weight_decay,
        label_smoothing=config.label_smoothing,
    )
    return _compiled(model, recipe.optimizer, recipe.loss)


def _check_own_compile(config: RunConfig) -> None:
    """Refuses options that a model which is compiled would not obey."""
    default = RunConfig()
    names = ("optimizer", "learning_rate", *names_of(LargeBatchOptions))
    for name in names:
        value = getattr(config, name)
        if value != getattr(default, name):
            raise ConfigurationError(
                f"{name} goes with models that are not compiled. Received: "
                f"{name}={value!r} with a compiled model. Set it in the "
                "model's own compile()."
            )


def _check_archive(path: str) -> None:
    """Refuses an archive that unpacks to far more than it holds.

    Keras writes `.keras` files without compression, and reads what is in them
    into memory.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            most = _MOST_UNPACKED * max(part.compress_size, 1 << 20)
            if part.file_size > most:
                raise ConfigurationError(
                    "initial_model must unpack to at most "
                    f"{_MOST_UNPACKED} times its size. Received: "
                    f"initial_model={path!r}, where {part.filename!r} has "
                    f"{part.file_size} bytes in {part.compress_size}. Save "
                    "the model again with Keras."
                )


def _from_file(path: str, load: Callable[[str], Any]) -> Any:
    try:
        check_reachable("initial_model", path)
        if os.path.exists(path) and not os.path.isdir(path):
            check_regular(path)
        _check_archive(path)
        return load(path)
    except ConfigurationError:
        raise
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ConfigurationError(
            "initial_model must be a file that Keras saved, for this model. "
            f"Received: initial_model={path!r} "
            f"({str(error).strip().splitlines()[0]:.120})."
        ) from None


def _compiled(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: keras.losses.Loss,
) -> keras.Model:
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _check_batch(config: RunConfig, strategy: tf.distribute.Strategy) -> None:
    replicas = strategy.num_replicas_in_sync
    if config.global_batch_size < replicas:
        raise ConfigurationError(
            "global_batch_size must give each replica an example. Received: "
            f"global_batch_size={config.global_batch_size} for {replicas} "
            "replicas."
        )
    if isinstance(strategy, StagedStrategy):
        strategy.check_micro_batches(config.global_batch_size)


def _check_loss(trainer: Trainer) -> None:
    for record in trainer.records:
        if not math.isfinite(record.logs["loss"]):
            raise ConfigurationError(
                "The loss must stay finite. Received: loss "
                f"{record.logs['loss']} in epoch {record.epoch + 1}. Lower "
                "learning_rate, or look for values in the data that are not "
                "finite."
            )


def _epoch_report(record: EpochRecord) -> EpochReport:
    metrics: dict[str, Any] = dict(record.logs)
    staleness = {
        name.removeprefix(PREFIX): metrics.pop(name)
        for name in list(metrics)
        if name.startswith(PREFIX)
    }
    noise = {
        # JSON has no infinity.
        name: value if math.isfinite(value) else None
        for name in NAMES
        if (value := metrics.pop(name, None)) is not None
    }
    return EpochReport(
        epoch=record.epoch + 1,
        loss=metrics.pop("loss"),
        metrics=metrics,
        seconds=record.seconds,
        examples_per_second=record.examples_per_second,
        staleness=staleness or None,
        gradient_noise=noise or None,
    )


def _check_cluster(config: RunConfig) -> None:
    ask_for_ps(config.num_ps)
    cluster = ClusterConfig.from_environment()
    if cluster is None:
        return
    there = len(cluster.worker) if cluster.ps else cluster.num_workers
    if config.num_workers in (1, there):
        return
    if RESTARTS in os.environ and cluster.num_workers < config.num_workers:
        return  # The supervisor goes on with fewer.
    raise ConfigurationError(
        f"num_workers must be that of {cluster.source}. Received: "
        f"num_workers={config.num_workers}, {cluster.source} with "
        f"{there}. Leave out num_workers, or start {config.num_workers}."
    )
