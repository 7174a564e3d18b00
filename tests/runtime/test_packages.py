"""The wheel and the sdist: built, installed alone, and used."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests import clusters

pytestmark = pytest.mark.full

ROOT = pathlib.Path(clusters.ROOT)
UV = pathlib.Path(sys.executable).with_name("uv")
BUILT_FROM = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg")


def run(*command, folder):
    """Runs a command that sees nothing of this checkout; returns its output."""
    # Of what is installed a small part is imported, and compiled then.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TF_CONFIG", "UV_COMPILE_BYTECODE")
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in hidden},
        capture_output=True,
        text=True,
        timeout=clusters.LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that was built from it, by name."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "mgpu_tf",
        source / "mgpu_tf",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    folder = tmp_path_factory.mktemp("built")
    run(UV, "build", "--quiet", f"--out-dir={folder}", source, folder=folder)
    [sdist] = folder.glob("*.tar.gz")
    [wheel] = folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    python = ("--python", sys.executable)
    run(UV, "venv", "--quiet", "--clear", *python, folder, folder=folder)
    return folder


@pytest.fixture
def installed(request, built, environment, tmp_path):
    """A folder with programs: an environment that has one of them alone.

    What it needs stays there for the next.
    """
    python = environment / "bin" / "python"
    run(
        *(UV, "pip", "install", "--quiet", "--python", python),
        *("--reinstall-package", "mgpu_tf", built[request.param]),
        folder=tmp_path,
    )
    where = run(
        python, "-c", "import mgpu_tf; print(mgpu_tf.__file__)", folder=tmp_path
    )
    assert pathlib.Path(where.strip()).is_relative_to(environment)
    return python.parent


def test_both_have_every_file(built):
    expected = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("mgpu_tf/**/*")
        if path.suffix in (".py", ".typed")
    }
    in_wheel = set(zipfile.ZipFile(built["wheel"]).namelist())
    with tarfile.open(built["sdist"]) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {n for n in in_wheel if n.startswith("mgpu_tf/")} == expected
    assert expected <= in_sdist
    assert set(BUILT_FROM) <= in_sdist


# One process before several: the first compiles what it imports.
@pytest.mark.parametrize("installed", ["sdist"], indirect=True)
def test_the_sdist_trains(installed, tmp_path):
    run(
        *(installed / "mgpu-tf", "train", "--dataset=digits", "--epochs=1"),
        *("--num_workers=1", "--output_dir=run"),
        folder=tmp_path,
    )
    report = clusters.report_in(tmp_path / "run")
    assert report["global_step"] > 0


@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_the_wheel_runs_the_demo(installed, tmp_path):
    demo = ROOT / "experiments" / "demo.py"
    printed = run(installed / "python", demo, folder=tmp_path)
    difference = re.search(r"one device: (\S+)$", printed.strip())[1]
    assert float(difference) < 1e-5
