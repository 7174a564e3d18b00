"""What is proven of rows holds: on cut rows, on permuted rows, by numbers."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from mgpu_tf.engine import row_proof
from mgpu_tf.engine.row_proof import (
    FIXED,
    LARGEST,
    MEAN,
    SMALLEST,
    SUM,
    UNPROVEN,
    Held,
    RowProof,
    Rows,
)

GENERATOR = np.random.default_rng(0)
ROWS, HERE = 6, 4
A = GENERATOR.uniform(0.1, 0.9, size=(ROWS, 4, 3))
B = GENERATOR.uniform(0.1, 0.9, size=(ROWS, 4, 3))
W = GENERATOR.uniform(0.1, 0.9, size=(3, 5))
KERNEL = GENERATOR.uniform(size=(2, 2, 2, 3))
WORDS = GENERATOR.uniform(size=(2, 3, 5))
IMAGES = GENERATOR.uniform(size=(ROWS, 4, 4, 2))
INDICES = GENERATOR.integers(0, 3, size=(ROWS, 4))


def kind_and_values(function, *rows, unknown=1):
    """Returns what is proven of a function, and the function of arrays.

    Of that many axes the graph does not know how long they are.
    """
    found = {}

    @tf.function(
        input_signature=[
            tf.TensorSpec(
                [*[None] * unknown, *each.shape[unknown:]], each.dtype
            )
            for each in rows
        ]
    )
    def traced(*given):
        proof = RowProof(given)
        value = function(*given)
        found["kind"] = proof.of(value)
        return value

    return traced, found


def check(function, *rows, unknown=1):
    """Compares what is proven with values of cuts and of permutations."""
    traced, found = kind_and_values(function, *rows, unknown=unknown)
    whole = traced(*rows).numpy()
    kind = found["kind"]
    order = np.array([3, 0, 5, 1, 4, 2])
    cuts = [
        traced(*(each[low:high] for each in rows)).numpy()
        for low, high in ((0, HERE), (HERE, ROWS))
    ]
    if kind == UNPROVEN:
        return kind
    if kind == FIXED:
        parts = [*cuts, traced(*(each[order] for each in rows)).numpy()]
        for part in parts:
            np.testing.assert_array_equal(part, whole)
    elif kind == SUM:
        np.testing.assert_allclose(sum(cuts), whole, rtol=1e-12)
    elif kind in (LARGEST, SMALLEST):
        extreme = np.maximum if kind == LARGEST else np.minimum
        np.testing.assert_array_equal(extreme(*cuts), whole)
    elif kind == MEAN:
        mean = (cuts[0] * HERE + cuts[1] * (ROWS - HERE)) / ROWS
        np.testing.assert_allclose(mean, whole, rtol=1e-12)
    else:
        assert isinstance(kind, Rows) and not kind.listed
        joined = np.concatenate(cuts, kind.axis)
        rtol = 1e-12 if whole.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(joined, whole, rtol=rtol)
        if kind.block == 1:
            permuted = traced(*(each[order] for each in rows)).numpy()
            np.testing.assert_allclose(
                permuted, np.take(whole, order, kind.axis), rtol=rtol
            )
    return kind


def raw(name, **arguments):
    return getattr(tf.raw_ops, name)(**arguments)


def called(name, *values):
    """Calls an operation by its inputs in order."""
    op = getattr(tf.raw_ops, name)
    names = [argument.name for argument in op_def_registry.get(name).input_arg]
    return op(**dict(zip(names, values, strict=False)))


BOOLEAN = {"LogicalAnd", "LogicalNot", "LogicalOr"}
INTEGER = {"BitwiseAnd", "BitwiseOr", "BitwiseXor"}
SPECIAL = {
    "AddN": lambda a, b: raw("AddN", inputs=[a, b]),
    "Bucketize": lambda a, b: tf.raw_ops.Bucketize(
        input=a, boundaries=[0.3, 0.6]
    ),
    "Cast": lambda a, b: tf.cast(a, tf.float32),
    "CheckNumerics": lambda a, b: tf.debugging.check_numerics(a, ""),
    "ClipByValue": lambda a, b: tf.raw_ops.ClipByValue(
        t=a, clip_value_min=tf.constant(0.2, a.dtype), clip_value_max=b
    ),
    "IdentityN": lambda a, b: tf.identity_n([a, b])[1],
    "Select": lambda a, b: tf.raw_ops.Select(condition=a > b, x=a, y=b),
    "SelectV2": lambda a, b: tf.where(a > b, a, b),
}


@pytest.mark.parametrize("name", sorted(row_proof.ELEMENTWISE))
def test_elementwise(name):
    if name in SPECIAL:
        function, rows = SPECIAL[name], [A, B]
    else:
        count = len(op_def_registry.get(name).input_arg)
        rows = [A, B][:count]
        if name in BOOLEAN:
            rows = [each > 0.5 for each in rows]
        if name in INTEGER:
            rows = [(8 * each).astype(np.int32) for each in rows]
        if name in ("Relu6Grad", "LeakyReluGrad"):
            rows = [each.astype(np.float32) for each in rows]

        def function(*given):
            return called(name, *given)

    if name == "ClipByValue":
        # The bounds have one element, or the shape of the values.
        function = lambda a, b: tf.raw_ops.ClipByValue(  # noqa: E731
            t=a,
            clip_value_min=tf.constant(0.2, a.dtype),
            clip_value_max=tf.constant(0.6, a.dtype),
        )
    assert check(function, *rows) == Rows()


# What is proven; the others are checked as well, and proven where they may be.
PROVEN = {
    "BiasAdd": lambda a: tf.nn.bias_add(a, W[:, 0]),
    "fixed beside rows": lambda a: a + W[0, :3] * 2,
    "all": lambda a: tf.reduce_all(a > 0.5, axis=[1]),
    "max": lambda a: tf.reduce_max(a, axis=-1, keepdims=True),
    "norm": lambda a: tf.raw_ops.EuclideanNorm(input=a, axis=[2]),
    "any": lambda a: tf.reduce_any(a > 0.5, axis=[1]),
    "min": lambda a: tf.reduce_min(a, axis=[1]),
    "prod": lambda a: tf.reduce_prod(a, axis=[1]),
    "argmin": lambda a: tf.argmin(a, 1),
    "pad by zeros": lambda a: tf.pad(a, [[0, 0], [1, 2], [0, 0]]),
    "argmax": lambda a: tf.argmax(a, -1),
    "cumsum": lambda a: tf.cumsum(a, axis=1),
    "cumprod": lambda a: tf.math.cumprod(a, axis=2),
    "cumulative": lambda a: tf.math.cumulative_logsumexp(a, axis=1),
    "reverse": lambda a: tf.reverse(a, [1]),
    "roll": lambda a: tf.roll(a, [1, 2], [1, 2]),
    "softmax over words": lambda a: tf.nn.softmax(a, axis=1),
    "dilated": lambda a: tf.nn.convolution(
        a, WORDS, padding="SAME", dilations=[2]
    ),
    "softmax": lambda a: tf.nn.log_softmax(tf.nn.softmax(a)),
    "top k": lambda a: tf.math.top_k(a, 2).values,
    "band": lambda a: tf.linalg.band_part(a, 0, 1),
    "inverse": lambda a: tf.linalg.inv(a[:, :3] + 3 * np.eye(3)),
    "det": lambda a: tf.linalg.det(a[:, :3]),
    "cholesky": lambda a: tf.linalg.cholesky(
        a[:, :3] @ tf.transpose(a[:, :3], [0, 2, 1]) + np.eye(3)
    ),
    "matmul": lambda a: tf.matmul(a[:, 0], W),
    "batch matmul": lambda a: tf.matmul(a, a, transpose_b=True),
    "batch matmul with weights": lambda a: a @ W,
    "einsum": lambda a: tf.einsum("bij,bkj->bik", a, a),
    "ensured shape of a row": lambda a: tf.ensure_shape(a, [None, 4, 3]),
    "einsum with an ellipsis": lambda a: tf.einsum("...j,jk->...k", a, W),
    "einsum with an ellipsis in the middle": lambda a: tf.einsum(
        "b...j,b...j->j...b", a, a
    ),
    "einsum with weights": lambda a: tf.einsum("bij,jk->kbi", a, W),
    "transpose": lambda a: tf.transpose(a, [1, 0, 2]),
    "flatten": lambda a: tf.reshape(a, [-1, 12]),
    "flatten by shape": lambda a: tf.reshape(a, [tf.shape(a)[0], -1]),
    "tokens": lambda a: tf.reshape(a, [-1, 3]),
    "elements": lambda a: tf.reshape(a, [-1]),
    "tokens and back": lambda a: tf.reshape(
        tf.reshape(a, [-1, 3]) @ W, [-1, 4, 5]
    ),
    "heads": lambda a: tf.transpose(tf.reshape(a, [-1, 4, 3, 1]), [0, 2, 1, 3]),
    "expand": lambda a: a[:, None, ..., None],
    "expand in front": lambda a: tf.expand_dims(a, 0),
    "squeeze": lambda a: tf.squeeze(a[:, :1], [1]),
    "columns": lambda a: a[..., 1:],
    "slice": lambda a: tf.slice(a, [0, 1, 0], [-1, 2, 3]),
    "concat": lambda a: tf.concat([a, a], -1),
    "stack": lambda a: tf.stack([a, 2 * a], 1),
    "stack in front": lambda a: tf.stack([a, 2 * a]),
    "unstack": lambda a: tf.unstack(a, axis=1)[2],
    "split": lambda a: tf.split(a, 2, axis=1)[1],
    "split by sizes": lambda a: tf.split(a, [1, 3], axis=1)[1],
    "gather columns": lambda a: tf.gather(a, [2, 0], axis=2),
    "gather by batch": lambda a: tf.gather(
        a, tf.argmax(a, 1), axis=1, batch_dims=1
    ),
    "one hot": lambda a: tf.one_hot(tf.argmax(a, -1), 3),
    "pad": lambda a: tf.pad(a, [[0, 0], [1, 2], [0, 0]], constant_values=0.5),
    "mirror": lambda a: tf.pad(a, [[0, 0], [1, 1], [0, 0]], "REFLECT"),
    "tile": lambda a: tf.tile(a, [1, 2, 1]),
    "repeat": lambda a: tf.repeat(a, 2, axis=1),
    "tile for rows": lambda a: tf.tile(
        tf.constant(W)[None], [tf.shape(a)[0], 1, 1]
    ),
    "broadcast for rows": lambda a: tf.broadcast_to(
        W[:1], [tf.shape(a)[0], 3, 5]
    ),
    "fill": lambda a: tf.fill([tf.shape(a)[0], 2], 0.5),
    "zeros": lambda a: tf.zeros_like(a) + a,
    "labels": lambda a: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.argmax(a[:, 1], -1), a[:, 0]
    ),
    "soft labels": lambda a: (
        tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=a[:, 0], labels=a[:, 1]
        ).loss
    ),
    "labels of tokens": lambda a: (
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(a, -1), a)
    ),
    "bits": lambda a: tf.bitcast(a, tf.int64),
    "a call": lambda a: tf.function(lambda x: tf.nn.softmax(2 * x))(a),
    "a branch": lambda a: tf.cond(
        tf.constant(W)[0, 0] > 0.0, lambda: a * 2, lambda: a * 3
    ),
    "a loop": lambda a: tf.while_loop(
        lambda n, x: n < 3, lambda n, x: (n + 1, tf.tanh(x @ W @ W.T)), (0, a)
    )[1],
    "a loop over time": lambda a: tf.scan(
        lambda h, x: tf.tanh(h + x), tf.transpose(a, [1, 0, 2])
    ),
    "diagonal": lambda a: tf.linalg.diag(a[:, 0]),
    "sum": lambda a: tf.reduce_sum(tf.square(a)),
    "sum from zero": lambda a: tf.zeros([], a.dtype) + tf.reduce_sum(a),
    "sum of columns": lambda a: tf.reduce_sum(a, 0) * W[0, :3],
    "sum of products": lambda a: tf.matmul(a[:, 0], a[:, 1], transpose_a=True),
    "sum of products, turned": lambda a: tf.matmul(
        tf.transpose(a[:, 0]), tf.transpose(a[:, 1]), transpose_b=True
    ),
    "product of a sum": lambda a: tf.matmul(tf.reduce_sum(a, 0), W[:3]),
    "sum of tokens": lambda a: tf.reduce_sum(tf.reshape(a, [-1, 3]) ** 2),
    "mean": lambda a: tf.reduce_mean(a) + 0.5,
    "mean of tokens": lambda a: tf.reduce_mean(tf.reshape(a, [-1, 3]) ** 2),
    "sum over the number": lambda a: (
        tf.reduce_sum(a) / tf.cast(tf.shape(a)[0], a.dtype)
    ),
    "sum over the size": lambda a: (
        tf.reduce_sum(a) / tf.cast(tf.size(a), a.dtype)
    ),
    "scaled": lambda a: -3.0 * tf.reduce_mean(a, [0, 1])[None] / W[0, 0],
    "largest": lambda a: tf.reduce_max(a),
    "largest of columns": lambda a: tf.squeeze(tf.reduce_max(a, 0, True), 0),
    "largest of the largest": lambda a: tf.reduce_max(tf.reduce_max(a, 0)),
    "smallest": lambda a: tf.reduce_min(a),
    "length of a row": lambda a: tf.range(tf.shape(a)[1]),
}


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name):
    assert check(PROVEN[name], A) != UNPROVEN


# Proven where the graph does not know how many words a row has.
OF_SOME_WORDS = {
    "dense": lambda a: tf.tensordot(a, W, 1),
    "joined words": lambda a: tf.reshape(a, [-1, 3]),
    "divided words": lambda a: tf.reshape(a, [-1, tf.shape(a)[1], 1, 3]),
    "roll": PROVEN["roll"],
    "softmax over words": PROVEN["softmax over words"],
    "dilated": PROVEN["dilated"],
    "dilated and cut": lambda a: tf.nn.convolution(a, WORDS, dilations=[3]),
}


@pytest.mark.parametrize("name", OF_SOME_WORDS)
def test_rows_of_some_words(name):
    assert check(OF_SOME_WORDS[name], A, unknown=2) != UNPROVEN


@pytest.mark.parametrize(
    "shape",
    [
        lambda a: [-1, tf.shape(a)[2]],
        lambda a: [-1, tf.shape(a)[1], tf.shape(a)[1]],
        lambda a: [-1, tf.shape(a + 1.0)[1], tf.shape(a)[2]],
        lambda a: [-1, tf.shape(a)[1], tf.shape(a)[2], 2],
        lambda a: [tf.shape(a)[1], -1, tf.shape(a)[2]],
    ],
)
def test_words_of_another_size_have_parts_of_two_rows(shape):
    """Or it is not proven that they have the same."""
    traced, found = kind_and_values(
        lambda a: tf.reshape(a, shape(a)), A, unknown=3
    )
    traced.get_concrete_function()
    assert found["kind"] == UNPROVEN


IMAGE = {
    "Conv2D": lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"),
    "DepthwiseConv2dNative": lambda x: tf.nn.depthwise_conv2d(
        x, KERNEL, [1, 1, 1, 1], "SAME"
    ),
    "AvgPool": lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"),
    "MaxPool": lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
    "ResizeBilinear": lambda x: tf.image.resize(x, [3, 5]),
    "ResizeNearestNeighbor": lambda x: tf.image.resize(x, [3, 5], "nearest"),
    "ResizeBicubic": lambda x: tf.image.resize(x, [3, 5], "bicubic"),
    "ResizeArea": lambda x: tf.image.resize(x, [3, 5], "area"),
    "DepthToSpace": lambda x: tf.nn.depth_to_space(tf.concat([x, x], -1), 2),
    "SpaceToDepth": lambda x: tf.nn.space_to_depth(x, 2),
    "ExtractImagePatches": lambda x: tf.image.extract_patches(
        x, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID"
    ),
    "FusedBatchNormV3": lambda x: (
        tf.raw_ops.FusedBatchNormV3(
            x=tf.cast(x, tf.float32),
            scale=[1.0, 2.0],
            offset=[0.0, 1.0],
            mean=[0.1, 0.2],
            variance=[0.5, 0.6],
            is_training=False,
        ).y
    ),
    "Conv2DBackpropInput": lambda x: tf.nn.conv2d_transpose(
        x, KERNEL[..., :2], [tf.shape(x)[0], 8, 8, 2], 2, "SAME"
    ),
    "Conv3DBackpropInputV2": lambda x: tf.nn.conv3d_transpose(
        x[:, None],
        KERNEL[None, ..., :2],
        [tf.shape(x)[0], 1, 8, 8, 2],
        [1, 1, 2, 2, 1],
    ),
    "AvgPool3D": lambda x: tf.nn.avg_pool3d(
        tf.cast(x[:, None], tf.float32), 2, 2, "SAME"
    ),
    "MaxPool3D": lambda x: tf.nn.max_pool3d(
        tf.cast(x[:, None], tf.float32), 2, 2, "SAME"
    ),
    "Conv3D": lambda x: tf.nn.conv3d(x[:, None], KERNEL[None], [1] * 5, "SAME"),
}


@pytest.mark.parametrize("name", IMAGE)
def test_images(name):
    assert check(IMAGE[name], IMAGES) == Rows()


def test_lookups():
    table = tf.Variable(W)
    assert check(lambda i: tf.gather(table, i), INDICES) == Rows()
    assert check(lambda i: tf.gather(W, i), INDICES) == Rows()
    assert check(lambda i: tf.gather(W, i, axis=1), INDICES) == Rows(axis=1)


UNPROVABLE = {
    "softmax over rows": lambda a: tf.nn.softmax(a, axis=0),
    "softmax of a vector": lambda a: tf.nn.softmax(a[:, 0, 0]),
    "ratio": lambda a: tf.reduce_sum(a) / tf.reduce_sum(a**2),
    "product of means": lambda a: tf.reduce_mean(a) * tf.reduce_mean(a),
    "square of a mean": lambda a: tf.reduce_mean(a) ** 2,
    "log of a sum": lambda a: tf.math.log(tf.reduce_sum(a)),
    "sum and mean": lambda a: tf.reduce_sum(a) + tf.reduce_mean(a),
    "sum and constant": lambda a: tf.reduce_sum(a) + 1.0,
    "pairs": lambda a: a[:, None] - a[None],
    "products of pairs": lambda a: a[:, 0] @ tf.transpose(a[:, 0]),
    "vector beside a column": lambda a: a[:, 0, 0] - a[:, 0, :1],
    "neighbours": lambda a: a[1:] - a[:-1],
    "first row": lambda a: a - a[:1],
    "reversed": lambda a: tf.reverse(a, [0]),
    "rolled": lambda a: tf.roll(a, 1, 0),
    "rolled by their sum": lambda a: tf.roll(
        a, tf.cast(tf.reduce_sum(a), tf.int32), 1
    ),
    "parts of rows": lambda a: tf.space_to_batch(a, [2], [[0, 0]]),
    "parts of rows in another order": lambda a: tf.batch_to_space(
        tf.space_to_batch(a[..., None], [2, 1], [[0, 0], [0, 0]]),
        [1, 2],
        [[0, 0], [0, 0]],
    ),
    "parts of rows side by side": lambda a: tf.reshape(
        tf.space_to_batch(a, [2], [[0, 0]]), [tf.shape(a)[0], 4, 3]
    ),
    "parts that are added": lambda a: tf.reduce_sum(
        tf.space_to_batch(a, [2], [[0, 0]]), 0
    ),
    "number of a row": lambda a: tf.cast(tf.range(tf.shape(a)[0]), a.dtype),
    "divided by the number": lambda a: a / tf.cast(tf.shape(a)[0], a.dtype),
    "root of the largest": lambda a: tf.sqrt(tf.reduce_max(a)),
    "largest and smallest": lambda a: tf.reduce_max(a) - tf.reduce_min(a),
    "smallest of the largest": lambda a: tf.reduce_min(tf.reduce_max(a, 0)),
    "maximum of a mean": lambda a: tf.maximum(tf.reduce_mean(a), 0.4),
    "concat of rows": lambda a: tf.concat([a, a], 0),
    "shuffle": lambda a: tf.random.shuffle(a),
    "gather of rows": lambda a: tf.gather(a, [1, 0]),
    "some rows": lambda a: tf.boolean_mask(a, a[:, 0, 0] > 0.5),
    "segments": lambda a: tf.math.segment_sum(
        a, tf.zeros([tf.shape(a)[0]], tf.int32)
    ),
    "scan over rows": lambda a: tf.scan(lambda h, x: h + x, a),
    "a python function": lambda a: tf.numpy_function(
        lambda x: x - x.mean(), [a], tf.float64
    ),
    "a call": lambda a: tf.function(lambda x: x - tf.reduce_mean(x))(a),
    "a loop": lambda a: tf.while_loop(
        lambda n, x: n < 3, lambda n, x: (n + 1, x - tf.reduce_mean(x)), (0, a)
    )[1],
    "a loop as long as there are rows": lambda a: tf.while_loop(
        lambda n, x: n < tf.shape(a)[0], lambda n, x: (n + 1, 2 * x), (0, a)
    )[1],
    "ensured number of rows": lambda a: tf.ensure_shape(a, [ROWS, 4, 3]),
    "einsum over an ellipsis": lambda a: tf.einsum("b...,b...->...", a, a),
    "einsum of weights with an ellipsis": lambda a: tf.einsum(
        "...j,...kj->...k", a, tf.ones([6, 1, 2, 3], tf.float64)
    ),
    "einsum over rows": lambda a: tf.einsum("bij,bkj->ik", a, a),
    "joined rows": lambda a: tf.reshape(a, [-1, 24]),
    "two examples in one": lambda a: tf.reshape(a, [2, -1]),
    "padded": lambda a: tf.pad(a, [[1, 0], [0, 0], [0, 0]]),
    "pairs of rows": lambda a: tf.matmul(a[:, 0], a[:, 1], transpose_b=True),
    "cumsum over rows": lambda a: tf.cumsum(a, axis=0),
    "halves of numbers": lambda a: tf.bitcast(a, tf.int32),
    "fft": lambda a: tf.signal.fft(tf.cast(a, tf.complex128)),
    "fixed rows beside them": lambda a: a[:, 0] + tf.constant(B[:, 0]),
}


@pytest.mark.parametrize("name", UNPROVABLE)
def test_unproven(name):
    """These mix rows, or are not on the list; none may pass for proven."""
    _, found = kind_and_values(UNPROVABLE[name], A)
    _.get_concrete_function()
    assert found["kind"] == UNPROVEN


def test_either_of_what_all_replicas_hold_is_fixed():
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        held = tf.identity(tf.zeros([]))
        proof = RowProof([x])
        proof.take([held], Held(alike=True))
        is_new = tf.constant(True) & (held > -1.0)
        one = tf.cond(is_new, lambda: held, lambda: held * 2.0)
        _, looped = tf.while_loop(
            lambda i, value: i < 2,
            lambda i, value: (i + 1, value * 2.0),
            [0, held],
        )
        of_rows = tf.cond(is_new, lambda: held, lambda: tf.reduce_sum(x))
        assert proof.of(one) == proof.of(looped) == FIXED
        assert proof.of(of_rows) == UNPROVEN

    step.get_concrete_function()


def test_what_is_added_to_a_variable():
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
    def step(x):
        before = tf.identity(tf.zeros([], tf.float64))
        proof = RowProof([x])
        proof.take([before], Held())
        found = {
            SUM: before + tf.reduce_sum(x),
            MEAN: before + 1.0 + tf.reduce_mean(x),
            FIXED: before + 1.0,
        }
        assert all(proof.of(v) == Held(added=k) for k, v in found.items())
        counted = before + tf.cast(tf.shape(x)[0], x.dtype)
        assert proof.of(counted) == Held(added=SUM)
        largest = tf.maximum(before, tf.reduce_max(x))
        assert proof.of(largest) == Held(added=LARGEST)
        smallest = tf.minimum(tf.reduce_min(x), before)
        assert proof.of(smallest) == Held(added=SMALLEST)
        for value in (
            before + tf.reduce_sum(x) / tf.reduce_sum(x),
            before * 0.9 + tf.reduce_mean(x),
            tf.maximum(before, tf.reduce_mean(x)),
            tf.maximum(before, tf.reduce_min(x)),
            tf.maximum(before + 1.0, tf.reduce_sum(x)),
            before + tf.reduce_max(x),
            before - tf.reduce_sum(x) + tf.reduce_mean(x),
        ):
            assert proof.of(value) == UNPROVEN
        return x

    step.get_concrete_function()


def test_what_all_replicas_held():
    """It is fixed, so what is made of it and of a mean is a mean."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
    def step(x):
        held = tf.identity(tf.zeros([], tf.float64))
        proof = RowProof([x])
        proof.take([held], Held(alike=True))
        assert proof.of(held * 0.9 + tf.reduce_mean(x)) == MEAN
        assert proof.of(tf.exp(held)) == FIXED
        assert proof.of(x * held) == Rows()
        added = held + tf.reduce_sum(x)
        assert proof.of(added) == Held(added=SUM, alike=True)
        for value in (added * 0.9, tf.exp(added), x * added):
            assert proof.of(value) == UNPROVEN
        return x

    step.get_concrete_function()


