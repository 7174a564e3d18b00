"""A slice of the suite, and that the suite has everything of Keras.

`make conformance` runs all rows in all columns.
"""

import pathlib

import numpy as np
import pytest

from tests.clusters import ROOT
from tests.conformance import judge, layers, losses, metrics, optimizers
from tests.conformance.harness import ROWS as ADDED
from tests.conformance.harness import Outcome, Row, observe
from tests.conformance.rows import ROWS
from tests.tiers import tiered

SLICE = [
    ("mirrored_x3", "MeanSquaredError sum, weighted"),
    ("mirrored_x3", "MeanSquaredError, masked"),
    ("mirrored_x3", "AUC"),
    ("mirrored_x3", "of one's own: a maximum"),
    ("mirrored_x3", "Adam, repeated indices"),
    ("mirrored_x3", "BatchNormalization, synchronized"),
    ("mirrored_x3", "Dropout"),
    ("mirrored_x3", "dataset of triples"),
    ("mirrored_x3", "py dataset"),
    ("mirrored_x2", "a last batch of one"),
    ("mirrored_x3", "ReduceLROnPlateau"),
    ("mirrored_x3", "a transformer with clipping"),
    ("one_device", "Dropout"),
    ("mirrored_x3", "a sparse autoencoder"),
    ("fsdp_x3", "attention with sparse projections"),
    ("data_2_tensor_2", "a sparse autoencoder"),
    ("mirrored_x3", "each step of time, which Keras does not regularize"),
    ("mirrored_x3", "losses weighed by their place"),
    ("data_2_tensor_2", "code that asks for a length"),
    ("data_2_tensor_2", "a function that asks for a length"),
    ("data_2_tensor_2", "an activation that asks for a length"),
    ("data_2_tensor_2", "spectral normalization"),
    ("data_2_tensor_2", "a kernel that is standardized"),
    ("data_2_tensor_2", "weights lent to a layer"),
    ("data_2_tensor_2", "hidden rows kept for a loss"),
    ("data_2_tensor_2", "a loss that calls a layer again"),
    ("data_2_pipeline_2", "a loss that reads kernels"),
    ("data_2_pipeline_2", "a tensor that is returned twice"),
    ("data_2_pipeline_2", "weights that no loss reaches"),
    ("fsdp_x3", "a softmax that is certain"),
    ("mirrored_x3", "a sigmoid that is certain, in a step of ones own"),
    ("tensor_x3", "a softmax of kinds that is certain"),
    ("data_2_pipeline_2", "a sigmoid that is certain, with a median"),
    ("mirrored_x3", "masked words in a step of ones own"),
    ("mirrored_x3", "a spectral norm around a layer that mixes"),
    ("mirrored_x3", "a functional attention between rows"),
    ("mirrored_x3", "images without channels"),
    ("mirrored_x3", "an activation of keras ops that mixes"),
    ("mirrored_x3", "a layer with a call around its call"),
    ("mirrored_x3", "losses that a model lists itself"),
    ("tensor_x3", "rows of a map that is vectorized"),
    ("fsdp_x3", "branches and loops that read weights"),
    ("fsdp_x3", "an optimizer of some of the weights"),
    ("fsdp_x3", "an optimizer that subtracts itself"),
    ("mirrored_x3", "logs of a step that no metric knows"),
    ("mirrored_x3", "methods that objects of keras were given"),
    ("mirrored_x3", "a normalization whose call was replaced"),
    ("fsdp_x3", "a tensor that a layer leaves for the next"),
    ("mirrored_x3", "as many columns as rows"),
    ("mirrored_x3", "a loss that reads a metric of all rows"),
    ("mirrored_x3", "a constant and a sum in one update"),
    ("mirrored_x3", "a metric that halves itself in a reset"),
    ("mirrored_x3", "rows that are broadcast against rows"),
    ("mirrored_x3", "numbers that a step gives to its layers"),
    ("mirrored_x3", "a variable of tensorflow that a step moves"),
    ("mirrored_x3", "a metric of a layer that predicts"),
    ("mirrored_x3", "a callback that trains on a batch, rows that are mixed"),
    ("mirrored_x3", "draws of float64 that are cut off"),
    ("fsdp_x3", "the root of a loss added to Keras's"),
    ("one_device", "RandomCrop"),
    ("mirrored_x3", "a loss that keeps a variable"),
    ("tensor_x3", "forces"),
    ("data_2_tensor_2", "a penalty on the gradient in compute_loss"),
    ("data_2_tensor_2", "a penalty in the call of a training step"),
    ("tensor_x3", "saliency of words"),
    ("mirrored_x3", "of one's own: a minimum that a reset sets to zero"),
    (
        "mirrored_x3",
        "of one's own: a count, a sum and a minimum that begin at numbers",
    ),
    ("mirrored_x3", "of one's own: sums that begin at numbers"),
    ("mirrored_x3", "a critic with dropout and a penalty"),
    ("fsdp_x3", "a body of a maker and a judge"),
    ("one_device", "own: a moving mean, not synchronized"),
    ("mirrored_x3", "gan with r1 and spectral norms"),
    ("mirrored_x3", "a curriculum with several steps in one"),
    ("mirrored_x3", "slow weights after an optimizer"),
    ("fsdp_x3", "slow weights around an optimizer"),
    ("fsdp_x3", "attention whose scores are penalized"),
    ("fsdp_x3", "weights held by their importance"),
    ("fsdp_x3", "a callback that descends on all rows"),
    ("data_2_tensor_2", "a callback that applies gradients"),
    ("mirrored_x3", "extra gradients on moved inputs in a decorated step"),
    ("fsdp_x3", "own cells both ways over images of time"),
    ("tensor_x3", "words drawn by a loop to predict"),
    ("mirrored_x3", "a loss of each row that draws noise"),
    ("fsdp_x3", "a metric that draws a mask"),
    ("mirrored_x3", "a step that normalizes a batch of two rows"),
    ("mirrored_x3", "outputs that have no rows"),
    ("fsdp_x3", "predictions compared with those of the batch"),
    ("tensor_x3", "gradients reversed and straight through"),
    ("mirrored_x3", "the rate of a schedule as a metric"),
    ("mirrored_x3", "ModelCheckpoint, by batches"),
    ("fsdp_x3", "compute_metrics of one's own: outputs of the new weights"),
    ("tensor_x3", "compute_metrics of one's own: the largest output"),
    ("one_device", "compute_metrics of one's own: the largest output"),
    ("mirrored_x3", "compute metrics of ones own with two outputs"),
    ("mirrored_x3", "a class of keras with means of the batch"),
    ("mirrored_x3", "BinaryCrossentropy as a loss over the first axis"),
    ("mirrored_x3", "PearsonCorrelation as a metric over the first axis"),
    ("mirrored_x3", "attention of rows by Softmax"),
    ("mirrored_x3", "outputs of one axis"),
    ("mirrored_x3", "a decorated metric that was evaluated before"),
    ("mirrored_x3", "generator of batches with none"),
    ("mirrored_x3", "jacobians of a step of ones own"),
    ("fsdp_x3", "a table of words and of places"),
    ("data_2_tensor_2", "a table of words and of places"),
    ("mirrored_x3", "noise added to words in a step"),
    ("mirrored_x3", "jacobians of a step by a loop"),
    ("mirrored_x3", "words of the batch looked up once"),
    ("fsdp_x3", "generators of a loss a metric and a helper"),
    ("fsdp_x3", "tensors in functions and objects"),
    ("fsdp_x3", "flags counters and last outputs"),
    ("mirrored_x3", "flags counters and last outputs"),
    ("mirrored_x3", "an object that a step gives its model"),
    ("fsdp_x3", "an object that layers share"),
    ("mirrored_x3", "rows of a map that is vectorized"),
    ("mirrored_x3", "an encoder of waves"),
    ("fsdp_x3", "a classifier of images of any size"),
    ("data_2_pipeline_2", "a fully convolutional network"),
    ("data_2_pipeline_2", "a temporal convolutional network"),
    ("fsdp_x3", "slopes along a direction by two gradients"),
    ("mirrored_x3", "two layers in float8"),
    ("fsdp_x3", "gradients accumulated in float8"),
    ("fsdp_x3", "blocks with layers in float8"),
    ("data_2_pipeline_2", "two layers in float8"),
    ("mirrored_x3", "a step of ones own in float8"),
    ("mirrored_x3", "a scaled and clipped loss in float8"),
    ("fsdp_x3", "a model that is quantized to float8"),
    ("mirrored_x3", "a quantized layer of ones own"),
    ("fsdp_x3", "a quantizer of ones own"),
]


