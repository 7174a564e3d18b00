"""The processes that serve a coordinator: workers and parameter servers.

serve(cluster)      # on a worker or ps task; it does not return
dismiss(cluster)    # on the coordinator: the others end with status 0
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import NoReturn

import tensorflow as tf

from mgpu_tf.cluster import heartbeat
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.ports import answers
from mgpu_tf.launch import noise

# A server whose coordinator does not come back ends by itself.
PATIENCE_SECONDS = 900.0
_POLL_SECONDS = 5.0

_log = logging.getLogger("mgpu_tf")


def cluster_spec(cluster: ClusterConfig) -> tf.train.ClusterSpec:
    """Returns the tasks that TensorFlow connects, in its own form."""
    tasks = {k: v for k, v in cluster.tasks.items() if k != "evaluator"}
    return tf.train.ClusterSpec(tasks)


def hide_gpus() -> None:
    """Leaves the GPUs of this machine to other processes."""
    # Too late only where an op ran before; the user's own choice then.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def serve(cluster: ClusterConfig) -> NoReturn:
    """Serves as the worker or ps that a cluster names.

    Args:
        cluster: The cluster, with this task's place in it.

    Raises:
        SystemExit: With status 1 where the coordinator is gone and does not
            come back. The coordinator's dismissal ends the process with 0.
    """
    config = tf.compat.v1.ConfigProto()
    if cluster.task_type == "ps":
        hide_gpus()
        config.device_count["GPU"] = 0
    config.gpu_options.allow_growth = True
    # As many calls as workers may wait on a server at the same time.
    needed = len(cluster.worker) + 1
    if (os.cpu_count() or 1) < needed:
        config.inter_op_parallelism_threads = needed
    server = tf.distribute.Server(
        cluster_spec(cluster),
        job_name=cluster.task_type,
        task_index=cluster.task_index,
        protocol="grpc",
        config=config,
    )
    heartbeat.mark(heartbeat.SERVE)
    noise.print_to_log(
        f"mgpu_tf: {cluster.task_name} serves the coordinator at "
        f"{cluster.chief[0]}, from {server.target}"
    )
    _outlast(cluster.chief[0])
    _log.error("%s: the coordinator is gone", cluster.task_name)
    sys.exit(1)


def dismiss(cluster: ClusterConfig) -> None:
    """Ends the worker and ps processes of a cluster with status 0.

    Args:
        cluster: The cluster; its coordinator is this process.
    """
    for job, addresses in (("worker", cluster.worker), ("ps", cluster.ps)):
        for index in range(len(addresses)):
            # The answer is that the connection was closed.
            with (
                contextlib.suppress(tf.errors.OpError),
                tf.device(f"/job:{job}/task:{index}"),
            ):
                tf.raw_ops.Abort(error_msg="", exit_without_error=True)


def dismiss_unless_failed(cluster: ClusterConfig) -> None:
    """Ends them unless this process ends with an error."""
    if getattr(sys, "last_type", None) is None:
        dismiss(cluster)


def _outlast(address: str) -> None:
    """Waits until a coordinator that was there is gone for long."""
    seen: float | None = None
    while seen is None or time.monotonic() - seen < PATIENCE_SECONDS:
        if answers(address, _POLL_SECONDS):
            seen = time.monotonic()
        time.sleep(_POLL_SECONDS)
