"""Importing TensorFlow without what it prints about missing devices."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from mgpu_tf.runtime import versions


def import_tensorflow() -> None:
    """Imports TensorFlow and drops what it writes of itself.

    Before its logging is set up TensorFlow writes to the standard error
    directly, whatever TF_CPP_MIN_LOG_LEVEL says. Where the import fails, all
    of it is shown. In a notebook its Python side logs each strategy and each
    reduction: these lines are left out too. With TF_CPP_MIN_LOG_LEVEL set to 0
    nothing is dropped.

    Raises:
        ConfigurationError: TensorFlow or Keras is out of range.
    """
    versions.check()
    with _nothing_collected():
        _import()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keeps Python from looking for garbage, in a block.

    Modules stay, and looking for garbage among them takes a tenth of the time
    of the import.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _import() -> None:
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if level == "0":
        import tensorflow

        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except Exception:
            captured.seek(0)
            os.write(kept, captured.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    logger = logging.getLogger("tensorflow")
    logger.setLevel(max(logger.level, logging.WARNING))
