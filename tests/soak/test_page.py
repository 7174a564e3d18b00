"""The page of the soak says what each kind of fault is."""

from tests.soak import harness, run


def test_each_kind_has_a_meaning():
    assert set(run.MEANING) == {*harness.KINDS, *harness.KINDS_OF_MACHINES}


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
    assert "- A note." in page
