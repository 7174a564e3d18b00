"""The committed tables of the planner are those that the experiments make."""

import json
import pathlib

from experiments.planner import memory, published
from mgpu_tf.planner.scratch import FITTED
from tests import clusters

DOCS = pathlib.Path(clusters.ROOT) / "docs"


def test_published_tables_are_as_predicted_now():
    rows = published.table()
    text = (DOCS / "planner_published.md").read_text()
    assert text == published.markdown(rows)
    told = json.loads((DOCS / "planner_published.json").read_text())
    assert told["rows"] == rows
    assert told["summary"]["median_points"] <= 5


def test_no_row_is_predicted_from_itself():
    fitted = {
        series.machine.name: series.model
        for series in published.SERIES
        if series.fitted
    }
    assert set(fitted) == {series.machine.name for series in published.SERIES}
    for machine in {series.machine for series in published.SERIES}:
        own = [s for s in published.SERIES if s.machine is machine and s.fitted]
        assert len(own) == 1


def test_memory_is_as_near_as_the_table_says():
    told = json.loads((DOCS / "planner_memory.json").read_text())
    assert (DOCS / "planner_memory.md").read_text() == memory.markdown(told)
    assert told["fitted_on_all"] == FITTED
    summary = told["summary"]
    assert summary["cases"] >= 24
    assert summary["models"] == 12
    assert summary["median_error"] <= 0.07
    assert summary["worst_error"] <= 0.2
    assert {tuple(row["case"]) for row in told["rows"]} <= set(memory.CASES)
