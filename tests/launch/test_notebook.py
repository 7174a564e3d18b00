"""A cluster from a cell: results, errors, interrupts, what cannot be sent."""

import _thread
import json
import os
import pathlib
import threading
import time

import pytest

import mgpu_tf
from mgpu_tf.launch import notebook


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def place():
    config = json.loads(os.environ["TF_CONFIG"])
    return f"{config['task']['type']} {config['task']['index']}"


def test_the_chief_returns(capfd):
    """A function that only this process has, with what it uses."""
    note = {"from": "the notebook"}

    def told(word, number=1):
        print(f"{word} of {place()}")
        return note, place(), number

    found = mgpu_tf.launch_from_notebook(told, "words", 3, num_workers=2)
    assert found == (note, "worker 0", 3)
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [
        f"[worker {index}] words of worker {index}" for index in range(2)
    ]


def test_an_error_is_raised_in_the_cell():
    def fails():
        if place() == "worker 1":
            raise ValueError("no such number: 17")
        time.sleep(600)

    with pytest.raises(mgpu_tf.WorkerError) as caught:
        mgpu_tf.launch_from_notebook(fails, num_workers=2)
    assert str(caught.value) == (
        "worker 1 failed with exit code 1: ValueError: no such number: 17"
    )
    [note] = caught.value.__notes__
    assert "in fails" in note


def test_an_interrupt_ends_all(tmp_path):
    def stays(folder):
        path = os.path.join(folder, place())
        with open(path + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".new", path)
        time.sleep(600)

    def interrupt():
        while len(list(tmp_path.glob("worker [01]"))) < 2:
            time.sleep(0.05)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        mgpu_tf.launch_from_notebook(stays, str(tmp_path), num_workers=2)
    thread.join()
    for note in tmp_path.iterdir():
        assert not pathlib.Path("/proc", note.read_text()).exists()


def test_a_script(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    assert mgpu_tf.launch_from_notebook(str(script), "--epochs", 5) is None
    assert capfd.readouterr().out.count("['--epochs', '5']") == 2


@pytest.mark.parametrize(
    ("target", "part"),
    [
        (lambda: LOCK, "TypeError: cannot pickle"),
        ("missing.py", "'missing.py', and no such file"),
        (17, "Received: 17. Pass train and its arguments"),
    ],
)
def test_mistakes(target, part):
    with pytest.raises(mgpu_tf.ConfigurationError) as caught:
        mgpu_tf.launch_from_notebook(target)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


LOCK = threading.Lock()


def test_without_cloudpickle(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(notebook.importlib, "import_module", missing)
    with pytest.raises(mgpu_tf.ConfigurationError, match=r"cloudpickle>=3"):
        mgpu_tf.launch_from_notebook(place)
