"""What a process of a test cluster runs: jobs, one after the other.

    mgpu-tf launch --num_workers=2 -- python -m tests.jobs.worker \
        --module=tests.jobs.data_kinds --jobs=arrays,dicts --folder=...

Every worker leaves what each job observed as JSON in the folder.
"""

import argparse
import importlib
import json
import os

import mgpu_tf
from mgpu_tf.runtime import quiet_import


def result_file(folder, job, worker):
    return os.path.join(folder, f"{job}-{worker}.json")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", required=True)
    parser.add_argument("--jobs", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--num_virtual_devices", type=int)
    arguments = parser.parse_args()
    quiet_import.import_tensorflow()
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy(
        num_virtual_devices=arguments.num_virtual_devices
    )
    worker = mgpu_tf.ClusterConfig.from_environment().worker_index
    jobs = importlib.import_module(arguments.module).JOBS
    for name in arguments.jobs.split(","):
        observed = jobs[name](strategy, arguments.folder)
        with open(result_file(arguments.folder, name, worker), "w") as file:
            json.dump(observed, file)


if __name__ == "__main__":
    main()
