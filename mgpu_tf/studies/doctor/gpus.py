"""Checks of GPUs: kernels of TensorFlow for them, driver, links, NCCL.

    driver = ask_driver()
    yield from kernels(["sm_80", "compute_90"], driver.gpus, driver.version)

References:
    Which kernels run where: CUDA C++ Programming Guide, "Binary
    Compatibility" and "PTX Compatibility". Drivers: CUDA Compatibility,
    "Minor Version Compatibility". TensorFlow's wheel has no kernels for some
    new GPUs: tensorflow/tensorflow#89272.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

from mgpu_tf.studies.doctor.findings import Finding, error, ok, warning

# The first driver for all of a major version of CUDA.
_FIRST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
# The first branch of the driver that compiles what a version of CUDA writes.
_PTX_BRANCH: dict[tuple[int, ...], int] = {
    (12, 0): 525,
    (12, 1): 530,
    (12, 2): 535,
    (12, 3): 545,
    (12, 4): 550,
    (12, 5): 555,
    (12, 6): 560,
    (12, 8): 570,
    (12, 9): 575,
    (13, 0): 580,
}
# Of `nvidia-smi topo -m`: over processors, and over the bridge of one.
_SLOW_LINKS = ("SYS", "NODE", "PHB")
_LINK = re.compile(r"X|NV[0-9]+|PIX|PXB|PHB|NODE|SYS")
_NCCL_VERSION = re.compile(r"NCCL version ([0-9][\w.+]*)")
_NCCL_WAY = re.compile(r"\bvia (P2P|SHM|NET)\b")
_NCCL_WARNING = re.compile(r"NCCL WARN (.*)")
_ASK_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Such as "NVIDIA H100".
        capability: Its compute capability, None where it is unknown.
    """

    name: str
    capability: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes:
        gpus: The GPUs; empty where nvidia-smi fails.
        version: Of the driver, () where it is unknown.
        links: The links of each pair of GPUs, as `nvidia-smi topo` names
            them.
    """

    gpus: tuple[Gpu, ...] = ()
    version: tuple[int, ...] = ()
    links: tuple[str, ...] = ()


def ask_driver() -> Driver | None:
    """Returns what nvidia-smi says; None where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "name,driver_version,compute_cap"
    listed = _asked([program, f"--query-gpu={fields}", "--format=csv,noheader"])
    return read_driver(listed, _asked([program, "topo", "-m"]))


def read_driver(listed: str, matrix: str) -> Driver:
    """Returns what two outputs of nvidia-smi say.

    Args:
        listed: A line "name, driver, capability" for each GPU.
        matrix: Of `nvidia-smi topo -m`.
    """
    gpus: list[Gpu] = []
    version: tuple[int, ...] = ()
    for line in listed.splitlines():
        name, *rest = [part.strip() for part in line.split(",")]
        if name:
            gpus.append(Gpu(name, _pair(rest[1] if len(rest) > 1 else "")))
            version = version or _numbers(rest[0] if rest else "")
    links = []
    for line in matrix.splitlines():
        first, *words = line.split() or [""]
        if re.fullmatch(r"GPU[0-9]+", first):
            row = words[: len(gpus)]
            if len(row) == len(gpus) and all(map(_LINK.fullmatch, row)):
                links += row[: row.index("X")] if "X" in row else []
    return Driver(tuple(gpus), version, tuple(links))


def kernels(
    built_for: Sequence[str], gpus: Sequence[Gpu], cuda: str, driver: Driver
) -> Iterator[Finding]:
    """Checks that TensorFlow has kernels that run on each GPU.

    Args:
        built_for: What TensorFlow was built for, such as `sm_80` (kernels for
            8.0 and the later 8.x) and `compute_90` (kernels that the driver
            compiles for 9.0 and later).
        gpus: The GPUs.
        cuda: The version of CUDA that TensorFlow was built with.
        driver: The driver, which compiles.
    """
    ready = [_capability(name) for name in built_for if name[:3] == "sm_"]
    source = [_capability(name) for name in built_for if name[:3] == "com"]
    for gpu in dict.fromkeys(gpus):
        if gpu.capability is None or not built_for:
            continue
        what = f"{gpu.name} (compute capability {_dotted(gpu.capability)})"
        major, minor = gpu.capability
        if any(major == m and minor >= n for m, n in ready):
            yield ok("GPU kernels", f"TensorFlow has kernels for {what}")
        elif not any(one <= gpu.capability for one in source):
            yield error(
                "GPU kernels",
                f"TensorFlow has no kernels for {what}, only for "
                f"{', '.join(built_for)}.",
                "Use another GPU, or a build of TensorFlow for this one.",
            )
        else:
            yield from _compiled_later(what, max(source), gpu, cuda, driver)


