"""The axes of a mesh, and the parts of a variable."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Mesh, Split, mesh_of, others_than


def test_axes():
    mesh = Mesh(data=2, fsdp=4)
    assert mesh.size == 8
    assert [mesh.rank("fsdp", replica) for replica in range(8)] == [
        *range(4),
        *range(4),
    ]
    assert mesh.along(["fsdp"], 5) == [4, 5, 6, 7]
    assert mesh.along(["data"], 5) == [1, 5]


def test_the_tensor_axis_changes_fastest():
    mesh = Mesh(data=2, tensor=3)
    assert [mesh.rank("tensor", r) for r in range(6)] == [0, 1, 2] * 2
    assert [mesh.rank("data", r) for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert mesh.groups(["tensor"]) == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups(["data"]) == [[0, 3], [1, 4], [2, 5]]
    assert mesh.groups([]) == [[0], [1], [2], [3], [4], [5]]
    assert mesh_of(6, None, None, tensor=3) == mesh
    assert mesh_of(6, 2, None, tensor=3) == mesh


def test_three_axes_of_replicas():
    mesh = Mesh(data=2, fsdp=2, tensor=2)
    assert mesh_of(8, None, 2, tensor=2) == mesh
    assert mesh.groups(["tensor"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups(["fsdp"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups(["fsdp", "tensor"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups(["data"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert others_than(["tensor", "fsdp"]) == ("data", "blocks")


def test_parts_that_are_split_again():
    split = Split((6, 9), 2, dim=1, over="tensor", again=3)
    assert split.axes == ("tensor", "fsdp")
    inner = [split.inner(part) for part in range(2)]
    assert [each.shape for each in inner] == [(6, 4), (6, 5)]
    assert [inner[1].shape_of(part) for part in range(3)] == [(2, 5)] * 3
    assert Split((6, 9), 2, dim=1, over="tensor").inner(0) is None
    over_fsdp = Split((6, 9), 2)
    assert over_fsdp.inner(1) == over_fsdp


def test_a_split_along_a_dimension():
    split = Split((4, 6, 2), 3, dim=1, over="tensor")
    assert [split.bounds(part) for part in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert split.shape_of(1) == (4, 2, 2)


@pytest.mark.parametrize(
    ("devices", "data", "fsdp", "expected"),
    [
        (4, None, None, Mesh(1, 4)),
        (4, 2, None, Mesh(2, 2)),
        (4, None, 2, Mesh(2, 2)),
        (1, None, None, Mesh(1, 1)),
        (6, 3, 2, Mesh(3, 2)),
    ],
)
def test_what_is_left_is_filled_in(devices, data, fsdp, expected):
    assert mesh_of(devices, data, fsdp) == expected


@pytest.mark.parametrize(
    ("devices", "data", "fsdp", "received"),
    [
        (4, 2, 3, "data=2 x fsdp=3 = 6 for 4 devices"),
        (4, 3, None, "data=3 x fsdp=1 = 3 for 4 devices"),
        (2, None, 4, "data=1 x fsdp=4 = 4 for 2 devices"),
    ],
)
def test_the_product_must_be_the_devices(devices, data, fsdp, received):
    with pytest.raises(ConfigurationError, match=received):
        mesh_of(devices, data, fsdp)


def test_the_devices_are_those_of_all_workers():
    assert mesh_of(2, None, None, workers=3) == Mesh(1, 6)
    assert mesh_of(2, 3, None, workers=3) == Mesh(3, 2)
    with pytest.raises(
        ConfigurationError,
        match="data=2 x fsdp=2 = 4 for 3 workers x 2 devices = 6",
    ):
        mesh_of(2, 2, 2, workers=3)


def test_the_devices_of_a_stage_are_those_of_a_replica():
    mesh = Mesh(data=3, pipeline=2)
    assert (mesh.size, mesh.replicas) == (6, 3)
    assert mesh.groups(["data"]) == [[0, 1, 2]]
    assert mesh_of(6, None, None, pipeline=2) == mesh
    with pytest.raises(
        ConfigurationError,
        match="data=2 x fsdp=1 x pipeline=2 = 4 for 6 devices",
    ):
        mesh_of(6, 2, None, pipeline=2)


@pytest.mark.parametrize(
    ("devices", "tensor"), [(2, 2), (2, 1), (2, 3), (1, 6), (4, 2), (4, 6)]
)
def test_tensor_over_workers(devices, tensor):
    """Groups are in one worker, or have all devices of several."""
    if devices % tensor and tensor % devices:
        match = f"tensor={tensor} for {devices} devices of each worker"
        with pytest.raises(ConfigurationError, match=match):
            mesh_of(devices, None, None, tensor, workers=3)
        return
    workers = 6
    mesh = mesh_of(devices, None, 1, tensor, workers=workers)
    assert mesh == Mesh(devices * workers // tensor, tensor=tensor)


@pytest.mark.parametrize(
    ("devices", "stages", "blocks"),
    [(2, 2, 1), (4, 2, 1), (1, 6, 6), (1, 2, 2), (2, 4, 2), (2, 3, None)],
)
def test_stages_over_workers(devices, stages, blocks):
    """A worker has whole pipelines, or neighbouring stages of one."""
    if blocks is None:
        match = f"pipeline={stages} for {devices} devices of each worker"
        with pytest.raises(ConfigurationError, match=match):
            mesh_of(devices, None, None, pipeline=stages, workers=6)
        return
    mesh = mesh_of(devices, None, None, pipeline=stages, workers=6)
    assert mesh == Mesh(devices * 6 // stages, 1, 1, stages, blocks)
    assert mesh.size == devices * 6
    assert mesh.stages == stages // blocks
    for replica in range(mesh.replicas):
        block = mesh.rank("blocks", replica)
        first = replica * mesh.stages % stages
        assert first == block * mesh.stages


def test_one_part_may_have_all():
    split = Split((3, 5), 3, 0, "blocks", owner=1)
    assert [split.bounds(part) for part in range(3)] == [(0, 0), (0, 3), (3, 3)]
    assert [split.shape_of(part)[0] for part in range(3)] == [0, 3, 0]
    assert [split.region(part).size for part in range(3)] == [0, 15, 0]
    halves = Split((3, 5), 2, 0, "blocks", again=2, owner=0)
    sizes = [[r.size for r in halves.regions(0, rank)] for rank in range(2)]
    assert sizes == [[5], [10]]
    assert [r.size for r in halves.regions(1, 1)] == [0]


@pytest.mark.parametrize(
    ("devices", "tensor", "stages", "match"),
    [
        (4, 2, 2, None),
        (2, 2, 2, None),
        (6, 3, 2, None),
        (6, 2, 2, "tensor=2 for 6 devices, 3 for each stage, of each worker"),
        (2, 2, 4, "With tensor, a worker has all stages.*pipeline=4, tensor=2"),
        (3, 2, 2, "pipeline=2 for 3 devices of each worker"),
    ],
)
def test_stages_in_parts_over_workers(devices, tensor, stages, match):
    """A worker has all stages, each with whole groups or a part of one."""

    def mesh():
        return mesh_of(devices, None, 1, tensor, stages, workers=4)

    if match:
        with pytest.raises(ConfigurationError, match=match):
            mesh()
        return
    data = 4 * devices // tensor // stages
    assert mesh() == Mesh(data, tensor=tensor, pipeline=stages)


def test_stages_may_be_computed_in_parts():
    mesh = mesh_of(8, None, None, tensor=2, pipeline=2)
    assert mesh == Mesh(2, tensor=2, pipeline=2)
    assert (mesh.replicas, mesh.ranges, mesh.stages) == (4, 2, 2)
    assert mesh.groups(["tensor"]) == [[0, 1], [2, 3]]


def test_stages_may_be_split():
    assert mesh_of(8, None, 2, pipeline=2) == Mesh(2, 2, pipeline=2)


@hypothesis.given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    parts=st.integers(1, 5),
)
def test_parts_are_all_of_a_variable(shape, parts):
    split = Split(tuple(shape), parts)
    whole = np.arange(np.prod(shape)).reshape(shape)
    flat = whole if split.by_rows else whole.reshape(-1)
    bounds = [split.bounds(part) for part in range(parts)]
    pieces = [flat[first:after] for first, after in bounds]
    assert [piece.shape for piece in pieces] == [
        split.shape_of(part) for part in range(parts)
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), flat)
    assert split.is_possible == (min(len(piece) for piece in pieces) > 0)
    lengths = [after - first for first, after in bounds]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("again", [1, 2, 3])
@pytest.mark.parametrize(
    "shape", [(5,), (6, 8), (3, 5), (4, 3, 5), (2, 3, 1, 4)], ids=str
)
def test_regions_of_parts_of_parts(shape, again):
    """Each element is in one part, and the order is that of the part."""
    every = np.arange(math.prod(shape)).reshape(shape)
    for dim, length in enumerate(shape):
        for parts in range(1, min(3, length) + 1):
            split = Split(shape, parts, dim, "tensor", again)
            seen = []
            for part, inner in itertools.product(range(parts), range(again)):
                first, after = split.bounds(part)
                own = every[(slice(None),) * dim + (slice(first, after),)]
                divided = split.inner(part)
                if divided is not None:
                    if not divided.by_rows:
                        own = own.reshape(-1)
                    own = own[slice(*divided.bounds(inner))]
                found = [
                    region.first + run * region.stride + place
                    for region in split.regions(part, inner)
                    for run in range(region.runs)
                    for place in range(region.length)
                ]
                assert found == list(own.reshape(-1))
                seen += found
            assert sorted(seen) == list(range(every.size))
