"""The site: it builds without a warning, and has every public name."""

import dataclasses
import importlib.util
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import mgpu_tf
from tests import clusters

ROOT = pathlib.Path(clusters.ROOT)
DOCS = ROOT / "docs"
REFERENCE = "".join(p.read_text() for p in (DOCS / "reference").glob("*.md"))
SHOWN = set(re.findall(r"^::: (\S+)$", REFERENCE, re.M))


def _load(name):
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "website" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look it up.
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", sorted({*mgpu_tf.__all__} - {"__version__", *mgpu_tf._MODULES})
)
def test_a_public_name_is_in_the_reference(name):
    assert f"{mgpu_tf._HOMES[name]}.{name}" in SHOWN


@pytest.mark.parametrize("name", mgpu_tf._MODULES)
def test_the_names_of_a_public_module_are_in_the_reference(name):
    module = getattr(mgpu_tf, name)
    listed = getattr(module, "__all__", None) or [
        key
        for key, value in vars(module).items()
        if inspect.getmodule(value) is module and not key.startswith("_")
    ]
    for key in listed:
        value = getattr(module, key)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert f"{value.__module__}.{key}" in SHOWN, key


def test_docstrings_are_shown_as_code_and_lists():
    shown = _load("docstrings").shown(
        "One.\n\nExample:\n    a = 1\n\n    b = 2\n\nArgs:\n"
        "    **options: The fields:\n        one: First,\n            more.\n"
    )
    assert "    ```python\n    a = 1\n\n    b = 2\n    ```\n" in shown
    assert "        - `one`: First," in shown


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "mgpu_tf.options.StepOptions",
            "gradient_dtype: .*One of: bfloat16, float16.",
        ),
        ("mgpu_tf.options.SaveOptions", "keep_checkpoints: .*Default: 3."),
        ("mgpu_tf.config.RunConfig", "epochs: .*Default: 5."),
    ],
)
def test_the_reference_has_the_help_of_each_option(path, line):
    text = _load("docstrings").fields_of(path)
    assert re.search(f"^    {line}", text, re.M)
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    fields = [f for f in dataclasses.fields(kind) if "help" in f.metadata]
    assert text.count("\n    ") == len(fields) > 5


def test_other_classes_have_no_options():
    fields_of = _load("docstrings").fields_of
    assert fields_of("mgpu_tf.reports.report.Report") == ""


def test_the_table_of_errors_has_what_is_raised():
    table = _load("hooks").table()
    assert (
        "| A generator can be read once. | Pass steps\\_per\\_epoch, or a "
        "PyDataset or tf.data.Dataset. |"
    ) in table
    assert table.count("\n| ") > 200


def test_pictures_are_those_of_the_script():
    pictures = _load("pictures")
    for name, picture in pictures.pictures().items():
        for theme in pictures.THEMES:
            path = pictures.FOLDER / f"{name}-{theme}.svg"
            assert path.read_text() == pictures.draw(picture, theme)
        assert f"{name}-light.svg" in (DOCS / "strategies.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            *(clusters.PYTHON, "-m", "mkdocs", "build", "--strict"),
            f"--site-dir={folder}",
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_it_builds_without_a_warning(site):
    text = (site / "reference" / "training.html").read_text()
    assert "Trains a Keras 3 model on a strategy" in text
    text = (site / "reference" / "options.html").read_text()
    assert "keep_checkpoints" in text


@pytest.mark.full
def test_no_page_takes_a_script_or_a_style_from_the_network(site):
    taken = re.compile(r'<(?:script[^>]* src|link[^>]* href)="?(?:https?:)?//')
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert not [path for path in pages if taken.search(path.read_text())]


@pytest.mark.full
def test_each_link_leads_to_a_file(site):
    link = re.compile(r'(?:href|src)="?([^" >#?]+)')
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    links = {
        (path.parent / found, path.name)
        for path in pages
        for found in link.findall(path.read_text())
        if not re.match("[a-z]+:", found)
    }
    assert len(links) > 1000
    assert not [pair for pair in links if not pair[0].exists()]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.full
@pytest.mark.parametrize("page", ["index.html", "reference/training.html"])
def test_a_page_opened_from_a_file_can_be_searched(page, site):
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--virtual-time-budget=60000", "--dump-dom"),
            f"file://{site / page}?q=checkpoint",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    [found] = re.findall(r"(\d+) matching documents", done.stdout)
    assert int(found) > 10
    assert f'href="file://{site}/checkpoints.html?h=checkpoint"' in done.stdout
