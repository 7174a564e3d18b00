"""The script of docs/growth.md that measures how fast images are read."""

import pathlib
import re

import pytest

from tests import clusters

MODULE = "experiments.reading_rates"


@pytest.mark.full
def test_rates():
    page = pathlib.Path(clusters.ROOT, "docs", "growth.md").read_text()
    assert f"python -m {MODULE}" in page
    done = clusters.run(["-m", MODULE, "--images=64", "--rounds=1"])
    assert done.returncode == 0, done.stderr
    for clock in ("clock", "processor time"):
        assert f"By the {clock}:" in done.stdout
    for reader in ("image_folder", "by_hand"):
        rates = re.findall(
            rf"{reader}: (\d+) images/s by one process, (\d+) by two",
            done.stdout,
        )
        assert len(rates) == 2
        assert all(int(rate) > 0 for pair in rates for rate in pair)
    assert len(re.findall("image_folder / by_hand", done.stdout)) == 4
