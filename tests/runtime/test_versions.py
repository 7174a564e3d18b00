"""One line where TensorFlow or Keras is out of range, before it is used."""

import configparser
import pathlib
import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.runtime import versions
from tests import clusters

REQUIRES = [
    "tensorflow<2.22,>=2.19",
    "keras<3.16,>=3.14",
    "numpy>=1.26",
    'tensorflow[and-cuda]<2.22,>=2.19; extra == "gpu"',
    'keras-hub>=0.32; extra == "hub"',
]


def fake(monkeypatch, requires=REQUIRES, **installed):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    def requirements(name):
        assert name == "mgpu_tf"
        if requires is None:
            raise metadata.PackageNotFoundError(name)
        return requires

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", requirements)


def test_what_is_installed_is_in_range():
    versions.check()


@pytest.mark.parametrize(
    ("tensorflow", "keras"),
    [
        ("2.19.0", "3.14.0"),
        ("2.21.0", "3.15.1"),
        ("2.21.3", "3.15.99"),
        ("2.21.0rc1", "3.15.0.dev20261101"),
        ("2.21.0+local", "3.14.1"),
    ],
)
def test_in_range(monkeypatch, tensorflow, keras):
    fake(monkeypatch, tensorflow=tensorflow, keras=keras)
    versions.check()


@pytest.mark.parametrize(
    ("tensorflow", "keras"),
    [
        ("2.18.1", "3.15.1"),
        ("2.22.0", "3.15.1"),
        ("2.22.0rc0", "3.15.1"),
        ("2.21.0", "3.13.2"),
        ("2.21.0", "3.16.0"),
        ("2.21.0", "2.15.0"),
        ("2.18.1", "3.13.2"),
    ],
)
def test_out_of_range(monkeypatch, tensorflow, keras):
    fake(monkeypatch, tensorflow=tensorflow, keras=keras)
    with pytest.raises(ConfigurationError) as raised:
        versions.check()
    assert str(raised.value) == (
        "mgpu_tf runs with tensorflow>=2.19,<2.22 and keras>=3.14,<3.16. "
        f"Received: tensorflow {tensorflow}, keras {keras}. Run: pip install "
        "'tensorflow>=2.19,<2.22' 'keras>=3.14,<3.16'"
    )


def test_what_has_another_name_is_not_judged(monkeypatch):
    """Such as tensorflow-cpu, or a build of one's own."""
    fake(monkeypatch, keras="3.15.1")
    versions.check()
    fake(monkeypatch, keras="3.13.0")
    with pytest.raises(ConfigurationError, match=r"runs with keras>=3\.14,<3"):
        versions.check()
    fake(monkeypatch, None, tensorflow="1.0", keras="1.0")
    versions.check()


def ranges(lines):
    """By name, those that this package has a range for."""
    required = map(Requirement, filter(None, lines.splitlines()))
    return {
        requirement.name: requirement.specifier
        for requirement in required
        if requirement.name in versions.RANGED
    }


def test_range_stands_in_setup_cfg():
    config = configparser.ConfigParser()
    config.read(pathlib.Path(clusters.ROOT, "setup.cfg"))
    own = ranges(config["options"]["install_requires"])
    assert sorted(own) == sorted(versions.RANGED)
    gpu = ranges(config["options.extras_require"]["gpu"])
    assert gpu == {"tensorflow": own["tensorflow"]}
    table = pathlib.Path(clusters.ROOT, "docs", "versions.md").read_text()
    told = dict(re.findall(r"`(tensorflow|keras)([<>=].*?)`", table))
    assert {
        name: Requirement(name + bounds).specifier
        for name, bounds in told.items()
    } == own


OLD = """
from importlib import metadata
true = metadata.version
old = {"tensorflow": "2.4.0", "keras": "2.4.0"}
metadata.version = lambda name: old.get(name) or true(name)
metadata.requires = lambda _: ["tensorflow<2.22,>=2.19", "keras<3.16,>=3.14"]
import sys
import mgpu_tf
"""


@pytest.mark.parametrize(
    ("use", "unseen"),
    [
        ("mgpu_tf.create_strategy", "tensorflow"),
        pytest.param(
            "import mgpu_tf.training.trainer",
            "mgpu_tf.engine.keras_internals",
            marks=pytest.mark.full,
        ),
    ],
)
def test_told_before_it_is_used(use, unseen):
    code = f"""
try:
    {use}
except mgpu_tf.ConfigurationError as error:
    print(error)
assert {unseen!r} not in sys.modules
"""
    done = clusters.run(["-c", OLD + code])
    assert done.returncode == 0, done.stderr
    assert "Received: tensorflow 2.4.0, keras 2.4.0. Run" in done.stdout


def test_told_by_the_command():
    code = """
from mgpu_tf import cli
status = cli.main(["train", "--dataset=digits"])
assert "tensorflow" not in sys.modules
sys.exit(status)
"""
    done = clusters.run(["-c", OLD + code])
    assert done.returncode == 2
    assert done.stderr.startswith("mgpu-tf: mgpu_tf runs with tensorflow>=2.19")
    assert len(done.stderr.splitlines()) == 1
