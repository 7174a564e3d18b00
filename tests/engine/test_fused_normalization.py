"""BatchNormalization as one operation against Keras's own.

Both are compared in float32, and both with Keras's in float64, which is taken
for the truth.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.engine.kernels import Kernels, batch_normalization

SHAPES = {2: (32, 8), 3: (16, 5, 8), 4: (8, 6, 6, 8), 5: (4, 3, 4, 5, 8)}


def one_layer(strategy, shape, dtype, policy=None, **options):
    """A model of one layer, with weights that are not those it begins with."""
    random = np.random.default_rng(1)
    with strategy.scope():
        layer = layers.BatchNormalization(dtype=policy or dtype, **options)
        model = keras.Sequential([keras.Input(shape[1:], dtype=dtype), layer])
        model.compile("sgd", "mse")
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 2.0, weight.shape))
    return model, layer


def computed(
    strategy,
    kernels,
    shape,
    *,
    dtype="float32",
    training=True,
    trainable=True,
    mean=0.0,
    jit_compile=False,
    **options,
):
    """Outputs, gradients and moving statistics by name; what is fused.

    Second gradients are those of the gradients times fixed vectors.
    """
    model, layer = one_layer(strategy, shape, dtype, **options)
    layer.trainable = trainable
    random = np.random.default_rng(0)
    x, upstream = (
        tf.cast(np.float32(random.normal(center, size=shape)), dtype)
        for center in (mean, 0.0)
    )
    held = {"gamma": layer.gamma, "beta": layer.beta}
    weights = {name: v.value for name, v in held.items() if v is not None}
    vectors = [
        np.float32(random.normal(size=one.shape))
        for one in (x, *weights.values())
    ]

    def step(x, upstream):
        given = [x, *weights.values()]
        with tf.GradientTape() as outer:
            outer.watch([upstream, *given])
            with tf.GradientTape() as tape:
                tape.watch(given)
                y = layer(x, training=training)
                loss = tf.reduce_sum(y * tf.cast(upstream, y.dtype))
            first = tape.gradient(loss, given)
            along = sum(
                tf.cast(
                    tf.reduce_sum(one * tf.cast(vector, one.dtype)), "float64"
                )
                for one, vector in zip(first, vectors, strict=True)
            )
        second = outer.gradient(
            along, [upstream, *given], unconnected_gradients="zero"
        )
        return y, *first, *second

    forms = Kernels(model, strategy, kernels)
    step = tf.function(step, autograph=False, jit_compile=jit_compile)
    with forms.in_place():
        found = step(x, upstream)
    found = [*found, layer.moving_mean.value, layer.moving_variance.value]
    names = [
        *("outputs", "inputs", *weights),
        *(f"second {name}" for name in ("upstream", "inputs", *weights)),
        *("mean", "variance"),
    ]
    return dict(
        zip(
            names,
            [tf.cast(value, tf.float64).numpy() for value in found],
            strict=True,
        )
    ), forms.replaced


def relative(one, other):
    return np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30)


def compared(strategy, shape, tolerance, **options):
    fused, replaced = computed(strategy, "fused", shape, **options)
    own, none = computed(strategy, "keras", shape, **options)
    assert replaced == {"BatchNormalization": 1}
    assert none == {}
    for name, value in own.items():
        assert relative(fused[name], value) <= tolerance, name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", SHAPES)
def test_outputs_gradients_and_statistics_are_keras_own(
    rank, training, strategies
):
    compared(strategies["one_device"], SHAPES[rank], 3e-6, training=training)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": False},
        {"center": False},
        {"scale": False, "center": False, "momentum": 0.5, "epsilon": 0.1},
        {"trainable": False},
        {"jit_compile": True},
        {"axis": 3},
        {"synchronized": True},
    ],
    ids=str,
)
def test_with_options(options, strategies):
    compared(strategies["one_device"], SHAPES[4], 3e-6, **options)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_inputs_of_16_bits(dtype, tolerance, strategies):
    """Statistics and weights are float32; outputs are rounded once."""
    compared(
        strategies["one_device"],
        SHAPES[4],
        tolerance,
        dtype=dtype,
        policy=f"mixed_{dtype}",
    )


@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0])
def test_it_is_no_further_from_the_truth_than_keras(mean, strategies):
    one_device, shape = strategies["one_device"], (16, 12, 12, 8)
    every = [
        computed(one_device, kernels, shape, mean=mean, dtype=dtype)[0]
        for kernels, dtype in (
            ("fused", "float32"),
            ("keras", "float32"),
            ("keras", "float64"),
        )
    ]
    for name, truth in every[2].items():
        fused, own = (relative(value[name], truth) for value in every[:2])
        assert fused <= max(3 * own, 2e-6), name


def test_the_moving_variance_of_a_single_value(strategies):
    """Where n - 1 is zero."""
    compared(strategies["one_device"], (1, 8), 3e-6)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 6, 6, 8), {"axis": 1}),
        ((4, 6, 6, 8), {"synchronized": True}),
        ((4, 6, 6, 8), {"renorm": True}),
        ((4, 6, 6, 8), {"epsilon": 1e-6}),
        ((4, 6, 6, 8), {"dtype": "float64"}),
        ((4, 2, 2, 2, 2, 8), {}),
    ],
    ids=str,
)
def test_what_is_not_the_same_stays_with_keras(shape, options, strategies):
    dtype = options.pop("dtype", "float32")
    _, layer = one_layer(strategies["one_device"], shape, dtype, **options)
    assert not batch_normalization.is_same(layer, 2)


def test_another_class_stays_with_keras(strategies):
    class Own(layers.BatchNormalization):
        pass

    layer = Own()
    layer.build((None, 8))
    assert not batch_normalization.is_same(layer, 1)


def masked():
    return [
        keras.Input((5,)),
        layers.Embedding(9, 4, mask_zero=True),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling1D(),
    ]


def nested():
    inner = keras.Sequential([layers.BatchNormalization(), layers.Dense(4)])
    shared = layers.BatchNormalization()
    inputs = keras.Input((5,))
    hidden = inner(layers.Dense(6, activation="tanh")(inputs))
    return keras.Model(inputs, shared(shared(hidden) ** 2))


def every_time():
    return [
        keras.Input((5,)),
        layers.Reshape((5, 1)),
        layers.TimeDistributed(layers.BatchNormalization()),
        layers.Flatten(),
    ]


class Penalized(keras.Model):
    """Its loss has a gradient in it, as in WGAN-GP."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(6, activation="tanh")
        self.norm = layers.BatchNormalization()
        self.last = layers.Dense(2)

    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.last(self.norm(self.first(x), training=training))
            # Of a sum of `y`, that of the normalized values would be zero.
            bent = tf.tanh(y)
        slopes = tape.gradient(bent, x)
        if slopes is not None:
            self.add_loss(tf.reduce_mean(tf.reduce_sum(slopes**2, -1)))
        return y


