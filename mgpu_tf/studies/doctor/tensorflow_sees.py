"""What TensorFlow sees of this machine, asked in a child process.

    python -m mgpu_tf.studies.doctor.tensorflow_sees [--all_reduce]

prints one line of JSON. The import of TensorFlow, a driver or a collective may
hang or end the process, so the parent waits with a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_tf.errors import installing
from mgpu_tf.studies.doctor import gpus as gpu_checks
from mgpu_tf.studies.doctor.findings import Finding, error, ok, warning

_MARK = "mgpu_tf doctor: "
_BYTES = 16 << 20
_ROUNDS = 5


def examine(
    environ: Mapping[str, str], seconds: float, all_reduce: bool
) -> Iterator[Finding]:
    """Checks the devices, the drivers, and the way between the devices.

    Args:
        environ: The environment of the child process.
        seconds: The time limit of the child process.
        all_reduce: Whether to sum a tensor over all devices. In a cluster,
            every task must do it.
    """
    driver = gpu_checks.ask_driver()
    command = [sys.executable, "-m", "mgpu_tf.studies.doctor.tensorflow_sees"]
    own = {k: v for k, v in environ.items() if all_reduce or k != "TF_CONFIG"}
    own.setdefault("NCCL_DEBUG", "INFO")  # It goes to stdout.
    try:
        done = subprocess.run(
            command + ["--all_reduce"] * all_reduce,
            env=own,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        doing = "sum a tensor over the devices" if all_reduce else "start"
        yield error(
            "TensorFlow",
            f"TensorFlow did not {doing} within {seconds:.0f} s.",
            "Run mgpu-tf doctor --all_reduce on every task at the same time."
            if all_reduce
            else "Check the driver (nvidia-smi) and the disk of Python's "
            "packages.",
        )
        return
    lines = [x for x in done.stdout.splitlines() if x.startswith(_MARK)]
    if not lines:
        said = [x for x in done.stderr.splitlines() if x.strip()] or [""]
        yield error(
            "TensorFlow",
            f"TensorFlow failed (exit code {done.returncode}): "
            f"{said[-1][:200]}",
            "Install this package into a new environment.",
        )
        return
    yield from judge(json.loads(lines[-1].removeprefix(_MARK)), driver)
    yield from gpu_checks.nccl(done.stdout)


def judge(
    seen: dict[str, Any], driver: gpu_checks.Driver | None
) -> Iterator[Finding]:
    """Judges what the child process saw.

    Args:
        seen: Its JSON.
        driver: What the driver says; None where there is no nvidia-smi.
    """
    gpus = [
        gpu_checks.Gpu(name, tuple(capability) if capability else None)
        for name, capability in seen["gpus"]
    ]
    names = sorted({gpu.name for gpu in gpus})
    there = () if driver is None else driver.gpus
    hidden = seen["visible"] is not None
    if gpus:
        yield ok(
            "GPUs",
            f"TensorFlow sees {len(gpus)}: {', '.join(names)}; "
            f"CUDA {seen['cuda']}, cuDNN {seen['cudnn']}",
        )
        if len(there) > len(gpus) and not hidden:
            yield warning(
                "GPUs",
                f"nvidia-smi lists {len(there)} GPUs, TensorFlow {len(gpus)}.",
                "Check nvidia-smi for GPUs with errors.",
            )
    elif there and hidden:
        yield warning(
            "GPUs",
            f"nvidia-smi lists {len(there)} GPUs, and CUDA_VISIBLE_DEVICES="
            f"{seen['visible']!r} hides them.",
            "Unset CUDA_VISIBLE_DEVICES.",
        )
    elif there:
        yield error(
            "GPUs",
            f"nvidia-smi lists {len(there)} GPUs, TensorFlow sees none "
            f"(built {'with' if seen['built_with_cuda'] else 'without'} "
            "CUDA).",
            f"Run: {_libraries_remedy(seen)}",
        )
    else:
        yield ok("GPUs", "none; TensorFlow uses the CPU")
    if gpus or there:
        known = driver or gpu_checks.Driver()
        cuda = str(seen["cuda"])
        yield from gpu_checks.driver_fits(cuda, known)
        yield from gpu_checks.kernels(
            seen["kernels"], gpus or there, cuda, known
        )
        yield from gpu_checks.links(known)
    yield from _judge_sum(seen)


def _libraries_remedy(seen: dict[str, Any]) -> str:
    """The command after which TensorFlow finds the libraries of CUDA."""
    if not (seen["built_with_cuda"] and seen["wheels"]):
        return installing("gpu")
    folders = f"$(echo {seen['wheels']}/*/lib | tr ' ' ':')"
    # An empty entry would be the current folder.
    others = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    return f"export LD_LIBRARY_PATH={folders}{others}"


def _judge_sum(seen: dict[str, Any]) -> Iterator[Finding]:
    """Judges the sum over all devices, if there was one."""
    reduced = seen.get("all_reduce")
    if reduced is None:
        return
    if reduced["replicas"] == 1:
        yield ok("all-reduce", "one device: nothing to sum")
    elif not reduced["exact"]:
        yield error(
            "all-reduce",
            f"The sum over {reduced['replicas']} replicas is wrong.",
            "Check the memory and the links of the devices; try "
            "NCCL_P2P_DISABLE=1.",
        )
    else:
        yield ok(
            "all-reduce",
            f"{_BYTES >> 20} MiB over {reduced['replicas']} replicas in "
            f"{reduced['seconds'] * 1e3:.1f} ms, "
            f"{reduced['gib_per_second']:.2f} GiB/s for each replica",
        )
        if reduced["clock_seconds"] > 1:
            yield warning(
                "clock",
                "The clocks of the machines differ by "
                f"{reduced['clock_seconds']:.0f} s.",
                "Run a time service, such as chrony, on all machines.",
            )


def _look(all_reduce: bool) -> dict[str, Any]:
    """What TensorFlow sees. In the child process."""
    import os

    from mgpu_tf.runtime import quiet_import

    quiet_import.import_tensorflow()
    import tensorflow as tf

    from mgpu_tf.runtime.devices import gpus

    build = tf.sysconfig.get_build_info()
    seen: dict[str, Any] = {
        "gpus": [
            (
                details.get("device_name", gpu.name),
                details.get("compute_capability"),
            )
            for gpu in gpus()
            for details in [tf.config.experimental.get_device_details(gpu)]
        ],
        "kernels": list(build.get("cuda_compute_capabilities", ())),
        "built_with_cuda": tf.test.is_built_with_cuda(),
        "cuda": build.get("cuda_version", "none"),
        "cudnn": build.get("cudnn_version", "none"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "wheels": _folder_of_wheels(),
    }
    if all_reduce:
        seen["all_reduce"] = _all_reduce()
    return seen


def _folder_of_wheels() -> str | None:
    """The folder of NVIDIA's packages, which have the libraries of CUDA."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    for folder in folders or ():
        if any(pathlib.Path(folder).glob("*/lib")):
            return folder
    return None


