"""Jobs on a real Slurm of three nodes, against one device."""

import json
import re
import time

import pytest
from hypothesis import given, settings

from mgpu_tf.cluster.environments import node_list
from mgpu_tf.launch.slurm import SlurmJob, batch_script
from tests import clusters, pages
from tests.cluster import test_node_list
from tests.launch import losses
from tests.slurm import NODES, URGENT, Slurm

pytestmark = pytest.mark.full

TRAIN = (
    *("train", "--epochs=2", "--global_batch_size=48", "--optimizer=adam"),
    "--learning_rate=0.01",
)


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as running:
        yield running


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_device")
    return clusters.report_of_one_device(TRAIN, folder)


@pytest.mark.parametrize("text", test_node_list.LISTS)
def test_node_lists(text, slurm):
    told = slurm.run("scontrol", "show", "hostnames", text)
    assert node_list.expand(text) == told.split()


@settings(deadline=None, database=None, max_examples=40)
@given(test_node_list.node_lists)
def test_any_node_list(slurm, example):
    text, expected = example
    items = test_node_list.items_of(text)
    # Slurm itself takes no name behind brackets.
    if any("[" in item and not item.endswith("]") for item in items):
        return
    assert slurm.run("scontrol", "show", "hostnames", text).split() == expected


# What a task sees, without TensorFlow. It holds its port until all have one
# and each has reached those of its job.
TASK = """
import json, os, pathlib, socket, sys, time

from mgpu_tf.cluster.config import ClusterConfig
cluster = ClusterConfig.from_environment()
host, port = cluster.address.split(":")
server = socket.create_server((host, int(port)))
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
told = [socket.gethostname(), cluster.task_name, cluster.tasks, cluster.source]
name = f"{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_PROCID']}"
deadline = time.monotonic() + 120

def meet(kind):
    new = folder / (name + ".new")
    new.write_text(json.dumps(told))
    new.rename(folder / (name + kind))
    while len(list(folder.glob("*" + kind))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)

meet(".json")
for addresses in cluster.tasks.values():
    for address in addresses:
        host, port = address.split(":")
        socket.create_connection((host, int(port)), 30).close()
meet(".met")
"""


def see(slurm, folder, commands, count):
    """Runs tasks of several jobs at once; returns what each task saw."""
    script = folder / "task.py"
    script.write_text(TASK)
    started = [
        slurm.popen(
            "srun", *flags, clusters.PYTHON, script, folder, str(count), env=env
        )
        for flags, env in commands
    ]
    assert [p.wait(clusters.LIMIT_SECONDS) for p in started] == [0] * len(
        started
    )
    return [json.loads(file.read_text()) for file in folder.glob("*.json")]


def address_of(cluster, task):
    name, index = task.split()
    return cluster[name][int(index)]


@pytest.mark.parametrize(
    "flags",
    [
        ["-N3", "-n3"],
        ["-N3", "-n7"],
        ["-N3", "-n5", "--distribution=cyclic"],
        ["-N2", "-n6", "--distribution=plane=2"],
        ["-N3", "-n5", "--distribution=arbitrary", "-wn10,n08,n10,n09,n10"],
    ],
    ids=" ".join,
)
def test_tasks_agree_and_are_where_they_say(flags, slurm, tmp_path):
    count = int(flags[1].removeprefix("-n"))
    seen = see(slurm, tmp_path, [(flags, {})], count)
    assert len(seen) == count
    for host, task, cluster, source in seen:
        assert cluster == seen[0][2]
        assert address_of(cluster, task).startswith(f"{host}:")
        assert source.startswith("Slurm job ")
    assert len({task for _, task, _, _ in seen}) == count


def test_each_node_gets_a_worker_beside_the_servers(slurm, tmp_path):
    env = {"MGPU_TF_NUM_PS": "2"}
    flags = ["-N3", "-n6", "--ntasks-per-node=2", "--distribution=cyclic"]
    seen = see(slurm, tmp_path, [(flags, env)], 6)
    hosts = sorted(host for host, task, _, _ in seen if "worker" in task)
    assert hosts == list(NODES)
    tasks = sorted(task for _, task, _, _ in seen if "worker" not in task)
    assert tasks == ["chief 0", "ps 0", "ps 1"]


