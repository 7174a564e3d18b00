"""Fixtures of all tests: strategies on parts of the CPU, float64."""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tests import clusters, leftovers


@pytest.fixture(scope="session", autouse=True)
def strategies():
    """Strategies in this process by name.

    For every test, since the CPU can be split before the first op only.
    """
    import mgpu_tf

    return {
        "mirrored_x4": mgpu_tf.create_mirrored_strategy(num_virtual_devices=4),
        "mirrored_x2": mgpu_tf.create_mirrored_strategy(num_virtual_devices=2),
        # Two replicas hide what divides exactly.
        "mirrored_x3": mgpu_tf.create_mirrored_strategy(num_virtual_devices=3),
        # Of the small weights of tests the large ones are split.
        "fsdp_x3": mgpu_tf.create_model_parallel_strategy(
            fsdp=3, num_virtual_devices=3, smallest_split=4
        ),
        "fsdp_x1": mgpu_tf.create_model_parallel_strategy(
            fsdp=1, num_virtual_devices=1, smallest_split=4
        ),
        "data_2_fsdp_2": mgpu_tf.create_model_parallel_strategy(
            data=2,
            fsdp=2,
            shard="gradients",
            num_virtual_devices=4,
            smallest_split=4,
        ),
        "zero1_x2": mgpu_tf.create_model_parallel_strategy(
            fsdp=2, shard="optimizer", num_virtual_devices=2, smallest_split=4
        ),
        # Rows that do not divide by micro-batches, and fewer than them.
        "pipeline_x2": mgpu_tf.create_model_parallel_strategy(
            pipeline=2, micro_batches=3, num_virtual_devices=2
        ),
        "data_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            data=2,
            pipeline=2,
            micro_batches=2,
            schedule="gpipe",
            num_virtual_devices=4,
        ),
        "tensor_x3": mgpu_tf.create_model_parallel_strategy(
            tensor=3, num_virtual_devices=3, smallest_split=4
        ),
        "data_2_tensor_2": mgpu_tf.create_model_parallel_strategy(
            data=2, tensor=2, num_virtual_devices=4, smallest_split=4
        ),
        "fsdp_2_tensor_2": mgpu_tf.create_model_parallel_strategy(
            fsdp=2, tensor=2, num_virtual_devices=4, smallest_split=4
        ),
        "one_device": mgpu_tf.create_one_device_strategy("CPU:0"),
        "central_storage_x2": mgpu_tf.create_central_storage_strategy(
            num_virtual_devices=2
        ),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    leftovers.clear()


@pytest.fixture(scope="session", autouse=True)
def shared_clusters():
    """Ends the clusters that tests of several files shared."""
    yield
    clusters.end_shared()


@pytest.fixture
def floatx_of():
    """Sets the type that a case is run in, for the length of a test."""
    from tests.parity import cases

    yield lambda case: cases.set_floatx(case.floatx)
    cases.set_floatx("float32")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A folder for prepared data sets, new in each session."""
    return str(tmp_path_factory.mktemp("data"))


class Clock:
    """Stands for the clocks of `time`; moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock
