"""What is wrong with manifests: own checks beside kubernetes-validate.

`kubernetes-validate` knows the schemas of Kubernetes itself: names of fields
and their types. It knows neither what values mean to each other, nor the
objects of JobSet and of Kubeflow. `problems` adds:

- the fields of JobSet, TrainingRuntime and TrainJob that are used here, by
  name and type (`_OWN`); the Jobs in them are checked as Jobs;
- names, quantities, and values that are one of a few;
- what an object says of another: service and pods, policy and pods, volumes
  and mounts, roles that wait for roles, TrainJob and TrainingRuntime;
- what pods may do on their node.
"""

import re

import kubernetes_validate

VERSION = "1.31"

_LABEL_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
_REASONS = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}

# Fields and their types: a type, a set of values, an object, a list of one.
_FAILURE_POLICY = {
    "maxRestarts": int,
    "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
    "rules": [
        {
            "name": str,
            "action": {
                "FailJobSet",
                "RestartJobSet",
                "RestartJobSetAndIgnoreMaxRestarts",
            },
            "onJobFailureReasons": [_REASONS],
            "targetReplicatedJobs": [str],
        }
    ],
}
_JOBSET_SPEC = {
    "network": {
        "enableDNSHostnames": bool,
        "publishNotReadyAddresses": bool,
        "subdomain": str,
    },
    "successPolicy": {
        "operator": {"All", "Any"},
        "targetReplicatedJobs": [str],
    },
    "failurePolicy": _FAILURE_POLICY,
    "replicatedJobs": [
        {
            "name": str,
            "replicas": int,
            "dependsOn": [{"name": str, "status": {"Ready", "Complete"}}],
            "template": {"metadata": dict, "spec": dict},
        }
    ],
}
_OWN = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _JOBSET_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int},
        "template": {"metadata": dict, "spec": _JOBSET_SPEC},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {
            "apiGroup": {"trainer.kubeflow.org"},
            "kind": {"TrainingRuntime", "ClusterTrainingRuntime"},
            "name": str,
        },
        "trainer": {"image": str, "command": [str], "numNodes": int},
    },
}


def problems(objects):
    """Returns what is wrong with the objects of a job, a line each."""
    found = []
    for made in objects:
        kind, name = made.get("kind"), made.get("metadata", {}).get("name")
        where = f"{kind} {name}"
        if not _LABEL_NAME.fullmatch(str(name)):
            found.append(f"{where}: no name of a DNS label")
        own = _OWN.get((made.get("apiVersion"), kind))
        if own is None:
            found += _invalid(made, where)
        else:
            spec = made.get("spec", {})
            found += _misfits(spec, own, f"{where}: spec")
    if found:
        return found
    for where, spec in jobs_of(objects):
        found += [f"{where}: {line}" for line in _of_job(spec)]
    for check in (_of_jobsets, _of_trainjobs, _of_network):
        found += check(objects)
    return found


def jobs_of(objects):
    """Yields the place and the spec of each Job, also those in a JobSet."""
    for made in objects:
        where = f"{made['kind']} {made['metadata']['name']}"
        if made["kind"] == "Job":
            yield where, made["spec"]
        for jobset in jobset_specs(made):
            for part in jobset["replicatedJobs"]:
                spec = part["template"]["spec"]
                if made["kind"] == "TrainingRuntime":
                    # Kubeflow's controller sets both.
                    nodes = made["spec"]["mlPolicy"]["numNodes"]
                    spec = {"completions": nodes, "parallelism": nodes} | spec
                yield f"{where}, {part['name']}", spec


def jobset_specs(made):
    """Returns the specs of JobSets in an object."""
    if made["kind"] == "JobSet":
        return [made["spec"]]
    if made["kind"] == "TrainingRuntime":
        return [made["spec"]["template"]["spec"]]
    return []


def _invalid(made, where):
    try:
        kubernetes_validate.validate(made, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(map(str, error.path))
        return [f"{where}: {path}: {error.message.splitlines()[0]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"{where}: unknown kind {made.get('apiVersion')}"]
    return []


def _misfits(value, rule, where):
    if isinstance(rule, set):
        return [] if value in rule else [f"{where}: not one of {sorted(rule)}"]
    if isinstance(rule, type):
        fits = isinstance(value, rule) and type(value) in (rule, dict)
        return [] if fits else [f"{where}: no {rule.__name__}"]
    if isinstance(rule, list):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [
            line
            for index, member in enumerate(value)
            for line in _misfits(member, rule[0], f"{where}.{index}")
        ]
    if not isinstance(value, dict):
        return [f"{where}: no object"]
    found = [f"{where}: unknown field {n}" for n in value if n not in rule]
    for name, member in value.items():
        if name in rule:
            found += _misfits(member, rule[name], f"{where}.{name}")
    return found


def _of_job(spec):
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}}
    found = _invalid(job | {"spec": spec}, "as a Job")
    if found:
        return found
    if spec.get("completionMode") != "Indexed":
        found.append("completionMode must be Indexed")
    count = spec.get("completions", 0)
    if count < 1 or count != spec.get("parallelism"):
        found.append("completions and parallelism must be equal, 1 or more")
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        if rule["action"] not in ("FailJob", "Ignore", "Count", "FailIndex"):
            found.append(f"unknown action {rule['action']}")
        own = rule.get("onExitCodes", {}).get("containerName")
        names = [c["name"] for c in spec["template"]["spec"]["containers"]]
        if own is not None and own not in names:
            found.append(f"no container {own}")
    return found + _of_pod(spec["template"]["spec"])


