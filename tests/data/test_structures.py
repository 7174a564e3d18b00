"""Structures of data, class weights and models, as Keras's `fit` takes them.

The reference is `keras.Model.fit` in float64 on the same data.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import data
from tests.tiers import tiered

# What Keras says at the end of data whose length it does not know.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.usefixtures("float64"),
]

NAMES = ["one_device", "mirrored_x3"]
ROWS = 22  # In batches of 8: the last is smaller, and 3 divides none.
OPTIONS = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
BATCHES = {"epochs": 2, "shuffle": False, "verbose": 0}

_RANDOM = np.random.default_rng(0)
A, B = _RANDOM.normal(size=(ROWS, 3)), _RANDOM.normal(size=(ROWS, 2))
Y, Z = A.sum(1, keepdims=True), 2 * B.sum(1, keepdims=True)
LABELS = _RANDOM.integers(0, 5, ROWS)
WEIGHTS = np.linspace(0.0, 2.0, ROWS)


def reference(build):
    keras.utils.set_random_seed(0)
    return build()


def check_same(build, act, strategies, names=NAMES, ignored=()):
    """Compares what `act` returns, and the weights that it leaves."""
    model = reference(build)
    expected = act(model)
    for name in names:
        trainer = mgpu_tf.Trainer(build, strategies[name])
        observed = act(trainer)
        for part, other in zip(expected, observed, strict=True):
            check_equal(part, other, ignored)
        for a, b in zip(
            model.get_weights(), trainer.model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    return model


def check_equal(expected, observed, ignored):
    if isinstance(expected, keras.callbacks.History):
        expected, observed = expected.history, observed.history
        assert list(expected) == list(observed)
        expected = {k: v for k, v in expected.items() if k not in ignored}
        observed = {k: v for k, v in observed.items() if k not in ignored}
    if isinstance(expected, tf.RaggedTensor):
        expected, observed = expected.to_tensor(), observed.to_tensor()
    keras.tree.assert_same_structure(expected, observed)
    for a, b in zip(
        keras.tree.flatten(expected), keras.tree.flatten(observed), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def two_by_two(outputs=list):
    """Two inputs and two targets; Keras averages single losses otherwise."""

    def build():
        a = keras.Input((3,), name="a")
        b = keras.Input((2,), name="b")
        hidden = keras.layers.Concatenate()(
            [keras.layers.Dense(4, activation="tanh")(a), b]
        )
        p = keras.layers.Dense(1, name="p")(hidden)
        q = keras.layers.Dense(1, name="q")(hidden)
        losses = {"p": "mse", "q": "mae"}
        if outputs is dict:
            model = keras.Model([a, b], {"p": p, "q": q})
        else:
            model = keras.Model([a, b], outputs([p, q]))
            losses = ["mse", "mae"]
        model.compile(keras.optimizers.Adam(0.01), losses)
        return model

    return build


SINGLE = {"p_loss", "q_loss", "val_p_loss", "val_q_loss"}


def line(outputs=1, loss="mse", **options):
    def build():
        activation = None if loss == "mse" else "softmax"
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(outputs, activation=activation),
            ]
        )
        model.compile("sgd", loss, **options)
        return model

    return build


STRUCTURES = {
    "lists": (
        list,
        lambda m: [
            m.fit([A, B], [Y, Z], validation_data=[[A, B], [Y, Z]], **OPTIONS),
            m.predict([A, B], verbose=0),
        ],
    ),
    "tuples": (
        tuple,
        lambda m: [
            m.fit((A, B), (Y, Z), validation_split=0.3, **OPTIONS),
            m.predict((A, B), verbose=0),
        ],
    ),
    "dicts": (
        dict,
        lambda m: [
            m.fit(
                {"a": A, "b": B},
                {"p": Y, "q": Z},
                sample_weight={"p": WEIGHTS, "q": WEIGHTS[::-1]},
                validation_data=(
                    {"a": A, "b": B},
                    {"p": Y, "q": Z},
                    {"p": WEIGHTS, "q": WEIGHTS},
                ),
                **OPTIONS,
            ),
            m.predict({"a": A, "b": B}, verbose=0),
        ],
    ),
    "one weight for both targets": (
        list,
        lambda m: [m.fit([A, B], [Y, Z], sample_weight=WEIGHTS, **OPTIONS)],
    ),
    "generator": (
        list,
        lambda m: [m.fit(pairs(tuple), shuffle=False, verbose=0)],
    ),
}


@pytest.mark.parametrize("name", tiered(list(STRUCTURES), ["lists"]))
def test_structures(name, strategies):
    outputs, act = STRUCTURES[name]
    check_same(two_by_two(outputs), act, strategies, ignored=SINGLE)


def pairs(kind):
    for low in range(0, ROWS, 8):
        rows = slice(low, low + 8)
        yield kind([kind([A[rows], B[rows]]), kind([Y[rows], Z[rows]])])


class Pairs(keras.utils.PyDataset):
    def __init__(self, kind):
        super().__init__()
        self.batches = list(pairs(kind))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.parametrize(
    "lists",
    [
        pytest.param(lambda: Pairs(list), marks=pytest.mark.full),
        pytest.param(lambda: pairs(list), marks=pytest.mark.full),
    ],
    ids=["py", "generator"],
)
def test_lists_of_python_are_tuples(lists, strategies):
    """Keras refuses them; what it does with tuples is the reference."""

    def act(model):
        own = isinstance(model, keras.Model)
        batches = Pairs(tuple) if own else lists()
        return [model.fit(batches, shuffle=False, verbose=0)]

    check_same(two_by_two(), act, strategies, ignored=SINGLE)


@pytest.mark.full
def test_a_list_of_one_target(strategies):
    def act(model):
        return [
            model.fit(A, [Y], validation_data=[A, [Y]], **OPTIONS),
            model.evaluate(A, [Y], verbose=0),
        ]

    check_same(line(), act, strategies)


def test_a_list_in_a_dict_of_targets(strategies):
    def build():
        x = keras.Input((3,))
        p, q, r = (keras.layers.Dense(1)(x) for _ in range(3))
        model = keras.Model(x, {"one": p, "two": [q, r]})
        model.compile("sgd", {"one": "mse", "two": ["mae", "mse"]})
        return model

    def act(model):
        y = {"one": Y, "two": [2 * Y, Y**2]}
        history = model.fit(A, y, **OPTIONS)
        return [history.history["loss"], model.predict(A, verbose=0)]

    check_same(build, act, strategies)


def test_a_tuple_is_one_structure_of_inputs(strategies):
    """`fit((x, y))` has no targets, as in Keras."""
    source = data.as_source((A, Y), strategy=strategies["one_device"])
    ((x, y),) = source.example()
    assert (x.shape[1], y.shape[1]) == (3, 1)


def test_in_the_order_of_keras(strategies):
    def act(model):
        return [
            model.fit(A, Y, 8, 2, 0, None, 0.0, (A, Y), False),
            model.evaluate(A, Y, 8, 0, WEIGHTS, None, None, True),
            model.predict(A, 8, 0),
        ]

    check_same(line(), act, strategies)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_signatures(method):
    """Names, order and defaults are Keras's; what is ours comes after."""

    def positional(owner):
        parameters = inspect.signature(getattr(owner, method)).parameters
        return [
            (p.name, p.default)
            for p in parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]

    assert positional(mgpu_tf.Trainer) == positional(keras.Model)


