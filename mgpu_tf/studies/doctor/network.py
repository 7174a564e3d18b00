"""Checks of the cluster: TF_CONFIG, addresses, ports and proxies."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping

from mgpu_tf.cluster import ports
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ClusterError
from mgpu_tf.studies.doctor.findings import Finding, error, ok


def cluster(
    environ: Mapping[str, str],
) -> tuple[ClusterConfig | None, list[Finding]]:
    """Reads the cluster of this process, and says it in words.

    Returns:
        The cluster; None for a single process, or where it cannot be read.
    """
    try:
        config = ClusterConfig.from_environment(environ)
    except ClusterError as problem:
        return None, [
            error(
                "cluster",
                str(problem),
                "Let mgpu-tf launch or your scheduler set TF_CONFIG.",
            )
        ]
    if config is None:
        return None, [
            ok("cluster", "one process: no TF_CONFIG, and no scheduler")
        ]
    counts = [
        f"{len(addresses)} {name}{'s' if len(addresses) > 1 else ''}"
        for name, addresses in config.tasks.items()
    ]
    found = [
        ok(
            "cluster",
            f"{', '.join(counts)}; this is {config.task_name} at "
            f"{config.address}"
            + (", which writes the files" if config.is_chief else ""),
        )
    ]
    local = [
        f"{name} at {address}"
        for name, address in _tasks(config)
        if _is_loopback(_host(address))
    ]
    if local and len(local) < len(list(_tasks(config))):
        found.append(
            error(
                "addresses",
                f"{', '.join(local)} can be reached only on its own machine, "
                "and other tasks are elsewhere.",
                "Give each task the name or address of its machine.",
            )
        )
    return config, found


def resolved(config: ClusterConfig) -> Iterator[Finding]:
    """Checks that the host of every task has an address."""
    unknown = []
    for name, address in _tasks(config):
        try:
            _addresses(_host(address))
        except OSError:
            unknown.append(f"{name} at {address}")
    if unknown:
        yield error(
            "names",
            f"These hosts have no address: {', '.join(unknown)}.",
            "Correct the names in TF_CONFIG, or the name service of this "
            "machine (/etc/hosts, DNS).",
        )
    else:
        yield ok("names", "every host of the cluster has an address")


def own_address(
    config: ClusterConfig, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks that this task's address is this machine's, and its port free.

    A port that `mgpu-tf launch` holds for this task is free.
    """
    host, port = _host(config.address), int(config.address.rpartition(":")[2])
    try:
        found = _addresses(host)
    except OSError:
        return  # `resolved` reports it.
    family, address = found[0]
    for number in (0, port):
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ports.ENVIRONMENT.items() <= environ.items():
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                server.bind((address, number))
            except OSError as problem:
                if number == 0:
                    yield error(
                        "own address",
                        f"{host} ({address}) is not an address of this "
                        f"machine ({problem.strerror}).",
                        f"Correct the index of this task in {config.source}: "
                        "it names another machine.",
                    )
                elif problem.errno == errno.EADDRINUSE:
                    yield error(
                        "own address",
                        f"Port {port} of {host} is in use.",
                        f"End the process that listens (ss -ltnp 'sport = "
                        f":{port}'), or choose another port.",
                    )
                else:
                    yield error(
                        "own address",
                        f"Port {port} of {host} cannot be used "
                        f"({problem.strerror}).",
                        "Choose a port of 1024 to 65535.",
                    )
                return
    yield ok("own address", f"{config.address} is here, and its port is free")


def others(config: ClusterConfig, connect_seconds: float) -> Iterator[Finding]:
    """Checks that the machines of the other tasks can be reached.

    A machine that refuses the connection is reached; its task has not started.
    """
    lost, waiting, there = [], [], 0
    for name, address in _tasks(config):
        if address == config.address or name.startswith("evaluator"):
            continue
        target = (_host(address), int(address.rpartition(":")[2]))
        try:
            with socket.create_connection(target, connect_seconds):
                there += 1
        except ConnectionRefusedError:
            waiting.append(name)
        except socket.gaierror:
            continue  # `resolved` reports it.
        except OSError as problem:
            why = problem.strerror or "no answer"
            lost.append(f"{name} at {address} ({why})")
    if lost:
        yield error(
            "network",
            f"These tasks cannot be reached: {', '.join(lost)}.",
            "Check the firewall and the routes between the machines.",
        )
    elif waiting:
        yield ok(
            "network",
            f"every machine answers; {len(waiting)} tasks have not started: "
            f"{', '.join(waiting[:4])}{' ...' if len(waiting) > 4 else ''}",
        )
    else:
        yield ok("network", f"{there} other tasks answer")


def proxies(
    config: ClusterConfig, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks that no HTTP proxy stands between the tasks.

    gRPC obeys `https_proxy` and `http_proxy` unless `no_proxy` has the host.
    """
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    proxy = next((n for n in names if environ.get(n)), None)
    if proxy is None:
        yield ok("proxy", "no HTTP proxy between the tasks")
        return
    listed = environ.get("no_grpc_proxy") or environ.get("no_proxy", "")
    spared = [part.strip().lstrip("*.") for part in listed.split(",") if part]
    hosts = {_host(a) for _, a in _tasks(config)}
    through = sorted(
        host
        for host in hosts
        if not any(
            part and (host == part or host.endswith(f".{part}"))
            for part in spared
        )
    )
    if through:
        yield error(
            "proxy",
            f"{proxy} is set, and TensorFlow would reach "
            f"{', '.join(through[:4])} through it.",
            f"Set no_proxy={','.join(through[:4])}, or unset {proxy}.",
        )
    else:
        yield ok("proxy", f"{proxy} is set; no_proxy spares the tasks")


def interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that the network interface given to NCCL exists."""
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    if not wanted or wanted.startswith("^"):
        return
    exact = wanted.startswith("=")
    present = [name for _, name in socket.if_nameindex()]
    missing = [
        part
        for part in wanted.lstrip("=").split(",")
        if not any(
            name == part if exact else name.startswith(part) for name in present
        )
    ]
    if missing:
        yield error(
            "interfaces",
            f"NCCL_SOCKET_IFNAME names {', '.join(missing)}; this machine has "
            f"{', '.join(present)}.",
            "Name an interface of this machine, or unset NCCL_SOCKET_IFNAME.",
        )
    else:
        yield ok("interfaces", f"NCCL uses {wanted}")


def _tasks(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    for name, addresses in config.tasks.items():
        for index, address in enumerate(addresses):
            yield f"{name} {index}", address


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [(family, str(target[0])) for family, _, _, _, target in found]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