def test_two_jobs_at_once_do_not_meet(slurm, tmp_path):
    flags = ["-N3", "-n3"]
    seen = see(slurm, tmp_path, [(flags, {}), (flags, {})], 6)
    jobs = {source: cluster for _, _, cluster, source in seen}
    first, second = (set(cluster["worker"]) for cluster in jobs.values())
    assert {a.split(":")[0] for a in first} == set(NODES)
    assert {a.split(":")[0] for a in second} == set(NODES)
    assert not first & second


@pytest.mark.parametrize(
    ("flags", "visible"),
    [
        (["-n2", "--gpus-per-node=4"], 4),
        (["-n4", "--gpus-per-task=2"], 2),
        (["-n4", "--gpus-per-node=4", "--gpu-bind=single:1"], 1),
    ],
    ids=["one task", "per task", "bound"],
)
def test_workers_with_gpus_of_their_own(flags, visible, slurm):
    program = ("--ntasks-per-node=2", clusters.PYTHON, "-c", GPUS)
    told = slurm.run("srun", "-N2", *flags, *program)
    assert told.splitlines().count(f"GPUs: {visible}") == int(flags[0][2:])


def test_workers_that_share_gpus_are_refused(slurm):
    flags = ("-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-node=4")
    told = slurm.run("srun", *flags, clusters.PYTHON, "-c", GPUS, check=False)
    assert "each of 2 workers on n08 sees 4 of its 4 GPUs" in told
    assert "--gpus-per-task=2" in told


GPUS = """
import os
from mgpu_tf.cluster.config import ClusterConfig
ClusterConfig.from_environment()
print("GPUs:", len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
"""


def test_a_hint_where_srun_is_not_used(slurm):
    code = (
        "from mgpu_tf.cluster.config import ClusterConfig;"
        "print(ClusterConfig.from_environment())"
    )
    told = slurm.run("salloc", "-N2", clusters.PYTHON, "-c", code)
    assert "has 2 nodes" in told
    assert "srun was not used" in told
    assert "None" in told.splitlines()


