"""The command `mgpu-tf test`: whether distributed training works here."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.studies import setup_check

USAGE = """mgpu-tf test

Tries this installation on made-up data, in 20 seconds on two idle cores:

  1. two replicas, on two GPUs or on two parts of a device, against one device
  2. two processes, of which one is killed and the training resumes, against
     one device

Both run at the same time. Prints a line for each, or the output of the one that
fails. Exits with status 1 if one fails.

Example:
  mgpu-tf test
"""

FAILED = 1
_MODULE = "mgpu_tf.studies.setup_check"
# Of weights of about 0.1, in float32.
_TOLERANCE = 1e-4


def define(values: flags.FlagValues) -> None:
    """Defines no flags."""
    del values


def run(call: Call) -> int:
    """Runs both stages; returns 1 if one of them fails."""
    call.takes_flags_only()
    python = [sys.executable, "-P", "-m"]
    here = {**os.environ, "PYTHONPATH": _import_path()}
    # Two processes cannot share a GPU as replicas.
    without_gpus = {**here, "CUDA_VISIBLE_DEVICES": ""}
    launch = ("mgpu_tf", "launch", "--num_workers=2", "--max_restarts=1")
    status = 0
    with (
        tempfile.TemporaryDirectory(prefix="mgpu_tf-") as folder,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        trains = [*python, _MODULE]
        restarted = [*python, *launch, "--backoff_seconds=0", "--", *trains]
        stages = {
            name: threads.submit(_run, [*command, name, folder], environment)
            for name, command, environment in (
                (setup_check.REPLICAS, trains, here),
                (setup_check.WORKERS, restarted, without_gpus),
            )
        }
        for name, stage in stages.items():
            done, seconds = stage.result()
            problem = _problem(name, folder, done.returncode)
            if problem:
                status = FAILED
                print(f"FAILED {name}: {problem}\n{done.stdout}", flush=True)
            else:
                print(
                    f"ok  {_line(name, folder)} ({seconds:.0f} s)", flush=True
                )
    if not status:
        print("Your setup works.")
    return status


def _run(
    command: list[str], environment: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Returns how a command ended, and after how many seconds."""
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done, time.monotonic() - began


def _problem(stage: str, folder: str, status: int) -> str:
    """Returns what is wrong with a stage, "" for nothing."""
    found = setup_check.found(stage, folder)
    if status or found is None:
        return f"exit code {status}"
    by = setup_check.difference(stage, folder)
    if by is None:
        return "one device left no weights to compare with"
    if not by < _TOLERANCE:
        return f"weights differ from one device by {by:.1e}"
    if stage == setup_check.WORKERS and found["restarts"] != 1:
        return f"{found['restarts']} restarts where one process was killed"
    return ""


def _line(stage: str, folder: str) -> str:
    found = setup_check.found(stage, folder)
    assert found is not None
    by = setup_check.difference(stage, folder)
    difference = f"largest difference of a weight {by:.0e}"
    if stage == setup_check.REPLICAS:
        return f"two replicas on {found['devices']}: {difference}"
    return (
        f"two processes, one killed and resumed, {found['steps']} steps: "
        f"{difference}"
    )


def _import_path() -> str:
    """Returns where processes find this package, installed or not."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join(part for part in (home, given) if part)
