"""`mgpu-tf replay`, and the flags of a run that leaves out bad batches."""

import json
import sys

import pytest

from mgpu_tf import cli
from tests import clusters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step=3"], "then -- and the command"),
        (["--", "train.py"], "needs the step to repeat"),
        (["--step=0", "--", "train.py"], "step"),
        (["--step=3", "--", "no/such/program"], "a program that can be"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert cli.main(["replay", *arguments]) == cli.USAGE_ERROR
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.full
def test_the_commands_of_the_page(tmp_path):
    train = [
        "train",
        f"--checkpoint_dir={tmp_path / 'checkpoints'}",
        f"--output_dir={tmp_path / 'out'}",
        "--on_nan=restore",
        "--max_restores=3",
        "--max_loss=1e4",
        "--save_every_steps=10",
        "--epochs=1",
    ]
    done = clusters.mgpu_tf(*train)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["left_out"] == report["slow"] == []
    step = report["global_step"]
    # In another process, against the losses that this one has recorded.
    done = clusters.mgpu_tf(
        *("replay", f"--step={step}", "--"),
        *(clusters.PYTHON, "-m", "mgpu_tf", *train),
    )
    assert done.returncode == 0, done.stderr
    assert f"replay of step {step}: no fault" in done.stdout


def test_a_command_without_a_verdict_is_told(capfd):
    assert cli.main(["replay", "--step=3", "--", "true"]) == 2
    told = capfd.readouterr().err
    assert "mgpu-tf: The command must call fit() with the checkpoint" in told
    assert cli.main(["replay", "--step=3", "--", "false"]) == 1
    assert cli.main(["replay", "--step=3", "--", "/no/such"]) == 2
    command = "import os; os.kill(os.getpid(), 15)"
    given = ["replay", "--step=3", "--", sys.executable, "-c", command]
    assert cli.main(given) == 128 + 15
