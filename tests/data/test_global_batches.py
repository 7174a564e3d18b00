import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_tf import data
from mgpu_tf.data.feed import ended
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas


def passes(source, part, count, index=0):
    """The elements of a pass as arrays, for one process."""
    dataset = source.pass_dataset(index, part).take(count)
    # Not as_numpy_iterator, which takes no None with TensorFlow 2.19.
    return [
        tf.nest.map_structure(
            lambda leaf: None if leaf is None else leaf.numpy(), element
        )
        for element in dataset
    ]


def parts(total, local=1):
    return [
        LocalReplicas(first, local, total) for first in range(0, total, local)
    ]


@given(size=st.integers(0, 100), total=st.integers(1, 17))
def test_bounds_cover_every_row_once(size, total):
    every = [
        LocalReplicas(0, total, total).rows_of(size, r) for r in range(total)
    ]
    assert every[0][0] == 0
    assert every[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(every))
    lengths = [high - low for low, high in every]
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=25)
@given(
    examples=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    workers=st.integers(1, 4),
    local=st.integers(1, 3),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_global_batches_do_not_depend_on_workers(
    examples, batch_size, workers, local, shuffle, epoch
):
    """Batch k, joined over replicas, is the batch that one device sees."""
    source = data.ArraySource(
        np.arange(examples), batch_size, shuffle=shuffle, seed=5
    )
    alone = passes(source, LocalReplicas(0, 1, 1), -1, epoch)
    expected = [batch.tolist() for batch, _, _ in alone]
    total = workers * local
    joined = [[] for _ in expected]
    for part in parts(total, local):
        elements = passes(source, part, -1, epoch)
        assert len(elements) == len(expected) * local
        for position, (rows, held, size) in enumerate(elements):
            step = position // local
            # A replica without a row computes another one of the batch.
            assert max(held, 1) == len(rows)
            assert set(rows.tolist()) <= set(expected[step])
            assert size == len(expected[step])
            joined[step].extend(rows[:held].tolist())
    assert joined == expected
    assert sorted(itertools.chain(*expected)) == list(range(examples))


def test_order_is_new_each_epoch_and_set_by_the_seed():
    def order(seed, epoch):
        source = data.ArraySource(np.arange(50), 50, shuffle=True, seed=seed)
        [(rows, _, _)] = passes(source, LocalReplicas(0, 1, 1), 1, epoch)
        return rows.tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_dataset_is_cut_like_arrays(total):
    dataset = tf.data.Dataset.range(10).batch(4)
    for local in (1, total):
        rows = [[], [], []]
        for part in parts(total, local):
            for position, (batch, held, _) in enumerate(
                passes(data.DatasetSource(dataset), part, -1)
            ):
                rows[position // local].extend(batch[:held].tolist())
        assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_end_of_data_is_an_element(strategies):
    """A dataset of unknown length ends with batches of total 0."""
    dataset = tf.data.Dataset.range(5).filter(lambda i: True).batch(3)
    source = data.DatasetSource(dataset)
    assert source.steps is None
    assert source.may_end
    strategy = strategies["one_device"]
    iterator = iter(data.distribute(source, strategy))
    take = tf.function(lambda: data.next_batch(iterator, source.form, strategy))
    totals = [int(take()[2]) for _ in range(4)]
    assert totals == [3, 2, 0, 0]


@pytest.mark.parametrize(
    "element",
    [
        lambda: {"x": tf.zeros([2, 3]), "name": tf.constant(["a", "b"])},
        lambda: (tf.zeros([2, 3], tf.float16), tf.zeros([2], tf.int32)),
        lambda: tf.ragged.constant([[1, 2], [3]]),
    ],
)
def test_what_ends_the_data_has_the_same_structure(element):
    dataset = tf.data.Dataset.from_tensor_slices(element())
    dataset = dataset.batch(2).filter(lambda *_: True)
    source = data.DatasetSource(dataset)
    end, local, total = ended(source)
    tf.nest.assert_same_structure(
        end, source.example(), expand_composites=False
    )
    assert int(local) == int(total) == 0


def test_floats_become_floatx(strategies):
    source = data.as_source(
        np.zeros([3, 2]),
        np.zeros([3], np.int64),
        strategy=strategies["one_device"],
    )
    x, y = source.example()
    assert (x.dtype, y.dtype) == (tf.float32, tf.int64)


def test_dataset_fn_gets_its_place(strategies):
    seen = []

    def dataset_fn(context):
        seen.append(context)
        return tf.data.Dataset.range(4).batch(2)

    data.as_source(dataset_fn, strategy=strategies["mirrored_x4"])
    assert seen[0].num_input_pipelines == 1
    assert seen[0].num_replicas_in_sync == 4


def batched():
    return tf.data.Dataset.range(3).batch(2)


BAD = [
    (lambda: {"x": None}, "Received: None"),
    (lambda: {"x": np.zeros(3), "y": np.zeros(4)}, "same number of examples"),
    (lambda: {"x": np.zeros([0, 2])}, "1 or more"),
    (lambda: {"x": np.zeros(3), "batch_size": 0}, "1 or more"),
    (lambda: {"x": np.zeros(3), "batch_size": 2.5}, "an integer"),
    (lambda: {"x": tf.data.Dataset.range(3)}, "must be batched"),
    (lambda: {"x": batched(), "y": np.zeros(3)}, "Leave out y"),
    (lambda: {"x": batched(), "batch_size": 2}, "Leave out batch_size"),
    (lambda: {"x": lambda context: [1, 2]}, "must return a tf.data.Dataset"),
]


@pytest.mark.parametrize(("arguments", "rule"), BAD)
def test_refused_in_one_line(arguments, rule, strategies):
    with pytest.raises(ConfigurationError, match=rule) as error:
        data.as_source(**arguments(), strategy=strategies["one_device"])
    assert "\n" not in str(error.value)
