"""Results that cannot be read."""

import types

import pytest
import tensorflow as tf

from mgpu_tf.engine.asynchronous.schedule import dispatch


class Remote:
    """A result that a worker has taken with it."""

    def __init__(self, failures):
        self.failures = failures

    def fetch(self):
        if self.failures:
            self.failures -= 1
            raise tf.errors.UnavailableError(None, None, "gone")
        return 5


@pytest.fixture
def dispatcher(monkeypatch):
    made = []

    def coordinator(strategy):
        return types.SimpleNamespace(
            done=lambda: False, schedule=lambda function, args: args
        )

    monkeypatch.setattr(
        tf.distribute.coordinator, "ClusterCoordinator", coordinator
    )
    monkeypatch.setattr(dispatch, "_POLL_SECONDS", 0.001)
    strategy = types.SimpleNamespace(num_workers=1)
    made = dispatch.Dispatcher(strategy)
    yield made
    made._pool.shutdown()


def test_a_result_that_comes_late(dispatcher):
    dispatcher.schedule("a", None, Remote(20))
    assert dispatcher.next() == ("a", 5)
    assert dispatcher.idle


def test_a_result_that_never_comes_ends_the_wait(dispatcher):
    dispatcher.schedule("a", None, Remote(10**9))
    with pytest.raises(tf.errors.UnavailableError, match="gone"):
        dispatcher.next()
