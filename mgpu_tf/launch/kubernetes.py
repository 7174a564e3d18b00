"""The manifests of a job of Kubernetes, as pure functions.

    job = KubernetesJob(
        ("python", "train.py"), name="mnist", image="lab/train:1", workers=4
    )
    print(manifests(job))            # for kubectl apply -f -

| kind | objects | what restarts after a failure |
|---|---|---|
| `jobset` | JobSet | all tasks |
| `job` | Indexed Job, headless Service | the pods that ended |
| `trainjob` | TrainingRuntime, TrainJob (Kubeflow Trainer 2) | all tasks |

Each kind has a NetworkPolicy as well. The servers of TensorFlow have no
authentication, so only pods of the job reach its pods. The environment of the
pods is what `mgpu_tf.cluster.environments.kubernetes` reads.

References: JobSet (jobset.x-k8s.io/v1alpha2), Job (batch/v1), TrainJob
(trainer.kubeflow.org/v1alpha1), Kueue (kueue.x-k8s.io/queue-name).
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from typing import Any

from mgpu_tf.cluster.environments import kubernetes as environment
from mgpu_tf.cluster.environments.place import DEFAULT_PORT, PORT
from mgpu_tf.cluster.roles import NUM_WORKERS, Roles
from mgpu_tf.errors import (
    PREEMPTED,
    ConfigurationError,
    check_integer,
    unknown_name,
)
from mgpu_tf.fields import check_types
from mgpu_tf.launch import yaml_text
from mgpu_tf.launch.job import check_command

KINDS = ("jobset", "job", "trainjob")
MOUNT = "/checkpoints"

# The label by which the pods of a job find each other.
_LABEL = "mgpu-tf/job"
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_CONTAINER = "node"

# RFC 1035, as names of services and of hosts must be.
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
# RFC 1123, as the name of a namespace must be, and of other objects.
_LABEL_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OBJECT = re.compile(rf"{_LABEL_NAME.pattern}(\.{_LABEL_NAME.pattern})*")
_LONGEST_OBJECT = 253
# What the value of a label may be, as the name of a queue is one.
_LONGEST_LABEL = 63
# As of github.com/distribution/reference.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{{1,5}})?/)?"
    rf"{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)
_LONGEST_IMAGE = 255
_QUANTITY = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(m|k|[KMGTPE]i|[MGTPE])?"
)
_UNITS = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    "k": Fraction(1000),
    **{u: Fraction(1000) ** n for n, u in enumerate("MGTPE", 2)},
    **{f"{u}i": Fraction(1024) ** n for n, u in enumerate("KMGTPE", 1)},
}
# Of the fields of Kubernetes, integers of 32 and of 64 bits.
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_MOST_PODS = 100_000
_LONGEST_HOST = 63

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class KubernetesJob:
    """A command as a job of Kubernetes.

    Attributes:
        command: The program and its arguments.
        name: The name of the job, and of its service.
        image: The image of the containers.
        workers: The number of workers, a pod each.
        gpus: The GPUs of each worker. No other task gets one.
        ps: The number of parameter servers. With any there is a coordinator
            (chief) as well.
        evaluator: Whether one more pod evaluates the checkpoints.
        kind: One of `KINDS`.
        namespace: The namespace; None for that of kubectl.
        queue: The queue of Kueue; None for none.
        cpus: The CPUs of each pod, as a quantity; None asks for none.
        memory: The memory of each pod, as a quantity; None asks for none.
        shared_memory: The size of /dev/shm. It counts as memory of the pod.
        checkpoint_claim: A volume claim that all pods mount at
            `/checkpoints`; None for none.
        checkpoint_size: The size with which the claim is made; None where
            it exists.
        max_restarts: How often the job is started again after a failure.
            Preemptions do not count.
        grace_seconds: How long a pod has to save a checkpoint and end.
        user_id: The user and group that the containers run as.

    Raises:
        ConfigurationError: A value is no valid one of Kubernetes, or two
            contradict each other.
    """

    command: tuple[str, ...]
    name: str
    image: str
    workers: int
    gpus: int = 0
    ps: int = 0
    evaluator: bool = False
    kind: str = "jobset"
    namespace: str | None = None
    queue: str | None = None
    cpus: str | None = None
    memory: str | None = None
    shared_memory: str = "1Gi"
    checkpoint_claim: str | None = None
    checkpoint_size: str | None = None
    max_restarts: int = 3
    grace_seconds: int = 300
    user_id: int = 1000

    def __post_init__(self) -> None:
        check_types(self)
        _check_numbers(self)
        _check_names(self)
        _check_quantities(self)
        _check_together(self)
        check_command(self.command)

    @property
    def roles(self) -> Roles:
        """How many tasks there are of each type."""
        return Roles(self.workers, self.ps, self.evaluator)


def manifests(job: KubernetesJob) -> str:
    """Returns the manifests of a job as YAML.

    Args:
        job: The job.
    """
    return "".join(map(yaml_text.document, objects(job)))


def objects(job: KubernetesJob) -> list[Manifest]:
    """Returns the objects of a job, in the order in which they are made.

    Args:
        job: The job.
    """
    made = [_network_policy(job)]
    if job.checkpoint_claim is not None and job.checkpoint_size is not None:
        made.append(_claim(job))
    if job.kind == "job":
        return [*made, _service(job), _indexed_job(job)]
    if job.kind == "jobset":
        return [*made, _jobset(job)]
    return [*made, _runtime(job), _trainjob(job)]


def _metadata(
    job: KubernetesJob, name: str, labels: dict[str, str] | None = None
) -> Manifest:
    metadata: Manifest = {"name": name}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    return metadata | {"labels": _labels(job) | (labels or {})}


def _labels(job: KubernetesJob) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "mgpu-tf", _LABEL: job.name}


def _queued(job: KubernetesJob) -> dict[str, str]:
    return {} if job.queue is None else {"kueue.x-k8s.io/queue-name": job.queue}


def _network_policy(job: KubernetesJob) -> Manifest:
    """Only the job's pods reach its pods; NCCL chooses its own ports."""
    own = {"matchLabels": {_LABEL: job.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.name),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def _claim(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, str(job.checkpoint_claim)),
        "spec": {
            # Pods of several nodes mount it.
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": job.checkpoint_size}},
        },
    }


