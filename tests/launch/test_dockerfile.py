"""The Dockerfile of a project, and that of this repository."""

import json
import pathlib
import re
import subprocess

import pytest

from mgpu_tf import cli
from tests import clusters
from tests.launch.dockerfiles import instructions, problems

ROOT = pathlib.Path(clusters.ROOT)
OURS = (ROOT / "Dockerfile").read_text()


def printed(capsys, *flags, command=("train.py",)):
    flags = ["kubernetes", "--dockerfile", *flags, "--", *command]
    assert cli.main(flags) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_that_of_a_project(capsys):
    assert (
        printed(capsys)
        == """\
# In a clone of mgpu_tf: docker build --tag=mgpu-tf:cpu .
# Here:                  docker build --tag=NAME .
FROM mgpu-tf:cpu

WORKDIR /project
COPY . .

# This user writes to /tmp and to mounted volumes only.
USER 1000
CMD ["python", "train.py"]
"""
    )


def test_requirements_and_gpus(capsys, project):
    (project / "requirements.txt").write_text("einops\n")
    text = printed(capsys, "--gpus=2", "--user_id=7")
    assert problems(text) == []
    steps = instructions(text)
    assert ("FROM", "mgpu-tf:gpu") in steps
    assert ("COPY", "requirements.txt /packages/") in steps
    assert steps[-2] == ("USER", "7")
    assert "--build-arg=EXTRAS=gpu" in text


@pytest.mark.parametrize("words", [["it's", 'a "b"', "$(touch x)", "\n", "ä"]])
def test_any_command(words, capsys):
    text = printed(capsys, command=["python", "-c", *words])
    assert problems(text) == []
    assert json.loads(instructions(text)[-1][1]) == ["python", "-c", *words]


def test_a_container_is_not_root(capsys):
    flags = ["kubernetes", "--dockerfile", "--user_id=0", "--", "a.py"]
    assert cli.main(flags) == 2
    assert "must not run as root" in capsys.readouterr().err


def test_that_of_this_repository():
    """It copies what an installation needs, and the extras exist."""
    assert problems(OURS) == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for word, rest in instructions(OURS)
        if word == "COPY"
        for source in rest.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
    setup = (ROOT / "setup.cfg").read_text()
    for extra in re.findall("EXTRAS=([a-z]+)", OURS):
        assert f"\n{extra} =\n" in setup


@pytest.mark.parametrize(
    ("extras", "asked"), [("", "."), ("gpu", ".[gpu]"), ("a,b", ".[a,b]")]
)
def test_what_is_installed(extras, asked):
    """The shell of the image makes the argument of pip."""
    [run] = [rest for word, rest in instructions(OURS) if word == "RUN"]
    done = subprocess.run(
        ["sh", "-c", run.replace("pip install", "printf %s")],
        env={"EXTRAS": extras},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == asked


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FROM python:3.12-slim\n", ""),
        ("FROM python", "FROM  two words"),
        ("RUN pip", "RUNN pip"),
        ("USER 1000", "USER root"),
        ("USER 1000", "USER"),
        ("USER 1000\n", ""),
        ('["mgpu-tf", "help"]', "mgpu-tf help"),
        ('["mgpu-tf", "help"]', '["mgpu-tf", 1]'),
        ("setup.cfg ./", "setup.cfg ."),
        ("COPY mgpu_tf mgpu_tf", "COPY mgpu_tf"),
        ("COPY mgpu_tf mgpu_tf", "COPY ../mgpu_tf mgpu_tf"),
        ("PIP_NO_CACHE_DIR=1", "PIP_NO_CACHE_DIR 1"),
        ('[$EXTRAS]}"', "[$EXTRAS]}"),
        ('CMD ["mgpu-tf", "help"]\n', "RUN true \\\n"),
    ],
)
def test_mistakes_are_found(old, new):
    assert old in OURS
    assert problems(OURS.replace(old, new)) != []