# The full tier has the script of all platforms on the same nodes.
@pytest.mark.matrix
def test_the_losses_of_one_device(slurm, one_device, tmp_path):
    told = slurm.run(
        *("srun", "-N3", "-n3", "mgpu-tf", *TRAIN, "--strategy=auto"),
        f"--output_dir={tmp_path}",
    )
    report = clusters.report_in(tmp_path)
    assert report["num_workers"] == 3
    for own, other in zip(report["epochs"], one_device["epochs"], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert report["examples_seen"] == one_device["examples_seen"]
    assert report["test"]["loss"] == pytest.approx(
        one_device["test"]["loss"], rel=1e-4
    )
    for index in range(3):
        assert f"3 workers; this is worker {index} at {NODES[index]}:" in told


def test_parameter_servers(slurm, one_device, tmp_path):
    told = slurm.run(
        *("srun", "-N2", "-n4", "mgpu-tf", *TRAIN, "--num_ps=1"),
        # Every gradient is of the newest weights.
        *("--max_staleness=0", f"--output_dir={tmp_path}"),
    )
    report = clusters.report_in(tmp_path)
    assert "1 chief, 2 workers, 1 ps; this is ps 0" in told
    assert report["strategy"] == "parameter_server"
    assert report["num_workers"] == 2
    assert report["examples_seen"] == one_device["examples_seen"]
    assert report["global_step"] == one_device["global_step"]
    for own, other in zip(report["epochs"], one_device["epochs"], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_script_of_all_platforms(slurm, tmp_path):
    command = (clusters.PYTHON, losses.SCRIPT, str(tmp_path))
    told = slurm.run("srun", "-N3", "-n3", *command)
    for index in range(3):
        line = f"3 workers; this is worker {index} at {NODES[index]}:"
        assert line in told
    losses.compare(tmp_path, told)


def submit(slurm, folder, command, **options):
    """Submits the script of `mgpu-tf slurm`; returns the job's number."""
    folder.mkdir(exist_ok=True)
    script = folder / "job.sbatch"
    job = SlurmJob(command, log_dir=str(folder / "logs"), **options)
    script.write_text(batch_script(job))
    return slurm.run(
        *("sbatch", "--parsable", f"--output={folder}/batch.out"),
        str(script),
        cwd=folder,
    ).strip()


def logs_in(folder):
    files = [folder / "batch.out", *sorted((folder / "logs").glob("*"))]
    return "\n".join(
        f"--- {file.name}\n{file.read_text()}"
        for file in files
        if file.exists()
    )


def test_a_job_that_is_queued_again_resumes_bit_for_bit(slurm, tmp_path):
    """Three jobs at once on the same nodes; two of them are interrupted."""
    jobs = {}
    for name in ("control", "requeued", "signalled"):
        folder = tmp_path / name
        command = (
            *("mgpu-tf", "train", "--strategy=auto", "--model=cnn"),
            *("--epochs=12", "--save_every_steps=10"),
            *(f"--checkpoint_dir={folder}/saved", f"--output_dir={folder}"),
        )
        jobs[name] = submit(slurm, folder, command, nodes=2, name=name)

    def checkpoints(name):
        return list((tmp_path / name / "saved").glob("step-*"))

    waiting = {
        "requeued": ("scontrol", "requeue"),
        # As Slurm does it some time before the time limit.
        "signalled": ("scancel", "--batch", "--signal=USR1"),
    }
    deadline = time.monotonic() + clusters.LIMIT_SECONDS
    while waiting:
        for name in list(waiting):
            assert not (tmp_path / name / "report.json").exists(), "too late"
            if checkpoints(name):
                slurm.run(*waiting.pop(name), jobs[name])
        assert time.monotonic() < deadline, [*map(logs_in, tmp_path.iterdir())]
        time.sleep(0.2)
    ends = {name: slurm.wait(job) for name, job in jobs.items()}
    logs = {name: logs_in(tmp_path / name) for name in jobs}
    assert ends["control"] == ("COMPLETED", 0), logs["control"]
    assert ends["requeued"] == ("COMPLETED", 1), logs["requeued"]
    assert ends["signalled"] == ("COMPLETED", 1), logs["signalled"]
    reports = {name: clusters.report_in(tmp_path / name) for name in jobs}
    for name in ("requeued", "signalled"):
        assert "resumed at step" in logs[name]
        assert reports[name]["restarts"] == 1
        assert (
            reports[name]["weights_sha256"]
            == reports["control"]["weights_sha256"]
        )
        for own, other in zip(
            reports[name]["epochs"], reports["control"]["epochs"], strict=True
        ):
            assert own["loss"] == other["loss"]


def test_the_commands_of_the_page(slurm, tmp_path):
    """Each runs as it stands in docs/slurm.md, and its jobs complete."""
    blocks = pages.blocks("slurm.md", "sh")
    told = slurm.run("bash", "-euc", "\n".join(blocks), cwd=tmp_path)
    jobs = re.findall(r"Submitted batch job (\d+)", told)
    assert len(jobs) == 3
    assert "#SBATCH --gpus-per-node=8" in told
    for job in jobs:
        assert slurm.wait(job) == ("COMPLETED", 0), logs_in(tmp_path)
    assert len(list((tmp_path / "logs").glob(f"mgpu-tf-{jobs[2]}-*.log"))) == 4


# Saves and ends with 75 when it is told to; ends well when it is back.
SAVES = """
import os, signal, sys, time
if os.environ.get("SLURM_RESTART_COUNT"):
    print("back")
    sys.exit()
def save(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


def wait_until_ready(folder, tasks=2):
    deadline = time.monotonic() + clusters.LIMIT_SECONDS
    while logs_in(folder).count("ready") < tasks:
        assert time.monotonic() < deadline, logs_in(folder)
        time.sleep(0.2)


def saved_and_back(slurm, job, folder):
    """Waits for a job that was interrupted once."""
    assert slurm.wait(job) == ("COMPLETED", 1), logs_in(folder)
    for log in (folder / "logs").glob("*.log"):
        lines = log.read_text().splitlines()
        own = [line for line in lines if not line.startswith("slurmstepd")]
        assert own == ["ready", "saved", "back"], logs_in(folder)
    assert len(list((folder / "logs").glob("*.log"))) == 2


def test_a_job_saves_before_its_time_limit(slurm, tmp_path):
    job = submit(
        slurm,
        tmp_path,
        (clusters.PYTHON, "-c", SAVES),
        nodes=2,
        time="2",
        signal_seconds=60,
    )
    saved_and_back(slurm, job, tmp_path)


def test_a_job_that_is_preempted_saves(slurm, tmp_path):
    command = (clusters.PYTHON, "-c", SAVES)
    job = submit(slurm, tmp_path, command, nodes=2)
    wait_until_ready(tmp_path)
    slurm.run("srun", "-N3", "--exclusive", f"--partition={URGENT}", "true")
    saved_and_back(slurm, job, tmp_path)
    # Else a later failure would queue it again as well.
    assert "PreemptTime=None" in slurm.run("scontrol", "show", "job", job)


# Says how many tasks there are; the third time, it ends with all nodes.
COUNTS = """
import os, signal, sys, time
from mgpu_tf.cluster import environments
workers = environments.find(os.environ).roles.num_workers
print("ready", os.environ["SLURM_JOB_NUM_NODES"], workers, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
time.sleep(600 if os.environ.get("SLURM_RESTART_COUNT") != "2" else 0)
"""


def test_nodes_go_and_come_back(slurm, tmp_path):
    """Three nodes, then two, and three when one is idle again."""
    job = submit(
        slurm,
        tmp_path,
        (clusters.PYTHON, "-c", COUNTS),
        nodes=3,
        min_nodes=2,
        grow_minutes=1,
    )
    wait_until_ready(tmp_path, 3)
    node = f"nodename={NODES[2]}"
    # Drained, or it is back as soon as its daemon reports.
    for state in ("drain", "down"):
        slurm.run("scontrol", "update", node, f"state={state}", "reason=test")
    wait_until_ready(tmp_path, 5)
    slurm.run("scontrol", "update", node, "state=resume")
    assert slurm.wait(job) == ("COMPLETED", 2), logs_in(tmp_path)
    said = re.findall(r"^ready (\d) (\d)$", logs_in(tmp_path), re.M)
    assert sorted(said) == [("2", "2")] * 2 + [("3", "3")] * 6


def test_a_cancelled_job_stays_cancelled(slurm, tmp_path):
    job = submit(slurm, tmp_path, (clusters.PYTHON, "-c", SAVES), nodes=2)
    wait_until_ready(tmp_path)
    slurm.run("scancel", job)
    assert slurm.wait(job) == ("CANCELLED", 0)
    time.sleep(2)
    assert slurm.state(job) == ("CANCELLED", 0)
    assert logs_in(tmp_path).count("saved") == 2


def test_a_failure_ends_all_tasks_and_starts_them_again(slurm, tmp_path):
    folder = tmp_path / "100% 'mine' $(touch owned)"
    # Slurm may miss a task that it has not started yet, so one fails later.
    begun = f"{tmp_path}/begun-$try"
    code = (
        "try=${SLURM_RESTART_COUNT:-0}; "
        'if [ "$try" = 2 ]; then echo done; exit; fi; '
        f'if [ "$SLURM_PROCID" = 0 ]; then touch "{begun}"; sleep 600; '
        f'echo slept; exit; fi; until [ -e "{begun}" ]; do sleep 0.1; done; '
        "exit 3"
    )
    job = submit(
        slurm, folder, ("bash", "-c", code), nodes=2, name="t", max_restarts=2
    )
    assert slurm.wait(job) == ("COMPLETED", 2), logs_in(folder)
    for task in range(2):
        log = folder / "logs" / f"t-{job}-{task}.log"
        lines = log.read_text().splitlines()
        assert lines[-1] == "done"
        assert "slept" not in lines
    assert not list(tmp_path.rglob("owned"))
