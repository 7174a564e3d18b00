"""The tasks of a job as actors of a Ray cluster.

    code = run(["python", "train.py"], num_workers=4)

Ray places the tasks: one placement group for the job, one actor for each task.
An actor finds a free port on its node and keeps the process of its task
(`keeper`). What is started again after a failure is decided by the
supervisor, as on one machine; Ray itself starts nothing again. A task of an
asynchronous job that failed is started again alone, on its node. If its node
is lost, the whole job is started again on the nodes that are left.

Ray Train has a trainer for TensorFlow too. It has no parameter servers, and
does not train Keras 3 (ray-project/ray#47464).
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mgpu_tf.cluster import addresses, ports
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.roles import Roles
from mgpu_tf.errors import ClusterError, ConfigurationError, installing
from mgpu_tf.launch import keeper
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.local import supervise
from mgpu_tf.launch.machines import Interrupted, NoRoom, Output
from mgpu_tf.launch.processes.process import Task
from mgpu_tf.launch.processes.spares import Spares

# Ray's names of how the bundles of a job lie on nodes.
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

# How long a call of an actor waits for news.
_POLL_SECONDS = 5.0
# How long an actor of a node that is there takes to answer.
_ANSWER_SECONDS = 30.0
# How long Ray takes to find places that are free.
_PLACE_SECONDS = 3.0
# How long it takes to see that a node is lost.
_LOST_SECONDS = 20.0
# How long a cluster that is there takes to accept a connection.
_CONNECT_SECONDS = 20.0
# How long it takes to answer Ray's own program, which begins with its imports;
# on a busy machine these alone take longer than the above.
_ALIVE_SECONDS = 90.0
_CLIENT = "ray://"


def run(
    command: Sequence[str],
    num_workers: int,
    *,
    address: str | None = None,
    placement: str = "PACK",
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    node_ip_address: str | None = None,
    **options: Any,
) -> int:
    """Runs a command as a cluster of processes on a Ray cluster.

    Args:
        command: The program and its arguments. All nodes must have it, in
            the folder of the same name.
        num_workers: How many processes of task type `worker`.
        address: The address of the Ray cluster; default: the one of this
            node, or of `RAY_ADDRESS`.
        placement: One of `PLACEMENTS`: on few nodes, or each task on a node
            of its own (`STRICT_SPREAD`).
        cpus_per_worker: What Ray reserves for each worker, and for each
            parameter server.
        gpus_per_worker: What Ray reserves for each worker. A worker sees no
            other GPU.
        node_ip_address: The address of this node in the cluster, where Ray
            does not find it by itself.
        **options: The other fields of `LaunchJob`.

    Returns:
        As `mgpu_tf.launch.local.launch`; 1 for a node that was lost.

    Raises:
        ConfigurationError: Ray is not installed, or a value is out of range.
        ClusterError: There is no Ray cluster, or no room for the job on it.
    """
    job = LaunchJob(tuple(command), num_workers, **options)
    machines = RayMachines(
        job,
        address,
        placement,
        cpus_per_worker,
        gpus_per_worker,
        node_ip_address,
    )
    with machines.connected():
        return supervise(job, machines)


class RayMachines:
    """The nodes of a Ray cluster.

    Args:
        job: The command and its tasks.
        address: The address of the Ray cluster.
        placement: One of `PLACEMENTS`.
        cpus: What Ray reserves for each worker and parameter server.
        gpus: What Ray reserves for each worker.
        node_ip_address: The address of this node in the cluster, where Ray
            does not find it by itself.

    Raises:
        ConfigurationError: Ray is not installed, or a value is out of range.
    """

    launcher = "ray"
    here = False
    spares: Spares | None = None

    def __init__(
        self,
        job: LaunchJob,
        address: str | None,
        placement: str,
        cpus: float,
        gpus: float,
        node_ip_address: str | None = None,
    ) -> None:
        if placement not in PLACEMENTS:
            raise ConfigurationError(
                f"placement must be one of {', '.join(PLACEMENTS)}. "
                f"Received: {placement!r}."
            )
        for name, value in (("cpus", cpus), ("gpus", gpus)):
            if not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"{name}_per_worker must be 0 or more. Received: {value}."
                )
        self._ray = _ray()
        self._job = job
        self._address = address
        self._placement = placement
        self._cpus, self._gpus = cpus, gpus
        self._here = (
            {"_node_ip_address": node_ip_address} if node_ip_address else {}
        )
        self._actors: dict[str, Any] = {}
        self._nodes: set[str] = set()
        self._asking = threading.Lock()

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connects to the cluster for as long as the block lasts.

        Raises:
            ClusterError: There is no cluster at the address.
        """
        where = self._address or os.environ.get("RAY_ADDRESS") or "auto"
        check_alive(where)
        try:
            self._ray.init(
                address=where,
                log_to_driver=False,
                logging_level="ERROR",
                **self._here,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ClusterError(
                "mgpu-tf ray needs a Ray cluster. Received: "
                f"address={where!r}. {_short(error)} Start one with: ray "
                "start --head. Or give --address=HOST:6379."
            ) from None
        try:
            yield
        finally:
            with self._asking:
                self._ray.shutdown()

    def room(self, most: int) -> int:
        """Asks Ray to place workers, beside those that there are.

        Raises:
            ClusterError: Ray does not answer.
        """
        try:
            with self._asking:
                # A call of a thread that comes late would start a cluster.
                return self._room(most) if self._ray.is_initialized() else 0
        except self._ray.exceptions.RayError as error:
            raise ClusterError(
                "The head of a Ray cluster must answer while a job runs. "
                f"Received: {_short(error)} Start the cluster again, and the "
                "job: it resumes."
            ) from None

    def _room(self, most: int) -> int:
        placed = len(self._actors)
        if placed:
            return placed + self._more(most - placed)
        # A node that was lost a moment ago is still one of the cluster's.
        if self._fits(most, _LOST_SECONDS):
            return most
        return bisect.bisect_left(
            range(1, most), True, key=lambda n: not self._fits(n)
        )

    def _fits(self, workers: int, seconds: float = _PLACE_SECONDS) -> bool:
        with self._placed(
            [self._bundle("worker")] * workers, seconds
        ) as placed:
            return placed

    def _more(self, most: int) -> int:
        """Returns how many more workers there is room for, beside the others.

        Ray is asked for each node, since a group of its own may not lie where
        the others of this job are (`STRICT_SPREAD`), or must (`STRICT_PACK`).
        """
        alive = {
            node["NodeManagerAddress"]
            for node in self._ray.nodes()
            if node["Alive"]
        }
        own = self._nodes
        nodes, each = {
            "STRICT_SPREAD": (alive - own, 1),
            "STRICT_PACK": (alive & own, most),
        }.get(self._placement, (alive, most))
        with contextlib.ExitStack() as stack:
            found = 0
            for node in sorted(nodes):
                # Each node has a little of a resource with its address.
                bundle = self._bundle("worker") | {f"node:{node}": 0.001}
                for _ in range(min(each, most - found)):
                    if not stack.enter_context(self._placed([bundle])):
                        break
                    found += 1
            return found

    @contextlib.contextmanager
    def _placed(
        self, bundles: list[dict[str, float]], seconds: float = _PLACE_SECONDS
    ) -> Iterator[bool]:
        """Holds places; says whether Ray has found them in time."""
        group = self._ray.util.placement_group(
            bundles, strategy=self._placement
        )
        try:
            yield bool(group.wait(timeout_seconds=seconds))
        finally:
            self._ray.util.remove_placement_group(group)

    @contextlib.contextmanager
    def addresses(
        self, roles: Roles, going: Callable[[], bool]
    ) -> Iterator[Sequence[str]]:
        """Places an actor for each task; each reserves a port.

        Raises:
            NoRoom: The cluster has no room within the start-up limit.
        """
        kinds = [
            (name, f"{name} {index}")
            for name, count in roles.counts.items()
            for index in range(count)
        ]
        bundles = [self._bundle(kind) for kind, _ in kinds]
        group = self._group(bundles, going)
        try:
            actors = [
                self._actor(group, index, bundle)
                for index, bundle in enumerate(bundles)
            ]
            names = [name for _, name in kinds]
            self._actors = dict(zip(names, actors, strict=True))
            found = self._reserve(actors)
            self._nodes = {addresses.parse(each).host for each in found}
            yield found
        finally:
            self._actors, self._nodes = {}, set()
            self._ray.util.remove_placement_group(group)

    def _reserve(self, actors: list[Any]) -> Sequence[str]:
        try:
            return self._ray.get(
                [actor.reserve.remote() for actor in actors],
                timeout=self._limit,
            )
        except self._ray.exceptions.RayError as error:
            raise NoRoom(
                "The actors of a job must start within the start-up limit. "
                f"Received: {_short(error)} Each node needs mgpu_tf, in the "
                "same version."
            ) from None

    def start(
        self, cluster: ClusterConfig, variables: dict[str, str], output: Output
    ) -> Task:
        """Starts a task on the node of its actor."""
        variables = {"PYTHONUNBUFFERED": "1"} | variables
        if not self._gpus or cluster.task_type != "worker":
            # A server or a coordinator that takes a GPU keeps it from all.
            variables = {"CUDA_VISIBLE_DEVICES": ""} | variables
        request = keeper.request(self._job.command, variables, os.getcwd())
        actor = self._actors[cluster.task_name]
        return RayTask(
            self._ray, cluster, actor, request, output.log_path, output
        )

    @property
    def _limit(self) -> float | None:
        return self._job.startup_seconds or None

    def _bundle(self, kind: str) -> dict[str, float]:
        """Returns what Ray reserves for a task of a type."""
        cpus = self._cpus if kind in ("worker", "ps") else 0.0
        gpus = self._gpus if kind == "worker" else 0.0
        bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        # Ray takes no bundle of nothing.
        return bundle if any(bundle.values()) else {"CPU": 0.001}

    def _group(
        self, bundles: list[dict[str, float]], going: Callable[[], bool]
    ) -> Any:
        group = self._ray.util.placement_group(
            bundles, strategy=self._placement
        )
        try:
            deadline = time.monotonic() + (self._limit or math.inf)
            while not group.wait(timeout_seconds=1):
                if not going():
                    raise Interrupted
                if time.monotonic() > deadline:
                    raise NoRoom(self._no_room(bundles))
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise
        return group

    def _no_room(self, bundles: list[dict[str, float]]) -> str:
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        free = _sum([self._ray.available_resources()])
        return (
            f"The Ray cluster must have room for {len(bundles)} tasks within "
            f"{self._limit or 0:.0f} seconds. Received: {_sum(bundles)} asked "
            f"for with {self._placement}, {free} free on {nodes} nodes. Ask "
            "for less, or add nodes."
        )

    def _actor(self, group: Any, index: int, bundle: dict[str, float]) -> Any:
        strategy = self._ray.util.scheduling_strategies
        return (
            self._ray.remote(TaskActor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=strategy.PlacementGroupSchedulingStrategy(
                    placement_group=group,
                    placement_group_bundle_index=index,
                ),
            )
            .remote()
        )


class TaskActor:
    """Keeps the process of a task on its node. Runs in Ray's worker."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._address = ""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._open = False

    def reserve(self) -> str:
        """Returns `host:port` of a port that stays free for the task."""
        ray = _ray()
        (number,) = self._stack.enter_context(ports.reserved(1))
        host = ray.util.get_node_ip_address()
        bracketed = f"[{host}]" if ":" in host else host
        self._address = f"{bracketed}:{number}"
        return self._address

    def start(self, request: bytes) -> None:
        """Starts the process, as `keeper.request` describes it."""
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", keeper.CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines, self._open = [], True
        self.send(request)
        for work in (self._read, self._say_alive):
            threading.Thread(
                target=work, args=(self._keeper,), daemon=True
            ).start()

    def send(self, text: bytes) -> None:
        """Writes to the keeper; it may have ended."""
        stream = self._keeper.stdin if self._keeper is not None else None
        if stream is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                stream.write(text)
                stream.flush()

    def news(self, seconds: float) -> tuple[list[bytes], int | None]:
        """Returns new lines of output, and how the process ended.

        Args:
            seconds: How long to wait for either.

        Returns:
            The lines, and None while it runs or has more to say.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._lines or not self._open, seconds
            )
            lines, self._lines = self._lines, []
            done = not self._open and not lines
        if not done or self._keeper is None:
            return lines, None
        return lines, self._keeper.wait()

    def serves(self) -> bool:
        """Whether the process answers on its port."""
        return ports.answers(self._address)

    def _read(self, kept: subprocess.Popen[bytes]) -> None:
        if kept.stdout is not None:
            for line in kept.stdout:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        # Children may hold the output open for longer than the process.
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _say_alive(self, kept: subprocess.Popen[bytes]) -> None:
        while kept.poll() is None:
            self.send(keeper.ALIVE)
            time.sleep(keeper.ALIVE_SECONDS)