def _compiled_later(
    what: str, source: tuple[int, int], gpu: Gpu, cuda: str, driver: Driver
) -> Iterator[Finding]:
    needed = _PTX_BRANCH.get(_numbers(cuda)[:2])
    if needed and driver.version and driver.version[0] < needed:
        yield error(
            "GPU kernels",
            f"The driver must compile the kernels for {what}, and driver "
            f"{_dotted(driver.version)} is older than those of CUDA {cuda}.",
            f"Install driver {needed} or later.",
        )
        return
    found = f"The driver compiles the kernels for {what} when they first run"
    if gpu.capability == source:
        yield ok("GPU kernels", found)
        return
    yield warning(
        "GPU kernels",
        f"{found}, which may take half an hour; those of TensorFlow are for "
        f"{_dotted(source)} at most.",
        "Set CUDA_CACHE_PATH to a folder that stays and "
        "CUDA_CACHE_MAXSIZE=4294967296, or use a newer TensorFlow.",
    )


def driver_fits(cuda: str, driver: Driver) -> Iterator[Finding]:
    """Checks the driver against the CUDA of TensorFlow.

    Args:
        cuda: The version of CUDA that TensorFlow was built with.
        driver: The driver.
    """
    major = _numbers(cuda)[:1]
    least = _FIRST_DRIVER.get(major[0]) if major else None
    if least is None or not driver.version:
        return
    version = _dotted(driver.version)
    if driver.version[:2] < least:
        yield error(
            "GPU driver",
            f"Driver {version} is too old for CUDA {cuda} of TensorFlow.",
            f"Install driver {_dotted(least)} or later.",
        )
    else:
        yield ok("GPU driver", f"{version}, for CUDA {cuda} of TensorFlow")


def links(driver: Driver) -> Iterator[Finding]:
    """Checks how the GPUs of this machine reach each other."""
    if not driver.links:
        return
    counts = Counter(driver.links)
    facts = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    slow = sorted(set(_SLOW_LINKS) & set(counts))
    if slow and any(kind.startswith("NV") for kind in counts):
        yield warning(
            "GPU links",
            f"Some pairs of GPUs have no NVLink: {facts}.",
            "Set CUDA_VISIBLE_DEVICES to GPUs with NVLink between them "
            "(nvidia-smi topo -m), or check the bridges.",
        )
    elif slow:
        yield ok("GPU links", f"{facts}: over PCI Express and processors")
    else:
        yield ok("GPU links", facts)


def nccl(output: str) -> Iterator[Finding]:
    """Reports what NCCL itself said, with NCCL_DEBUG=INFO.

    Args:
        output: What a process printed that summed over GPUs.
    """
    version = _NCCL_VERSION.search(output)
    for text in dict.fromkeys(_NCCL_WARNING.findall(output)):
        yield error(
            "NCCL", text.strip()[:200], "Run with NCCL_DEBUG=INFO for more."
        )
    if version is None:
        return
    ways = Counter(_NCCL_WAY.findall(output))
    facts = f"NCCL {version[1]}"
    if ways:
        facts += ", channels: " + ", ".join(
            f"{count} by {way}" for way, count in ways.items()
        )
    if ways["SHM"] and not ways["P2P"]:
        yield warning(
            "NCCL",
            f"{facts}. GPUs of one machine do not reach each other directly.",
            "Check nvidia-smi topo -p2p r, and NCCL_P2P_DISABLE.",
        )
    else:
        yield ok("NCCL", facts)


def _asked(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text))


def _pair(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"([0-9]+)\.([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _capability(name: str) -> tuple[int, int]:
    """Returns the capability in `sm_90`, `sm_120a` or `compute_90`."""
    digits = re.sub(r"\D", "", name)
    return int(digits[:-1] or 0), int(digits[-1:] or 0)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
