"""What is locked on a server: nothing is lost, nothing waits for ever."""

import threading

import pytest
import tensorflow as tf

from mgpu_tf.engine.asynchronous.servers.sections import whole
from mgpu_tf.errors import ConfigurationError

THREADS, TIMES = 4, 300


def doubling(variable, locked):
    """Returns a function that adds one by a slow read and write."""

    def add():
        before = variable.read_value()
        for _ in range(20):
            before = tf.sin(before) * 0 + before
        variable.assign(before + 1)
        return []

    @tf.function(autograph=False)
    def step():
        def body(done):
            if locked:
                whole("weight", variable.device, add, [])
            else:
                add()
            return (done + 1,)

        tf.while_loop(lambda done: done < TIMES, body, (tf.constant(0),))

    return step


def counted(locked):
    variable = tf.Variable(tf.zeros([500]))
    # A function for each, as a function runs once at a time. They are traced
    # first, and start together.
    steps = [
        doubling(variable, locked).get_concrete_function()
        for _ in range(THREADS)
    ]
    start = threading.Barrier(THREADS)

    def run(step):
        start.wait()
        step()

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(tf.reduce_min(variable))


def test_nothing_is_lost():
    assert counted(locked=True) == THREADS * TIMES


def test_without_a_lock_it_is():
    """Or the test above says nothing."""
    # A busy machine may run one thread after the other, not each time.
    assert any(counted(locked=False) < THREADS * TIMES for _ in range(100))


def test_an_error_releases_the_lock():
    variable = tf.Variable(1.0)

    def body(value):
        with tf.control_dependencies([tf.debugging.assert_positive(value)]):
            variable.assign_add(value)
        return [variable.read_value()]

    @tf.function(autograph=False)
    def step(value):
        return whole("weight", variable.device, body, [value])

    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.constant(-1.0))
    assert float(step(tf.constant(2.0))[0]) == 3.0


def test_everything_is_on_the_server():
    """Between lock and unlock; what comes from elsewhere is there before."""
    variable = tf.Variable(1.0)
    rows = tf.IndexedSlices(tf.ones([2]), tf.constant([0, 0]), tf.constant([1]))

    def body(rows, scale):
        variable.assign(variable * scale + tf.reduce_sum(rows.values))
        return [variable.read_value()]

    @tf.function(autograph=False)
    def step():
        with tf.device("CPU:1"):
            scale = tf.constant(2.0) * 3
        return whole("weight", variable.device, body, [rows, scale])

    graph = step.get_concrete_function().graph
    ops = {op.type: op for op in graph.get_operations()}
    for name in ("MutexV2", "MutexLock", "ConsumeMutexLock"):
        assert ops[name].device.endswith("CPU:0"), name
    arrived = {op.type for op in ops["MutexLock"].control_inputs}
    assert arrived == {"Identity"}
    call = next(op for name, op in ops.items() if name.endswith("Call"))
    assert call.control_inputs == [ops["MutexLock"]] or (
        ops["MutexLock"] in call.control_inputs
    )
    assert float(step()[0]) == 8.0


def test_a_variable_of_another_server_is_refused():
    with tf.device("CPU:1"):
        there = tf.Variable(1.0)
    here = tf.Variable(1.0)

    def body():
        here.assign_add(there)
        return []

    @tf.function(autograph=False)
    def step():
        whole("weight", here.device, body, [])

    with pytest.raises(ConfigurationError, match="on one parameter server"):
        step()
