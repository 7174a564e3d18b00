"""Where split weights compute, and how many gathered bytes can be alive."""

import collections
import itertools
import re

import keras
import numpy as np
import pytest
from keras import layers

import mgpu_tf
from tests.partition_graphs import graphs_of
from tests.tiers import tiered

LAYERS, WIDTH, ROWS = 6, 24, 24
BYTES = 4 * WIDTH * WIDTH  # Of a kernel in float32.


def build():
    model = keras.Sequential(
        [keras.Input((WIDTH,))]
        + [layers.Dense(WIDTH, "tanh", use_bias=False) for _ in range(LAYERS)]
    )
    model.compile("sgd", "mse")
    return model


def graphs_on(strategy):
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    return graphs_of(
        lambda: trainer.fit(x, x, batch_size=ROWS, epochs=1, verbose=0)
    )


def strategy_of(**axes):
    devices = np.prod([*axes.values()])
    return mgpu_tf.create_model_parallel_strategy(
        num_virtual_devices=int(devices), smallest_split=4, **axes
    )


@pytest.mark.parametrize(
    "axes",
    tiered(
        [({"fsdp": 4},), ({"tensor": 2},), ({"data": 2, "tensor": 2},)],
        [],
    ),
)
def test_each_device_computes_its_own_passes(axes):
    graphs = graphs_on(strategy_of(**axes))
    counts = {
        device: collections.Counter(node.op for node in nodes)
        for device, nodes in graphs.items()
    }
    devices = int(np.prod([*axes.values()]))
    assert sorted(counts) == [f"CPU:{i}" for i in range(devices)]
    for count in counts.values():
        # Layers are computed again with fsdp.
        assert count["Tanh"] == LAYERS * (2 if "fsdp" in axes else 1)
        assert count["TanhGrad"] == LAYERS


def test_two_layers_are_gathered_at_once():
    """Most bytes of gathered weights that any order of execution allows."""
    for device, nodes in graphs_on(strategy_of(fsdp=4)).items():
        lives = lives_of(nodes)
        # In the forward and in the backward pass.
        assert len(lives) == 2 * LAYERS, device
        assert most_at_once(lives, nodes) == 2
    print(f"{2 * BYTES} of {LAYERS * BYTES} bytes")


def edges_of(node):
    return [re.sub(r"^\^|:\d+$", "", name) for name in node.input]


def lives_of(nodes):
    """For each gathered weight, the operations that read its memory last."""
    readers = collections.defaultdict(list)
    for node in nodes:
        for name in node.input:
            if not name.startswith("^"):
                readers[re.sub(r":\d+$", "", name)].append(node)
    lives = {}
    for node in nodes:
        if node.op == "ConcatV2" and "gathered" in node.name:
            lives[node.name] = set(last_readers(node, readers))
    return lives


def last_readers(node, readers):
    for reader in readers[node.name]:
        if reader.op in ("Reshape", "Identity"):  # The same memory.
            yield from last_readers(reader, readers)
        else:
            yield reader.name


def most_at_once(lives, nodes):
    """The largest set of weights no two of which are ordered by the graph."""
    edges = {node.name: edges_of(node) for node in nodes}

    def before(name):
        seen, waiting = set(), [name]
        while waiting:
            for each in edges.get(waiting.pop(), ()):
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return seen

    begun = {name: before(name) for name in lives}
    apart = {
        (one, other)
        for one, other in itertools.permutations(lives, 2)
        if lives[one] <= begun[other] or lives[other] <= begun[one]
    }

    def largest(chosen, rest):
        best = len(chosen)
        for place, each in enumerate(rest):
            later = [r for r in rest[place + 1 :] if (each, r) not in apart]
            if len(chosen) + 1 + len(later) > best:
                best = max(best, largest([*chosen, each], later))
        return best

    return largest([], list(lives))
