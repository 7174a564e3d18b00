"""What workers of parameter servers got in one step each, and made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine.asynchronous.schedule.dispatch import Dispatcher
from mgpu_tf.engine.asynchronous.schedule.feed import AsynchronousFeed
from mgpu_tf.engine.asynchronous.schedule.work import Work
from mgpu_tf.engine.asynchronous.schedule.workers import Workers
from mgpu_tf.engine.step.replica_step import outputs_of
from mgpu_tf.engine.step.traced import excerpts
from mgpu_tf.reports.pipeline_trace import Excerpt, ShareTrace, WeightTrace

# By the index of its batch what a worker returned.
Done = dict[int, Any]


class _Feeds(Workers, Protocol):
    def feed(
        self, source: Source, first: int = 0, *, chain: bool, training: bool
    ) -> AsynchronousFeed:
        """Returns where epochs read from."""


def once_each(
    engine: _Feeds,
    run: Callable[[Work], Callable[..., Any]],
    source: Source,
    *,
    training: bool,
) -> Done:
    """Hands out one batch for each worker.

    Args:
        engine: Whose workers.
        run: Returns what a worker does with a batch of the work.
        source: The batches.
        training: Whether they are steps of training.

    Returns:
        What was returned for each batch, in their order.
    """
    workers = engine.strategy.num_workers
    feed = engine.feed(source, chain=True, training=training)
    work = feed.iterator(0, source.steps or workers).work
    function = tf.function(run(work), autograph=False)
    dispatcher = Dispatcher(engine.strategy)
    dispatcher.settle()
    first = engine.steps_made() if training else 0
    for place in range(workers):
        taken = work.take(1)
        if taken is None:
            break
        index = tf.constant(first + place, tf.int64)
        dispatcher.schedule(place, function, (work.per_worker, taken[1], index))
    done: Done = {}
    while not dispatcher.idle:
        place, values = dispatcher.next()
        done[place] = values
    return dict(sorted(done.items()))


def predict_traced(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    work: Work,
    iterator: Any,
    arguments: Any,
    generator: Any,
) -> tuple[Any, ...]:
    """Predicts a batch. On a worker, in the graph.

    Args:
        model: A built model.
        strategy: Its strategy.
        work: How to read.
        iterator: What this worker reads from.
        arguments: Which examples.
        generator: That of unseeded draws.

    Returns:
        The worker, the batch, its examples and the outputs.
    """
    data, size = work.reader(iterator, arguments)(tf.constant(0, tf.int64))
    outputs = strategy.run(lambda: outputs_of(model, data, generator))
    return worker_index(), data, size, outputs


def worker_index() -> tf.Tensor:
    """Returns which worker this is. On a worker, in the graph."""
    coordinator = tf.distribute.coordinator
    return coordinator.experimental_get_current_worker_index()


def shares_of(
    done: Done, paths: list[str], metrics: Callable[[Any], dict[str, Any]]
) -> list[ShareTrace]:
    """Returns what the workers did in steps of training.

    Args:
        done: What `Piece.trace` returned for each batch.
        paths: The weights that have a gradient.
        metrics: Returns the metrics by name from the sums of their state.
    """
    found = []
    for place, (worker, data, size, gradients, sums) in done.items():
        device = _device_of(worker)
        shown = [
            Excerpt.of(path, gradient, device)
            for path, gradient in zip(paths, gradients, strict=True)
        ]
        rows = _on(device, excerpts(data))
        share = ShareTrace(device, place, 0, int(size), 1.0, rows, shown)
        loss = float(metrics(sums)["loss"])
        found.append(dataclasses.replace(share, loss=loss))
    return found


def received(
    done: Done, paths: list[str], weights: list[WeightTrace]
) -> list[Excerpt]:
    """Returns what the optimizer got, where the weights lie."""
    servers = {weight.name: weight.devices[0] for weight in weights}
    return [
        Excerpt.of(path, gradient, servers[path])
        for _, _, _, gradients, _ in done.values()
        for path, gradient in zip(paths, gradients, strict=True)
    ]


def outputs_by_share(done: Done) -> list[ShareTrace]:
    """Returns what the workers did in steps of prediction.

    Args:
        done: What `predict_traced` returned for each batch.
    """
    found, first = [], 0
    for place, (worker, data, size, outputs) in done.items():
        device, after = _device_of(worker), first + int(size)
        found.append(
            ShareTrace(
                device,
                place,
                first,
                after,
                1.0,
                _on(device, excerpts(data)),
                outputs=_on(device, excerpts(outputs, ("outputs", "", ""))),
            )
        )
        first = after
    return found


def _on(device: str, shown: list[Excerpt]) -> list[Excerpt]:
    return [dataclasses.replace(each, device=device) for each in shown]


def _device_of(worker: Any) -> str:
    return f"/job:worker/replica:0/task:{int(worker)}"
