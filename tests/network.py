"""Hosts with names and addresses of their own, on this machine, for tests.

    with Network(["n1", "n2"]) as network:
        network.popen("n1", ["ping", "-c1", "n2"])

Each host is a network namespace with an /etc/hosts that names all. A bridge in
one more namespace joins them. Nothing outside of the namespaces changes. It
needs root and iproute2.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess

PROGRAMS = ("ip", "unshare")


class Network:
    """Hosts that reach each other, as long as the block lasts.

    Args:
        names: The names of the hosts.
    """

    def __init__(self, names):
        check_programs(PROGRAMS, "iproute2")
        self._names = list(names)
        # A name that no other run of tests has.
        self._prefix = f"mgpu{secrets.token_hex(3)}"

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for index in range(len(self._names)):
            _ip("netns", "del", self._space(index), check=False)
            shutil.rmtree(self._etc(index), ignore_errors=True)
        _ip("netns", "del", self._switch, check=False)

    def address(self, name):
        """Returns the address of a host."""
        return f"10.77.0.{10 + self._names.index(name)}"

    def popen(self, host, command, **options):
        """Starts a command on a host."""
        with_name = 'hostname "$0"; exec "$@"'
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self._space(self._names.index(host))),
                *("unshare", "--uts", "sh", "-c", with_name, host, *command),
            ],
            **options,
        )

    def limit(self, name, rate):
        """Limits what a host sends, such as to "200mbit" per second."""
        _ip(
            *("netns", "exec", self._space(self._names.index(name)), "tc"),
            *("qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", rate, "burst", "64kb", "latency", "100ms"),
        )

    def cut(self, name):
        """Takes a host from the network; what is sent to it is lost."""
        self._set_link(name, "down")

    def mend(self, name):
        """Puts a host back on the network."""
        self._set_link(name, "up")

    def _set_link(self, name, state):
        port = f"p{self._names.index(name)}"
        _ip("-n", self._switch, "link", "set", port, state)

    def kill(self, name):
        """Kills all processes of a host."""
        space = self._space(self._names.index(name))
        done = subprocess.run(
            ["ip", "netns", "pids", space],
            capture_output=True,
            text=True,
            check=False,
        )
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def _switch(self):
        return f"{self._prefix}-switch"

    def _space(self, index):
        return f"{self._prefix}-{index}"

    def _etc(self, index):
        # `ip netns exec` lays this folder over /etc.
        return pathlib.Path("/etc/netns") / self._space(index)

    def _make(self):
        switch = self._switch
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(name)} {name}\n" for name in self._names
        )
        for index, name in enumerate(self._names):
            space, port = self._space(index), f"p{index}"
            _ip("netns", "add", space)
            self._etc(index).mkdir(parents=True)
            (self._etc(index) / "hosts").write_text(hosts)
            link = ("type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "add", port, *link)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            address = f"{self.address(name)}/24"
            _ip("-n", space, "addr", "add", address, "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")


def check_programs(programs, packages):
    """Refuses a machine on which these tests cannot run."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or os.geteuid():
        raise RuntimeError(
            f"This test needs root and {packages}. Missing: "
            f"{', '.join(missing) or 'root'}. Run make slurm as root."
        )


def _ip(*arguments, check=True):
    subprocess.run(
        ["ip", *arguments], check=check, capture_output=not check, text=True
    )
