"""A run of one of `tests.jobs.large` that kills itself in its second epoch.

    python -m tests.engine.killed_large MODEL MESH FOLDER
    mgpu-tf launch --num_workers=2 -- \
        python -m tests.engine.killed_large MODEL two_workers FOLDER
"""

import sys

import numpy as np

import mgpu_tf
from tests import columns
from tests.jobs import large
from tests.parity.cases import set_floatx

MESHES = {
    "fsdp_4": {"fsdp": 4},
    "tensor_2": {"tensor": 2},
    "data_2_tensor_2": {"data": 2, "tensor": 2},
    "data_2_pipeline_2": {"data": 2, "pipeline": 2, "micro_batches": 2},
    "fsdp_2_pipeline_2": {"fsdp": 2, "pipeline": 2, "micro_batches": 2},
}


def made(mesh):
    if mesh == "two_workers":
        return mgpu_tf.create_model_parallel_strategy(fsdp=2, smallest_split=4)
    options = dict(MESHES[mesh])
    devices = np.prod([options.get(a, 1) for a in ("data", "fsdp", "tensor")])
    devices *= options.get("pipeline", 1)
    if "pipeline" not in options or "fsdp" in options:
        options["smallest_split"] = 4
    return mgpu_tf.create_model_parallel_strategy(
        **options, **columns.parts(int(devices))
    )


def main():
    name, mesh, folder = sys.argv[1:]
    strategy = made(mesh)
    set_floatx("float64")
    cluster = mgpu_tf.ClusterConfig.from_environment()
    large.Kills.acts = cluster is None or cluster.worker_index > 0
    large.train(strategy, name, folder)


if __name__ == "__main__":
    main()
