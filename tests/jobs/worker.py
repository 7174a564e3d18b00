"""What a process of a test cluster runs: jobs, one after the other.

    mgpu-tf launch --num_workers=2 -- python -m tests.jobs.worker \
        --requests=FOLDER --asked_by=PID --num_virtual_devices=1

The test writes requests 0, 1, ... to the folder; each names a module, some of
its jobs and a folder. Every worker leaves there what each job observed, as
JSON. A file for each worker says that a request is done, and what it took of
the processor, in seconds.
"""

import argparse
import importlib
import itertools
import json
import os
import time

import mgpu_tf
from mgpu_tf.runtime import quiet_import
from tests import leftovers


def result_file(folder, job, worker):
    return os.path.join(folder, f"{job}-{worker}.json")


def request_file(folder, number):
    return os.path.join(folder, f"request-{number}.json")


def done_file(folder, number, worker):
    return os.path.join(folder, f"done-{number}-{worker}")


def requests(folder, asked_by):
    """Yields requests as they come, until one is empty or the test is gone."""
    for number in itertools.count():
        path = request_file(folder, number)
        while not os.path.exists(path):
            if not os.path.exists(f"/proc/{asked_by}"):
                return
            time.sleep(0.05)
        with open(path) as file:
            request = json.load(file)
        if not request:
            return
        yield number, request


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", required=True)
    parser.add_argument("--asked_by", required=True)
    parser.add_argument("--num_virtual_devices", type=int)
    arguments = parser.parse_args()
    quiet_import.import_tensorflow()
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy(
        num_virtual_devices=arguments.num_virtual_devices
    )
    import keras

    from tests.parity import cases

    worker = mgpu_tf.ClusterConfig.from_environment().worker_index
    asked = requests(arguments.requests, arguments.asked_by)
    for number, request in asked:
        began = time.process_time()
        jobs = importlib.import_module(request["module"]).JOBS
        for name in request["jobs"]:
            observed = jobs[name](strategy, request["folder"])
            cases.set_floatx("float32")
            path = result_file(request["folder"], name, worker)
            with open(path, "w") as file:
                json.dump(observed, file)
        leftovers.clear()
        # Jobs may have left other numbers in the names on one worker.
        keras.utils.clear_session()
        path = done_file(arguments.requests, number, worker)
        with open(path + ".new", "w") as file:
            file.write(f"{time.process_time() - began}")
        os.replace(path + ".new", path)


if __name__ == "__main__":
    main()
