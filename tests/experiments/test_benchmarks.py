import json
import os
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from experiments.benchmarks import growth, memory, results, shares, starts
from experiments.benchmarks.contestants import reading, tensorflow_model
from experiments.benchmarks.jobs import JOBS
from experiments.benchmarks.runner import (
    Contestant,
    Failed,
    Rates,
    alternate,
    check_losses,
)
from experiments.benchmarks.table import BENCHMARKS, Ratio
from experiments.benchmarks.worker import Place
from tests import clusters

RATES = Rates(
    {"ours": [4.0, 6.0, 5.0], "theirs": [2.0, 2.0, 5.0]},
    {"ours": 0.5, "theirs": 0.5},
    {},
)


def test_a_ratio_is_taken_within_its_round():
    (row,) = results.rows("speed", [Ratio("ours", "theirs", 3.0)], RATES)
    assert row["ratio_median"] == 2.0
    assert (row["ratio_min"], row["ratio_max"]) == (1.0, 3.0)
    assert row["alternations"] == 3
    assert (row["rate_median"], row["loss"]) == (5.0, 0.5)


def test_who_did_not_run_has_no_ratio():
    ratios = [Ratio("ours", "absent"), Ratio("absent", "ours")]
    assert results.rows("speed", ratios, RATES) == []


def test_results_take_the_place_of_older_ones(tmp_path):
    folder = str(tmp_path)
    row = results.rows("speed", [Ratio("ours", "theirs", 3.0)], RATES)
    results.write(folder, "speed", row, {"absent": "not built"}, "make bench")
    other = [row[0] | {"name": "other"}]
    results.write(folder, "other", other, {}, "make bench")
    results.write(folder, "speed", row, {}, "make bench")
    (value,) = json.loads((tmp_path / results.JSON).read_text()).values()
    assert [entry["name"] for entry in value["results"]] == ["other", "speed"]
    assert value["failed"] == {}
    assert {"machine", "date", "command"} <= set(value)
    text = (tmp_path / results.TEXT).read_text()
    assert "| ours | theirs | **2.00** | 1.00 - 3.00 | 3 |" in text
    assert ">= 3 (missed)" in text


def test_each_processor_has_a_set(tmp_path, monkeypatch):
    folder = str(tmp_path)
    row = results.rows("speed", [Ratio("ours", "theirs")], RATES)
    monkeypatch.setattr(results, "processor", lambda: "one")
    results.write(folder, "speed", row, {"absent": "not built"}, "make bench")
    monkeypatch.setattr(results, "processor", lambda: "another")
    other = [row[0] | {"name": "other"}]
    results.write(folder, "other", other, {}, "make bench")
    held = results.read(folder)
    assert [len(held[name]["results"]) for name in ("one", "another")] == [1, 1]
    assert held["one"]["machine"].startswith("one, ")
    assert held["one"]["failed"] == {"speed:absent": "not built"}
    text = (tmp_path / results.TEXT).read_text()
    titles = {"## one", "### speed", "## another", "### other"}
    assert titles <= set(text.splitlines())


def test_a_picture_answers_one_question(tmp_path):
    """Each is of the newest set that has it, and no name is of the code."""
    folder = pathlib.Path(results.__file__).parent
    sets = results.read(str(folder))
    drawn = {os.path.basename(p) for p in results.draw(sets, str(tmp_path))}
    assert drawn == {p.name for p in folder.glob("results_*.png")}
    assert drawn == set(
        re.findall(r"!\[.*\?\]\((.*)\)", (folder / results.TEXT).read_text())
    )
    for picture in results.PICTURES:
        rows = [row for one in sets.values() for row in picture.rows(one)]
        labels = {picture.label(row) for row in rows}
        assert 1 < len(labels) <= 12
        assert not any("_" in label for label in labels)


def test_what_a_span_has_of_its_own():
    spans = [("a", 0, 10), ("c", 3, 1), ("b", 2, 5), ("d", 20, 4)]
    assert dict(shares.own_times(spans)) == {"a": 5, "b": 4, "c": 1, "d": 4}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model/dense/MatMul:MatMul", "MatMul"),
        ("conv/Conv2D:_MklNativeConv2D", "Conv2D"),
        ("ExecutorState::Process", None),
        ("EagerExecute", None),
    ],
)
def test_the_type_of_an_operation(name, kind):
    assert shares.kind_of(name) == kind


def test_a_missing_package_is_named(tmp_path):
    absent = Contestant("absent", "tests.no_such_module")
    rates = alternate(
        [contestant("ours", step_seconds=0.01), absent],
        "tiny",
        check_steps=2,
        burst_seconds=0.1,
        rounds=1,
        log_folder=str(tmp_path),
    )
    assert "tests.no_such_module is missing" in rates.failed["absent"]
    assert list(rates.rates) == ["ours"]


