"""What a process of the cluster runs: rows, one after the other.

    mgpu-tf launch --num_workers=2 -- python -m tests.conformance.worker \
        --folder=... --rows=names.json

Every worker leaves the outcome of each row in the folder. After a crash the
process ends, since one failed collective aborts every later one: the runner
goes on with the rows that are left in a new cluster.
"""

import argparse
import json
import os
import sys

import mgpu_tf
from mgpu_tf.runtime import quiet_import


def outcome_file(folder, number, worker):
    return os.path.join(folder, f"{number}-{worker}.outcome")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--balance", help="as for the strategy")
    arguments = parser.parse_args()
    quiet_import.import_tensorflow()
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy(
        balance=arguments.balance
    )
    from tests.conformance.harness import observe
    from tests.conformance.rows import ROWS

    worker = mgpu_tf.ClusterConfig.from_environment().worker_index
    with open(arguments.rows) as file:
        names = json.load(file)
    for number, name in enumerate(names):
        outcome = observe(ROWS[name], strategy)
        path = outcome_file(arguments.folder, number, worker)
        outcome.save(f"{path}.part")
        os.replace(f"{path}.part", path)
        if outcome.kind == "crashed":
            sys.exit(1)


if __name__ == "__main__":
    main()
