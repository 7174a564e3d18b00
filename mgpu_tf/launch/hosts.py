"""The commands that start a job on machines without a scheduler.

job = LaunchJob(("python", "train.py"), num_workers=2)
for host, task, line in commands(job, ["a", "b"]):
    ...                        # run the line in a shell on the host
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mgpu_tf.cluster.addresses import host_of
from mgpu_tf.cluster.config import TF_CONFIG
from mgpu_tf.cluster.environments.place import DEFAULT_PORT
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import checked
from mgpu_tf.launch.job import LaunchJob, check_command


@checked
def commands(
    job: LaunchJob, hosts: Sequence[str], port: int = DEFAULT_PORT
) -> list[tuple[str, str, str]]:
    """Returns what to run on each machine, a line for each task.

    Tasks are dealt out to the machines in turn. On each machine they have
    ports of their own, from `port` on.

    Example:
        >>> job = LaunchJob(("python", "train.py"), num_workers=2, num_ps=1)
        >>> [line[:2] for line in commands(job, ["a", "b"])]
        [('a', 'chief 0'), ('b', 'worker 0'), ('a', 'worker 1'), ('b', 'ps 0')]

    Args:
        job: The command and its tasks.
        hosts: The names or addresses of the machines, as they know each
            other.
        port: The first port on each machine.

    Returns:
        For each task the host, the task, and the line for a shell there.

    Raises:
        ConfigurationError: A host is no name or address, or is named twice,
            or a port is out of range.
    """
    check_command(job.command)
    dealt = places(job.num_tasks, hosts, port)
    clusters = job.clusters([f"{host}:{number}" for host, number in dealt])
    return [
        (
            host,
            cluster.task_name,
            f"{TF_CONFIG}={shlex.quote(cluster.to_json())} "
            + shlex.join(job.command),
        )
        for (host, _), cluster in zip(dealt, clusters, strict=True)
    ]


@checked
def places(
    num_tasks: int, hosts: Sequence[str], port: int
) -> list[tuple[str, int]]:
    """Deals out tasks to machines in turn.

    Example:
        >>> places(3, ["a", "b"], 2222)
        [('a', 2222), ('b', 2222), ('a', 2223)]

    Args:
        num_tasks: How many tasks.
        hosts: The machines.
        port: The first port on each machine.

    Returns:
        The machine and the port of each task.

    Raises:
        ConfigurationError: A host is no name or address, or is named twice.
    """
    seen: dict[str, str] = {}
    for host in hosts:
        try:
            machine = host_of(host)
        except ValueError as problem:
            raise ConfigurationError(
                "hosts must be names or addresses, with commas between; an "
                f"IPv6 address in brackets. Received: {host!r}, {problem}. "
                "Write --hosts=host0,host1."
            ) from None
        if machine in seen:
            raise ConfigurationError(
                "hosts must name each machine once. Received: "
                f"{','.join(hosts)}, where {seen[machine]!r} and {host!r} are "
                "one. Leave out one of them."
            )
        seen[machine] = host
    last = port + (num_tasks - 1) // len(hosts)
    if not 0 < port <= last < 65536:
        raise ConfigurationError(
            f"port must be 1 to 65535, as must the last that is needed. "
            f"Received: port={port}, and so {last} for {num_tasks} tasks on "
            f"{len(hosts)} machines. Choose another one."
        )
    return [
        (hosts[index % len(hosts)], port + index // len(hosts))
        for index in range(num_tasks)
    ]