@pytest.mark.parametrize("name", sorted(tensorflow_model.NETWORKS))
def test_networks_begin_alike(name):
    first, second = (
        tensorflow_model.build(JOBS[name]).get_weights() for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def contestant(name, **options):
    same = options.pop("same_job", True)
    copies = options.pop("copies", 1)
    return Contestant(
        name, "tests.fixed_rate", options, copies=copies, same_job=same
    )


def test_alternation_of_real_processes(tmp_path):
    rates = alternate(
        [
            contestant("fast", step_seconds=0.01),
            contestant("slow", step_seconds=0.03),
            contestant("limit", step_seconds=0.005, copies=2),
            contestant("broken", error="no such thing"),
        ],
        "tiny",
        check_steps=2,
        burst_seconds=0.1,
        rounds=3,
        log_folder=str(tmp_path),
    )
    assert rates.losses == {"fast": 2.0, "slow": 2.0, "limit": 2.0}
    assert rates.failed == {"broken": "ValueError: no such thing"}
    assert [len(found) for found in rates.rates.values()] == [3, 3, 3]
    ratios = [Ratio("fast", "slow"), Ratio("fast", "limit")]
    faster, of_limit = results.rows("x", ratios, rates)
    assert faster["ratio_median"] == 3.0
    assert of_limit["ratio_median"] == 0.5


def test_a_coordinator_answers_and_another_runs_inside(tmp_path):
    first = Contestant(
        "first",
        "tests.fixed_rate",
        {"step_seconds": 0.01},
        workers=2,
        num_ps=1,
    )
    slow = {"step_seconds": 0.03}
    second = Contestant("second", "", slow, inside="first")
    assert first.tasks == [
        ("chief", 0),
        ("worker", 0),
        ("worker", 1),
        ("ps", 0),
    ]
    rates = alternate(
        [first, second],
        "tiny",
        check_steps=2,
        burst_seconds=0.1,
        rounds=3,
        log_folder=str(tmp_path),
    )
    assert rates.losses == {"first": 4.0, "second": 4.0}
    (row,) = results.rows("x", [Ratio("first", "second")], rates)
    assert row["ratio_median"] == 3.0
    logs = sorted(path.name for path in tmp_path.iterdir())
    assert logs == [
        "first.chief.0.log",
        "first.ps.0.log",
        "first.worker.0.log",
        "first.worker.1.log",
    ]


def test_another_loss_is_refused():
    pair = [contestant("ours"), contestant("theirs")]
    check_losses(pair, {"ours": 1.0, "theirs": 1.001})
    with pytest.raises(Failed, match="same loss"):
        check_losses(pair, {"ours": 1.0, "theirs": 1.01})
    with pytest.raises(Failed, match="same loss"):
        check_losses(pair, {"ours": 1.0, "theirs": float("nan")})
    limit = contestant("limit", same_job=False)
    check_losses([*pair, limit], {"ours": 1.0, "theirs": 1.0, "limit": 9.0})


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda b: b.name)
def test_table(benchmark):
    names = [c.name for c in benchmark.contestants]
    assert len(set(names)) == len(names)
    for found in benchmark.contestants:
        assert found.inside is None or found.inside in names
    for ratio in benchmark.ratios:
        assert {ratio.contestant, ratio.baseline} <= set(names)
    assert benchmark.job in JOBS


@pytest.mark.parametrize(
    "job", [job for job in JOBS.values() if job.dataset is None]
)
def test_parts_of_workers_are_the_global_batches(job, workers=3):
    x, _ = job.data(workers)
    parts = [job.part(index, workers)[0] for index in range(workers)]
    first = sum(len(part[0]) for part in parts)
    assert first == job.batch(workers)
    rows = [row for part in parts for row in part[0]]
    assert all((a == b).all() for a, b in zip(rows, x, strict=False))


def test_starts_take_turns_after_one_that_is_dropped():
    seconds = {"ours": [9.0, 0.5, 0.25], "theirs": [9.0, 2.0, 2.0]}
    order = []

    def once(name):
        order.append(name)
        return starts.Times({name: seconds[name].pop(0)}, {name: 1.0})

    start = starts.Start(
        "start/x",
        (Ratio("ours", "theirs"),),
        (lambda: once("ours"), lambda: once("theirs")),
    )
    rates = start.measure(2)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert rates.rates == {"ours": [2.0, 4.0], "theirs": [0.5, 0.5]}
    (row,) = results.rows(start.name, start.ratios, rates, start.unit)
    assert results.told_rates(row) == "333 / 2,000 ms"


