"""The commands for machines without a scheduler."""

import json
import pathlib
import re
import shlex
import subprocess

import pytest

from mgpu_tf import cli
from tests import clusters

PROGRAM = "import os, sys; print(os.environ['TF_CONFIG']); print(sys.argv[1:])"


def printed(capsys, *flags, command=("python", "train.py")):
    arguments = ["launch", *flags, "--print", "--", *command]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    return list(zip(lines[::2], lines[1::2], strict=True))


def test_one_worker_on_each_machine(capsys):
    cluster = '"cluster": {"worker": ["a:2222", "b:2222"]}'
    assert printed(capsys, "--hosts=a,b") == [
        (
            f"# worker {index}, on {host}",
            f'TF_CONFIG=\'{{{cluster}, "task": {{"type": "worker", '
            f'"index": {index}}}}}\' python train.py',
        )
        for index, host in enumerate("ab")
    ]


def test_roles_are_dealt_out(capsys):
    flags = ["--hosts=a,b", "--num_ps=2", "--evaluator", "--port=700"]
    lines = printed(capsys, *flags)
    assert [head for head, _ in lines] == [
        "# chief 0, on a",
        "# worker 0, on b",
        "# worker 1, on a",
        "# ps 0, on b",
        "# ps 1, on a",
        "# evaluator 0, on b",
    ]
    assert '"ps": ["b:701", "a:702"], "evaluator": ["b:702"]' in (lines[0][1])


def test_a_shell_runs_the_line_as_it_stands(capsys):
    words = ["a b", "it's", "$(touch owned)", "*", '"', ""]
    [(_, line), _] = printed(
        capsys, "--hosts=[::1],b", command=("python", "-c", PROGRAM, *words)
    )
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True
    )
    config, arguments = done.stdout.splitlines()
    assert json.loads(config)["cluster"]["worker"] == ["[::1]:2222", "b:2222"]
    assert arguments == str(words)


def test_the_command_of_the_readme(capsys):
    """It runs as it stands."""
    text = (pathlib.Path(clusters.ROOT) / "README.md").read_text()
    [line] = re.findall(r"^mgpu-tf (launch --hosts=.* --print .*)$", text, re.M)
    assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr().out.count("python digits.py") == 2


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--hosts=a,b"], "Received: --hosts=a,b. Write"),
        (["--print"], "Received: --print. Write"),
        (["--ssh"], "Received: --ssh. Write"),
        (["--hosts=a", "--ssh", "--print"], "--hosts=a --ssh --print. Write"),
        (["--hosts=a b", "--ssh"], "Received: 'a b'"),
        (["--hosts=a", "--ssh", "--ssh_command=sssh"], "openssh-client"),
        (["--print", "--hosts=a,"], "Received: ''"),
        (["--print", "--hosts=a b"], "Received: 'a b'"),
        (["--print", "--hosts=a,b,a"], "each machine once"),
        (["--print", "--hosts=a", "--port=0"], "port must be 1 to 65535"),
        (["--print", "--hosts=a", "--evaluator"], "without --num_ps"),
        (["--print", "--hosts=a", "--num_workers=0"], "num_workers must be"),
    ],
)
def test_a_mistake_is_one_line(flags, part, capsys):
    assert cli.main(["launch", *flags, "--", "python", "train.py"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert part in told.err