def trained(strategy, make, kernels, x, y, **options):
    def build():
        made = make()
        model = made if isinstance(made, keras.Model) else None
        if model is None:
            model = keras.Sequential([*made, layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    trainer = mgpu_tf.Trainer(
        build, strategy, kernels=kernels, seed=0, **options
    )
    history = trainer.fit(
        x, y, batch_size=16, epochs=2, verbose=0, shuffle=False
    )
    outputs = trainer.predict(x, batch_size=16)
    losses = history.history["loss"]
    return trainer, [*trainer.model.get_weights(), outputs, np.array(losses)]


def points(rows):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 5)).astype("float32")
    return x, (x[:, :2] ** 2).astype("float32")


PROGRAMS = {
    "nested, and shared": (nested, 2),
    "of every time": (every_time, 1),
    "gradients of gradients": (Penalized, 1),
}


@pytest.mark.parametrize(
    ("program", "column", "options"),
    [
        ("nested, and shared", "one_device", {}),
        pytest.param(
            "nested, and shared",
            "mirrored_x3",
            {"recompute": "layers"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "nested, and shared", "fsdp_x3", {}, marks=pytest.mark.full
        ),
        ("of every time", "one_device", {}),
        ("gradients of gradients", "one_device", {}),
        ("gradients of gradients", "mirrored_x3", {}),
        pytest.param(
            "gradients of gradients", "fsdp_x3", {}, marks=pytest.mark.full
        ),
        pytest.param(
            "gradients of gradients", "tensor_x3", {}, marks=pytest.mark.full
        ),
    ],
)
def test_programs(program, column, options, strategies):
    """Rows end with one example: replicas without one are left out."""
    make, count = PROGRAMS[program]
    x, y = points(33)
    if program.startswith("nested"):
        y = np.repeat(y, 2, 1)
    found = []
    for kernels, expected in (("fused", count), ("keras", 0)):
        trainer, values = trained(
            strategies[column], make, kernels, x, y, **options
        )
        found.append(values)
        assert trainer.fused.get("BatchNormalization", 0) == expected
    for one, other in zip(*found, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, 2e-4, 2e-5)


def test_a_call_with_a_mask_stays_with_keras(strategies):
    x = np.random.default_rng(0).integers(0, 9, (20, 5))
    y = np.zeros((20, 2), "float32")
    trainer, _ = trained(strategies["one_device"], masked, "fused", x, y)
    assert trainer.fused == {"Embedding": 1, "SGD": 1}


def test_the_model_is_left_as_it_is(strategies, caplog):
    """Training leaves no attribute in layers or optimizers."""

    def build():
        model = keras.Sequential(
            [keras.Input((5,)), layers.BatchNormalization(), layers.Dense(2)]
        )
        model.compile(keras.optimizers.Adam(), "mse")
        return model

    def attributes(model):
        parts = [model, *model.layers, model.optimizer]
        return [sorted(vars(part)) for part in parts]

    x, y = points(32)
    found = []
    for kernels in ("fused", "keras"):
        trainer = mgpu_tf.Trainer(
            build, strategies["mirrored_x2"], kernels=kernels
        )
        with caplog.at_level("DEBUG", "mgpu_tf"):
            trainer.fit(x, y, batch_size=16, verbose=0)
            trainer.evaluate(x, y, batch_size=16, verbose=0)
        found.append(attributes(trainer.model))
    assert found[0] == found[1]
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if "kernels" in line]
    assert told == ["kernels='fused': 1 Adam, 1 BatchNormalization"]


def test_the_model_is_left_as_it_is_where_tracing_fails(strategies):
    model, layer = one_layer(strategies["one_device"], (4, 8), "float32")
    forms = Kernels(model, strategies["one_device"], "fused")

    def fail():
        assert "call" in vars(layer)
        assert "update_step" in vars(model.optimizer)
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        forms.around(fail)()
    assert "call" not in vars(layer)
    assert "update_step" not in vars(model.optimizer)
