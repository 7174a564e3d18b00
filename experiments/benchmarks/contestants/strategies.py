"""TensorFlow's own strategies, for the loops that are written by hand."""

from __future__ import annotations

import tensorflow as tf


def set_threads(place) -> None:
    """Sets how many threads one operation may use."""
    if place.threads is not None:
        threading = tf.config.threading
        threading.set_intra_op_parallelism_threads(place.threads)


def create(name: str, place) -> tf.distribute.Strategy:
    """Creates a strategy.

    Args:
        name: "one_device", "mirrored", "multi_worker_mirrored".
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
    communication = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.get("bytes_per_pack", 0),
        implementation=(
            tf.distribute.experimental.CommunicationImplementation.RING
        ),
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication
    )
