"""The command line: one line for a mistake, and nothing heavy imported."""

import os
import re
import subprocess
import sys

import pytest

from mgpu_tf import cli
from mgpu_tf.checkpoints import parts
from mgpu_tf.checkpoints.recovery import Owner
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.commands import train
from mgpu_tf.launch import local, ray
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.mesh import Piece, Region
from mgpu_tf.options import WatchOptions
from tests import clusters

TWO_WORKERS = (
    '{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, '
    '"task": {"type": "worker", "index": 1}}'
)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--help"], ["train", "launch", "version"]),
        (["help"], ["mgpu-tf COMMAND --help"]),
        (["-h"], ["mgpu-tf COMMAND --help"]),
        (["train", "--help"], ["--strategy ", "resnet/DEPTH", "default: 64"]),
        (["train", "-h", "--epochs=0"], ["Common:", "--epochs "]),
        (
            ["launch", "--help"],
            ["Common:\n  --num_workers\n", "default: 300.0"],
        ),
        (["version"], ["mgpu_tf "]),
        (["--version"], ["mgpu_tf "]),
    ],
    ids=" ".join,
)
def test_told(arguments, parts):
    done = clusters.mgpu_tf(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    for part in parts:
        assert part in done.stdout


@pytest.mark.parametrize("command", ["train", "launch", "plan"])
def test_help_names_no_module(command):
    text = clusters.mgpu_tf(command, "--help").stdout
    assert "mgpu_tf.commands" not in text
    assert re.search(r"^(Flags|Common):\n  --[\w[]+", text, re.M)


def _written_to(output):
    return subprocess.run(
        [clusters.PYTHON, "-m", "mgpu_tf", "plan", "--help"],
        env=clusters.environment(),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=clusters.LIMIT_SECONDS,
        check=False,
    )


def test_nobody_reads_the_output():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = _written_to(output)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_space_for_the_output():
    with open("/dev/full", "w") as output:
        done = _written_to(output)
    assert done.returncode == 1
    assert done.stderr == "mgpu-tf: No space is left to write.\n"


def test_nothing_given():
    done = clusters.mgpu_tf()
    assert done.returncode == 2
    assert "Commands:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "parts"),
    [
        ("trian", {}, ["Unknown command", "'trian'", "mean 'train'"]),
        ("train --epoch=3", {}, ["Unknown", "'--epoch'", "'--epochs'"]),
        ("train --batch_size=3", {}, ["Did you mean '--global_batch_size'?"]),
        ("train --two\nlines", {}, ["'--two lines'"]),
        ("train --epochs=three", {}, ["epochs='three'", "whole number"]),
        ("train --epochs", {}, ["Missing value", "--epochs"]),
        ("train --model=resnt", {}, ["model", "mean 'resnet'"]),
        ("train --epochs=0", {}, ["1 or more", "epochs=0"]),
        ("train --learning_rate=-1", {}, ["above 0", "learning_rate=-1.0"]),
        (
            "train --num_workers=2 --strategy=mirrored",
            {},
            ["'multi_worker_mirrored'", "strategy='mirrored'"],
        ),
        ("train 5", {}, ["flags only", "'5'", "--name=value"]),
        ("train", {"TF_CONFIG": "{'a'"}, ["must be JSON", "{'a'"]),
        ("train", {"TF_CONFIG": "{\n"}, ["must be JSON", r"'{\n'"]),
        ("launch", {}, ["and the command", "'nothing'"]),
        ("launch --num_workers=2", {}, ["and the command", "num_workers=2"]),
        ("launch --num_workers=2 --", {}, ["and the command"]),
        ("launch --num_workers=2 true", {}, ["and the command", "true"]),
        ("launch x --num_workers=2 -- true", {}, ["and the command", "x"]),
        ("launch -- true", {}, ["no --num_workers"]),
        ("launch --num_workers=0 -- true", {}, ["1 or more", "0"]),
        ("launch --num_workers=1000000 -- true", {}, ["at most 1000"]),
        ("launch --num_workers=2 --num_ps=-1 -- true", {}, ["num_ps", "-1"]),
        ("launch --num_workers=a -- true", {}, ["num_workers='a'"]),
        (
            "launch --num_workers=2 --max_restarts=-1 -- true",
            {},
            ["max_restarts must be 0 or more", "-1"],
        ),
        (
            "launch --num_workers=2 --min_workers=3 -- true",
            {},
            ["min_workers must be num_workers or less", "min_workers=3"],
        ),
        (
            "launch --num_workers=2 --startup_seconds=-1 -- true",
            {},
            ["startup_seconds must be 0 or more", "-1"],
        ),
        (
            "launch --num_workers=2 -- true",
            {"TF_CONFIG": TWO_WORKERS},
            ["TF_CONFIG is set", "Unset it"],
        ),
        (
            "launch --num_workers=2 -- true",
            {"TF_CONFIG": "[]"},
            ["must be a JSON object"],
        ),
    ],
)
def test_mistake_is_one_line(arguments, environment, parts, monkeypatch, capfd):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(arguments.split(" ")) == 2
    told = capfd.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"mgpu-tf: [^\n]+\n", told.err)
    for part in parts:
        assert part in told.err


