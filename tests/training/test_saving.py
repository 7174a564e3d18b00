"""Saved on two workers, trained on one device, and the other way."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import clusters
from tests.jobs import saving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saving"))


@pytest.fixture(scope="module")
def results(folder, strategies):
    """Each side saves first, and then goes on from the other's file."""
    one_device = strategies["one_device"]
    one = {"first_half": saving.first_half(one_device, folder)}
    two = clusters.run_jobs(saving, 2, folder)
    for job in ("second_half", "weights_only"):
        one[job] = saving.JOBS[job](one_device, folder)
    return one, two


@pytest.mark.full
@pytest.mark.parametrize("job", saving.JOBS)
def test_workers_agree(job, results):
    first, second = results[1][job]
    assert first == second


def test_goes_on_as_if_it_had_never_left(results):
    one, two = results
    whole = one["first_half"]["losses"]
    for other in (two["first_half"][0]["losses"],):
        np.testing.assert_allclose(other, whole, rtol=1e-5)
    for half in (one["second_half"], two["second_half"][0]):
        np.testing.assert_allclose(half["losses"], whole[2:], rtol=1e-5)


def test_fine_tuning(results):
    one, two = results
    np.testing.assert_allclose(
        one["weights_only"]["losses"],
        two["weights_only"][0]["losses"],
        rtol=1e-5,
    )


def test_files_are_complete(results, folder):
    expected = results[0]["first_half"]["predictions"]
    x = saving.numbers()[0]
    for replicas in (1, 2):
        file = os.path.join(folder, f"model-of-{replicas}.keras")
        model = keras.models.load_model(file)
        assert int(model.optimizer.iterations) == 12
        np.testing.assert_allclose(
            model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5
        )
        served = tf.saved_model.load(
            os.path.join(folder, f"served-of-{replicas}")
        )
        np.testing.assert_allclose(
            served.serve(x), expected, rtol=1e-4, atol=1e-5
        )
