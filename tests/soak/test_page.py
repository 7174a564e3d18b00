"""The page of the soak says what each kind of fault is."""

import json
import pathlib
import re

from tests.soak import harness, run


def test_each_kind_has_a_meaning():
    assert set(run.MEANING) == {*harness.KINDS, *harness.KINDS_OF_MACHINES}


def test_the_page_is_that_of_the_ledger():
    """It says what is promised, how to measure it, and what was measured."""
    page = pathlib.Path(run.TABLE).read_text()
    assert page == run.table(json.loads(pathlib.Path(run.LEDGER).read_text()))
    assert re.findall("^## (.*)", page, re.M) == [
        "How to run it",
        "What was measured",
    ]


def test_the_page_counts_what_struck():
    fault = {"kind": "save", "seconds": 12.0, "torn": True}
    job = {
        "strategy": "mirrored",
        "completed": True,
        "right": False,
        "faults": [fault, fault],
        "cold_start_seconds": 8.0,
        "lost_steps": 5,
    }
    page = run.table({"jobs": [job], "notes": ["A note."]})
    assert "**2 faults, 2 completed, 0 right.**" in page
    assert "| mirrored | 2 | 0 | 2 | 5 | 8.0 | 12.0 | 1.50 | 1.50 |" in page
    assert "chief writes a checkpoint | 2 |" in page
    assert "killed between two steps | 0 |" in page
    assert "- A note." in page
