"""Weights that are split over the devices of all workers.

A job makes a strategy of its own over a mesh, and the same in each process.
"""

import contextlib
import errno
import functools
import os
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.checkpoints import parts, store
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.saving.writer import Variables as StoredVariables
from mgpu_tf.checkpoints.saving.writer import Writer
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.snapshot import Snapshot, Variables
from mgpu_tf.errors import CheckpointError
from mgpu_tf.reports.report import weights_sha256
from mgpu_tf.strategies.peers import Peers
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas import mirrored
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable
from tests.engine import tensor_models as models
from tests.parity import cases
from tests.strategies import test_bytes_between_devices as counted

# 6 steps in each of 3 epochs; the last batch has 7 rows.
EXAMPLES = 5 * cases.BATCH_SIZE + 7
# (data, fsdp, tensor) by the replicas there are.
MESHES = {2: [(1, 2, 1)], 3: [(1, 3, 1)], 4: [(1, 4, 1), (2, 2, 1)]}
# Of layers in parts: in each process, and over processes.
IN_PARTS = {
    2: [(1, 1, 2)],
    4: [(2, 1, 2), (1, 1, 4), (1, 2, 2)],
    8: [(2, 2, 2)],
}

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


def spread_table():
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            mgpu_tf.layers.ShardedEmbedding(9, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(cases.CLASSES),
        ]
    )
    arguments = {k: v() if callable(v) else v for k, v in COMPILE.items()}
    model.compile(mgpu_tf.optimizers.LazyAdam(0.01), **arguments)
    return model


def in_parts(model):
    """Returns what builds a model with an optimizer of its own."""

    def build(optimizer, **options):
        return model(optimizer(0.02, epsilon=1e-3, **options))

    return build


def cnn(optimizer):
    # A mesh may split the batch, and statistics are of the whole one.
    return models.cnn(optimizer, synchronized=True)


def named(data):
    x, y = data()
    return {"x": x, "y": y}


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


ROWS_IN_PARTS = {
    f"parts_{name}": cases.Case(
        functools.partial(model, keras.optimizers.Adam, global_clipnorm=0.5),
        functools.partial(named, data),
    )
    for name, model, data in (
        ("mlp", in_parts(models.mlp), models.mlp_data),
        ("cnn", in_parts(cnn), models.cnn_data),
        ("transformer", in_parts(models.transformer), models.transformer_data),
    )
}


def experts():
    return models.switch(keras.optimizers.Adam(0.02, epsilon=1e-3), 12, 0.5)


def strategy_of(given, mesh=None, shard="weights", **options):
    """Returns a strategy over the devices of the one that a job was given."""
    topology = topology_of(given)
    data, fsdp, tensor = mesh or MESHES[topology.local.total][0]
    return mgpu_tf.create_model_parallel_strategy(
        data,
        fsdp,
        tensor,
        **options,
        shard=shard,
        num_virtual_devices=topology.local.count,
        # Of the small weights of tests the large ones are split.
        smallest_split=4,
    )


def result_file(folder, row, mesh):
    sizes = "x".join(map(str, mesh))
    return os.path.join(folder, f"{row}-{sizes}.npz")


def trained(row, case, meshes, **options):
    """Returns a job that trains a row on each mesh."""

    def job(given, folder):
        cases.set_floatx("float64")
        hashes = []
        for mesh in meshes[given.num_replicas_in_sync]:
            result = cases.run(case, strategy_of(given, mesh, **options))
            hashes.append(weights_sha256(result.weights))
            if topology_of(given).is_chief:
                result.save(result_file(folder, row, mesh))
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
        held = [v.value.reader is not None for v in split_of(trainer)]
        if topology_of(given).is_chief:
            # In an order and a number of reads of its own.
            for variable in [*split_of(trainer)[::-1], split_of(trainer)[0]]:
                variable.numpy()
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

    refused(lambda: strategy_of(given, (3, replicas, 1)))
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


WEIGHTS = {
    "matrix": np.arange(70, dtype="float64").reshape(14, 5),
    "vector": np.arange(9, dtype="float32"),
    "count": np.int64(2**60 + 1),
}


def made_of(strategy, weights):
    with strategy.scope():
        return [
            keras.Variable(w, dtype=w.dtype.name, trainable=w.ndim > 0)
            for w in weights
        ]


