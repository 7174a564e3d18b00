"""Unequal shares of the global batch, to the numbers of one device."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.synchronous.engine import SynchronousEngine
from mgpu_tf.strategies.peers import Peers
from mgpu_tf.strategies.replicas import balance as balance_lib
from mgpu_tf.strategies.replicas.balance import Balance, balanced, shares_for
from mgpu_tf.strategies.replicas.topology import LocalReplicas
from tests import clusters
from tests.jobs import shares as jobs
from tests.parity import cases
from tests.tiers import tiered

SIZE, BATCH = 45, 8
# What three epochs of six steps measure.
RATES = ([5.0, 2.0, 1.0], [1.0, 2.0, 5.0], [1.0, 2.0, 5.0])
CHOSEN = ((625, 250, 125), (125, 250, 625))


@pytest.mark.parametrize(
    ("given", "workers", "replicas", "bounds"),
    [
        (None, 2, 2, None),
        ("2,1", 2, 2, (0, 2, 3)),
        ("2, 1", 2, 4, (0, 2, 4, 5, 6)),
        ([3, 2, 1], 1, 3, (0, 3, 5, 6)),
        ((1, 1), 2, 2, (0, 1, 2)),
        ("auto", 2, 2, None),
    ],
)
def test_bounds(given, workers, replicas, bounds):
    found = Balance.of(given, workers, replicas)
    assert found.bounds(replicas) == bounds
    assert found.measured == (given == "auto")


@pytest.mark.parametrize(
    ("given", "workers", "part"),
    [
        ("2,1", 3, "balance='2,1' for 3. Write balance='1,1,1'"),
        ("2,0", 2, "numbers of 1 or more"),
        ("2,x", 2, "numbers of 1 or more"),
        ("2,1.5", 2, "numbers of 1 or more"),
        ("", 2, "numbers of 1 or more"),
        ([True, 1], 2, "numbers of 1 or more"),
        ("auto", 1, "Received: one worker"),
    ],
)
def test_mistakes(given, workers, part):
    with pytest.raises(mgpu_tf.ConfigurationError, match=r"^.*$") as caught:
        Balance.of(given, workers, workers)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows():
    """Shares 2, 1: the first two thirds, and each row once."""
    found = [LocalReplicas(r, 1, 2, (0, 2, 3)).rows_of(9, 0) for r in (0, 1)]
    assert found == [(0, 6), (6, 9)]
    for size in range(12):
        local = LocalReplicas(0, 3, 3, (0, 5, 6, 13))
        rows = [local.rows_of(size, replica) for replica in range(3)]
        graph = [
            tuple(map(int, local.rows_of(tf.constant(size, tf.int64), r)))
            for r in tf.range(3, dtype=tf.int64)
        ]
        assert rows == graph
        assert [a for a, _ in rows] == [0, *(b for _, b in rows[:-1])]
        assert rows[-1][1] == size


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ([1.0, 1.0], (500, 500)),
        ([100.0, 50.0], (667, 333)),
        ([1.0, 1.0, 1.0], (334, 333, 333)),
        ([1e6, 1.0], (999, 1)),
    ],
)
def test_shares_follow_rates(rates, shares):
    assert shares_for(rates) == shares


def test_only_what_saves_time_changes_shares():
    assert balanced([100.0, 50.0], None) == (667, 333)
    assert balanced([100.0, 99.0], None) is None
    assert balanced([100.0, 50.0], (660, 340)) is None
    assert balanced([50.0, 100.0], (667, 333)) == (333, 667)
    assert balanced([100.0, 0.0], None) is None
    assert balance_lib.WORTH > 0


@pytest.mark.parametrize("name", ["one_device", "central_storage", "fsdp"])
def test_other_strategies_refuse_shares(name):
    with pytest.raises(
        mgpu_tf.ConfigurationError, match="balance has an effect with"
    ):
        mgpu_tf.create_strategy(name, balance="2,1")


@pytest.fixture
def floatx():
    cases.set_floatx("float64")
    yield
    cases.set_floatx("float32")


def one_device(**options):
    """Keras's own `fit`: the losses, all variables, a prediction."""
    keras.utils.set_random_seed(0)
    with tf.device("CPU:0"):
        model = jobs.build()
        options = {"shuffle": False} | options
        history = model.fit(*jobs.data(options), epochs=3, verbose=0, **options)
    return history.history["loss"], jobs.variables(model)


def compare(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    for own, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)


KINDS = {
    "arrays": {"batch_size": BATCH, "shuffle": False},
    "a dataset": {},
    "epochs of four steps": {"steps_per_epoch": 4},
}


@pytest.mark.parametrize("kind", tiered(list(KINDS), ["arrays"]))
def test_the_numbers_of_one_device(kind, floatx, strategies):
    made = mgpu_tf.create_mirrored_strategy(
        num_virtual_devices=3, balance="5,2,1"
    )
    options = KINDS[kind]
    trainer = mgpu_tf.Trainer(jobs.build, made)
    history = trainer.fit(*jobs.data(options), epochs=3, verbose=0, **options)
    compare(
        (history.history["loss"], jobs.variables(trainer.model)),
        one_device(**options),
    )
    x, y = jobs.arrays()
    with tf.device("CPU:0"):
        alone = jobs.build()
        alone.build(x.shape)
        alone.set_weights(trainer.model.get_weights())
        expected = alone.evaluate(x, y, verbose=0)
        outputs = alone.predict(x, verbose=0)
    own = trainer.predict(x, batch_size=7, verbose=0)
    np.testing.assert_allclose(own, outputs, rtol=1e-12)
    assert trainer.evaluate(x, y, verbose=0) == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("kind", tiered(list(KINDS), ["a dataset"]))
