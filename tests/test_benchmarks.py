import json

import pytest

from experiments.benchmarks import results
from experiments.benchmarks.jobs import JOBS
from experiments.benchmarks.runner import (
    Contestant,
    Failed,
    Rates,
    alternate,
    check_losses,
)
from experiments.benchmarks.table import BENCHMARKS, Ratio

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
    value = json.loads((tmp_path / results.JSON).read_text())
    assert [entry["name"] for entry in value["results"]] == ["other", "speed"]
    assert value["failed"] == {}
    assert {"machine", "date", "command"} <= set(value)
    text = (tmp_path / results.TEXT).read_text()
    assert "| ours | theirs | **2.00** | 1.00 - 3.00 | 3 |" in text
    assert ">= 3 (missed)" in text


def contestant(name, **options):
    same = options.pop("same_job", True)
    return Contestant(name, "tests.sleeper", options, same_job=same)


def test_alternation_of_real_processes(tmp_path):
    rates = alternate(
        [
            contestant("fast", step_seconds=0.01),
            contestant("slow", step_seconds=0.03),
            contestant("broken", error="no such thing"),
        ],
        "tiny",
        check_steps=2,
        burst_seconds=0.1,
        rounds=3,
        log_folder=str(tmp_path),
    )
    assert rates.losses == {"fast": 2.0, "slow": 2.0}
    assert rates.failed == {"broken": "ValueError: no such thing"}
    assert [len(found) for found in rates.rates.values()] == [3, 3]
    (row,) = results.rows("x", [Ratio("fast", "slow")], rates)
    assert row["ratio_median"] > 1.5


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
    for ratio in benchmark.ratios:
        assert {ratio.contestant, ratio.baseline} <= set(names)
    assert benchmark.job in JOBS


@pytest.mark.parametrize("job", JOBS.values())
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_of_workers_are_the_global_batches(job, workers):
    x, _ = job.data(workers)
    parts = [job.part(index, workers)[0] for index in range(workers)]
    first = sum(len(part[0]) for part in parts)
    assert first == job.batch(workers)
    rows = [row for part in parts for row in part[0]]
    assert all((a == b).all() for a, b in zip(rows, x, strict=False))
