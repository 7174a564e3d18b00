"""A whole run from one value: the only module that knows every piece.

    report = run(RunConfig(strategy="mirrored", num_virtual_devices=4))

config -> cluster -> strategy -> data and model -> trainer -> report
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from mgpu_tf import datasets
from mgpu_tf.cluster import ClusterConfig
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.models import create_model
from mgpu_tf.optimizers import create_optimizer
from mgpu_tf.parity import ParityReport, check_parity, create_for_check
from mgpu_tf.report import EpochReport, Report, weights_sha256
from mgpu_tf.strategy import (
    create_strategy,
    is_chief,
    strategy_name,
    worker_count,
)
from mgpu_tf.target import is_target, load_function
from mgpu_tf.trainer import EpochRecord, Trainer

MODEL_FILE = "model.keras"


def run(config: RunConfig, *, verbose: int | str = "auto") -> Report:
    """Trains and tests a model; every worker of a cluster calls it.

    Args:
        config: What to train on what and how.
        verbose: As in Keras's `fit`; only the chief prints.

    Returns:
        The report, the same on every worker but for times. With
        `output_dir`, the chief has written it there beside `model.keras`.

    Raises:
        ConfigurationError: The configuration cannot work here.
    """
    trainer = train(config, verbose=verbose)
    return report(trainer, config, verbose=verbose)


def train(config: RunConfig, *, verbose: int | str = "auto") -> Trainer:
    """Trains a model as `run` does, and returns the trainer.

    Args:
        config: What to train on what and how.
        verbose: As in Keras's `fit`.

    Returns:
        The trainer after `fit`.

    Raises:
        ConfigurationError: The configuration cannot work here.
    """
    _check_cluster(config)
    if config.output_dir is not None:
        _make_folder(config.output_dir)
    strategy = create_strategy(
        config.strategy,
        devices=config.devices,
        communication=config.communication,
        num_virtual_devices=config.num_virtual_devices,
    )
    splits = datasets.load(config.dataset, config.data_dir)

    def build_model() -> keras.Model:
        optimizer = create_optimizer(config.optimizer, config.learning_rate)
        return _compiled(config.model, splits, optimizer)

    trainer = Trainer(build_model, strategy, seed=config.seed)
    trainer.fit(
        *splits.train,
        batch_size=config.global_batch_size,
        epochs=config.epochs,
        steps_per_epoch=config.steps_per_epoch,
        verbose=verbose,
    )
    return trainer


def report(
    trainer: Trainer, config: RunConfig, *, verbose: int | str = "auto"
) -> Report:
    """Tests a trained model and writes what `output_dir` is to get.

    Args:
        trainer: From `train`.
        config: The same that `train` had.
        verbose: As in Keras's `evaluate`.

    Returns:
        The report.
    """
    splits = datasets.load(config.dataset, config.data_dir)
    test = trainer.evaluate(
        *splits.test,
        batch_size=config.global_batch_size,
        return_dict=True,
        verbose=verbose,
    )
    strategy = trainer.strategy
    result = Report(
        strategy=strategy_name(strategy),
        num_workers=worker_count(strategy),
        num_replicas=strategy.num_replicas_in_sync,
        global_batch_size=config.global_batch_size,
        global_step=trainer.global_step,
        examples_seen=trainer.examples_seen,
        epochs=[_epoch_report(record) for record in trainer.records],
        test=test,
        weights_sha256=weights_sha256(trainer.model.get_weights()),
    )
    if config.output_dir is not None and is_chief(strategy):
        trainer.model.save(os.path.join(config.output_dir, MODEL_FILE))
        result.write(config.output_dir)
    return result


def compare(
    model: str,
    data: str,
    strategies: Sequence[str],
    *,
    batch_size: int = 64,
    steps: int = 10,
    num_virtual_devices: int = 2,
    seed: int = 0,
) -> ParityReport:
    """Compares a model on strategies with one device, both by name.

    Args:
        model: A name of the zoo, or `package.module:function` of a function
            that returns a compiled model.
        data: A name of a set, or `package.module:function` of a function
            that returns `(x, y)` or a batched dataset.
        strategies: Names for `create_strategy`.
        batch_size: Global batch size, for arrays.
        steps: Steps to compare.
        num_virtual_devices: Replicas where there are no GPUs.
        seed: Decides the initial weights.

    Returns:
        The report.

    Raises:
        ConfigurationError: A name is unknown, or the data does not fit.
    """
    # Before the data is made: devices are chosen before the first op.
    made = [create_for_check(name, num_virtual_devices) for name in strategies]
    build_model: Callable[[], keras.Model]
    if is_target(data):
        batches = load_function(data, "data")()
    else:
        splits = datasets.load(data)
        batches = splits.train
    if is_target(model):
        build_model = load_function(model, "model")
    elif is_target(data):
        raise ConfigurationError(
            "With data of one's own the model must be one's own too. "
            f"Received: model={model!r}. Write --model=package.module:function."
        )
    else:

        def build_model() -> keras.Model:
            return _compiled(model, splits, create_optimizer("adam"))

    return check_parity(
        build_model,
        batches,
        made,
        batch_size=batch_size,
        steps=steps,
        seed=seed,
    )


def _compiled(
    name: str,
    splits: datasets.Splits,
    optimizer: keras.optimizers.Optimizer,
) -> keras.Model:
    model = create_model(name, splits.input_shape, splits.num_classes)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _epoch_report(record: EpochRecord) -> EpochReport:
    metrics: dict[str, Any] = dict(record.logs)
    return EpochReport(
        epoch=record.epoch + 1,
        loss=metrics.pop("loss"),
        metrics=metrics,
        seconds=record.seconds,
        examples_per_second=record.examples_per_second,
    )


def _check_cluster(config: RunConfig) -> None:
    cluster = ClusterConfig.from_environment()
    if cluster is None or config.num_workers in (1, cluster.num_workers):
        return
    raise ConfigurationError(
        "num_workers must be that of TF_CONFIG. Received: "
        f"num_workers={config.num_workers}, TF_CONFIG with "
        f"{cluster.num_workers}. Leave out num_workers, or unset TF_CONFIG."
    )


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            "output_dir must be a folder that can be made and written. "
            f"Received: output_dir={path!r} ({error.strerror})."
        ) from None