def writing(variable):
    """Functions that write, and whether it is of the rows `x` that they do."""

    @tf.function
    def called(x, value):
        variable.assign_add(tf.reduce_sum(value))

    def chosen(x, value):
        tf.cond(tf.reduce_mean(x) > 0, lambda: called(x, value), lambda: None)

    def switched(x, value):
        place = tf.cast(tf.reduce_sum(x), tf.int32)
        tf.switch_case(place, [lambda: called(x, value), lambda: None])

    def repeated(x, value):
        tf.while_loop(
            lambda n: tf.cast(n, x.dtype) < tf.reduce_sum(x),
            lambda n: (called(x, value), n + 1)[1:],
            [0],
        )

    one = tf.constant(1.0, tf.float64)
    yield lambda x: called(x, x), True
    yield lambda x: called(x, one), False
    for function in (chosen, switched, repeated):
        yield lambda x, function=function: function(x, one), True


def test_what_is_printed_proves_nothing():
    def printed(x):
        tf.print("rows", tf.shape(x), x[:, 0])
        return x * 2

    traced, found = kind_and_values(printed, A)
    traced.get_concrete_function()
    assert found["kind"] == Rows()


def test_what_is_written_in_functions():
    variable = tf.Variable(0.0, dtype=tf.float64)
    for function, of_rows in writing(variable):

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
        def step(x, function=function, of_rows=of_rows):
            proof = RowProof([x])
            function(x)
            proof.walk(tf.compat.v1.get_default_graph())
            assert proof.writes_rows == of_rows
            return x

        step.get_concrete_function()


