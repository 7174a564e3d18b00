"""Mistakes are told in one line, with the nearest name that is right."""

import pytest

from mgpu_tf.errors import ClusterError, ConfigurationError, unknown_name


def test_tree():
    assert issubclass(ClusterError, ConfigurationError)
    assert issubclass(ConfigurationError, ValueError)


@pytest.mark.parametrize(
    ("received", "hint"),
    [
        ("miror", " Did you mean 'mirrored'?"),
        ("mirrored ", " Did you mean 'mirrored'?"),
        ("tpus", " Did you mean 'tpu'?"),
        ("horovod", ""),
        ("", ""),
        (3, ""),
        (None, ""),
        ("two\nlines", ""),
    ],
)
def test_unknown_name(received, hint):
    message = unknown_name("strategy", received, ["mirrored", "tpu"])
    assert message == (
        f"Unknown strategy. Received: {received!r}.{hint} Valid: mirrored, tpu."
    )
    assert len(message.splitlines()) == 1


def test_names_may_come_only_once():
    names = (name for name in ("sgd", "adam"))
    message = unknown_name("optimizer", "adan", names)
    assert message.endswith("Did you mean 'adam'? Valid: sgd, adam.")
