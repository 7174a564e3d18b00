"""Whether two calls make the same operations, and what they take and leave."""

import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine.row_proof import recorded

A = np.ones((3, 3))


def in_graph(function):
    """Returns what a function of two tensors of a graph returns, in Python."""
    found = []
    traced = tf.function(lambda x, z: found.append(function(x, z)))
    traced(tf.constant(A), tf.constant(A))
    return found[0]


def are_same(first, second):
    """Returns whether two functions of a tensor are the same."""

    def both(x, z):
        with recorded() as made:
            outputs = tf.nest.flatten(first(x))
        with recorded() as again:
            others = tf.nest.flatten(second(z))
        return made.are_same(again, outputs, others, [(x, z)])

    return in_graph(both)


def looped(count, step=1.0):
    def loop(x):
        _, x = tf.while_loop(
            lambda n, x: n < count,
            lambda n, x: (n + 1, tf.sin(x) + step),
            (0, x),
        )
        return x

    return loop


def branched(scale):
    return lambda x: tf.cond(x[0, 0] > 0, lambda: x * scale, lambda: x)


def called(scale):
    return tf.function(lambda x: tf.sin(x) * scale)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (lambda x: x, lambda x: x, True),
        (lambda x: tf.sin(x) * 2.0, lambda x: tf.sin(x) * 2.0, True),
        (lambda x: tf.sin(x) * 2.0, lambda x: tf.sin(x) * 3.0, False),
        (tf.sin, tf.cos, False),
        (lambda x: x - 1.0, lambda x: 1.0 - x, False),
        (
            lambda x: tf.matmul(x, x),
            lambda x: tf.matmul(x, x, transpose_b=True),
            False,
        ),
        (lambda x: tf.split(x, 3)[0], lambda x: tf.split(x, 3)[1], False),
        (lambda x: [x, tf.sin(x)], lambda x: [x], False),
        (lambda x: x[0], lambda x: x[1], False),
        (looped(2), looped(2), True),
        (looped(2), looped(3), False),
        (looped(2), looped(2, 2.0), False),
        (branched(2.0), branched(2.0), True),
        (branched(2.0), branched(3.0), False),
        (called(2.0), called(2.0), True),
        (called(2.0), called(3.0), False),
    ],
)
def test_two_calls(first, second, same):
    assert are_same(first, second) == same


def test_what_is_given_is_what_is_read():
    def both(x, z):
        other = tf.sin(x)
        with recorded() as made:
            output = tf.cos(x)
        with recorded() as again:
            of_z, of_x, of_other = tf.cos(z), tf.cos(x), tf.cos(other)
        return [
            made.are_same(again, [output], [each], [(x, z)])
            for each in (of_z, of_x, of_other)
        ]

    assert in_graph(both) == [True, False, False]


def test_one_tensor_may_be_given_twice():
    def both(x, z):
        other = tf.identity(z)
        with recorded() as made:
            output = x * x
        with recorded() as again:
            product = z * other
        return made.are_same(again, [output], [product], [(x, z), (x, other)])

    assert in_graph(both)


@pytest.mark.parametrize(
    ("function", "acts"),
    [
        (tf.sin, False),
        (looped(2), False),
        (lambda x: tf.random.stateless_uniform([3, 3], [1, 2]) * 1.0, False),
        (lambda x: tf.random.uniform([3, 3]), True),
        (lambda x: tf.print(x) and x, True),
        (lambda x: tf.numpy_function(np.sin, [x], tf.float64), True),
    ],
)
def test_what_acts(function, acts):
    def call(x, z):
        with recorded() as made:
            function(x)
        return made.act()

    assert in_graph(call) == acts


def test_what_is_read_elsewhere():
    def call(x, z):
        with recorded() as made:
            inner = tf.sin(x)
            output = inner * 2.0
        _ = output + 1.0
        before = made.are_read({id(output)})
        _ = inner + 1.0
        return before, made.are_read({id(output)})

    assert in_graph(call) == (False, True)


def test_what_is_taken():
    variable = tf.Variable(A)

    def call(x, z):
        made_before = tf.sin(z)
        found = []
        for function in (
            lambda: tf.cos(x),
            lambda: tf.cos(x) + tf.constant(1.0, tf.float64),
            lambda: x * made_before,
            lambda: x[tf.cast(made_before[0, 0], tf.int32)],
            lambda: x * variable,
            lambda: tf.stop_gradient(made_before) * x,
        ):
            with recorded() as made:
                function()
            found.append(made.take_others([x], set))
        with recorded() as made:
            x * variable
        handles = {id(variable.handle)}
        return found, made.take_others([x], lambda: handles)

    found, of_known = in_graph(call)
    assert found == [False, False, True, True, True, True]
    assert not of_known


def test_what_another_replica_has_made():
    def call(x, z):
        with recorded() as mine:
            own = tf.sin(x)
        with recorded() as others:
            tf.cos(own)
        return mine.read([others]), others.read([mine]) is own

    assert in_graph(call) == (None, True)