# What docs/guarantees.md refuses by name.
REFUSED = [
    ("mirrored_x3", "an optimizer whose method was replaced"),
    ("fsdp_x3", "a block that is computed again"),
    ("mirrored_x3", "a fit of its own"),
    ("data_2_pipeline_2", "the rate of a schedule as a metric"),
    ("mirrored_x3", "an object of a module that a step reads"),
    ("fsdp_x3", "attributes of outputs of all rows"),
    ("mirrored_x3", "slopes along a direction forward"),
    ("mirrored_x3", "a sum that overwrites a variable"),
    ("tensor_x3", "two layers in float8"),
]


QUICK = [
    ("mirrored_x3", "a sparse autoencoder"),
    ("mirrored_x3", "losses weighed by their place"),
    ("tensor_x3", "forces"),
    ("mirrored_x3", "Dropout"),
    ("mirrored_x3", "the rate of a schedule as a metric"),
    ("mirrored_x3", "a class of keras with means of the batch"),
    ("mirrored_x3", "attention of rows by Softmax"),
    ("one_device", "compute_metrics of one's own: the largest output"),
    ("mirrored_x3", "an encoder of waves"),
]


@pytest.mark.parametrize(("column", "name"), tiered(SLICE, QUICK))
def test_row(column, name, strategies):
    cell = judge.cell(ROWS[name], column, strategies[column])
    assert cell.verdict == "equal", (cell.verdict, cell.note)


