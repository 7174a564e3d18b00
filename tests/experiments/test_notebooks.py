"""The notebooks run from their first cell to their last."""

import os
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

from tests import clusters

FOLDER = pathlib.Path(clusters.ROOT) / "notebooks"


def executed(path, folder):
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(
        book,
        timeout=clusters.LIMIT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": clusters.ROOT})
    return book


def outputs(book, kind):
    return [
        output.data[kind]
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if kind in output.get("data", {})
    ]


@pytest.mark.full
def test_quickstart(tmp_path):
    book = executed(FOLDER / "01_quickstart.ipynb", tmp_path)
    *curves, differences = (
        eval(text)
        for text in outputs(book, "text/plain")
        if text.startswith(("[", "{"))
    )
    one_device, mirrored, workers = curves
    assert len(one_device) == 5
    assert one_device[-1] < 0.6 < 2 < one_device[0]
    assert mirrored == pytest.approx(one_device, rel=1e-5)
    assert workers == pytest.approx(one_device, rel=1e-5)
    assert max(differences.values()) < 1e-5
    assert len(outputs(book, "image/png")) == 1


def test_outputs_are_committed():
    for path in FOLDER.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert any(c.outputs for c in cells if c.cell_type == "code"), path
