"""The strategies of one process that tests train with.

Two replicas hide what divides exactly, so these tests have three. One device
is in the matrix.
"""

import os

import pytest

MOST_DEVICES = 8
# Parts of the first GPU in place of parts of the CPU: see tests/gpu/run.py.
ON_GPU = os.environ.get("MGPU_TF_TESTS_ON") == "gpu"
# What Keras trains on, to compare with.
ONE = "GPU:0" if ON_GPU else "CPU:0"


def parts(count):
    """Returns the options of a strategy that has so many devices."""
    if not ON_GPU:
        return {"num_virtual_devices": count}
    # NCCL takes no part of a GPU.
    split = {} if count == 1 else {"num_virtual_devices": count}
    return {"devices": [0]} | split


EVERY = [
    "mirrored_x3",
    pytest.param("one_device", marks=pytest.mark.matrix),
]

# Strategies that split weights: one in the full tier.
SPLIT = [
    pytest.param("fsdp_x3", marks=pytest.mark.full),
    pytest.param("data_2_fsdp_2", marks=pytest.mark.matrix),
    pytest.param("data_2_tensor_2", marks=pytest.mark.matrix),
]


def strategies():
    """Makes the strategies of a process; splits the CPU for them.

    Each column of the parity matrix of one process is one of them.
    """
    import mgpu_tf

    # The first strategy splits the device, for the largest mesh of all tests.
    mgpu_tf.create_mirrored_strategy(**parts(MOST_DEVICES))
    return {
        "mirrored_x4": mgpu_tf.create_mirrored_strategy(**parts(4)),
        "mirrored_x2": mgpu_tf.create_mirrored_strategy(**parts(2)),
        # Two replicas hide what divides exactly.
        "mirrored_x3": mgpu_tf.create_mirrored_strategy(**parts(3)),
        # Of the small weights of tests the large ones are split.
        "fsdp_x3": mgpu_tf.create_model_parallel_strategy(
            fsdp=3, **parts(3), smallest_split=4
        ),
        "fsdp_x1": mgpu_tf.create_model_parallel_strategy(
            fsdp=1, **parts(1), smallest_split=4
        ),
        "data_2_fsdp_2": mgpu_tf.create_model_parallel_strategy(
            data=2,
            fsdp=2,
            shard="gradients",
            **parts(4),
            smallest_split=4,
        ),
        # A mesh that splits nothing: what is promised of replicas holds.
        "data_3": mgpu_tf.create_model_parallel_strategy(
            data=3, **parts(3), smallest_split=4
        ),
        "zero1_x2": mgpu_tf.create_model_parallel_strategy(
            fsdp=2, shard="optimizer", **parts(2), smallest_split=4
        ),
        # Rows that do not divide by micro-batches, and fewer than them.
        "pipeline_x2": mgpu_tf.create_model_parallel_strategy(
            pipeline=2, micro_batches=3, **parts(2)
        ),
        "data_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            data=2,
            pipeline=2,
            micro_batches=2,
            schedule="gpipe",
            **parts(4),
        ),
        "fsdp_3_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            fsdp=3,
            pipeline=2,
            micro_batches=2,
            **parts(6),
            smallest_split=4,
        ),
        "tensor_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            tensor=2,
            pipeline=2,
            micro_batches=2,
            **parts(4),
            smallest_split=4,
        ),
        "data_2_tensor_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            data=2,
            tensor=2,
            pipeline=2,
            micro_batches=2,
            schedule="gpipe",
            **parts(8),
            smallest_split=4,
        ),
        "fsdp_2_tensor_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            fsdp=2,
            tensor=2,
            pipeline=2,
            micro_batches=2,
            **parts(8),
            smallest_split=4,
        ),
        "tensor_x3": mgpu_tf.create_model_parallel_strategy(
            tensor=3, **parts(3), smallest_split=4
        ),
        "data_2_tensor_2": mgpu_tf.create_model_parallel_strategy(
            data=2, tensor=2, **parts(4), smallest_split=4
        ),
        "fsdp_2_tensor_2": mgpu_tf.create_model_parallel_strategy(
            fsdp=2, tensor=2, **parts(4), smallest_split=4
        ),
        "one_device": mgpu_tf.create_one_device_strategy(ONE),
        "central_storage_x2": mgpu_tf.create_central_storage_strategy(
            **parts(2)
        ),
    }
