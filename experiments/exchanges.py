"""What the devices of a process send in a step, after placement.

    python experiments/exchanges.py --layout=fsdp --devices=4
    python experiments/exchanges.py --layout=tensor --devices=8 --blocks=4 \
        --communication=ring
    mgpu-tf launch --num_workers=2 -- python experiments/exchanges.py

Trains a model of blocks (attention and a feed-forward part) for one step, and
counts the nodes of TensorFlow's partition graphs: pairs of Send and Recv, of
which each has a callback on the host, and collective operations. `ring` takes
the operations that GPUs run by NCCL; `auto` on CPUs copies. In a cluster each
process has one device and counts its own nodes.

Prints one line of JSON: the counts of a step, the nodes of the graph, and the
seconds of the first step with its trace. A model of 2 blocks on 4 devices takes
about half a minute on 2 cores.
"""

import collections
import json
import time

import keras
import numpy as np
from absl import app, flags
from keras import layers
from tensorflow.python.eager import context

import mgpu_tf

LAYOUT = flags.DEFINE_enum(
    "layout", "fsdp", ["fsdp", "tensor", "data"], "The axis of the devices."
)
DEVICES = flags.DEFINE_integer("devices", 2, "Parts of the CPU.")
BLOCKS = flags.DEFINE_integer("blocks", 2, "Blocks of the model.")
COMMUNICATION = flags.DEFINE_enum(
    "communication", "auto", ["auto", "ring"], "As for the strategy."
)
WIDTH, HEADS, LENGTH, ROWS = 64, 8, 8, 16


@keras.saving.register_keras_serializable("mgpu_tf_experiments")
class Block(layers.Layer):
    """Attention and a feed-forward part, each after a normalization."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.wide = layers.Dense(4 * WIDTH, "gelu")
        self.narrow = layers.Dense(WIDTH)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        first, second = self.norms
        rows = first(x)
        x = x + self.attention(rows, rows, use_causal_mask=True)
        return x + self.narrow(self.wide(second(x)))


def build():
    """Returns a compiled model of blocks."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = inputs
    for _ in range(BLOCKS.value):
        x = Block()(x)
    model = keras.Model(inputs, layers.Dense(WIDTH)(x))
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def nodes_of(run):
    """Returns the nodes that ran, of all devices."""
    context.enable_run_metadata()
    try:
        run()
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    return [node for graph in graphs for node in graph.node]


def main(arguments):
    """Trains a step and prints what was counted."""
    del arguments
    cluster = mgpu_tf.ClusterConfig.from_environment()
    processes = cluster.num_workers if cluster else 1
    devices = processes if cluster else DEVICES.value
    strategy = mgpu_tf.create_model_parallel_strategy(
        num_virtual_devices=None if cluster else devices,
        communication=COMMUNICATION.value,
        **{LAYOUT.value: devices},
    )
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH))
    began = time.perf_counter()
    nodes = nodes_of(
        lambda: trainer.fit(
            x.astype("float32"),
            x.astype("float32"),
            batch_size=ROWS,
            verbose=0,
        )
    )
    seconds = time.perf_counter() - began
    kinds = collections.Counter(node.op for node in nodes)
    print(
        json.dumps(
            {
                "layout": LAYOUT.value,
                "devices": devices,
                "processes": processes,
                "blocks": BLOCKS.value,
                "communication": COMMUNICATION.value,
                "copies": kinds["_Send"] + kinds["_HostSend"],
                "collectives": sum(
                    count
                    for kind, count in kinds.items()
                    if kind.startswith("Collective")
                ),
                "nodes": len(nodes),
                "first_step_seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
