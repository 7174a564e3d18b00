"""How soon a job trains again after a task has died, with and without spares.

    python -m experiments.benchmarks.restarts [--rounds=3] [--num_workers=2]

Each round starts the job of `benchmarks.restarted` under `mgpu-tf launch`, once
without and once with a spare for each task, in turns. When the spares have
imported TensorFlow, the last worker is killed by SIGKILL. The seconds run from
there to the first step after the resume; the job itself notes when that was.
There is no pause before the restart. Hardware: any.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

_LIMIT_SECONDS = 180
# For the spares to import TensorFlow, with and without them alike.
_SETTLE_SECONDS = 20.0


def seconds_to_a_step(num_workers: int, spares: int) -> float:
    """Returns the seconds from a death to the first step after it.

    Args:
        num_workers: The workers of the job.
        spares: How many processes wait.

    Raises:
        TimeoutError: The job did not get there.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as output,
    ):
        notes = os.path.join(folder, "notes")
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mgpu_tf", "launch"),
                f"--num_workers={num_workers}",
                *("--max_restarts=1", "--backoff_seconds=0"),
                f"--spares={spares}",
                f"--log_dir={os.path.join(folder, 'logs')}",
                *("--", sys.executable, "-m"),
                *("experiments.benchmarks.restarted", folder),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(notes + ".0")
            time.sleep(_SETTLE_SECONDS)
            with open(f"{notes}.pid.{num_workers - 1}") as file:
                pid = int(file.read())
            died = time.time()
            os.kill(pid, signal.SIGKILL)
            return _wait_for(notes + ".1") - died
        except TimeoutError:
            output.seek(0)
            print(output.read()[-6000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def _wait_for(path: str) -> float:
    """Returns the time that a file has, when it is there."""
    end = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < end:
        if os.path.exists(path):
            with open(path) as file:
                return float(file.read())
        time.sleep(0.02)
    raise TimeoutError(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_workers", type=int, default=2)
    arguments = parser.parse_args()
    count = arguments.num_workers
    found: dict[int, list[float]] = {0: [], count: []}
    for index in range(arguments.rounds):
        for spares in (0, count) if index % 2 == 0 else (count, 0):
            seconds = seconds_to_a_step(count, spares)
            found[spares].append(seconds)
            print(f"{spares} spares: {seconds:.1f} s", flush=True)
    for spares, times in found.items():
        print(
            f"{spares} spares: median {statistics.median(times):.1f} s of "
            f"{len(times)}"
        )


if __name__ == "__main__":
    sys.exit(main())