def _of_pod(pod):
    found = []
    if pod.get("restartPolicy") != "Never":
        found.append("restartPolicy must be Never beside a podFailurePolicy")
    if pod.get("terminationGracePeriodSeconds", 30) < 60:
        found.append("terminationGracePeriodSeconds is too short to save")
    if pod.get("automountServiceAccountToken") is not False:
        found.append("pods get a token of the service account")
    rules = pod.get("securityContext", {})
    if rules.get("runAsNonRoot") is not True or not rules.get("runAsUser"):
        found.append("pods run as root")
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        if own.get("readOnlyRootFilesystem") is not True:
            found.append("the root file system can be written")
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("privileges can be gained")
        mounts = {m["mountPath"]: m for m in container.get("volumeMounts", [])}
        for path in ("/tmp", "/dev/shm"):
            if path not in mounts:
                found.append(f"nothing is mounted at {path}")
        for mount in mounts.values():
            if mount["name"] not in volumes:
                found.append(f"no volume {mount['name']}")
        for amounts in container.get("resources", {}).values():
            for name, amount in amounts.items():
                if not _QUANTITY.fullmatch(str(amount)):
                    found.append(f"{name}: no quantity: {amount}")
    for volume in pod.get("volumes", []):
        size = volume.get("emptyDir", {}).get("sizeLimit", "1")
        if not _QUANTITY.fullmatch(size):
            found.append(f"{volume['name']}: no quantity: {size}")
    return found


def _of_jobsets(objects):
    found = []
    for made in objects:
        name = made["metadata"]["name"]
        for spec in jobset_specs(made):
            names = [part["name"] for part in spec["replicatedJobs"]]
            if len(set(names)) != len(names):
                found.append("replicatedJobs have the same name")
            for index, part in enumerate(spec["replicatedJobs"]):
                for on in part.get("dependsOn", []):
                    if on["name"] not in names[:index]:
                        found.append(f"{part['name']} waits for {on['name']}")
                count = part["template"]["spec"].get("completions", 1)
                host = f"{name}-{part['name']}-0-{count - 1}"
                if not _LABEL_NAME.fullmatch(host):
                    found.append(f"no name of a host: {host}")
            rules = spec["failurePolicy"]["rules"]
            for policy in (spec.get("successPolicy", {}), *rules):
                for target in policy.get("targetReplicatedJobs", []):
                    if target not in names:
                        found.append(f"no replicatedJob {target}")
    return found


def _of_trainjobs(objects):
    by_kind = {made["kind"]: made for made in objects}
    if "TrainJob" not in by_kind:
        return []
    runtime, found = by_kind["TrainingRuntime"], []
    trainjob = by_kind["TrainJob"]["spec"]
    if trainjob["runtimeRef"]["name"] != runtime["metadata"]["name"]:
        found.append("runtimeRef names no TrainingRuntime")
    [part] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    labels = part["template"].get("metadata", {}).get("labels", {})
    if labels.get(label) != "trainer":
        found.append("no replicatedJob is the trainer")
    containers = part["template"]["spec"]["template"]["spec"]["containers"]
    if part["name"] != "node" or containers[0]["name"] != "node":
        found.append("the trainer must be named node")
    if trainjob["trainer"]["numNodes"] != runtime["spec"]["mlPolicy"].get(
        "numNodes"
    ):
        found.append("numNodes differ")
    return found


def _of_network(objects):
    found = []
    jobs = list(jobs_of(objects))
    for made in objects:
        spec = made.get("spec", {})
        if made["kind"] == "Service":
            if spec.get("clusterIP") != "None":
                found.append("the service must be headless")
            if spec.get("publishNotReadyAddresses") is not True:
                found.append("pods that are not ready have no address")
            for where, job in jobs:
                if not _selects(spec.get("selector", {}), job):
                    found.append(f"the service selects no pods of {where}")
                if (
                    job["template"]["spec"].get("subdomain")
                    != (made["metadata"]["name"])
                ):
                    found.append(f"{where}: subdomain is not the service")
    policies = [m["spec"] for m in objects if m["kind"] == "NetworkPolicy"]
    for where, job in jobs:
        own = [
            p
            for p in policies
            if _selects(p["podSelector"].get("matchLabels", {}), job)
        ]
        if not own:
            found.append(f"no policy selects the pods of {where}")
        for policy in own:
            for rule in policy.get("ingress", []):
                peers = rule.get("from", [])
                if not peers or any("podSelector" not in p for p in peers):
                    found.append(f"other pods reach those of {where}")
    return found


def _selects(selector, job):
    labels = job["template"]["metadata"]["labels"]
    return bool(selector) and selector.items() <= labels.items()
