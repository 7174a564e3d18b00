"""The strategy `parameter_server`, and the tasks that serve it.

    strategy = create_parameter_server_strategy(max_staleness=8)

A cluster has one `chief` task, and `worker` and `ps` tasks. All run the same
script. Only the chief, which is the coordinator, returns from
`create_parameter_server_strategy`. The other tasks serve until the coordinator
ends, and exit with status 0.

    chief     hands out work and adds up metrics; uses no GPU
    worker    computes gradients
    ps        keeps the variables and applies gradients; uses no GPU
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time

import tensorflow as tf

from mgpu_tf.cluster import watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.ports import answers
from mgpu_tf.cluster.waiting import naming_missing
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.launch.job import RESTARTS
from mgpu_tf.names import LATE_GRADIENTS
from mgpu_tf.strategies.servers import (
    PATIENCE_SECONDS,
    cluster_spec,
    dismiss_unless_failed,
    hide_gpus,
    serve,
)

_POLL_SECONDS = 5.0

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass(frozen=True)
class StalenessOptions:
    """What to do about late gradients.

    The staleness of a gradient is the number of updates that other workers made
    between the reading of the weights and the update by this gradient.

    Attributes:
        max_staleness: The bound; None for no bound.
        late_gradients: `hold`: no work is handed out that could make a gradient
            later than the bound. `scale`: a gradient that is s updates late
            counts `max_staleness / s`, at most 1.
        sample_every: Measure staleness in every Nth piece of work.

    References:
        Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous
        Parallel Parameter Server, 2013. W. Zhang et al.: Staleness-aware
        Async-SGD for Distributed Deep Learning, 2016.
    """

    max_staleness: int | None = None
    late_gradients: str = "hold"
    sample_every: int = 20

    def __post_init__(self) -> None:
        limit = self.max_staleness
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ConfigurationError(
                "max_staleness must be 0 or more, or None for no bound. "
                f"Received: max_staleness={limit!r}."
            )
        if self.late_gradients not in LATE_GRADIENTS:
            raise ConfigurationError(
                unknown_name(
                    "late_gradients", self.late_gradients, LATE_GRADIENTS
                )
            )
        if self.sample_every < 1:
            raise ConfigurationError(
                "sample_every must be 1 or more. Received: "
                f"sample_every={self.sample_every}."
            )


class _Losses(logging.Filter):
    """Shortens TensorFlow's messages about lost tasks, and counts them.

    TensorFlow prints every error with its traceback. Here an error that is
    recovered from is one line. The other errors are raised.

    Attributes:
        workers: How often this process has lost a worker.
    """

    workers = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.module != "cluster_coordinator":
            return True
        if str(record.msg).startswith("Worker %s failed"):
            self.workers += 1
            task = record.getMessage().split()[1]
            _log.warning(
                "%s was lost; others do its work until it is back",
                task.removeprefix("/job:").replace("/replica:0/task:", " "),
            )
        return False


_losses = _Losses()


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """TensorFlow's strategy, with its cluster and staleness options.

    Attributes:
        cluster: The cluster.
        staleness: What to do about late gradients.
    """

    def __init__(
        self, cluster: ClusterConfig, staleness: StalenessOptions
    ) -> None:
        self.cluster = cluster
        self.staleness = staleness
        self._lost_before = _losses.workers
        super().__init__(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                cluster_spec(cluster),
                task_type=cluster.task_type,
                task_id=cluster.task_index,
                rpc_layer="grpc",
            )
        )

    def again(self) -> ParameterServerStrategy:
        """Waits until all tasks are back, and returns a new such strategy.

        Raises:
            ConfigurationError: A task does not come back.
        """
        _await_tasks([*self.cluster.ps, *self.cluster.worker])
        # Where a worker was lost as well, a thread of TensorFlow's coordinator
        # connects to the cluster again. Two that do so at a time end the
        # process by SIGSEGV. The destructor ends this thread; it has no other
        # public name. There is one coordinator for a strategy.
        old = tf.distribute.coordinator.ClusterCoordinator(self)
        old.__del__()
        return ParameterServerStrategy(self.cluster, self.staleness)

    @property
    def lost_workers(self) -> int:
        """How often a worker was lost and other workers did its work."""
        return _losses.workers - self._lost_before

    @property
    def num_workers(self) -> int:
        """The number of worker tasks."""
        return len(self.cluster.worker)

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.cluster.ps)


class EvaluatorStrategy(tf.distribute.OneDeviceStrategy):
    """The CPU of an evaluator task, which evaluates the checkpoints.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__("/cpu:0")
        self.num_ps = len(cluster.ps)


@checked
def create_parameter_server_strategy(
    cluster: ClusterConfig | None = None,
    *,
    max_staleness: int | None = None,
    late_gradients: str = "hold",
    sample_every: int = 20,
) -> tf.distribute.Strategy:
    """Creates a strategy whose workers do not wait for each other.

    On worker and ps tasks the function does not return: they serve until the
    coordinator ends, and exit with status 0. On an evaluator task `fit`
    evaluates the checkpoints of the run on the CPU.

    Args:
        cluster: The cluster. Default: the cluster in `TF_CONFIG`, or that of
            the scheduler.
        max_staleness: The largest number of updates by other workers between
            the reading of the weights and the update. Default: no bound.
        late_gradients: What to do about the bound. `hold`: fast workers wait.
            `scale`: later gradients get a smaller weight.
        sample_every: Measure staleness in every Nth piece of work.

    Returns:
        A `tf.distribute.ParameterServerStrategy`, on the coordinator.

    Raises:
        ConfigurationError: The cluster has no chief, worker or ps task, or an
            argument is out of range.
        SystemExit: On worker and ps tasks.
    """
    options = StalenessOptions(max_staleness, late_gradients, sample_every)
    cluster = cluster or ClusterConfig.from_environment()
    _check(cluster)
    assert cluster is not None
    watchdog.begin(cluster)
    # Calls to a task that is being restarted wait, and others fail at once.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    if cluster.task_type in ("worker", "ps"):
        serve(cluster)
    hide_gpus()
    if cluster.task_type == "evaluator":
        return EvaluatorStrategy(cluster)
    logging.getLogger("tensorflow").addFilter(_losses)
    with naming_missing(cluster):
        strategy = ParameterServerStrategy(cluster, options)
    if RESTARTS not in os.environ:  # No supervisor ends the servers.
        atexit.register(dismiss_unless_failed, cluster)
    return strategy


def _await_tasks(addresses: list[str]) -> None:
    """Waits until lost tasks are started again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for address in addresses:
        while not answers(address, _POLL_SECONDS):
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    "A task that was lost must be started again. Received: "
                    f"nothing at {address} for {PATIENCE_SECONDS:.0f} "
                    "seconds. Use `mgpu-tf launch --max_restarts=N`."
                )
            time.sleep(0.5)


def _check(cluster: ClusterConfig | None) -> None:
    if cluster is None:
        raise ConfigurationError(
            "The strategy 'parameter_server' needs a cluster of chief, worker "
            "and ps tasks. Received: no TF_CONFIG. Start the script by "
            "`mgpu-tf launch --num_workers=2 --num_ps=1 -- python script.py`."
        )
    counts = {name: len(addresses) for name, addresses in cluster.tasks.items()}
    for needed in ("chief", "worker", "ps"):
        if needed not in counts:
            raise ConfigurationError(
                "The strategy 'parameter_server' needs chief, worker and ps "
                f"tasks. Received: {cluster.source} with {counts}. Add "
                f"{needed!r}."
            )
