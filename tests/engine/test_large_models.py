"""Models that people split, on each mesh, moved to another one on their way.

A run begins on one mesh, is killed in its second epoch, and goes on from its
last checkpoint on the next mesh. It ends with what Keras's own `fit` ends with,
so each mesh trains each model in its first and in its last steps.
"""

import itertools
import signal

import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests import clusters, columns
from tests.tiers import tiered

pytest.importorskip("keras_hub")
from tests.engine.killed_large import MESHES, made
from tests.jobs import large

KILLED = ("-m", "tests.engine.killed_large")

# A layer takes means of all rows, and those of a pipeline never have them.
REFUSED = [("experts", mesh) for mesh in MESHES if "pipeline" in mesh]
ROWS = [
    row
    for row in itertools.product(large.PROGRAMS, MESHES)
    if row not in REFUSED
]


def mesh_after(name, mesh):
    """Where a run goes on that began on a mesh: each mesh once."""
    allowed = [of for each, of in ROWS if each == name]
    return allowed[(allowed.index(mesh) + 1) % len(allowed)]


# Llama computes its norms and its attention in float32, whatever the type.
TOLERANCES = {"llama": 1e-6}

IN_FULL = [
    ("convnext", "fsdp_4"),
    ("vision_transformer", "tensor_2"),
    ("tagger", "fsdp_2_pipeline_2"),
]

pytestmark = pytest.mark.usefixtures("float64")
_stock = {}


def stock(name):
    """What Keras ends with, computed once."""
    if name not in _stock:
        with tf.device(columns.ONE):
            _stock[name] = large.stock(name)
    return _stock[name]


def ends_as_keras(name, mesh, folder):
    """Goes on with a run on a mesh; compares all that it leaves."""
    history, state, trainer = large.train(made(mesh), name, folder)
    curves, expected = stock(name)
    assert trainer.recovery.restarts == 1
    assert trainer.global_step == 16
    assert set(history) == set(curves)
    atol = TOLERANCES.get(name, 1e-9)
    for curve, values in curves.items():
        np.testing.assert_allclose(history[curve], values, rtol=0, atol=atol)
    for ours, theirs in zip(state, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(("name", "mesh"), tiered(ROWS, [], IN_FULL))
def test_moves_to_another_mesh(name, mesh, strategies, tmp_path):
    done = clusters.run([*KILLED, name, mesh, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    ends_as_keras(name, mesh_after(name, mesh), str(tmp_path))


@pytest.mark.parametrize(("name", "mesh"), tiered(REFUSED, REFUSED[:1]))
def test_is_refused(name, mesh, strategies, tmp_path):
    with pytest.raises(mgpu_tf.ConfigurationError, match="batch_mean"):
        large.train(made(mesh), name, str(tmp_path))


# Each mesh goes on with one of them.
AFTER_WORKERS = {
    "language_model": "tensor_2",
    "experts": "data_2_tensor_2",
    "tagger": "data_2_pipeline_2",
    "vision_transformer": "fsdp_2_pipeline_2",
    "convnext": "fsdp_4",
    "gpt2": "data_2_tensor_2",
    "llama": "fsdp_2_pipeline_2",
}


@pytest.mark.parametrize("name", tiered(list(large.PROGRAMS), [], ["gpt2"]))
def test_moves_from_two_workers(name, strategies, tmp_path):
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--isolate=off", "--", clusters.PYTHON),
        *(*KILLED, name, "two_workers", str(tmp_path)),
    )
    said = done.stdout + done.stderr
    assert "worker 1 failed with SIGKILL; ended worker 0" in said
    ends_as_keras(name, AFTER_WORKERS[name], str(tmp_path))
