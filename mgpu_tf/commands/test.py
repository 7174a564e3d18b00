"""The command `mgpu-tf test`: whether distributed training works here."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import flags

from mgpu_tf.commands.arguments import Call

USAGE = """mgpu-tf test

Tries this installation in a minute or two, on made-up data:

  1. two replicas, on two GPUs or on two parts of the CPU, against one device
  2. two processes, of which one is killed and the training resumes

Prints a line for each, and the output of a step that fails. Exits with status 1
if one fails.

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
    """Runs both steps; returns 1 if one of them fails."""
    call.takes_flags_only()
    python = [sys.executable, "-P", "-m"]
    here = {**os.environ, "PYTHONPATH": _import_path()}
    # Two processes cannot share a GPU as replicas.
    without_gpus = {**here, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="mgpu_tf-") as folder:
        stages = (
            ("replicas", [*python, _MODULE, "replicas", folder], here),
            (
                "workers",
                [
                    *(*python, "mgpu_tf", "launch", "--num_workers=2"),
                    *("--max_restarts=1", "--backoff_seconds=0", "--"),
                    *(*python, _MODULE, "workers", folder),
                ],
                without_gpus,
            ),
        )
        for stage, command, environment in stages:
            began = time.monotonic()
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            path = pathlib.Path(folder, f"{stage}.json")
            found = json.loads(path.read_text()) if path.exists() else None
            passed = time.monotonic() - began
            problem = _problem(stage, found, done.returncode)
            if problem:
                print(f"FAILED {stage}: {problem}\n{done.stdout}", flush=True)
                return FAILED
            print(f"ok  {_line(stage, found)} ({passed:.0f} s)", flush=True)
    print("Your setup works.")
    return 0


def _problem(stage: str, found: dict | None, status: int) -> str:
    """Returns what is wrong with a step, "" for nothing."""
    if status or found is None:
        return f"exit code {status}"
    if not found["difference"] < _TOLERANCE:
        return f"weights differ from one device by {found['difference']:.1e}"
    if stage == "workers" and found["restarts"] != 1:
        return f"{found['restarts']} restarts where one process was killed"
    return ""


def _line(stage: str, found: dict | None) -> str:
    assert found is not None
    difference = f"largest difference of a weight {found['difference']:.0e}"
    if stage == "replicas":
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
