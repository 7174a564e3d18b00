"""Importing TensorFlow without what it prints about missing devices."""

from __future__ import annotations

import logging
import os
import sys
import tempfile

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
        except BaseException:
            captured.seek(0)
            os.write(kept, captured.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    logger = logging.getLogger("tensorflow")
    logger.setLevel(max(logger.level, logging.WARNING))
