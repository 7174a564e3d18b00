"""The batch script of a job: its text, and what bash makes of it."""

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_tf import cli
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.slurm import SlurmJob, batch_script
from tests import clusters

GOLDEN = pathlib.Path(__file__).parent / "golden"

JOBS = {
    "workers": SlurmJob(
        ("python", "train.py", "--epochs=5"), nodes=4, gpus_per_node=8
    ),
    "servers": SlurmJob(
        ("python", "train.py"),
        nodes=2,
        num_ps=2,
        evaluator=True,
        name="clicks",
        partition="cpu",
        account="team",
        time="2-12:00:00",
        options=("qos=high", "exclusive"),
        max_restarts=3,
    ),
    "fewer": SlurmJob(
        ("python", "train.py"),
        nodes=4,
        min_nodes=2,
        grow_minutes=10,
        log_dir="all logs",
    ),
    "container": SlurmJob(
        ("python", "train.py"),
        nodes=2,
        gpus_per_node=1,
        container_image="docker://lab/train:1",
        signal_seconds=300,
        log_dir="/data/100% mine/logs",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    assert batch_script(JOBS[name]) == (GOLDEN / f"{name}.sbatch").read_text()


def test_the_command_prints_the_same(capsys):
    arguments = ["slurm", "--nodes=4", "--gpus_per_node=8", "--"]
    assert cli.main([*arguments, "train.py", "--epochs=5"]) == 0
    assert capsys.readouterr().out == batch_script(JOBS["workers"])


# Each says what it was called with, and does what CODE says.
FAKE = f"""#!{sys.executable}
import json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([name, *sys.argv[1:]]), file=file)
if sys.argv[1:3] == ["show", "job"]:
    print("   StartTime=2026-11-22 PreemptTime=" + os.environ["PREEMPTED"])
if name == "srun":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    with open(os.environ["CALLS"] + ".pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(float(os.environ.get("SECONDS_TO_RUN", 0)))
    sys.exit(int(os.environ.get("CODE", 0)))
if name == "sinfo":
    print(os.environ["IDLE"])
if name == "scancel" and "SLURM_JOB_ID" in os.environ:
    with open(os.environ["CALLS"] + ".pid") as file:
        os.kill(int(file.read()), signal.SIGTERM)
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """A folder with programs that stand for those of Slurm."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("srun", "scancel", "scontrol", "sbatch", "sinfo"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def start(job, fakes, folder, **environment):
    """Starts the script of a job as slurmd does."""
    script = folder / "script"
    script.write_text(batch_script(job))
    return subprocess.Popen(
        ["bash", str(script)],
        cwd=folder,
        env={
            "PATH": f"{fakes}:{os.environ['PATH']}",
            "CALLS": str(folder / "calls"),
            "SLURM_JOB_ID": "17",
            "PREEMPTED": "None",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls_in(folder):
    text = (folder / "calls").read_text()
    return [json.loads(line) for line in text.splitlines()]


def queued_again(folder):
    return ["scontrol", "requeue", "17"] in calls_in(folder)


HOSTILE = [
    "a b",
    "it's",
    '"',
    "$(touch owned)",
    "`touch owned`",
    "; touch owned",
    "\\",
    "new\nline",
    "#SBATCH --nodes=9",
    "*",
    "~",
    "{0}",
    "ü",
    "",
]


def test_hostile_words_arrive_unchanged(fakes, tmp_path):
    words = ["python", *HOSTILE]
    job = SlurmJob(
        tuple(words),
        nodes=2,
        log_dir="a $(touch owned) `b` 'c' \"d\" 100%",
        container_image="$(touch owned) 'image'",
    )
    process = start(job, fakes, tmp_path)
    output, _ = process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert (process.returncode, output) == (0, "")
    call, _ = calls_in(tmp_path)
    assert call[-len(words) :] == words
    assert "--container-image=$(touch owned) 'image'" in call
    assert f"--container-workdir={tmp_path}" in call
    assert f"--output={job.log_dir}%/%x-%j-%t.log" in call
    assert (tmp_path / job.log_dir).is_dir()
    assert not list(tmp_path.rglob("owned"))


@settings(deadline=None, database=None, max_examples=25)
@given(
    words=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        min_size=1,
        max_size=4,
    )
)
def test_any_words_arrive_unchanged(words):
    script = batch_script(SlurmJob(("p", *words), nodes=1))
    line = script.partition("logs/%x-%j-%t.log \\\n  ")[2]
    command = line.rpartition(" &\nstep=$!")[0]
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"],
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split("\0")[:-1] == ["p", *words]


@pytest.mark.parametrize("code", ["0", "3"])
def test_the_status_of_the_tasks_is_that_of_the_job(code, fakes, tmp_path):
    process = start(JOBS["workers"], fakes, tmp_path, CODE=code)
    process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert process.returncode == int(code)
    assert not queued_again(tmp_path)


def test_the_signal_before_the_end_saves_and_queues_again(fakes, tmp_path):
    process = start(JOBS["workers"], fakes, tmp_path, SECONDS_TO_RUN="600")
    deadline = time.monotonic() + clusters.LIMIT_SECONDS
    pid = tmp_path / "calls.pid"
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert process.returncode == 75
    assert calls_in(tmp_path)[1:] == [
        ["scancel", "--signal=TERM", "17"],
        ["scontrol", "show", "job", "17"],
        ["scontrol", "requeue", "17"],
    ]


@pytest.mark.parametrize(
    ("restarts", "code", "again"),
    [("", "3", True), ("2", "3", True), ("3", "3", False), ("", "0", False)],
)
def test_a_failure_queues_again(restarts, code, again, fakes, tmp_path):
    environ = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    process = start(JOBS["servers"], fakes, tmp_path, CODE=code, **environ)
    process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert process.returncode == int(code)
    assert queued_again(tmp_path) is again


@pytest.mark.parametrize("code", ["75", "137", "0"])
def test_a_job_that_is_preempted_is_queued_again(code, fakes, tmp_path):
    environ = {"PREEMPTED": "2026-11-22T17:00:00", "CODE": code}
    process = start(JOBS["workers"], fakes, tmp_path, **environ)
    process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert queued_again(tmp_path) is (code != "0")


@pytest.mark.parametrize(
    ("nodes", "idle", "asked", "again"),
    [
        ("2", "1", "", True),
        ("2", "1", "1", True),
        ("2", "1", "2", False),
        ("2", "", "", False),
        ("4", "1", "", False),
    ],
)
def test_idle_nodes_queue_a_smaller_job_again(
    nodes, idle, asked, again, fakes, tmp_path
):
    (tmp_path / "all logs").mkdir()
    file = tmp_path / "all logs" / ".asked-17"
    if asked:
        file.write_text(f"{asked}\n")
    quick = tmp_path / "quick"
    quick.mkdir()
    (quick / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.1\n")
    (quick / "sleep").chmod(stat.S_IRWXU)
    process = start(
        JOBS["fewer"],
        fakes,
        tmp_path,
        PATH=f"{quick}:{fakes}:{os.environ['PATH']}",
        SECONDS_TO_RUN="600" if again else "2",
        SLURM_JOB_NUM_NODES=nodes,
        SLURM_JOB_PARTITION="test",
        IDLE=idle,
    )
    process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert queued_again(tmp_path) is again
    assert process.returncode == (75 if again else 0)
    if again:
        assert file.read_text() == f"{nodes}\n"


def test_submitted(fakes, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{fakes}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    assert cli.main(["slurm", "--nodes=1", "--submit", "--", "true"]) == 0
    assert calls_in(tmp_path) == [["sbatch"]]


def test_submitted_where_there_is_no_slurm(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["slurm", "--nodes=1", "--submit", "--", "true"]) == 2
    assert "needs the program sbatch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--nodes=2"], ["and the command", "-- python script.py"]),
        (["--", "true"], ["no --nodes"]),
        (
            ["--nodes=0", "--", "true"],
            ["nodes must be an integer of 1 or more"],
        ),
        (
            ["--nodes=2", "--min_nodes=3", "--", "x"],
            ["min_nodes must be 2 or less"],
        ),
        (
            ["--nodes=2", "--min_nodes=1", "--num_ps=1", "--", "x"],
            ["min_nodes=1, num_ps=1"],
        ),
        (["--nodes=2", "--grow_minutes=9", "--", "x"], ["without min_nodes"]),
        (["--nodes=1", "--gpus_per_node=-1", "--", "x"], ["gpus_per_node"]),
        (["--nodes=1", "--evaluator", "--", "x"], ["without --num_ps"]),
        (["--nodes=1", "--signal_seconds=0", "--", "x"], ["signal_seconds"]),
        (["--nodes=1", "--signal_seconds=70000", "--", "x"], ["65535"]),
        (["--nodes=1", "--name=a b", "--", "x"], ["name='a b'"]),
        (["--nodes=1", "--name=a\n#SBATCH x", "--", "x"], ["name="]),
        (["--nodes=1", "--time=soon", "--", "x"], ["2-12:00:00 or 90"]),
        (["--nodes=1", "--partition=a b", "--", "x"], ["partition='a b'"]),
        (["--nodes=1", "--log_dir=", "--", "x"], ["log_dir=''"]),
        (["--nodes=1", "--log_dir=a\\b", "--", "x"], ["backslashes"]),
        (["--nodes=1", "--container_image=a\nb", "--", "x"], ["container_im"]),
        (["--nodes=1", "--sbatch_option=--qos=x", "--", "x"], ["without dash"]),
        (["--nodes=1", "--sbatch_option=nodes=3", "--", "x"], ["the flag of"]),
        (["--nodes=1", "--sbatch_option=qos=a\n#", "--", "x"], ["qos=high"]),
    ],
)
def test_a_mistake_is_one_line(arguments, parts, capsys):
    assert cli.main(["slurm", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("mgpu-tf: ")
    assert told.err.count("\n") == 1
    for part in parts:
        assert part in told.err


@pytest.mark.parametrize("word", ["a\0b", "caf\udce9.py"])
def test_no_text(word):
    with pytest.raises(ConfigurationError, match="must be text in UTF-8"):
        SlurmJob(("python", word), nodes=1)


@pytest.mark.parametrize(
    "time",
    ["0", "0:00", "1-", "-1", "1:60", "1:60:00", "1:00:60", "1-24", "1-0:60"]
    + ["1:2:3:4", "1-2-3", "1-1:1:60", "2", "1:59", "9" * 9, "", " 90", "90\n"],
)
def test_times_that_are_refused(time):
    """Slurm refuses them, or there is no time to save."""
    with pytest.raises(ConfigurationError, match="time must be"):
        SlurmJob(("x",), nodes=1, time=time, signal_seconds=120)


@pytest.mark.parametrize(
    "time",
    ["90", "3", "2:01", "1:30:00", "100:00:00", "2-12", "2-12:30", "0-1:0:0"],
)
def test_times_that_are_taken(time):
    assert SlurmJob(("x",), nodes=1, time=time, signal_seconds=120).time == time


@pytest.mark.parametrize("field", ["nodes", "gpus_per_node", "max_restarts"])
def test_counts_that_no_cluster_has(field):
    with pytest.raises(ConfigurationError, match=f"{field} must be 65533 or"):
        SlurmJob(("x",), **({"nodes": 1} | {field: 65534}))
