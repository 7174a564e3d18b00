"""Which devices a process takes, with GPUs that are made up.

tests/gpu has the same on a real one.
"""

import contextlib
import os
import stat
import types

import pytest
import tensorflow as tf

from mgpu_tf.engine.step import base
from mgpu_tf.engine.synchronous import replica_check
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.runtime import determinism, devices


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """Makes TensorFlow list two GPUs; returns what was asked of it."""
    asked = {}
    monkeypatch.setattr(devices, "gpus", lambda: ["first", "second"])
    monkeypatch.setattr(
        tf.config,
        "set_visible_devices",
        lambda chosen, kind: asked.update(visible=chosen),
    )
    monkeypatch.setattr(
        tf.config,
        "set_logical_device_configuration",
        lambda device, parts: asked.update(
            split=(device, [part.memory_limit for part in parts])
        ),
    )
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81000\necho 80000\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "")
    return asked


def test_a_gpu_is_split(two_gpus):
    names = devices.select_local([1], 3)
    assert names == ["GPU:0", "GPU:1", "GPU:2"]
    assert two_gpus["visible"] == ["second"]
    assert two_gpus["split"] == ("second", [24_000] * 3)


def test_two_gpus_are_not_split(two_gpus):
    with pytest.raises(ConfigurationError, match=r"Use devices=\[0\]\."):
        devices.select_local(2, 3)
    assert not two_gpus


def test_its_memory_must_be_known(two_gpus, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="Install the driver's"):
        devices.select_local([0], 2)


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        ([], {"num_virtual_devices": 2}),
        (["one"], {"num_virtual_devices": 2, "devices": 1}),
        (["one", "two"], {}),
    ],
)
def test_several_here(gpus, options, monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: gpus)
    assert devices.several_here(2) == options


@pytest.mark.parametrize(
    ("name", "places", "refused"),
    [
        ("bfloat16", ("/device:GPU:0", "/device:GPU:1"), True),
        ("float16", ("/device:GPU:0", "/device:GPU:1"), False),
        ("bfloat16", ("/device:CPU:0", "/device:CPU:1"), False),
        ("bfloat16", ("/device:GPU:0",), False),
    ],
)
def test_gpus_sum_no_bfloat16(name, places, refused):
    """Seen on a GPU: "does not support datatype DT_BFLOAT16"."""
    strategy = types.SimpleNamespace(
        extended=types.SimpleNamespace(worker_devices=places),
        num_replicas_in_sync=len(places),
    )
    expected = contextlib.nullcontext()
    if refused:
        expected = pytest.raises(ConfigurationError, match="between GPUs")
    with expected:
        base.check_rounding(strategy, name)


def test_copies_that_differ_on_gpus(monkeypatch):
    """Without deterministic kernels they may, and the device is whole."""
    monkeypatch.setattr(determinism, "is_enabled", lambda: False)
    assert "--deterministic" in replica_check.remedy(["/device:GPU:0"])
    assert "replace the device" in replica_check.remedy(["/device:CPU:0"])
    monkeypatch.setattr(determinism, "is_enabled", lambda: True)
    assert "replace the device" in replica_check.remedy(["/device:GPU:0"])
