"""Starting real clusters of processes on this machine for tests."""

import json
import os
import re
import subprocess
import sys

# Guards against a hang; on a starved machine a start takes minutes.
LIMIT_SECONDS = 900

PYTHON = sys.executable
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def environment(**extra):
    """The environment for a child: no cluster of its own, this package."""
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    path = os.pathsep.join(p for p in (ROOT, os.environ.get("PYTHONPATH")) if p)
    return inherited | {"PYTHONPATH": path} | extra


def mgpu_tf(*arguments, **kwargs):
    """Runs `python -m mgpu_tf` to its end."""
    return run(["-m", "mgpu_tf", *arguments], **kwargs)


def run(arguments, **kwargs):
    """Runs Python with arguments to its end."""
    return subprocess.run(
        [PYTHON, *arguments],
        env=environment(**kwargs.pop("env", {})),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        **kwargs,
    )


def run_parity_cases(
    num_workers, num_virtual_devices, names, folder, floatx="", mesh=""
):
    """Runs cases on a cluster; their results are then in the folder.

    With a mesh, "data,fsdp,shard", weights are split.

    Returns:
        For each case the set of weight hashes that the workers ended with.
    """
    done = mgpu_tf(
        "launch",
        f"--num_workers={num_workers}",
        "--startup_seconds=0",
        "--",
        PYTHON,
        "-m",
        "tests.parity.worker",
        f"--folder={folder}",
        f"--cases={','.join(names)}",
        f"--floatx={floatx}",
        f"--num_virtual_devices={num_virtual_devices}",
        f"--mesh={mesh}",
    )
    hashes = {name: [] for name in names}
    pattern = r"^\[worker \d+\] RESULT (\S+) (\S+)"
    for name, digest in re.findall(pattern, done.stdout, re.MULTILINE):
        hashes[name].append(digest)
    short = [n for n, found in hashes.items() if len(found) != num_workers]
    if done.returncode or short:
        raise AssertionError(
            f"exit code {done.returncode}, not finished: {short}\n"
            + (done.stdout + done.stderr)[-6000:]
        )
    assert "auto-shard" not in (done.stdout + done.stderr).lower()
    return {name: set(found) for name, found in hashes.items()}


def run_jobs(module, num_workers, folder, names=None, num_virtual_devices=1):
    """Runs the jobs of a module on a cluster.

    Args:
        module: One of `tests.jobs`.
        num_workers: Its processes.
        folder: Where jobs leave what they observed, and their files.
        names: Which jobs; all by default.
        num_virtual_devices: Replicas of each process.

    Returns:
        For each job what each worker observed.
    """
    from tests.jobs import worker

    names = list(names or module.JOBS)
    done = mgpu_tf(
        "launch",
        f"--num_workers={num_workers}",
        "--startup_seconds=0",
        "--",
        PYTHON,
        "-m",
        "tests.jobs.worker",
        f"--module={module.__name__}",
        f"--jobs={','.join(names)}",
        f"--folder={folder}",
        f"--num_virtual_devices={num_virtual_devices}",
    )
    if done.returncode:
        raise AssertionError((done.stdout + done.stderr)[-6000:])
    observed = {}
    for name in names:
        observed[name] = []
        for index in range(num_workers):
            with open(worker.result_file(folder, name, index)) as file:
                observed[name].append(json.load(file))
    return observed
