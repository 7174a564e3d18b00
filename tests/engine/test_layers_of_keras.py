"""Each layer of Keras's keeps rows apart by its operations, or it is known.

What is known is compared with numbers, on cut and on permuted rows.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.row_proof import RowProof, Rows

RANDOM = np.random.default_rng(0)
ROWS, ORDER = 6, [3, 1, 4, 0, 5, 2]
AXES = (4, 4, 3, 2)
# Of arguments that have no default.
GIVEN = {
    "activation": "tanh",
    "bin_boundaries": [0.0, 1.0],
    "bit_depth": 8,
    "cropping": 1,
    "equation": "...x,xy->...y",
    "factor": 0.2,
    "filters": 2,
    "function": lambda x: x,
    "head_dim": 2,
    "height": 4,
    "height_factor": 0.1,
    "input_dim": 7,
    "key_dim": 3,
    "kernel_size": 2,
    "n": 3,
    "num_bins": 5,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "num_query_heads": 2,
    "num_tokens": 7,
    "output_dim": 3,
    "output_shape": 4,
    "output_size": 2,
    "pool_size": 2,
    "rate": 0.3,
    "scale": 2.0,
    "size": 2,
    "stddev": 0.1,
    "target_shape": (-1,),
    "units": 4,
    "width": 4,
    "width_factor": 0.1,
}
# By their names: other arguments than those above.
MADE = {
    "Bidirectional": lambda: keras.layers.Bidirectional(keras.layers.GRU(4)),
    "GroupNormalization": lambda: keras.layers.GroupNormalization(2),
    "Discretization": lambda: keras.layers.Discretization([0.0, 1.0]),
    "Dot": lambda: keras.layers.Dot(-1),
    "CategoryEncoding": lambda: keras.layers.CategoryEncoding(9, "count"),
    "IntegerLookup": lambda: keras.layers.IntegerLookup(vocabulary=[1, 2, 4]),
    "Permute": lambda: keras.layers.Permute((2, 1)),
    "RNN": lambda: keras.layers.RNN(keras.layers.LSTMCell(4)),
    "SpectralNormalization": lambda: keras.layers.SpectralNormalization(
        keras.layers.Dense(4)
    ),
    "TimeDistributed": lambda: keras.layers.TimeDistributed(
        keras.layers.Dense(4)
    ),
}
# They mix rows, have none, are no layers to be called, or need what is not
# installed here. Layers of strings are in the conformance suite.
LEFT_OUT = {
    *(
        "ActivityRegularization",
        "CutMix",
        "MixUp",
        "InputLayer",
        "Layer",
        "Lambda",
        "Wrapper",
    ),
    *("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"),
    *("GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells"),
    *("HashedCrossing", "MelSpectrogram", "MaxNumBoundingBoxes", "Pipeline"),
    *("RandomPosterization", "StringLookup", "TextVectorization"),
}


def classes():
    found = {}
    for name in sorted(dir(keras.layers)):
        kind = getattr(keras.layers, name)
        if inspect.isclass(kind) and issubclass(kind, keras.layers.Layer):
            found.setdefault(kind, name)
    return [name for name in found.values() if name not in LEFT_OUT]


def made(name):
    if name in MADE:
        return MADE[name]()
    kind = getattr(keras.layers, name)
    parameters = list(inspect.signature(kind.__init__).parameters.values())
    return kind(
        **{
            each.name: GIVEN[each.name]
            for each in parameters[1:]
            if each.default is each.empty
            and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
    )


def called(layer, inputs, training):
    """Calls a layer with tensors; returns its outputs."""
    given = inputs[0] if len(inputs) == 1 else list(inputs)
    if "query" in inspect.signature(layer.call).parameters:
        given, inputs = inputs[0], inputs[1:]
        return tf.nest.flatten(layer(given, *inputs, training=training))
    if "training" in inspect.signature(layer.call).parameters:
        return tf.nest.flatten(layer(given, training=training))
    return tf.nest.flatten(layer(given))


def inputs_of(name):
    """Yields the inputs that a layer takes, and a layer that is built."""
    for rank in range(1, 7):
        shape = (ROWS, *AXES[:1], *AXES)[:rank]
        if name == "STFTSpectrogram":
            shape = (ROWS, 400, 1)[:rank]
        for count in (1, 2):
            for values in (
                RANDOM.normal(size=shape).astype("float32"),
                RANDOM.integers(0, 5, size=shape).astype("int32"),
            ):
                layer, inputs = made(name), [tf.constant(values)] * count
                try:
                    called(layer, inputs, False)
                except Exception:  # Keras refuses these.
                    continue
                yield layer, inputs


@pytest.mark.parametrize("name", classes())
def test_rows_are_apart(name):
    tried = 0
    for layer, inputs in inputs_of(name):
        tried += 1
        if keras_internals.is_by_row(layer):
            if keras_internals.have_features(layer, inputs):
                check_numbers(layer, inputs)
            continue
        rank = inputs[0].shape.rank
        if rank > 2 or (rank == 2 and "ttention" not in name):
            kinds = proven(layer, inputs)
            assert all(isinstance(kind, Rows) for kind in kinds), (rank, kinds)
    assert tried


def check_numbers(layer, inputs):
    whole = called(layer, inputs, False)
    for rows in (ORDER, [0, 1], [5]):
        parts = called(layer, [tf.gather(x, rows) for x in inputs], False)
        for part, all_rows in zip(parts, whole, strict=True):
            np.testing.assert_allclose(
                part, tf.gather(all_rows, rows), atol=1e-5
            )


# Of which it is not proven where the lengths of sequences, or the sizes of
# images, are not known: they are computed of all rows.
UNPROVEN_OF_SOME_LENGTH = {"STFTSpectrogram", "TimeDistributed"}


@pytest.mark.parametrize("name", classes())
def test_rows_of_some_length_are_apart(name):
    every = []
    for layer, inputs in inputs_of(name):
        if keras_internals.is_by_row(layer) or inputs[0].shape.rank < 3:
            continue
        try:
            traced(layer, inputs, unknown=True)
        except Exception:  # Keras needs a length.
            continue
        every += proven(layer, inputs, unknown=True)
    if name in UNPROVEN_OF_SOME_LENGTH:
        assert not all(isinstance(kind, Rows) for kind in every)
    else:
        assert all(isinstance(kind, Rows) for kind in every), every


def proven(layer, inputs, *, unknown=False):
    """Returns what is proven of the outputs, in training; see `traced`."""
    found = []

    def look(rows, outputs):
        found.extend(map(RowProof(rows).of, outputs))

    traced(layer, inputs, look, unknown=unknown)
    return found


def traced(layer, inputs, look=lambda rows, outputs: None, *, unknown=False):
    """Traces the call of a layer, in training.

    Args:
        layer: A layer.
        inputs: What it is called with.
        look: Gets the inputs and the outputs in the graph.
        unknown: Whether all but the last axis may have any length.
    """

    def trace(*rows):
        training = inputs[0].dtype.is_floating and len(rows) == 1
        outputs = called(layer, rows, training)
        look(rows, outputs)
        return outputs

    specs = [
        tf.TensorSpec(
            [*[None] * (len(x.shape) - 1), *x.shape[-1:]]
            if unknown
            else [None, *x.shape[1:]],
            x.dtype,
        )
        for x in inputs
    ]
    tf.function(trace, autograph=False).get_concrete_function(*specs)


def test_attention_between_rows_is_not_proven():
    layer, x = keras.layers.Attention(), tf.ones([ROWS, 4])
    called(layer, [x, x], False)
    assert not keras_internals.is_by_row(layer)
    assert not any(isinstance(kind, Rows) for kind in proven(layer, [x, x]))


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("RandomContrast", {"factor": 0.2}, [(ROWS, 4, 3)]),
        ("BatchNormalization", {}, [(ROWS,)]),
        ("Hashing", {"num_bins": 3}, [(ROWS,), (ROWS,)]),
        ("Hashing", {"num_bins": 3, "output_mode": "multi_hot"}, [(ROWS,)]),
        ("CategoryEncoding", {"num_tokens": 3}, [(ROWS,)]),
    ],
)
def test_layers_are_known_for_some_axes_only(name, options, shapes):
    layer = getattr(keras.layers, name)(**options)
    assert keras_internals.is_by_row(layer)
    rows = [tf.ones(shape) for shape in shapes]
    assert not keras_internals.have_features(layer, rows)
