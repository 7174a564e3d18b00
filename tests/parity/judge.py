"""What a row of the matrix has to hold, by its promise."""

import numpy as np

from tests.parity import cases

FLOAT64 = 1e-9
FLOAT32 = 1e-5
# bfloat16 has 8 bits of fraction, float16 has 11.
FEW_BITS = 2e-2

_stock = {}


def expected(name):
    """Keras's own result on one device, computed once."""
    if name not in _stock:
        case = cases.CASES[name]
        cases.set_floatx(case.floatx)
        _stock[name] = cases.run_stock(case)
        cases.set_floatx("float32")
    return _stock[name]


def difference(name, result):
    """The largest difference: weights absolute, loss and scores relative."""
    reference = expected(name)
    return float(
        np.max(
            [
                result.largest_difference(reference),
                result.loss_difference(reference),
                result.score_difference(reference),
            ]
        )
    )


def limit(name):
    """The largest difference that a row may have."""
    case = cases.CASES[name]
    if case.promise == "agree":
        return np.inf
    if case.promise == "close":
        return FEW_BITS
    return FLOAT64 if case.floatx == "float64" else FLOAT32


def verdict(name, result, hashes=("one",)):
    """Returns (whether the row holds, the difference)."""
    found = difference(name, result)
    finite = all(np.isfinite(w).all() for w in result.weights)
    agree = len(set(hashes)) == 1
    # Written so that NaN does not hold.
    return finite and agree and found <= limit(name), found


STAGED = (
    "pipeline_x2",
    "data_2_pipeline_2",
    "fsdp_3_pipeline_2",
    "tensor_2_pipeline_2",
    "data_2_tensor_2_pipeline_2",
    "fsdp_2_tensor_2_pipeline_2",
)
# What a column cannot have, refused in one line.
REFUSED = (
    {
        ("central_storage_x2", "nadam"): "writes state of its own",
        ("central_storage_x2", "muon"): "writes state of its own",
        ("central_storage_x2", "own_train_step"): "of your own",
        ("central_storage_x2", "own_train_step_clipped"): "of your own",
    }
    | {
        (column, "embedding_lazy_adam"): "split by its rows"
        for column in ("fsdp_2_tensor_2", "fsdp_2_tensor_2_pipeline_2")
    }
    | {
        (column, name): rule
        for column in STAGED
        for name, rule in {
            "loss_scale_overflow": "a layer for each stage",
            "batch_norm_synchronized": "synchronized=True",
            "batch_norm_synchronized_empty": "synchronized=True",
            "jit_compile_communicating": "synchronized=True",
            "subclassed": "a functional or Sequential model",
            "own_compute_loss": "a functional or Sequential model",
            "own_train_step": "a functional or Sequential model",
            "own_train_step_clipped": "a functional or Sequential model",
        }.items()
    }
)
