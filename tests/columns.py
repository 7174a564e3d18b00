"""The columns of tests that train: three replicas, and others in full.

Two replicas hide what divides exactly, so these tests have three. One device
is in the full tier.
"""

import pytest

EVERY = [
    "mirrored_x3",
    pytest.param("one_device", marks=pytest.mark.full),
]

# Strategies that split weights, in the full tier.
SPLIT = [
    pytest.param("fsdp_x3", marks=pytest.mark.full),
    pytest.param("data_2_fsdp_2", marks=pytest.mark.full),
    pytest.param("data_2_tensor_2", marks=pytest.mark.full),
]
