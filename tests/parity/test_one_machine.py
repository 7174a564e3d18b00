"""Strategies in one process against Keras's own `fit` on one device.

A slice of the matrix: rows that go a way of their own through the engine, each
on one column, in turn. `make parity` runs every row on every column, and `make
matrix` the other rows on one column each.
"""

import pytest

import mgpu_tf
from tests.parity import cases, judge
from tests.tiers import dealt, tiered

SPLIT = (
    "fsdp_x3",
    "data_3",
    "data_2_fsdp_2",
    "zero1_x2",
    "pipeline_x2",
    "data_2_pipeline_2",
    "fsdp_3_pipeline_2",
    "tensor_2_pipeline_2",
    "data_2_tensor_2_pipeline_2",
    "fsdp_2_tensor_2_pipeline_2",
    "tensor_x3",
    "data_2_tensor_2",
    "fsdp_2_tensor_2",
)
COLUMNS = (
    "mirrored_x3",
    *SPLIT[:-1],
    "mirrored_x2",
    "central_storage_x2",
    "one_device",
)
# Each column clips and accumulates in its own way.
EVERYWHERE = "accumulation_clipped"
# What the default tests have of it.
QUICK = [
    ("mirrored_x3", "accumulation_3_uneven"),
    ("mirrored_x3", "ema_accumulation"),
    ("mirrored_x3", "loss_scale_overflow"),
    ("mirrored_x3", "add_loss_empty_replica"),
    ("fsdp_x3", "adam_global_clipnorm"),
    ("fsdp_x3", "loss_scale_overflow"),
    ("data_3", "mixed_float16"),
    ("fsdp_2_tensor_2", "embedding_adam"),
    ("fsdp_3_pipeline_2", "adam_global_clipnorm"),
    ("tensor_2_pipeline_2", "mask"),
]
# Rows that another row, another tier's cluster or a cheaper test stands for:
# optimizers of Keras's that are given the same gradients, and what the workers
# of `test_multi_worker` run.
STOOD_FOR = (
    *("momentum", "nesterov", "adam", "adamw", "lion", "schedule", "even"),
    *("lars_nesterov", "accumulation_2", "ema", "loss_scale_factor"),
    *("sample_weight", "topk", "f1", "scores_of_1797", "convolution"),
    *("steps_per_execution_1", "steps_per_execution_8", "jit_compile"),
    *("embedding_rmsprop", "embedding_adagrad", "embedding_clipnorm"),
    *("momentum_clipnorm", "momentum_global_clipnorm", "momentum_clipvalue"),
    *("sgd_clipvalue", "adam_clipnorm", "last_batch_of_2", "last_batch_of_3"),
    *("last_batch_of_4", "last_batch_of_5", "mixed_bfloat16"),
    *("own_train_step", "dict_inputs_two_outputs", "subclassed"),
)

DEALT = dealt(list(cases.CASES), COLUMNS, judge.REFUSED)
MORE = [
    # Other default tests have these of another column.
    ("mirrored_x3", "adam_global_clipnorm"),
    ("mirrored_x3", "batch_norm_synchronized"),
    ("zero1_x2", "accumulation_3_uneven"),
    *((column, EVERYWHERE) for column in (*COLUMNS, SPLIT[-1])),
    # Both axes split a weight.
    *((SPLIT[-1], name) for name in ("adam_global_clipnorm", "mask", "auc")),
    # What is stored once constrains once.
    ("central_storage_x2", "constraint"),
]
SLICE = list(dict.fromkeys([*QUICK, *DEALT, *MORE]))
FULL = [
    *(cell for cell in DEALT if cell[1] not in STOOD_FOR),
    *(
        (column, EVERYWHERE)
        for column in ("fsdp_x3", "tensor_x3", "pipeline_x2", SPLIT[-1])
    ),
    *MORE[-4:],
]


@pytest.mark.parametrize(("column", "name"), tiered(SLICE, QUICK, FULL))
def test_row(column, name, strategies, floatx_of):
    floatx_of(cases.CASES[name])
    result = cases.run(cases.CASES[name], strategies[column])
    holds, difference = judge.verdict(name, result)
    assert holds, difference


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        list(judge.REFUSED),
        [
            key
            for key in judge.REFUSED
            if key[0] not in SPLIT[1:] or key == ("pipeline_x2", "mask")
        ],
        [
            key
            for key in judge.REFUSED
            if key[0] in ("tensor_x3", "fsdp_2_tensor_2", "pipeline_x2")
        ],
    ),
)
def test_refused_by_name(column, name, strategies, floatx_of):
    floatx_of(cases.CASES[name])
    rule = judge.REFUSED[column, name]
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule) as error:
        cases.run(cases.CASES[name], strategies[column])
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_float32(strategies):
    """Rounding stays rounding: the curve of Adam in float32."""
    reference = cases.run_stock(cases.CASES["adam"])
    result = cases.run(cases.CASES["adam"], strategies["mirrored_x2"])
    assert result.loss_difference(reference) < 1e-5
