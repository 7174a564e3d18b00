"""The first script of the README, as a newcomer copies it."""

import pytest

from tests import clusters, readme


@pytest.fixture
def script(tmp_path):
    (tmp_path / "digits.py").write_text(readme.script())
    return tmp_path


@pytest.mark.full
def test_the_first_script(script):
    done = clusters.run(["digits.py"], cwd=script)
    assert done.returncode == 0, done.stderr
    assert "val_accuracy" in done.stdout
    assert done.stderr == ""
    assert (script / "model.keras").exists()


@pytest.mark.matrix
def test_the_first_script_on_two_workers(script):
    """Before a release: `tests/launch/test_ssh.py` has it on two machines."""
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--startup_seconds=0"),
        *("--", clusters.PYTHON, "digits.py"),
        cwd=script,
    )
    assert done.returncode == 0, done.stderr
    assert (script / "model.keras").exists()
