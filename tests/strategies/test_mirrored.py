"""Replicas that run eagerly."""

import threading
import time

import pytest
import tensorflow as tf
from tensorflow.python.training import coordinator


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
