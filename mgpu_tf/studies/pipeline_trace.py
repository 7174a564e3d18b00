"""A trace of the whole pipeline, from a real run.

    trace = trace_pipeline(trainer, (x, y), (x_test, y_test), batch_size=100)
    print(trace.json())

The first step is traced and put back; then `fit` trains, so that the traced
step is the first of its steps. A prediction is traced after training.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.reports.pipeline_trace import EpochTrace, PipelineTrace
from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.training.trainer import Trainer


def trace_pipeline(
    trainer: Trainer,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    *,
    batch_size: int,
    epochs: int = 5,
    verbose: int | str = 0,
) -> PipelineTrace:
    """Trains a model, and tells what happened in each stage.

    Every worker of a cluster must call it.

    Args:
        trainer: A trainer that has not trained.
        train: Inputs `[examples, ...]` and targets to train on.
        test: The same to test on.
        batch_size: Global batch size.
        epochs: Number of epochs.
        verbose: As for `Trainer.fit`.

    Returns:
        The trace; the same on every worker.

    Raises:
        ConfigurationError: There are too few examples for each device, or the
            step cannot be traced.
    """
    topology = topology_of(trainer.strategy)
    in_step = kind_of(trainer.strategy).in_step
    replicas = topology.data_parallel_degree
    x, y = train
    rows = min(batch_size, len(test[0]))
    if min(rows, len(x)) < replicas:
        raise ConfigurationError(
            "A trace needs a row for each device. Received: "
            f"{min(rows, len(x))} rows for {replicas} devices. Use a larger "
            "batch and more data."
        )
    step = trainer.trace(x, y, batch_size)
    moves = _Moves()
    history = trainer.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        verbose=verbose,
        callbacks=[moves],
    ).history
    prediction = trainer.trace_prediction(
        test[0][:rows],
        rows if in_step else -(-rows // topology.num_workers),
    )
    scores = trainer.evaluate(
        *test, batch_size=batch_size, return_dict=True, verbose=0
    )
    model = trainer.model
    return PipelineTrace(
        strategy=kind_of(trainer.strategy).name,
        num_workers=topology.num_workers,
        num_replicas=replicas,
        in_step=in_step,
        model=model.name,
        num_parameters=model.count_params(),
        optimizer=type(model.optimizer).__name__,
        num_examples=len(x),
        global_batch_size=batch_size,
        step=step,
        epochs=[
            EpochTrace(
                number + 1,
                {
                    name: float(values[number])
                    for name, values in history.items()
                },
                change,
            )
            for number, change in enumerate(moves.found)
        ],
        prediction=prediction,
        test=scores,
    )


class _Moves(keras.callbacks.Callback):
    """How far the weights move in each epoch, as a part of their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes where the weights begin."""
        self._before = self._values()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes how far they are from where the epoch began."""
        now = self._values()
        moved = np.linalg.norm(now - self._before)
        self.found.append(float(moved / np.linalg.norm(self._before)))
        self._before = now

    def _values(self) -> np.ndarray:
        return np.concatenate(
            [
                np.ravel(keras.ops.convert_to_numpy(variable))
                for variable in self.model.trainable_variables
            ]
        )
