"""What devices store, as `Trainer.memory` counts it."""

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.reports.memory import DeviceMemory, MemoryTable


def build():
    frozen = keras.layers.Dense(6, use_bias=False)
    frozen.trainable = False
    model = keras.Sequential(
        [keras.Input((6,)), frozen, keras.layers.Dense(6, use_bias=False)]
    )
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    return model


def table(strategy):
    trainer = mgpu_tf.Trainer(build, strategy)
    x = np.ones((12, 6), "float32")
    trainer.fit(x, x, batch_size=12, verbose=0)
    return trainer.memory()


@pytest.mark.parametrize(
    ("name", "devices", "part"),
    [
        ("one_device", 1, 1),
        ("mirrored_x3", 3, 1),
        ("central_storage_x2", 1, 1),
        ("fsdp_x3", 3, 3),
    ],
)
def test_each_device(name, devices, part, strategies):
    rows = table(strategies[name]).rows
    assert [row.device for row in rows] == [f"CPU:{i}" for i in range(devices)]
    kernel = 6 * 6 * 4
    for row in rows:
        assert row.weights == kernel // part
        # Beside the momentum there are the rate and the count of steps.
        assert kernel // part <= row.optimizer <= kernel // part + 16
        assert kernel // part <= row.other <= kernel // part + 32


def test_stages_are_told():
    row = DeviceMemory("GPU:2", 1, stage=1)
    assert row.name == "GPU:2 stage 1"
    assert "GPU:2 stage 1" in MemoryTable([row]).text()


def test_text():
    mib = 1 << 20
    memory = MemoryTable(
        [DeviceMemory("GPU:0", mib, 2 * mib), DeviceMemory("GPU:1", mib)]
    )
    assert memory.largest == 3 * mib
    title, head, first, second = memory.text().splitlines()
    assert title == "MiB of variables"
    assert head.split() == ["device", "weights", "optimizer", "other", "total"]
    assert first.split() == ["GPU:0", "1.00", "2.00", "0.00", "3.00"]
    assert second.split() == ["GPU:1", "1.00", "0.00", "0.00", "1.00"]
