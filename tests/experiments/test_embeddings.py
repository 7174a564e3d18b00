"""The commands of docs/embeddings.md, with small tables."""

import shlex

import pytest

from tests import clusters, pages

SMALL = ["--rows=20000", "--checked_rows=5000", "--rounds=1", "--steps=4"]


def run(command, *options):
    """Runs a command of the page; returns the cells of what it prints."""
    words = shlex.split(command)
    settings = [word.split("=", 1) for word in words[: words.index("python")]]
    done = clusters.run(
        [*words[len(settings) + 1 :], *SMALL, *options], env=dict(settings)
    )
    assert done.returncode == 0, done.stderr
    return [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]


@pytest.mark.full
def test_numbers_of_one_device():
    plain, with_huge_pages = pages.blocks("embeddings.md", "sh")
    strategies = ["mirrored_x2", "2_workers", "spread_x3"]
    optimizers = ["adagrad", "lazy_adam"]
    lines = run(
        plain,
        f"--optimizers={','.join(optimizers)}",
        f"--strategies={','.join(strategies)}",
    )
    assert [line[:2] for line in lines] == [
        [strategy, optimizer]
        for strategy in strategies
        for optimizer in optimizers
    ]
    lines += run(
        with_huge_pages, "--optimizers=sgd", "--strategies=mirrored_x2"
    )
    assert len(lines) == 7
    for line in lines:
        assert float(line[-1]) < 1e-12