def test_a_mistake_ends_the_process():
    done = clusters.mgpu_tf("train", "--epochs=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"mgpu-tf: [^\n]+ epochs=0[^\n]*\n", done.stderr)


IMPORTED = """
import sys
{code}
heavy = {{"tensorflow", "keras", "numpy"}}
print("IMPORTED", *heavy & {{*sys.modules}})
"""


@pytest.mark.parametrize(
    "code",
    [
        "import mgpu_tf",
        "import mgpu_tf; mgpu_tf.ClusterConfig",
        "import mgpu_tf; mgpu_tf.RunConfig(epochs=2)",
        "import mgpu_tf; mgpu_tf.Report; mgpu_tf.ConfigurationError",
        "import mgpu_tf; mgpu_tf.flags.define()",
        *(
            f"from mgpu_tf import cli; assert cli.main({arguments}) == {code}"
            for arguments, code in [
                (["train", "--help"], 0),
                (["train", "--epoch=3"], 2),
                (["train", "--epochs=0"], 2),
                (["launch", "--help"], 0),
                (["parity", "--help"], 0),
                (["parity", "--model=mine:build"], 2),
                (["parity", "--dataset=mine:load"], 2),
                (["parity", "--model=absent:build", "--dataset=digits"], 2),
                (["benchmark", "--help"], 0),
                (["checkpoints", "--help"], 0),
                (["plan", "--help"], 0),
                (["slurm", "--help"], 0),
                (["slurm", "--nodes=2", "--", "true"], 0),
                (["kubernetes", "--help"], 0),
                (
                    ["kubernetes", "--name=a", "--image=b", "--workers=2"]
                    + ["--", "true"],
                    0,
                ),
                (["launch", "--hosts=a,b", "--print", "--", "true"], 0),
                (["plan", "--num_parameters=1.5G"], 0),
                (["launch", "--num_workers=1", "--", "true"], 0),
                (["--help"], 0),
                (["version"], 0),
            ]
        ),
    ],
)
def test_imports_nothing_heavy(code):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(code=code)],
        env=clusters.environment(),
        capture_output=True,
        text=True,
        timeout=clusters.LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED"


@pytest.fixture
def calls(monkeypatch):
    """What would have been launched or run."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    made = []

    def launch(command, num_workers, **kwargs):
        made.append(("launch", command, num_workers, kwargs))
        return 7

    def run(config):
        made.append(("run", config.num_workers, config.epochs))
        return 0

    monkeypatch.setattr(local, "launch", launch)
    monkeypatch.setattr(train, "_run", run)
    return made


def test_several_workers_are_launched(calls):
    arguments = ["train", "--num_workers=2", "--data_dir=a b"]
    assert cli.main(arguments) == 7
    command = [sys.executable, "-m", "mgpu_tf", *arguments]
    assert calls == [("launch", command, 2, options())]


def options(**changes):
    """What `train` gives to the launcher."""
    unit = "task" if changes.get("num_ps") else "job"
    return {
        "num_ps": 0,
        "chief_has_terminal": True,
        "grace_seconds": 10.0,
        "policy": RestartPolicy(unit=unit),
        "watch": WatchOptions(),
        "log_dir": None,
        "spares": 0,
        "alone": False,
        "isolate": "auto",
        "needs": "",
    } | changes


@pytest.mark.parametrize(
    ("flags", "num_workers", "num_ps"),
    [
        (["--num_workers=3", "--num_ps=2"], 3, 2),
        (["--num_ps=1"], 1, 1),
        (["--strategy=parameter_server"], 1, 1),
    ],
)
def test_parameter_servers_are_launched(flags, num_workers, num_ps, calls):
    assert cli.main(["train", *flags]) == 7
    command = [sys.executable, "-m", "mgpu_tf", "train", *flags]
    expected = options(num_ps=num_ps)
    assert calls == [("launch", command, num_workers, expected)]


def test_one_process_is_watched_where_it_may_restart(calls, monkeypatch):
    arguments = ["train", "--strategy=mirrored", "--max_restarts=2"]
    assert cli.main(arguments) == 7
    ((name, _, num_workers, given),) = calls
    assert (name, num_workers, given["alone"]) == ("launch", 1, True)
    calls.clear()
    monkeypatch.setenv("MGPU_TF_RESTARTS", "0")
    assert cli.main(arguments) == 0
    assert [call[0] for call in calls] == ["run"]


def test_worker_of_a_cluster_trains(calls, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", TWO_WORKERS)
    assert cli.main(["train", "--num_workers=2", "--epochs=3"]) == 0
    assert calls == [("run", 2, 3)]


SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def in_slurm(monkeypatch):
    """A step of four tasks."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MGPU_TF_NUM_PS", "1")


