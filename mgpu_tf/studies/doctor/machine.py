"""Checks of this machine: versions, settings, folders and limits."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping

from mgpu_tf._version import __version__
from mgpu_tf.checkpoints import storage
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import (
    check_lasts,
    check_local,
    is_address,
    open_regular,
)
from mgpu_tf.runtime import versions as ranges
from mgpu_tf.studies.doctor.findings import Finding, error, ok, warning

_GIB = 1 << 30
_LEAST_FREE = 5 * _GIB
_LEAST_OPEN_FILES = 4096
# NCCL keeps its buffers there; containers often get 64 MiB.
_LEAST_SHARED = _GIB
_MOST_SKEW_SECONDS = 30.0
# Names that training imports, and that a file beside the script would hide.
_IMPORTED = (
    "absl",
    "keras",
    "logging",
    "numpy",
    "queue",
    "random",
    "socket",
    "tensorflow",
    "types",
)


def versions() -> Iterator[Finding]:
    """Checks that Python, TensorFlow and Keras fit together."""
    names = ("tensorflow", "keras", "numpy")
    present = [f"Python {platform.python_version()}", f"mgpu_tf {__version__}"]
    for name in names:
        try:
            present.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            present.append(f"{name} not installed")
    try:
        ranges.check()
    except ConfigurationError as problem:
        yield error("versions", ", ".join(present), str(problem))
        return
    yield ok("versions", ", ".join(present))


def settings(
    environ: Mapping[str, str], home: str | None = None
) -> Iterator[Finding]:
    """Checks the settings that choose Keras's backend and version.

    Args:
        environ: The environment.
        home: The folder of Keras's configuration; by default `KERAS_HOME`, or
            `~/.keras`.
    """
    home = home or environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    path = os.path.join(home, "keras.json")
    backend, where = environ.get("KERAS_BACKEND", ""), "KERAS_BACKEND"
    if not backend and os.path.exists(path):
        try:
            with open_regular(path) as file:
                backend = json.load(file).get("backend", "tensorflow")
        except (OSError, ValueError, AttributeError):
            yield error(
                "Keras", f"{path} cannot be read as JSON.", f"Delete {path}."
            )
            return
        where = path
    if backend not in ("", "tensorflow"):
        yield error(
            "Keras",
            f"{where} selects the backend {backend!r}.",
            "Set KERAS_BACKEND=tensorflow.",
        )
        return
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        yield error(
            "Keras",
            "TF_USE_LEGACY_KERAS makes tf.keras Keras 2.",
            "Unset TF_USE_LEGACY_KERAS.",
        )
        return
    yield ok("Keras", "Keras 3 with the backend tensorflow")


def shadowed_modules(folder: str) -> Iterator[Finding]:
    """Checks that no file of the folder hides a module that is needed.

    Python imports `queue.py` of the script's folder before its own `queue`.
    """
    hidden = [
        name
        for name in _IMPORTED
        if os.path.exists(os.path.join(folder, f"{name}.py"))
        or os.path.exists(os.path.join(folder, name, "__init__.py"))
    ]
    if hidden:
        yield error(
            "imports",
            f"{folder} has files that hide modules of the same name: "
            f"{', '.join(hidden)}.",
            "Rename these files.",
        )
    else:
        yield ok("imports", "no file of this folder hides a module")


def processors(limits: str = "/sys/fs/cgroup/cpu.max") -> Iterator[Finding]:
    """Checks how many processors this process may use.

    Args:
        limits: The file of the container's limit.
    """
    usable = len(os.sched_getaffinity(0))
    allowed = float(usable)
    try:
        with open(limits) as file:
            quota, period = file.read().split()
        if quota != "max":
            allowed = int(quota) / int(period)
    except (OSError, ValueError):
        pass
    if allowed < usable * 0.9:
        yield warning(
            "processors",
            f"The container may use {allowed:g} of {usable} processors, and "
            f"TensorFlow starts threads for {usable}.",
            "Set TF_NUM_INTRAOP_THREADS and TF_NUM_INTEROP_THREADS to "
            f"{max(1, int(allowed))}, or raise the limit of the container.",
        )
    else:
        yield ok("processors", f"{usable} processors")


def open_files(least: int = _LEAST_OPEN_FILES) -> Iterator[Finding]:
    """Checks how many files and sockets this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < least:
        yield warning(
            "open files",
            f"This process may open {soft} files and sockets.",
            f"Run: ulimit -n {least if hard < 0 else min(least, hard)}",
        )
    else:
        yield ok("open files", "enough files and sockets may be opened")


