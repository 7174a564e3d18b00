"""Code of an author's that does more than return something.

It counts its calls in a `tf.Variable`, which the loss depends on, and is not
proven to be of single rows: what a trace has tried and left must not count.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.core.framework import op_def_pb2, types_pb2
from tensorflow.python.client import pywrap_tf_session

import mgpu_tf
from mgpu_tf.engine.row_proof import acts, written
from mgpu_tf.engine.row_proof import writes as writes_module

pytestmark = pytest.mark.usefixtures("float64")

ROWS = 35
FITTED = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}


def data():
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    return x, x[:, 0] ** 2


def plain(calls):
    calls.assign_add([1.0, 0.0])


def scattered(calls):
    calls.scatter_nd_add([[0]], tf.constant([1.0], calls.dtype))


def in_a_function(calls):
    @tf.function
    def count():
        plain(calls)

    count()


def in_a_branch(calls):
    tf.cond(
        calls[1] < 1, lambda: calls.assign_add([1.0, 0.0])[0], lambda: calls[0]
    )


def in_python(calls):
    def count():
        plain(calls)

    tf.py_function(count, [], [])


def program(where, count=plain, eager=False, mixes=True):
    """A program of which one part counts, and may not keep rows apart."""

    def build():
        calls = tf.Variable([0.0, 0.0], dtype="float64", trainable=False)

        def called(part, x):
            if part == where:
                count(calls)
            if mixes:
                x -= 0.1 * ops.mean(x, 0)
            return x * (1 + 0.01 * calls[0])

        class Scales(layers.Layer):
            def call(self, x):
                return called("layer", x)

        class Model(keras.Model):
            pass

        def loss(y, p):
            return ops.mean(
                (called("loss", p) - ops.reshape(y, (-1, 1))) ** 2, -1
            )

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return ops.mean(called("compute_loss", loss(y, y_pred)))

        class Mean(keras.metrics.Mean):
            def update_state(self, y, p, sample_weight=None):
                super().update_state(called("metric", ops.mean(p, -1)))

        def train_step(self, rows):
            x, y = rows
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
                value = ops.mean(called("train_step", value))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(value, weights), weights, strict=True)
            )
            return {"loss": value}

        if where in ("compute_loss", "train_step"):
            setattr(Model, where, locals()[where])
        inputs = keras.Input((4,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        model = Model(inputs, layers.Dense(1)(Scales()(hidden)))
        own = where == "train_step"
        model.compile(
            keras.optimizers.SGD(0.05),
            None if own else loss,
            metrics=None if own else [Mean(name="mean")],
            run_eagerly=eager,
        )
        model.calls = calls
        return model

    return build


@pytest.mark.parametrize(
    "eager",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["graph", "eager"],
)
@pytest.mark.parametrize(
    "where", ["layer", "loss", "compute_loss", "metric", "train_step"]
)
@pytest.mark.parametrize(
    "column",
    [
        "mirrored_x3",
        pytest.param("fsdp_x3", marks=pytest.mark.full),
        pytest.param("tensor_x3", marks=pytest.mark.full),
    ],
)
def test_as_often_as_in_keras(column, where, eager, strategies):
    build = program(where, eager=eager)
    keras.utils.set_random_seed(1)
    alone = build()
    history = alone.fit(*data(), **FITTED).history
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(build, strategies[column], seed=None)
    found = trainer.fit(*data(), **FITTED).history
    assert alone.calls.numpy()[0] == trainer.model.calls.numpy()[0] == 6
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, 1e-9, 1e-12)
    pairs = zip(trainer.model.weights, alone.weights, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, 1e-9, 1e-12)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("layer", plain),
        ("layer", in_a_function),
        ("loss", in_a_function),
        ("metric", in_a_function),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [
                ("layer", in_a_branch),
                ("layer", in_python),
                ("metric", in_python),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("one_device", {"step_parts": 2}),
        ("pipeline_x2", {}),
        pytest.param("mirrored_x3", {"step_parts": 2}, marks=pytest.mark.full),
        pytest.param("tensor_2_pipeline_2", {}, marks=pytest.mark.full),
    ],
)
def test_parts_of_a_batch_write_nothing(
    column, options, where, count, strategies
):
    build = program(where, count, mixes=False)
    trainer = mgpu_tf.Trainer(build, strategies[column], **options)
    with pytest.raises(mgpu_tf.ConfigurationError, match="written once for a"):
        trainer.fit(*data(), **FITTED)


def test_scattered_in_parts(strategies):
    build = program("layer", scattered, mixes=False)
    trainer = mgpu_tf.Trainer(build, strategies["one_device"], step_parts=2)
    with pytest.raises(mgpu_tf.ConfigurationError, match="Scatter"):
        trainer.fit(*data(), **FITTED)


def test_what_operations_write(monkeypatch):
    numbers, scale = tf.Variable([0.0, 0.0]), tf.Variable(1.0)
    table = tf.lookup.experimental.MutableHashTable("int64", "int64", 0)
    generator = tf.random.Generator.from_seed(1)
    key = tf.constant([1], "int64")

    @tf.function
    def counted(x):
        numbers.assign_add([1.0, 0.0])
        return x + scale

    @tf.function
    def writes(x):
        numbers.scatter_nd_add([[0]], [1.0])
        x = tf.cond(x[0] > 0, lambda: counted(x), lambda: x * scale)
        x = tf.while_loop(lambda x: x[0] < 9, lambda x: (counted(x),), [x])[0]
        table.insert(key, key)
        tf.py_function(lambda: None, [], [])
        return x + generator.normal([2])

    @tf.function
    def reads(x):
        for each in tf.data.Dataset.range(3):
            x += tf.cast(each, x.dtype)
        x = tf.map_fn(lambda row: row * scale, x)
        x += tf.gather(numbers, [0, 1])
        return x + tf.cast(table.lookup(key), x.dtype)

    @tf.function
    def unwritten(x):
        return tf.function(lambda x: tf.random.normal([2]) + x)(x)

    spec = tf.TensorSpec([2])
    found = list(written(writes.get_concrete_function(spec).graph))
    kinds = [op.type for op, _ in found]
    assert kinds == [
        *("ResourceScatterNdAdd", "If", "While", "LookupTableInsertV2"),
        *("EagerPyFunc", "RngReadAndSkip"),
    ]
    handles = [resource for _, resource in found]
    assert all(handle is numbers.handle for handle in handles[:3])
    assert handles[4] is None
    assert not list(written(reads.get_concrete_function(spec).graph))

    # What a function does that cannot be found is not known.
    monkeypatch.setattr(writes_module, "body_of", lambda op, function: None)
    unknown = list(written(unwritten.get_concrete_function(spec).graph))
    assert [op.type for op, _ in unknown] == ["StatefulPartitionedCall"]


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        (lambda x: tf.print(x), True),
        (lambda x: tf.random.normal([]), True),
        (lambda x: tf.debugging.assert_positive(x), False),
        (lambda x: tf.random.stateless_normal([], [0, 1]), False),
        (lambda x: tf.cond(x > 0, lambda: x, lambda: 2 * x), False),
    ],
)
def test_what_acts(do, expected):
    def step(x):
        do(x)
        return x

    traced = tf.function(step).get_concrete_function(tf.TensorSpec([]))
    assert acts(traced.graph) is expected


def test_whatever_takes_a_resource_is_stateful():
    """Operations that are not are passed by."""
    found = op_def_pb2.OpList()
    found.ParseFromString(
        pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    )
    taking = [
        op
        for op in found.op
        if any(each.type == types_pb2.DT_RESOURCE for each in op.input_arg)
    ]
    assert len(taking) > 100
    assert all(op.is_stateful for op in taking)


@pytest.mark.full
def test_a_loss_of_keras_that_acts_goes_to_the_head(strategies):
    """CTC's graph has stateful operations, and its mean needs all weights."""

    def build():
        model = keras.Sequential([keras.Input((6, 4)), layers.Dense(5)])
        model.add(layers.Dense(4))
        loss = keras.losses.CTC(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    x = np.random.default_rng(0).normal(size=(12, 6, 4))
    y, weight = np.arange(24).reshape(12, 2) % 3 + 1, np.arange(12) + 1.0
    keras.utils.set_random_seed(1)
    alone = build()
    alone.fit(x, y, sample_weight=weight, **FITTED)
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(build, strategies["data_2_pipeline_2"], seed=None)
    trainer.fit(x, y, sample_weight=weight, **FITTED)
    pairs = zip(trainer.model.weights, alone.weights, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, 1e-5, 1e-6)
