"""What is checked on a machine with a GPU; writes docs/gpu.json.

    python -m tests.gpu.run [--only=gpu,nccl] [--processes=8]
    (or: make gpu-check)

    gpu     one whole GPU: commands, memory, kills, NaN
    nccl    2 and 3 processes that exchange by NCCL, against one device
    parity  the parity rows of the default and the full tier, with parts of
            the GPU as devices
    engine  default tests of the engine and of conformance, likewise
    speed   `mgpu_tf`, Keras's `fit`, a loop by hand and PyTorch

The first four run at once. Hardware: one GPU with 40 GB, 16 cores; about
twenty minutes. Exits with status 1 where a test fails.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "gpu.json"
FIGURES = "MGPU_TF_GPU_FIGURES"

# Tests, the marks of those that run, and the share of the processes.
# Of the engine those files whose strategies are all of the fixture.
GROUPS = {
    "gpu": (["tests/gpu/test_one_gpu.py"], "gpu", 0.3),
    "nccl": (["tests/gpu/test_nccl.py"], "gpu", 0.2),
    "parity": (["tests/parity/test_one_machine.py"], "full or not full", 0.4),
    "engine": (
        [
            *(
                f"tests/engine/test_{name}.py"
                for name in (
                    *("contributions", "fused_normalization", "losses"),
                    *("fused_optimizers", "global_sums", "own_gradients"),
                    *("random_rows", "recompute_by_name", "reduction"),
                    *("overridden_step", "whole_batch", "written_state"),
                    *("over_collectives", "per_layer", "custom_gradient"),
                    *("loss_parity", "within_functions", "update_order"),
                )
            ),
            "tests/training/test_callbacks.py",
            "tests/conformance/test_slice.py",
        ],
        "not full and not matrix and not gpu",
        0.5,
    ),
}


def machine():
    """Returns the GPU, its driver, and the versions of packages."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
    done = subprocess.run(
        [*query, "--format=csv,noheader"], capture_output=True, text=True
    )
    packages = ("tensorflow", "keras", "torch", "nvidia-nccl-cu12")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": done.stdout.strip().splitlines()[0],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def started(name, processes, folder):
    """Starts a group of tests; returns the process."""
    tests, marks, share = GROUPS[name]
    command = [
        *(sys.executable, "-m", "pytest", *tests, "-m", marks),
        *("-v", "-p", "no:cacheprovider", "-p", "tests.record", "--tb=short"),
        f"--record={folder / name}.json",
        f"--numprocesses={max(1, round(processes * share))}",
    ]
    environment = dict(os.environ) | {FIGURES: str(folder / "figures.jsonl")}
    if name in ("parity", "engine"):
        environment["MGPU_TF_TESTS_ON"] = "gpu"
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def speed(folder):
    """Measures; returns whether it could, and the rates by model."""
    done = subprocess.run(
        [
            sys.executable,
            "experiments/gpu_speed.py",
            f"--output_dir={folder}",
        ],
        cwd=ROOT,
        check=False,
    )
    path = folder / "gpu_speed.json"
    return done.returncode == 0, json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join([*GROUPS, "speed"]))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", default=str(ROOT / "runs" / "gpu"))
    arguments = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.error("it needs a GPU, and nvidia-smi is not there")
    folder = pathlib.Path(arguments.output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.jsonl").unlink(missing_ok=True)
    chosen = arguments.only.split(",")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["machine"] = machine()
    running = {
        name: started(name, arguments.processes, folder)
        for name in GROUPS
        if name in chosen
    }
    red = 0
    for name, process in running.items():
        red += process.wait() != 0
        outcomes = json.loads((folder / f"{name}.json").read_text())["outcomes"]
        found[name] = {
            end: sorted(test for test, was in outcomes.items() if was == end)
            for end in ("failed", "skipped")
        } | {"passed": sum(was == "passed" for was in outcomes.values())}
        print(name, found[name])
    if "nccl" in running:
        lines = (folder / "figures.jsonl").read_text().splitlines()
        found["nccl"]["operations"] = [json.loads(line) for line in lines]
    if "speed" in chosen:
        could, found["speed"] = speed(folder)
        red += not could
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
