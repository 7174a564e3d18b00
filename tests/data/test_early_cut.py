"""A dataset that is cut before its maps: the same batches, each row once."""

import collections
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    map_op,
    prefetch_op,
    repeat_op,
    shard_op,
    shuffle_op,
    skip_op,
    take_op,
)

from mgpu_tf import data
from mgpu_tf.data.tf_data import early_cut
from mgpu_tf.strategies.replicas.topology import LocalReplicas
from tests.data.test_global_batches import parts, passes

SIZE, LENGTH = 8, 29


class Work:
    """A map that tells which rows it mapped, and is told to be pure."""

    def __init__(self):
        self.rows = collections.Counter()
        self._lock = threading.Lock()

    def __call__(self, number):
        value = tf.numpy_function(self._mapped, [number], tf.int64, False)
        return tf.ensure_shape(value, []), tf.cast(number, tf.float32) / 3

    def _mapped(self, number):
        with self._lock:
            self.rows[int(number)] += 1
        return number * number


def numbers():
    return tf.data.Dataset.range(LENGTH)


def pair(x, y):
    return {"x": x, "twice": 2 * x}, y


PIPELINES = {
    "plain": lambda work: numbers().map(work).batch(SIZE),
    "shuffled": lambda work: (
        numbers()
        .shuffle(9, seed=3)
        .map(work, num_parallel_calls=3)
        .batch(SIZE)
        .prefetch(2)
    ),
    "shuffled_after": lambda work: (
        numbers()
        .map(work)
        .shuffle(9, seed=3)
        .map(pair)
        .batch(SIZE, drop_remainder=True)
    ),
    "unknown_length": lambda work: (
        numbers()
        .filter(lambda n: n != 4)
        .map(work)
        .prefetch(3)
        .batch(SIZE, num_parallel_calls=2)
    ),
    # A take after the map leaves rows that TensorFlow has read ahead.
    "repeated": lambda work: numbers().take(27).map(work).repeat(2).batch(SIZE),
    "batches_repeated": lambda work: (
        numbers().map(work).batch(SIZE).repeat(2).skip(1)
    ),
    "cached": lambda work: (
        numbers().shuffle(29, 1).cache().map(work).batch(SIZE)
    ),
    "batch_map": lambda work: (
        numbers()
        .map(work)
        .batch(SIZE)
        .map(lambda x, y: (tf.cast(x, tf.float64) / 7, 1 - tf.abs(y)))
    ),
}


# What the default tests leave to the full tier differs by a known operation.
DEFAULT = [
    ("shuffled", 2, 1),
    ("shuffled_after", 4, 2),
]
FULL = [
    (name, total, local)
    for name in PIPELINES
    for total, local in [(2, 1), (3, 1), (5, 1), (4, 2)]
    if (name, total, local) not in DEFAULT
]


