"""The table of the README beside Keras's `fit`, by the script that makes it."""

import os
import re

import pytest

from tests import clusters
from tests.readme import README


@pytest.mark.full
def test_keras_fails_where_this_package_does_not():
    script = os.path.join(clusters.ROOT, "experiments", "why.py")
    done = clusters.run([script])
    assert done.returncode == 0, done.stderr
    workers, ours = re.findall(
        r"two workers +(?:Keras's fit|mgpu_tf) +(.*)", done.stdout
    )
    assert ours == "trained"
    [shown] = re.findall(r"^# (ValueError: .*)", README.read_text(), re.M)
    assert workers == shown
    for name in ("clipnorm", "global_clipnorm"):
        [(theirs, ours)] = re.findall(
            rf"^{name} +Keras's fit (\S+) +mgpu_tf (\S+)$", done.stdout, re.M
        )
        assert float(theirs) > 1e-3 > 1e-6 > float(ours)
    assert re.search("accumulation +Keras's fit RuntimeError", done.stdout)
