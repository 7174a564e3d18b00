"""What share of a step each operation takes, on one thread.

    python -m experiments.benchmarks.shares resnet20 lstm --of=tf_keras_fit

Lets a contestant of `one_device/JOB` on TensorFlow train, and prints from
TensorFlow's profiler the time that each type of operation had of its own. One
of tf_keras needs the extra `peers`. Hardware: one core; about half a minute a
job.
"""

from __future__ import annotations

import argparse
import collections
import glob
import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator

from experiments.benchmarks.table import BENCHMARKS
from experiments.benchmarks.worker import Place

_STEPS = 10
_GROUP = "one_device/"
_BENCHMARKS = {
    benchmark.job: benchmark
    for benchmark in BENCHMARKS
    if benchmark.name.startswith(_GROUP)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="+", choices=sorted(_BENCHMARKS))
    parser.add_argument("--of", default="mgpu_tf", help="the contestant")
    parser.add_argument(
        "--least", type=float, default=0.01, help="a share that is told"
    )
    arguments = parser.parse_args()
    for job in arguments.jobs:
        tell(job, arguments.of, measured(job, arguments.of), arguments.least)


def tell(
    job: str, contestant: str, spent: collections.Counter[str], least: float
) -> None:
    """Prints the share of each type of operation."""
    whole = sum(spent.values())
    step = 1e3 * whole / _STEPS
    print(f"{job}, {contestant}: {step:.2f} ms of operations in a step")
    rest = 1.0
    for name, seconds in spent.most_common():
        share = seconds / whole
        if share >= least:
            rest -= share
            print(f"  {name:32s} {share:6.1%} {share * step:8.2f} ms")
    print(f"  {'others':32s} {rest:6.1%} {rest * step:8.2f} ms", flush=True)


def measured(job: str, contestant: str) -> collections.Counter[str]:
    """Returns the seconds of each type of operation in ten steps.

    Args:
        job: A key of `jobs.JOBS`.
        contestant: The name of one on TensorFlow.
    """
    import tensorflow as tf

    (found,) = [
        one for one in _BENCHMARKS[job].contestants if one.name == contestant
    ]
    place = Place(found.module, job, 0, 1, found.options, 0, -1, None, 1)
    running = importlib.import_module(found.module).create(place)
    running.check(_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        running.check(_STEPS)
        tf.profiler.experimental.stop()
        return of_folder(folder)


def of_folder(folder: str) -> collections.Counter[str]:
    """Returns the seconds of each type of operation in a profile."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    spent: collections.Counter[str] = collections.Counter()
    pattern = os.path.join(folder, "**", "*.xplane.pb")
    for path in glob.glob(pattern, recursive=True):
        space = xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        for plane in space.planes:
            if not plane.name.startswith("/host:CPU"):
                continue
            for line in plane.lines:
                spans = (
                    (
                        plane.event_metadata[event.metadata_id].name,
                        event.offset_ps,
                        event.duration_ps,
                    )
                    for event in line.events
                )
                for name, picoseconds in own_times(spans):
                    kind = kind_of(name)
                    if kind is not None:
                        spent[kind] += picoseconds / 1e12
    return spent


def kind_of(name: str) -> str | None:
    """Returns the type of an operation, None of what is no operation.

    Example:
        kind_of("model/dense/MatMul:MatMul")     # "MatMul"
    """
    before, _, kind = name.rpartition(":")
    if not before or before.endswith(":") or not kind.isidentifier():
        return None
    return kind.removeprefix("_MklNative")


def own_times(
    spans: Iterable[tuple[str, int, int]],
) -> Iterator[tuple[str, int]]:
    """Returns what each span had, less the spans inside of it.

    Args:
        spans: Name, begin and length, of one thread; whatever order.
    """
    open_: list[list] = []
    for name, begin, length in sorted(spans, key=lambda s: (s[1], -s[2])):
        yield from _ended(open_, begin)
        if open_:
            open_[-1][2] -= length
        open_.append([name, begin + length, length])
    yield from _ended(open_, None)


def _ended(open_: list[list], now: int | None) -> Iterator[tuple[str, int]]:
    while open_ and (now is None or open_[-1][1] <= now):
        name, _, own = open_.pop()
        yield name, own


if __name__ == "__main__":
    main()
