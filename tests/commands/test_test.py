"""The command `mgpu-tf test`; tests/test_commands_in_docs.py runs it whole."""

import importlib.util
import pathlib
import sys

import pytest

from mgpu_tf.commands import test


@pytest.mark.parametrize(
    ("may_not_write", "installed", "kept"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_bytecode_is_kept_where_nobody_keeps_it(
    may_not_write, installed, kept, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", may_not_write)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "installed"))
    origin = importlib.util.find_spec("tensorflow").origin
    compiled = pathlib.Path(importlib.util.cache_from_source(origin))
    if installed:
        compiled.parent.mkdir(parents=True)
        compiled.touch()
    found = test._bytecode(str(tmp_path))
    assert bool(found) is kept
    if kept:
        assert found["PYTHONPYCACHEPREFIX"].startswith(str(tmp_path))
        assert not found["PYTHONDONTWRITEBYTECODE"]
