"""Checkpoints on the disk of each machine, found together after a failure."""

import json
import os
import re
import shlex
from unittest import mock

import pytest

import mgpu_tf
from mgpu_tf.checkpoints import store
from mgpu_tf.errors import ConfigurationError
from tests import clusters, pages
from tests.jobs import local_saves
from tests.jobs.local_saves import NEWEST, OLDER, SHARED

# For each case the step that the run goes on from, and what is said of it.
CASES = {
    "nothing": (NEWEST, []),
    "lost_0": (NEWEST, ["worker 0 lacked it, and has it from worker 1"]),
    "lost_1": (NEWEST, ["worker 1 lacked it, and has it from worker 0"]),
    "lost_both": (SHARED, []),
    "torn_0": (NEWEST, ["worker 0 lacked it", "arrays-0.bin was changed"]),
    "torn_1": (NEWEST, ["worker 1 lacked it", r"has \d+ bytes of \d+"]),
    "torn_both": (OLDER, ["arrays-0.bin was changed"]),
    "no_manifest": (OLDER, ["worker 0 lacked it"]),
    "other_run": (0, []),
    "copied": (SHARED, []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def workers(folder, of_this_run):
    left_out = {*CASES, "moved"} - {*of_this_run(CASES, "case")}
    jobs = [job for job in local_saves.JOBS if job not in left_out]
    return clusters.run_jobs(local_saves, 2, folder, jobs)


def resumed_at(said):
    """The step that the first worker has said that the run goes on from."""
    found = [re.search(r"^resumed at step (\d+)", text) for text in said]
    return [int(match[1]) for match in found if match] or [0]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_goes_on_from_the_newest(case, workers):
    step, texts = CASES[case]
    found = workers[case]
    assert [each["before"] for each in found] == [[OLDER, NEWEST]] * 2
    assert [each["ended"] for each in found] == workers["control"]
    assert resumed_at(found[0]["said"]) == [step]
    said = "\n".join(found[0]["said"] + found[1]["said"])
    for text in texts:
        assert re.search(text, said), said
    if case not in ("other_run", "copied"):
        # What the disks have is deleted when the run has ended.
        assert not any(each["left"] for each in found)
    assert found[0]["shared"][-1] == 30


@pytest.mark.full
def test_one_machine_has_the_parts_of_others(tmp_path):
    """It sends each of them its own."""
    jobs = ["control", "moved"]
    found = clusters.run_jobs(local_saves, 3, str(tmp_path), jobs)
    assert [each["ended"] for each in found["moved"]] == found["control"]
    assert resumed_at(found["moved"][0]["said"]) == [NEWEST]
    told = "worker {0} lacked it, and has it from worker 0"
    for worker in (1, 2):
        assert told.format(worker) in "\n".join(found["moved"][0]["said"])
    assert not any(each["left"] for each in found["moved"])


@pytest.mark.full
def test_a_worker_whose_saves_fail(workers):
    """The newest step that all have stays on the disks of the others."""
    first, second = workers["failing"]
    assert (first["before"], second["before"]) == ([12, NEWEST], [8, 12])
    assert [first["ended"], second["ended"]] == workers["split_control"]
    assert resumed_at(first["said"]) == [12]


@pytest.mark.full
def test_split_weights_of_a_disk_that_is_lost(workers):
    found = workers["split_lost"]
    assert [each["ended"] for each in found] == workers["split_control"]
    assert resumed_at(found[0]["said"]) == [SHARED]
    assert (
        f"the checkpoint of step {NEWEST} in local_checkpoint_dir is not "
        "taken: what worker 1 held is missing"
    ) in found[0]["said"]


@pytest.mark.full
def test_unwritable(workers):
    first, second = workers["unwritable"]
    assert first == second
    assert re.match(
        "worker 1: local_checkpoint_dir must be a folder.*machine-1", first
    )
    assert "\n" not in first


@pytest.mark.full
def test_another_number_of_workers(workers, folder, strategies):
    assert workers["left_for_one"] == [[OLDER, NEWEST]] * 2
    machine = local_saves.Machine(
        strategies["one_device"], folder, "left_for_one"
    )
    assert machine.train() is not None
    assert resumed_at(machine.said) == [SHARED]
    assert (
        f"the checkpoint of step {NEWEST} in local_checkpoint_dir is not "
        "taken: it is of 2 workers, or of other devices"
    ) in machine.said


@pytest.mark.full
def test_a_worker_is_killed(tmp_path):
    """The job is started again, and ends as one that is not killed."""
    done = clusters.mgpu_tf(
        "launch",
        "--num_workers=2",
        "--max_restarts=1",
        "--backoff_seconds=0",
        "--startup_seconds=0",
        "--",
        clusters.PYTHON,
        "-m",
        "tests.jobs.local_saves",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert os.path.exists(tmp_path / "told")
    # The last save may have been under way.
    (step,) = re.findall(r"SAID resumed at step (\d+) from local", done.stdout)
    assert int(step) in (OLDER, NEWEST)
    results = re.findall(r"RESULT (.*)$", done.stdout, re.M)
    assert len(results) == 2
    for found, control in map(json.loads, results):
        assert found == control


def test_one_process(strategies, tmp_path):
    strategy = strategies["mirrored_x2"]
    control = local_saves.Machine(strategy, tmp_path, "control").train()
    machine = local_saves.Machine(strategy, tmp_path, "broken")
    shown = []

    def look(machine):
        shown.append(clusters.mgpu_tf("checkpoints", machine.local))

    found = local_saves.broken_off(machine, look)
    assert found["before"] == [OLDER, NEWEST]
    assert resumed_at(found["said"]) == [NEWEST]
    assert found["ended"] == control
    assert not found["left"]
    (shown,) = shown
    assert shown.returncode == 0, shown.stderr
    name, *lines = shown.stdout.splitlines()
    assert re.fullmatch("[0-9a-f]{12}/worker-0:", name)
    assert len(lines) == 2
    assert "step-0000000016" in lines[1]
    assert "part of worker 0 of 1" in lines[1]


@pytest.mark.full
def test_commands_of_the_page(tmp_path):
    (block,) = (
        text
        for text in pages.blocks("checkpoints.md", "sh")
        if "local_checkpoint_dir" in text
    )
    for path in ("/shared", "/local"):
        block = block.replace(path, f"{tmp_path}{path}")
    commands = block.replace("\\\n", "").splitlines()
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "mgpu-tf"
        if arguments[0] == "train":
            arguments.append("--epochs=1")
        done = clusters.mgpu_tf(*arguments)
        assert done.returncode == 0, done.stderr[-6000:]
    assert len(commands) == 2
    assert store.newest(str(tmp_path / "shared" / "run"))


def test_call_of_the_page():
    (block,) = (
        text
        for text in pages.blocks("checkpoints.md", "python")
        if "local_checkpoint_dir" in text
    )
    trainer = mock.Mock()
    exec(block, {"trainer": trainer, "mgpu_tf": mgpu_tf, "x": 0, "y": 0})
    (call,) = trainer.fit.call_args_list
    assert call.kwargs["checkpoint"] == mgpu_tf.SaveOptions(
        "/shared/run",
        local_checkpoint_dir="/local/checkpoints",
        save_every_steps=5,
        shared_every=10,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_every": 3}, "shared_every has an effect with local_"),
        ({"local_checkpoint_dir": "./a"}, "must be another folder"),
        ({"local_checkpoint_dir": "b", "shared_every": 0}, "shared_every=0"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        mgpu_tf.SaveOptions("a", **options)
    assert "\n" not in str(error.value)
