"""What the bits of a run depend on is set, and noted."""

import json
import logging

import pytest
import tensorflow as tf

from mgpu_tf.runtime import determinism
from tests import clusters


@pytest.mark.full
def test_threads_are_fixed_and_no_clock_is_read():
    code = """
import json
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config
import mgpu_tf
from mgpu_tf.runtime import determinism
now = tf.function(lambda: determinism.seconds())
mgpu_tf.enable_determinism(intra_op_threads=3, inter_op_threads=5)
tf.constant(1.0)
threading = tf.config.threading
print(json.dumps([
    threading.get_intra_op_parallelism_threads(),
    threading.get_inter_op_parallelism_threads(),
]))
try:
    tf.random.uniform([2])
except RuntimeError as error:
    print("determinism" in str(error))
print(float(now()) > 0)
tf_config.disable_op_determinism()
now = tf.function(lambda: determinism.seconds())
print(float(now()) > 0)
"""
    done = clusters.run(["-c", code])
    numbers, refused, clock, clock_without = done.stdout.splitlines()
    assert json.loads(numbers) == [3, 5]
    assert refused == "True"
    assert (clock, clock_without) == ("False", "True")


def test_numbers_stay_once_tensorflow_has_begun(caplog):
    tf.constant(1.0)
    before = determinism.threads()
    assert min(before.values()) >= 1
    with caplog.at_level(logging.WARNING, "mgpu_tf"):
        determinism.enable_determinism()
        assert not caplog.records
        determinism.enable_determinism(intra_op_threads=before["intra_op"] + 1)
    assert "before TensorFlow runs its first op" in caplog.text
    assert determinism.threads() == before


def test_another_environment_is_told(caplog):
    with caplog.at_level(logging.WARNING, "mgpu_tf"):
        determinism.warn_of_other_environment(determinism.environment())
        assert not caplog.records
        other = determinism.environment() | {"intra_op": 999}
        determinism.warn_of_other_environment(other)
    assert "saved where {'intra_op': 999}" in caplog.text
