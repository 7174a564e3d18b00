"""Stages in several processes, against Keras's `fit` in float64."""

import os
import re
import shutil

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.checkpoints import store
from tests import clusters
from tests.jobs import staged
from tests.tiers import full, matrix, tiered

# Processes and the devices of each -> what is trained there.
LAYOUTS = {
    "2_workers": (2, 1),
    "2_workers_x2": (2, 2),
    "3_workers": (3, 1),
    "4_workers": (4, 1),
    "2_workers_x4": (2, 4),
}
TRAINED = {
    "2_workers": [
        *("skip", "gpipe", "drops", "normalizes", "scaled", "masked"),
        *("own_loss", "shared_table", "shared_layer", "transformer"),
    ],
    "2_workers_x2": [
        *("of_4", "drops_data_2", "muon_fsdp_2", "transformer_tensor_2"),
    ],
    "3_workers": ["of_3", "transformer_of_3"],
    "4_workers": [
        *("drops_data_2", "skip_fsdp_2", "transformer_data_2"),
    ],
    "2_workers_x4": [
        *("transformer_data_2_tensor_2", "own_step_data_2_tensor_2"),
        *("drops_fsdp_2_tensor_2", "measured_data_2_tensor_2"),
    ],
}
PAIRS = [(layout, row) for layout, rows in TRAINED.items() for row in rows]
FULL = [
    *(("2_workers", "shared_table"), ("2_workers", "masked")),
    *(("2_workers_x4", row) for row in TRAINED["2_workers_x4"]),
]
# A busy machine takes long for all jobs of a cluster; each has its own limit.
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: str(tmp_path_factory.mktemp(name)) for name in LAYOUTS}


@pytest.fixture(scope="module")
def observed(folders, request):
    """Starts each cluster when its first test asks, for all tests of it."""
    known = {}
    wanted = {
        (params["layout"], params["job"])
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
        for params in [item.callspec.params]
    }

    def of(layout, job):
        if layout not in known:
            names = [n for n in staged.JOBS if (layout, n) in wanted]
            workers, devices = LAYOUTS[layout]
            known[layout] = clusters.run_jobs(
                staged, workers, folders[layout], names, devices
            )
        return known[layout][job]

    return of


def check(path, expected):
    with np.load(path) as found:
        assert sorted(found.files) == sorted(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                found[name], value, rtol=0, atol=1e-9, err_msg=name
            )


def on_two(job):
    return pytest.mark.parametrize(("layout", "job"), [("2_workers", job)])


RESUMED = pytest.mark.parametrize(
    ("layout", "job"),
    [("2_workers", "checkpointed"), ("2_workers_x4", "checkpointed_in_parts")],
)


@pytest.mark.parametrize(
    ("layout", "job"), tiered(PAIRS, [("2_workers", "skip")], FULL)
)
def test_the_numbers_of_one_device(layout, job, observed, folders, float64):
    every = observed(layout, job)
    assert len({worker["sum"] for worker in every}) == 1
    expected = staged.by_hand(job)
    check(staged.file_of(folders[layout], job), expected)
    copies = staged.ROWS[job].options.get("data", 1)
    for path, sizes in elements(every).items():
        held = sorted(size for size in sizes if size)
        options = staged.ROWS[job].options
        splits, parts = options.get("fsdp", 1), options.get("tensor", 1)
        whole = splits * copies
        assert len(held) in (copies, whole, parts * whole), path


@full
@pytest.mark.parametrize(("layout", "job"), [("2_workers_x4", "own_step")])
def test_a_step_of_ones_own(layout, job, observed, folders, float64):
    observed(layout, job)
    check(staged.file_of(folders[layout], job), staged.by_hand(job))


@pytest.mark.parametrize(
    ("layout", "job"),
    tiered(
        [(each, "normalizes_data_2") for each in ("2_workers_x2", "4_workers")],
        *([], []),
    ),
)
def test_statistics_are_those_of_replicas(
    layout, job, observed, folders, strategies, float64
):
    """Each of 2 replicas normalizes its rows, as without stages."""
    observed(layout, job)
    expected, _ = staged.run(job, strategies["mirrored_x2"])
    check(staged.file_of(folders[layout], job), expected)


