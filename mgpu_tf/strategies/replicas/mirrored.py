"""TensorFlow's synchronous strategies, less two of their limits.

A process may have several `MirroredStrategy`, and a worker of a
`MultiWorkerMirroredStrategy` several replicas on its CPU.

    with as_one_replica():                  # in a replica
        strategy.num_replicas_in_sync       # 1

Code that was written for one device then computes what it would there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_utils,
)
from tensorflow.python.eager import context as tf_context

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.balance import Balance
from mgpu_tf.strategies.replicas.collectives import carrier_of

# How long a worker may be silent before TensorFlow ends the cluster.
SILENCE_SECONDS = 45.0
# The most that a worker sends of an initial value at once.
MOST_SENT_BYTES = 1 << 28

_view = threading.local()

# Apart from those of a process alone, which workers may have made more of.
_groups_of_workers = itertools.count(start=1_000_000, step=1000)


@contextlib.contextmanager
def as_one_replica() -> Iterator[None]:
    """Lets strategies say, on this thread, that there is one replica.

    Keras divides a loss by the number of replicas at hand, and code that
    asks for it does so as well.
    """
    before = getattr(_view, "is_one", False)
    _view.is_one = True
    try:
        yield
    finally:
        _view.is_one = before


class OneReplicaView:
    """What makes a strategy follow `as_one_replica`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Returns how many replicas step together."""
        if getattr(_view, "is_one", False):
            return 1
        return super().num_replicas_in_sync  # type: ignore[misc]

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Runs a function once on each replica, as TensorFlow's `run`."""
        in_graph = isinstance(fn, tf.types.experimental.GenericFunction)
        if tf.executing_eagerly() and not in_graph:
            fn = _ended_at_once(fn)
        return super().run(  # type: ignore[misc]
            fn, args=args, kwargs=kwargs, options=options
        )


def _ended_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets TensorFlow see at once that the threads of replicas have ended.

    It looks for them once a second. A thread that lets go of what a replica has
    kept is there at the first look, and an eager step takes the second.
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        coordinator = getattr(threading.current_thread(), "coord", None)
        if coordinator is not None and "join" not in vars(coordinator):
            # An object of this call alone.
            coordinator.join = functools.partial(_join, coordinator.join)
        return fn(*args, **kwargs)

    return run


def _join(
    coordinators: Callable[[list[threading.Thread]], None],
    threads: list[threading.Thread],
) -> None:
    for thread in threads:
        thread.join(1.0)
    coordinators(threads)


def follow_one_replica(strategy: tf.distribute.Strategy) -> None:
    """Makes a strategy of TensorFlow's own follow `as_one_replica`.

    The object gets a class of its own, derived from the class that it has.
    That of TensorFlow is not changed.

    Args:
        strategy: A strategy whose replicas are on CPUs and GPUs.
    """
    kind = type(strategy)
    if not isinstance(strategy, OneReplicaView):
        strategy.__class__ = type(kind.__name__, (OneReplicaView, kind), {})


class _Numbers(cross_device_utils.CollectiveKeys):
    """Numbers of collective operations, of which TensorFlow keeps none.

    Each execution of a function has new ones, and of each Python integer that
    becomes a tensor TensorFlow keeps the tensor.
    """

    def get_instance_key(self, group_key: int, device: str) -> Any:
        """Returns a new number, for TensorFlow."""
        return np.int32(super().get_instance_key(group_key, device))


class MirroredStrategy(OneReplicaView, tf.distribute.MirroredStrategy):
    """`MirroredStrategy` of which a process may have several, of any size.

    TensorFlow numbers the groups that communicate from 1 in each strategy,
    and a second strategy over other devices then fails at its first step.
    """

    _groups = itertools.count(start=1000, step=1000)

    def __init__(
        self,
        devices: list[str],
        cross_device_ops: tf.distribute.CrossDeviceOps | None,
        balance: Balance | None = None,
    ) -> None:
        self._collective_key_base = next(self._groups)
        super().__init__(devices, cross_device_ops=cross_device_ops)
        self.balance = balance or Balance()


