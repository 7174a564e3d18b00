"""Weights that are split over the devices of all workers.

A job makes a strategy of its own over a mesh, and the same in each process.
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.checkpoints import store
from mgpu_tf.engine import keras_internals
from mgpu_tf.reports.report import weights_sha256
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.sharded_variable import ShardedVariable
from tests.parity import cases
from tests.strategies import test_bytes_between_devices as counted

# 6 steps in each of 3 epochs; the last batch has 7 rows.
EXAMPLES = 5 * cases.BATCH_SIZE + 7
# (data, fsdp) by the replicas there are.
MESHES = {2: [(1, 2)], 3: [(1, 3)], 4: [(1, 4), (2, 2)]}

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
}


def mlp(optimizer):
    def build():
        model = keras.Sequential(
            [
                keras.Input((cases.FEATURES,)),
                # Adam would turn the rounding of a gradient of 0 into motion.
                layers.Dense(9, use_bias=False),
                layers.BatchNormalization(synchronized=True),
                layers.Activation("tanh"),
                layers.Dense(cases.CLASSES),
            ]
        )
        arguments = {k: v() if callable(v) else v for k, v in COMPILE.items()}
        model.compile(OPTIMIZERS[optimizer](), **arguments)
        return model

    return build


def transformer(optimizer):
    def build():
        words = keras.Input((6,), dtype="int32")
        x = layers.Embedding(9, 8)(words)
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            # The bias of keys has a gradient of 0.
            y = layers.MultiHeadAttention(2, 4, use_bias=False)(y, y)
            x = layers.Add()([x, y])
            y = layers.LayerNormalization()(x)
            y = layers.Dense(17, activation="gelu")(y)
            x = layers.Add()([x, layers.Dense(8)(y)])
        x = layers.GlobalAveragePooling1D()(x)
        model = keras.Model(words, layers.Dense(cases.CLASSES)(x))
        arguments = {k: v() if callable(v) else v for k, v in COMPILE.items()}
        model.compile(OPTIMIZERS[optimizer](), **arguments)
        return model

    return build


COMPILE = cases.CROSS_ENTROPY


def sentences():
    generator = np.random.default_rng(12)
    return {
        "x": generator.integers(0, 9, size=(EXAMPLES, 6)),
        "y": generator.integers(0, cases.CLASSES, size=EXAMPLES),
    }


ROWS = {
    f"{name}_{optimizer}": cases.Case(model(optimizer), data)
    for name, model, data in (
        ("mlp", mlp, lambda: cases.classes(EXAMPLES)),
        ("transformer", transformer, sentences),
    )
    for optimizer in OPTIMIZERS
}


def strategy_of(given, mesh=None, shard="weights"):
    """Returns a strategy over the devices of the one that a job was given."""
    topology = topology_of(given)
    data, fsdp = mesh or MESHES[topology.local.total][0]
    return mgpu_tf.create_model_parallel_strategy(
        data,
        fsdp,
        shard=shard,
        num_virtual_devices=topology.local.count,
        # Of the small weights of tests the large ones are split.
        smallest_split=4,
    )


def result_file(folder, row, mesh, shard="weights"):
    data, fsdp = mesh
    return os.path.join(folder, f"{row}-{data}x{fsdp}-{shard}.npz")


def trained(row, shard="weights"):
    """Returns a job that trains a row on each mesh."""

    def job(given, folder):
        cases.set_floatx("float64")
        hashes = []
        for mesh in MESHES[given.num_replicas_in_sync]:
            result = cases.run(ROWS[row], strategy_of(given, mesh, shard))
            hashes.append(weights_sha256(result.weights))
            if topology_of(given).is_chief:
                result.save(result_file(folder, row, mesh, shard))
        cases.set_floatx("float32")
        return hashes

    return job


def split_of(trainer):
    model = trainer.model
    every = [*model.variables, *model.optimizer.variables]
    return [v for v in every if keras_internals.is_split(v)]


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables]


def fitted(strategy, **options):
    trainer = mgpu_tf.Trainer(mlp("adam"), strategy)
    data = cases.classes(EXAMPLES)
    trainer.fit(
        **data, batch_size=16, epochs=2, shuffle=False, verbose=0, **options
    )
    return trainer


def stored(given, folder):
    """What each process stores of the split variables, and reads of them."""
    del folder
    strategy = strategy_of(given)
    trainer = fitted(strategy)
    split = split_of(trainer)
    mine = [part for v in split for part in v.value.values]
    total = sum(v.shape.num_elements() for v in map(_value, split))
    memory = trainer.memory().rows
    return {
        "count": len(split),
        "share": sum(p.shape.num_elements() for p in mine) / total,
        "devices": sorted({part.device for part in mine}),
        "memory": [device.device for device in memory],
        "whole": weights_sha256(trainer.model.get_weights()),
    }


def _value(variable):
    return variable.value


def saved(given, folder):
    """Files by the chief, by `save` and by a callback; what was held."""
    strategy = strategy_of(given)
    path = os.path.join(folder, "split")
    best = keras.callbacks.ModelCheckpoint(
        path + "-best.keras", monitor="loss", save_best_only=True, verbose=0
    )
    last = keras.callbacks.ModelCheckpoint(
        path + "-last.weights.h5", save_weights_only=True
    )
    trainer = fitted(strategy, callbacks=[best, last])
    with trainer._distributed.whole():
        held = [v.value.held is not None for v in split_of(trainer)]
    trainer.save(path + ".keras")
    trainer.save_weights(path + ".weights.h5")
    left = values_of(trainer.model)
    if topology_of(given).is_chief:
        np.savez(path + ".npz", *left)
    return {"held": held, "files": sorted(os.listdir(folder))}


def mistakes(given, folder):
    """What is told of meshes, callbacks, reads and assignments that differ."""
    del folder
    replicas = given.num_replicas_in_sync
    me = topology_of(given).worker_index
    told = []

    def refused(action):
        try:
            action()
        except mgpu_tf.ConfigurationError as error:
            told.append(str(error))

    refused(lambda: strategy_of(given, (3, replicas)))
    strategy = strategy_of(given)

    def eager():
        model = mlp("adam")()
        model.run_eagerly = True
        return model

    refused(
        lambda: fitted(
            strategy, callbacks=[keras.callbacks.BackupAndRestore("nowhere")]
        )
    )
    refused(lambda: mgpu_tf.Trainer(eager, strategy))
    trainer = mgpu_tf.Trainer(mlp("adam"), strategy)
    # What one worker assigns alone is told, though all hold parts of it.
    weights = trainer.model.get_weights()
    weights[0] = weights[0] + me
    trainer.model.set_weights(weights)
    data = cases.classes(EXAMPLES)
    refused(lambda: trainer.fit(**data, batch_size=16, verbose=0))
    trainer = fitted(strategy)
    refused(lambda: trainer.trace(data["x"], data["y"], batch_size=16))
    return {"told": told, "sha": weights_sha256(trainer.model.get_weights())}


def alone(given, folder):
    """The chief reads a split weight alone; all end with one line."""
    del folder
    trainer = fitted(strategy_of(given))
    try:
        if topology_of(given).is_chief:
            trainer.model.get_weights()
        else:
            trainer.evaluate(**cases.classes(EXAMPLES), verbose=0)
    except mgpu_tf.ConfigurationError as error:
        return {"told": str(error)}
    return {"told": ""}


def checkpointed(given, folder):
    """A run of two epochs in a folder, in one go and in two.

    The chief leaves what the whole run ended with.
    """
    path = os.path.join(folder, "checkpoints")
    cases.set_floatx("float64")
    strategy = strategy_of(given)
    trainer = mgpu_tf.Trainer(mlp("adam"), strategy)
    data = cases.classes(EXAMPLES)
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    trainer.fit(**data, epochs=1, checkpoint_dir=path, **options)
    resumed = mgpu_tf.Trainer(mlp("adam"), strategy)
    resumed.fit(**data, epochs=2, checkpoint_dir=path, **options)
    whole = mgpu_tf.Trainer(mlp("adam"), strategy)
    other = os.path.join(folder, "whole")
    whole.fit(**data, epochs=2, checkpoint_dir=other, **options)
    left = values_of(whole.model)
    if topology_of(given).is_chief:
        np.savez(os.path.join(folder, "whole.npz"), *left)
    cases.set_floatx("float32")
    return {
        "resumed": weights_sha256(resumed.model.get_weights()),
        "whole": weights_sha256(whole.model.get_weights()),
        "step": store.newest(path).step,
    }


def bytes_on_the_wire(given, folder):
    """What a replica receives in a step, against an all-reduce of all."""
    del folder
    replicas = given.num_replicas_in_sync
    x = np.ones((4 * replicas, counted.WIDTH), "float32")
    found = {}
    for shard in ("optimizer", "gradients", "weights"):
        strategy = strategy_of(given, shard=shard)
        trainer = mgpu_tf.Trainer(counted.build, strategy)
        trainer.fit(x, x, batch_size=2 * replicas, verbose=0)
        all_reduce = 2 * (replicas - 1) / replicas * counted.BYTES
        moved = received(counted.body_of(trainer), replicas)
        found[shard] = moved / all_reduce
    return found


def received(graph, replicas):
    """The bytes that the first replica of a process receives in a graph."""
    share = {
        "CollectiveReduceV2": 2 * (replicas - 1) / replicas,
        "CollectiveGatherV2": replicas - 1,
        "CollectiveAllToAllV2": (replicas - 1) / replicas,
    }
    total = 0
    for op in graph.get_operations():
        if op.type.startswith("Collective") and not counted.device(op):
            sent = op.inputs[0]
            size = sent.shape.num_elements() * sent.dtype.size
            total += share[op.type] * size
    return total


def kinds(given, folder):
    """Strategies by name, from the environment."""
    del folder
    local = topology_of(given).local
    strategy = mgpu_tf.create_strategy(
        "fsdp", num_virtual_devices=local.count, shard="optimizer"
    )
    with strategy.scope():
        large = keras.Variable(np.ones((64, 64), "float32"))
        small = keras.Variable(np.ones((3, 3), "float32"))
    return {
        "mesh": str(strategy.mesh),
        "workers": topology_of(strategy).num_workers,
        "replicas": strategy.num_replicas_in_sync,
        "split": [isinstance(v.value, ShardedVariable) for v in (large, small)],
        "is_mwms": isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        ),
    }


JOBS = {
    job.__name__: job
    for job in (kinds, stored, saved, mistakes, checkpointed, bytes_on_the_wire)
}
JOBS |= {row: trained(row) for row in ROWS}
# It ends the cluster.
JOBS["alone"] = alone