def elements(every):
    """The elements of each variable in each process."""
    return {
        path: [worker["holds"][path] for worker in every]
        for path in every[0]["holds"]
    }


@on_two("stored")
def test_a_process_has_nothing_of_another_stage(layout, job, observed):
    every = observed(layout, job)
    first, _ = every
    assert [worker["memory"] for worker in every] == [
        ["worker:0 CPU:0 stage 0"],
        ["worker:1 CPU:0 stage 1"],
    ]
    # Weights and two slots of each, in one process and not in the other.
    assert len(first["holds"]) == 8 * 3
    for path, sizes in elements(every).items():
        assert sorted(size > 0 for size in sizes) == [False, True], path
    kernels = {(6, 31), (31, 29), (29, 23), (23, 2)}
    seen = [{tuple(s) for s in worker["shapes"]} & kernels for worker in every]
    assert seen[0] and seen[1]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == kernels


@on_two("stored")
def test_files_have_the_ordinary_layout(layout, job, observed, folders):
    observed(layout, job)
    path = os.path.join(folders[layout], "staged")
    with np.load(path + ".npz") as file:
        expected = [file[name] for name in file.files]
    loaded = keras.models.load_model(path + ".keras")
    for ours, theirs in zip(staged.values_of(loaded), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model = staged.plain()()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path + ".weights.h5")
    for ours, theirs in zip(staged.values_of(model), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@full
@RESUMED
def test_resumed_bit_for_bit(layout, job, observed):
    for worker in observed(layout, job):
        assert worker["step"] == 10
        assert all(worker["same"])


@full
@RESUMED
def test_resumed_on_one_device(
    layout, job, observed, folders, tmp_path, strategies, float64
):
    observed(layout, job)
    folder = str(tmp_path / "copy")
    shutil.copytree(os.path.join(folders[layout], "checkpoints"), folder)
    first, second = sorted(store.entries(folder), key=lambda e: e.step)
    assert (first.step, second.step) == (5, 10)
    shutil.rmtree(second.path)
    resumed = mgpu_tf.Trainer(staged.plain(), strategies["one_device"])
    staged.fit(resumed, checkpoint_dir=folder)
    assert resumed.global_step == 10
    with np.load(os.path.join(folders[layout], "whole.npz")) as file:
        expected = [file[name] for name in file.files]
    for ours, theirs in zip(
        staged.values_of(resumed.model), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@matrix
@on_two("lengths")
def test_lengths_that_no_graph_knows(layout, job, observed):
    for ours, theirs in observed(layout, job):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@full
@on_two("refused")
def test_refused_by_name(layout, job, observed):
    rules = {
        "own train_step": "train_step of OwnStep",
        "Muon": "Received: Muon",
        "noise": "noise_scale=True",
        "eager": "run_eagerly=True",
        "unseeded": "draws without a seed in the stage of",
    }
    for worker in observed(layout, job):
        assert worker.keys() == rules.keys()
        for name, rule in rules.items():
            assert rule in worker[name]
            assert "\n" not in worker[name]


@matrix
def test_a_killed_process_ends_the_job_which_resumes_with_the_same_bits(
    tmp_path,
):
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--max_restarts=1"),
        *("--startup_seconds=0", "--isolate=off", "--", clusters.PYTHON),
        *("-m", "tests.engine.pipeline.killed", f"--folder={tmp_path}"),
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "worker 1 failed with SIGKILL; ended worker 0" in said
    pattern = r"^\[worker (\d)\] RESULT (\S+) (\d) (\S+)$"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    # The chief counts restarts.
    counts = {(worker, name): n for worker, name, n, _ in found}
    assert len(counts) == 4
    assert (counts["0", "whole"], counts["0", "killed"]) == ("0", "1")
    assert len({sha for *_, sha in found}) == 1