def test_every_rule_is_tried():
    """Each operation with a rule stands in a graph of the cases above."""
    seen = set()
    for function, rows in [
        *((function, [A]) for function in PROVEN.values()),
        *((function, [IMAGES]) for function in IMAGE.values()),
    ]:
        traced, _ = kind_and_values(function, *rows)
        graph = traced.get_concrete_function().graph
        seen |= {op.type for op in graph.get_operations()}
        seen |= {
            node.op
            for defined in graph.as_graph_def().library.function
            for node in defined.node_def
        }
    rules = set(row_proof.proven_operations()) - row_proof.ELEMENTWISE
    # Older forms of the same, which no function of today makes.
    others = {"BatchMatMul", "ResourceGather", "TensorListFromTensor"}
    assert rules - seen - others == set()


def test_what_a_step_before_a_loop_wrote_is_not_of_the_loop():
    variable, found = tf.Variable(0.0), []

    @tf.function(autograph=False)
    def steps(x):
        before = x + 1.0
        variable.assign(tf.random.uniform([]))

        def body(i):
            proof = RowProof()
            proof.skip(tf.compat.v1.get_default_graph())
            found.append((proof.of(before * 2.0), proof.writes_rows))
            return i + 1

        return tf.while_loop(lambda i: i < 2, body, [0])

    steps.get_concrete_function(tf.TensorSpec([]))
    assert found == [(FIXED, False)]