def test_steps_decide_the_batch_size_of_arrays(strategies):
    def act(model):
        return [
            model.fit(
                A,
                Y,
                steps_per_epoch=3,
                epochs=2,
                shuffle=False,
                verbose=0,
                validation_data=(A, Y),
                validation_steps=2,
            ),
            model.evaluate(A, Y, steps=4, verbose=0),
            model.predict(A, steps=5, verbose=0),
        ]

    check_same(line(), act, strategies)


def test_epochs_with_validation(strategies):
    def act(model):
        return [
            model.fit(
                A,
                Y,
                validation_data=(A, Y),
                validation_freq=[1, 3],
                **OPTIONS | {"epochs": 4},
            )
        ]

    check_same(line(), act, strategies, ["one_device"])


@pytest.mark.parametrize("wrong", [0, [1, 0], ["1"], "1", None, 1.5])
def test_epochs_with_validation_are_refused(wrong, strategies):
    trainer = mgpu_tf.Trainer(line(), strategies["one_device"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="validation_freq"):
        trainer.fit(A, Y, validation_data=(A, Y), validation_freq=wrong)


class Frame:
    """As much of a data frame, or a series, as is asked for."""

    iloc = None

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype=dtype)


def test_a_series_is_a_column(strategies):
    def build():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    ours = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    own = reference(build)
    a = own.fit(A[:, :1], Y, **OPTIONS)
    b = ours.fit(Frame(A[:, 0]), Frame(Y[:, 0]), **OPTIONS)
    check_equal(a, b, ())


