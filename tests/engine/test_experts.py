"""Experts whose weights are one tensor, against Keras's own `fit`."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.engine.step.tensor_parallel.linear import Linear
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import adam, compared, strategy_of
from tests.strategies.test_bytes_between_devices import body_of, device
from tests.tiers import tiered

# Each device has its own experts, and is sent the tokens of all for them.
BY_EXPERTS = {
    ".*/(inner|outer)/kernel": ("batch", None, None),
    ".*/inner/bias": ("batch", None, None, None),
}


def build(experts=4, rate=0.0):
    return models.switch(adam(global_clipnorm=0.5), experts, rate)


def kernels(trainer):
    return [
        weight
        for weight in trainer.model.trainable_variables
        if weight.path.endswith(("inner/kernel", "outer/kernel"))
    ]


@pytest.mark.parametrize(
    ("equation", "inputs", "outputs", "axes"),
    [
        # By each dimension of the kernel: the axis of inputs, and of outputs.
        (
            *("ebcd,edh->ebch", (4, 2, 3, 8), (2, 3, 5)),
            [(-4, -4), (-1, None), (None, -1)],
        ),
        (
            *("becd,dhe->bche", (2, 4, 3, 8), (3, 5, 4)),
            [(-1, None), (None, -2), (-3, -1)],
        ),
        (
            *("bd,edh->beh", (2, 8), (4, 5)),
            [(None, -2), (-1, None), (None, -1)],
        ),
        (
            *("...ed,edh->...eh", (2, 4, 8), (4, 5)),
            [(-2, -2), (-1, None), (None, -1)],
        ),
        ("ed...,edh->eh...", (4, 8, 2), (5, 2), [(None, None)] * 3),
    ],
)
def test_what_an_equation_says(equation, inputs, outputs, axes):
    layer = layers.EinsumDense(equation, outputs)
    layer.build(inputs)
    found = Linear(layer)
    dims = range(3)
    assert [(found.input_axis(d), found.output_axis(d)) for d in dims] == axes


@pytest.mark.parametrize(
    "column",
    tiered(
        ["tensor_x3", "data_2_tensor_2", "fsdp_2_tensor_2", "fsdp_x3"],
        [],
        ["data_2_tensor_2"],
    ),
)
def test_as_keras(column, strategies, caplog):
    data = models.transformer_data()
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        trainer, difference = compared(build, data, strategies[column])
    assert difference < 1e-9
    assert len(kernels(trainer)) == 4
    if "tensor" in column:
        assert " 2 layers take parts from the layers before" in caplog.text
        # Of four experts, two devices have two each; three, all and a part.
        dims = [weight.value.split.dim for weight in kernels(trainer)]
        assert dims == ([2, 1] * 2 if column == "tensor_x3" else [0] * 4)


MESHES = {
    "data_3": {"data": 3},
    "data_3_ring": {"data": 3, "communication": "ring"},
    "fsdp_3": {"fsdp": 3},
    "data_2_fsdp_2": {"data": 2, "fsdp": 2},
    "data_2_tensor_2": {"data": 2, "tensor": 2},
}


@pytest.mark.parametrize(
    ("mesh", "rate"),
    tiered(
        [(mesh, rate) for mesh in MESHES for rate in (0.0, 0.5)],
        [],
        [("fsdp_3", 0.5), ("data_2_fsdp_2", 0.5)],
    ),
)
def test_tokens_go_to_experts(mesh, rate, caplog):
    """The last batch has 7 rows, which no mesh divides."""
    mesh = dict(MESHES[mesh])
    strategy = strategy_of(**mesh, layout=BY_EXPERTS)
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        trainer, difference = compared(
            lambda: build(12, rate), models.transformer_data(), strategy
        )
    assert difference < 1e-9
    assert " 2 layers take parts from the layers before" in caplog.text
    devices = mesh.get("data", 1) * mesh.get("fsdp", 1)
    for weight in kernels(trainer):
        assert weight.value.values[0].shape[0] == 12 // devices


@pytest.mark.full
def test_a_device_gets_the_tokens_of_its_experts_alone():
    devices, rows, experts = 3, 4, 12
    strategy = strategy_of(devices, layout=BY_EXPERTS)
    trainer = mgpu_tf.Trainer(lambda: build(experts), strategy)
    x, y = models.transformer_data()
    count = devices * rows
    trainer.fit(x[:count], y[:count], batch_size=count, verbose=0)
    sent = {
        (tensor.name, device(op)): np.prod(
            [rows if each is None else each for each in tensor.shape]
        )
        for op in body_of(trainer).get_operations()
        for tensor in op.inputs
        # Of experts, rows, places and features.
        if tensor.dtype.is_floating and tensor.shape.rank == 4
        if "" not in (device(op), device(tensor.op))
        if device(op) != device(tensor.op)
    }
    tokens = experts * rows * models.CAPACITY * models.WIDTH
    # To the experts of two layers and back, in both directions of the step.
    assert sum(sent.values()) == 2 * 2 * 2 * (devices - 1) * tokens


@pytest.mark.full
def test_resumed_on_another_mesh(tmp_path):
    """With the experts over three devices, and then over two of four."""

    def fitted(strategy, epochs):
        keras.utils.set_random_seed(1)
        trainer = mgpu_tf.Trainer(lambda: build(12), strategy)
        x, y = models.transformer_data()
        trainer.fit(
            *(x, y),
            batch_size=models.BATCH,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            checkpoint_dir=str(tmp_path / "run"),
        )
        return trainer

    fitted(strategy_of(fsdp=3, layout=BY_EXPERTS), 1)
    strategy = strategy_of(data=2, tensor=2, layout=BY_EXPERTS)
    resumed = fitted(strategy, 2).model
    keras.utils.set_random_seed(1)
    right = build(12)
    call = {"batch_size": models.BATCH, "shuffle": False, "verbose": 0}
    right.fit(*models.transformer_data(), epochs=2, **call)
    for mine, other in zip(resumed.weights, right.weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.full
def test_a_step_of_ones_own():
    """Of one row, so that one device has none."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def built():
        model = build(12)
        own = Own(model.inputs, model.outputs)
        return models.compiled(own, adam(), model.loss)

    x, y = models.transformer_data()
    strategy = strategy_of(2, layout=BY_EXPERTS)
    _, difference = compared(built, (x[:17], y[:17]), strategy)
    assert difference < 1e-9