def test_a_task_of_a_scheduler_trains(in_slurm, calls):
    assert cli.main(["train", "--num_ps=1", "--epochs=3"]) == 0
    assert calls == [("run", 1, 3)]


def test_a_scheduler_restarts_its_tasks_itself(in_slurm, calls, caplog):
    assert cli.main(["train", "--max_restarts=2"]) == 0
    assert calls == [("run", 1, 5)]
    assert "Slurm job 17 has started its tasks and supervises" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["launch", "--num_workers=2", "--", "true"],
            "Received: Slurm job 17, which has one",
        ),
        (["train", "--num_ps=2"], "num_ps=2, MGPU_TF_NUM_PS=1"),
    ],
)
def test_what_contradicts_a_scheduler(in_slurm, arguments, part, capsys):
    assert cli.main(arguments) == 2
    assert part in capsys.readouterr().err


def test_one_worker_trains(calls):
    assert cli.main(["train"]) == 0
    assert calls == [("run", 1, 5)]


def test_tasks_of_parameter_servers_are_restarted_alone(calls):
    arguments = ["launch", "--num_workers=3", "--num_ps=2", "--max_restarts=4"]
    assert cli.main([*arguments, "--", "true"]) == 7
    assert calls[0][3]["num_ps"] == 2
    policy = RestartPolicy(max_restarts=4, unit="task")
    assert calls[0][3]["policy"] == policy


def test_an_evaluator_needs_parameter_servers(calls, capsys):
    arguments = ["launch", "--num_workers=2", "--evaluator", "--", "true"]
    assert cli.main(arguments) == 2
    assert "Received: --evaluator without --num_ps." in capsys.readouterr().err
    assert calls == []
    arguments.insert(1, "--num_ps=1")
    assert cli.main(arguments) == 7
    assert calls[0][3]["evaluator"] is True


@pytest.mark.parametrize("bad", ["--noevaluator=1", "--noevaluator=x"])
def test_a_switch_takes_no_value(bad, capsys):
    arguments = ["launch", "--num_workers=2", bad, "--", "true"]
    assert cli.main(arguments) == cli.USAGE_ERROR
    assert "does not take an argument" in capsys.readouterr().err


def test_a_long_mistake_is_cut(capsys):
    assert cli.main(["train", "--seed=" + "x" * 100_000]) == cli.USAGE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 2100
    assert "characters ...]" in line


def test_ray_is_told_when_to_give_up(monkeypatch):
    given = []
    monkeypatch.setattr(
        ray, "run", lambda *_, **options: given.append(options) or 0
    )
    flags = ["--num_workers=2", "--stall_timeout_seconds=60"]
    assert cli.main(["ray", *flags, "--", "true"]) == 0
    assert given[0]["watch"] == WatchOptions(60.0)
    job = LaunchJob(("true",), 1, watch=given[0]["watch"])
    (cluster,) = job.clusters(["a:1"])
    told = job.environment(cluster, 0)
    monkeypatch.setattr(os, "environ", told)
    assert WatchOptions.from_environment() == WatchOptions(60.0)