@pytest.mark.parametrize(("column", "name"), tiered(REFUSED, []))
def test_row_is_refused(column, name, strategies):
    cell = judge.cell(ROWS[name], column, strategies[column])
    assert cell.verdict == "refused", (cell.verdict, cell.note)


def test_every_class_of_keras_has_rows():
    names = set(ROWS)
    for loss in losses.classes():
        assert any(name.startswith(f"{loss} sum") for name in names), loss
    assert set(metrics.classes()) <= names
    for optimizer in optimizers.classes():
        assert f"{optimizer}, repeated indices" in names
    assert layers.classes().keys() - layers.ELSEWHERE <= names


def test_excuses_are_in_the_guarantees():
    guarantees = pathlib.Path(ROOT, "docs", "guarantees.md").read_text()
    text = " ".join(guarantees.split())
    for row in ROWS.values():
        for excuse in row.excuses:
            assert excuse.phrase in text, (row.name, excuse.phrase)


def _row(**options):
    return Row("row", "group", lambda run: run.see("x", [1.0, 2.0]), **options)


@pytest.fixture
def reference_of(monkeypatch):
    """What Keras alone leaves, given by a test."""

    def give(**seen):
        arrays = {name: np.asarray(value) for name, value in seen.items()}
        outcome = Outcome("ran", arrays)
        monkeypatch.setattr(judge, "reference", lambda row: outcome)

    return give


def _verdict(seen, column="mirrored_x3", warnings=(), **options):
    arrays = {name: np.asarray(value) for name, value in seen.items()}
    outcome = Outcome("ran", arrays, warnings=warnings)
    return judge.verdict(_row(**options), column, outcome).verdict


@pytest.mark.parametrize(
    "seen",
    [
        {"slot": 1.0 + 1e-6},
        {"slot": np.nan},
        {"slot": [1.0, 1.0]},
        {},
        {"slot": 1.0, "history other": 0.0},
    ],
)
def test_what_differs_is_silent(seen, reference_of):
    reference_of(slot=1.0)
    assert _verdict({"slot": 1.0 + 1e-12}) == "equal"
    assert _verdict(seen) == "SILENT"


def test_what_is_excused_is_documented(reference_of):
    from tests.conformance.harness import Excuse

    reference_of(slot=1.0, loss=1.0)
    excuse = Excuse("^loss", "words")
    assert _verdict({"slot": 1.0, "loss": 2.0}, excuses=(excuse,)) == (
        "documented"
    )
    assert _verdict({"slot": 2.0, "loss": 2.0}, excuses=(excuse,)) == "SILENT"
    assert (
        _verdict(
            {"slot": 1.0, "loss": 2.0},
            column="one_device",
            excuses=(excuse,),
        )
        == "SILENT"
    )
    assert _verdict({"slot": 2.0, "loss": 1.0}, warnings=("w",)) == "documented"


def test_refusals_have_one_line(reference_of):
    reference_of(slot=1.0)
    for message, verdict in (("one", "refused"), ("one\ntwo", "CRASH")):
        outcome = Outcome("refused", {}, message)
        found = judge.verdict(_row(), "mirrored_x3", outcome)
        assert found.verdict == verdict


def test_a_crash_is_observed():
    def program(run):
        raise RuntimeError("as it was")

    outcome = observe(Row("row", "group", program), None)
    assert (outcome.kind, outcome.message) == (
        "crashed",
        "RuntimeError: as it was",
    )
    assert ADDED is ROWS
