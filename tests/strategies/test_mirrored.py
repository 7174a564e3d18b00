"""Replicas that run eagerly, and which of them one is."""

import threading
import time

import pytest
import tensorflow as tf
from tensorflow.python.training import coordinator

from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica


class Slow:
    """It takes its time to go."""

    def __del__(self):
        time.sleep(0.2)


@pytest.fixture
def waits(monkeypatch):
    """How often TensorFlow waits a second for threads of replicas."""
    found = []
    monkeypatch.setattr(
        coordinator.Coordinator,
        "wait_for_stop",
        lambda self, timeout=None: found.append(timeout),
    )
    return found


@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3"])
def test_a_thread_that_ends_late_is_not_waited_for_by_the_second(
    column, strategies, waits
):
    here = threading.local()

    def on_replica():
        here.held = Slow()
        return tf.ones(())

    strategies[column].run(on_replica)
    assert not waits


def test_an_error_of_a_replica_is_its_own(strategies, waits):
    def on_replica():
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise ZeroDivisionError("of one replica")
        return context.all_reduce("sum", tf.ones(()))

    with pytest.raises(ZeroDivisionError, match="of one replica"):
        strategies["mirrored_x3"].run(on_replica)


def test_the_number_of_a_replica_is_no_operation(strategies):
    """TensorFlow's property makes a constant each time it is read."""
    numbers, graphs = [], []

    def on_replica():
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        numbers.append(this_replica())
        graphs.append(len(graph.get_operations()) - before)
        context = tf.distribute.get_replica_context()
        assert (
            tf.get_static_value(context.replica_id_in_sync_group)
            == (numbers[-1])
        )
        return tf.ones(())

    tf.function(lambda: strategies["mirrored_x3"].run(on_replica))()
    assert sorted(numbers) == [0, 1, 2]
    assert graphs == [0, 0, 0]
