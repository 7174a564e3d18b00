"""The columns of tests that train: three replicas, and others in full.

Two replicas hide what divides exactly, so three are what the default suite
has; one device and two replicas are in the full one.
"""

import pytest

EVERY = [
    "mirrored_x3",
    pytest.param("one_device", marks=pytest.mark.full),
    pytest.param("mirrored_x2", marks=pytest.mark.full),
]

# Strategies that split weights, in the full tier.
SPLIT = [
    pytest.param("fsdp_x3", marks=pytest.mark.full),
    pytest.param("data_2_fsdp_2", marks=pytest.mark.full),
    pytest.param("data_2_tensor_2", marks=pytest.mark.full),
]
