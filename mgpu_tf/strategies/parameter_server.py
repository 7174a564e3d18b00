"""Parameter servers: the strategy of the coordinator, and who serves it.

    strategy = create_parameter_server_strategy(max_staleness=8)

A cluster of one `chief`, some `worker` and some `ps` tasks, all started with
the same script. The chief coordinates: it alone comes back from here. The
others serve until the coordinator dismisses them, and exit with status 0.

    chief     hands out work and sums metrics up; takes no GPU
    worker    computes gradients
    ps        keeps the variables and applies gradients; takes no GPU
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time

import tensorflow as tf

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.ports import answers
from mgpu_tf.errors import ConfigurationError, unknown_name
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
    """What is done about gradients that come late.

    The staleness of a gradient is the number of updates that others made
    between the reading of the weights and its own update.

    Attributes:
        max_staleness: The bound; None for none.
        late_gradients: How it is kept. `hold`: no work is handed out that
            could make another gradient later than that. `scale`: a gradient
            that is s updates late counts `max_staleness / s`, at most 1.
        sample_every: Staleness is measured in every Nth piece of work.

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
    """Shortens what TensorFlow says about tasks that are lost, and counts.

    It prints every error with its traceback as it happens. Those that are
    mended are told in a line; the others are raised.

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
    """TensorFlow's strategy, with its cluster and what to do when late.

    Attributes:
        cluster: The cluster.
        staleness: What is done about late gradients.
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
        """Returns a new strategy like this, when all tasks are back.

        Raises:
            ConfigurationError: A task does not come back.
        """
        _await_tasks([*self.cluster.ps, *self.cluster.worker])
        return ParameterServerStrategy(self.cluster, self.staleness)

    @property
    def lost_workers(self) -> int:
        """How often a worker was lost; others did its work."""
        return _losses.workers - self._lost_before

    @property
    def num_workers(self) -> int:
        """How many worker tasks there are."""
        return len(self.cluster.worker)

    @property
    def num_ps(self) -> int:
        """How many parameter servers there are."""
        return len(self.cluster.ps)


class EvaluatorStrategy(tf.distribute.OneDeviceStrategy):
    """One device beside a cluster, to evaluate what it has saved.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__("/cpu:0")
        self.num_ps = len(cluster.ps)


def create_parameter_server_strategy(
    cluster: ClusterConfig | None = None,
    *,
    max_staleness: int | None = None,
    late_gradients: str = "hold",
    sample_every: int = 20,
) -> tf.distribute.Strategy:
    """Creates a strategy whose workers do not wait for each other.

    On worker and ps tasks it does not return: they serve until the
    coordinator has ended, and exit with status 0. On an evaluator task `fit`
    evaluates the checkpoints of the others, on one device.

    Args:
        cluster: The cluster; from `TF_CONFIG` by default.
        max_staleness: How many updates of others may come between the
            reading of the weights and the update; no bound by default.
        late_gradients: What keeps the bound: `hold` (fast workers wait) or
            `scale` (late gradients count less).
        sample_every: Staleness is measured in every Nth piece of work.

    Returns:
        A `tf.distribute.ParameterServerStrategy`, on the coordinator.

    Raises:
        ConfigurationError: There is no such cluster, or an argument is out
            of range.
        SystemExit: On worker and ps tasks.
    """
    options = StalenessOptions(max_staleness, late_gradients, sample_every)
    cluster = cluster or ClusterConfig.from_environment()
    _check(cluster)
    assert cluster is not None
    # Calls to a task that is being restarted wait, and others fail at once.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    if cluster.task_type in ("worker", "ps"):
        serve(cluster)
    hide_gpus()
    if cluster.task_type == "evaluator":
        return EvaluatorStrategy(cluster)
    logging.getLogger("tensorflow").addFilter(_losses)
    strategy = ParameterServerStrategy(cluster, options)
    if "MGPU_TF_RESTARTS" not in os.environ:  # No supervisor ends the servers.
        atexit.register(dismiss_unless_failed, cluster)
    return strategy


def _await_tasks(addresses: list[str]) -> None:
    """Waits for tasks that somebody starts again."""
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
                f"tasks. Received: TF_CONFIG with {counts}. Add {needed!r}."
            )
