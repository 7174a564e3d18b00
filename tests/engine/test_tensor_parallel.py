"""Layers computed in parts, against Keras's own `fit` on one device."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.engine.step.tensor_parallel import plan as plans
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable
from tests.engine import tensor_models as models
from tests.tiers import tiered

EPOCHS = 2


def adam(**options):
    return keras.optimizers.Adam(0.02, epsilon=1e-3, **options)


def strategy_of(data=1, tensor=1, fsdp=1, **options):
    return mgpu_tf.create_model_parallel_strategy(
        data=data,
        fsdp=fsdp,
        tensor=tensor,
        num_virtual_devices=data * fsdp * tensor,
        smallest_split=4,
        **options,
    )


def state_of(model):
    """Weights, slots and state; sums in accumulation are at zero."""
    return [
        variable.numpy()
        for variable in [*model.variables, *model.optimizer.variables]
    ]


def compared(build, data, strategy, **options):
    """Trains twice; returns the trainer and the largest difference."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return _compared(build, data, strategy, **options)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def _compared(build, data, strategy, **options):
    def seeded():
        keras.utils.set_random_seed(1)
        return build()

    call = {"batch_size": models.BATCH, "verbose": 0}
    fit = call | {"epochs": EPOCHS, "shuffle": False}
    with tf.device("CPU:0"):
        reference = seeded()
        history = reference.fit(*data, **fit).history
    trainer = mgpu_tf.Trainer(seeded, strategy, **options)
    seen = trainer.fit(*data, **fit).history
    pairs = [
        *zip(state_of(trainer.model), state_of(reference), strict=True),
        *((seen[name], history[name]) for name in history),
        (trainer.evaluate(*data, **call), reference.evaluate(*data, **call)),
        (trainer.predict(data[0]), reference.predict(data[0], verbose=0)),
    ]
    assert set(seen) == set(history)
    return trainer, max(
        float(np.abs(np.subtract(*pair)).max()) for pair in pairs
    )


def shares(variables, mesh):
    """The part of the bytes of split variables that each device has."""
    held = [v.value for v in variables if isinstance(v.value, ShardedVariable)]
    assert held
    total = sum(np.prod(variable.shape) for variable in held)
    return [
        sum(v.values[replica].shape.num_elements() for v in held) / total
        for replica in range(mesh.size)
    ]


# Of these models each split weight divides by four.
QUARTERS = ["momentum", "adamw", "accumulation", "cnn", "transformer"]


CASES = {
    "mlp": lambda: models.mlp(adam(global_clipnorm=0.5), rate=0.3),
    "momentum": lambda: models.mlp(keras.optimizers.SGD(0.02, momentum=0.9)),
    "adamw": lambda: models.mlp(
        keras.optimizers.AdamW(0.02, epsilon=1e-3, clipnorm=0.2)
    ),
    "accumulation": lambda: models.mlp(
        adam(gradient_accumulation_steps=3, use_ema=True)
    ),
    "regularizer": lambda: models.mlp(adam(), regularizer="l2"),
    "cnn": lambda: models.cnn(adam(global_clipnorm=0.5)),
    "transformer": lambda: models.transformer(
        adam(global_clipnorm=0.5), rate=0.2
    ),
}
DATA = {"cnn": models.cnn_data, "transformer": models.transformer_data}


@pytest.mark.parametrize(
    "name", tiered(list(CASES), ["mlp"], ["momentum", "cnn"])
)
def test_three_devices_have_the_numbers_of_one(name, strategies):
    """Also what dropout draws, of whole and of split activations."""
    strategy = strategies["tensor_x3"]
    data = DATA.get(name, models.mlp_data)()
    trainer, difference = compared(CASES[name], data, strategy)
    assert difference < 1e-9
    for variables in (
        trainer.model.variables,
        trainer.model.optimizer.variables,
    ):
        for share in shares(variables, strategy.mesh):
            assert share == pytest.approx(1 / 3, rel=0.05)


def synchronized(name):
    if name == "cnn":  # Devices of other rows have other statistics.
        return lambda: models.cnn(adam(global_clipnorm=0.5), synchronized=True)
    return CASES[name]


@pytest.mark.parametrize(
    "name",
    tiered(
        ["momentum", "adamw", "accumulation", "regularizer", "transformer"],
        [],
        ["accumulation"],
    ),
)
def test_copies_of_parts(name, strategies):
    strategy = strategies["data_2_tensor_2"]
    data = DATA.get(name, models.mlp_data)()
    _, difference = compared(synchronized(name), data, strategy)
    assert difference < 1e-9


