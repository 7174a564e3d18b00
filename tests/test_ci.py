"""How a run of CI decides, and what its plugins of pytest note."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests import ci, clusters, tiers

SUITE = """
import pytest

def test_passes():
    pass

def test_fails():
    assert False

@pytest.fixture
def bad_end():
    yield
    assert False

def test_ends_badly(bad_end):
    total = sum(range(20_000_000))

def test_is_skipped():
    pytest.skip("why")
"""
PASSES, FAILS, ENDS_BADLY, SKIPPED = (
    f"test_suite.py::test_{name}"
    for name in ("passes", "fails", "ends_badly", "is_skipped")
)


@pytest.fixture
def run_suite(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)

    def run(*options):
        record = tmp_path / "made" / "record.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--rootdir=."),
                *("-p", "tests.record", f"--record={record}"),
                *("-p", "tests.deadline", *options),
            ],
            cwd=tmp_path,
            env=clusters.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return done, json.loads(record.read_text())

    return run


@pytest.mark.parametrize("processes", tiers.tiered([0, 2], [0]))
def test_what_became_of_each_test(processes, run_suite):
    in_time = f"--until={time.time() + clusters.LIMIT_SECONDS}"
    done, record = run_suite(f"--numprocesses={processes}", in_time)
    assert done.returncode == 1, done.stderr
    assert record["outcomes"] == {
        PASSES: "passed",
        FAILS: "failed",
        ENDS_BADLY: "failed",
        SKIPPED: "skipped",
    }
    assert record["tests"][ENDS_BADLY] > 0
    assert set(record["files"]) == {"test_suite.py", "between tests"}
    parts = sum(record["files"].values())
    assert record["processor_seconds"] == pytest.approx(parts, abs=0.2)


@pytest.mark.parametrize("processes", tiers.tiered([0, 2], [0]))
def test_a_run_whose_time_is_over_is_red(processes, run_suite):
    done, record = run_suite(f"--numprocesses={processes}", "--until=1")
    assert done.returncode == 1
    assert "4 tests NOT RUN: the time is over" in done.stdout
    assert set(record["outcomes"].values()) == {"not run"}


def test_a_run_in_a_drawn_order_may_leave_tests(run_suite):
    done, record = run_suite("--until=1", "--drawn-by=0a1b")
    assert done.returncode == 0
    assert "4 tests NOT RUN: the time is over" in done.stdout
    assert set(record["outcomes"].values()) == {"not run"}


@pytest.fixture
def tier(tmp_path, monkeypatch):
    """Runs a tier whose tests end as they are told, in one run and the next."""

    def run_tier(*runs):
        ends = iter(runs)
        asked = []

        def run(*command):
            asked.append(command)
            status, outcomes = next(ends)
            record = command[-1].partition("--record=")[2].split()[0]
            with open(record, "w") as file:
                values = {"processor_seconds": 60, "files": {}}
                json.dump(values | {"outcomes": outcomes}, file)
            return status

        monkeypatch.setattr(ci, "RECORDS", tmp_path)
        monkeypatch.setattr(ci, "run", run)
        return ci.tier("test"), asked

    return run_tier


def test_a_green_tier_runs_once(tier):
    decided, asked = tier((0, {"a": "passed", "b": "skipped"}))
    assert decided == (True, [])
    assert len(asked) == 1


def test_what_passes_alone_is_flaky(tier, tmp_path):
    decided, asked = tier(
        (2, {"a[x y]": "failed", "b": "passed"}), (0, {"a[x y]": "passed"})
    )
    assert decided == (True, ["a[x y]"])
    assert "THREE=--numprocesses=0" in asked[1]
    assert f"@{tmp_path / 'test-again.txt'}" in asked[1][-1]
    assert (tmp_path / "test-again.txt").read_text() == "a[x y]\n"
    # Where the time is over, one that failed has some of its own.
    untils = [
        float(command[-1].partition("--until=")[2].split()[0])
        for command in asked
    ]
    assert untils[1] > untils[0]


@pytest.mark.parametrize("again", ["failed", "skipped", None])
def test_what_fails_again_is_red(again, tier):
    outcomes = {"a": "passed"} | ({"b": again} if again else {})
    status = 2 if again == "failed" else 0
    decided, _ = tier((2, {"a": "failed", "b": "failed"}), (status, outcomes))
    assert decided == (False, ["a"])


@pytest.mark.parametrize(
    "outcomes",
    [
        {},
        {"a": "passed"},
        {str(n): "failed" for n in range(ci.MOST_FLAKY + 1)},
    ],
)
def test_what_is_no_chance_is_red_at_once(outcomes, tier):
    """As an error while tests are collected, or very many failures."""
    decided, asked = tier((2, outcomes))
    assert decided == (False, [])
    assert len(asked) == 1


def test_a_run_that_left_no_record_is_red(tmp_path, monkeypatch):
    monkeypatch.setattr(ci, "RECORDS", tmp_path)
    monkeypatch.setattr(ci, "run", lambda *_: 1)
    assert ci.tier("test") == (False, [])


class Item:
    """What the tiers read of a test.

    Args:
        nodeid: Pytest's name of it.
    """

    def __init__(self, nodeid):
        self.nodeid = nodeid
        self.marks = {"full"}

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.marks.add(mark.name)


def test_the_full_tier_has_one_case_of_a_test_and_those_that_saw_a_fault():
    faults = json.loads(tiers.FAULTS.read_text())["faults"].values()
    [seeing, *_] = [f["test"] for f in faults if f["seen"] == "full"]
    seen = Item(seeing)
    cases = [Item(f"tests/a.py::test_b[{column}]") for column in range(9)]
    whole = [Item(f"tests/launch/a.py::test_b[{each}]") for each in range(3)]
    others = [Item(f"{seeing.partition('[')[0]}[{each}]") for each in range(9)]
    tiers.leave_to_the_matrix([*cases, seen, *others, *whole])
    assert sum("matrix" not in case.marks for case in cases) == 1
    assert "matrix" not in seen.marks
    assert sum("matrix" not in case.marks for case in others) <= 1
    assert not any("matrix" in case.marks for case in whole)


def test_files_that_wait_come_in_turn_with_others():
    names = ["data/a.py::x", "data/a.py::y", "data/b.py::x", "data/c.py::x"]
    names += ["launch/a.py::x", "launch/b.py::x", "launch/b.py::y"]
    items = [Item(f"tests/{name}") for name in names]
    ordered = [
        item.nodeid.removeprefix("tests/") for item in tiers.in_turn(items)
    ]
    assert ordered == [names[at] for at in (4, 0, 1, 5, 6, 2, 3)]
    drawn = [tiers.in_turn(items, f"commit {n}") for n in range(9)]
    assert all(sorted(each, key=items.index) == items for each in drawn)
    assert {each[0] for each in drawn} == {items[4], items[5]}
    assert {each[-1] for each in drawn} == {items[1], items[2], items[3]}


@pytest.mark.parametrize("name", tiers.LONG)
def test_each_test_that_the_release_runs_is_there(name):
    file, _, test = name.partition("::")
    text = pathlib.Path(clusters.ROOT, file).read_text()
    assert f"def {test}(" in text
    case = Item(f"{name}[a]")
    tiers.leave_to_the_matrix([case])
    assert "matrix" in case.marks


@pytest.mark.full
def test_each_process_finds_the_same_tests():
    """Names of tests hold no order of a set, which each process draws."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    found = [
        subprocess.Popen(
            [*command, "--numprocesses=0"],
            cwd=clusters.ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "123"
    ]
    first, *others = (
        [line for line in process.communicate()[0].splitlines() if "::" in line]
        for process in found
    )
    assert len(first) > 1000
    for other in others:
        assert other == first
