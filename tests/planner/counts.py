"""Whether TensorFlow counts here what a CPU holds.

It does where it uses oneDNN, which is its default on some processors only.
"""

import pytest
import tensorflow as tf


def are_there():
    try:
        return "peak" in tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return False


def needed():
    """Skips a test that compares with them."""
    if not are_there():
        pytest.skip(
            "TensorFlow does not count the memory of this CPU. Set "
            "TF_ENABLE_ONEDNN_OPTS=1"
        )
