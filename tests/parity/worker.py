"""What a process of a test cluster runs: cases, one after the other.

    mgpu-tf launch --num_workers=2 -- python -m tests.parity.worker \
        --folder=... --cases=a,b --num_virtual_devices=2

The chief saves the result of each case; every worker prints the hash of the
weights that it ended with. A case that is refused is saved as its message.
"""

import argparse
import os
import time

import mgpu_tf
from mgpu_tf.reports.report import weights_sha256
from mgpu_tf.runtime import quiet_import
from tests.columns import ON_GPU, parts


def result_file(folder, case):
    return os.path.join(folder, f"{case}.npz")


def strategy_of(mesh, num_virtual_devices, communication="auto"):
    """Returns the strategy of a cluster; split where there is a mesh."""
    options = parts(num_virtual_devices) | {"communication": communication}
    if not mesh:
        return mgpu_tf.create_multi_worker_mirrored_strategy(**options)
    data, fsdp, shard, *others = mesh.split(",")
    return mgpu_tf.create_model_parallel_strategy(
        int(data),
        int(fsdp),
        **dict(zip(("tensor", "pipeline"), map(int, others), strict=False)),
        shard=shard,
        **options,
        # Of the small weights of tests the large ones are split.
        smallest_split=4,
    )


def trained(strategy, folder, name, floatx=""):
    """Trains a case; the chief saves its result. Returns the weights' hash."""
    from tests.parity import cases

    case = cases.CASES[name]
    cases.set_floatx(floatx or case.floatx)
    try:
        result = cases.run(case, strategy)
    finally:
        cases.set_floatx("float32")
    if mgpu_tf.ClusterConfig.from_environment().worker_index == 0:
        result.save(result_file(folder, name))
    return weights_sha256(result.weights)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--floatx", default="")
    parser.add_argument("--num_virtual_devices", type=int, default=1)
    parser.add_argument("--communication", default="auto")
    parser.add_argument(
        "--mesh", default="", help="data,fsdp,shard[,tensor[,pipeline]]"
    )
    arguments = parser.parse_args()
    if ON_GPU:
        # NCCL takes a GPU once on each machine.
        task = mgpu_tf.ClusterConfig.from_environment().worker_index
        os.environ["NCCL_HOSTID"] = f"machine {task}"
    quiet_import.import_tensorflow()
    if ON_GPU:
        # Else GPUs add the rows of an embedding in any order, and copies
        # differ by rounding.
        mgpu_tf.enable_determinism()
    strategy = strategy_of(
        arguments.mesh,
        arguments.num_virtual_devices,
        arguments.communication,
    )
    for name in arguments.cases.split(","):
        started = time.monotonic()
        digest = trained(strategy, arguments.folder, name, arguments.floatx)
        seconds = time.monotonic() - started
        # A line each, read by the test that started the cluster.
        print(f"RESULT {name} {digest} {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
