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
pods is what `mgpu_tf.cluster.kubernetes` reads.

References: JobSet (jobset.x-k8s.io/v1alpha2), Job (batch/v1), TrainJob
(trainer.kubeflow.org/v1alpha1), Kueue (kueue.x-k8s.io/queue-name).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mgpu_tf.cluster import kubernetes as environment
from mgpu_tf.cluster.place import DEFAULT_PORT, PORT
from mgpu_tf.cluster.roles import NUM_WORKERS, Roles
from mgpu_tf.errors import PREEMPTED, ConfigurationError, unknown_name
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
# RFC 1123, as names of other objects must be.
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_QUANTITY = re.compile(r"([0-9]+(\.[0-9]+)?)(m|k|[KMGTP]i|[MGTP])?")
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
    for field, least in (
        ("workers", 1),
        ("gpus", 0),
        ("ps", 0),
        ("max_restarts", 0),
        ("grace_seconds", 1),
    ):
        if getattr(job, field) < least:
            raise ConfigurationError(
                f"{field} must be {least} or more. Received: "
                f"{field}={getattr(job, field)}."
            )
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
    if not _IMAGE.fullmatch(job.image):
        raise ConfigurationError(
            "image must be such as registry/team/train:1. Received: "
            f"image={job.image!r}."
        )
    for field in ("namespace", "queue", "checkpoint_claim"):
        value = getattr(job, field)
        if value is not None and not _OBJECT.fullmatch(value):
            raise ConfigurationError(
                f"{field} must be lower-case letters, digits, dashes and "
                f"dots. Received: {field}={value!r}."
            )


def _check_quantities(job: KubernetesJob) -> None:
    for field in ("cpus", "memory", "shared_memory", "checkpoint_size"):
        value = getattr(job, field)
        if value is None:
            continue
        match = _QUANTITY.fullmatch(value)
        if match is None or float(match[1]) == 0:
            example = "4 or 500m" if field == "cpus" else "16Gi"
            raise ConfigurationError(
                f"{field} must be a quantity of Kubernetes, such as "
                f"{example}. Received: {field}={value!r}."
            )
        if match[3] == "m" and field != "cpus":
            raise ConfigurationError(
                f"{field} must be in bytes; m means thousandths. Received: "
                f"{field}={value!r}. Write {match[1]}Mi."
            )


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
    if job.evaluator and job.checkpoint_claim is None:
        raise ConfigurationError(
            "An evaluator reads checkpoints. Received: evaluator without "
            "checkpoint_claim. Write --checkpoint_claim=NAME."
        )
    if job.ps and job.gpus and job.kind != "jobset":
        raise ConfigurationError(
            f"The pods of kind {job.kind!r} are all alike, so servers would "
            f"hold GPUs. Received: ps={job.ps}, gpus={job.gpus}. Use "
            "--kind=jobset."
        )
