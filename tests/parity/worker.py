"""What each process of a test cluster runs: cases, one after the other.

    mgpu-tf launch --num_workers=2 -- python -m tests.parity.worker \
        --folder=... --floatx=float64 --cases=a,b --num_virtual_devices=2

The chief saves the result of each case; every worker checks that it ended
with the chief's weights.
"""

import argparse
import os
import re

import mgpu_tf
from mgpu_tf import quiet
from mgpu_tf.report import weights_sha256


def file_name(case):
    return re.sub(r"[^a-z0-9_]", "-", case) + ".npz"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--floatx", required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--num_virtual_devices", type=int, default=1)
    arguments = parser.parse_args()
    quiet.import_tensorflow()
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy(
        num_virtual_devices=arguments.num_virtual_devices
    )
    from tests.parity import cases

    cases.set_floatx(arguments.floatx)
    worker = mgpu_tf.ClusterConfig.from_environment().worker_index
    for name in arguments.cases.split(","):
        result = cases.run(cases.CASES[name], strategy)
        # A line each, compared by the test that started the cluster.
        print(f"RESULT {name} {weights_sha256(result.weights)}", flush=True)
        if worker == 0:
            result.save(os.path.join(arguments.folder, file_name(name)))


if __name__ == "__main__":
    main()
