"""The script of docs/embeddings.md, with small tables."""

import pathlib

import pytest

from tests import clusters

PAGE = (pathlib.Path(clusters.ROOT) / "docs" / "embeddings.md").read_text()
SCRIPT = "experiments/embeddings.py"


@pytest.mark.full
def test_numbers_of_one_device():
    assert f"```sh\npython {SCRIPT}\n```" in PAGE
    done = clusters.run(
        [
            *(SCRIPT, "--rows=20000", "--checked_rows=5000", "--rounds=1"),
            *("--steps=4", "--optimizers=adagrad,lazy_adam"),
            "--strategies=mirrored_x2,2_workers,spread_x3",
        ]
    )
    assert done.returncode == 0, done.stderr
    lines = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    assert [line[:2] for line in lines] == [
        [strategy, optimizer]
        for strategy in ("mirrored_x2", "2_workers", "spread_x3")
        for optimizer in ("adagrad", "lazy_adam")
    ]
    for line in lines:
        assert float(line[-1]) < 1e-12