def _service(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            # Tasks wait for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: job.name},
            "ports": [{"name": "tensorflow", "port": DEFAULT_PORT}],
        },
    }


def _indexed_job(job: KubernetesJob) -> Manifest:
    tasks = job.roles.num_tasks
    # All pods fail with the first, and each of them counts.
    spec = _job_spec(job, "Ignore", job.max_restarts * tasks)
    spec["template"]["spec"]["subdomain"] = job.name
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, job.name, _queued(job)),
        "spec": {
            "completionMode": "Indexed",
            "completions": tasks,
            "parallelism": tasks,
            **spec,
        },
    }


def _jobset(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, job.name, _queued(job)),
        "spec": {
            "network": _network(job),
            **_success(job),
            "failurePolicy": _failure_policy(job),
            "replicatedJobs": _replicated_jobs(job),
        },
    }


def _network(job: KubernetesJob) -> Manifest:
    return {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": job.name,
    }


def _success(job: KubernetesJob) -> Manifest:
    """The end of the coordinator, and of the evaluator, ends the job."""
    if not job.ps:
        return {}
    decide = [name for name in ("chief", "evaluator") if name in _roles(job)]
    return {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": decide}
    }


def _failure_policy(job: KubernetesJob) -> Manifest:
    """One failure restarts all tasks; preemptions do not count."""
    return {
        "maxRestarts": job.max_restarts,
        # Pods of the attempt before would hold the host names.
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }


def _roles(job: KubernetesJob) -> dict[str, int]:
    return job.roles.counts


def _replicated_jobs(job: KubernetesJob) -> list[Manifest]:
    """A replicated job for each role; each waits for the one before.

    The servers serve before the coordinator looks for them, so it holds no
    node while it waits. The evaluator comes last: it reads what is saved.
    """
    order = [
        name
        for name in ("ps", "worker", "chief", "evaluator")
        if name in _roles(job)
    ]
    made: list[Manifest] = []
    for position, name in enumerate(order):
        count = _roles(job)[name]
        replicated: Manifest = {"name": name, "replicas": 1}
        if position:
            replicated["dependsOn"] = [
                {"name": order[position - 1], "status": "Ready"}
            ]
        replicated["template"] = {
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                **_job_spec(job, "FailJob", 0, role=name),
            }
        }
        made.append(replicated)
    return made


def _runtime(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, job.name),
        "spec": {
            "mlPolicy": {"numNodes": job.roles.num_tasks},
            "template": {
                "spec": {
                    "network": _network(job),
                    "failurePolicy": _failure_policy(job),
                    "replicatedJobs": [
                        {
                            "name": _CONTAINER,
                            "replicas": 1,
                            "template": {
                                "metadata": {"labels": {_ANCESTOR: "trainer"}},
                                "spec": {
                                    "completionMode": "Indexed",
                                    **_job_spec(job, "FailJob", 0),
                                },
                            },
                        }
                    ],
                }
            },
        },
    }


