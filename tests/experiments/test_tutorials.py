"""The tutorials after keras.io against Keras alone, in tiny versions.

Their data are float32; what is allowed is its rounding. Where replicas draw
noise of their own, one device is held to Keras's numbers and several replicas
to be near them.
"""

import functools

import numpy as np
import pytest

from tests import clusters, columns
from tests.jobs import tutorials
from tests.tiers import tiered

ROUNDING = 2e-4
# A bias before a BatchNormalization has no gradient but rounding, of which Adam
# makes steps of the learning rate, 1e-4.
OF_WEIGHTS = 2e-3
NEAR = 0.3


@functools.cache
def reference(name):
    return tutorials.observe(name, None)


def _check(name, observed, noise):
    expected = reference(name)
    assert observed["history"].keys() == expected["history"].keys()
    allowed = NEAR if noise else ROUNDING
    for key, values in expected["history"].items():
        np.testing.assert_allclose(
            observed["history"][key], values, rtol=allowed, atol=allowed
        )
    if not noise:
        np.testing.assert_allclose(
            observed["weights"],
            expected["weights"],
            rtol=ROUNDING,
            atol=OF_WEIGHTS,
        )


PROGRAMS = list(tutorials.PROGRAMS)
# What the full tier has on three replicas and on two workers.
LOCAL = ["dcgan", "siamese_triplet", "structured_data"]
LOCAL += ["timeseries_transformer", "vae_add_loss"]
OVER_WORKERS = ["bert_classifier", "dcgan", "vae"]


@pytest.mark.parametrize("name", tiered(PROGRAMS, [], LOCAL))
@pytest.mark.parametrize("column", columns.EVERY)
def test_local(column, name, strategies):
    observed = tutorials.observe(name, strategies[column])
    noise = name in tutorials.NOISY and column != "one_device"
    _check(name, observed, noise)


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory, request):
    """What the programs of this tier gave."""
    folder = str(tmp_path_factory.mktemp("tutorials"))
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and "of_workers" in item.fixturenames
    }
    names = [name for name in PROGRAMS if name in wanted]
    return clusters.run_jobs(tutorials, 2, folder, names)


@pytest.mark.parametrize("name", tiered(PROGRAMS, [], OVER_WORKERS))
def test_two_workers(name, of_workers):
    first, second = of_workers[name]
    assert first == second
    _check(name, first, name in tutorials.NOISY)
