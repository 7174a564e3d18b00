"""The first script of the README, as a newcomer copies it."""

import pathlib
import re

import pytest

from tests import clusters

README = pathlib.Path(clusters.ROOT) / "README.md"


@pytest.fixture
def script(tmp_path):
    [text] = re.findall(
        r"```python\n(import mgpu_tf\n\n.*?)```", README.read_text(), re.S
    )
    (tmp_path / "digits.py").write_text(text)
    return tmp_path


def test_the_first_script(script):
    done = clusters.run(["digits.py"], cwd=script)
    assert done.returncode == 0, done.stderr
    assert "val_accuracy" in done.stdout
    assert done.stderr == ""
    assert (script / "model.keras").exists()


@pytest.mark.full
def test_the_first_script_on_two_workers(script):
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--startup_seconds=0"),
        *("--", clusters.PYTHON, "digits.py"),
        cwd=script,
    )
    assert done.returncode == 0, done.stderr
    assert (script / "model.keras").exists()