def _trainjob(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.name, _queued(job)),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": {
                "image": job.image,
                "command": _command(job),
                "numNodes": job.roles.num_tasks,
            },
        },
    }


def _job_spec(
    job: KubernetesJob,
    on_preemption: str,
    backoff_limit: int,
    role: str | None = None,
) -> Manifest:
    """Returns what the specs of all jobs have in common.

    Args:
        job: The job.
        on_preemption: What a pod that was preempted does to its Job.
        backoff_limit: The failures of pods that the Job survives.
        role: The task type of the pods; None for pods of all types.
    """
    return {
        "backoffLimit": backoff_limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": on_preemption,
                    "onPodConditions": [
                        {"type": "DisruptionTarget", "status": "True"}
                    ],
                },
                {
                    # The exit code of a task that has saved its state.
                    "action": on_preemption,
                    "onExitCodes": {
                        "containerName": _CONTAINER,
                        "operator": "In",
                        "values": [PREEMPTED],
                    },
                },
            ]
        },
        "template": {
            "metadata": {"labels": _labels(job)},
            "spec": _pod(job, role),
        },
    }


def _pod(job: KubernetesJob, role: str | None) -> Manifest:
    user = job.user_id
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": _CONTAINER,
                "image": job.image,
                "command": _command(job),
                "env": _environment(job),
                "ports": [
                    {"name": "tensorflow", "containerPort": DEFAULT_PORT}
                ],
                **_resources(job, role),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [
                    {"name": name, "mountPath": path}
                    for name, path, _ in _volumes(job)
                ],
            }
        ],
        "volumes": [
            {"name": name, **source} for name, _, source in _volumes(job)
        ],
    }


def _command(job: KubernetesJob) -> list[str]:
    """Kubernetes replaces $(NAME), and $$ by $."""
    return [argument.replace("$", "$$") for argument in job.command]


def _environment(job: KubernetesJob) -> list[Manifest]:
    fixed = {
        NUM_WORKERS: str(job.workers),
        **job.roles.environment(),
        environment.SERVICE: job.name,
        PORT: str(DEFAULT_PORT),
        # The user has no entry in the image, and no folder of its own.
        "HOME": "/tmp",
        "USER": "mgpu-tf",
        "PYTHONUNBUFFERED": "1",
    }
    if job.kind == "job":
        fixed[environment.JOB] = job.name
    made: list[Manifest] = [{"name": n, "value": v} for n, v in fixed.items()]
    if job.kind == "job":
        return made
    labels = {
        environment.JOBSET: "jobset-name",
        environment.REPLICATED_JOB: "replicatedjob-name",
    }
    for name, label in labels.items():
        path = f"metadata.labels['jobset.sigs.k8s.io/{label}']"
        made.append(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        )
    return made


def _resources(job: KubernetesJob, role: str | None) -> Manifest:
    limits: Manifest = {}
    if job.gpus and role in (None, "worker"):
        limits["nvidia.com/gpu"] = job.gpus
    requests: Manifest = {}
    if job.cpus is not None:
        requests["cpu"] = job.cpus
    if job.memory is not None:
        requests["memory"] = limits["memory"] = job.memory
    found = {"limits": limits, "requests": requests}
    resources = {name: value for name, value in found.items() if value}
    return {"resources": resources} if resources else {}


def _volumes(job: KubernetesJob) -> list[tuple[str, str, Manifest]]:
    """Returns name, mount path and source of each volume."""
    memory = {"medium": "Memory", "sizeLimit": job.shared_memory}
    volumes: list[tuple[str, str, Manifest]] = [
        ("tmp", "/tmp", {"emptyDir": {}}),
        ("shared-memory", "/dev/shm", {"emptyDir": memory}),
    ]
    if job.checkpoint_claim is not None:
        claim = {"claimName": job.checkpoint_claim}
        source = {"persistentVolumeClaim": claim}
        volumes.append(("checkpoints", MOUNT, source))
    return volumes


def _check_numbers(job: KubernetesJob) -> None:
    restarts = _INT32 // max(1, job.roles.num_tasks)
    for field, least, most in (
        ("workers", 1, _MOST_PODS),
        ("gpus", 0, _INT32),
        ("ps", 0, _MOST_PODS),
        ("max_restarts", 0, restarts),
        ("grace_seconds", 1, _INT32),
        ("user_id", 0, _INT32),
    ):
        check_integer(field, getattr(job, field), least, most)
    if job.user_id < 1:
        raise ConfigurationError(
            "Containers do not run as root. Received: "
            f"user_id={job.user_id}. Use 1 or more."
        )


