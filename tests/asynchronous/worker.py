"""What every process of a test cluster runs.

    mgpu-tf launch --num_workers=3 --num_ps=2 -- \
        python -m tests.asynchronous.worker --folder=... --cases=a,b

Only the coordinator gets beyond the strategy; it writes what each case
returns as JSON. A case with options in it, such as `staleness:2:hold`, runs
with max_staleness=2 and late_gradients="hold".
"""

import argparse
import json
import os
import time

import mgpu_tf
from mgpu_tf.runtime import quiet_import


def result_file(folder, case):
    return os.path.join(folder, case.replace(":", "-") + ".json")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--cases", required=True)
    arguments = parser.parse_args()
    quiet_import.import_tensorflow()
    strategy = mgpu_tf.create_strategy("auto")
    # Worker and ps tasks do not come here.
    print("COORDINATOR", os.getpid(), flush=True)
    from mgpu_tf.strategies.parameter_server import StalenessOptions
    from tests.asynchronous import cases

    for case in arguments.cases.split(","):
        name, *options = case.split(":")
        strategy.staleness = StalenessOptions()
        if options:
            strategy.staleness = StalenessOptions(
                int(options[0]), options[1], sample_every=1
            )
        started = time.monotonic()
        result = cases.CASES[name](strategy)
        seconds = time.monotonic() - started
        print(f"RESULT {case} {seconds:.1f} s", flush=True)
        with open(result_file(arguments.folder, case), "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
