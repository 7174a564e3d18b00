"""What a tensor axis divides, of layers inside of an author's layer too."""

import dataclasses
import functools

import keras
import pytest
from keras import layers

from mgpu_tf.planner.choice.candidates import layouts
from mgpu_tf.planner.choice.remedies import remedies
from mgpu_tf.planner.devices import device
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.memory.per_device import memory_of
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.graph import BATCH
from mgpu_tf.planner.operations.tracing import trace
from mgpu_tf.planner.speed.step_time import Machines, step_time

POSITIONS, WIDTH, BLOCKS = 96, 64, 3
ROWS = 8
HERE = Machines(device("a100-40gb"), 2)


class Block(layers.Layer):
    """A causal block with norms, dropout, attention and a feed-forward part."""

    def __init__(self):
        super().__init__()
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.drop = layers.Dropout(0.1)
        self.attention = layers.MultiHeadAttention(4, WIDTH // 4)
        self.inner = layers.Dense(4 * WIDTH, activation="gelu")
        self.outer = layers.Dense(WIDTH)

    def call(self, x, training=None):
        y = self.norms[0](x)
        y = self.attention(y, y, use_causal_mask=True)
        x = x + self.drop(y, training=training)
        return x + self.outer(self.inner(self.norms[1](x)))


def of_blocks():
    words = keras.Input((POSITIONS,), dtype="int32")
    x = layers.Embedding(50, WIDTH)(words)
    for _ in range(BLOCKS):
        x = Block()(x)
    x = layers.LayerNormalization()(x)
    model = keras.Model(words, layers.Dense(50)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    return model


def averaged():
    """The positions of each row are averaged after the first layer."""
    inputs = keras.Input((POSITIONS, WIDTH))
    x = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(inputs))
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(7)(x))
    model.compile("adam", "mse")
    return model


def gated(x):
    gate = layers.Dense(4 * WIDTH, activation="silu", name="gate")(x)
    up = layers.Dense(4 * WIDTH, name="up")(x)
    return layers.Dense(WIDTH, name="down")(layers.Multiply()([gate, up]))


def normalized(x):
    x = layers.Dense(4 * WIDTH, name="gate")(x)
    return layers.Dense(WIDTH, name="down")(layers.RMSNormalization()(x))


def added_to_whole(x):
    x = layers.Add()([x, layers.Dense(WIDTH, name="gate")(x)])
    return layers.Dense(WIDTH, name="down")(x)


def taken_twice(x):
    gate = layers.Dense(4 * WIDTH, name="gate")(x)
    mean = layers.GlobalAveragePooling1D(keepdims=True)(gate)
    down = layers.Dense(WIDTH, name="down")(gate)
    return down + layers.Dense(WIDTH, name="mean")(mean)


def sliced(x):
    gate = layers.Dense(4 * WIDTH, name="gate")(x)
    return layers.Dense(WIDTH, name="down")(gate[..., 1:])


@functools.cache
def graph_of(build):
    return trace(build)


def test_layers_inside_of_an_authors_layer_are_divided():
    graph = graph_of(of_blocks)
    parts = splits.parts_of(graph)
    paths = [graph.weights[place].path for place in parts.weights]
    assert len([p for p in paths if p.endswith("kernel")]) == 6 * BLOCKS + 1
    kinds = sorted(graph.inner[place].kind for place in parts.summed)
    ends = ["Dense"] * BLOCKS + ["MultiHeadAttention"] * BLOCKS
    assert kinds == sorted(["Embedding", *ends])
    # The products of the feed-forward part have a quarter of its features.
    wide = [
        tensor
        for each in graph.forward()
        for tensor in each.outputs
        if graph.tensors[tensor].shape == (BATCH, POSITIONS, 4 * WIDTH)
    ]
    assert wide
    assert set(wide) <= parts.tensors
    whole = memory_of(graph, Layout(), ROWS).largest.by_kind
    divided = memory_of(graph, Layout(tensor=2), ROWS).largest.by_kind
    assert divided["slots"] < 0.6 * whole["slots"]
    assert divided["activations"] < 0.85 * whole["activations"]