@pytest.mark.parametrize("name", tiered(QUARTERS, [], ["transformer"]))
def test_parts_of_parts(name, strategies):
    """What the tensor axis splits, in quarters; what it leaves, in halves."""
    strategy = strategies["fsdp_2_tensor_2"]
    data = DATA.get(name, models.mlp_data)()
    trainer, difference = compared(synchronized(name), data, strategy)
    assert difference < 1e-9
    for variables in (
        trainer.model.variables,
        trainer.model.optimizer.variables,
    ):
        for axes, part in (("tensor", "fsdp"), 1 / 4), (("fsdp",), 1 / 2):
            held = [
                variable
                for variable in variables
                if isinstance(variable.value, ShardedVariable)
                and variable.value.split.axes == axes
            ]
            for share in shares(held, strategy.mesh):
                assert share == pytest.approx(part, rel=0.05)


def split_paths(model):
    return {
        "/".join(v.path.split("/")[-2:])
        for v in model.trainable_variables
        if isinstance(v.value, ShardedVariable)
    }


PATTERNS = {
    ".*conv2d[^/]*/kernel": (None, None, None, "model"),
    ".*conv2d[^/]*/bias": ("model",),
    ".*dense[^/]*/kernel": ("model", None),
    # No layer computes with parts of it: it is gathered.
    ".*batch_normalization[^/]*/gamma": ("model",),
}


@pytest.mark.full
def test_patterns_of_paths():
    """Convolutions by output channels; dense layers by their inputs."""
    keras.utils.clear_session()
    trainer, difference = compared(
        CASES["cnn"], models.cnn_data(), strategy_of(tensor=2, layout=PATTERNS)
    )
    assert difference < 1e-9
    paths = split_paths(trainer.model)
    counts = {
        name: sum(name in path for path in paths)
        for name in ("conv2d", "dense", "batch_normalization")
    }
    assert counts == {"conv2d": 4, "dense": 2, "batch_normalization": 1}


ROWS_OF_ALL = {
    ".*dense[^/]*/kernel": (None, "batch"),
    ".*dense[^/]*/bias": ("batch",),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "tensor", "options"),
    [(3, 1, {}), (2, 2, {}), (3, 1, {"recompute": "layers"})],
)
def test_weights_split_over_the_data_axis(data, tensor, options):
    """Each device has its own rows; layers compute parts for the rows of all.

    The last batch of 1 row leaves devices without rows.
    """
    x, y = models.mlp_data()
    strategy = strategy_of(data, tensor, layout=ROWS_OF_ALL)
    _, difference = compared(
        lambda: models.mlp(adam(global_clipnorm=0.5)),
        (x[:113], y[:113]),
        strategy,
        **options,
    )
    assert difference < 1e-9


@pytest.mark.parametrize(
    "sizes",
    tiered(
        [{"data": 2}, {"data": 3}, {"fsdp": 2}, {"data": 2, "tensor": 2}],
        [{"data": 2}],
    ),
    ids=str,
)
def test_what_is_between_layers_of_the_rows_of_all(sizes):
    """Draws, and a bias that is whole, also where a device has no row."""

    def build():
        network = [
            keras.Input((6,)),
            layers.Dense(12, activation="relu", name="wide"),
            layers.Dropout(0.5),
            layers.Dense(12, name="narrow"),
            layers.Dense(3),
        ]
        return models.compiled(keras.Sequential(network), adam(), "mse")

    x, y = models.mlp_data()
    layout = {
        ".*wide/kernel": (None, "batch"),
        ".*narrow/kernel": ("batch", None),
    }
    strategy = strategy_of(**sizes, layout=layout)
    # The last of eight batches has one row.
    _, difference = compared(build, (x[:113], y[:113]), strategy)
    assert difference < 1e-9


def kept_split(plan):
    """The names of the layers that take parts from the layers before."""
    arrives = plan.structure.arrives
    return [
        linear.layer.name
        for linear in plan.linear
        if id(linear.layer) in arrives
    ]


def test_attention_and_the_layers_after_it_stay_split():
    strategy = strategy_of(tensor=2)
    with strategy.scope():
        model = models.transformer("adam")
    spec = tf.TensorSpec([None, models.LENGTH], tf.int32)
    plan = plans.split_model(model, strategy, (spec,))
    names = kept_split(plan)
    assert len(names) == 4
    assert names[0] == names[2] == "attention_output"
    # By heads, not by what a head has.
    dims = {
        linear.layer.name: plan.structure.dims[id(linear.layer)]
        for linear in plan.linear
    }
    assert [dims[name] for name in ("query", "key", "value")] == [1, 1, 1]
    # Only the layer of the logits has its outputs gathered.
    assert len(plan.structure.gathered) == 1