def test_shares_that_change_after_epochs(kind, floatx, strategies, monkeypatch):
    """Data goes on where it was, and is cut by the new shares."""
    made = mgpu_tf.create_mirrored_strategy(num_virtual_devices=3)
    made.balance = Balance(measured=True)
    rates = iter(RATES)
    monkeypatch.setattr(
        Peers,
        "of_all",
        lambda self, value: (
            next(rates) if isinstance(value, float) else [value]
        ),
    )
    seen = []
    rebalance = SynchronousEngine.rebalance
    monkeypatch.setattr(
        SynchronousEngine,
        "rebalance",
        lambda self, found: (
            [
                seen.append(rebalance(self, found)),
                seen.append(made.balance.shares),
            ][0]
            or True
        ),
    )
    traced = []
    train_step = SynchronousEngine._train_step
    monkeypatch.setattr(
        SynchronousEngine,
        "_train_step",
        lambda self, *args: [train_step(self, *args), traced.append(seen[:])][
            0
        ],
    )
    options = KINDS[kind]
    trainer = mgpu_tf.Trainer(jobs.build, made)
    history = trainer.fit(*jobs.data(options), epochs=3, verbose=0, **options)
    assert seen == [True, CHOSEN[0], True, CHOSEN[1], False, CHOSEN[1]]
    # No step is traced with the new shares.
    assert traced
    assert not any(traced)
    compare(
        (history.history["loss"], jobs.variables(trainer.model)),
        one_device(**options),
    )


class Begins(keras.callbacks.Callback):
    """Notes the shares with which epochs begin."""

    def __init__(self, seen):
        super().__init__()
        self._seen = lambda: seen

    def on_epoch_begin(self, epoch, logs=None):
        self._seen().append(self.model.distribute_strategy.balance.shares)


def measures(folder, rates, monkeypatch, epochs=3):
    """Trains epochs of six steps; returns how they begin, and the trainer."""
    made = mgpu_tf.create_mirrored_strategy(num_virtual_devices=3)
    made.balance = Balance(measured=True)
    told, begins, found = iter(rates), [], []
    of_all = Peers.of_all

    def planted(self, value):
        if not isinstance(value, float):
            return of_all(self, value)
        found.append(value)
        return next(told)

    monkeypatch.setattr(Peers, "of_all", planted)
    trainer = mgpu_tf.Trainer(jobs.build, made)
    trainer.fit(
        *jobs.arrays(),
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[Begins(begins)],
        checkpoint=mgpu_tf.SaveOptions(
            checkpoint_dir=str(folder), save_every_steps=4, keep_checkpoints=9
        ),
    )
    # Operations repeat, and are timed all the same.
    assert all(rate > 0 for rate in found)
    return begins, trainer


def test_a_checkpoint_has_the_shares_of_the_next_epoch(
    floatx, strategies, monkeypatch, tmp_path
):
    begins, trainer = measures(tmp_path, RATES, monkeypatch, epochs=1)
    assert begins == [None]
    begins, resumed = measures(tmp_path, [], monkeypatch, epochs=1)
    assert begins == []
    assert resumed.strategy.balance.shares == CHOSEN[0]
    assert jobs.variables(resumed.model) == jobs.variables(trainer.model)


@pytest.mark.full
def test_a_run_that_measures_resumes_bit_for_bit(
    floatx, strategies, monkeypatch, tmp_path
):
    """Within its first and second epoch, and between two."""
    begins, whole = measures(tmp_path / "whole", RATES, monkeypatch)
    assert begins == [None, *CHOSEN]
    for step, shares in ((4, None), (8, CHOSEN[0]), (12, CHOSEN[1])):
        name = f"step-{step:010d}"
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole" / name, folder / name)
        begins, resumed = measures(folder, RATES[step // 6 :], monkeypatch)
        assert begins[0] == shares
        assert jobs.variables(resumed.model) == jobs.variables(whole.model)


def test_the_shares_of_a_checkpoint_of_more_workers_are_left(strategies):
    made = mgpu_tf.create_mirrored_strategy(num_virtual_devices=2)
    made.balance = Balance(measured=True)
    engine = mgpu_tf.Trainer(jobs.build, made)._distributed.engine
    engine.take_shares([2, 1])
    assert made.balance.bounds(2) == (0, 2, 3)
    engine.take_shares([3, 2, 1])
    assert made.balance.bounds(2) is None


@pytest.mark.full
def test_workers_that_measure(floatx, tmp_path):
    """One worker is held up in its forward pass, and gets fewer rows."""
    found = clusters.run_jobs(jobs, 2, str(tmp_path))
    expected = one_device(**KINDS["arrays"])
    for worker in found["given"]:
        compare((worker["losses"], worker["variables"]), expected)
        assert worker["shares"] == [3, 1]
    for worker in found["measured"]:
        compare((worker["losses"], worker["variables"]), expected)
        assert worker["shares"] == found["measured"][0]["shares"]
        assert worker["shares"][0] > 2 * worker["shares"][1]
    for worker in found["saved"]:
        assert worker["shares"][0] > 2 * worker["shares"][1]
        assert worker["resumed"] == worker["whole"]
    for told in found["other_shares"]:
        assert "balance" in told


def test_a_dataset_fn_is_refused():
    strategy = mgpu_tf.create_mirrored_strategy(
        num_virtual_devices=2, balance="2,1"
    )
    trainer = mgpu_tf.Trainer(jobs.build, strategy)

    def dataset_fn(context):
        data = tf.data.Dataset.from_tensor_slices((np.eye(4), np.eye(4)))
        return data.shard(context.num_input_pipelines, 0).batch(2)

    with pytest.raises(mgpu_tf.ConfigurationError, match="balance='2,1'"):
        trainer.fit(dataset_fn)
