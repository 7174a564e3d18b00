"""What it costs to watch a training: heartbeat, recorder, checksums.

    python -m experiments.benchmarks.watching [--rounds=9] [--steps=400]
        [--batch=256]

Trains one model by two trainers that take turns: one has neither heartbeat nor
recorder nor checks, the other has all of them, with `check_replicas_every=100`.
Prints the processor time of a step of each, and the median of the ratios of
rounds that follow each other. Other work on the machine may hide a percent in
them. So it also measures the parts alone, each many times: what an execution
tells the heartbeat, a check of the replicas, and one look of the supervisor,
who looks once a second. Hardware: any; two parts of the CPU are the replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator

from mgpu_tf.cluster import heartbeat

CHECK_EVERY = 100
STEPS_PER_EXECUTION = 10
_WIDTH = 512
_LOOKS = 1000
_BEATS = 100_000
_CHECKS = 200


@contextlib.contextmanager
def _without_heartbeat() -> Iterator[None]:
    here, heartbeat._here = heartbeat._here, None
    try:
        yield
    finally:
        heartbeat._here = here


def measure(
    rounds: int, steps: int, batch: int
) -> tuple[list[tuple[float, float]], float]:
    """Returns processor milliseconds of a step, and of a check alone.

    Args:
        rounds: How often each of the two is measured.
        steps: The steps of a measurement.
        batch: The rows of a global batch.

    Returns:
        Of each round, a step without and with watching; and one check.
    """
    import keras
    import numpy as np

    import mgpu_tf
    from mgpu_tf.engine.synchronous.replica_check import ReplicaCheck

    strategy = mgpu_tf.create_mirrored_strategy(num_virtual_devices=2)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(batch * steps, 64)).astype("float32")
    y = generator.integers(0, 10, batch * steps)

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.layers.Dense(_WIDTH, activation="relu"),
                keras.layers.Dense(_WIDTH, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    bare = mgpu_tf.Trainer(
        build, strategy, steps_per_execution=STEPS_PER_EXECUTION
    )
    watched = mgpu_tf.Trainer(
        build,
        strategy,
        steps_per_execution=STEPS_PER_EXECUTION,
        check_replicas_every=CHECK_EVERY,
    )

    def spent(trainer: mgpu_tf.Trainer) -> float:
        before = time.process_time()
        trainer.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
        return (time.process_time() - before) / steps * 1e3

    def pair(first: bool) -> tuple[float, float]:
        if first:
            with _without_heartbeat():
                without = spent(bare)
            return without, spent(watched)
        with_all = spent(watched)
        with _without_heartbeat():
            return spent(bare), with_all

    pair(True)  # Traces.
    pairs = [pair(index % 2 == 0) for index in range(rounds)]
    model = watched.model
    check = ReplicaCheck(
        [*model.variables, *model.optimizer.variables], strategy
    )
    check(0)  # Traces.
    before = time.process_time()
    for step in range(_CHECKS):
        check(step)
    return pairs, (time.process_time() - before) / _CHECKS * 1e3


def beat_milliseconds() -> float:
    """Returns the processor time of what an execution tells."""
    before = time.process_time()
    for step in range(_BEATS):
        heartbeat.mark(heartbeat.CALLBACKS)
        heartbeat.count(step)
        with heartbeat.at(heartbeat.STEP):
            pass
        heartbeat.count(step)
    return (time.process_time() - before) / _BEATS * 1e3


def look_milliseconds(board: heartbeat.Board) -> float:
    """Returns the processor time of one look at eight tasks."""
    from mgpu_tf.cluster import watchdog
    from mgpu_tf.options import WatchOptions

    watch = watchdog.Watch(WatchOptions())
    before = time.process_time()
    for number in range(_LOOKS):
        beats = {f"worker {index}": board.read() for index in range(8)}
        watch.look({n: b for n, b in beats.items() if b}, float(number))
    return (time.process_time() - before) / _LOOKS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256)
    arguments = parser.parse_args()
    board = heartbeat.Board()
    os.environ[heartbeat.FILE] = board.path
    pairs, check = measure(arguments.rounds, arguments.steps, arguments.batch)
    beat = beat_milliseconds()
    look = look_milliseconds(board)
    more = [100 * (watched / bare - 1) for bare, watched in pairs]
    low, middle, high = statistics.quantiles(more, n=4)
    parts = beat / STEPS_PER_EXECUTION + check / CHECK_EVERY
    bare = statistics.median(p[0] for p in pairs)
    print(
        f"a step without: {bare:.3f} ms, "
        f"with: {statistics.median(p[1] for p in pairs):.3f} ms of processor "
        f"time; more by {middle:.2f} % (quartiles {low:.2f} to {high:.2f}); "
        f"a look of the supervisor, once a second: {look:.2f} ms\n"
        f"alone: {1e3 * beat:.1f} us told in an execution of "
        f"{STEPS_PER_EXECUTION} steps, {check:.2f} ms for a check every "
        f"{CHECK_EVERY} steps: {1e3 * parts:.1f} us a step, "
        f"{100 * parts / bare:.2f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
