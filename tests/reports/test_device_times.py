"""What devices did, of a profile and a graph that are made up."""

import types

import pytest
import tensorflow as tf

from mgpu_tf.reports.device_times import (
    DeviceTimes,
    Operation,
    device_times,
    operations_of,
)

PICOSECONDS = 10**12


def plane(name, *lines):
    """Of lines, each with its name and events: name, begin and seconds."""
    names = sorted({event for _, events in lines for event, *_ in events})
    return types.SimpleNamespace(
        name=name,
        event_metadata={
            key: types.SimpleNamespace(name=name)
            for key, name in enumerate(names)
        },
        lines=[
            types.SimpleNamespace(
                name=line,
                timestamp_ns=5,
                events=[
                    types.SimpleNamespace(
                        metadata_id=names.index(event),
                        offset_ps=round(begin * PICOSECONDS),
                        duration_ps=round(seconds * PICOSECONDS),
                    )
                    for event, begin, seconds in events
                ],
            )
            for line, events in lines
        ],
    )


OPERATIONS = {
    "step/MatMul": Operation("CPU:0", False),
    "step/Reduce": Operation("CPU:0", True, 100.0),
    "step/MatMul_1": Operation("CPU:1", False, 8.0),
    "step/Reduce_1": Operation("CPU:1", True, 100.0),
}


def test_communication_is_what_nothing_else_ran_beside():
    found = device_times(
        [
            plane(
                "/host:CPU",
                (
                    "one thread",
                    [
                        ("while/body/_1/step/MatMul:MatMul", 0.0, 2.0),
                        ("step/MatMul_1/sum:_Fused", 2.0, 3.0),
                        ("ExecutorState::Process", 0.0, 9.0),
                        ("other/MatMul:MatMul", 0.0, 9.0),
                    ],
                ),
                (
                    "another",
                    [
                        ("step/Reduce:CollectiveReduceV2", 1.0, 4.0),
                        ("step/Reduce_1:CollectiveReduceV2", 6.0, 1.0),
                    ],
                ),
            )
        ],
        OPERATIONS,
        seconds=10.0,
    )
    assert found == [
        DeviceTimes("CPU:0", 2.0, 3.0, 5.0, 100.0),
        DeviceTimes("CPU:1", 3.0, 1.0, 6.0, 108.0),
    ]


def test_a_gpu_tells_of_its_own_kernels():
    operations = {"step/MatMul": Operation("GPU:0", False, 4.0)}
    [found] = device_times(
        [
            # The host launches kernels, which takes time of its own.
            plane("/host:CPU", ("a", [("step/MatMul:MatMul", 0.0, 9.0)])),
            plane(
                "/device:GPU:0",
                ("Stream #1", [("sgemm_128", 0.0, 2.0)]),
                ("Stream #2", [("ncclDevKernel_AllReduce", 1.0, 3.0)]),
                ("TensorFlow Ops", [("step/MatMul:MatMul", 0.0, 9.0)]),
            ),
        ],
        operations,
        seconds=10.0,
    )
    assert found == DeviceTimes("GPU:0", 2.0, 2.0, 6.0, 4.0)


def test_bytes_that_cross_from_device_to_device_count_once():
    with tf.Graph().as_default() as graph:
        with tf.device("/CPU:0"):
            made = tf.compat.v1.placeholder(tf.float32, [None, 5], name="made")
            tf.square(made)  # Stays on the device.
        with tf.device("/CPU:1"):
            tf.abs(made)
            tf.negative(made, name="negative")
    found = operations_of([graph], rows=3, devices=2)
    assert found["made"] == Operation("CPU:0", False, 3 * 5 * 4)
    assert found["negative"] == Operation("CPU:1", False, 0.0)


@pytest.mark.parametrize(("devices", "sent"), [(1, 0.0), (2, 40.0), (4, 60.0)])
def test_a_ring_sends_a_part_from_each_device(devices, sent):
    with tf.Graph().as_default() as graph, tf.device("/CPU:0"):
        tf.raw_ops.CollectiveReduceV2(
            input=tf.zeros([10]),
            group_size=devices,
            group_key=1,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            name="reduce",
        )
    found = operations_of([graph], rows=1, devices=devices)["reduce"]
    assert found == Operation("CPU:0", True, sent)
