"""What share of a step each operation takes, on one thread.

    python -m experiments.benchmarks.shares resnet20 lstm --kernels=keras

Trains a job of `jobs.JOBS` with `mgpu_tf` and prints, from TensorFlow's
profiler, the time that each type of operation had of its own. Hardware: one
core; about half a minute a job.
"""

from __future__ import annotations

import argparse
import collections
import glob
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from experiments.benchmarks.jobs import JOBS

_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="+", choices=sorted(JOBS))
    parser.add_argument(
        "--kernels", choices=("fused", "keras"), default="fused"
    )
    parser.add_argument("--least", type=float, default=0.01)
    arguments = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    for job in arguments.jobs:
        spent = measured(job, arguments.kernels)
        whole = sum(spent.values())
        print(
            f"{job}, kernels={arguments.kernels}: "
            f"{1e3 * whole / _STEPS:.2f} ms a step in operations",
            flush=True,
        )
        rest = 0.0
        for name, seconds in spent.most_common():
            if seconds < arguments.least * whole:
                rest += seconds
                continue
            print(
                f"  {name:40s} {seconds / whole:6.1%} "
                f"{1e3 * seconds / _STEPS:8.2f} ms"
            )
        print(f"  {'others':40s} {rest / whole:6.1%}", flush=True)


def measured(job: str, kernels: str) -> collections.Counter[str]:
    """Returns the seconds of each type of operation in ten steps.

    Args:
        job: A key of `jobs.JOBS`.
        kernels: As for `Trainer`.
    """
    import tensorflow as tf

    import mgpu_tf
    from experiments.benchmarks.contestants import datasets, tensorflow_model

    found = JOBS[job]
    trainer = mgpu_tf.Trainer(
        lambda: tensorflow_model.build(found), kernels=kernels
    )
    fit = {
        **datasets.for_fit(found, 1),
        "epochs": 2,
        "steps_per_epoch": _STEPS,
        "verbose": 0,
    }
    trainer.fit(**fit)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        trainer.fit(**fit | {"epochs": 1})
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
    _, _, kind = name.rpartition(":")
    is_kind = kind and kind != name and kind.replace("_", "").isalnum()
    return kind.removeprefix("_MklNative") if is_kind else None


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


__all__: Sequence[str] = ("kind_of", "measured", "of_folder", "own_times")

if __name__ == "__main__":
    main()
