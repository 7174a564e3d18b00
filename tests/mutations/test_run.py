"""A test counts for a fault when it fails with it, and passes without."""

import pytest

from tests import clusters
from tests.mutations import run

CODE = """
import pathlib, sys
from tests.mutations import faults, run
fault = faults.Fault("one is two", "code.py", "1", "2", tuple(sys.argv[2:]))
tier, test = run.seen_by(fault, pathlib.Path(sys.argv[1]))
print("FOUND", tier, test, run.is_seen(tier), sep="|")
"""
SEES = "from mgpu_tf.code import ONE\ndef test(): assert ONE == 1\n"
RED = "def test(): assert False\n"
SEES_NOT = "def test(): pass\n"


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        ({"sees": SEES}, ["default", "tests/test_sees.py::test", "True"]),
        # What comes after a test that is red anyway was not run.
        (
            {"red": RED, "sees": SEES},
            [run.UNDECIDED, "tests/test_red.py::test", "False"],
        ),
        ({"sees_not": SEES_NOT}, [run.UNSEEN, "", "False"]),
    ],
)
def test_what_counts(tests, found, tmp_path):
    for name in ("mgpu_tf", "tests", "experiments", "notebooks", "docs"):
        (tmp_path / name).mkdir()
    (tmp_path / "mgpu_tf" / "__init__.py").touch()
    (tmp_path / "mgpu_tf" / "code.py").write_text("ONE = 1\n")
    files = [f"tests/test_{name}.py" for name in tests]
    for file, text in zip(files, tests.values(), strict=True):
        (tmp_path / file).write_text(text)
    done = clusters.run(["-c", CODE, str(tmp_path), *files], cwd=clusters.ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split("|") == ["FOUND", *found]