class MultiWorkerExtended(
    collective_all_reduce_strategy.CollectiveAllReduceExtended
):
    """TensorFlow fixes one CPU replica to a worker; this one has several.

    It has a replica for each whole GPU, and this one for each part of a GPU.

    A process may have several of these strategies. TensorFlow would connect
    the workers once more for the second, and a worker that is ahead would
    then wait for ever for what it had sent before.
    """

    # TensorFlow asks for it, and connects where it is false.
    _std_server_started = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        options: tf.distribute.experimental.CommunicationOptions,
        num_local_devices: int,
    ) -> None:
        self._num_local_devices = num_local_devices
        super().__init__(
            strategy, cluster_resolver=resolver, communication_options=options
        )
        self._collective_keys.__class__ = _Numbers
        if self._std_server_started:
            self._connect_once()

    @classmethod
    def _connect_once(cls) -> None:
        cls._std_server_started = True

    def _update_config_proto(self, config_proto: Any) -> Any:
        """Says that the process uses NCCL, which TensorFlow leaves out.

        A worker asks the first one which operation is meant, without the hint
        that the operation has; one that only NCCL has is not found then.
        """
        config = super()._update_config_proto(config_proto)
        nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
        if self._communication_options.implementation == nccl:
            config.experimental.collective_nccl = True
        return config

    def _initialize_local_devices(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        worker_device: str,
    ) -> tuple[tuple[str, ...], str]:
        _, kind = super()._initialize_local_devices(
            cluster_resolver, worker_device
        )
        devices = tuple(
            f"{worker_device}/device:{kind}:{i}"
            for i in range(self._num_local_devices)
        )
        return devices, kind

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        """Returns the value of the first worker, which it sends to the others.

        TensorFlow has such an operation for few types, so others are sent as
        one of these, such as bfloat16 as float32. It sends less than 2 GiB at
        once, so larger values go in parts. They go between hosts: with NCCL a
        receive does not wait for kernels that use its memory.
        """
        get = super()._get_variable_creator_initial_value
        if replica_id:
            return get(replica_id, device, primary_var, **kwargs)
        spec = tf.DeviceSpec.from_string(device)
        host = spec.replace(device_type="CPU", device_index=0).to_string()

        def sent(value: tf.Tensor) -> tf.Tensor:
            given = kwargs | {"initial_value": value, "dtype": value.dtype}
            return get(replica_id, host, primary_var, **given)()

        def of_the_first() -> tf.Tensor:
            with tf.device(device):
                value = kwargs["initial_value"]
                value = value() if callable(value) else value
                value = getattr(value, "wrapped_value", value)
                value = tf.convert_to_tensor(value, kwargs.get("dtype"))
                kind, shape = value.dtype, value.shape
                value = tf.cast(value, carrier_of(kind))
                most = MOST_SENT_BYTES // value.dtype.size
                if shape.num_elements() <= most:
                    return tf.cast(sent(value), kind)
                flat = tf.reshape(value, [-1])
                parts = []
                for low in range(0, shape.num_elements(), most):
                    part = sent(flat[low : low + most])
                    if not self._is_chief:
                        parts.append(part)
                if not self._is_chief:
                    # Its own value first, so that it is not held as well.
                    del value, flat
                    value = tf.reshape(tf.concat(parts, 0), shape)
                return tf.cast(value, kind)

        return of_the_first


class MultiWorkerMirroredStrategy(
    OneReplicaView, tf.distribute.MultiWorkerMirroredStrategy
):
    """`MultiWorkerMirroredStrategy` with a settable count of replicas.

    Raises:
        ConfigurationError: The task's port is taken, or an op ran before.
    """

    def __init__(
        self,
        cluster: ClusterConfig | None,
        options: tf.distribute.experimental.CommunicationOptions,
        num_local_devices: int,
        balance: Balance | None = None,
        *,
        kind: type[MultiWorkerExtended] = MultiWorkerExtended,
    ) -> None:
        self.balance = balance or Balance()
        self._collective_key_base = next(_groups_of_workers)
        if cluster is not None:
            _configure_heartbeats(cluster)
        with _created_first(cluster):
            extended = kind(
                self, _resolver(cluster), options, num_local_devices
            )
        tf.distribute.Strategy.__init__(self, extended)


def _configure_heartbeats(cluster: ClusterConfig) -> None:
    """Lets a worker be silent for a while, as one that is stopped is.

    TensorFlow's own limit is 10 seconds. A worker that has ended is mostly
    found sooner, since its connections are closed.
    """
    context = tf_context.context()
    if context.coordination_service is not None:
        return
    jobs = {"chief": cluster.chief, "worker": cluster.worker}
    context.configure_coordination_service(
        service_type="standalone",
        service_leader=(
            f"/job:{'chief' if cluster.chief else 'worker'}/replica:0/task:0"
        ),
        heartbeat_timeout_in_ms=int(SILENCE_SECONDS * 1000),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(
                name=name, num_tasks=len(addresses)
            )
            for name, addresses in jobs.items()
            if addresses
        ],
    )


def _resolver(
    cluster: ClusterConfig | None,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    if cluster is None:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({}), task_type=None, task_id=None
        )
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(
            {
                name: addresses
                for name, addresses in cluster.tasks.items()
                if name in ("chief", "worker")
            }
        ),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
        rpc_layer="grpc",
    )


@contextlib.contextmanager
def _created_first(cluster: ClusterConfig | None) -> Iterator[None]:
    try:
        yield
    except tf.errors.UnknownError as error:
        if cluster is None or "Could not start gRPC server" not in str(error):
            raise
        raise ConfigurationError(
            f"The port of a task must be free. Received: {cluster.source} with "
            f"{cluster.task_name} at {cluster.address}, which another process "
            "holds. End it, or choose another port on all tasks."
        ) from None
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise ConfigurationError(
            "A multi-worker strategy must be created before TensorFlow runs "
            "its first op. Received: an op ran earlier in this process. "
            "Move create_strategy() to the top of the script."
        ) from None
