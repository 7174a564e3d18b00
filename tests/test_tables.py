"""The tables of docs/ say which sources they are of."""

import json

import pytest

from tests import tables


@pytest.mark.parametrize("table", tables.ALL, ids=lambda table: table.name)
def test_is_of_these_sources(table):
    """Told and not red, since each change makes it old: see release-check."""
    if line := table.old():
        pytest.skip(line)


@pytest.mark.parametrize("table", tables.ALL, ids=lambda table: table.name)
def test_the_page_says_what_its_results_are_of(table):
    values = json.loads(table.results.read_text())
    page = table.results.with_suffix(".md").read_text()
    assert tables.stated(values) in page


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small tree with one table of its sources."""
    for name in ("mgpu_tf/a.py", "tests/parity/b.py", "tests/parity/test_c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one\n")
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "ALL", (tables.PARITY,))
    write(sources=tables.PARITY.digest())
    return tmp_path


def write(**values):
    tables.PARITY.results.write_text(json.dumps(values))


def test_new(tree, capsys):
    assert tables.main() == 0
    assert capsys.readouterr().out == "1 tables are of these sources\n"


@pytest.mark.parametrize(
    ("changed", "old"),
    [
        ("mgpu_tf/a.py", True),
        ("mgpu_tf/new.py", True),
        ("tests/parity/b.py", True),
        ("tests/parity/test_c.py", False),
        ("tests/d.py", False),
    ],
)
def test_what_makes_it_old(changed, old, tree, capsys):
    known = tables.PARITY.digest()
    (tree / changed).write_text("two\n")
    assert tables.main() == old
    if old:
        now = tables.PARITY.digest()
        assert capsys.readouterr().out == (
            f"docs/parity.json is of other sources: {known[:12]}, now "
            f"{now[:12]}. Run: make parity\n"
        )


def test_cells_that_were_kept(tree, capsys):
    write(sources=tables.PARITY.digest(), kept=True)
    assert tables.main() == 1
    assert "partly of older sources" in capsys.readouterr().out


def test_missing(tree, capsys):
    tables.PARITY.results.unlink()
    assert tables.main() == 1
    assert capsys.readouterr().out == (
        "docs/parity.json is missing. Run: make parity\n"
    )
