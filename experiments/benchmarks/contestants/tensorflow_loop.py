"""A training loop written by hand, as TensorFlow's tutorials write it.

Several steps in one `tf.function`, loss and accuracy kept in variables that
are summed over replicas when they are read. On several workers this is the
stock loop of `MultiWorkerMirroredStrategy`.
"""

from __future__ import annotations

import time

import tensorflow as tf

from experiments.benchmarks.contestants import (
    datasets,
    strategies,
    tensorflow_model,
)
from experiments.benchmarks.jobs import JOBS


def create(place) -> Loop:
    return Loop(place)


class Loop:
    """Options: `strategy`, `replicas`, `call` (steps to a call)."""

    def __init__(self, place) -> None:
        job = JOBS[place.job]
        options = place.options
        name = options.get("strategy", "one_device")
        self._strategy = strategies.create(name, place)
        self._call = options.get("call", 20)
        with self._strategy.scope():
            self._model = tensorflow_model.build(job)
            self._model.optimizer.build(self._model.trainable_variables)
            self._sums = [self._sum() for _ in range(2)]
        self._batch = tf.constant(float(job.batch(place.workers)))
        if name == "one_device":
            iterator = iter(datasets.of_worker(job, 0, 1))
        elif place.workers == 1:
            iterator = iter(
                self._strategy.experimental_distribute_dataset(
                    datasets.of_worker(job, 0, 1)
                )
            )
        else:
            iterator = iter(
                self._strategy.distribute_datasets_from_function(
                    lambda context: datasets.of_worker(
                        job, context.input_pipeline_id, place.workers
                    )
                )
            )
        self._run = self._function(iterator)

    def _sum(self) -> tf.Variable:
        return tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def _function(self, iterator):
        step = step_of(self._model, self._batch, self._sums)

        @tf.function(reduce_retracing=True)
        def run(steps):
            for _ in tf.range(steps):
                self._strategy.run(step, args=next(iterator))

        return run

    def _steps(self, steps: int) -> float:
        """Runs steps in calls; returns the mean loss of them all."""
        for total in self._sums:
            total.assign(0.0)
        left = steps
        while left:
            now = min(left, self._call)
            self._run(tf.constant(now))
            left -= now
        loss, accuracy = (float(total.read_value()) for total in self._sums)
        print(f"loss {loss / steps:.4f} accuracy {accuracy / steps:.4f}")
        return loss / steps

    def check(self, steps: int) -> float:
        return self._steps(steps)

    def burst(self, steps: int) -> tuple[int, float]:
        started = time.perf_counter()
        self._steps(steps)
        return steps, time.perf_counter() - started


def step_of(model, batch: tf.Tensor, sums: list[tf.Variable]):
    """Returns a step of one replica.

    Args:
        model: The model.
        batch: The size of the global batch.
        sums: Get the loss and the accuracy of each step.
    """

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_sum(losses) / batch
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        right = tf.equal(tf.argmax(logits, 1, tf.int32), y)
        sums[0].assign_add(loss)
        sums[1].assign_add(tf.reduce_sum(tf.cast(right, tf.float32)) / batch)

    return step
