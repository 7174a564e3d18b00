"""What every launcher receives: a command, its tasks, and their environment.

    job = LaunchJob(("python", "train.py"), num_workers=2, num_ps=1)
    job.num_tasks                               # 4: a chief as well
    for cluster in job.clusters(addresses):     # the place of each task
        job.environment(cluster, restarts=0)    # TF_CONFIG and the like

How processes are started is the launcher's own: `local` on this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mgpu_tf.cluster import ports
from mgpu_tf.cluster.config import TF_CONFIG, ClusterConfig
from mgpu_tf.cluster.environments.place import Place
from mgpu_tf.cluster.roles import Roles
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import check_types
from mgpu_tf.launch import noise
from mgpu_tf.launch.elastic import check_elastic
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.options import WatchOptions

# Tells a process how often its job was started again.
RESTARTS = "MGPU_TF_RESTARTS"
# The step that a task replays, in place of its training.
REPLAY = "MGPU_TF_REPLAY"
# The file that says that it has.
VERDICT = "MGPU_TF_REPLAY_VERDICT"

EVALUATOR = "evaluator 0"
STARTUP_SECONDS = 300.0
GRACE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class LaunchJob:
    """A command that runs as the tasks of a cluster.

    Attributes:
        command: The program and its arguments.
        num_workers: How many processes of task type `worker`.
        num_ps: How many of task type `ps`. With any there is a `chief` as
            well, whose success ends the job.
        evaluator: Whether there is a task beside them that follows the
            checkpoints; the job ends when it has seen the last.
        startup_seconds: How long each may take until it serves its port; 0
            for no limit.
        grace_seconds: How long tasks have to end after a signal.
        policy: What is started again when a task fails; nothing by default.
        watch: How long tasks may make no progress.
        log_dir: A folder that gets a file for each task, such as
            `worker-0.log`; restarts are appended.
        chief_has_terminal: Whether worker 0 writes to this process's output
            directly, so that its progress bar moves; not with `log_dir`.
        alone: Whether the one process is no cluster and gets no `TF_CONFIG`.
        spares: How many more processes import TensorFlow and wait to take
            the place of tasks that are started again. Then worker 0 does not
            write to this process's output directly.

    Raises:
        ConfigurationError: A number is out of range.
    """

    command: tuple[str, ...]
    num_workers: int
    num_ps: int = 0
    evaluator: bool = False
    startup_seconds: float = STARTUP_SECONDS
    grace_seconds: float = GRACE_SECONDS
    policy: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    watch: WatchOptions = dataclasses.field(default_factory=WatchOptions)
    log_dir: str | None = None
    chief_has_terminal: bool = False
    alone: bool = False
    spares: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_command(self.command)
        if self.num_workers < 1:
            raise ConfigurationError(
                f"num_workers must be 1 or more. Received: {self.num_workers}."
            )
        if self.num_ps < 0:
            raise ConfigurationError(
                f"num_ps must be 0 or more. Received: {self.num_ps}."
            )
        for name, seconds, zero in (
            ("startup_seconds", self.startup_seconds, ", 0 for no limit"),
            ("grace_seconds", self.grace_seconds, ""),
        ):
            if not seconds >= 0:
                raise ConfigurationError(
                    f"{name} must be 0 or more{zero}. Received: {seconds}."
                )
        if not 0 <= self.spares <= self.num_tasks:
            raise ConfigurationError(
                "spares must be from 0 to the number of tasks, here "
                f"{self.num_tasks}. Received: {self.spares}."
            )
        if self.spares and not self.policy.restarts:
            raise ConfigurationError(
                "spares go with restarts. Received: "
                f"spares={self.spares}, max_restarts=0. Set max_restarts, or "
                "leave spares out."
            )
        policy = self.policy
        check_elastic(self.num_workers, policy.min_workers, policy.max_workers)

    @property
    def shows_progress(self) -> bool:
        """Whether worker 0 has the terminal."""
        return (
            self.chief_has_terminal and self.log_dir is None and not self.spares
        )

    @property
    def roles(self) -> Roles:
        """How many tasks there are of each type."""
        return Roles(self.num_workers, self.num_ps, self.evaluator)

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return self.roles.num_tasks

    def clusters(self, addresses: Sequence[str]) -> list[ClusterConfig]:
        """Returns the cluster as each task sees it, the chief's view first.

        Args:
            addresses: `host:port` of each task, in the order of `roles`.
        """
        places = [
            Place(TF_CONFIG, self.roles, tuple(addresses), index)
            for index in range(self.num_tasks)
        ]
        return [ClusterConfig.at(place) for place in places]

    def environment(
        self, cluster: ClusterConfig, restarts: int
    ) -> dict[str, str]:
        """Returns the environment variables of a task.

        Args:
            cluster: The cluster as the task sees it.
            restarts: How often the job was started again.
        """
        variables = dict(ports.ENVIRONMENT)
        if not self.alone:
            variables[TF_CONFIG] = cluster.to_json()
        variables[RESTARTS] = str(restarts)
        if self.log_dir is not None:
            variables |= noise.kept()
        # Of a task that no supervisor watches, as one on another machine.
        variables |= self.watch.to_environment()
        return variables


def check_command(command: Sequence[str]) -> None:
    """Refuses a command that cannot be written into a script.

    Args:
        command: The program and its arguments.

    Raises:
        ConfigurationError: A word is no text in UTF-8, or has a zero byte.
    """
    for word in command:
        try:
            word.encode()
        except UnicodeEncodeError:
            pass
        else:
            if "\0" not in word:
                continue
        raise ConfigurationError(
            "A command must be text in UTF-8 without zero bytes. Received: "
            f"{word!r}. Rename the file, or change the argument."
        )