class ReadsLength(layers.Layer):
    """Multiplies by a length that one device of several does not have."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.first, self.second = layers.Dense(12), layers.Dense(6)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 12))

    def call(self, x):
        return self.second(self.between(self.first(x)))


BETWEEN = {
    "relu": (keras.ops.relu, True),
    "scaled": (lambda x: x * 0.5 + 1.0, True),
    "length": (lambda x: x * keras.ops.shape(x)[-1] ** 0.5, False),
    "rows": (lambda x: x - keras.ops.mean(x, 0), True),
    "mean": (lambda x: x - keras.ops.mean(x, -1, keepdims=True), False),
    "softmax": (keras.ops.softmax, False),
    "whole": (lambda x: x + tf.range(12, dtype=x.dtype), False),
    "reshaped": (
        lambda x: keras.ops.reshape(keras.ops.reshape(x, (-1, 3, 4)), (-1, 12)),
        False,
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stays_split(name):
    between, stays = BETWEEN[name]
    strategy = strategy_of(tensor=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), ReadsLength(between)])
        model.compile("sgd", "mse")
    spec = tf.TensorSpec([None, 6])
    plan = plans.split_model(model, strategy, (spec,))
    assert bool(kept_split(plan)) == stays


HUB = {
    "BertBackbone": {"num_heads": 4, "intermediate_dim": 16},
    "GPT2Backbone": {"num_heads": 4, "intermediate_dim": 16},
    "GemmaBackbone": {
        "num_query_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "intermediate_dim": 16,
    },
}


@pytest.mark.parametrize("name", tiered(list(HUB), [], ["GemmaBackbone"]))
def test_backbones_of_keras_hub(name, strategies):
    """With random weights; a classifier of the mean of the sequence."""
    hub = pytest.importorskip("keras_hub")
    options = HUB[name]

    def build():
        if "max_sequence_length" not in options and name != "GemmaBackbone":
            more = {"max_sequence_length": models.LENGTH, "dropout": 0.0}
        else:
            more = {"dropout": 0.0}
        if name != "GemmaBackbone":
            more["dropout"] = 0.0
        body = getattr(hub.models, name)(
            vocabulary_size=models.VOCABULARY,
            num_layers=1,
            hidden_dim=8,
            **options,
            **more,
        )
        outputs = body.output
        if isinstance(outputs, dict):
            outputs = outputs["sequence_output"]
        model = keras.Model(body.input, layers.Dense(3)(outputs[:, 0]))
        model.compile(adam(global_clipnorm=0.5), "mse")
        return model

    words, _ = models.transformer_data()
    x = {"token_ids": words, "padding_mask": np.ones_like(words)}
    if name == "BertBackbone":
        x["segment_ids"] = np.zeros_like(words)
    y = np.random.default_rng(3).normal(size=(models.ROWS, 3))
    strategy = strategies["data_2_tensor_2"]
    trainer, difference = compared(build, (x, y), strategy)
    assert len(split_paths(trainer.model)) > 5
    # Gemma computes norms in float32: 2e-7 with whole weights on 2 replicas.
    assert difference < (1e-6 if name == "GemmaBackbone" else 1e-9)


WRONG = [
    (
        {
            "tensor": 2,
            "pipeline": 2,
            "devices": 4,
            "layout": {".*": (None, "batch")},
        },
        "'batch' goes with the axes data, fsdp and tensor",
    ),
    ({"tensor": 3, "devices": 4}, "data=1 x fsdp=1 x tensor=3 = 3 for 4"),
    ({"tensor": 2, "shard": "optimizer"}, "shard goes with fsdp"),
    ({"tensor": 2, "layout": "columns"}, "layout must be 'auto', or a mapping"),
    (
        {"tensor": 2, "layout": {".*": ("tensor",)}},
        "'model' for the tensor axis",
    ),
    ({"tensor": 2, "layout": {".*": ("model", "batch")}}, "at most one"),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_refused(options, match):
    count = options.pop("devices", 2)
    with pytest.raises(mgpu_tf.ConfigurationError, match=match) as error:
        mgpu_tf.create_model_parallel_strategy(
            num_virtual_devices=count, **options
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({".*kernel": ("model",)}, "a name or None for each dimension"),
        ({".*kernel": (None, "model"), ".*": ("model",)}, "One pattern"),
    ],
)
def test_a_layout_that_does_not_fit(layout, match):
    strategy = strategy_of(tensor=2, layout=layout)
    trainer = mgpu_tf.Trainer(lambda: models.mlp("sgd"), strategy)
    with pytest.raises(mgpu_tf.ConfigurationError, match=match):
        trainer.fit(*models.mlp_data(), verbose=0)


AGAIN = [
    ("tensor_x3", "mlp"),
    ("tensor_x3", "transformer"),
    ("tensor_x3", "regularizer"),
    ("tensor_x3", "cnn"),
    ("data_2_tensor_2", "transformer"),
    ("data_2_tensor_2", "accumulation"),
    ("fsdp_2_tensor_2", "transformer"),
    ("fsdp_2_tensor_2", "cnn"),
]


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(AGAIN, [], [("tensor_x3", "mlp"), ("fsdp_2_tensor_2", "cnn")]),
)
def test_layers_in_parts_are_computed_again(column, name, strategies):
    """What they exchange in the forward pass they exchange once more."""
    data = DATA.get(name, models.mlp_data)()
    _, difference = compared(
        synchronized(name), data, strategies[column], recompute="layers"
    )
    assert difference < 1e-9


class Scaled(layers.Embedding):
    """An embedding of an author's own, whose table is read whole."""

    def call(self, inputs):
        return 2.0 * super().call(inputs)


