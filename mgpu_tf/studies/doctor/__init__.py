"""Checks of a machine and its cluster before a training run.

    for finding in examine(Request()):
        print(finding.line())

`examine` imports no TensorFlow. A child process does (`probe`), so a broken
installation or a hanging driver is a finding and not the end of the check.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from mgpu_tf.studies.doctor import machine, network, tensorflow_sees
from mgpu_tf.studies.doctor.findings import Finding


@dataclasses.dataclass(frozen=True)
class Request:
    """What to check beside the machine itself.

    Attributes:
        folders: Folders that the run writes to, by the name of their flag.
        data: A pattern of input files, such as `data/*.tfrecord`.
        all_reduce: Whether to sum a tensor over all devices. In a cluster,
            every task must ask for it.
        seconds: The time limit of the child process that imports TensorFlow.
        connect_seconds: The time limit of each connection to another task.
    """

    folders: dict[str, str] = dataclasses.field(default_factory=dict)
    data: str | None = None
    all_reduce: bool = False
    seconds: float = 300.0
    connect_seconds: float = 3.0


def examine(request: Request) -> Iterator[Finding]:
    """Runs every check.

    Args:
        request: What to check.

    Yields:
        One finding or more for each check, as soon as the check has ended.
    """
    environ = os.environ
    yield from machine.versions()
    yield from machine.settings(environ)
    yield from machine.shadowed_modules(os.getcwd())
    yield from machine.processors()
    yield from machine.open_files()
    yield from machine.shared_memory()
    for name, path in request.folders.items():
        yield from machine.folder(name, path)
    config, findings = network.cluster(environ)
    yield from findings
    if config is not None:
        yield from network.resolved(config)
        yield from network.own_address(config, environ)
        yield from network.others(config, request.connect_seconds)
        yield from network.proxies(config, environ)
    yield from network.interfaces(environ)
    if request.data is not None:
        workers = 1 if config is None else config.num_workers
        yield from machine.input_files(request.data, workers)
    yield from tensorflow_sees.examine(
        environ, request.seconds, request.all_reduce
    )