@pytest.mark.parametrize(
    ("layer", "sums", "joins"),
    [
        (gated, {"down"}, set()),
        (normalized, set(), {"gate", "down"}),
        (added_to_whole, set(), {"gate", "down"}),
        (taken_twice, set(), {"gate", "down", "mean"}),
        (sliced, set(), {"gate", "down"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_outputs_stay_in_parts_up_to_a_sum(layer, sums, joins):
    def build():
        inputs = keras.Input((POSITIONS, WIDTH))
        model = keras.Model(inputs, layer(inputs))
        model.compile("sgd", "mse")
        return model

    graph = trace(build)
    parts = splits.parts_of(graph)
    assert {graph.inner[place].name for place in parts.summed} == sums
    assert {graph.inner[place].name for place in parts.gathered} == joins


def test_a_block_that_draws_can_be_computed_again():
    graph = graph_of(of_blocks)
    known = {layer.kind: layer.again for layer in graph.layers}
    assert known["Block"]
    assert not known["Embedding"]
    again = memory_of(graph, Layout(recompute="layers"), 64).largest.total
    assert again < 0.75 * memory_of(graph, Layout(), 64).largest.total


def test_a_block_that_counts_is_computed_once():
    class Counts(Block):
        def build(self, shape):
            self.calls = self.add_weight(initializer="zeros", trainable=False)

        def call(self, x, training=None):
            self.calls.assign_add(1.0)
            return super().call(x, training)

    def build():
        inputs = keras.Input((POSITIONS, WIDTH))
        model = keras.Model(inputs, Counts()(inputs))
        model.compile("sgd", "mse")
        return model

    assert [x.again for x in trace(build).layers if x.kind == "Counts"] == [0]


def test_positions_are_divided_between_layers_in_parts():
    graph = graph_of(of_blocks)
    sequences = splits.sequence_tensors(graph)
    parts = splits.parts_of(graph)
    assert sequences.isdisjoint(parts.tensors)
    shapes = {graph.tensors[each].shape for each in sequences}
    assert (BATCH, POSITIONS, WIDTH) in shapes
    # Logits are those of all positions, and so is what layers in parts take.
    assert (BATCH, POSITIONS, 50) not in shapes
    layout = Layout(tensor=2)
    with_parts = dataclasses.replace(layout, sequence_parallel=True)
    whole = memory_of(graph, layout, ROWS).largest
    divided = memory_of(graph, with_parts, ROWS).largest
    saved = whole.by_kind["activations"] - divided.by_kind["activations"]
    one = ROWS * POSITIONS * WIDTH * 4 / 2
    # Of each block: two dropouts or sums, and what the norms keep.
    assert 3 * BLOCKS * one < saved < 12 * BLOCKS * one
    assert divided.stored == whole.stored
    seconds = [
        step_time(graph, each, 4096, HERE) for each in (layout, with_parts)
    ]
    assert seconds[1].memory < seconds[0].memory
    assert seconds[1].communication == seconds[0].communication


def test_a_mean_over_positions_is_of_all():
    graph = graph_of(averaged)
    shapes = {graph.tensors[x].shape for x in splits.sequence_tensors(graph)}
    assert (BATCH, POSITIONS, WIDTH) in shapes
    assert (BATCH, 7) not in shapes


def test_plans_and_remedies_have_parts_of_sequences():
    graph = graph_of(of_blocks)
    found = list(layouts(HERE, ROWS, graph))
    assert {x.tensor for x in found if x.sequence_parallel} == {2}
    one = Layout(tensor=2, sequence_parallel=True)
    assert one in found
    assert one.options["sequence_parallel"]
    assert "sequence parallel" in str(one)
    saves = {r.words: r.saves for r in remedies(graph, Layout(tensor=2), ROWS)}
    assert saves["sequence_parallel=True"] > 0
    assert not [r for r in remedies(graph, one, ROWS) if "seq" in r.words]


@pytest.mark.parametrize("axes", [{}, {"data": 2}, {"pipeline": 2}])
def test_nothing_else_has_parts_of_sequences(axes):
    found = layouts(HERE, ROWS, graph_of(of_blocks))
    plain = Layout(**axes)
    assert dataclasses.replace(plain, sequence_parallel=True) not in found