def own_table(optimizer, table="own_table"):
    words = keras.Input((models.LENGTH,), dtype="int32")
    x = Scaled(models.VOCABULARY, models.WIDTH, name=table)(words)
    x = layers.Dense(models.VOCABULARY)(x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return models.compiled(keras.Model(words, x), optimizer, loss)


@pytest.mark.parametrize(
    "split",
    [("model", None), pytest.param((None, "model"), marks=pytest.mark.full)],
)
@pytest.mark.parametrize(
    "mesh",
    tiered(
        [{"tensor": 3}, {"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}],
        [{"tensor": 3}],
        [{"fsdp": 2, "tensor": 2}],
    ),
)
def test_a_word_that_comes_twice_has_two_rows(mesh, split):
    """Adam and a norm take the squares of both, not of their sum."""
    strategy = mgpu_tf.create_model_parallel_strategy(
        **mesh,
        num_virtual_devices=math.prod(mesh.values()),
        smallest_split=4,
        layout={"own_table/embeddings": split},
    )
    trainer, difference = compared(
        lambda: own_table(adam(global_clipnorm=0.2)),
        models.transformer_data(),
        strategy,
    )
    assert isinstance(
        trainer.model.get_layer("own_table").embeddings.value, ShardedVariable
    )
    assert difference < 1e-9


def test_rows_of_other_examples_are_refused():
    strategy = strategy_of(
        data=2, layout={"own_table/embeddings": ("batch", None)}
    )
    trainer = mgpu_tf.Trainer(lambda: own_table(adam()), strategy)
    with pytest.raises(mgpu_tf.ConfigurationError, match="own_table"):
        trainer.fit(*models.transformer_data(), batch_size=8, verbose=0)


class AsksForFeatures(layers.Layer):
    def call(self, x):
        return x * 2.0 if x.shape[-1] == 24 else x * 3.0


def asks_after_dropout():
    hidden = [layers.Dense(24, activation="tanh"), layers.Dropout(0.3)]
    last = [AsksForFeatures(), layers.Dense(12), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *hidden, *last])
    return models.compiled(model, adam(), "mse")


def gated():
    """The layers of Llama's feed forward, whose SiLU has its own gradient."""
    x = keras.Input((6,))
    gate = keras.ops.silu(layers.Dense(24)(x))
    outputs = layers.Dense(3)(gate * layers.Dense(24)(x))
    return models.compiled(keras.Model(x, outputs), adam(), "mse")


@pytest.mark.parametrize("equation", ["abc,cc->abc", "abb,bc->abc"])
def test_a_label_that_comes_twice_stays_whole(equation):
    """A diagonal, which no part of an axis has."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((4, 6)),
                layers.Dense(4, activation="tanh"),
                layers.EinsumDense(equation, (4, 4)),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )
        return models.compiled(model, adam(), "mse")

    generator = np.random.default_rng(0)
    data = generator.normal(size=(7, 4, 6)), generator.normal(size=(7, 2))
    _, difference = compared(build, data, strategy_of(tensor=3))
    assert difference < 1e-9


@pytest.mark.parametrize("build", [asks_after_dropout, gated])
@pytest.mark.full
def test_what_stays_split_with_the_numbers_of_one(build, caplog):
    caplog.set_level("INFO", "mgpu_tf")
    _, difference = compared(build, models.mlp_data(), strategy_of(tensor=2))
    assert difference < 1e-9
    assert " 1 layers take parts from the layers before" in caplog.text
