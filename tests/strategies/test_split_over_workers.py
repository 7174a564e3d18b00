"""Weights that are split over the devices of several processes."""

import os
import shutil

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.checkpoints import store
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.saving import writer
from tests import clusters
from tests.jobs import split
from tests.parity import cases, judge
from tests.tiers import tiered

LAYOUTS = {
    "2_workers": (2, 1),
    "2_workers_x2": (2, 2),
    "2_workers_x4": (2, 4),
    "3_workers": (3, 1),
}
# What the default tests have, on two workers.
TRAINED_HERE = ["mlp_adam", "parts_mlp", "spread_table"]
QUICK = ["kinds", "first_values", "stored", "in_parts", "read_only"]
QUICK += TRAINED_HERE
# A busy machine takes long for all jobs of a cluster; each has its own limit.
pytestmark = pytest.mark.timeout(3600)
OVER_FSDP = ["2_workers", "2_workers_x2", "3_workers"]
ONTO = ["one_device", "mirrored_x3", "fsdp_x3"]


# On two workers the full tier has every job. Two workers with two devices take
# five times as long, so it has of theirs what several devices in a process
# change, and a row of `tests/parity/test_multi_worker.py`; the rest is in the
# matrix.
BOTH = ["2_workers", "2_workers_x2"]
OF_TWO_DEVICES = ["stored", "checkpointed"]


def in_full(row):
    layout, job = row
    return layout == "2_workers" or (
        layout == "2_workers_x2" and job in OF_TWO_DEVICES
    )


def by_layout(job, layouts=("2_workers",), quick=()):
    """Parametrizes a test by the cluster that it runs a job on."""
    rows = [(layout, job) for layout in layouts]
    return pytest.mark.parametrize(
        ("layout", "job"),
        tiered(
            rows,
            [(layout, job) for layout in quick],
            list(filter(in_full, rows)),
        ),
    )


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
        if "job" in params
    }

    def of(layout, job):
        if layout not in known:
            names = [n for n in split.JOBS if (layout, n) in wanted]
            workers, devices = LAYOUTS[layout]
            known[layout] = clusters.run_jobs(
                *(split, workers, folders[layout], names, devices),
                # Others end their cluster, or make very many strategies.
                shared=set(names) <= set(QUICK),
            )
        return known[layout][job]

    return of


@by_layout("kinds", ["2_workers", "2_workers_x2"], quick=["2_workers"])
def test_by_name_from_the_environment(layout, job, observed):
    workers, devices = LAYOUTS[layout]
    replicas = workers * devices
    for worker in observed(layout, job):
        assert worker == {
            "mesh": f"data=1, fsdp={replicas}",
            "workers": workers,
            "replicas": replicas,
            "split": [True, False],
            "is_mwms": True,
        }


@by_layout("first_values", OVER_FSDP, quick=["2_workers"])
def test_variables_begin_with_the_values_of_the_first(layout, job, observed):
    for worker in observed(layout, job):
        assert worker.pop("mirrored weight") == worker.pop("fsdp weight") == [0]
        assert len(worker) == 8
        for values in worker.values():
            assert values == np.arange(77).reshape(7, 11).tolist()


@by_layout("stored", OVER_FSDP, quick=["2_workers"])
def test_each_process_stores_its_share(layout, job, observed):
    workers, devices = LAYOUTS[layout]
    every = observed(layout, job)
    assert {worker["count"] for worker in every} == {15}
    assert sum(worker["share"] for worker in every) == pytest.approx(1)
    for index, worker in enumerate(every):
        # Rows of small matrices do not divide evenly.
        assert worker["share"] == pytest.approx(1 / workers, abs=0.06)
        assert worker["memory"] == [
            f"worker:{index} CPU:{i}" for i in range(devices)
        ]
    assert len({worker["whole"] for worker in every}) == 1


