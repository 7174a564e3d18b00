"""A network of its own for the tasks of this machine.

    with isolated("auto"):
        ...    # processes that start here reach each other, and nobody else

TensorFlow's servers listen on all interfaces and ask for no password. In a
network namespace of Linux there is only a loopback, which no other host, user
or namespace reaches. Root makes one directly. A user makes a user namespace
with it, where the kernel allows that.

    python -m mgpu_tf.launch.isolation

tries it, in a process that can be lost, and prints why it does not work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.names import DATASETS, ISOLATE
from mgpu_tf.user_function import is_target

# <linux/sched.h>, <linux/sockios.h> and <linux/if.h>.
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914
_UP = 0x1

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Services that a script tells of its training, by what configures them.
_SERVICES = (
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_URI",
    "COMET_API_KEY",
    "NEPTUNE_API_TOKEN",
)
_PROBE_SECONDS = 30.0
# As the C library, Python's clients and TensorFlow's file systems say it.
_UNREACHED = re.compile(
    "network is unreachable|name resolution|name or service not known|"
    "no address associated|could not resolve host|could not connect|"
    "failed to resolve|max retries exceeded|connection error|"
    "gaierror|URLError|DownloadError|error executing an HTTP request",
    re.IGNORECASE,
)


def outside(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns what a command names that is on the network, "" for nothing.

    Example:
        >>> outside(["python", "train.py", "--data=gs://bucket/a"], {})
        '--data=gs://bucket/a'

    Args:
        command: The program and its arguments.
        environ: Its environment.
    """
    for word in command:
        found = _ADDRESS.search(word)
        if found and not found[0].lower().endswith("file://"):
            return word
    return next((name for name in _SERVICES if environ.get(name)), "")


def download(dataset: str, data_dir: str | None) -> str:
    """Returns the data set that TFDS may have to download, "" for none.

    Args:
        dataset: As in `RunConfig`.
        data_dir: Where prepared sets are kept; None for the folder of TFDS.
    """
    name = dataset.partition("/")[0].partition(":")[0]
    if name in DATASETS or is_target(dataset):
        return ""
    folder = data_dir or os.environ.get("TFDS_DATA_DIR")
    folder = os.path.expanduser(folder or "~/tensorflow_datasets")
    return "" if os.path.isdir(os.path.join(folder, name)) else dataset


@contextlib.contextmanager
def isolated(mode: str, needs: str = "") -> Iterator[bool]:
    """Gives processes that start in the block a network of their own.

    The namespace is that of the calling thread, and of threads that start in
    the block. Root gets back the network of before; a user's process stays
    in the namespace.

    Args:
        mode: `auto`, `on` or `off`.
        needs: What the job needs a network for; `auto` then leaves it.

    Yields:
        Whether there is a network of its own.

    Raises:
        ConfigurationError: The mode is unknown, or it is `on` where the
            kernel does not allow it.
    """
    if mode not in ISOLATE:
        raise ConfigurationError(unknown_name("isolate", mode, ISOLATE))
    if mode == "off":
        yield False
        return
    if mode == "auto" and needs:
        _warn(f"{needs!r} may need the network", "Write --isolate=on")
        yield False
        return
    with contextlib.ExitStack() as stack:
        problem = _problem()
        if not problem:
            try:
                stack.enter_context(_own_network())
            except OSError as error:
                problem = _reason(error)
        if problem and mode == "on":
            raise ConfigurationError(
                "isolate=on needs a kernel that gives a process a network of "
                f"its own. Received: {problem}. Run it as root, allow user "
                "namespaces, or write --isolate=off."
            )
        if problem:
            _warn(problem, "Use a firewall, or run it as root")
        yield not problem


def explain_failure(lines: Iterable[str]) -> None:
    """Says after a failure for want of a network that there was none.

    Args:
        lines: The last lines of the tasks that failed.
    """
    if any(map(_UNREACHED.search, lines)):
        _say(
            "the tasks had a network of their own, without the internet. If "
            "they need more, write --isolate=off"
        )


def _warn(cause: str, remedy: str) -> None:
    _say(
        f"whoever reaches the ports of this machine can command the tasks: "
        f"{cause}. {remedy}"
    )


def _say(text: str) -> None:
    print(f"mgpu-tf launch: {text}.", file=sys.stderr, flush=True)


def _problem() -> str:
    """Returns why it does not work here, "" where it does."""
    if not sys.platform.startswith("linux"):
        return f"no network namespaces on {sys.platform}"
    package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(part for part in (package, given) if part)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "mgpu_tf.launch.isolation"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    lines = done.stdout.split("\n")
    return "" if done.returncode == 0 else lines[0] or "no answer"


@contextlib.contextmanager
def _own_network() -> Iterator[None]:
    """Moves this thread into a network of its own.

    Raises:
        OSError: The kernel does not allow it.
    """
    thread = f"/proc/self/task/{threading.get_native_id()}/ns/net"
    before = os.open(thread, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            _call("unshare", _NEW_NETWORK)
        except PermissionError:
            _become_own_user()
        _raise_loopback()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _call("setns", before, _NEW_NETWORK)
    finally:
        os.close(before)


def _become_own_user() -> None:
    """Makes a user namespace too, in which this user is itself."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER | _NEW_NETWORK)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _raise_loopback() -> None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        answer = fcntl.ioctl(control, _GET_FLAGS, request)
        _, flags = struct.unpack("16sh22x", answer)
        request = struct.pack("16sh22x", b"lo", flags | _UP)
        fcntl.ioctl(control, _SET_FLAGS, request)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _reason(error: OSError) -> str:
    return f"{error.strerror} for a network namespace"


def _try() -> int:
    try:
        with _own_network():
            return 0
    except OSError as error:
        print(_reason(error))
        return 1


if __name__ == "__main__":
    sys.exit(_try())
