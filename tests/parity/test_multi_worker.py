"""Real processes against Keras's own `fit` on one device.

A slice of the matrix: each row in one layout, in turn, and one cluster for each
layout. `test_two_workers` has what the default tests run of two workers, the
full tier what passes between processes in a way of its own, `make matrix` the
rest; `make parity` runs every row in every layout.
"""

import pytest

from tests import clusters
from tests.parity import cases, judge, run, test_two_workers, worker
from tests.tiers import dealt, tiered

# Layouts that differ in what passes between processes.
PLAIN = ("3_workers", "2_workers_x2")
SPLIT = ("3_workers_fsdp_3", "2_workers_x2_fsdp_2_tensor_2")
# What meshes refuse, or do as replicas do.
PLAIN_ROWS = [
    "augmentation",
    "f1",
    "scores_of_1797",
    "weighted_mean",
    "own_train_step",
    "own_train_step_clipped",
    "subclassed",
    "add_loss_empty_replica",
    "embedding_adagrad",
    "embedding_scaled",
    "dict_inputs_two_outputs",
    "jit_compile",
]
MESHES = [name for name, layout in run.CLUSTERS.items() if layout[2]]
_ON_MESHES = dealt(
    [n for n in run.SPLIT_ROWS if n not in test_two_workers.ROWS],
    MESHES,
    run.SPLIT_REFUSED,
)
# What the full tier has in each layout.
_FULL = {
    "3_workers": [
        "last_batch_of_1",
        "own_train_step_clipped",
        "weighted_mean",
        "f1",
        "embedding_scaled",
        "subclassed",
    ],
    "2_workers_x2": [
        "last_batch_of_1",
        "add_loss_empty_replica",
        "jit_compile",
    ],
    "3_workers_fsdp_3": [
        "adam_global_clipnorm",
        "accumulation_3_uneven",
        "loss_scale_overflow",
        "embedding_adam",
    ],
    "2_workers_x2_fsdp_2_tensor_2": [
        "adam_global_clipnorm",
        "last_batch_of_1",
        "batch_norm_synchronized",
        "embedding_adam",
    ],
}
FULL = [(layout, name) for layout in _FULL for name in _FULL[layout]]
DEALT = [
    *FULL,
    *((layout, n) for layout in SPLIT for n in test_two_workers.ROWS),
    *((layout, name) for layout, name in _ON_MESHES if layout in SPLIT),
    *dealt(
        [
            *(name for layout, name in _ON_MESHES if layout not in SPLIT),
            *PLAIN_ROWS,
        ],
        PLAIN,
    ),
    # The sums of replicas of which one has no row.
    *((layout, "last_batch_of_1") for layout in PLAIN),
]
ROWS = {
    layout: list(dict.fromkeys(n for other, n in DEALT if other == layout))
    for layout in (*PLAIN, *SPLIT)
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Starts each cluster when its first row asks; what it left."""
    known = {}
    wanted = {
        tuple(item.callspec.params.values())
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }

    def of(layout):
        if layout not in known:
            folder = tmp_path_factory.mktemp(layout)
            names = [n for n in ROWS[layout] if (layout, n) in wanted]
            try:
                workers, devices, mesh = run.CLUSTERS[layout]
                hashes = clusters.run_parity_cases(
                    workers, devices, names, folder, mesh=mesh
                )
            except AssertionError as error:
                hashes = error
            known[layout] = folder, hashes
        folder, hashes = known[layout]
        if isinstance(hashes, AssertionError):
            raise hashes  # Not once more for each row.
        return folder, hashes

    return of


@pytest.mark.parametrize(
    ("layout", "name"),
    tiered(
        [(layout, name) for layout in ROWS for name in ROWS[layout]],
        [],
        # Of both axes, over processes that have several devices.
        [(layout, name) for layout, name in FULL if layout == SPLIT[1]],
    ),
)
def test_row(layout, name, outcomes):
    folder, hashes = outcomes(layout)
    result = cases.Result.load(worker.result_file(folder, name))
    holds, difference = judge.verdict(name, result, hashes[name])
    assert holds, (difference, hashes[name])