@by_layout("saved", ["2_workers", "2_workers_x2"], quick=[])
def test_files_have_the_ordinary_layout(layout, job, observed, folders):
    chief, *others = observed(layout, job)
    # Only the chief reads the whole model to write it.
    assert set(chief["held"]) == {True}
    assert {held for worker in others for held in worker["held"]} == {False}
    path = os.path.join(folders[layout], "split")
    with np.load(path + ".npz") as file:
        expected = [file[name] for name in file.files]
    for name in ("", "-best"):
        loaded = keras.models.load_model(f"{path}{name}.keras")
        for ours, theirs in zip(expected, split.values_of(loaded), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    model = split.mlp("adam")()
    model.optimizer.build(model.trainable_variables)
    for name in ("", "-last"):
        model.load_weights(f"{path}{name}.weights.h5")
        for ours, theirs in zip(expected, split.values_of(model), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@by_layout("in_parts", ["2_workers", "2_workers_x2"], quick=["2_workers"])
def test_each_process_writes_and_reads_its_share(
    layout, job, observed, folders, strategies
):
    every = observed(layout, job)
    total = sum(weight.nbytes for weight in split.WEIGHTS.values())
    for name in ("split", "whole"):
        assert all(all(worker[name]["equal"]) for worker in every)
        path = store.newest(os.path.join(folders[layout], f"parts-{name}")).path
        sizes = [
            os.path.getsize(os.path.join(path, f"arrays-{worker}.bin"))
            for worker in range(2)
        ]
        # Together each byte once, and each process as much as the other.
        assert sum(sizes) == total
        assert max(sizes) <= total / 2 + 8 * 5
        # Anything else reads them.
        other = strategies["fsdp_x3"]
        zeros = map(np.zeros_like, split.WEIGHTS.values())
        read = split.made_of(other, zeros)
        stored = split.StoredVariables(Stored(path))
        split.snapshot_of(read, other).put(stored)
        for variable, wanted in zip(read, split.WEIGHTS.values(), strict=True):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(variable), wanted
            )
    assert {worker["whole"]["read"] for worker in every} == {total}
    # The count is not split.
    read = sum(worker["split"]["read"] for worker in every)
    assert read == total + 8 * (len(every) - 1)


@by_layout("read_only", quick=["2_workers"])
def test_a_folder_that_one_process_cannot_write(layout, job, observed):
    first, second = observed(layout, job)
    assert first["text"] == "process 1: Read-only file system"
    assert "Read-only file system" in second["text"]
    # The first one does not wait for what cannot come.
    assert first["seconds"] < writer.WAIT_SECONDS / 3


@by_layout("mistakes", ["2_workers", "2_workers_x2"])
def test_mistakes_are_told_and_the_cluster_goes_on(layout, job, observed):
    workers, devices = LAYOUTS[layout]
    every = observed(layout, job)
    for worker in every:
        mesh, callback, eager, weights, trace = worker["told"]
        total = workers * devices
        product = f"data=3 x fsdp={total} = {3 * total} for {workers} workers"
        assert f"{product} x {devices} devices = {total}" in mesh
        assert "BackupAndRestore" in callback
        assert "run_eagerly=True" in eager
        assert "on worker 0" in weights
        assert "on worker 1" in weights
        assert "Trace in one process" in trace
        assert not any("\n" in text for text in worker["told"])
    assert len({worker["sha"] for worker in every}) == 1


@by_layout("alone")
def test_a_read_by_the_chief_alone_ends_in_one_line(layout, job, observed):
    for worker in observed(layout, job):
        assert "reading a split weight on worker 0" in worker["told"]
        assert "evaluate on worker 1" in worker["told"]
        assert "\n" not in worker["told"]


@by_layout("checkpointed", ["2_workers", "2_workers_x2"])
def test_resumed_bit_for_bit(layout, job, observed):
    every = observed(layout, job)
    assert len({worker["whole"] for worker in every}) == 1
    for worker in every:
        assert worker["resumed"] == worker["whole"]
        assert worker["step"] == 12


@pytest.mark.parametrize("onto", tiered(ONTO, [], ["mirrored_x3"]))
@by_layout("checkpointed")
def test_resumed_elsewhere(
    layout, job, onto, observed, folders, strategies, tmp_path, floatx_of
):
    observed(layout, job)
    folder = str(tmp_path / "copy")
    shutil.copytree(os.path.join(folders[layout], "checkpoints"), folder)
    first, second = sorted(store.entries(folder), key=lambda e: e.step)
    assert (first.step, second.step) == (6, 12)
    shutil.rmtree(second.path)
    floatx_of(cases.CASES["adam"])
    resumed = split.fitted(strategies[onto], checkpoint_dir=folder)
    assert resumed.global_step == 12
    with np.load(os.path.join(folders[layout], "whole.npz")) as file:
        whole = [file[name] for name in file.files]
    for ours, theirs in zip(split.values_of(resumed.model), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=judge.FLOAT64)


@by_layout("bytes_on_the_wire", ["2_workers", "2_workers_x2"])
def test_no_more_bytes_than_an_all_reduce(layout, job, observed):
    for worker in observed(layout, job):
        for shard, most in (
            ("optimizer", 1.0),
            ("gradients", 1.0),
            ("weights", 1.5),
        ):
            assert 0.99 * most <= worker[shard] <= 1.05 * most


TRAINED = [
    *((layout, row) for layout in OVER_FSDP for row in split.ROWS),
    *(
        (layout, row)
        for layout in BOTH
        for row in (*split.ROWS_IN_PARTS, "parts_by_batch", "experts")
    ),
    ("2_workers_x4", "parts_transformer"),
    *((layout, "spread_table") for layout in OVER_FSDP),
    ("3_workers", "experts"),
]
TRAINED_QUICK = [("2_workers", row) for row in TRAINED_HERE]
TRAINED_FULL = [
    ("2_workers", "mlp_adamw"),
    ("2_workers", "transformer_adam"),
    ("2_workers", "parts_cnn"),
    ("2_workers", "parts_transformer"),
    ("2_workers", "parts_by_batch"),
    ("2_workers", "experts"),
]


@pytest.mark.parametrize(
    ("layout", "job"),
    tiered(TRAINED, TRAINED_QUICK, TRAINED_FULL),
)
def test_the_numbers_of_one_device(layout, job, observed, folders, floatx_of):
    hashes = observed(layout, job)
    assert all(worker == hashes[0] for worker in hashes)
    case, meshes = split.TRAINED[job]
    floatx_of(case)
    reference = cases.run_stock(case)
    workers, devices = LAYOUTS[layout]
    for mesh in meshes[workers * devices]:
        path = split.result_file(folders[layout], job, mesh)
        result = cases.Result.load(path)
        assert result.largest_difference(reference) < judge.FLOAT64
        assert result.loss_difference(reference) < judge.FLOAT64
        assert result.score_difference(reference) < judge.FLOAT64


def test_a_cluster_with_parameter_servers_is_refused():
    cluster = mgpu_tf.ClusterConfig(
        "worker", 0, worker=("a:1", "b:1"), ps=("c:1",)
    )
    with pytest.raises(mgpu_tf.ConfigurationError, match="'model_parallel'"):
        mgpu_tf.create_model_parallel_strategy(cluster=cluster)