def test_launch_passes_on(calls):
    arguments = ["launch", "--num_workers=3", "--startup_seconds=2"]
    arguments += ["--max_restarts=4", "--min_workers=2"]
    arguments += ["--stall_timeout_seconds=60", "--first_step_seconds=0", "--"]
    command = ["python", "a b.py", "--", "--num_workers=9", "--help"]
    assert cli.main([*arguments, *command]) == 7
    assert calls == [
        (
            "launch",
            command,
            3,
            {
                "num_ps": 0,
                "evaluator": False,
                "startup_seconds": 2.0,
                "grace_seconds": 10.0,
                "policy": RestartPolicy(max_restarts=4, min_workers=2),
                "watch": WatchOptions(60.0, 0.0),
                "log_dir": None,
                "spares": 0,
                "isolate": "auto",
                "needs": "",
            },
        )
    ]


def test_ray_passes_on(monkeypatch):
    given = {}
    monkeypatch.setattr(
        ray, "run", lambda *args, **kwargs: given.update(kwargs) or 7
    )
    arguments = ["ray", "--num_workers=3", "--stall_timeout_seconds=60", "--"]
    assert cli.main([*arguments, "python", "train.py"]) == 7
    assert given["watch"] == WatchOptions(60.0)
    assert given["policy"] == RestartPolicy()


def test_checkpoints_are_listed_checked_and_pruned(tmp_path, capsys):
    piece = Piece("w", "uint8", 1, (4,), Region(0, 4), lambda: [b"abcd"])
    state = {
        "position": {"epoch": 2, "step": 7},
        "num_replicas": 4,
        "saved_at": 0.0,
    }
    for step in (5, 10, 15):
        parts.write(str(tmp_path), step, state, [piece])
    assert cli.main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "ok      step-0000000015, 0.0 MB, epoch 2 step 7, 4 rep" in lines[2]
    owner = Owner(str(tmp_path))
    owner.take()
    assert cli.main(["checkpoints", str(tmp_path), "--keep=1"]) == 2
    assert "which belongs to process" in capsys.readouterr().err
    owner.release()
    (tmp_path / "step-0000000015" / "arrays-0.bin").write_bytes(b"abcx")
    assert cli.main(["checkpoints", str(tmp_path), "--keep=2"]) == 1
    assert capsys.readouterr().out.splitlines()[::2] == [
        "deleted step-0000000005",
        "BROKEN  step-0000000015: arrays-0.bin was changed",
    ]


def test_what_others_wrote_does_not_reach_the_terminal(tmp_path, capsys):
    hostile = "\x1b[2J\x07\u202e\n"
    for step, state in (
        (1, {"num_replicas": hostile}),
        (2, {"position": {"epoch": hostile, "step": hostile}}),
        (3, {"saved_at": 1e300, "part": 7}),
        (4, {"position": []}),
    ):
        parts.write(str(tmp_path), step, state, [])
    Registry(str(tmp_path)).note("saved", 4, hostile)
    (tmp_path / f"damaged-{hostile}").mkdir()
    assert cli.main(["checkpoints", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out.splitlines()) == 5
    assert r"\x1b[2J\x07\u202e\n replicas" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "takes one folder. Received: 'nothing'"),
        (["a", "b"], "takes one folder. Received: 'a b'"),
        (["missing"], "takes a folder. Received: 'missing'"),
        (["missing", "--keep=0"], "--keep=0"),
    ],
)
def test_checkpoints_mistakes(arguments, message, capsys):
    assert cli.main(["checkpoints", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_tasks_do_not_run_modules_of_the_current_folder(tmp_path, monkeypatch):
    commands = []

    def noted(command, *_, **__):
        commands.append(command)
        return 0

    monkeypatch.setattr(local, "launch", noted)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue.py").write_text("raise SystemExit(9)")
    assert cli.main(["train", "--num_workers=2"]) == 0
    python = commands[0][: commands[0].index("train")]
    done = subprocess.run(
        [*python, "launch", "--num_workers=1", "--", "true"],
        env=clusters.environment(),
        check=False,
    )
    assert done.returncode == 0


def test_the_log_of_a_run_has_its_own_lines_once():
    """Also where another package gives the root logger a handler."""
    body = (
        "import logging\n"
        "from mgpu_tf.commands import train\n"
        "train._show_log()\n"
        "logging.info('another package')\n"
        "logging.getLogger('other').warning('theirs')\n"
        "logging.getLogger('mgpu_tf').info('ours')\n"
    )
    done = clusters.run(["-c", body])
    assert done.stderr.splitlines() == ["WARNING:other:theirs", "mgpu-tf: ours"]
