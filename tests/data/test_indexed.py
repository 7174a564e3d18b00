"""Examples by their number: own rows alone, the numbers of one device."""

import collections
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.util import nest

import mgpu_tf
from mgpu_tf import data
from mgpu_tf.data.sources.permutation import permuted
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas
from tests import clusters
from tests.data.test_global_batches import parts, passes
from tests.jobs import own_rows
from tests.jobs.own_rows import Counting, InBatches, build
from tests.tiers import tiered

# Batches that are begun before a step wants them: two are read at a time,
# and tf.data holds some more.
AHEAD = 12


@pytest.mark.parametrize("kind", [Counting, InBatches])
@pytest.mark.parametrize(("workers", "local"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_each_row_is_read_once_by_one_worker(kind, workers, local):
    """Batch k, joined over replicas, is the batch that one device sees."""
    length, size, index = 25, 7, 2
    expected = permuted(np.arange(length), length, 5, index)
    x = np.stack([Counting(length)[n][0] for n in expected])
    joined = [[] for _ in range(4)]
    read = collections.Counter()
    for part in parts(workers * local, local):
        rows = kind(length)
        source = data.RandomAccessSource(
            mgpu_tf.RandomAccess(rows), size, True, 5
        )
        rows.counts.clear()
        for place, element in enumerate(passes(source, part, -1, index)):
            (batch, _), held, total = element
            assert len(batch) == held
            assert total == min(size, length - place // local * size)
            joined[place // local].extend(batch)
        read.update(rows.counts)
    np.testing.assert_array_equal(np.concatenate(joined), x)
    assert read == dict.fromkeys(range(length), 1)


@pytest.mark.parametrize(
    "name", tiered(["one_device", "mirrored_x3"], ["mirrored_x3"])
)
def test_fit_is_that_of_keras(name, strategies, float64):
    length, size, epochs = 50, 8, 3
    rows = Counting(length)
    trainer = mgpu_tf.Trainer(build, strategies[name], seed=3)
    history = trainer.fit(
        mgpu_tf.RandomAccess(rows), batch_size=size, epochs=epochs, verbose=0
    )
    keras.utils.set_random_seed(3)
    model = build()
    losses = []
    everything = np.arange(length)
    for epoch in range(epochs):
        order = permuted(everything, length, 3, epoch)
        x, y = (
            np.stack(part)
            for part in zip(*map(rows.__getitem__, order), strict=True)
        )
        one = model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        losses += one.history["loss"]
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-9)
    for ours, theirs in zip(
        [*trainer.model.variables, *trainer.model.optimizer.variables],
        [*model.variables, *model.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(
            ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-12
        )
    loss = trainer.evaluate(
        mgpu_tf.RandomAccess(rows), batch_size=size, verbose=0
    )
    x, y = (
        np.stack(p)
        for p in zip(*map(rows.__getitem__, range(length)), strict=True)
    )
    assert loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-9)
    np.testing.assert_allclose(
        trainer.predict(mgpu_tf.RandomAccess(rows), batch_size=9, verbose=0),
        model.predict(x, verbose=0),
        rtol=1e-9,
    )


@pytest.mark.parametrize(
    "name",
    ["one_device", pytest.param("mirrored_x3", marks=pytest.mark.full)],
)
def test_resume_reads_nothing_of_what_was_done(
    name, strategies, tmp_path, float64
):
    """In the middle of ten million rows, bit for bit."""
    length, size, steps = 10_000_000, 8, 5

    def fit(rows, epochs, folder):
        trainer = mgpu_tf.Trainer(build, strategies[name], seed=3)
        trainer.fit(
            mgpu_tf.RandomAccess(rows),
            batch_size=size,
            steps_per_epoch=steps,
            epochs=epochs,
            checkpoint_dir=tmp_path / folder,
            verbose=0,
        )
        return [v.numpy() for v in trainer.model.variables]

    whole = fit(Counting(length), 6, "whole")
    fit(Counting(length), 4, "parts")
    rows = Counting(length)
    resumed = fit(rows, 6, "parts")
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    positions = np.arange((6 * steps + AHEAD) * size)
    order = permuted(positions, length, 3, 0).tolist()
    done, left = order[: 4 * steps * size], order[4 * steps * size :]
    # The first row tells the shapes.
    read = rows.counts - collections.Counter({0: 1})
    assert not set(done) & set(read)
    # The first two tell whether they share memory.
    assert set(left[: 2 * steps * size]) <= set(read) <= {*left, 0, 1}
    assert set(read.values()) == {1}


def test_resume_is_a_number(strategies):
    """The middle of ten million rows is entered, whatever came before."""
    rows = Counting(10_000_000)
    source = data.RandomAccessSource(mgpu_tf.RandomAccess(rows), 10, True, 0)
    feed = data.Feed(source, strategies["one_device"], chain=True)
    feed.resume([1_000_000, 1_000_000], 500_000)
    iterator = feed.iterator(2)
    (x, _), _, _ = data.next_batch(
        iterator, source.form, strategies["one_device"]
    )
    positions = np.arange(5_000_000, 5_000_010)
    expected = permuted(positions, 10_000_000, 0, 2)
    np.testing.assert_array_equal(x, np.stack([rows[n][0] for n in expected]))
    assert rows.counts.total() < 10 * AHEAD


class Rows(list):
    """A list as a source: what data sets of other packages look like."""


@pytest.mark.parametrize(
    ("examples", "function", "expected"),
    [
        # Bytes that end with zeros, as encoded data may.
        ([b"a\0", b"bc\0\0"], None, [b"a\0", b"bc\0\0"]),
        (["é", "ab"], None, ["é".encode(), b"ab"]),
        ([(1, None), (2, None)], None, ([1, 2], None)),
        ([[1.5, 2], [2.5, 3]], None, ([1.5, 2.5], [2, 3])),
        (
            [{"image": np.eye(2), "label": k} for k in range(2)],
            lambda row: (row["image"] + 1, row["label"]),
            ([np.eye(2) + 1] * 2, [0, 1]),
        ),
        ([(1, 2), (3, 4)], lambda x, y: {"sum": x + y}, {"sum": [3, 7]}),
    ],
)
def test_examples_of_any_structure(examples, function, expected):
    source = data.RandomAccessSource(
        mgpu_tf.RandomAccess(Rows(examples), function), 2, False, 0
    )
    [(batch, _, _)] = passes(source, LocalReplicas(0, 1, 1), -1)
    tf.nest.assert_same_structure(source.example(), batch)
    for leaf, value in zip(
        tf.nest.flatten(batch),
        nest.flatten_up_to(batch, expected),
        strict=True,
    ):
        if value is not None:
            expected_leaf = np.asarray(value, leaf.dtype)
            np.testing.assert_array_equal(leaf, expected_leaf)
    floats = [s for s in tf.nest.flatten(source.example()) if s is not None]
    assert tf.float64 not in [s.dtype for s in floats[:1] if s.shape.rank == 1]


def test_a_replica_without_rows():
    source = data.RandomAccessSource(
        mgpu_tf.RandomAccess(Rows([b"a", b"b"]), tf.strings.length), 2, True, 0
    )
    elements = [passes(source, part, -1) for part in parts(3)]
    assert sorted(held for [(_, held, _)] in elements) == [0, 1, 1]
    assert all(rows.dtype == np.int32 for [(rows, _, _)] in elements)


def test_memmap(tmp_path, strategies):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    x.tofile(tmp_path / "x")
    stored = np.memmap(tmp_path / "x", np.float32, "r", shape=(20, 3))
    source = data.as_source(
        mgpu_tf.RandomAccess(stored),
        strategy=strategies["one_device"],
        batch_size=6,
    )
    batches = passes(source, LocalReplicas(0, 1, 1), -1)
    np.testing.assert_array_equal(np.concatenate([b for b, _, _ in batches]), x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mgpu_tf.RandomAccess(3), "source.number.. Received: int"),
        (lambda: mgpu_tf.RandomAccess({}), "Received: dict"),
        (lambda: mgpu_tf.RandomAccess([]), "one example or more"),
        (lambda: mgpu_tf.RandomAccess([1], map=3), "map must be a function"),
        (lambda: mgpu_tf.RandomAccess([1], threads=0), "threads must be"),
    ],
)
def test_mistakes_of_making(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": [1, 2]}, "targets, weights itself. Received: y beside"),
        ({"shuffle": "batch"}, "one by one. Received: shuffle='batch'"),
        ({"validation_split": 0.5}, "validation_split takes.*RandomAccess"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_mistakes_of_fitting(arguments, message, strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(mgpu_tf.RandomAccess([1, 2]), **arguments)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            (np.zeros(3), np.zeros(1)),
            r"Received: \(3,\) after \(4,\)",
        ),
        (np.zeros(4), "one structure"),
        ((np.zeros(4), None), r"None in example 1, .* after \('\*', '\*'\)"),
        ((None, np.zeros(1)), r"None in example 1, .*\('-', '\*'\)"),
    ],
)
@pytest.mark.parametrize("name", ["one_device", "mirrored_x3"])
def test_examples_that_differ(second, message, name, strategies):
    rows = Rows([(np.zeros(4), np.zeros(1)), second])
    trainer = mgpu_tf.Trainer(build, strategies[name])
    with pytest.raises(ConfigurationError, match=message) as caught:
        trainer.fit(mgpu_tf.RandomAccess(rows), verbose=0)
    assert "\n" not in str(caught.value)


def test_a_part_that_the_first_example_lacks(strategies):
    rows = Rows([(None, np.zeros(4)), (np.ones(4), np.zeros(4))])
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    with pytest.raises(ConfigurationError, match="a value in example 1, which"):
        trainer.predict(mgpu_tf.RandomAccess(rows, lambda _, x: x), verbose=0)


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_read_their_own_rows(workers, strategies, tmp_path):
    """Real workers: the numbers of one device, no row read by two."""
    observed = clusters.run_jobs(own_rows, workers, str(tmp_path))
    for name, job in own_rows.JOBS.items():
        alone = job(strategies["one_device"], None)
        for each in observed[name]:
            np.testing.assert_allclose(
                each["losses"], alone["losses"], rtol=1e-9
            )
            for one, other in zip(
                each["weights"], alone["weights"], strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    counts = np.array([each["counts"] for each in observed["in_order"]])
    assert ((counts > 0).sum(0) == 1).all()
    assert (counts.sum(0) >= own_rows.EPOCHS).all()
    for name in ("dataset", "shuffled_after_the_map"):
        counts = np.array([each["counts"] for each in observed[name]])
        mapped = own_rows.EPOCHS * own_rows.LENGTH
        # A pass that is not needed may have been begun.
        begun = workers * AHEAD * own_rows.BATCH
        assert mapped <= counts.sum() <= mapped + begun
        assert counts.sum(1).max() < 0.8 * mapped
    counts = np.array([each["counts"] for each in observed["shuffled"]])
    ahead = counts.sum() - own_rows.EPOCHS * own_rows.LENGTH
    assert (counts.sum(0) >= own_rows.EPOCHS).all()
    assert 0 <= ahead <= workers * AHEAD * own_rows.BATCH


def test_what_each_worker_reads(strategies):
    strategy = strategies["one_device"]
    x = np.zeros([4, 1], np.float32)
    batches = tf.data.Dataset.from_tensor_slices(x).batch(2)

    def reads(data_of_any_kind):
        return data.as_source(data_of_any_kind, strategy=strategy).reads

    assert reads(x) == reads(mgpu_tf.RandomAccess(x)) == "its own rows"
    assert "every batch" in reads(batches)
    assert "RandomAccess" in reads(batches)
    assert reads(lambda context: batches) == "what the function returns for it"


DOCS = pathlib.Path(__file__).parents[2] / "docs" / "data.md"


def test_the_page_runs(strategies):
    text = DOCS.read_text().partition("### Examples by number")[2]
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]

    def classifier():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    trainer = mgpu_tf.Trainer(classifier, strategies["one_device"])
    names = {"np": np, "tf": tf, "mgpu_tf": mgpu_tf, "trainer": trainer}
    exec(script, names)
    assert trainer.examples_seen == 2 * 100 * 64
    assert trainer.model.get_weights()[0].any()
