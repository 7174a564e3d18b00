"""Every command that README, pages and help show: its flags exist, it runs."""

import json
import pathlib
import re
import shlex
import subprocess

import pytest
from absl import flags

from mgpu_tf import cli
from mgpu_tf.commands import completion
from tests import clusters, readme

ROOT = pathlib.Path(clusters.ROOT)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(path, language):
    return [
        text
        for kind, text in _FENCE.findall(path.read_text())
        if kind == language
    ]


def commands_in(text):
    """The calls of mgpu-tf in a shell script, without what follows `--`."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition(" #")[0]
        if re.match(r"\s*mgpu-tf \w", line):
            words = shlex.split(line)[1:]
            yield words[: words.index("--")] if "--" in words else words


SHOWN = [
    (path.name, words)
    for path in PAGES
    for text in blocks(path, "sh")
    for words in commands_in(text)
] + [
    (f"help of {name}", words)
    for name, command in cli.COMMANDS.items()
    for words in commands_in(command.USAGE.partition("Example:")[2])
]


@pytest.mark.parametrize(
    ("where", "words"), SHOWN, ids=lambda value: str(value)[:60]
)
def test_the_flags_exist(where, words):
    name, *given = words
    if name in ("version", "help") or "--help" in given:
        return
    values = flags.FlagValues()
    cli.COMMANDS[name].define(values)
    # Such as N for a number of the reader's.
    given = [re.sub(r"=N$", "=2", word) for word in given]
    values(["mgpu-tf", *given])


def test_there_are_commands():
    assert len(SHOWN) > 80
    assert {words[0] for _, words in SHOWN} >= set(cli.COMMANDS) - {
        "kubernetes"
    }


def run_all(path, folder):
    for text in blocks(path, "sh"):
        for words in commands_in(text):
            done = clusters.mgpu_tf(*words, cwd=folder)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            said = done.stdout + done.stderr
            assert ".cc:" not in said, words
            yield words


@pytest.mark.full
def test_the_page_of_reports(tmp_path):
    names = [words[0] for words in run_all(ROOT / "docs/reports.md", tmp_path)]
    assert names == ["train", "train", "report", "train", "status"]
    html = (tmp_path / "runs" / "a" / "report.html").read_text()
    assert "<h1>a and b</h1>" in html


@pytest.mark.matrix
def test_the_commands_of_the_readme(tmp_path):
    """Ten trainings, of which the full tier has each kind elsewhere."""
    rows = list(readme.run_all(tmp_path))
    assert [row["command"] for row in rows] == readme.commands()
    assert (tmp_path / "trace.html").exists()
    assert (tmp_path / "runs" / "a" / "report.html").exists()


def test_the_readme_has_the_seconds_of_each_of_its_commands():
    values = json.loads(readme.RESULTS.read_text())
    assert [row["command"] for row in values["rows"]] == readme.commands()
    assert "\n".join(
        [readme.MARKS[0], readme.table(values), readme.MARKS[1]]
    ) in (readme.README.read_text())


def test_a_shell_completes_commands_and_flags():
    script = completion.script(cli.COMMANDS)
    for words, found in (
        ("mgpu-tf rep", ["replay", "report"]),
        ("mgpu-tf train --global_b", ["--global_batch_size="]),
        ("mgpu-tf status --ev", ["--every="]),
    ):
        last = len(words.split()) - 1
        ask = (
            f"COMP_WORDS=({words}); COMP_CWORD={last}; _mgpu_tf; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert sorted(done.stdout.split()) == found


@pytest.mark.full
def test_this_installation():
    done = clusters.mgpu_tf("test")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "Your setup works."
    assert done.stderr == ""


@pytest.mark.parametrize("page", ["start.md", "recipes.md"])
def test_the_scripts_of_a_page(page, strategies, tmp_path, monkeypatch):
    """Those that a reader copies whole; others are files with tests."""
    strategies["one_device"]  # The CPU is split before the first operation.
    monkeypatch.chdir(tmp_path)
    scripts = [
        text
        for text in blocks(ROOT / "docs" / page, "python")
        if "--8<--" not in text
    ]
    for text in scripts:
        exec(compile(text, page, "exec"), {"__name__": "__main__"})
    assert scripts
