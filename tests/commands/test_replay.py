"""`mgpu-tf replay`, and the flags of a run that leaves out bad batches."""

import os
import subprocess
import sys

import pytest

from mgpu_tf import cli
from tests import clusters, pages


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
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    """A replay in another process, against the losses of the first."""
    programs = os.path.dirname(clusters.PYTHON)
    monkeypatch.setenv("PATH", programs + os.pathsep + os.environ["PATH"])
    [text] = [
        text
        for text in pages.blocks("checkpoints.md", "sh")
        if "mgpu-tf replay" in text
    ]
    done = subprocess.run(
        ["bash", "-ec", text],
        cwd=tmp_path,
        env=clusters.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=clusters.LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "replay of step 110: no fault" in done.stdout


def test_a_command_without_a_verdict_is_told(capfd):
    assert cli.main(["replay", "--step=3", "--", "true"]) == 2
    told = capfd.readouterr().err
    assert "mgpu-tf: The command must call fit() with the checkpoint" in told
    assert cli.main(["replay", "--step=3", "--", "false"]) == 1
    assert cli.main(["replay", "--step=3", "--", "/no/such"]) == 2
    command = "import os; os.kill(os.getpid(), 15)"
    given = ["replay", "--step=3", "--", sys.executable, "-c", command]
    assert cli.main(given) == 128 + 15