class RayTask(Task):
    """A task that an actor keeps.

    Args:
        ray: The module.
        cluster: The cluster as the task sees it.
        actor: The actor of its node.
        request: What the actor starts.
        log_path: A file that gets its output, None for none.
        output: Where its output belongs.
    """

    def __init__(
        self,
        ray: Any,
        cluster: ClusterConfig,
        actor: Any,
        request: bytes,
        log_path: str | None,
        output: Output,
    ) -> None:
        super().__init__(cluster.task_name, log_path, output.on_closed)
        self._ray = ray
        self._actor = actor
        self._node = cluster.address.rpartition(":")[0]
        self._code: int | None = None
        self._lost = False
        self._over = threading.Event()
        try:
            # Else `news` may still be of the process before.
            ray.get(actor.start.remote(request), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError:
            self._lose()
        self._copy(self._news(), f"node {self._node}")

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._code if self._over.is_set() else None

    @property
    def may_restart(self) -> bool:
        """Whether its node is still there."""
        return not self._lost

    def wait(self, seconds: float | None = None) -> None:
        """Waits for its end, no longer than `seconds`."""
        self._over.wait(seconds)

    def cause(self) -> str:
        """Returns in words what ended it."""
        if self._lost:
            return f"the loss of its node {self._node}"
        return super().cause()

    def serves(self) -> bool:
        """Whether it answers on its port, as its node sees it."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            return bool(
                self._ray.get(
                    self._actor.serves.remote(), timeout=_ANSWER_SECONDS
                )
            )
        return False

    def signal(self, number: int) -> None:
        """Sends a signal; a node that does not answer is given up."""
        if self._over.is_set():
            return
        try:
            self._ray.get(
                self._actor.send.remote(keeper.signal_line(number)),
                timeout=_ANSWER_SECONDS,
            )
        except self._ray.exceptions.RayError:
            self._lose()

    def _news(self) -> Iterator[bytes]:
        """Yields the lines of its output until it has ended."""
        while not self._over.is_set():
            try:
                lines, code = self._ray.get(
                    self._actor.news.remote(_POLL_SECONDS),
                    timeout=_POLL_SECONDS + _ANSWER_SECONDS,
                )
            except self._ray.exceptions.RayError:
                self._lose()
                return
            yield from lines
            if code is not None:
                self._code = code
                self._over.set()

    def _lose(self) -> None:
        """Notes that its node does not answer any more."""
        if not self._over.is_set():
            self._lost, self._code = True, 1
            self._over.set()


def check_alive(where: str, seconds: float = _ALIVE_SECONDS) -> None:
    """Refuses the address of a Ray cluster that does not answer.

    Args:
        where: `HOST:PORT`, `ray://HOST:PORT`, or `auto`.
        seconds: How long it may take to answer.

    Raises:
        ConfigurationError: It is no address.
        ClusterError: Nobody answers there, or not as Ray does.
    """
    address = where.removeprefix(_CLIENT)
    if where != "auto":
        try:
            addresses.parse(address)
        except ValueError as problem:
            raise ConfigurationError(
                "address must be HOST:PORT of a Ray cluster. Received: "
                f"address={where!r}, {problem}. Write --address=HOST:6379."
            ) from None
    alive, found = True, ""
    if where != "auto":
        limit = min(seconds, _CONNECT_SECONDS)
        alive, found = ports.answers(address, limit), "nobody answers."
    if alive and not where.startswith(_CLIENT):
        alive, found = _healthy(where, seconds)
    if not alive:
        raise ClusterError(
            "mgpu-tf ray needs a Ray cluster. Received: "
            f"address={where!r}, where {found} Start one with: ray start "
            "--head. Or give --address=HOST:6379."
        )


def _healthy(where: str, seconds: float) -> tuple[bool, str]:
    """Returns whether a cluster answers in time, and what was found."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    try:
        done = subprocess.run(
            command + ([] if where == "auto" else ["--address", where]),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no Ray answers within {seconds:.0f} seconds."
    said = done.stderr.strip().splitlines()[-1:] or ["no Ray answers"]
    return done.returncode == 0, said[0][:160].rstrip(".") + "."


def _sum(bundles: Sequence[Mapping[str, float]]) -> str:
    """Returns resources in words, such as "4 CPU, 2 GPU"."""
    totals = {
        name: sum(float(bundle.get(name, 0.0)) for bundle in bundles)
        for name in ("CPU", "GPU")
    }
    return ", ".join(f"{value:g} {name}" for name, value in totals.items())


def _short(error: Exception) -> str:
    """Returns the beginning of an error of Ray as a sentence."""
    return " ".join(str(error).split())[:200].rstrip(".") + "."


def _ray() -> Any:
    """Returns the module `ray`.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ConfigurationError(
            "mgpu-tf ray needs Ray. Received: an environment without it. Run: "
            f"{installing('ray')}"
        ) from None
    importlib.import_module("ray.util.scheduling_strategies")
    return ray
