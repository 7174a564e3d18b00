"""TensorFlow's own strategies, for the loops that are written by hand."""

from __future__ import annotations

import os

import tensorflow as tf


def set_threads(place) -> None:
    """Sets how many threads one operation may use."""
    if place.threads is not None:
        threading = tf.config.threading
        threading.set_intra_op_parallelism_threads(place.threads)


def create(name: str, place) -> tf.distribute.Strategy:
    """Creates a strategy.

    Args:
        name: "one_device", "mirrored", "multi_worker_mirrored",
            "parameter_server".
        place: Options `replicas`, `bytes_per_pack`.
    """
    options = place.options
    set_threads(place)
    if name == "one_device":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        replicas = options["replicas"]
        (cpu,) = tf.config.list_physical_devices("CPU")
        part = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [part] * replicas)
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(replicas)]
        )
    if name == "parameter_server":
        return _parameter_server()
    communication = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.get("bytes_per_pack", 0),
        implementation=(
            tf.distribute.experimental.CommunicationImplementation.RING
        ),
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication
    )


def _parameter_server() -> tf.distribute.Strategy:
    """As TensorFlow's tutorial; only the coordinator comes back."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    if resolver.task_type == "chief":
        return tf.distribute.ParameterServerStrategy(resolver)
    config = tf.compat.v1.ConfigProto()
    needed = cluster.num_tasks("worker") + 1
    if (os.cpu_count() or 1) < needed:
        config.inter_op_parallelism_threads = needed
    server = tf.distribute.Server(
        cluster,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        config=config,
        protocol="grpc",
    )
    server.join()
    raise SystemExit