def shared_memory(
    path: str = "/dev/shm", least: int = _LEAST_SHARED
) -> Iterator[Finding]:
    """Checks the size of shared memory, which NCCL uses between GPUs."""
    try:
        size = shutil.disk_usage(path).total
    except OSError:
        yield warning(
            "shared memory",
            f"{path} does not exist.",
            "Mount a tmpfs there; NCCL needs it between GPUs.",
        )
        return
    if size < least:
        yield warning(
            "shared memory",
            f"{path} has {size / _GIB:.2f} GiB. NCCL may fail between GPUs.",
            "Start the container with --shm-size=1g or more.",
        )
    else:
        yield ok("shared memory", f"{path} has {size / _GIB:.1f} GiB")


def folder(
    name: str, path: str, least_free: int = _LEAST_FREE
) -> Iterator[Finding]:
    """Checks that a folder can be written, has space, and has the right time.

    Args:
        name: The flag that names the folder.
        path: The folder.
        least_free: Bytes that should be free.
    """
    try:
        if name == "checkpoint_dir" and is_address(path):
            check_lasts(name, path)
            storage.of(path, name).make(name, path)
            yield ok(name, f"{path!r} can be written")
            return
        check_local(name, path)
    except ConfigurationError as problem:
        found, _, remedy = str(problem).rpartition(". ")
        yield error(name, f"{found}.", remedy)
        return
    try:
        os.makedirs(path, exist_ok=True)
        before = time.time()
        with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor") as file:
            file.write(b"1")
            file.flush()
            os.fsync(file.fileno())
            written = os.stat(file.name).st_mtime
        after = time.time()
        free = shutil.disk_usage(path).free
    except OSError as problem:
        yield error(
            name,
            f"{path!r} cannot be written ({problem.strerror}).",
            f"Give another folder to --{name}, or change its owner.",
        )
        return
    skew = max(before - written, written - after, 0.0)
    if skew > _MOST_SKEW_SECONDS:
        yield warning(
            "clock",
            f"The clock of the server of {path!r} differs by {skew:.0f} s.",
            "Run a time service, such as chrony, on all machines.",
        )
    if free < least_free:
        yield warning(
            name,
            f"{path!r} has {free / _GIB:.1f} GiB free.",
            "Delete files, or give another folder. A checkpoint needs the "
            "bytes of weights and optimizer.",
        )
    else:
        yield ok(name, f"{path!r} can be written, {free / _GIB:.0f} GiB free")


def input_files(pattern: str, workers: int) -> Iterator[Finding]:
    """Checks that there are as many input files as workers, or more.

    Args:
        pattern: A pattern of files.
        workers: The number of workers of the cluster.
    """
    found = [path for path in glob.glob(pattern) if os.path.isfile(path)]
    empty = sum(os.path.getsize(path) == 0 for path in found)
    if not found:
        yield error(
            "data",
            f"No file matches {pattern!r}.",
            "Check the path and the mount on this machine.",
        )
    elif empty:
        yield error(
            "data",
            f"{empty} of {len(found)} files of {pattern!r} are empty.",
            "Write these files again.",
        )
    elif len(found) < workers:
        yield warning(
            "data",
            f"{len(found)} files for {workers} workers: with "
            "deterministic=False, some workers would read nothing.",
            f"Write the data as {workers} files or more.",
        )
    else:
        yield ok("data", f"{len(found)} files for {workers} workers")
