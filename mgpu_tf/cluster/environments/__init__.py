"""Where the scheduler has put this process, and the other tasks of its job.

    found = environments.find(os.environ)
    found.source, found.addresses, found.index

A reader is a module with two functions. `detect(environ)` says whether the
process was started by its scheduler; it looks at one variable. `read(environ)`
returns a `Place`, or None for a process that trains alone. The first reader
that detects its scheduler decides:

1. `skypilot`: a task of SkyPilot on several nodes;
2. `slurm`: a step that `srun` has started;
3. `kubernetes`: an Indexed Job, a JobSet, a TrainJob of Kubeflow.

The inner scheduler comes first: SkyPilot has nodes of Slurm and pods, and
nodes of Slurm may be pods. `TF_CONFIG` comes before all of them; `config`
reads it. Kubeflow's TFJob and launchers such as `mgpu-tf launch` set it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

from mgpu_tf.cluster.environments import kubernetes, skypilot, slurm
from mgpu_tf.cluster.environments.place import Place
from mgpu_tf.cluster.roles import NUM_PS
from mgpu_tf.errors import ClusterError

READERS = (skypilot, slurm, kubernetes)

_log = logging.getLogger("mgpu_tf")


def find(environ: Mapping[str, str]) -> Place | None:
    """Returns what the scheduler of this process says.

    Args:
        environ: The environment.

    Returns:
        The place of this process; None where no scheduler is found, or where
        the process is the only one of its job.

    Raises:
        ClusterError: A scheduler is found, and what it says cannot be used.
    """
    for reader in READERS:
        if reader.detect(environ):
            place, hints = reader.read(environ)
            for hint in hints:
                _say(logging.WARNING, hint)
            if place is not None:
                _say(logging.INFO, str(place))
            return place
    return None


def ask_for_ps(num_ps: int) -> None:
    """Takes parameter servers from the processes that a scheduler started.

    It sets a variable of this process, which `find` reads from then on.
    Without a scheduler it does nothing.

    Args:
        num_ps: The number of parameter servers. 0 asks for nothing.

    Raises:
        ClusterError: The environment names another number.
    """
    if not num_ps or not any(reader.detect(os.environ) for reader in READERS):
        return
    given = os.environ.setdefault(NUM_PS, str(num_ps))
    if given != str(num_ps):
        raise ClusterError(
            f"num_ps must be that of {NUM_PS}. Received: num_ps={num_ps}, "
            f"{NUM_PS}={given}. Leave out one of them."
        )


@functools.cache
def _say(level: int, line: str) -> None:
    """Logs a line once in a process; the environment is read several times."""
    _log.log(level, "%s", line)
