"""The page of growth, from a small run of its script."""

import pathlib
import re

import pytest

from experiments import input_growth
from tests import clusters

PAGE = pathlib.Path(clusters.ROOT) / "docs" / "growth.md"


def result(kind, workers, files, seconds):
    return {
        "kind": kind,
        "workers": workers,
        "files": files,
        "bytes": files * 1000,
        "seconds": seconds,
        "resume_seconds": 0.5,
        "resume_files": 3,
    }


def test_the_page_is_written_from_what_was_measured():
    measured = [result("cut", 1, 100, 4.0), result("cut", 2, 50, 2.0)]
    text = input_growth.written(PAGE.read_text(), measured)
    assert (
        "| a dataset, cut before its map | 2 | 50 | 0.1 | 2.00 | 2.00 |" in text
    )
    assert text.count("cut before its map |") == 2
    # 10,000,000 images of 1,000 bytes.
    assert "| 4,096 | 39 | 10,000,000 | 10 | 2,442 | 0.00 |" in text
    assert input_growth.written(text, measured) == text


def test_the_page_has_the_figures_of_a_run():
    rows = re.findall(
        r"^\| (.*) \| ([1248]) \| ([\d,]+) \|", PAGE.read_text(), re.M
    )
    read = {(name, int(n)): int(f.replace(",", "")) for name, n, f in rows}
    images = read["tf.data by hand", 1]
    for workers in input_growth.WORKERS:
        assert read["a dataset that is not cut", workers] == images
        for name in ("a dataset, cut before its map", "`image_folder`"):
            assert read[name, workers] == pytest.approx(images / workers, abs=1)


@pytest.mark.full
def test_the_script(tmp_path):
    page = tmp_path / "growth.md"
    page.write_text(PAGE.read_text())
    done = clusters.run(
        ["experiments/input_growth.py", "--images=16", f"--out={page}"],
        cwd=clusters.ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "| a dataset, cut before its map | 4 | 16 |" in page.read_text()
