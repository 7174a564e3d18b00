"""The pods that Kubernetes, JobSet and Kubeflow make of manifests."""

import dataclasses
import re

from tests.launch.manifests import jobset_specs

_FIELD = re.compile(r"metadata\.labels\['([^']+)'\]")
_LABEL = "jobset.sigs.k8s.io/"


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod.

    Attributes:
        host: Its name in the cluster's DNS, by which other pods reach it.
        environment: The variables of its container.
        spec: What the manifest says of it.
    """

    host: str
    environment: dict
    spec: dict

    @property
    def container(self):
        """The one container."""
        [container] = self.spec["containers"]
        return container


def pods_of(objects):
    """Returns the pods of a job's objects, as the controllers make them."""
    by_kind = {made["kind"]: made for made in objects}
    made = by_kind.get("TrainJob") or by_kind.get("JobSet")
    if made is None:
        job = by_kind["Job"]
        return _pods_of_job(job["metadata"]["name"], job["spec"], {})
    name, pods = made["metadata"]["name"], []
    runtime = by_kind.get("TrainingRuntime", made)
    for spec in jobset_specs(runtime):
        for part in spec["replicatedJobs"]:
            job = dict(part["template"]["spec"])
            if made["kind"] == "TrainJob":
                job["completions"] = made["spec"]["trainer"]["numNodes"]
            job["template"] = {
                "metadata": job["template"]["metadata"],
                "spec": job["template"]["spec"]
                | {"subdomain": spec["network"]["subdomain"]},
            }
            labels = {
                f"{_LABEL}jobset-name": name,
                f"{_LABEL}replicatedjob-name": part["name"],
                f"{_LABEL}job-index": "0",
            }
            pods += _pods_of_job(f"{name}-{part['name']}-0", job, labels)
    return pods


def _pods_of_job(name, job, labels):
    pod = job["template"]["spec"]
    labels = labels | job["template"]["metadata"]["labels"]
    [container] = pod["containers"]
    return [
        Pod(
            f"{name}-{index}.{pod['subdomain']}",
            {v["name"]: _value(v, labels) for v in container["env"]}
            | {"JOB_COMPLETION_INDEX": str(index)},
            pod,
        )
        for index in range(job["completions"])
    ]


def _value(variable, labels):
    if "value" in variable:
        return variable["value"]
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    return labels[_FIELD.fullmatch(path)[1]]
