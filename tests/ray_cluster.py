"""A real Ray cluster for tests: each raylet on a host of `tests.network`.

    with RayCluster(["r0", "r1", "r2"]) as ray:
        ray.popen("mgpu-tf", "ray", "--num_workers=3", ...)

It needs root and iproute2.
"""

import pathlib
import shutil
import subprocess
import tempfile
import time

from tests import clusters
from tests.network import Network

PORT = 6379
CPUS = 2


class RayCluster:
    """A head node and others, each with `CPUS` CPUs.

    Args:
        names: The names of the nodes, that of the head first.
    """

    def __init__(self, names):
        self.names = list(names)
        self.network = Network(self.names)
        # Ray's sockets have long names below this one.
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="r-"))
        self._bin = self._folder / "bin"

    def __enter__(self):
        try:
            self.network.__enter__()
            self._bin.mkdir()
            for name in ("mgpu-tf", "ray", "python"):
                self._write_program(name)
            for name in self.names:
                self.start(name)
            self._await()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            self.network.kill(name)
        self.network.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self):
        """The address of the cluster."""
        return f"{self.network.address(self.names[0])}:{PORT}"

    def start(self, name):
        """Starts the raylet of a node, and waits for it.

        Ray gives it half a minute, which a busy machine may not keep.
        """
        own = self.network.address(name)
        where = (
            ("--head", f"--port={PORT}", "--include-dashboard=false")
            if name == self.names[0]
            else (f"--address={self.address}",)
        )
        for _ in range(4):
            starting = self.popen(
                *("ray", "start", *where, f"--node-ip-address={own}"),
                *(f"--num-cpus={CPUS}", f"--temp-dir={self._folder}/{name}"),
                f"--object-store-memory={100 * 2**20}",
                host=name,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if starting.wait(300) == 0:
                return
            self.network.kill(name)
            shutil.rmtree(self._folder / name, ignore_errors=True)
        raise AssertionError(f"no raylet on {name}")

    def popen(self, *command, host=None, **options):
        """Starts a command on a node, the head by default."""
        return self.network.popen(
            host or self.names[0],
            command,
            env=clusters.environment(
                PATH=f"{self._bin}:/usr/sbin:/usr/bin:/sbin:/bin",
                RAY_USAGE_STATS_ENABLED="0",
                TF_CPP_MIN_LOG_LEVEL="3",
            ),
            **options,
        )

    def mgpu_tf_ray(self, *flags, command, **options):
        """Starts `mgpu-tf ray` on the head."""
        own = self.network.address(self.names[0])
        return self.popen(
            *("mgpu-tf", "ray", f"--address={self.address}"),
            *(f"--node_ip_address={own}", *flags, "--", *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def _write_program(self, name):
        start = {
            "mgpu-tf": f"{clusters.PYTHON} -m mgpu_tf",
            "ray": f"{pathlib.Path(clusters.PYTHON).parent}/ray",
            "python": clusters.PYTHON,
        }[name]
        (self._bin / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (self._bin / name).chmod(0o755)

    def _await(self):
        """Waits until all nodes are there."""
        count = (
            "import ray; "
            f"ray.init('{self.address}', log_to_driver=False, "
            f"_node_ip_address='{self.network.address(self.names[0])}'); "
            "print('nodes', sum(n['Alive'] for n in ray.nodes()))"
        )
        deadline = time.monotonic() + 180
        while True:
            asked = self.popen(
                *(clusters.PYTHON, "-c", count),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output, _ = asked.communicate(timeout=120)
            if f"nodes {len(self.names)}" in output:
                return
            assert time.monotonic() < deadline, output
            time.sleep(0.5)
