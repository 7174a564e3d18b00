"""Which tier runs a test: default, full, or the whole matrix.

CONTRIBUTING.md has the rule.
"""

import collections
import itertools
import json
import pathlib
import zlib

import pytest

full = pytest.mark.full
matrix = pytest.mark.matrix


def tiered(rows, quick, full_of=None):
    """Returns rows for `parametrize`, marked by the tier that runs them.

    Args:
        rows: Values, or tuples of values.
        quick: Those of the default tier.
        full_of: Those of which the full tier has one; all by default. The
            rest is in the matrix alone.
    """
    full_of = rows if full_of is None else full_of
    missing = [row for row in (*quick, *full_of) if row not in rows]
    assert not missing, missing
    marked = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if row in quick else full if row in full_of else matrix
        marked.append(pytest.param(*values, marks=marks))
    return marked


def dealt(rows, columns, refused=()):
    """Returns pairs of a column and a row: each row with one column, in turn.

    `make parity` runs each row with each column.
    """
    pairs = []
    for turn, row in enumerate(rows):
        for skipped in range(len(columns)):
            pair = columns[(turn + skipped) % len(columns)], row
            if pair not in refused:
                pairs.append(pair)
                break
    return pairs


# Their cases share a cluster, which is most of what they take. They wait for
# limits of a link or of a task that is lost, while others compute.
WHOLE = ("tests/cluster/", "tests/launch/")
# Half a minute of the processor each, or what another test sees as well.
LONG = (
    "tests/asynchronous/test_cluster.py::test_one_worker_equals_one_device",
    "tests/checkpoints/test_draws.py::test_same_bits_on_three_workers",
    "tests/checkpoints/test_local.py::test_one_machine_has_the_parts_of_others",
    "tests/checkpoints/test_objects.py::test_an_evaluator_follows_an_address",
    "tests/data/test_indexed.py::test_workers_read_their_own_rows",
    "tests/data/test_kinds.py::test_two_workers",
    "tests/data/test_tasks.py::test_two_workers",
    "tests/engine/test_tensor_parallel.py::test_parts_of_parts",
    "tests/experiments/test_embeddings.py::test_numbers_of_one_device",
    "tests/experiments/test_hyperparameter_search.py::test_trials_have_the_numbers_of_one_device",
    "tests/experiments/test_memory_limit.py::test_from_a_preset_to_a_saved_model",
    "tests/experiments/test_model_parallel.py::test_experiment",
    "tests/experiments/test_notebooks.py::test_a_crash_is_survived",
    "tests/experiments/test_notebooks.py::test_sync_and_async",
    "tests/experiments/test_planner.py::test_a_model_larger_than_memory_is_planned",
    "tests/experiments/test_random_rows.py::test_a_ratio_for_each_model_with_and_without_xla",
    "tests/experiments/test_reading_rates.py::test_rates",
    "tests/experiments/test_tutorials.py::test_two_workers",
    "tests/experiments/test_why.py::test_keras_fails_where_this_package_does_not",
    "tests/models/test_applications.py::test_losses_of_one_device",
    "tests/soak/test_slice.py::test_what_ends_the_run_is_mended_and_the_same_bits",
    "tests/strategies/test_split_over_workers.py::test_each_process_stores_its_share",
    "tests/training/test_agreement.py::test_three_workers",
    "tests/training/test_out_of_memory.py::test_a_device_with_too_little_memory",
    "tests/training/test_replay.py::test_a_model_at_fault",
)
FAULTS = pathlib.Path(__file__).parents[1] / "docs" / "mutations.json"


def leave_to_the_matrix(items):
    """Marks items so that the full tier has one case of most tests.

    Which one depends on the test's name, so that the tests of a file train on
    different strategies. Cases that saw a planted fault stay too.

    Args:
        items: Those that pytest collected.
    """
    faults = json.loads(FAULTS.read_text())["faults"].values()
    seeing = {found["test"] for found in faults}
    tests = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("full") and not item.nodeid.startswith(
            WHOLE
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        kept = cases[zlib.crc32(name.encode()) % len(cases)]
        for case in cases:
            runs = case is kept and name not in LONG
            if not runs and case.nodeid not in seeing:
                case.add_marker(matrix)


def in_turn(items, drawn_by=""):
    """Returns items so that files that wait come in turn with others.

    Args:
        items: Those of a tier, file by file.
        drawn_by: Draws the order of files, if it is not empty.
    """
    files = collections.defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    names = list(files)
    if drawn_by:
        names.sort(key=lambda file: zlib.crc32(f"{drawn_by} {file}".encode()))
    waiting = [file for file in names if file.startswith(WHOLE)]
    others = [file for file in names if not file.startswith(WHOLE)]
    pairs = itertools.zip_longest(waiting, others)
    return [
        item for pair in pairs for file in pair for item in files.get(file, ())
    ]
