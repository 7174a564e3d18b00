"""Which GPUs of this machine each worker of a local job gets.

    4 GPUs, 2 workers    worker 0: CUDA_VISIBLE_DEVICES=0,1   worker 1: 2,3

NCCL takes a GPU once, so workers do not share one. Where there are fewer GPUs
than workers, all of them see all, and exchange by sockets.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.names import VISIBLE_GPUS

_FILES = "/dev/nvidia[0-9]*"


def share(
    cluster: ClusterConfig, environ: Mapping[str, str], files: str = _FILES
) -> dict[str, str]:
    """Returns the variable that gives a worker its GPUs; empty for all.

    Args:
        cluster: The cluster as the task sees it, all of it on this machine.
        environ: The environment of the launcher. Of the GPUs that it names,
            each worker gets an equal share.
        files: A pattern of the files of the GPUs.
    """
    if cluster.task_type not in ("chief", "worker"):
        return {}
    workers, index = cluster.num_workers, cluster.worker_index
    if cluster.ps:
        # The chief hands out work, and uses no GPU.
        if cluster.task_type == "chief":
            return {}
        workers, index = len(cluster.worker), cluster.task_index
    if VISIBLE_GPUS in environ:
        named = environ[VISIBLE_GPUS].split(",")
        present = [gpu for gpu in named if gpu.strip()]
    else:
        present = [str(number) for number in range(len(glob.glob(files)))]
    each = len(present) // workers
    if workers == 1 or not each:
        return {}
    return {VISIBLE_GPUS: ",".join(present[index * each : (index + 1) * each])}
