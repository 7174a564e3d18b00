"""A trace of the whole pipeline, from a real run.

    trace = trace_pipeline(
        trainer,
        {"x": x, "y": y, "batch_size": 100},
        {"x": x_test, "y": y_test, "batch_size": 100},
        num_examples=len(x),
        batch_size=100,
    )
    print(trace.json())

The first step is traced and put back; then `fit` trains, so that the traced
step is the first of its steps. A prediction is traced after training.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.reports.pipeline_trace import EpochTrace, PipelineTrace
from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.training.trainer import Trainer


def trace_pipeline(
    trainer: Trainer,
    training: dict[str, Any],
    testing: dict[str, Any],
    *,
    num_examples: int,
    batch_size: int,
    epochs: int = 5,
    steps_per_epoch: int | None = None,
    verbose: int | str = 0,
) -> PipelineTrace:
    """Trains a model, and reports what happened in each stage.

    Every worker of a cluster must call it.

    Args:
        trainer: A trainer that has not trained.
        training: Arguments of `Trainer.fit`: the data to train on.
        testing: Arguments of `Trainer.evaluate`: the data to test on.
        num_examples: Number of examples to train on.
        batch_size: Global batch size.
        epochs: Number of epochs.
        steps_per_epoch: As for `Trainer.fit`.
        verbose: As for `Trainer.fit`.

    Returns:
        The trace; the same on every worker.

    Raises:
        ConfigurationError: The step cannot be traced.
    """
    topology = topology_of(trainer.strategy)
    in_step = kind_of(trainer.strategy).in_step
    step = trainer.trace(**training)
    moves = _Moves()
    history = trainer.fit(
        **training,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        verbose=verbose,
        callbacks=[moves],
    ).history
    inputs = _first_inputs(testing["x"], batch_size)
    rows = len(inputs)
    prediction = trainer.trace_prediction(
        inputs, rows if in_step else -(-rows // topology.num_workers)
    )
    scores = trainer.evaluate(**testing, return_dict=True, verbose=0)
    model = trainer.model
    return PipelineTrace(
        strategy=kind_of(trainer.strategy).name,
        num_workers=topology.num_workers,
        num_replicas=topology.data_parallel_degree,
        in_step=in_step,
        model=model.name,
        num_parameters=model.count_params(),
        optimizer=type(model.optimizer).__name__,
        num_examples=num_examples,
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
        profile=trainer.profile(
            max(share.after - share.first for share in step.shares)
        ),
    )


def _first_inputs(x: Any, rows: int) -> Any:
    """Returns the first inputs of arrays or of batches of pairs."""
    if isinstance(x, tf.data.Dataset):
        x = np.asarray(next(iter(x))[0])
    return x[:rows]


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
