"""The tasks of a cluster, and the task of this process, as one value.

    config = ClusterConfig.from_environment()
    if config is None:
        ...                                  # a single process
    elif config.is_chief:
        ...                                  # the task that writes files

`TF_CONFIG` is parsed and validated only here. Where it is not set,
`environments` asks the scheduler that has started this process. This module
does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from mgpu_tf.cluster import environments
from mgpu_tf.cluster.addresses import Address, parse
from mgpu_tf.cluster.environments.place import Place
from mgpu_tf.errors import ClusterError, unknown_name
from mgpu_tf.fields import check_types, checked

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
TF_CONFIG = "TF_CONFIG"

_INDEX = re.compile(r"[0-9]{1,9}")
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The tasks of a cluster and the place of this process among them.

    Example:
        >>> config = ClusterConfig.from_json(
        ...     '{"cluster": {"worker": ["a:1", "b:1"]},'
        ...     ' "task": {"type": "worker", "index": 1}}')
        >>> config.num_workers, config.worker_index, config.is_chief
        (2, 1, False)

    Attributes:
        chief: Address of the chief as "host:port"; at most one address.
        worker: Addresses of the workers.
        ps: Addresses of the parameter servers.
        evaluator: Address of the evaluator; at most one address.
        task_type: The type of this process, one of `TASK_TYPES`.
        task_index: The index of this process among the tasks of its type.
        source: What describes the cluster: `TF_CONFIG`, or a job of a
            scheduler, such as "Slurm job 17".
    """

    task_type: str
    task_index: int
    chief: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    ps: tuple[str, ...] = ()
    evaluator: tuple[str, ...] = ()
    source: str = dataclasses.field(default=TF_CONFIG, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        _check_addresses(self)
        _check_task(self)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None
    ) -> ClusterConfig | None:
        """Reads `TF_CONFIG`, or what the scheduler of this process says.

        Slurm, Kubernetes and SkyPilot are found; `cluster/environments`
        has the order. A line of the log says what was found.

        Args:
            environ: The environment. Default: `os.environ`.

        Returns:
            The configuration; None for a single process. `TF_CONFIG={}`
            means a single process whatever the scheduler.

        Raises:
            ClusterError: `TF_CONFIG` is not valid, or what the scheduler says
                cannot be used.
        """
        environ = os.environ if environ is None else environ
        text = environ.get(TF_CONFIG, "")
        if text.strip() == "{}":
            return None
        if text.strip():
            return cls.from_json(text)
        place = environments.find(environ)
        if place is None:
            return None
        return cls.at(place)

    @classmethod
    def at(cls, place: Place) -> ClusterConfig:
        """Returns the cluster as the process at a place sees it."""
        return cls._of(place.tasks, place.task, place.source)

    @classmethod
    def _of(
        cls,
        tasks: Mapping[str, tuple[str, ...]],
        task: tuple[str, int],
        source: str,
    ) -> ClusterConfig:
        return cls(
            *task,
            chief=tasks.get("chief", ()),
            worker=tasks.get("worker", ()),
            ps=tasks.get("ps", ()),
            evaluator=tasks.get("evaluator", ()),
            source=source,
        )

    @classmethod
    @checked
    def from_json(cls, text: str) -> ClusterConfig:
        """Parses the text of `TF_CONFIG`.

        Args:
            text: A JSON object with the members "cluster" and "task".

        Returns:
            The configuration.

        Raises:
            ClusterError: The text is not JSON, lacks a member, or has an
                invalid task, address or index.
        """
        cluster, task = _parse(text)
        tasks: dict[str, tuple[str, ...]] = {}
        for name, addresses in cluster.items():
            if name not in TASK_TYPES:
                raise ClusterError(
                    "TF_CONFIG: "
                    + unknown_name("task type", _cut(name), TASK_TYPES)
                )
            tasks[name] = _as_addresses(name, addresses)
        return cls._of(tasks, task, TF_CONFIG)

    def to_json(self) -> str:
        """Returns the text for `TF_CONFIG`; `from_json` reads it back."""
        return json.dumps(
            {
                "cluster": self.tasks,
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )

    @property
    def tasks(self) -> dict[str, list[str]]:
        """Addresses by task type; types without addresses are left out."""
        every = {name: list(getattr(self, name)) for name in TASK_TYPES}
        return {
            name: addresses for name, addresses in every.items() if addresses
        }

    @property
    def task_name(self) -> str:
        """This task in words, such as "worker 1"."""
        return f"{self.task_type} {self.task_index}"

    @property
    def num_workers(self) -> int:
        """The number of tasks that compute: chief and workers."""
        return len(self.chief) + len(self.worker)

    @property
    def workers_beside(self) -> int:
        """The number of workers on the machine of this task, with itself."""
        host = self.address.rpartition(":")[0]
        return sum(
            address.rpartition(":")[0] == host
            for address in (*self.chief, *self.worker)
        )

    @property
    def worker_index(self) -> int:
        """The index among the tasks that compute; the chief comes first.

        Raises:
            ClusterError: This task does not compute (ps, evaluator).
        """
        if self.task_type == "chief":
            return 0
        if self.task_type == "worker":
            return len(self.chief) + self.task_index
        raise ClusterError(
            "Only chief and worker tasks train in a synchronous cluster. "
            f"Received: task={self.task_name!r}. Use a cluster of chief and "
            "worker tasks."
        )

    @property
    def is_chief(self) -> bool:
        """Whether this task writes files: the chief, else worker 0."""
        if self.chief:
            return self.task_type == "chief"
        return self.task_type == "worker" and self.task_index == 0

    @property
    def address(self) -> str:
        """The address of this task as "host:port"."""
        return getattr(self, self.task_type)[self.task_index]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON; Python would keep the last of equal names."""
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ClusterError(
            "TF_CONFIG must have each member once. Received: "
            f"{_shorten(twice[0])} {names.count(twice[0])} times in one "
            "object. Leave one of them."
        )
    return dict(pairs)


def _parse(text: str) -> tuple[dict[str, Any], tuple[str, int]]:
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"TF_CONFIG must be JSON. Received: {_shorten(text)} ({error}). "
            f"Example: {_EXAMPLE}"
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object. Received: {_shorten(text)}. "
            f"Example: {_EXAMPLE}"
        )
    for member in ("cluster", "task"):
        if not isinstance(config.get(member), dict) or not config[member]:
            raise ClusterError(
                f"TF_CONFIG must have the member {member!r}, an object that "
                f"is not empty. Received: {_shorten(text)}. "
                f"Example: {_EXAMPLE}"
            )
    task_type, index = config["task"].get("type"), config["task"].get("index")
    if isinstance(index, str) and _INDEX.fullmatch(index):
        index = int(index)
    if not isinstance(task_type, str):
        raise ClusterError(
            'TF_CONFIG: "task" must have a "type". Received: '
            f"{_shorten(str(config['task']))}. Example: {_EXAMPLE}"
        )
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(
            'TF_CONFIG: "task" must have an "index", an integer. Received: '
            f"{_shorten(str(config['task']))}. Example: {_EXAMPLE}"
        )
    return config["cluster"], (task_type, index)


def _as_addresses(name: str, addresses: object) -> tuple[str, ...]:
    if isinstance(addresses, str):
        addresses = [addresses]
    if not isinstance(addresses, list) or not all(
        isinstance(address, str) for address in addresses
    ):
        raise ClusterError(
            f"TF_CONFIG: the addresses of {name!r} must be a list of "
            f'"host:port". Received: {_shorten(str(addresses))}. '
            f"Example: {_EXAMPLE}"
        )
    return tuple(addresses)


def _check_addresses(config: ClusterConfig) -> None:
    seen: dict[Address, str] = {}
    for task_type in TASK_TYPES:
        for index, address in enumerate(getattr(config, task_type)):
            where = f"{task_type} {index}"
            try:
                parsed = parse(address)
            except ValueError as problem:
                raise ClusterError(
                    f'{config.source}: an address must be "host:port" with a '
                    f"port of 1 to 65535. Received: {_shorten(address)} for "
                    f"{where}, {problem}."
                ) from None
            if parsed in seen:
                raise ClusterError(
                    f"{config.source}: every task needs an address of its "
                    f"own. Received: {_shorten(address)} for "
                    f"{seen[parsed]} and {where}. Give one of them another "
                    "port."
                )
            seen[parsed] = where
    for task_type in ("chief", "evaluator"):
        count = len(getattr(config, task_type))
        if count > 1:
            raise ClusterError(
                f"TF_CONFIG: a cluster has at most one {task_type}. "
                f"Received: {count}."
            )


def _check_task(config: ClusterConfig) -> None:
    if config.task_type not in TASK_TYPES:
        raise ClusterError(
            "TF_CONFIG: "
            + unknown_name("task type", _cut(config.task_type), TASK_TYPES)
        )
    addresses = getattr(config, config.task_type)
    if not addresses:
        raise ClusterError(
            "TF_CONFIG: this task's type must be in the cluster. Received: "
            f"task type {config.task_type!r}, cluster {sorted(config.tasks)}."
        )
    if not 0 <= config.task_index < len(addresses):
        raise ClusterError(
            f"TF_CONFIG: the index of a {config.task_type} must be 0 to "
            f"{len(addresses) - 1}. Received: {config.task_index}."
        )
    if not config.chief and not config.worker:
        raise ClusterError(
            f"{config.source}: a cluster needs a worker. Received: tasks of "
            f"types {sorted(config.tasks)}. Add 'worker'."
        )


def _shorten(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
