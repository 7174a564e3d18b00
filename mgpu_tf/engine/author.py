"""Running a `train_step` or `test_step` that the model's author wrote.

It runs as written, in each replica on the replica's examples: what it sums
over replicas and in which order is its own affair. Where that order would be
wrong (clipping a part of the gradient) or an error of TensorFlow's, the
optimizer is refused by name.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.state import ReplicaState
from mgpu_tf.engine.update import refuse_in_train_step

NO_EXAMPLES = (
    "An overridden train_step or test_step needs an example on every replica "
    "in every step. Received: a batch smaller than the number of replicas. "
    "Drop the remainder, or use another batch size."
)


class AuthorStep:
    """One overridden step method of a model.

    Args:
        model: A built model.
        method: "train_step" or "test_step".
        strategy: The model's strategy.
        state: What the step writes besides weights.
    """

    def __init__(
        self,
        model: keras.Model,
        method: str,
        strategy: tf.distribute.Strategy,
        state: ReplicaState,
    ) -> None:
        self._model = model
        self._method = method
        self._strategy = strategy
        self._state = state
        self._replicas = strategy.num_replicas_in_sync

    def __call__(
        self, data: Any, local: Any, total: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Runs the method once on every replica. Outside of replicas.

        Returns:
            What the method returned, as a mean over replicas; nothing where
            those are the model's metrics, which are exact by themselves.
        """
        del total
        with contextlib.ExitStack() as stack:
            if self._replicas > 1:
                for optimizer in keras_internals.optimizers_of(self._model):
                    stack.enter_context(
                        keras_internals.checked_order(optimizer, _check)
                    )
            logs = self._strategy.run(self._on_replica, args=(data, local))
        return {
            name: self._strategy.experimental_local_results(value)[0]
            for name, value in logs.items()
        }

    def _on_replica(self, data: Any, local: tf.Tensor) -> dict[str, tf.Tensor]:
        if self._replicas > 1:
            check = tf.debugging.assert_positive(local, NO_EXAMPLES)
            with tf.control_dependencies([check]):
                data = tf.nest.map_structure(tf.identity, data)
        with self._state.replica_seeds_in_place():
            logs = _flat(getattr(self._model, self._method)(data))
        if set(logs) == set(self._model.get_metrics_result()):
            return {}
        return {name: self._mean(value) for name, value in logs.items()}

    def _mean(self, value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        if self._replicas == 1:
            return value
        return tf.distribute.get_replica_context().all_reduce("mean", value)


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Lifts nested logs to the top, as Keras does."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _check(optimizer: keras.optimizers.Optimizer) -> None:
    refuse_in_train_step(optimizer, clipping=True)
