"""Which GPUs each worker of a local job gets."""

import pytest

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.launch import gpus


def cluster(task, workers, ps=0, chief=False):
    name, _, index = task.partition(" ")
    ports = iter(range(1000, 2000))

    def addresses(count):
        return tuple(f"127.0.0.1:{next(ports)}" for _ in range(count))

    return ClusterConfig(
        chief=addresses(int(chief)),
        worker=addresses(workers),
        ps=addresses(ps),
        task_type=name,
        task_index=int(index or 0),
    )


@pytest.fixture
def files(tmp_path):
    """Makes as many files of GPUs as a test asks for; returns the pattern."""

    def make(count):
        for number in range(count):
            (tmp_path / f"nvidia{number}").touch()
        (tmp_path / "nvidiactl").touch()
        return str(tmp_path / "nvidia[0-9]*")

    return make


@pytest.mark.parametrize(
    ("count", "workers", "shares"),
    [
        (4, 2, ["0,1", "2,3"]),
        (2, 2, ["0", "1"]),
        (5, 2, ["0,1", "2,3"]),
        (1, 2, [None, None]),
        (0, 2, [None, None]),
        (4, 1, [None]),
    ],
)
def test_each_worker_gets_its_own(count, workers, shares, files):
    pattern = files(count)
    for index, own in enumerate(shares):
        told = gpus.share(cluster(f"worker {index}", workers), {}, pattern)
        assert told.get("CUDA_VISIBLE_DEVICES") == own


def test_of_those_that_are_named(files):
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-a, 3,GPU-c,7"}
    told = gpus.share(cluster("worker 1", 2), environ, files(8))
    assert told == {"CUDA_VISIBLE_DEVICES": "GPU-c,7"}


@pytest.mark.parametrize(
    ("task", "own"),
    [("chief", None), ("worker 1", "2,3"), ("ps 0", None)],
)
def test_servers_and_their_chief_get_none_of_them(task, own, files):
    told = gpus.share(cluster(task, 2, ps=1, chief=True), {}, files(4))
    assert told.get("CUDA_VISIBLE_DEVICES") == own
