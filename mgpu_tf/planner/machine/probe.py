"""Measures what a device and the links of a cluster can do, in seconds.

    found = measure()
    found.write(default_path())

Products of matrices give the rate, a sum of long vectors the bandwidth, a
chain of small operations what starting one costs, and a small model what
models reach of the two. Each figure is the best of several runs: other work on
a machine makes a run longer, and never shorter.

TensorFlow is imported when this is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mgpu_tf.planner.devices import Device, Efficiencies, Link
from mgpu_tf.planner.machine.calibration import Calibration

_SIDE = {"CPU": 1024, "GPU": 8192}
_VECTOR = {"CPU": 1 << 23, "GPU": 1 << 27}
_CHAIN = 200
_RUNS = 5


def measure(strategy: Any = None) -> Calibration:
    """Measures the device that is here, and the links of a cluster.

    Args:
        strategy: A strategy of several workers, which all call this; None
            for this machine alone.
    """
    import tensorflow as tf

    from mgpu_tf.planner.machine import here

    gpus = tf.config.list_logical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    name = "cpu"
    if gpus:
        name = here.machines_here(here.StrategyOptions()).device.name
    row = here.machines_here(here.StrategyOptions()).device
    with tf.device(f"/{kind}:0"):
        rate = _product_rate(_SIDE[kind])
        bandwidth = _bandwidth(_VECTOR[kind])
        overhead = _overhead()
    device = Device(
        name,
        row.memory_bytes,
        bandwidth,
        dict(row.rates) | {"float32": rate},
        row.inside,
        Efficiencies(
            products=0.8,
            memory=0.8,
            overhead_seconds=overhead,
            overlap=row.efficiencies.overlap,
        ),
    )
    if "tf32" in device.rates and gpus:
        # What was measured is what TensorFlow takes for float32.
        device.rates.pop("tf32")  # type: ignore[attr-defined]
    if strategy is None:
        return Calibration(device)
    link, workers = _link(strategy)
    return Calibration(device, link, workers)


def best_seconds(run: Callable[[], Any], runs: int = _RUNS) -> float:
    """Returns the least seconds of several calls, after one that warms up."""
    run()
    found = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def _product_rate(side: int) -> float:
    """Returns the floating-point operations per second of a product."""
    import tensorflow as tf

    left = tf.random.uniform([side, side])

    @tf.function(autograph=False)
    def product(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.matmul(tf.matmul(x, left), left))

    seconds = best_seconds(lambda: product(left).numpy())
    return 4.0 * side**3 / seconds


def _bandwidth(length: int) -> float:
    """Returns the bytes per second of a sum of two vectors."""
    import tensorflow as tf

    x = tf.random.uniform([length])
    y = tf.random.uniform([length])

    @tf.function(autograph=False)
    def add(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.add(x, y)

    seconds = best_seconds(lambda: add(x, y)[0].numpy())
    return 3.0 * 4 * length / seconds


def _overhead() -> float:
    """Returns the seconds of starting an operation."""
    import tensorflow as tf

    x = tf.random.uniform([8])

    @tf.function(autograph=False)
    def chain(x: tf.Tensor) -> tf.Tensor:
        for number in range(_CHAIN):
            # Unlike operations, so that no two are made one.
            x = tf.sin(x) if number % 2 else tf.cos(x)
        return x

    return best_seconds(lambda: chain(x).numpy()) / _CHAIN


def _link(strategy: Any) -> tuple[Link, int]:
    """Returns the link between workers, from sums of two sizes."""
    import tensorflow as tf

    from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

    workers = strategy.num_replicas_in_sync
    sizes = (1 << 8, 1 << 20)

    def sum_of(size: int) -> Callable[[], Any]:
        def on_replica() -> tf.Tensor:
            return sum_over_replicas(tf.ones([size]))[0]

        function = tf.function(
            lambda: strategy.run(on_replica), autograph=False
        )
        return lambda: strategy.experimental_local_results(function())[
            0
        ].numpy()

    short, long = (best_seconds(sum_of(size), 3) for size in sizes)
    # 2 (n - 1) messages, and 2 (n - 1)/n of the bytes through each link.
    moved = 2 * (workers - 1) / workers * 4 * (sizes[1] - sizes[0])
    rate = moved / max(long - short, 1e-9)
    latency = short / (2 * (workers - 1))
    # What was measured is what is reached, so none of it is lost again.
    return Link("measured", rate / Efficiencies().link, latency), workers
