"""What the devices of all workers did in the steps that were profiled."""

from __future__ import annotations

import dataclasses

from mgpu_tf.reports.device_times import (
    DeviceTimes,
    Profile,
    device_times,
    operations_of,
)
from mgpu_tf.reports.profile_file import newest_profile
from mgpu_tf.reports.profiling import Profiler
from mgpu_tf.training.distributed_model import DistributedModel


def profile_of(
    distributed: DistributedModel, profiler: Profiler, rows: int
) -> Profile | None:
    """Returns what each device did. Every worker must call it.

    Args:
        distributed: What was trained.
        profiler: Has profiled steps on every worker.
        rows: The rows of a device.

    Returns:
        The profile; None where some worker has none, as of steps that were
        not reached.
    """
    peers, found = distributed.peers, None
    if profiler.folder is not None and profiler.steps:
        operations = operations_of(
            distributed.engine.step_graphs,
            rows,
            distributed.strategy.num_replicas_in_sync,
        )
        found = [
            dataclasses.asdict(one)
            for one in device_times(
                newest_profile(profiler.folder).planes,
                operations,
                profiler.seconds,
            )
        ]
    every = peers.of_all(found)
    if None in every:
        return None
    devices = []
    for worker, here in enumerate(every):
        where = "" if peers.alone else f"worker {worker} "
        devices += [
            DeviceTimes(**one | {"device": where + one["device"]})
            for one in here
        ]
    return Profile(profiler.steps, profiler.seconds, devices)