class TimeMajor(layers.Layer):
    """A layer whose rows are on the second axis within it."""

    def __init__(self):
        super().__init__()
        self.wide = layers.EinsumDense("sbd,dh->sbh", (None, 12), name="wide")

    def build(self, shape):
        self.wide.build((shape[1], None, shape[2]))

    def call(self, x):
        x = keras.ops.transpose(x, (1, 0, 2))
        return keras.ops.transpose(self.wide(x), (1, 0, 2))


def test_rows_on_another_axis():
    def built():
        inputs = keras.Input((5, 6))
        outputs = layers.Dense(3)(TimeMajor()(inputs))
        return models.compiled(keras.Model(inputs, outputs), adam(), "mse")

    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(55, 5, 6)), generator.normal(size=(55, 5, 3))
    strategy = strategy_of(3, layout={".*wide/kernel": (None, "batch")})
    _, difference = compared(built, (x, y), strategy)
    assert difference < 1e-9


class RowsAsExperts(layers.Layer):
    """A mistake: the axis of the experts is that of the rows."""

    def __init__(self):
        super().__init__()
        self.wide = layers.EinsumDense("ed,edh->eh", 4, name="wide")

    def build(self, shape):
        self.wide.build((6, shape[1]))

    def call(self, x):
        return self.wide(x)


def test_rows_that_are_experts_are_refused():
    strategy = strategy_of(2, layout={".*wide/kernel": ("batch", None, None)})
    trainer = mgpu_tf.Trainer(
        lambda: models.compiled(
            keras.Sequential([keras.Input((3,)), RowsAsExperts()]),
            "sgd",
            "mse",
        ),
        strategy,
    )
    x, y = np.zeros((6, 3)), np.zeros((6, 4))
    with pytest.raises(mgpu_tf.ConfigurationError, match="single rows"):
        trainer.fit(x, y, batch_size=6, verbose=0)
