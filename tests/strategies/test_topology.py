"""Where a process stands, whatever the strategy."""

import types

from mgpu_tf.strategies.registry import kind_of, topology_of
from mgpu_tf.strategies.replicas.topology import (
    LocalReplicas,
    asynchronous_topology,
    synchronous_topology,
)


def resolver(kind, index, **tasks):
    spec = types.SimpleNamespace(as_dict=lambda: tasks)
    return types.SimpleNamespace(
        task_type=kind, task_id=index, cluster_spec=lambda: spec
    )


def strategy(replicas, local, **others):
    extended = types.SimpleNamespace(worker_devices=("",) * local)
    return types.SimpleNamespace(
        num_replicas_in_sync=replicas,
        extended=extended,
        cluster_resolver=None,
        **others,
    )


def test_one_process(strategies):
    found = topology_of(strategies["mirrored_x3"])
    assert (found.num_workers, found.worker_index) == (1, 0)
    assert found.local == LocalReplicas(0, 3, 3)
    assert (found.data_parallel_degree, found.is_chief) == (3, True)


def test_a_worker_beside_a_chief():
    made = strategy(6, 2)
    made.cluster_resolver = resolver(
        "worker", 1, chief=["a"], worker=["b", "c"]
    )
    found = synchronous_topology(made)
    assert (found.num_workers, found.worker_index) == (3, 2)
    assert found.local == LocalReplicas(4, 2, 6)
    assert not found.is_chief
    context = found.input_context()
    assert (context.num_input_pipelines, context.input_pipeline_id) == (3, 2)
    assert context.num_replicas_in_sync == 6


def test_a_coordinator_is_one_process_with_several_workers():
    cluster = types.SimpleNamespace(worker=["a", "b", "c"])
    found = asynchronous_topology(strategy(2, 2, cluster=cluster))
    assert (found.num_workers, found.data_parallel_degree) == (3, 6)
    assert found.local == LocalReplicas(0, 2, 2)
    assert (found.local.num_processes, found.is_chief) == (1, True)


def test_kinds(strategies):
    names = {name: kind_of(made).name for name, made in strategies.items()}
    assert names == {
        "mirrored_x4": "mirrored",
        "mirrored_x2": "mirrored",
        "mirrored_x3": "mirrored",
        "one_device": "one_device",
        "central_storage_x2": "central_storage",
        "fsdp_x1": "model_parallel",
        "fsdp_x3": "model_parallel",
        "data_3": "model_parallel",
        "data_2_fsdp_2": "model_parallel",
        "zero1_x2": "model_parallel",
        "pipeline_x2": "model_parallel",
        "data_2_pipeline_2": "model_parallel",
        "fsdp_3_pipeline_2": "model_parallel",
        "tensor_2_pipeline_2": "model_parallel",
        "data_2_tensor_2_pipeline_2": "model_parallel",
        "fsdp_2_tensor_2_pipeline_2": "model_parallel",
        "tensor_x3": "model_parallel",
        "data_2_tensor_2": "model_parallel",
        "fsdp_2_tensor_2": "model_parallel",
    }


def test_neighbours_with_the_same_rows():
    local = LocalReplicas(0, 4, 4, same_rows=2)
    assert local.ranges == 2
    rows = [local.rows_of(5, replica) for replica in range(4)]
    assert rows == [(0, 2), (0, 2), (2, 5), (2, 5)]
