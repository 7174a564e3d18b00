"""Manifests: their text, their schemas, and what their pods are told."""

import copy
import pathlib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_tf import cli
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import yaml_text
from mgpu_tf.launch.kubernetes import KubernetesJob, manifests, objects
from tests.launch.manifests import problems
from tests.launch.pods import pods_of

GOLDEN = pathlib.Path(__file__).parent / "golden"

COMMAND = ("python", "train.py", "--checkpoint_dir=/checkpoints/a")

JOBS = {
    "jobset": KubernetesJob(
        COMMAND,
        name="mnist",
        image="registry.lab/train:1",
        workers=2,
        gpus=8,
        queue="team",
        checkpoint_claim="runs",
    ),
    "jobset_roles": KubernetesJob(
        COMMAND,
        name="clicks",
        image="registry.lab/train:1",
        workers=3,
        ps=2,
        evaluator=True,
        gpus=1,
        namespace="lab",
        cpus="4",
        memory="16Gi",
        checkpoint_claim="runs",
        checkpoint_size="100Gi",
    ),
    "job": KubernetesJob(
        COMMAND, name="mnist", image="lab/train:1", workers=2, kind="job"
    ),
    "trainjob": KubernetesJob(
        COMMAND,
        name="mnist",
        image="lab/train:1",
        workers=2,
        ps=1,
        kind="trainjob",
        queue="team",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    text = manifests(JOBS[name])
    assert text == (GOLDEN / f"{name}.yaml").read_text()
    assert list(yaml.safe_load_all(text)) == objects(JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_valid(name):
    assert problems(objects(JOBS[name])) == []


def test_the_command_prints_the_same(capsys):
    flags = ["--name=mnist", "--image=registry.lab/train:1", "--workers=2"]
    flags += ["--gpus=8", "--queue=team", "--checkpoint_claim=runs"]
    command = ["train.py", "--checkpoint_dir=/checkpoints/a"]
    assert cli.main(["kubernetes", *flags, "--", *command]) == 0
    assert capsys.readouterr().out == manifests(JOBS["jobset"])


values = st.recursive(
    st.one_of(st.text(), st.integers(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None, database=None)
@given(st.dictionaries(st.text(), values, min_size=1, max_size=3))
def test_any_value_is_read_back(value):
    assert yaml.safe_load(yaml_text.document(value)) == value


@pytest.mark.parametrize(
    "word",
    ["no", "Null", "1e3", "0x1", "1_000", "12:30", "2026-01-01", "~", "=", ""],
)
def test_a_word_stays_a_word(word):
    assert yaml.safe_load(yaml_text.document({word: [word]})) == {word: [word]}


@pytest.mark.parametrize("name", JOBS)
def test_each_pod_finds_its_place(name):
    job = JOBS[name]
    pods = pods_of(objects(job))
    views = [ClusterConfig.from_environment(pod.environment) for pod in pods]
    assert len(views) == job.roles.num_tasks
    for pod, view in zip(pods, views, strict=True):
        assert view.address == f"{pod.host}:2222"
        assert view.tasks == views[0].tasks
    counts = {task: len(a) for task, a in views[0].tasks.items()}
    assert counts == job.roles.counts
    assert len({view.task_name for view in views}) == len(views)


def test_only_workers_have_gpus():
    gpus = {
        pod.host: pod.container.get("resources", {}).get("limits", {})
        for pod in pods_of(objects(JOBS["jobset_roles"]))
    }
    assert {
        host.split("-")[1]: limits.get("nvidia.com/gpu")
        for host, limits in gpus.items()
    } == {"chief": None, "worker": 1, "ps": None, "evaluator": None}


def test_kubernetes_expands_nothing_in_a_command():
    """It makes $$ to $, and $(NAME) to the value of a variable."""
    job = KubernetesJob(
        ("sh", "-c", "echo $(HOME) $$ $x"), "a", "lab/a:1", workers=1
    )
    [pod] = pods_of(objects(job))
    assert pod.container["command"][2] == "echo $$(HOME) $$$$ $$x"


def change(name, *path, to):
    """A change of one value in the manifests of a job."""

    def changed():
        made = copy.deepcopy(objects(JOBS[name]))
        kind, *inner, last = path
        node = next(m for m in made if m["kind"] == kind)
        for step in inner:
            node = node[step]
        if to is None:
            del node[last]
        else:
            node[last] = to
        return made

    return changed


POD = ("spec", "template", "spec")
CONTAINER = (*POD, "containers", 0)
PART = ("spec", "replicatedJobs")

MISTAKES = [
    (("job", "Job", "spec", "completionMode"), "Indxed", "Indexed"),
    (("job", "Job", "spec", "completions"), None, "completions"),
    (("job", "Job", "spec", "parallelism"), 1, "must be equal"),
    (("job", "Job", "spec", "backoffLimt"), 1, "backoffLimt"),
    (("job", "Job", "spec", "backoffLimit"), "1", "integer"),
    (("job", "Job", "apiVersion"), "batch/v9", "unknown kind"),
    (("job", "Job", "metadata", "name"), "Mnist", "DNS label"),
    (("job", "Job", *POD, "restartPolicy"), "Always", "must be Never"),
    (("job", "Job", *POD, "subdomain"), "other", "not the service"),
    (
        ("job", "Job", *POD, "terminationGracePeriodSeconds"),
        5,
        "too short to save",
    ),
    (("job", "Job", *POD, "automountServiceAccountToken"), True, "a token"),
    (("job", "Job", *POD, "securityContext", "runAsNonRoot"), None, "root"),
    (("job", "Job", *POD, "volumes", 1, "name"), "shm", "no volume shared-m"),
    (
        ("job", "Job", *POD, "volumes", 1, "emptyDir", "sizeLimit"),
        "1 GB",
        "no quantity: 1 GB",
    ),
    (("job", "Job", *CONTAINER, "name"), "main", "no container node"),
    (
        ("job", "Job", *CONTAINER, "securityContext", "readOnlyRootFilesystem"),
        False,
        "can be written",
    ),
    (("job", "Service", "spec", "clusterIP"), None, "must be headless"),
    (
        ("job", "Service", "spec", "publishNotReadyAddresses"),
        False,
        "not ready have no address",
    ),
    (("job", "Service", "spec", "selector"), {"a": "b"}, "selects no pods"),
    (
        ("job", "NetworkPolicy", "spec", "podSelector"),
        {"matchLabels": {"a": "b"}},
        "no policy selects",
    ),
    (("job", "NetworkPolicy", "spec", "ingress"), [{}], "other pods reach"),
    (
        ("jobset", "JobSet", "spec", "failurePolicy", "maxRestart"),
        1,
        "unknown field maxRestart",
    ),
    (
        ("jobset", "JobSet", "spec", "failurePolicy", "rules", 0, "action"),
        "Restart",
        "not one of",
    ),
    (("jobset", "JobSet", *PART, 0, "replicas"), "1", "no int"),
    (("jobset", "JobSet", "metadata", "name"), "a" * 60, "name of a host"),
    (
        ("jobset_roles", "JobSet", *PART, 0, "dependsOn"),
        [{"name": "chief", "status": "Ready"}],
        "ps waits for chief",
    ),
    (
        ("jobset_roles", "JobSet", "spec", "successPolicy")
        + ("targetReplicatedJobs",),
        ["boss"],
        "no replicatedJob boss",
    ),
    (
        ("jobset_roles", "JobSet", *PART, 1, "name"),
        "ps",
        "have the same name",
    ),
    (
        ("trainjob", "TrainJob", "spec", "runtimeRef", "name"),
        "other",
        "names no TrainingRuntime",
    ),
    (
        ("trainjob", "TrainJob", "spec", "trainer", "numNodes"),
        3,
        "numNodes differ",
    ),
    (
        ("trainjob", "TrainingRuntime", "spec", "template")
        + (*PART, 0, "template", "metadata"),
        {},
        "is the trainer",
    ),
]


@pytest.mark.parametrize(
    ("path", "to", "part"), MISTAKES, ids=[m[2] for m in MISTAKES]
)
def test_a_mistake_in_a_manifest_is_found(path, to, part):
    found = problems(change(*path, to=to)())
    assert any(part in line for line in found), found
    assert not any("\n" in line for line in found)


NEEDED = ["--name=mnist", "--image=lab/train:1", "--workers=2"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--name="], ["lower-case letters", "name=''"]),
        (["--name=Mnist"], ["lower-case letters", "name='Mnist'"]),
        (["--name=1st"], ["begin with a letter"]),
        (["--name=a\nb"], ["name='a"]),
        ([f"--name={'a' * 60}"], ["at most", "Received: 60"]),
        (["--image="], ["registry/team/train:1"]),
        (["--image=a b"], ["image='a b'"]),
        (["--workers=0"], ["workers must be an integer of 1 or more"]),
        (["--workers=two"], ["workers='two'"]),
        (["--gpus=-1"], ["gpus must be an integer of 0 or more"]),
        (["--ps=-1"], ["ps must be an integer of 0 or more"]),
        (["--evaluator"], ["without ps", "--ps=1"]),
        (["--evaluator", "--ps=1"], ["reads checkpoints"]),
        (["--kind=jobst"], ["mean 'jobset'"]),
        (["--kind=job", "--ps=1", "--gpus=1"], ["alike", "--kind=jobset"]),
        (["--namespace=My_Team"], ["namespace='My_Team'"]),
        (["--queue=a b"], ["queue='a b'"]),
        (["--checkpoint_claim=a/b"], ["checkpoint_claim='a/b'"]),
        (["--checkpoint_size=1Gi"], ["without it", "--checkpoint_claim"]),
        (
            ["--checkpoint_claim=a", "--checkpoint_size=10GB"],
            ["checkpoint_size='10GB'", "16Gi"],
        ),
        (["--memory=16 Gi"], ["memory='16 Gi'"]),
        (["--memory=500m"], ["thousandths", "500Mi"]),
        (["--cpus=many"], ["4 or 500m"]),
        (["--shared_memory=0"], ["shared_memory='0'"]),
        (
            ["--grace_seconds=0"],
            ["grace_seconds must be an integer of 1 or more"],
        ),
        (
            ["--max_restarts=-1"],
            ["max_restarts must be an integer of 0 or more"],
        ),
        (["--user_id=0"], ["do not run as root"]),
        (["--replicas=2"], ["Unknown", "replicas"]),
    ],
    ids=" ".join,
)
def test_a_mistake_in_a_flag_is_one_line(flags, parts, capsys):
    arguments = ["kubernetes", *NEEDED, *flags, "--", "train.py"]
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("mgpu-tf: ")
    assert told.err.count("\n") == 1
    for part in parts:
        assert part in told.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (NEEDED, "and the command"),
        ([*NEEDED, "train.py", "--", "x"], "and the command"),
        ([*NEEDED[1:], "--", "x"], "needs --name"),
        ([NEEDED[0], NEEDED[2], "--", "x"], "needs --image"),
        ([*NEEDED[:2], "--", "x"], "needs --workers"),
    ],
    ids=["nothing", "before", "name", "image", "workers"],
)
def test_what_is_missing_is_named(arguments, part, capsys):
    assert cli.main(["kubernetes", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_an_evaluator_of_object_storage_needs_no_claim(capsys):
    flags = ["--ps=1", "--evaluator", "--", "train.py"]
    command = ["kubernetes", *NEEDED, *flags, "--checkpoint_dir=s3://bucket/a"]
    assert cli.main(command) == 0
    assert "persistentVolumeClaim" not in capsys.readouterr().out


@pytest.mark.parametrize("word", ["a\0b", "caf\udce9.py"])
def test_no_text(word):
    with pytest.raises(ConfigurationError, match="must be text in UTF-8"):
        KubernetesJob(("python", word), "a", "lab/a:1", workers=1)


# What the API server refuses, or what is never meant.
REFUSED = {
    "namespace": ["a.b", "A", "-a", "a" * 64, "a_b", ""],
    "queue": ["a..b", "a.-b", "a" * 64, "A", ""],
    "checkpoint_claim": ["a.", ".a", "a..b", "a/b", "a" * 254],
    "image": ["a/B", "a//b", "a:", "a:b c", "a@sha256:1", "a" * 256, "a:-b"],
    "cpus": ["0.0001", "0.5m", "4Gi", "1e3", "-1", "+1", "0", "nan", " 4"],
    "memory": ["1.5", "0.3Ki", "1GiB", "10E", "99999Ei", "1u", "500m", "1Zi"],
    "shared_memory": ["", "0", "1g", "1 Gi"],
    "user_id": [0, -1, 2**31],
    "grace_seconds": [0, 2**31],
    "max_restarts": [-1, 2**31, 2**31 // 2],
    "workers": [0, 100_001],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in REFUSED.items() for value in values],
)
def test_what_kubernetes_refuses_is_refused(field, value):
    given = {"name": "a", "image": "b", "workers": 2} | {field: value}
    with pytest.raises(ConfigurationError, match=field) as error:
        KubernetesJob(("python",), **given)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("cpus", value) for value in ("4", "0.5", "500m", "1.001")),
        *(("memory", value) for value in ("2Gi", "4G", "1.5Gi", "2E")),
        ("image", "registry.lab:5000/Team".lower() + "/train_x:1.0-a"),
        ("image", "a@sha256:" + "0" * 64),
        ("checkpoint_claim", "a.b-c.d1"),
        ("queue", "a.b"),
    ],
)
def test_what_kubernetes_takes_is_taken(field, value):
    given = {"name": "a", "image": "b", "workers": 2} | {field: value}
    assert getattr(KubernetesJob(("python",), **given), field) == value


def test_shared_memory_is_part_of_the_memory():
    with pytest.raises(ConfigurationError, match="is part of memory"):
        KubernetesJob(("x",), "a", "b", 1, memory="1Gi", shared_memory="2Gi")