@pytest.mark.parametrize(
    ("name", "total", "local"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_batches_are_those_of_the_dataset(name, total, local):
    """Joined over processes and in two passes; maps are called once a row."""
    alone, work = Work(), Work()
    whole = PIPELINES[name](alone)
    expected = [list(whole.as_numpy_iterator()) for _ in range(2)]
    joined = [[[] for _ in batches] for batches in expected]
    for part in parts(total, local):
        source = data.DatasetSource(PIPELINES[name](work), early=True)
        assert source.early
        elements = source.pass_dataset(0, part)
        for found in joined:
            read = list(elements.as_numpy_iterator())
            assert len(read) == len(found) * local
            for place, (rows, held, size) in enumerate(read):
                assert {len(r) for r in tf.nest.flatten(rows)} == {held}
                found[place // local].append((rows, size))
    for found, batches in zip(joined, expected, strict=True):
        for pieces, batch in zip(found, batches, strict=True):
            rows = tf.nest.map_structure(
                lambda *leaves: np.concatenate(leaves), *(p for p, _ in pieces)
            )
            tf.nest.map_structure(np.testing.assert_array_equal, rows, batch)
            sizes = {int(size) for _, size in pieces}
            assert sizes == {len(tf.nest.flatten(batch)[0])}
    if total != 5:  # 8 rows on 5 workers: some map a row of a neighbour.
        known = sum(alone.rows.values())
        dropped = 2 * (known - sum(len(b[1]) for b in expected[0] * 2) // 2)
        assert known - dropped <= sum(work.rows.values()) <= known
    else:
        assert sum(work.rows.values()) < 2 * sum(alone.rows.values())


def test_a_shuffle_after_the_map_goes_on_where_it_was():
    """Its passes are counted in the process, also those read elsewhere."""

    def dataset():
        return numbers().map(lambda n: n * n).shuffle(29, seed=1).batch(29)

    order = list(dataset().repeat(4).as_numpy_iterator())
    mine = dataset()
    first = next(mine.as_numpy_iterator())
    source = data.DatasetSource(mine, early=True)
    cut = [passes(source, LocalReplicas(0, 1, 2), -1)[0][0] for _ in range(2)]
    fourth = next(mine.as_numpy_iterator())
    np.testing.assert_array_equal(first, order[0])
    np.testing.assert_array_equal(cut[0], order[1][:14])
    np.testing.assert_array_equal(cut[1], order[2][:14])
    np.testing.assert_array_equal(fourth, order[3])


def test_batches_before_the_start_are_not_mapped():
    work = Work()
    source = data.DatasetSource(PIPELINES["shuffled_after"](work))
    assert source.enterable
    expected = list(source.batches(0).as_numpy_iterator())
    work.rows.clear()
    source.pass_over(3)
    assert not work.rows
    again = data.DatasetSource(PIPELINES["shuffled_after"](work))
    found = list(again.batches_from(0, 2).as_numpy_iterator())
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected[2:])
    assert work.rows.total() == SIZE


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_a_resumed_run_maps_nothing_of_what_was_done(
    chain, endless, strategies
):
    strategy = strategies["one_device"]

    def feed(work):
        dataset = numbers().shuffle(29, seed=2)
        dataset = dataset.repeat() if endless else dataset
        source = data.DatasetSource(dataset.map(work).batch(SIZE))
        return source, data.Feed(source, strategy, chain=chain or endless)

    def read(source, iterator, count):
        found = (
            data.next_batch(iterator, source.form, strategy)
            for _ in [0] * count
        )
        return [batch[0].numpy().tolist() for batch, _, _ in found]

    source, whole = feed(Work())
    expected = []
    for epoch in range(3):
        expected.append(read(source, whole.iterator(epoch), 4))
        if not (chain or endless):
            source.batches(0)
    work = Work()
    source, resumed = feed(work)
    resumed.resume([4, 4], 2)
    assert not work.rows
    assert read(source, resumed.iterator(2), 2) == expected[2][2:]


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (lambda: numbers().batch(2), "no map comes between range and batch"),
        (
            lambda: numbers().map(lambda n: n).filter(lambda n: True).batch(2),
            "no map comes between filter and batch",
        ),
        (
            lambda: numbers().map(lambda n: n).padded_batch(2),
            "padded batch comes after batch, or in its place",
        ),
        (
            lambda: (
                numbers()
                .map(lambda n: n)
                .batch(2)
                .map(lambda n: n - tf.reduce_max(n))
            ),
            "a map after batch may mix",
        ),
        (
            lambda: (
                numbers().map(lambda n: tf.random.uniform([], seed=3)).batch(2)
            ),
            "RandomUniform depends on the order of calls",
        ),
        (
            lambda: (
                numbers()
                .map(lambda n: tf.py_function(lambda m: m, [n], tf.int64))
                .map(lambda n: tf.ensure_shape(n, []))
                .batch(2)
                .map(tf.abs)
                .batch(2)
                .unbatch()
            ),
            "comes after batch, or in its place",
        ),
        (
            lambda: (
                numbers()
                .map(lambda n: tf.py_function(lambda m: m, [n], tf.int64))
                .batch(2)
            ),
            "it calls Python",
        ),
        (
            lambda: (
                numbers()
                .map(lambda n: n, num_parallel_calls=2, deterministic=False)
                .batch(2)
            ),
            "deterministic=False",
        ),
        (
            lambda: numbers().map(lambda n: n).batch(2, True).map(tf.abs),
            "drop_remainder=True",
        ),
    ],
)
def test_what_is_read_as_it_is(dataset, reason):
    source = data.DatasetSource(dataset(), early=True)
    assert not source.early
    assert not source.enterable
    assert reason in source.reads
    assert "every batch" in source.reads


def test_what_a_worker_is_told(strategies):
    source = data.DatasetSource(numbers().map(tf.abs).batch(2), early=True)
    assert source.reads.startswith("every element before the maps")
    one = data.as_source(
        numbers().map(tf.abs).batch(2), strategy=strategies["mirrored_x2"]
    )
    assert not one.early


@pytest.mark.parametrize("count", [2, 3])
def test_asynchronous_workers_map_their_own_batches(count):
    work = Work()
    source = data.DatasetSource(PIPELINES["shuffled"](work))
    expected = list(PIPELINES["shuffled"](Work()).as_numpy_iterator())
    shards = [
        list(
            data.DatasetSource(PIPELINES["shuffled"](work))
            .shards(count)[w]
            .as_numpy_iterator()
        )
        for w in range(count)
    ]
    for worker, shard in enumerate(shards):
        tf.nest.map_structure(
            np.testing.assert_array_equal, shard, expected[worker::count]
        )
    assert work.rows == dict.fromkeys(range(LENGTH), 1)
    repeated = numbers().map(work).batch(2).repeat(2)
    assert len(data.DatasetSource(repeated).shards(count)) == 1
    assert source.steps == len(expected)


def test_private_names_of_tf_data():
    """Fails on the release of TensorFlow that moves one of them."""
    one = dataset_ops.Dataset.range(4)
    made = {
        map_op._MapDataset: one.map(tf.abs),
        map_op._ParallelMapDataset: one.map(tf.abs, num_parallel_calls=2),
        batch_op._BatchDataset: one.batch(2),
        batch_op._ParallelBatchDataset: one.batch(2, num_parallel_calls=2),
        prefetch_op._PrefetchDataset: one.prefetch(1),
        dataset_ops._OptionsDataset: one.with_options(tf.data.Options()),
        repeat_op._RepeatDataset: one.repeat(2),
        take_op._TakeDataset: one.take(2),
        skip_op._SkipDataset: one.skip(2),
        shuffle_op._ShuffleDataset: one.shuffle(2),
        shard_op._ShardDataset: one.shard(2, 0),
    }
    known = {
        *early_cut._MAPS,
        *early_cut._BATCHES,
        *early_cut._MOVED,
    } - {"_AssertCardinalityDataset"}
    assert {kind.__name__ for kind in made} == known
    for kind, dataset in made.items():
        assert type(dataset) is kind
        assert dataset._input_dataset is one
    assert made[repeat_op._RepeatDataset]._count == 2
    mapped = made[map_op._ParallelMapDataset]
    assert mapped._deterministic == "default"
    assert mapped._num_parallel_calls == 2
    assert mapped._map_func.function(tf.constant(-3, tf.int64))[0] == 3
    assert made[batch_op._BatchDataset]._batch_size == 2
    assert not made[batch_op._BatchDataset]._drop_remainder


def test_a_release_that_moved_a_name_reads_all(monkeypatch):
    monkeypatch.setattr(early_cut, "_BATCHES", ())
    found = early_cut.early_cut_of(numbers().map(tf.abs).batch(2))
    assert "batch comes after batch" in found.reason


def test_unseeded_augmentation_is_cut():
    def flipped(number):
        return tf.image.random_flip_left_right(
            tf.fill([2, 2, 1], tf.cast(number, tf.float32))
        )

    tf.random.set_seed(None)
    assert data.DatasetSource(numbers().map(flipped).batch(2), True).early
