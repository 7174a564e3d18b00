"""Addresses such as gs://bucket/data, which TensorFlow's file systems read."""

from __future__ import annotations

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import is_address


def check_reachable(name: str, path: str) -> None:
    """Refuses an address that TensorFlow does not reach.

    Args:
        name: The argument or flag that it came from.
        path: A path; one of this machine is not looked at.

    Raises:
        ConfigurationError: TensorFlow has no file system for it, or the file
            system answers with an error.
    """
    if not is_address(path):
        return
    import tensorflow as tf

    try:
        tf.io.gfile.exists(path)
    except tf.errors.OpError as error:
        scheme = path.partition("://")[0]
        raise ConfigurationError(
            f"{name} must be a path, or an address that TensorFlow's file "
            f"systems reach. Received: {name}={path!r} "
            f"({error.message.splitlines()[0]:.160}). Mount {scheme}:// as a "
            "folder, such as with gcsfuse or s3fs."
        ) from None
