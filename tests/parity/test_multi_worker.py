"""Real processes against Keras's own `fit` on one device.

A slice of the matrix. Of the rows of weights that are split over workers each
runs in one layout, and a few in all. One cluster is started for each layout,
and all of its rows run in it. `test_two_workers` has what the default tests
run of two workers.
"""

import pytest

from tests import clusters
from tests.parity import cases, judge, test_two_workers, worker
from tests.tiers import dealt

EVERYWHERE = [
    *(
        f"{o}_{c}"
        for o in ("sgd", "momentum", "adam")
        for c in ("clipnorm", "global_clipnorm", "clipvalue")
    ),
    "sgd",
    "momentum",
    "adam",
    "even",
    "last_batch_of_1",
    "last_batch_of_3",
    "last_batch_of_5",
]
ROWS = {
    "2_workers": [
        *EVERYWHERE,
        "accumulation_3_uneven",
        "ema_accumulation",
        "loss_scale_overflow",
        "batch_norm_synchronized",
        "batch_norm",
        "dropout",
        "augmentation",
        "mask",
        "auc",
        "f1",
        "scores_of_1797",
        "weighted_mean",
        "own_train_step",
        "own_train_step_clipped",
        "own_compute_loss",
        "nadam",
        "two_optimizers",
        "mixed_bfloat16",
        "dict_inputs_two_outputs",
        "embedding_adam",
        "embedding_adagrad",
        "embedding_lazy_adam",
        "embedding_global_clipnorm",
        "embedding_accumulation",
        "jit_compile",
    ],
    "2_workers_x2": [
        *EVERYWHERE,
        "accumulation_clipped",
        "ema_overwrite",
        "loss_scale_overflow",
        "batch_norm",
        "dropout",
        "add_loss_empty_replica",
        "embedding_adam",
    ],
    "3_workers": [
        "embedding_adam",
        "embedding_lazy_adam",
        "embedding_scaled",
        "adam_global_clipnorm",
        "accumulation_2",
        "dropout",
        "loss_scale_overflow",
        "batch_norm_synchronized",
        "f1",
        "auc",
        "scores_of_1797",
        "last_batch_of_1",
        "last_batch_of_2",
        "own_train_step",
        "own_train_step_clipped",
        "own_compute_loss",
        "two_optimizers",
        "subclassed",
    ],
}
_SPLIT = [
    *EVERYWHERE,
    "accumulation_3_uneven",
    "accumulation_clipped",
    "ema_accumulation",
    "ema_overwrite",
    "loss_scale_overflow",
    "constraint",
    "batch_norm_synchronized",
    "batch_norm",
    "dropout",
    "mask",
    "auc",
    "nadam",
    "two_optimizers",
    "mixed_float16",
    "mixed_bfloat16",
    "embedding_adam",
    "embedding_lazy_adam",
    "embedding_global_clipnorm",
    "embedding_accumulation",
    "own_compute_loss",
]
# Weights that are split over the devices of all workers.
MESHES = {
    "2_workers_fsdp_2": "1,2,weights",
    "2_workers_zero1": "1,2,optimizer",
    "2_workers_x2_fsdp_4": "1,4,weights",
    "2_workers_x2_data_2_fsdp_2": "2,2,gradients",
    "3_workers_fsdp_3": "1,3,gradients",
    "2_workers_x2_tensor_4": "1,1,weights,4",
    "2_workers_x2_fsdp_2_tensor_2": "1,2,weights,2",
}
# Of each layout.
QUICK = test_two_workers.ROWS
_dealt = dealt(
    [n for n in _SPLIT if n not in QUICK],
    list(MESHES),
    # Refused by name, as in one process.
    [("2_workers_x2_fsdp_2_tensor_2", "embedding_lazy_adam")],
)
ROWS |= {
    layout: [*QUICK, *(name for mesh, name in _dealt if mesh == layout)]
    for layout in MESHES
}
ROWS["2_workers"] = [n for n in ROWS["2_workers"] if n not in QUICK]
LAYOUTS = {
    "2_workers": (2, 1),
    "2_workers_x2": (2, 2),
    "3_workers": (3, 1),
    "2_workers_fsdp_2": (2, 1),
    "2_workers_zero1": (2, 1),
    "2_workers_x2_fsdp_4": (2, 2),
    "2_workers_x2_data_2_fsdp_2": (2, 2),
    "3_workers_fsdp_3": (3, 1),
    "2_workers_x2_tensor_4": (2, 2),
    "2_workers_x2_fsdp_2_tensor_2": (2, 2),
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
                hashes = clusters.run_parity_cases(
                    *LAYOUTS[layout], names, folder, mesh=MESHES.get(layout, "")
                )
            except AssertionError as error:
                hashes = error
            known[layout] = folder, hashes
        folder, hashes = known[layout]
        if isinstance(hashes, AssertionError):
            raise hashes  # Not once more for each row.
        return folder, hashes

    return of


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ROWS for name in ROWS[layout]],
)
def test_row(layout, name, outcomes):
    folder, hashes = outcomes(layout)
    result = cases.Result.load(worker.result_file(folder, name))
    holds, difference = judge.verdict(name, result, hashes[name])
    assert holds, (difference, hashes[name])


@pytest.mark.full
def test_float32(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float32")
    clusters.run_parity_cases(2, 1, ["sgd", "adam"], folder, "float32")
    for name in ("sgd", "adam"):
        reference = cases.run_stock(cases.CASES[name])
        result = cases.Result.load(worker.result_file(folder, name))
        assert result.loss_difference(reference) < 1e-5
        if name == "sgd":
            assert result.largest_difference(reference) < 1e-5