def _all_reduce() -> dict[str, Any]:
    """Sums a tensor over all devices of the cluster, or of this machine."""
    import tensorflow as tf

    from mgpu_tf.strategies.registry import create_strategy

    strategy = create_strategy("auto")
    replicas = strategy.num_replicas_in_sync
    now = tf.reshape(tf.constant(time.time(), tf.float64), [1])

    @tf.function(autograph=False)
    def sums(value: tf.Tensor) -> Any:
        def on_replica(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.identity(value))

        result = strategy.run(on_replica, args=(value,))
        return strategy.experimental_local_results(result)[0]

    @tf.function(autograph=False)
    def clocks(now: tf.Tensor) -> Any:
        def on_replica(now: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_gather(tf.identity(now), 0)

        result = strategy.run(on_replica, args=(now,))
        return strategy.experimental_local_results(result)[0]

    ones = tf.ones([_BYTES // 4])
    total = sums(ones)
    every = clocks(now)
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        sums(ones).numpy()
        times.append(time.perf_counter() - start)
    seconds = sorted(times)[_ROUNDS // 2]
    moved = 2 * (replicas - 1) / replicas * _BYTES
    return {
        "replicas": replicas,
        "exact": bool(tf.reduce_all(total == replicas)),
        "seconds": seconds,
        "gib_per_second": moved / seconds / (1 << 30),
        "clock_seconds": float(tf.reduce_max(every) - tf.reduce_min(every)),
    }


if __name__ == "__main__":
    print(_MARK + json.dumps(_look("--all_reduce" in sys.argv[1:])))
