"""Gradients of embedding tables: every optimizer, and rows that are summed.

Keras's own `fit` on one device is the reference: weights, slots, losses.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.exchange.embedding_rows import RowGather, summed_rows
from mgpu_tf.options import StepOptions
from tests import partition_graphs
from tests.parity import cases
from tests.tiers import tiered

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "adamax": lambda: keras.optimizers.Adamax(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "clipvalue": lambda: keras.optimizers.Adam(0.05, clipvalue=0.002),
    "ema": lambda: keras.optimizers.Adam(
        0.05, use_ema=True, ema_overwrite_frequency=3
    ),
}


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    "name", tiered(list(OPTIMIZERS), [], ["lamb", "adafactor", "ema"])
)
def test_as_keras(name, strategies):
    case = cases.Case(cases.text_model(OPTIMIZERS[name]), cases.text)
    reference = cases.run_stock(case)
    result = cases.run(case, strategies["mirrored_x3"])
    assert result.loss_difference(reference) < 1e-12
    assert result.largest_difference(reference) < 1e-12


class Places(keras.layers.Layer):
    """Looks up the places of a sequence, which are the same in all rows."""

    def build(self, shape):
        self.table = keras.layers.Embedding(shape[1], 3)
        self.table.build(())

    def call(self, x):
        return x[..., None] * self.table(keras.ops.arange(x.shape[1]))


def test_rows_that_all_replicas_look_up_are_summed(strategies):
    def build():
        model = keras.Sequential(
            [
                keras.Input((cases.FEATURES,)),
                Places(),
                keras.layers.Flatten(),
                keras.layers.Dense(cases.CLASSES),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), cases.CROSS_ENTROPY["loss"]())
        return model

    case = cases.Case(build, cases.classes)
    reference = cases.run_stock(case)
    result = cases.run(case, strategies["mirrored_x3"])
    assert result.loss_difference(reference) < 1e-12
    assert result.largest_difference(reference) < 1e-12


ROWS, WIDTH = 1013, 5


def table_model(optimizer, spread=False, masks=True):
    normal = keras.initializers.RandomNormal

    def table():
        start = normal(seed=1)
        if spread:
            return mgpu_tf.layers.ShardedEmbedding(ROWS, WIDTH, start)
        return keras.layers.Embedding(
            ROWS, WIDTH, start, mask_zero=masks, name="table"
        )

    def build():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                table(),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1, kernel_initializer=normal(seed=2)),
            ]
        )
        model.compile(optimizer(), "mse")
        return model

    return build


def graphs_of(trainer):
    """The graphs of a step, of its branches and loops too."""
    for key, function in trainer._distributed.engine._functions.items():
        if key[0] == "train":
            for concrete in function._list_all_concrete_functions():
                yield concrete.graph
                for name in concrete.graph._functions:
                    yield concrete.graph._get_function(name).graph


def whole_tables(trainer, rows=(ROWS,)):
    """The operations of a step that make as much as a table."""
    return {
        op.type
        for graph in graphs_of(trainer)
        for op in graph.get_operations()
        for made in op.outputs
        if made.shape.rank == 2 and made.shape[0] in rows
    }


LARGE = {
    "sgd": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "lazy_adam": lambda: mgpu_tf.optimizers.LazyAdam(0.05, amsgrad=True),
}


FITTED = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def lookups():
    """Ids that come again, and that one replica alone has; some batches
    look up no row of some part."""
    random = np.random.default_rng(0)
    x = random.integers(0, ROWS, (55, 4))
    x[::3] = x[0]
    x[16:32] %= 300
    x[-1] = -1  # The last row of the table.
    return x, random.normal(size=(55, 1))


def check_state(model, alone):
    """Compares weights and slots."""
    ours = [*model.weights, *model.optimizer.variables]
    theirs = [*alone.weights, *alone.optimizer.variables]
    for mine, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), wanted.numpy(), rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        [
            (column, name)
            for column in ("one_device", "mirrored_x3", "central_storage_x2")
            for name in LARGE
        ],
        [("mirrored_x3", "lazy_adam")],
    ),
)
def test_a_step_makes_no_whole_table(column, name, strategies):
    """And its numbers are those of Keras, which does."""
    x, y = lookups()
    trainer = mgpu_tf.Trainer(table_model(LARGE[name]), strategies[column])
    trainer.fit(x, y, **FITTED)
    assert trainer.fused["Embedding"] == 1
    assert whole_tables(trainer) == set()
    alone = table_model(LARGE[name])()
    start = alone.weights[0].numpy()
    alone.fit(x, y, **FITTED)
    check_state(trainer.model, alone)
    looked_up = np.unique(x % ROWS)
    others = np.setdiff1d(np.arange(ROWS), looked_up)
    table = trainer.model.weights[0].numpy()
    np.testing.assert_array_equal(table[others], start[others])
    assert np.all(table[looked_up] != start[looked_up])


# Meshes, and whether the layer is one of this package. The rows of a part are
# on one device.
SPREAD = {
    "data": ({"data": 3}, True),
    "layout": ({"data": 3, "layout": {".*table/.*": ("batch", None)}}, False),
    "tensor": ({"tensor": 3, "smallest_split": 0}, False),
    "data_2_tensor_2": ({"data": 2, "tensor": 2}, True),
    "data_2_of_tensor": (
        {"data": 2, "tensor": 2, "layout": {".*table/.*": ("model", None)}},
        False,
    ),
}


def spread_over(name):
    options, spread = SPREAD[name]
    sizes = [options.get(axis, 1) for axis in ("data", "tensor")]
    strategy = mgpu_tf.create_model_parallel_strategy(
        **options, num_virtual_devices=sizes[0] * sizes[1]
    )
    return strategy, spread


@pytest.mark.parametrize(
    ("mesh", "name"),
    tiered(
        [
            (mesh, name)
            for mesh in SPREAD
            for name in (*LARGE, "momentum", "adamw", "ema")
        ],
        [("data", "lazy_adam"), ("tensor", "adagrad")],
    ),
)
def test_tables_whose_rows_are_spread(mesh, name):
    """The numbers of a Keras Embedding on one device, no part read whole."""
    x, y = lookups()
    strategy, spread = spread_over(mesh)
    if spread:
        x %= ROWS  # This layer takes no negative ids.
    optimizer = (LARGE | OPTIMIZERS)[name]
    trainer = mgpu_tf.Trainer(table_model(optimizer, spread), strategy)
    trainer.fit(x, y, **FITTED)
    table = trainer.model.layers[0].weights[0].value
    assert [part.shape for part in table.values] != [table.shape]
    parts = {part.shape[0] for part in table.values}
    assert ROWS not in parts
    if name in LARGE:
        assert whole_tables(trainer, {ROWS, *parts}) == set()
    alone = table_model(optimizer, masks=not spread)()
    alone.fit(x, y, **FITTED)
    check_state(trainer.model, alone)
    np.testing.assert_allclose(
        trainer.predict(x, verbose=0),
        alone.predict(x, verbose=0),
        rtol=0,
        atol=1e-13,
    )


def test_a_spread_table_is_saved_as_one(tmp_path):
    strategy, _ = spread_over("data")
    x, y = lookups()
    x %= ROWS
    build = table_model(LARGE["adagrad"], spread=True)
    trainer = mgpu_tf.Trainer(build, strategy)
    trainer.fit(x, y, **FITTED)
    trainer.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    check_state(loaded, trainer.model)
    assert loaded.layers[0].embeddings.shape == (ROWS, WIDTH)


def test_a_spread_table_goes_on_from_checkpoints(tmp_path):
    """On another mesh too, with the numbers of one device."""
    x, y = lookups()
    x %= ROWS
    build = table_model(LARGE["lazy_adam"], spread=True)
    folder = str(tmp_path / "run")
    for mesh, epochs in (("data", 1), ("data_2_tensor_2", 2)):
        trainer = mgpu_tf.Trainer(build, spread_over(mesh)[0])
        trainer.fit(x, y, **FITTED | {"epochs": epochs}, checkpoint_dir=folder)
    alone = table_model(LARGE["lazy_adam"], masks=False)()
    alone.fit(x, y, **FITTED)
    assert int(trainer.model.optimizer.iterations.numpy()) == 8
    check_state(trainer.model, alone)


@pytest.mark.parametrize(
    ("spread", "wrong", "said"),
    [(True, -1, "not be negative"), (False, ROWS, "less than input_dim")],
)
def test_ids_that_no_part_has(spread, wrong, said):
    strategy, _ = spread_over("data" if spread else "layout")
    x, y = lookups()
    x %= ROWS
    x[40, 2] = wrong
    trainer = mgpu_tf.Trainer(table_model(LARGE["sgd"], spread), strategy)
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        trainer.fit(x, y, **FITTED)


def summed_alone(x, y):
    """Adam by hand on the gradient of the loss, dense: one step."""
    keras.utils.set_random_seed(0)
    model = cases.text_model(lambda: keras.optimizers.Adam(0.05))()
    with tf.GradientTape() as tape:
        loss = model.loss(y, model(x))
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    return [
        w.numpy() - 0.05 * g / (np.sqrt(g**2) + 1e-7 / np.sqrt(1e-3))
        for w, g in zip(
            weights,
            [tf.convert_to_tensor(g).numpy() for g in gradients],
            strict=True,
        )
    ]


@pytest.mark.parametrize(
    "column",
    tiered(
        ["one_device", "mirrored_x3", "central_storage_x2"], ["mirrored_x3"]
    ),
)
def test_summed(column, strategies):
    data = cases.text(cases.BATCH_SIZE)
    trainer = mgpu_tf.Trainer(
        cases.text_model(lambda: keras.optimizers.Adam(0.05)),
        strategies[column],
        embedding_gradients="summed",
    )
    trainer.fit(**data, batch_size=cases.BATCH_SIZE, verbose=0, shuffle=False)
    ours = [w.numpy() for w in trainer.model.trainable_variables]
    for mine, wanted in zip(
        ours, summed_alone(data["x"], data["y"]), strict=True
    ):
        # Keras takes its betas through float32.
        np.testing.assert_allclose(mine, wanted, atol=1e-6)


@pytest.mark.full
def test_blocks_have_no_constant_of_their_size(strategies):
    """As between processes; TensorFlow computes and keeps what is constant."""
    strategy = strategies["mirrored_x3"]
    gather = RowGather(strategy, StepOptions(), apart=True)

    @tf.function
    def step(rows):
        def slices():
            context = tf.distribute.get_replica_context()
            count = rows + context.replica_id_in_sync_group
            indices = tf.range(count)
            values = tf.cast(indices, tf.float64)[:, None] * [[1.0, 2.0]]
            return tf.IndexedSlices(values, indices, tf.constant([9, 2]))

        [every] = gather([strategy.run(slices)])
        return strategy.experimental_local_results(every)

    found = []
    rows = tf.constant(2)
    graphs = partition_graphs.graphs_of(lambda: found.extend(step(rows)))
    for each in found:
        np.testing.assert_array_equal(each.indices, [0, 1, 0, 1, 2, 0, 1, 2, 3])
        np.testing.assert_array_equal(each.values[:, 1], 2 * each.indices)
    nodes = [node for every in graphs.values() for node in every]
    sizes = [node.ByteSize() for node in nodes if node.op == "Const"]
    assert 0 < max(sizes) < 4096


def test_rows_of_one_index_are_one():
    slices = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0]]), tf.constant([5, 3, 5]), None
    )
    found = summed_rows(slices)
    assert found.indices.numpy().tolist() == [5, 3]
    assert found.values.numpy().tolist() == [[5.0], [2.0]]


def test_unknown_rule(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="embedding_gradients"):
        mgpu_tf.Trainer(
            cases.text_model(keras.optimizers.Adam),
            strategies["one_device"],
            embedding_gradients="dense",
        )


@pytest.mark.parametrize("column", ["one_device", "mirrored_x3"])
def test_places_that_parts_of_a_batch_look_up(column, strategies, float64):
    """One device looks them up once: Adam squares the sum, not its parts."""

    def build():
        inputs = keras.Input((5,))
        hidden = keras.layers.Flatten()(Places()(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 5))
    y = generator.normal(size=(20, 1))
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    alone = build()
    alone.fit(x, y, **fit)
    trainer = mgpu_tf.Trainer(build, strategies[column], step_parts=2)
    trainer.fit(x, y, **fit)
    for ours, theirs in zip(
        trainer.model.get_weights(), alone.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
