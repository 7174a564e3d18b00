"""The notebooks run from their first cell to their last."""

import os
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests import clusters

FOLDER = pathlib.Path(clusters.ROOT) / "notebooks"


def executed(path, folder, smaller=None):
    """Runs a notebook.

    Args:
        path: Its file.
        folder: In which it runs.
        smaller: What stands in its cells, and what takes less time and is
            put in its place.
    """
    book = nbformat.read(path, as_version=4)
    for text, shorter in (smaller or {}).items():
        assert any(text in cell.source for cell in book.cells), text
        for cell in book.cells:
            cell.source = cell.source.replace(text, shorter)
    client = NotebookClient(
        book,
        timeout=clusters.LIMIT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": clusters.PATH})
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


@pytest.mark.full
def test_cluster(tmp_path):
    book = executed(FOLDER / "02_cluster.ipynb", tmp_path)
    two_workers, one_process = map(eval, outputs(book, "text/plain"))
    assert len(two_workers) == 3
    assert two_workers == pytest.approx(one_process, rel=1e-5)
    printed = [
        output.text
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    ]
    assert any("[worker 0] Epoch 3/3" in text for text in printed)
    assert "ValueError: worker 1 has no data" in printed[-1]


STAYS = """
import mgpu_tf

def stays(folder):
    import os, pathlib, time
    pathlib.Path(folder, f"{os.getpid()}").touch()
    time.sleep(3600)

mgpu_tf.launch_from_notebook(stays, ".", num_workers=2)
"""


@pytest.mark.full
def test_an_interrupted_cell_ends_its_tasks(tmp_path):
    cell = nbformat.v4.new_code_cell(STAYS)
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=[cell]),
        timeout=60,
        interrupt_on_timeout=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        client.execute(env=os.environ | {"PYTHONPATH": clusters.PATH})
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if pathlib.Path("/proc", pid).exists()]


def test_outputs_are_committed():
    for path in FOLDER.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert any(c.outputs for c in cells if c.cell_type == "code"), path


@pytest.mark.matrix
def test_sync_and_async(tmp_path):
    book = executed(FOLDER / "03_sync_vs_async.ipynb", tmp_path)
    scores, latest = (
        eval(text) for text in outputs(book, "text/plain") if text[0] != "<"
    )
    assert min(scores.values()) > 0.85
    assert latest >= 0
    assert len(outputs(book, "image/png")) == 2


@pytest.mark.full
def test_scaling_and_report(tmp_path):
    smaller = {"--steps=200": "--steps=20", "--epochs=3": "--epochs=1"}
    book = executed(FOLDER / "04_scaling_report.ipynb", tmp_path, smaller)
    assert outputs(book, "image/png")
    size, goodput = (
        eval(text)
        for text in outputs(book, "text/plain")
        if not text.startswith("<")
    )
    assert size > 10_000
    assert goodput["wall_seconds"] > goodput["step_seconds"] > 0


@pytest.mark.full
def test_model_parallel(tmp_path):
    smaller = {"Dense(1024": "Dense(256", "epochs=3": "epochs=1"}
    book = executed(FOLDER / "05_model_parallel.ipynb", tmp_path, smaller)
    [losses] = [
        eval(text) for text in outputs(book, "text/plain") if text[0] == "{"
    ]
    assert set(losses) == {"mirrored", "fsdp", "tensor"}
    for values in losses.values():
        assert values == pytest.approx(losses["mirrored"], rel=1e-5)


@pytest.mark.full
def test_a_crash_is_survived(tmp_path):
    book = executed(FOLDER / "06_survive_a_crash.ipynb", tmp_path)
    assert outputs(book, "text/plain") == ["1", "True"]


@pytest.mark.full
def test_large_batches(tmp_path):
    book = executed(FOLDER / "07_large_batches.ipynb", tmp_path)
    [last] = [
        eval(text) for text in outputs(book, "text/plain") if text[0] == "{"
    ]
    small, same, scaled = last.values()
    assert scaled < 2 * small < same


@pytest.mark.full
def test_plan(tmp_path):
    book = executed(FOLDER / "08_plan.ipynb", tmp_path)
    [gibibytes] = [
        eval(text) for text in outputs(book, "text/plain") if text[0] == "{"
    ]
    one, copies, parts = gibibytes.values()
    assert one > 7 * copies > 0
    assert parts == pytest.approx(copies, rel=0.1)
    assert len(outputs(book, "image/png")) == 2


def test_committed_outputs_have_no_noise():
    for path in FOLDER.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                assert output.output_type != "error", path
                assert ".cc:" not in output.get("text", ""), path
                assert "INFO:tensorflow" not in output.get("text", ""), path
