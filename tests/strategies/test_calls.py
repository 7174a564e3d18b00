"""What is told of a failure of TensorFlow, in one line."""

import pytest
import tensorflow as tf

from mgpu_tf.strategies import calls

# As TensorFlow 2.21 says it on the first worker, and on another one.
FIRST = (
    "Collective ops is aborted by: Error reported from /job:worker/task:2: The "
    "following tasks are unhealthy (stopped sending heartbeats):\n"
    "/job:worker/replica:0/task:2\n/job:worker/replica:0/task:3\n"
    "The tasks have crashed. Check the task logs for an earlier error, or "
    "scheduler events (e.g. preemption, eviction) to debug further.\n"
)
OTHER = (
    "Additional GRPC error information from remote target "
    "/job:worker/replica:0/task:0 while calling RecvBuf:\n"
    f':UNKNOWN:{{grpc_message:"{FIRST}"}}'.replace("\n", "\\n")
)


@pytest.mark.parametrize("text", [FIRST, OTHER], ids=["first", "other"])
def test_tasks_that_were_silent_are_named(text):
    error = tf.errors.UnavailableError(None, None, text)
    told = str(calls.unheard(error))
    assert "nothing from worker 2, worker 3 for 45 seconds" in told
    assert "\n" not in told


def test_other_failures_are_left():
    error = tf.errors.UnavailableError(None, None, "Socket closed")
    assert calls.unheard(error) is None
