"""The recipe of KerasTuner: its trials are trained on two workers."""

import ast
import re

import pytest

from tests import clusters

pytest.importorskip("keras_tuner", reason="needs KerasTuner, the extra `tuner`")


@pytest.mark.full
def test_trials_have_the_numbers_of_one_device(tmp_path):
    from experiments.tutorials import hyperparameter_search

    script = hyperparameter_search.__file__
    flags = ["--num_workers=2", "--max_trials=2", "--epochs=1"]
    done = clusters.run([script, *flags, f"--output_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    trials = re.findall(r"^loss (\S+) ({.*})$", done.stdout, re.M)
    assert len(trials) == 2, done.stdout
    assert "2 workers" in done.stdout
    for score, values in trials:
        values = ast.literal_eval(values)
        expected = hyperparameter_search.train(values, 1)["val_loss"]
        assert float(score) == pytest.approx(expected, rel=1e-4)
    assert len({score for score, _ in trials}) == 2
