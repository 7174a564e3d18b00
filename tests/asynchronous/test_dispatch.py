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
def make(monkeypatch):
    """Returns a function that makes dispatchers of one coordinator."""
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

    def new():
        made.append(dispatch.Dispatcher(strategy))
        return made[-1]

    yield new
    for dispatcher in made:
        dispatcher._pool.shutdown()


@pytest.fixture
def dispatcher(make):
    return make()


def test_a_result_that_comes_late(dispatcher):
    dispatcher.schedule("a", None, Remote(20))
    assert dispatcher.next() == ("a", 5)
    assert dispatcher.idle


def test_a_result_that_never_comes_ends_the_wait(dispatcher):
    dispatcher.schedule("a", None, Remote(10**9))
    with pytest.raises(tf.errors.UnavailableError, match="gone"):
        dispatcher.next()


def test_what_an_epoch_leaves_does_not_come_to_the_next(make):
    left, following = make(), make()
    left.schedule(0, None, Remote(0))
    assert following.idle
    following.schedule(0, None, Remote(3))
    following.schedule(1, None, Remote(0))
    assert {following.next()[0], following.next()[0]} == {0, 1}
    assert following.idle
    assert not left.idle
    assert left.next() == (0, 5)
