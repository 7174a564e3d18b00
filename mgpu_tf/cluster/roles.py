"""Which tasks a job has, and which of its processes becomes which task.

    Roles(num_workers=2, num_ps=1).counts    # chief 1, worker 2, ps 1
    Roles.cut(4, environ)                    # the roles of 4 processes

A scheduler starts processes that are all the same. These environment
variables say which of them are no workers:

    MGPU_TF_NUM_PS       the number of parameter servers
    MGPU_TF_EVALUATOR    1 for an evaluator
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mgpu_tf.errors import ClusterError

NUM_WORKERS = "MGPU_TF_NUM_WORKERS"
NUM_PS = "MGPU_TF_NUM_PS"
EVALUATOR = "MGPU_TF_EVALUATOR"


@dataclasses.dataclass(frozen=True)
class Roles:
    """How many tasks of each type a job has.

    Attributes:
        num_workers: The tasks of type `worker`.
        num_ps: The tasks of type `ps`. With any there is a `chief` as well.
        evaluator: Whether there is an `evaluator`.
    """

    num_workers: int
    num_ps: int = 0
    evaluator: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks by type, in the order of tasks."""
        counts = {"worker": self.num_workers}
        if self.num_ps:
            counts = {"chief": 1, **counts, "ps": self.num_ps}
        if self.evaluator:
            counts["evaluator"] = 1
        return counts

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return sum(self.counts.values())

    @classmethod
    def cut(cls, num_tasks: int, environ: Mapping[str, str]) -> Roles:
        """Returns the roles of a number of processes.

        Args:
            num_tasks: How many processes the scheduler has started.
            environ: The environment, with the variables of this module.

        Raises:
            ClusterError: A variable is no number, or there are too few
                processes.
        """
        none = cls.beside(0, environ)
        rest = num_tasks - none.num_tasks
        if rest < 1:
            raise ClusterError(
                "A job needs a process for each task. Received: "
                f"{num_tasks} processes, {NUM_PS}={none.num_ps}, "
                f"{EVALUATOR}={int(none.evaluator)}. Start "
                f"{none.num_tasks + 1} or more: "
                f"{dataclasses.replace(none, num_workers=1)}."
            )
        return dataclasses.replace(none, num_workers=rest)

    @classmethod
    def beside(cls, num_workers: int, environ: Mapping[str, str]) -> Roles:
        """Returns the roles beside a known number of workers.

        Args:
            num_workers: The tasks of type `worker`.
            environ: The environment, with the variables of this module.

        Raises:
            ClusterError: A variable is no number.
        """
        num_ps = number(environ, NUM_PS, 0)
        evaluator = number(environ, EVALUATOR, 0)
        if evaluator > 1:
            raise ClusterError(
                f"A job has at most one evaluator. Received: "
                f"{EVALUATOR}={evaluator}. Set it to 1 or 0."
            )
        if evaluator and not num_ps:
            raise ClusterError(
                "An evaluator goes with parameter servers. Received: "
                f"{EVALUATOR}=1 without {NUM_PS}. Set {NUM_PS}=1, or unset "
                f"{EVALUATOR}."
            )
        return cls(num_workers, num_ps, bool(evaluator))

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {name}{'s' * (count > 1 and name != 'ps')}"
            for name, count in self.counts.items()
        )

    def environment(self) -> dict[str, str]:
        """Returns the variables by which processes know these roles."""
        variables = {}
        if self.num_ps:
            variables[NUM_PS] = str(self.num_ps)
        if self.evaluator:
            variables[EVALUATOR] = "1"
        return variables


def number(
    environ: Mapping[str, str], name: str, default: int | None = None
) -> int:
    """Returns an environment variable as a number of 0 or more.

    Args:
        environ: The environment.
        name: The variable.
        default: The number where it is not set. None: it must be set.

    Raises:
        ClusterError: It is not set and has no default, or is no number.
    """
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ClusterError(
            f"{name} must be a number of 0 or more. Received: "
            f"{name}={environ.get(name)!r}."
        )
    return int(text)