def in_parts(given, folder):
    """What each process writes of a checkpoint, and reads of it."""
    found = {}
    for name, strategy in (("split", strategy_of(given)), ("whole", given)):
        path = os.path.join(folder, f"parts-{name}")
        snapshot = snapshot_of(made_of(strategy, WEIGHTS.values()), strategy)
        peers = Peers(strategy)
        with peers.together("save"):
            writer = Writer(
                path, peers.token(), peers.worker, peers.num_workers
            )
            writer.begin(1, snapshot.pieces())
            writer.finish({}, 3)
            peers.any(False)
        stored = Counted(Stored(store.newest(path).path))
        others = made_of(strategy, map(np.zeros_like, WEIGHTS.values()))
        snapshot_of(others, strategy).put(stored)
        found[name] = {
            "read": stored.bytes,
            "equal": [
                bool(np.array_equal(keras.ops.convert_to_numpy(v), w))
                for v, w in zip(others, WEIGHTS.values(), strict=True)
            ],
        }
    return found


def read_only(given, folder):
    """What a save raises where one process cannot write, and when."""
    snapshot = snapshot_of(made_of(given, WEIGHTS.values()), given)
    peers = Peers(given)
    fails = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with peers.together("save"):
        path = os.path.join(folder, "read_only")
        writer = Writer(path, peers.token(), peers.worker, peers.num_workers)
        writer.begin(1, snapshot.pieces())
        began, text = time.monotonic(), ""
        leaving = mock.patch.object(parts, "_leave", side_effect=fails)
        with leaving if peers.worker else contextlib.nullcontext():
            try:
                writer.finish({}, 3)
            except (OSError, CheckpointError) as error:
                text = str(error)
        seconds = time.monotonic() - began
        peers.any(False)
    return {"text": text, "seconds": seconds}


def snapshot_of(variables, strategy):
    return Snapshot(Variables.of(variables), strategy, stored_once=False)


class Counted(StoredVariables):
    """Counts the bytes that are read."""

    bytes = 0

    def read(self, name, region):
        found = super().read(name, region)
        self.bytes += found.nbytes
        return found


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


def first_values(given, folder):
    """What variables begin with, where each worker has another value.

    Large ones are sent in parts: here, as if a message had 64 bytes at most.
    """
    del folder
    found = {}
    worker = topology_of(given).local.process
    sharded = mgpu_tf.create_strategy("fsdp")
    before, mirrored.MOST_SENT_BYTES = mirrored.MOST_SENT_BYTES, 64
    try:
        for name, strategy in {"mirrored": given, "fsdp": sharded}.items():
            for dtype in ("float32", "float64", "bfloat16", "int64"):
                value = tf.reshape(
                    tf.range(77 * worker, 77 * worker + 77), [7, 11]
                )
                with strategy.scope():
                    held = tf.Variable(tf.cast(value, dtype))
                found[f"{name} {dtype}"] = (
                    tf.cast(held, tf.int64).numpy().tolist()
                )
                assert held.dtype == dtype
            with strategy.scope():
                split = keras.Variable(
                    lambda shape, dtype: float(worker) + tf.zeros(shape, dtype),
                    (64, 64),
                    "float32",
                )
            found[f"{name} weight"] = np.unique(split).tolist()
    finally:
        mirrored.MOST_SENT_BYTES = before
    return found


JOBS = {
    job.__name__: job
    for job in (
        kinds,
        first_values,
        stored,
        saved,
        in_parts,
        read_only,
        mistakes,
        checkpointed,
        bytes_on_the_wire,
    )
}
# A case and its meshes, by the replicas there are.
TRAINED = {row: (case, MESHES) for row, case in ROWS.items()}
TRAINED |= {row: (case, IN_PARTS) for row, case in ROWS_IN_PARTS.items()}
JOBS |= {row: trained(row, *each) for row, each in TRAINED.items()}
TRAINED["parts_by_batch"] = (
    ROWS_IN_PARTS["parts_mlp"],
    {2: [(2, 1, 1)], 4: [(4, 1, 1), (2, 1, 2)]},
)
JOBS["parts_by_batch"] = trained(
    "parts_by_batch",
    *TRAINED["parts_by_batch"],
    layout={
        ".*dense[^/]*/kernel": (None, "batch"),
        ".*dense[^/]*/bias": ("batch",),
    },
)
TRAINED["experts"] = (
    cases.Case(experts, functools.partial(named, models.transformer_data)),
    {2: [(2, 1, 1), (1, 2, 1)], 3: [(3, 1, 1)], 4: [(2, 2, 1), (2, 1, 2)]},
)
JOBS["experts"] = trained(
    "experts",
    *TRAINED["experts"],
    layout={".*/(inner|outer)/kernel": ("batch", None, None)},
)
TRAINED["spread_table"] = (
    cases.Case(spread_table, sentences),
    {2: [(2, 1, 1)], 3: [(3, 1, 1)], 4: [(4, 1, 1), (2, 1, 2)]},
)
JOBS["spread_table"] = trained("spread_table", *TRAINED["spread_table"])
# It ends the cluster.
JOBS["alone"] = alone
