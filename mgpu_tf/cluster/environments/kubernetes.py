"""The pods of a job of Kubernetes, from the variables of its manifest.

`mgpu-tf kubernetes` writes manifests with these variables. A manifest of your
own sets them in the same way.

| variable | value in the manifest | needed by |
|---|---|---|
| `JOB_COMPLETION_INDEX` | set by Kubernetes in an Indexed Job | all |
| `MGPU_TF_NUM_WORKERS` | the number of workers | all |
| `MGPU_TF_SERVICE` | the headless service of the pods | all |
| `MGPU_TF_JOB` | the name of the Job, where it is no JobSet | Job |
| `JOBSET_NAME` | label `jobset.sigs.k8s.io/jobset-name` | JobSet |
| `REPLICATED_JOB_NAME` | label `.../replicatedjob-name` | JobSet |
| `MGPU_TF_NUM_PS`, `MGPU_TF_EVALUATOR` | as everywhere | other roles |

A pod is `JOB-INDEX.SERVICE`, or `JOBSET-REPLICATED_JOB-0-INDEX.SERVICE`. The
replicated jobs of a JobSet are named by task types: chief, worker, ps,
evaluator. A replicated job of another name, such as `node` of a TrainJob of
Kubeflow, has all tasks: chief, workers, ps and evaluator in this order.
"""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_tf.cluster.environments.place import DEFAULT_PORT, Place, chosen_port
from mgpu_tf.cluster.roles import NUM_WORKERS, Roles, number
from mgpu_tf.errors import ClusterError

INDEX = "JOB_COMPLETION_INDEX"
SERVICE = "MGPU_TF_SERVICE"
JOB = "MGPU_TF_JOB"
JOBSET = "JOBSET_NAME"
REPLICATED_JOB = "REPLICATED_JOB_NAME"


def detect(environ: Mapping[str, str]) -> bool:
    """Returns whether this pod was made for a cluster of tasks."""
    return SERVICE in environ


def read(environ: Mapping[str, str]) -> tuple[Place | None, list[str]]:
    """Returns the place of this pod, and hints; None for the only pod.

    Args:
        environ: The environment.

    Raises:
        ClusterError: A variable is missing, or this pod is none of the job's.
    """
    workers = number(environ, NUM_WORKERS)
    roles = Roles.beside(workers, environ)
    if workers < 1:
        raise ClusterError(
            f"A job needs a worker. Received: {NUM_WORKERS}=0. Set it to the "
            "number of workers."
        )
    if roles.num_tasks == 1:
        return None, []
    source, bases, own = _names(environ, roles)
    port = chosen_port(environ, DEFAULT_PORT)
    hosts = [
        f"{base}-{index}.{environ[SERVICE]}:{port}"
        for base, count in bases
        for index in range(count)
    ]
    index = number(environ, INDEX)
    if index >= bases[own][1]:
        raise ClusterError(
            "A pod's index must be below the number of its tasks. Received: "
            f"{INDEX}={index} of {bases[own][1]}. Set completions and "
            "parallelism of the job to that number."
        )
    before = sum(count for _, count in bases[:own])
    return Place(source, roles, tuple(hosts), before + index), []


def _names(
    environ: Mapping[str, str], roles: Roles
) -> tuple[str, list[tuple[str, int]], int]:
    """Returns the source, what pods are named by and how many, and which."""
    if INDEX not in environ:
        raise ClusterError(
            f"Kubernetes must number the pods of a job. Received: no {INDEX}. "
            "Set completionMode: Indexed."
        )
    if not environ[SERVICE]:
        raise ClusterError(
            "The pods of a job need a headless service. Received: "
            f"{SERVICE}=''. Set it to the subdomain of the pods."
        )
    jobset, part = environ.get(JOBSET), environ.get(REPLICATED_JOB)
    if not jobset:
        job = environ.get(JOB)
        if not job:
            raise ClusterError(
                "Pods are named by their job. Received: neither "
                f"{JOBSET} nor {JOB}. Set the one that names it."
            )
        return f"Kubernetes Job {job}", [(job, roles.num_tasks)], 0
    source, counts = f"JobSet {jobset}", roles.counts
    if part in counts:
        bases = [(f"{jobset}-{name}-0", n) for name, n in counts.items()]
        return source, bases, list(counts).index(part)
    if not part or part in ("chief", "ps", "evaluator"):
        raise ClusterError(
            f"{REPLICATED_JOB} must be a role of the job. Received: "
            f"{REPLICATED_JOB}={part!r}, roles {', '.join(counts)}. Correct "
            "the name, or the numbers of tasks."
        )
    return source, [(f"{jobset}-{part}-0", roles.num_tasks)], 0