WRONG = {
    "numbers in a list": ([[1.0, 2.0]], Y, {}, "np.asarray"),
    "objects": (np.array([None, 1]), np.zeros([2]), {}, "object"),
    "weights of another structure": (
        A,
        [Y, Z],
        {"sample_weight": [WEIGHTS]},
        "structure of y",
    ),
    "weights for a list of one": (
        A,
        [Y],
        {"sample_weight": WEIGHTS},
        "Pass y",
    ),
    "wide weights for two targets": (
        A,
        [Y, Z],
        {"sample_weight": np.ones([ROWS, 2])},
        "number for each example",
    ),
    "weights in a dict for one target": (
        A,
        Y,
        {"sample_weight": {"a": WEIGHTS}},
        "structure of y",
    ),
    "dates": (
        np.arange(ROWS).astype("datetime64[D]"),
        Y,
        {},
        r'x.astype\("int64"\)',
    ),
    "shuffle": (A, Y, {"shuffle": "rows"}, "shuffle"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_by_name(name, strategies):
    x, y, options, message = WRONG[name]
    trainer = mgpu_tf.Trainer(line(), strategies["one_device"])
    with pytest.raises(mgpu_tf.ConfigurationError, match=message) as error:
        trainer.fit(x, y, **options)
    assert "\n" not in str(error.value)


def test_shuffle_within_batches(strategies):
    source = data.as_source(
        np.arange(ROWS),
        strategy=strategies["one_device"],
        batch_size=8,
        shuffle="batch",
    )
    orders = [source.rows().order(index) for index in range(2)]
    for order in orders:
        assert sorted(order[:8]) == list(range(8))
        assert sorted(order[16:]) == list(range(16, ROWS))
        assert list(order[:8]) != list(range(8))
    assert list(orders[0]) != list(orders[1])


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)


def halved(x, y):
    return x, y, tf.constant(0.5, tf.float64)


def test_a_scalar_belongs_to_every_row(strategies):
    def act(model):
        return [model.fit(dataset(A, Y).map(halved), **BATCHES)]

    check_same(line(), act, strategies)


def test_parts_of_different_sizes(strategies):
    """A part of one row cannot be cut for replicas."""

    def shared(x, y):
        return {"x": x, "shared": tf.ones([1, 3], tf.float64)}, y

    class Added(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs["x"] + inputs["shared"])

    def build():
        model = Added()
        model.compile("sgd", "mse")
        return model

    # Keras weighs batches in its logs by the first input's rows.
    batches = tf.data.Dataset.from_tensor_slices((A, Y)).batch(11).map(shared)
    check_same(
        build, lambda m: [m.fit(batches, **BATCHES)], strategies, ["one_device"]
    )
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="number of rows"):
        trainer.fit(batches, **BATCHES)


class Labelled(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return A[rows], LABELS[rows]


CLASSES = line(5, "sparse_categorical_crossentropy", weighted_metrics=["acc"])

# Labels are 0 to 4.
CLASS_WEIGHTS = {
    "all": {0: 0.3, 1: 1.5, 2: 2.0, 3: 0.0, 4: 0.9},
    "none above 2": {0: 0.3, 2: 2.0},
    "above the labels": {3: 0.7, 9: 3.0},
    "the largest weighs most": {0: 1.0, 1: 7.0},
    "none": {},
}


@pytest.mark.parametrize("name", tiered(list(CLASS_WEIGHTS), ["none above 2"]))
def test_class_weight_of_arrays(name, strategies):
    """A label above the largest class weighs 1, not what that class does."""

    def act(model):
        weights = CLASS_WEIGHTS[name]
        return [model.fit(A, LABELS, class_weight=weights, **OPTIONS)]

    check_same(CLASSES, act, strategies, ["one_device", "mirrored_x3"])


CLASS_DATA = {
    "column": (CLASSES, lambda: (A, LABELS[:, None]), {"batch_size": 8}),
    "dataset": (CLASSES, lambda: (dataset(A, LABELS),), {}),
    "PyDataset": (CLASSES, lambda: (Labelled(),), {}),
    "rounded": (line(), lambda: (A, LABELS - 0.6), {"batch_size": 8}),
    "below 0": (line(), lambda: (A, LABELS - 2), {"batch_size": 8}),
    "one-hot": (
        line(5, "categorical_crossentropy"),
        lambda: (A, np.eye(5)[LABELS]),
        {"batch_size": 8},
    ),
}


@pytest.mark.parametrize("name", tiered(list(CLASS_DATA), ["one-hot"]))
def test_class_weight_of_each_kind(name, strategies):
    build, arrays, options = CLASS_DATA[name]
    weights = {-1: 3.0, 0: 0.3, 1: 2.0, 4: 0.1}
    if name == "dataset":
        del weights[-1]  # Which Keras leaves out.

    def act(model):
        return [
            model.fit(
                *arrays(),
                class_weight=weights,
                **BATCHES | options,
            )
        ]

    check_same(build, act, strategies, ["one_device", "mirrored_x3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weight": {0: 1.0}, "sample_weight": WEIGHTS}, "sample_weight"),
        ({"class_weight": {"a": 1.0}}, "'a'"),
    ],
)
def test_class_weight_is_refused(options, message, strategies):
    trainer = mgpu_tf.Trainer(CLASSES, strategies["one_device"])
    with pytest.raises(mgpu_tf.ConfigurationError, match=message):
        trainer.fit(A, LABELS, **OPTIONS | options)
