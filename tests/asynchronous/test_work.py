"""What the coordinator sends to workers, without a cluster."""

import types

import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf import data
from mgpu_tf.engine.asynchronous.schedule import work

LENGTH, BATCH = 50, 8


class Coordinator:
    """Keeps what it is told to put on every worker."""

    def create_per_worker_dataset(self, function):
        return function()


def dealt(most=4, every=1):
    """Deals three passes; returns batches, steps and bytes of each piece."""
    x = np.arange(LENGTH * 3, dtype=np.float32).reshape(LENGTH, 3)
    source = data.ArraySource((x, np.arange(LENGTH)), BATCH, True, seed=1)
    reader = work.RowReader(Coordinator(), source)
    batches, pieces = [], []
    rows = work.RowWork(reader, 0, 3 * source.steps, most, every)
    while (piece := rows.take(100)) is not None:
        steps, arguments = piece
        sent = sum(t.numpy().nbytes for t in tf.nest.flatten(arguments))
        pieces.append((steps, sent))
        read = rows.reader(rows.per_worker, arguments)
        for step in range(steps):
            batch, size = read(tf.constant(step))
            assert len(batch[0]) == size
            batches.append([leaf.numpy().tolist() for leaf in batch])
    return batches, pieces, reader


def test_rows_that_are_sent_are_those_that_are_held(monkeypatch):
    held, _, reader = dealt()
    assert reader.per_worker is not None
    monkeypatch.setattr(work, "HELD_BYTES", 0)
    sent, pieces, reader = dealt()
    assert sent == held
    assert reader.per_worker is None
    row = 3 * 4 + 8
    assert {size for _, size in pieces} == {4 * BATCH * row + 5 * 8}


@pytest.mark.parametrize(("every", "steps"), [(1, 2), (3, 3)])
def test_a_piece_of_work_has_few_bytes_and_whole_updates(
    every, steps, monkeypatch
):
    monkeypatch.setattr(work, "HELD_BYTES", 0)
    monkeypatch.setattr(work, "SENT_BYTES", 2 * BATCH * (3 * 4 + 8))
    _, pieces, _ = dealt(most=6, every=every)
    assert max(done for done, _ in pieces) == steps


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("endless", [False, True])
def test_a_worker_without_a_batch_of_its_own_reads_those_of_all(
    endless, apart, monkeypatch
):
    every = tf.data.Dataset.range(4, 9, 4)
    shards = [every]
    if not apart:
        every = every.take(1)
        shards = [every.take(0), every, every.take(0)]
    if endless:
        shards = [shard.repeat() for shard in shards]
    source = types.SimpleNamespace(
        endless=endless, shards=lambda workers: shards
    )
    dealt = work.Shards(Coordinator(), source, 3)
    read = []
    for worker in range(3):
        monkeypatch.setattr(
            tf.distribute.coordinator,
            "experimental_get_current_worker_index",
            lambda worker=worker: worker,
        )
        stream = dealt.streams()
        read.append([int(next(stream)) for _ in range(3)])
    some = [[4, 4, 4], [8, 8, 8], [4, 8, 4]] if apart else [[4, 4, 4]] * 3
    if apart and endless:  # A share of a stream goes on over its passes.
        some = [[4, 8, 4], [8, 4, 8], [4, 8, 4]]
    assert read == some