def _check_names(job: KubernetesJob) -> None:
    if job.kind not in KINDS:
        raise ConfigurationError(unknown_name("kind", job.kind, KINDS))
    if not _NAME.fullmatch(job.name):
        raise ConfigurationError(
            "name must be lower-case letters, digits and dashes, and begin "
            f"with a letter. Received: name={job.name!r}."
        )
    middle = "" if job.kind == "job" else "-evaluator-0"
    longest = f"{job.name}{middle}-{job.roles.num_tasks - 1}"
    if len(longest) > _LONGEST_HOST:
        most = _LONGEST_HOST - len(longest) + len(job.name)
        raise ConfigurationError(
            f"name must have at most {most} characters, so that pods can be "
            f"named by it. Received: {len(job.name)}."
        )
    if len(job.image) > _LONGEST_IMAGE or not _IMAGE.fullmatch(job.image):
        raise ConfigurationError(
            "image must be such as registry/team/train:1. Received: "
            f"image={job.image!r}."
        )
    for field, rule, limit, dots in (
        ("namespace", _LABEL_NAME, _LONGEST_LABEL, ""),
        ("queue", _OBJECT, _LONGEST_LABEL, " and dots"),
        ("checkpoint_claim", _OBJECT, _LONGEST_OBJECT, " and dots"),
    ):
        value = getattr(job, field)
        if value is not None and not (
            len(value) <= limit and rule.fullmatch(value)
        ):
            raise ConfigurationError(
                f"{field} must be lower-case letters, digits, dashes{dots}, "
                f"at most {limit}, and begin and end with a letter or digit. "
                f"Received: {field}={value!r}."
            )


def _check_quantities(job: KubernetesJob) -> None:
    sizes = {}
    for field in ("cpus", "memory", "shared_memory", "checkpoint_size"):
        value = getattr(job, field)
        if value is not None:
            sizes[field] = _quantity(field, value)
    memory = sizes.get("memory")
    if memory is not None and sizes["shared_memory"] > memory:
        raise ConfigurationError(
            "shared_memory is part of memory. Received: "
            f"shared_memory={job.shared_memory!r}, memory={job.memory!r}. Ask "
            "for more memory, or less of /dev/shm."
        )


def _quantity(field: str, value: str) -> Fraction:
    """Returns a quantity as CPUs or bytes."""
    match = _QUANTITY.fullmatch(value)
    is_cpus = field == "cpus"
    if match is None or float(match[1]) == 0:
        raise ConfigurationError(
            f"{field} must be a quantity of Kubernetes, such as "
            f"{'4 or 500m' if is_cpus else '16Gi'}. Received: "
            f"{field}={value!r}."
        )
    unit = match[2] or ""
    if unit == "m" and not is_cpus:
        raise ConfigurationError(
            f"{field} must be in bytes; m means thousandths. Received: "
            f"{field}={value!r}. Write {match[1]}Mi."
        )
    size = Fraction(match[1]) * _UNITS[unit]
    if is_cpus:
        fits = unit in ("", "m") and (size * 1000).denominator == 1
    else:
        fits = size.denominator == 1
    if not fits or size > _INT64:
        rule = (
            "in CPUs, or with m in whole thousandths of one"
            if is_cpus
            else "whole bytes, fewer than 2^63"
        )
        raise ConfigurationError(
            f"{field} must be {rule}. Received: {field}={value!r}."
        )
    return size


def _check_together(job: KubernetesJob) -> None:
    if job.checkpoint_size is not None and job.checkpoint_claim is None:
        raise ConfigurationError(
            "checkpoint_size is that of checkpoint_claim. Received: "
            f"checkpoint_size={job.checkpoint_size!r} without it. Write "
            "--checkpoint_claim=NAME."
        )
    if job.evaluator and not job.ps:
        raise ConfigurationError(
            "An evaluator goes with parameter servers. Received: evaluator "
            "without ps. Write --ps=1, or leave it out."
        )
    on_objects = any("://" in word for word in job.command)
    if job.evaluator and job.checkpoint_claim is None and not on_objects:
        raise ConfigurationError(
            "An evaluator reads checkpoints. Received: evaluator without "
            "checkpoint_claim. Write --checkpoint_claim=NAME, or give the "
            "command an address of object storage."
        )
    if job.ps and job.gpus and job.kind != "jobset":
        raise ConfigurationError(
            f"The pods of kind {job.kind!r} are all alike, so servers would "
            f"hold GPUs. Received: ps={job.ps}, gpus={job.gpus}. Use "
            "--kind=jobset."
        )
