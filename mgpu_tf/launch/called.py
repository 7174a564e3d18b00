"""Calls a function that another process has sent; a task of a notebook.

    python -m mgpu_tf.launch.called FILE

FILE has a function and its arguments, pickled. The chief writes what the
function returns beside it.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import traceback

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError


def main(path: str) -> None:
    """Calls the function in a file.

    Raises:
        ConfigurationError: What it returned cannot be sent back.
    """
    cloudpickle = importlib.import_module("cloudpickle")
    sent = pathlib.Path(path)
    function, arguments = cloudpickle.loads(sent.read_bytes())
    cluster = ClusterConfig.from_environment()
    try:
        returned = function(*arguments)
    except Exception as error:
        frames = error.__traceback__
        traceback.print_exception(
            error.with_traceback(frames.tb_next if frames else None)
        )
        raise SystemExit(1) from None
    if cluster is not None and not cluster.is_chief:
        return
    try:
        result = cloudpickle.dumps(returned)
    except Exception as error:
        raise ConfigurationError(
            "What the function returns must be sent to the notebook. "
            f"Received: {type(returned).__name__}, and {error}. Return "
            "numbers and arrays."
        ) from None
    part = sent.with_suffix(f".{os.getpid()}")
    part.write_bytes(result)
    part.rename(sent.with_suffix(".result"))


if __name__ == "__main__":
    main(sys.argv[1])