def test_a_start_that_fails_is_not_timed(monkeypatch):
    monkeypatch.setitem(starts._HELP, "broken", ("-c", "raise SystemExit(3)"))
    with pytest.raises(Failed, match="no output"):
        starts.help_of("broken")


@pytest.mark.matrix
def test_two_bare_processes_make_the_first_step_together():
    times = starts.first_step("bare_script")
    assert times.seconds["bare_script"] > 0
    assert 1.0 < times.losses["bare_script"] < 10.0


@pytest.mark.parametrize("job", ["mlp_0.1M", "mlp_1M", "mlp_5M"])
def test_growing_jobs_have_so_many_parameters(job):
    wanted = float(job.removeprefix("mlp_").removesuffix("M"))
    assert growth.millions(job) == pytest.approx(wanted, rel=5e-3)


def grown():
    points = [growth.Point(x, [9.0 * x, 2.0 + 3.0 * x]) for x in (1, 2, 4)]
    return growth.Series("replicas, tiny", "replicas", points)


def test_the_line_goes_through_the_least_times():
    assert grown().line() == pytest.approx((3.0, 2.0, 0.0), abs=1e-9)


def test_small_sizes_count_as_much_as_large_ones():
    points = [growth.Point(x, [1.1 * x]) for x in (1, 2)]
    points += [growth.Point(x, [0.9 * x]) for x in (100, 200)]
    slope, intercept, away = growth.Series("x", "y", points).line()
    assert slope == pytest.approx(0.9, rel=0.02)
    assert slope + intercept == pytest.approx(1.1, rel=0.2)
    assert 0 < away < 0.15


def test_points_take_the_place_of_older_ones():
    newer = growth.Series(
        "replicas, tiny", "replicas", [growth.Point(x, [1.0]) for x in (3, 4)]
    )
    (one,) = growth.merged([grown()], [newer])
    assert [point.x for point in one.points] == [1, 2, 3, 4]
    assert [min(point.ms) for point in one.points] == [5.0, 8.0, 1.0, 1.0]
    other = growth.Series("parameters, x", "millions", newer.points)
    assert growth.merged([other], [grown()]) == [grown(), other]
    assert growth.Series("x", "x", newer.points[:1]).line() == (0.0, 1.0, 0.0)


def test_growth_is_written_and_read(tmp_path):
    facts = {"machine": "m", "date": "d", "load": 1.0, "command": "c"}
    growth.write(str(tmp_path), [grown()], facts)
    assert growth.read(str(tmp_path)) == [grown()]
    assert growth.read(str(tmp_path / "none")) == []
    told = (tmp_path / growth.TEXT).read_text()
    assert "2 ms + 3 ms x replicas" in told
    assert "| 4 | 14 | 25 | 36 | 14 |" in told
    figure = (tmp_path / growth.FIGURE).read_bytes()
    assert figure.startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize("name", ["mirrored_x2", "mirrored_x4"])
def test_no_device_holds_more_than_its_peers(strategies, name):
    strategy = strategies[name]
    trainer = mgpu_tf.Trainer(
        lambda: tensorflow_model.build(JOBS["digits"]), strategy
    )
    x, y = np.zeros((64, 8, 8, 1), "float32"), np.zeros(64, "int32")
    trainer.fit(x, y, batch_size=32, verbose=0)
    model = trainer.model
    held = memory.bytes_by_device(strategy, memory.variables_of(model))
    assert len(held) == strategy.num_replicas_in_sync
    assert len(set(held.values())) == 1
    # Weights and momentum.
    weights = sum(4 * int(np.prod(v.shape)) for v in model.trainable_weights)
    assert min(held.values()) > 2 * weights


def test_what_one_device_alone_holds_is_seen(strategies):
    strategy = strategies["mirrored_x2"]
    with strategy.scope():
        mirrored = keras.Variable(np.zeros(3, "float32"))
    with tf.device("CPU:0"):
        alone = keras.Variable(np.zeros(5, "float32"))
    held = memory.bytes_by_device(strategy, [mirrored, mirrored, alone])
    assert sorted(held.values()) == [12, 32]


def test_both_pipelines_read_every_example():
    places = [
        Place("", "tabular", 0, 1, {"pipeline": name}, 0, -1, None, None)
        for name in ("by_hand", "mgpu_tf")
    ]
    by_hand, own = map(reading.Reading, places)
    steps = JOBS["tabular"].pass_steps
    whole = by_hand.check(steps)
    assert own.check(steps) == pytest.approx(whole, rel=1e-9)
    assert own.check(steps - 1) != pytest.approx(whole, rel=1e-3)


@pytest.mark.matrix
def test_what_watching_costs_is_measured():
    done = clusters.run(
        ["-m", "experiments.benchmarks.watching", "--rounds=2", "--steps=20"]
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"more by -?[\d.]+ %", done.stdout), done.stdout
