"""Where checkpoints are kept: a folder of a file system, or object storage.

    kept = of("s3://bucket/run")              # `objects`; of a path, `disk`
    kept.names("s3://bucket/run")             # ["owner", "step-0000000120"]
    with kept.reading(path) as file: ...

`store`, `parts`, `reading`, `registry` and `recovery` use nothing else, by
paths and addresses. This module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

from mgpu_tf.checkpoints.storage.disk import DISK
from mgpu_tf.checkpoints.storage.interface import Storage
from mgpu_tf.checkpoints.storage.objects import reached
from mgpu_tf.folders import check_path, is_address


def of(path: str, name: str = "A folder") -> Storage:
    """Returns the storage of a path or an address.

    Args:
        path: A folder, or what is in one.
        name: The argument or flag that it came from.

    Raises:
        ConfigurationError: No package here reaches the address; the message
            says what to install.
    """
    if not is_address(path):
        return DISK
    return reached(path, name)


def check(name: str, folder: str) -> None:
    """Refuses what is no path, and an address that no package here reaches.

    Args:
        name: The argument or flag that it came from.
        folder: A path or an address.

    Raises:
        ConfigurationError: It is such a one.
    """
    of(check_path(name, folder), name)
