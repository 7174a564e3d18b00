"""What it costs to watch a training: heartbeat, recorder, checksums.

    python -m experiments.benchmarks.watching [--rounds=9] [--steps=400]

Trains one model by two trainers that take turns: one has neither heartbeat nor
recorder nor checks, the other has all of them, with `check_replicas_every=100`.
Prints the processor time of a step of each, and the median of the ratios of
rounds that follow each other. Then it measures one look of the supervisor, who
looks once a second. Hardware: any; two parts of the CPU are the replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

CHECK_EVERY = 100
BATCH = 256
_WIDTH = 512
_LOOKS = 1000


@contextlib.contextmanager
def _without_heartbeat() -> Iterator[None]:
    from mgpu_tf.cluster import heartbeat

    here, heartbeat._here = heartbeat._here, None
    try:
        yield
    finally:
        heartbeat._here = here


def measure(rounds: int, steps: int) -> list[tuple[float, float]]:
    """Returns processor milliseconds of a step, without and with watching.

    Args:
        rounds: How often each of the two is measured.
        steps: The steps of a measurement.
    """
    import keras
    import numpy as np

    import mgpu_tf

    strategy = mgpu_tf.create_mirrored_strategy(num_virtual_devices=2)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH * steps, 64)).astype("float32")
    y = generator.integers(0, 10, BATCH * steps)

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

    bare = mgpu_tf.Trainer(build, strategy, steps_per_execution=10)
    watched = mgpu_tf.Trainer(
        build,
        strategy,
        steps_per_execution=10,
        check_replicas_every=CHECK_EVERY,
    )

    def spent(trainer: mgpu_tf.Trainer) -> float:
        before = time.process_time()
        trainer.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
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
    return [pair(index % 2 == 0) for index in range(rounds)]


def look_milliseconds() -> float:
    """Returns the processor time of one look at eight tasks."""
    from mgpu_tf.cluster import heartbeat, watchdog
    from mgpu_tf.options import WatchOptions

    watch, path = watchdog.Watch(WatchOptions()), os.environ[heartbeat.FILE]
    before = time.process_time()
    for number in range(_LOOKS):
        beats = {f"worker {index}": heartbeat.read(path) for index in range(8)}
        watch.look({n: b for n, b in beats.items() if b}, float(number))
    return (time.process_time() - before) / _LOOKS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MGPU_TF_BEAT"] = os.path.join(folder, "worker-0")
        pairs = measure(arguments.rounds, arguments.steps)
        look = look_milliseconds()
    more = [100 * (watched / bare - 1) for bare, watched in pairs]
    low, middle, high = statistics.quantiles(more, n=4)
    print(
        f"a step without: {statistics.median(p[0] for p in pairs):.3f} ms, "
        f"with: {statistics.median(p[1] for p in pairs):.3f} ms of processor "
        f"time; more by {middle:.2f} % (quartiles {low:.2f} to {high:.2f}); "
        f"a look of the supervisor, once a second: {look:.2f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
