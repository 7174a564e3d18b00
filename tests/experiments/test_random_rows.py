"""The experiment on what equal random numbers cost runs."""

import json

import pytest

from tests import clusters


@pytest.mark.full
def test_a_ratio_for_each_model_with_and_without_xla(tmp_path):
    done = clusters.run(
        [
            "experiments/random_rows.py",
            f"--output_dir={tmp_path}",
            *("--turns=1", "--steps=2", "--batch_size=8"),
        ],
        cwd=clusters.ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "random_rows.json").read_text())
    assert len(found) == 6
    assert all(0.2 < ratio < 5 for ratio in found.values())
